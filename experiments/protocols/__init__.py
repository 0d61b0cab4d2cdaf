"""Every paper's settings as data, each with its source; ``resolve`` makes a config of them.

A module holds the protocols of a task or two; ``TASKS`` names them all.

Sources: *GATO*, Goldstein, Han & Ranganath, "Gates Are Not the Only Option"; *UR*, Gu et al.,
"Improving the Gating Mechanism of Recurrent Neural Networks"; *h-detach*, Kanuparthi et al.,
"h-detach: Modifying the LSTM Gradient Towards Better Optimization", and its published code.
"ours" stands where the source gives nothing, with the reason.
"""

from experiments.protocols.resolver import TASKS, resolve
from experiments.protocols.settings import Protocol, Sourced

__all__ = ["TASKS", "Protocol", "Sourced", "resolve"]
