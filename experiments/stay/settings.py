"""Length of stay: its own settings and the paper's values."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from experiments.settings.derived import Depends, Epochs
from experiments.settings.fields import setting
from experiments.settings.resolver import Experiment
from experiments.settings.sources import TORCH_CELLS, Protocol, Sourced


@dataclasses.dataclass(frozen=True, kw_only=True)
class StaySettings:
    """Whether a stay is longer than a week, from the vital signs of its first 48 hours."""

    forms: ClassVar = {"gato": "gato1"}  # GATO 5.4: one layer

    dataset: str = setting(
        "the stays: drawn with a known best answer (generated), or published ones",
        choices=("generated", "cinc2012", "mimic3"),
    )
    data_dir: str | None = setting(
        "directory with the raw published files of the stays",
        Sourced(None, "ours: the data are the user's"),
        needs=("dataset", ("cinc2012", "mimic3")),
    )
    stay: str = setting(
        "which stay is meant",
        Sourced("hospital", "GATO B.1; half of all are longer than a week, as GATO 5.4 counts"),
        choices=("hospital", "icu"),
        needs=("dataset", ("mimic3",)),
    )
    longest: int = setting(
        "most times of measurement that are read of a stay, the first ones",
        Sourced(200, "the published code of interpolation-prediction networks"),
        least=1,
        needs=("dataset", ("cinc2012", "mimic3")),
    )


_CELLS = {
    "gato": {
        **TORCH_CELLS["gato"],
        "init": Sourced(
            "torch_inputs", "GATO B.2: PyTorch's for the weights on x; else U[-.1, .1]"
        ),
        "bias_vectors": Sourced(1, "GATO Table 1: the count of 20,736 has one for each map"),
    },
    "*": TORCH_CELLS["*"],
}

_GATO = {
    "cell": Sourced("gato", "GATO 5.4: one-layer GATO"),
    "dataset": Sourced("mimic3", "GATO 5.4"),
    "hidden_size": Sourced(512, "GATO 5.4"),
    "embedding": Sourced(0, "GATO B.1: no table, but a linear map of the 25 features and tanh"),
    "decoder": Sourced((1024,), "GATO 5.4: decoder hidden size 1024; ReLU is ours"),
    "epochs": Sourced(30, "ours: not in the paper"),
    "steps": Sourced(Epochs("epochs"), "ours: not in the paper"),
    "batch_size": Sourced(256, "GATO B.5"),
    "learning_rates": Sourced((4e-3, 1e-4), "GATO B.3: both"),
    "weight_decay": Sourced(1.2e-6, "GATO B.6; added to the gradient, as AWD-LSTM's code has it"),
    "clip_norm": Sourced(0.0, "GATO B.8: no clipping"),
    "eval_every": Sourced(Epochs(1), "ours: after each epoch"),
    "keep_best": Sourced(
        True, "GATO B.4: of the best validation accuracy (AUROC in cinc2012: ours)"
    ),
}

_PROTOCOLS = {
    "gato": Protocol(settings=_GATO, cells=_CELLS),
    "small": Protocol(
        settings={
            **_GATO,
            "dataset": Sourced("generated", "ours: needs no files"),
            "hidden_size": Sourced(128, "ours: what two cores learn in minutes"),
            "decoder": Sourced((128,), "ours: as hidden_size"),
            "epochs": Sourced(
                Depends("dataset", {"generated": 12, "*": 15}), "ours: as hidden_size"
            ),
            "learning_rates": Sourced((4e-3,), "GATO B.3: the higher one"),
            "batch_size": Sourced(
                Depends("dataset", {"generated": 128, "*": 64}), "ours: as hidden_size"
            ),
        },
        cells=_CELLS,
    ),
}


def _task() -> Any:
    from experiments.stay.task import StayTask

    return StayTask


STAY = Experiment("stay", StaySettings, _task, _PROTOCOLS)
