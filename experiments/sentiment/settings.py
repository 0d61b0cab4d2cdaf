"""Reviews: their own settings and protocols."""

from __future__ import annotations

import dataclasses
from typing import Any

from experiments.settings.derived import Depends, Epochs
from experiments.settings.fields import TINY, setting
from experiments.settings.resolver import Experiment
from experiments.settings.sources import LIBRARY_CELLS, Protocol, Sourced


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentimentSettings:
    """The verdict of a review, read word by word."""

    dataset: str = setting(
        "reviews of a grammar, with negation at a distance, or IMDB's", choices=("grammar", "imdb")
    )
    data_dir: str | None = setting(
        "directory with IMDB's raw folder, aclImdb, or prepared by tensorflow-datasets",
        Sourced(None, "ours: the data are the user's"),
        needs=("dataset", ("imdb",)),
    )
    length: int = setting("T, the most words of a review that are read, its last ones", least=24)
    vocabulary: int = setting(
        "so many of the most frequent words are known; the others are one",
        Sourced(20_000, "ours: the lecture gives none"),
        least=2,
        needs=("dataset", ("imdb",)),
    )
    inputs: str = setting("how a word becomes an input", choices=("embed", "one_hot"))
    held_out_reviews: int = setting(
        "the size of each held-out set of the grammar's reviews",
        Sourced(2000, "ours: three standard errors of an accuracy of 0.95 are 0.015"),
        least=1,
        needs=("dataset", ("grammar",)),
    )
    validation_share: float = setting(
        "how much of IMDB's training reviews is for validation",
        Sourced(0.1, "ours: as for images"),
        least=TINY,
        below=1,
        needs=("dataset", ("imdb",)),
    )


_LECTURE = {
    "cell": Sourced("lstm", "the lecture's example; it prints no sizes, so all below are ours"),
    "dataset": Sourced("grammar", "ours: no file is needed"),
    "length": Sourced(Depends("dataset", {"imdb": 400, "*": 60}), "ours: most reviews are shorter"),
    "inputs": Sourced("embed", "ours: the lecture reads words"),
    "hidden_size": Sourced(Depends("dataset", {"imdb": 128, "*": 64}), "ours: learns in minutes"),
    "embedding": Sourced(Depends("dataset", {"imdb": 128, "*": 32}), "ours: as hidden_size"),
    "decoder": Sourced((), "ours: one linear layer"),
    "epochs": Sourced(Depends("dataset", {"imdb": 5, "*": 20}), "ours: as hidden_size"),
    "steps": Sourced(Epochs("epochs"), "ours: as hidden_size"),
    "batch_size": Sourced(64, "ours: as hidden_size"),
    "learning_rates": Sourced((4e-3,), "ours: as hidden_size"),
    "clip_norm": Sourced(1.0, "ours: as hidden_size"),
    "eval_every": Sourced(Epochs(1), "ours: after each epoch"),
    "keep_best": Sourced(True, "ours: the test score of the best validation score"),
}

_PROTOCOLS = {"small": Protocol(settings=_LECTURE, cells=LIBRARY_CELLS)}


def _task() -> Any:
    from experiments.sentiment.task import SentimentTask

    return SentimentTask


SENTIMENT = Experiment("sentiment", SentimentSettings, _task, _PROTOCOLS)
