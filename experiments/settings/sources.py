"""What protocols are made of: every paper's settings as data, each with its source.

Sources: *GATO*, Goldstein, Han & Ranganath, "Gates Are Not the Only Option"; *UR*, Gu et al.,
"Improving the Gating Mechanism of Recurrent Neural Networks"; *h-detach*, Kanuparthi et al.,
"h-detach: Modifying the LSTM Gradient Towards Better Optimization", and its published code.
"ours" stands where the source gives nothing, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from experiments.settings.fields import Sourced

Settings = Mapping[str, Sourced]


class Protocol(NamedTuple):
    """The settings of a task that have no default or another one, and those of its cells by
    family: ``"gato"``, and ``"*"`` for any other."""

    settings: Settings
    cells: Mapping[str, Settings]


_TORCH = {
    "init": Sourced("torch", "GATO B.2: default PyTorch initializations for LSTM and GRU"),
    "bias_vectors": Sourced(2, "GATO 5.2: the counts are torch's, with two bias vectors"),
    "forget_bias": Sourced(0.0, "GATO B.2: torch's default adds none"),
    "reset": Sourced("after", "GATO 5.1: torch's nn.GRU"),
}
_GATO = {
    "init": Sourced("library", "GATO B.2: U[-0.1, 0.1] for all recurrent parameters"),
    "bias_vectors": Sourced(1, "GATO 5.2: the count of 138,752 has one bias for each map"),
    "lambda_": Sourced(0.7, "GATO 5.1"),
    "s_update": Sourced("accumulate", "GATO 4.1"),
}
_GATES = {
    "downsize": Sourced(16, "UR D: C = 16 for the synthetic tasks and the images"),
    "tmax": Sourced("hidden_size", "ours: UR B.3 says proportional to the hidden size"),
}
_LIBRARY = {
    "init": Sourced("library", "ours: UR does not state it; the library's own"),
    "bias_vectors": Sourced(1, "ours: UR prints one bias for each gate"),
    "forget_bias": Sourced(1.0, "UR Listing 1"),
    "reset": Sourced("before", "ours: the authors' later code resets before the product"),
}
_HDETACH = {
    "init": Sourced("torch", "h-detach code: every parameter U(±1/sqrt(H))"),
    "bias_vectors": Sourced(2, "h-detach code: a bias with each linear map"),
    "forget_bias": Sourced(0.0, "h-detach code: none"),
    "reset": Sourced("after", "ours: torch's, like the rest; the paper has no GRU"),
}

# How cells start, by family: as the source of a protocol starts them.
TORCH_CELLS = {"gato": _GATO, "*": {**_TORCH, **_GATES}}
LIBRARY_CELLS = {"gato": _GATO, "*": {**_LIBRARY, **_GATES}}
HDETACH_CELLS = {"gato": _GATO, "*": {**_HDETACH, **_GATES}}
