"""Recall: its own settings, those of the DNC's published example and of the NTM's tasks.

*DNC*: Graves et al., 2016, and the settings of ``train.py`` of its authors' code, whose task is
repeat copy. *NTM*: Graves, Wayne & Danihelka, 2014, "Neural Turing Machines".
"""

from __future__ import annotations

import dataclasses
from typing import Any

from experiments.settings.fields import setting
from experiments.settings.resolver import Experiment
from experiments.settings.sources import LIBRARY_CELLS, Protocol, Sourced


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecallSettings:
    """Patterns of random bits, with fresh ones at every step."""

    layout: str = setting(
        "what is asked: the pattern several times (repeat_copy), or the item of a list that came "
        "after the one shown (associative)",
        choices=("repeat_copy", "associative"),
    )
    bits: int = setting("the bits of each step of a pattern", least=1)
    min_length: int = setting("the fewest steps of a pattern, or items of a list", least=1)
    max_length: int = setting("the most of them", least=1)
    min_repeats: int = setting(
        "how often a pattern is asked for, at least", least=1, needs=("layout", ("repeat_copy",))
    )
    max_repeats: int = setting("and at most", least=1, needs=("layout", ("repeat_copy",)))
    item_steps: int = setting("the steps of an item", least=1, needs=("layout", ("associative",)))
    held_out_sequences: int = setting("the size of the held-out set", least=1)


_DNC = {
    "cell": Sourced("dnc", "DNC code"),
    "layout": Sourced("repeat_copy", "DNC code: its only task"),
    "bits": Sourced(4, "DNC code: num_bits"),
    "min_length": Sourced(1, "DNC code"),
    "max_length": Sourced(2, "DNC code"),
    "min_repeats": Sourced(1, "DNC code"),
    "max_repeats": Sourced(2, "DNC code"),
    "item_steps": Sourced(3, "NTM 4.3: three vectors; not of repeat copy"),
    "held_out_sequences": Sourced(1000, "ours: a standard error of bits near half a percent"),
    "hidden_size": Sourced(64, "DNC code"),
    "embedding": Sourced(0, "the inputs are bits"),
    "decoder": Sourced((), "DNC: one linear map of the controller's state and the reads"),
    "steps": Sourced(100_000, "DNC code: num_training_iterations"),
    "batch_size": Sourced(16, "DNC code"),
    "learning_rates": Sourced((1e-4,), "DNC code"),
    "optimizer": Sourced("rmsprop", "DNC code; ours: torch's decay 0.99, epsilon 1e-8"),
    "clip_norm": Sourced(50.0, "DNC code: max_grad_norm, of a sum where ours is a mean"),
    "eval_every": Sourced(1000, "ours: 100 points on the curve"),
}

_PROTOCOLS = {
    "dnc": Protocol(settings=_DNC, cells=LIBRARY_CELLS),
    "ntm": Protocol(
        settings={
            **_DNC,
            "cell": Sourced("lstm", "NTM 4.3: the LSTM that the NTM is compared with"),
            "layout": Sourced("associative", "NTM 4.3"),
            "bits": Sourced(6, "NTM 4.3: three six-bit vectors"),
            "min_length": Sourced(2, "NTM 4.3: from 2 items"),
            "max_length": Sourced(6, "NTM 4.3: to 6"),
            "hidden_size": Sourced(256, "NTM Table 3: the LSTM's; ours: one layer, not three"),
            "clip_norm": Sourced(0.0, "ours: NTM 4.6 clips entries of the gradient; --clip_value"),
            "clip_value": Sourced(10.0, "NTM 4.6: to (-10, 10); ours: of the mean loss"),
            "momentum": Sourced(0.9, "NTM 4.6"),
            "optimizer": Sourced("rmsprop", "NTM 4.6; ours: torch's, decay 0.99, not centred"),
            "learning_rates": Sourced((1e-4,), "ours: as the DNC's code"),
            "batch_size": Sourced(16, "ours: as the DNC's code"),
            "steps": Sourced(100_000, "ours: as the DNC's code"),
        },
        cells=LIBRARY_CELLS,
    ),
    "small": Protocol(
        settings={
            **_DNC,
            "bits": Sourced(6, "ours: more patterns than can be learnt by heart"),
            "min_length": Sourced(2, "ours: a size that two cores learn in minutes"),
            "max_length": Sourced(4, "ours: as min_length"),
            "max_repeats": Sourced(3, "ours: as min_length"),
            "steps": Sourced(4000, "ours: as min_length"),
            "batch_size": Sourced(16, "DNC code"),
            "learning_rates": Sourced((2e-3,), "ours: as min_length"),
            "optimizer": Sourced("adam", "ours: as min_length"),
            "clip_norm": Sourced(1.0, "ours: as min_length"),
            "eval_every": Sourced(250, "ours: points on the curve"),
        },
        cells=LIBRARY_CELLS,
    ),
}


def _task() -> Any:
    from experiments.recall.task import RecallTask

    return RecallTask


RECALL = Experiment("recall", RecallSettings, _task, _PROTOCOLS)
