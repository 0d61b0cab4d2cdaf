"""Adding from saturated forget gates."""

from __future__ import annotations

from experiments.protocols.adding import UR_ADDING
from experiments.protocols.settings import LIBRARY_CELLS, Protocol, Sourced

_UR_FORGETTING = {
    **UR_ADDING,
    "length": Sourced(500, "UR E.1"),
    "gate_bias": Sourced(6.0, "UR E.1: effective forget activation sigmoid(6)"),
    "hidden_size": Sourced(64, "UR E.1"),
    "steps": Sourced(10_000, "UR E.1: the LSTM is stuck after 1e4 iterations"),
    "learning_rates": Sourced((1e-4,), "UR E.1"),
    "eval_every": Sourced(200, "ours: 50 points on the curve"),
}

FORGETTING = {
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
