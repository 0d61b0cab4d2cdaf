"""Adding from saturated forget gates: its own setting and the paper's values."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from experiments.adding.settings import UR_ADDING, AddingSettings
from experiments.settings.fields import setting
from experiments.settings.resolver import Experiment
from experiments.settings.sources import LIBRARY_CELLS, Protocol, Sourced


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForgettingSettings(AddingSettings):
    """Adding from saturated gates (UR-gates, E.1)."""

    decides: ClassVar = ("forget_bias", "refine_bias")  # by gate_bias, for every cell

    gate_bias: float = setting("where the bias of every forget gate starts")


_UR_FORGETTING = {
    **UR_ADDING,
    "length": Sourced(500, "UR E.1"),
    "gate_bias": Sourced(6.0, "UR E.1: effective forget activation sigmoid(6)"),
    "hidden_size": Sourced(64, "UR E.1"),
    "steps": Sourced(10_000, "UR E.1: the LSTM is stuck after 1e4 iterations"),
    "learning_rates": Sourced((1e-4,), "UR E.1"),
    "eval_every": Sourced(200, "ours: 50 points on the curve"),
}

_PROTOCOLS = {
    "ur": Protocol(
        settings=_UR_FORGETTING,
        cells=LIBRARY_CELLS,
    ),
    "small": Protocol(
        settings={
            **_UR_FORGETTING,
            "length": Sourced(200, "ours: a size that two cores learn in minutes"),
            "steps": Sourced(1500, "ours: as length"),
            "batch_size": Sourced(32, "ours: as length"),
            "learning_rates": Sourced((1e-3,), "ours: as length"),
            "eval_every": Sourced(50, "ours: 30 points on the curve"),
        },
        cells=LIBRARY_CELLS,
    ),
}


def _task() -> Any:
    from experiments.forgetting.task import ForgettingTask

    return ForgettingTask


FORGETTING = Experiment("forgetting", ForgettingSettings, _task, _PROTOCOLS, study=True)
