"""Adding: its own settings and the papers' values."""

from __future__ import annotations

import dataclasses
from typing import Any

from experiments.settings.fields import setting
from experiments.settings.resolver import Experiment
from experiments.settings.sources import LIBRARY_CELLS, TORCH_CELLS, Protocol, Sourced


@dataclasses.dataclass(frozen=True, kw_only=True)
class AddingSettings:
    """Adding, with fresh sequences at every step."""

    length: int = setting("T, the steps of a sequence", least=2)
    held_out_sequences: int = setting("the size of the held-out set", least=1)


_GATO_ADDING = {
    "cell": Sourced("gato", "GATO 5.3: two-layer GATO"),
    "length": Sourced(100, "GATO 5.3: T = 100, or 200, 400, 750 with --length"),
    "held_out_sequences": Sourced(1000, "GATO 5.3"),
    "hidden_size": Sourced(512, "GATO 5.3"),
    "embedding": Sourced(0, "GATO 5.3: no embeddings"),
    "decoder": Sourced((256,), "GATO 5.3: one hidden layer of size 256; ours: a ReLU"),
    "steps": Sourced(3125, "GATO 5.3: 200,000 examples, in batches of 64"),
    "batch_size": Sourced(64, "GATO B.5"),
    "learning_rates": Sourced((4e-3,), "GATO B.3"),
    "clip_norm": Sourced(0.0, "GATO B.8: no clipping"),
    "halve_every": Sourced(10_000, "GATO B.3"),
    "eval_every": Sourced(125, "ours: 25 points on the curve"),
}
UR_ADDING = {
    "cell": Sourced("ur_lstm", "UR 3.1"),
    "length": Sourced(2000, "UR Figure 3: length 2000"),
    "held_out_sequences": Sourced(1000, "ours: as in GATO 5.3"),
    "hidden_size": Sourced(256, "UR D.1"),
    "embedding": Sourced(0, "ours: the inputs are numbers"),
    "decoder": Sourced((), "ours: UR names none for the synthetic tasks"),
    "steps": Sourced(20_000, "ours: not in the paper"),
    "batch_size": Sourced(64, "ours: not in the paper"),
    "learning_rates": Sourced((1e-3,), "UR D.1"),
    "clip_norm": Sourced(1.0, "UR D.1: clipped at 1.0; ours: by the global norm"),
    "eval_every": Sourced(250, "ours: 80 points on the curve"),
}

_PROTOCOLS = {
    "gato": Protocol(
        settings=_GATO_ADDING,
        cells=TORCH_CELLS,
    ),
    "ur": Protocol(
        settings=UR_ADDING,
        cells=LIBRARY_CELLS,
    ),
    "small": Protocol(
        settings={
            **_GATO_ADDING,
            "length": Sourced(50, "ours: a size that two cores learn in a minute"),
            "hidden_size": Sourced(128, "ours: as length"),
            "steps": Sourced(500, "ours: as length"),
            "eval_every": Sourced(20, "ours: 25 points on the curve"),
        },
        cells=TORCH_CELLS,
    ),
}


def _task() -> Any:
    from experiments.adding.task import AddingTask

    return AddingTask


ADDING = Experiment("adding", AddingSettings, _task, _PROTOCOLS)
