"""Copying: its own settings and the papers' values."""

from __future__ import annotations

import dataclasses
from typing import Any

from experiments.settings.fields import setting
from experiments.settings.resolver import Experiment
from experiments.settings.sources import (
    HDETACH_CELLS,
    LIBRARY_CELLS,
    TORCH_CELLS,
    Protocol,
    Sourced,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopySettings:
    """Copying with fresh sequences at every step, or with a fixed set drawn from the seed."""

    layout: str = setting(
        "A blanks A (aba), A blanks cues (cue), or A blanks one cue blanks (delimiter)",
        choices=("aba", "cue", "delimiter"),
    )
    symbols: int = setting("the size of A's alphabet", least=2, below=2**31 - 2)
    tokens: int = setting("n, the length of A", least=1)
    length: int = setting("N, the number of blanks, or the delay", least=1)
    loss_on: str = setting("the steps that the loss is the mean over", choices=("copied", "all"))
    inputs: str = setting(
        "how a token becomes an input; scalar: the number itself",
        choices=("embed", "one_hot", "scalar"),
    )
    sequences: int = setting("the size of a fixed training set; 0: fresh sequences", least=0)
    held_out_sequences: int = setting("the size of the held-out set", least=1)
    headline: str = setting(
        "the metric that is printed", choices=("copied_token_probability", "accuracy")
    )


_GATO_COPY = {
    "cell": Sourced("gato", "GATO 5.2: two-layer GATO"),
    "layout": Sourced("aba", "GATO 5.2: ABA, no special token"),
    "symbols": Sourced(10, "GATO 5.2: {1, ..., 10}"),
    "tokens": Sourced(20, "GATO 5.2"),
    "length": Sourced(100, "GATO 5.2: 100 constant BLANK tokens"),
    "loss_on": Sourced("copied", "ours: only the second A can be predicted; see --loss_on"),
    "inputs": Sourced("embed", "GATO 5.2"),
    "sequences": Sourced(0, "GATO 5.2: new sequences for each step"),
    "held_out_sequences": Sourced(1000, "GATO 5.2"),
    "headline": Sourced("copied_token_probability", "GATO Figure 1"),
    "hidden_size": Sourced(1024, "GATO 5.2"),
    "embedding": Sourced(5, "GATO 5.2 prints 4; the parameter counts are those of 5"),
    "decoder": Sourced((256,), "GATO 5.2: one hidden layer of size 256; ours: a ReLU"),
    "steps": Sourced(31_250, "GATO 5.2: 1 million training points, in batches of 32"),
    "batch_size": Sourced(32, "GATO B.5"),
    "learning_rates": Sourced((4e-3,), "GATO B.3"),
    "clip_norm": Sourced(0.0, "GATO B.8: no clipping"),
    "eval_every": Sourced(250, "ours: 125 points on the curve"),
}

_PROTOCOLS = {
    "gato": Protocol(
        settings=_GATO_COPY,
        cells=TORCH_CELLS,
    ),
    "ur": Protocol(
        settings={
            "cell": Sourced("ur_lstm", "UR 3.1"),
            "layout": Sourced("cue", "UR 3.1: the last ten tokens are 9"),
            "symbols": Sourced(8, "UR 3.1: {1, ..., 8}"),
            "tokens": Sourced(10, "UR 3.1"),
            "length": Sourced(500, "UR Figure 3: length 500; ours: of the blanks, not N + 20"),
            "loss_on": Sourced("copied", "UR D.1: only over the last 10 output tokens"),
            "inputs": Sourced(
                "one_hot", "ours: UR says digits and not how they enter; see --inputs=scalar"
            ),
            "sequences": Sourced(0, "UR D.1: randomly generated for every minibatch"),
            "held_out_sequences": Sourced(1000, "ours: a standard error below half a percent"),
            "headline": Sourced("accuracy", "ours: UR plots the loss, which is kept too"),
            "hidden_size": Sourced(256, "UR D.1"),
            "embedding": Sourced(0, "one-hot inputs"),
            "decoder": Sourced((), "ours: UR names none for the synthetic tasks"),
            "steps": Sourced(50_000, "ours: not in the paper"),
            "batch_size": Sourced(64, "ours: not in the paper"),
            "learning_rates": Sourced((1e-3,), "UR D.1"),
            "clip_norm": Sourced(1.0, "UR D.1: clipped at 1.0; ours: by the global norm"),
            "eval_every": Sourced(500, "ours: 100 points on the curve"),
        },
        cells=LIBRARY_CELLS,
    ),
    "hdetach": Protocol(
        settings={
            "cell": Sourced("lstm", "h-detach 3.1"),
            "layout": Sourced("delimiter", "h-detach App. A"),
            "symbols": Sourced(8, "h-detach App. A"),
            "tokens": Sourced(10, "h-detach App. A"),
            "length": Sourced(100, "h-detach 3.1: T = 100, or 300 with --length=300"),
            "loss_on": Sourced("all", "h-detach code: the mean over all T + 20 steps"),
            "inputs": Sourced("scalar", "h-detach code: the raw number"),
            "sequences": Sourced(100_000, "h-detach 3.1; the code draws with replacement"),
            "held_out_sequences": Sourced(5000, "h-detach 3.1"),
            "headline": Sourced("accuracy", "h-detach code: over the last ten steps"),
            "hidden_size": Sourced(128, "h-detach 3.1"),
            "embedding": Sourced(0, "scalar inputs"),
            "decoder": Sourced((), "h-detach code: one linear layer"),
            "steps": Sourced(600_000, "h-detach 3.1: 600 epochs; the code has 1000 steps in each"),
            "batch_size": Sourced(100, "h-detach 3.1"),
            "learning_rates": Sourced((1e-3,), "h-detach 3.1"),
            "clip_norm": Sourced(1.0, "h-detach 3.1"),
            "detach_prob": Sourced(0.25, "h-detach 3.1: 0.25 or 0.5"),
            "eval_every": Sourced(1000, "h-detach code: after each epoch"),
            "keep_best": Sourced(
                True, "h-detach code: by the same set; Table 1 is of its best_model"
            ),
            "ties": Sourced("last", "h-detach code: copying.py keeps what is at least as good"),
        },
        cells=HDETACH_CELLS,
    ),
    "small": Protocol(
        settings={
            **_GATO_COPY,
            "tokens": Sourced(5, "ours: GATO's task at a size that two cores learn in minutes"),
            "length": Sourced(20, "ours: as tokens"),
            "hidden_size": Sourced(128, "ours: as tokens"),
            "steps": Sourced(3000, "ours: as tokens"),
            "eval_every": Sourced(100, "ours: 30 points on the curve"),
        },
        cells=TORCH_CELLS,
    ),
}


def _task() -> Any:
    from experiments.copy.task import CopyTask

    return CopyTask


COPY = Experiment("copy", CopySettings, _task, _PROTOCOLS)
