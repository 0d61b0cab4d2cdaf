"""Images pixel by pixel: their own settings and the papers' values."""

from __future__ import annotations

import dataclasses
from typing import Any

from experiments.settings.derived import Depends, Epochs, OnlySeed
from experiments.settings.fields import TINY, setting
from experiments.settings.resolver import Experiment
from experiments.settings.sources import HDETACH_CELLS, LIBRARY_CELLS, Protocol, Sourced


@dataclasses.dataclass(frozen=True, kw_only=True)
class PixelsSettings:
    """The class of an image, read pixel by pixel."""

    dataset: str = setting(
        "the images; smnist and pmnist are MNIST, fashion is Fashion-MNIST, scifar10 CIFAR-10",
        choices=("digits", "smnist", "pmnist", "fashion", "scifar10"),
    )
    permutation: str = setting(
        "the order of the pixels", choices=("scanline", "bit_reversal", "random")
    )
    permutation_seed: int = setting(
        "of the random order, NumPy's RandomState(seed).permutation(T), one for all seeds; "
        "default: --seed, if it is the only one",
        least=0,
        below=2**32,
        needs=("permutation", ("random",)),
    )
    validation_share: float = setting(
        "how much of the training images is for validation", least=TINY, below=1
    )
    validation_last: bool = setting("these are the last ones, and not drawn with seed 42")
    data_dir: str | None = setting(
        "directory with the raw published files of a data set",
        needs=("dataset", ("smnist", "pmnist", "fashion", "scifar10")),
    )

    @property
    def seeded(self) -> tuple[str, ...]:
        """The settings that are the run's seed unless they are given."""
        return ("permutation_seed",) if self.permutation == "random" else ()


_OWN_ORDER = Depends("permutation", {"random": OnlySeed("permutation_seed"), "*": 0})

_UR_PIXELS = {
    "cell": Sourced("ur_lstm", "UR 3.2"),
    "dataset": Sourced("smnist", "UR 3.2: sMNIST, pMNIST and sCIFAR"),
    "permutation": Sourced(
        Depends("dataset", {"pmnist": "bit_reversal", "*": "scanline"}), "UR D.2 and D.5"
    ),
    "permutation_seed": Sourced(_OWN_ORDER, "ours: as h-detach's code; UR's order is not drawn"),
    "validation_share": Sourced(0.1, "ours: UR does not state it; as the authors' later code"),
    "validation_last": Sourced(False, "ours: drawn with seed 42, as the authors' later code"),
    "data_dir": Sourced(None, "ours: the data are the user's"),
    "hidden_size": Sourced(512, "UR D.2: Table 2"),
    "embedding": Sourced(0, "UR 3.2: the pixels of an image; ours: divided by 255"),
    "decoder": Sourced((256,), "UR D.2: one ReLU layer of 256; ours: of the last output alone"),
    "epochs": Sourced(Depends("dataset", {"scifar10": 100, "*": 150}), "UR D.2"),
    "steps": Sourced(Epochs("epochs"), "UR D.2"),
    "batch_size": Sourced(50, "UR D.2"),
    "learning_rates": Sourced(
        Depends("cell", {"*gru": (2e-4, 5e-4), "*": (2e-4, 5e-4, 1e-3, 2e-3)}), "UR D.2: the sweep"
    ),
    "clip_norm": Sourced(1.0, "UR D.2: clipped at 1.0; ours: by the global norm"),
    "eval_every": Sourced(Epochs(1), "ours: after each epoch"),
    "keep_best": Sourced(True, "UR D.2: the highest validation score"),
}

_UR_WIDE = Depends(
    "dataset",
    {
        "scifar10": Depends("cell", {"lstm": 1024, "*": 2048}),
        "*": Depends("cell", {"lstm": 512, "*": 1024}),
    },
)
_OTHER_CELLS = dict.fromkeys(("*minlstm", "slstm", "*mingru"), 0.0)
_UR_ZONEOUT = {
    "zoneout_c": Sourced(
        Depends("cell", {**_OTHER_CELLS, "*lstm": 0.5, "*": 0.0}),
        "UR D.2, of the LSTM; ours: no other cell",
    ),
    "zoneout_h": Sourced(
        Depends("cell", {**_OTHER_CELLS, "*lstm": 0.05, "*gru": 0.1, "*": 0.0}),
        "UR D.2: z of the LSTM and the GRU; ours: no other cell",
    ),
}

_PROTOCOLS = {
    "ur": Protocol(
        settings=_UR_PIXELS,
        cells=LIBRARY_CELLS,
    ),
    "ur_zoneout": Protocol(
        settings={
            **_UR_PIXELS,
            **_UR_ZONEOUT,
            "hidden_size": Sourced(_UR_WIDE, "UR D.2: Table 3, of UR cells and of the plain LSTM"),
            "dropout": Sourced(0.5, "UR D.2: beside zoneout"),
            "learning_rates": Sourced(
                _UR_PIXELS["learning_rates"].value, "ours: Table 3 prints no rates; Table 2's sweep"
            ),
        },
        cells=LIBRARY_CELLS,
    ),
    "hdetach": Protocol(
        settings={
            **_UR_PIXELS,
            "cell": Sourced("lstm", "h-detach 3.3"),
            "permutation": Sourced(
                Depends("dataset", {"pmnist": "random", "*": "scanline"}), "h-detach 3.3"
            ),
            "permutation_seed": Sourced(_OWN_ORDER, "h-detach code: the run's seed"),
            "validation_share": Sourced(1 / 6, "h-detach 3.3: 10,000 of 60,000"),
            "validation_last": Sourced(True, "h-detach code: images 50,000 to 59,999"),
            "hidden_size": Sourced(100, "h-detach 3.3"),
            "embedding": Sourced(0, "h-detach code: the raw pixel in [0, 1]"),
            "decoder": Sourced((), "h-detach code: one linear layer"),
            "epochs": Sourced(200, "h-detach 3.3"),
            "batch_size": Sourced(100, "h-detach 3.3"),
            "learning_rates": Sourced((1e-3, 5e-4, 1e-4), "h-detach 3.3"),
            "clip_norm": Sourced(1.0, "h-detach code"),
            "detach_prob": Sourced(0.25, "h-detach 3.3"),
            "detach_off_steps": Sourced(Epochs(39), "h-detach code: the last 39 epochs"),
            "keep_best": Sourced(True, "h-detach 3.3: the best validation score"),
        },
        cells=HDETACH_CELLS,
    ),
    "small": Protocol(
        settings={
            **_UR_PIXELS,
            **_UR_ZONEOUT,
            "dataset": Sourced("digits", "ours: real images that need no file"),
            "hidden_size": Sourced(128, "ours: what two cores learn in minutes"),
            "epochs": Sourced(
                Depends("dataset", {"digits": 120, "*": 5}),
                "ours: better than 60 on the digits' validation images; else what takes minutes",
            ),
            "learning_rates": Sourced(
                (4e-3,), "ours: best on validation of 1e-3, 2e-3 and 4e-3, with zoneout and without"
            ),
            "dropout": Sourced(0.5, "UR D.2, beside zoneout; kept with 120 epochs by validation"),
        },
        cells=LIBRARY_CELLS,
    ),
}


def _task() -> Any:
    from experiments.pixels.task import PixelsTask

    return PixelsTask


PIXELS = Experiment("pixels", PixelsSettings, _task, _PROTOCOLS)
