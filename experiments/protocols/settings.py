"""What protocols are made of, and the settings that tasks share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Sourced(NamedTuple):
    """A setting and where it comes from."""

    value: Any
    source: str


Settings = Mapping[str, Sourced]


class Protocol(NamedTuple):
    """The settings of a task, and those of its cells by family (``"*"``: any other)."""

    settings: Settings
    cells: Mapping[str, Settings]


ANY = {
    "seed": Sourced(0, "ours: the first seed is arbitrary"),
    "seeds": Sourced(1, "ours: the papers run three and more, one is quicker; see --seeds"),
    "clip_value": Sourced(0.0, "none in any of the papers' synthetic tasks"),
    "weight_decay": Sourced(0.0, "GATO B.6: none in experiment 1; none in UR and h-detach"),
    "halve_every": Sourced(0, "GATO B.3: a rule of experiment 2 alone"),
    "patience": Sourced(0, "ours: every paper trains for a given time"),
    "keep_best": Sourced(False, "ours: the curves show the last parameters, so does the result"),
    "detach_prob": Sourced(0.0, "h-detach only"),
    "detach_state": Sourced("feedback", "h-detach, Algorithm 1: h; ours for GATO: r feeds back"),
    "detach_per_example": Sourced(False, "h-detach code: one draw per step for the batch"),
    "detach_off_steps": Sourced(0, "h-detach: not in the paper; the later code has 39 epochs"),
    "damp_prob": Sourced(0.0, "ours: off; the expectation of h-detach, its Corollary 1"),
    "zoneout_c": Sourced(0.0, "none in any of the papers' synthetic tasks"),
    "zoneout_h": Sourced(0.0, "none in any of the papers' synthetic tasks"),
    "dropout": Sourced(0.0, "none but beside zoneout in UR D.2"),
    "dtype": Sourced("float32", "the papers' frameworks default to it"),
    "backend": Sourced("auto", "ours: the fastest form of the same mathematics"),
}

_TORCH = {
    "init": Sourced("torch", "GATO B.2: default PyTorch initializations for LSTM and GRU"),
    "bias_vectors": Sourced(2, "GATO 5.2: the counts are torch's, with two bias vectors"),
    "forget_bias": Sourced(0.0, "GATO B.2: torch's default adds none"),
    "reset": Sourced("after", "GATO 5.1: torch's nn.GRU"),
}
GATO_CELL = {
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
TORCH_CELLS = {"gato": GATO_CELL, "*": {**_TORCH, **_GATES}}
LIBRARY_CELLS = {"gato": GATO_CELL, "*": {**_LIBRARY, **_GATES}}
HDETACH_CELLS = {"gato": GATO_CELL, "*": {**_HDETACH, **_GATES}}
