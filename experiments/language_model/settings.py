"""Language models: their own settings and the papers' values."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from experiments.settings.derived import Depends, Epochs
from experiments.settings.fields import setting
from experiments.settings.resolver import Experiment
from experiments.settings.sources import LIBRARY_CELLS, TORCH_CELLS, Protocol, Sourced


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModelSettings:
    """The next word or character of a text, read in windows from which the state goes on."""

    forms: ClassVar = {"gato": "gato1"}  # GATO 5.5: one layer

    dataset: str = setting(
        "the text: Python's own documentation (topics), a published one, or your own",
        choices=("topics", "ptb", "wikitext2", "wikitext103", "own"),
    )
    data_dir: str | None = setting(
        "directory with the raw published files of a text, or train.txt, valid.txt and test.txt",
        Sourced(None, "ours: the data are the user's"),
        needs=("dataset", ("ptb", "wikitext2", "wikitext103", "own")),
    )
    level: str = setting("what a token is", choices=("word", "character"))
    inputs: str = setting("how a token becomes an input", choices=("embed", "one_hot"))
    tied: bool = setting("the softmax shares the embedding's table", needs=("inputs", ("embed",)))
    softmax: str = setting(
        "over all words (full), or rare ones by cluster (adaptive: Grave et al., 2017)",
        Sourced("full", "GATO 5.5: a linear decoder; UR names no other"),
        choices=("full", "adaptive"),
    )
    cutoffs: tuple[int, ...] = setting(
        "numbers of the words, by frequency, with which each cluster begins",
        Sourced((2_000, 10_000), "ours: head and tails of about equal mass in WikiText-2"),
        least=1,
        needs=("softmax", ("adaptive",)),
    )
    window: int = setting("mean steps of a training window", least=1)
    window_deviation: float = setting("standard deviation of its steps", least=0)
    short_window_prob: float = setting(
        "probability of a window of half the steps", Sourced(0.0, "ours: off"), least=0, most=1
    )
    rescale_rate: bool = setting(
        "multiply the learning rate of a step by its window's steps over the mean",
        Sourced(False, "AWD-LSTM's code does; GATO does not say"),
    )
    reset_at_articles: bool = setting(
        "begin every article with a fresh state; a heading ' = Title = ' between blank lines "
        "begins one",
        needs=("dataset", ("topics", "wikitext2", "wikitext103", "own")),
    )
    validation_readers: int = setting(
        "rows of a validation window, each with a stretch of the text",
        Sourced(10, "AWD-LSTM's code"),
        least=1,
    )
    test_readers: int = setting("the same of a test window", Sourced(1, "AWD-LSTM's code"), least=1)
    reading_window: int = setting("steps of both", Sourced(70, "AWD-LSTM's code"), least=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """What text is written."""

    sample: int = setting(
        "write so many tokens of text after training, and to TensorBoard at every evaluation",
        Sourced(0, "ours: none"),
        least=0,
        most=100_000,
    )
    temperature: float = setting(
        "log-probabilities are divided by it before a token is drawn; 0: the likeliest is taken",
        Sourced(1.0, "ours: the model's own distribution"),
        least=0,
        most=100,
        needs="sample",
    )
    top_k: int = setting(
        "draw from so many of the likeliest tokens; 0: from all",
        Sourced(0, "ours: the model's own distribution"),
        least=0,
        needs="sample",
    )


_GATO_CELLS = {
    "gato": {
        **TORCH_CELLS["gato"],
        "init": Sourced(
            "torch_inputs", "GATO B.2: PyTorch's for the weights on x; else U[-.1, .1]"
        ),
        "bias_vectors": Sourced(2, "GATO Table 2: the count of 1,273,350 has two for each map"),
    },
    "*": TORCH_CELLS["*"],
}
_UR_CELLS = {
    **LIBRARY_CELLS,
    "*": {**LIBRARY_CELLS["*"], "downsize": Sourced(32, "UR D: C = 32 for language models")},
}

_GATO_LANGUAGE = {
    "cell": Sourced("gato", "GATO 5.5: one-layer GATO"),
    "dataset": Sourced("ptb", "GATO 5.5"),
    "level": Sourced("word", "GATO 5.5: Mikolov's words"),
    "inputs": Sourced("embed", "GATO 5.5"),
    "hidden_size": Sourced(1300, "GATO 5.5"),
    "embedding": Sourced(650, "GATO 5.5"),
    "tied": Sourced(False, "GATO 5.5: a linear decoder"),
    "decoder": Sourced((), "GATO 5.5: a linear decoder"),
    "window": Sourced(70, "GATO B.7"),
    "window_deviation": Sourced(5.0, "GATO B.7"),
    "short_window_prob": Sourced(0.05, "GATO B.7"),
    "reset_at_articles": Sourced(False, "GATO B.7: as AWD-LSTM, which carries the state on"),
    "epochs": Sourced(40, "ours: not in the paper"),
    "steps": Sourced(Epochs("epochs"), "ours: not in the paper"),
    "batch_size": Sourced(20, "GATO B.5"),
    "learning_rates": Sourced((1e-4,), "GATO B.3"),
    "weight_decay": Sourced(1.2e-6, "GATO B.6; added to the gradient, as AWD-LSTM's code has it"),
    "clip_norm": Sourced(0.0, "GATO 1: no gradient clipping"),
    "eval_every": Sourced(Epochs(1), "ours: after each epoch, as AWD-LSTM's code"),
    "keep_best": Sourced(True, "GATO B.4: the test score of the best validation score"),
}

_PROTOCOLS = {
    "gato": Protocol(settings=_GATO_LANGUAGE, cells=_GATO_CELLS),
    "ur": Protocol(
        settings={
            "cell": Sourced("ur_lstm", "UR 3.3"),
            "dataset": Sourced("wikitext103", "UR 3.3"),
            "level": Sourced("word", "UR 3.3"),
            "inputs": Sourced("embed", "UR D.3"),
            "hidden_size": Sourced(3072, "UR D.3"),
            "embedding": Sourced(3072, "ours: UR prints none; shared without a map between"),
            "tied": Sourced(True, "UR D.3: shared"),
            "embedding_dropout": Sourced(0.3, "UR D.3; of single entries is ours"),
            "decoder": Sourced((), "UR D.3: shared with the embedding"),
            "window": Sourced(128, "UR D.3"),
            "window_deviation": Sourced(0.0, "UR D.3"),
            "reset_at_articles": Sourced(True, "UR D.3"),
            "epochs": Sourced(30, "ours: not in the paper"),
            "steps": Sourced(Epochs("epochs"), "ours: not in the paper"),
            "batch_size": Sourced(128, "UR D.3"),
            "learning_rates": Sourced((1e-3,), "UR D.3"),
            "clip_norm": Sourced(0.1, "UR D.3: clipped to 0.1; by the global norm is ours"),
            "eval_every": Sourced(Epochs(1), "ours: after each epoch"),
            "keep_best": Sourced(True, "ours: the test score of the best validation score"),
        },
        cells=_UR_CELLS,
    ),
    "small": Protocol(
        settings={
            "cell": Sourced("ur_lstm", "ours: UR's cell for language"),
            "dataset": Sourced("topics", "ours: English that comes with Python"),
            "level": Sourced(
                Depends("dataset", {"topics": "character", "*": "word"}), "ours: few words in it"
            ),
            "inputs": Sourced("embed", "ours: as the papers"),
            "hidden_size": Sourced(256, "ours: what two cores learn in minutes"),
            "embedding": Sourced(64, "ours: as hidden_size"),
            "tied": Sourced(False, "ours: as GATO"),
            "decoder": Sourced((), "ours: as GATO"),
            "window": Sourced(64, "ours: as hidden_size"),
            "window_deviation": Sourced(0.0, "ours: no padding"),
            "reset_at_articles": Sourced(True, "UR D.3"),
            "reading_window": Sourced(256, "ours: no padding either"),
            "epochs": Sourced(12, "ours: as hidden_size"),
            "steps": Sourced(Epochs("epochs"), "ours: as hidden_size"),
            "batch_size": Sourced(32, "ours: as hidden_size"),
            "learning_rates": Sourced((4e-3,), "ours: as hidden_size"),
            "clip_norm": Sourced(1.0, "ours: as hidden_size"),
            "eval_every": Sourced(Epochs(1), "ours: after each epoch"),
            "keep_best": Sourced(True, "ours: as GATO"),
        },
        cells=LIBRARY_CELLS,
    ),
}


def _task() -> Any:
    from experiments.language_model.task import LanguageModelTask

    return LanguageModelTask


LANGUAGE_MODEL = Experiment("language_model", LanguageModelSettings, _task, _PROTOCOLS)
