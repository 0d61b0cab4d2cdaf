"""What a cell with fresh parameters is measured with."""

from __future__ import annotations

import dataclasses

from experiments.settings.fields import Sourced, setting

_QUICK = "ours: a minute on two cores"
_INFERRED = Sourced(None, "ours: inferred from the cell, and printed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FreshParameters:
    """The cell, how it is read, and the sizes of its measurement. None is inferred."""

    cell: str = setting(
        "a name in recurrent_gates.CELLS, or module:Class; default: gato",
        Sourced("gato", "ours: the newest of the papers' cells"),
    )
    hidden_size: int = setting(
        "units of the cell; for GATO 2J; default: 32", Sourced(32, _QUICK), least=1
    )
    in_features: int = setting(
        "width of the inputs, which are N(0, 1); default: 8", Sourced(8, _QUICK), least=1
    )
    steps: int = setting(
        "length of the runs behind the gradient and gate figures; of a --workdir's gradients, at "
        "most; default: 200",
        Sourced(200, _QUICK),
        least=1,
    )
    draws: int = setting("how often parameters are drawn; default: 5", Sourced(5, _QUICK), least=1)
    seed: int = setting(
        "of parameters and inputs; default: 0", Sourced(0, "ours: the first one"), least=0
    )
    remembered: str | None = setting(
        "the field that remembers; default: inferred, and printed", _INFERRED
    )
    gamma: str | None = setting(
        "the map from that field to y; default: inferred",
        _INFERRED,
        choices=("identity", "tanh", "sigmoid", "cos", "sin"),
    )
    recurrent: tuple[str, ...] | None = setting(
        "the fields that feed back, with commas, or none; default: inferred", _INFERRED
    )
