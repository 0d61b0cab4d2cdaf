"""Copying at lengths that were not trained: the papers' values."""

from __future__ import annotations

from experiments.copy.settings import COPY
from experiments.settings.sources import Sourced

_HDETACH = COPY.protocols["hdetach"]
_PROTOCOLS = {
    "hdetach": _HDETACH,
    "small": _HDETACH._replace(
        settings={
            **_HDETACH.settings,
            "tokens": Sourced(5, "ours: h-detach's task at a size that two cores learn in minutes"),
            "length": Sourced(20, "ours: as tokens"),
            "inputs": Sourced("one_hot", "ours: learnt sooner than from the raw number"),
            "sequences": Sourced(0, "ours: as tokens"),
            "held_out_sequences": Sourced(1000, "ours: a standard error below a percent"),
            "hidden_size": Sourced(64, "ours: as tokens"),
            "steps": Sourced(25_000, "ours: as tokens; the plain LSTM needs 20,000"),
            "batch_size": Sourced(50, "ours: as tokens"),
            "learning_rates": Sourced((3e-3,), "ours: as tokens"),
        }
    ),
}

TRANSFER_COPY = COPY._replace(name="transfer_copy", protocols=_PROTOCOLS, study=True)
