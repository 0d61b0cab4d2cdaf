"""Copying, and copying at lengths that were not trained."""

from __future__ import annotations

from experiments.protocols.settings import (
    ANY,
    HDETACH_CELLS,
    LIBRARY_CELLS,
    TORCH_CELLS,
    Protocol,
    Sourced,
)

_GATO_COPY = {
    **ANY,
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
    "decoder": Sourced((256,), "GATO 5.2: one hidden layer of size 256"),
    "steps": Sourced(31_250, "GATO 5.2: 1 million training points, in batches of 32"),
    "batch_size": Sourced(32, "GATO B.5"),
    "learning_rates": Sourced((4e-3,), "GATO B.3"),
    "clip_norm": Sourced(0.0, "GATO B.8: no clipping"),
    "eval_every": Sourced(250, "ours: 125 points on the curve"),
}

COPY = {
    "gato": Protocol(
        settings=_GATO_COPY,
        cells=TORCH_CELLS,
    ),
    "ur": Protocol(
        settings={
            **ANY,
            "cell": Sourced("ur_lstm", "UR 3.1"),
            "layout": Sourced("cue", "UR 3.1: the last ten tokens are 9"),
            "symbols": Sourced(8, "UR 3.1: {1, ..., 8}"),
            "tokens": Sourced(10, "UR 3.1"),
            "length": Sourced(500, "UR 3.1, Figure 3: N = 500"),
            "loss_on": Sourced("copied", "UR D.1: only over the last 10 output tokens"),
            "inputs": Sourced("one_hot", "ours: as in the authors' later code"),
            "sequences": Sourced(0, "UR D.1: randomly generated for every minibatch"),
            "held_out_sequences": Sourced(1000, "ours: a standard error below half a percent"),
            "headline": Sourced("accuracy", "ours: UR plots the loss, which is kept too"),
            "hidden_size": Sourced(256, "UR D.1"),
            "embedding": Sourced(0, "one-hot inputs"),
            "decoder": Sourced((), "ours: UR names none for the synthetic tasks"),
            "steps": Sourced(50_000, "ours: not in the paper"),
            "batch_size": Sourced(64, "ours: not in the paper"),
            "learning_rates": Sourced((1e-3,), "UR D.1"),
            "clip_norm": Sourced(1.0, "UR D.1"),
            "eval_every": Sourced(500, "ours: 100 points on the curve"),
        },
        cells=LIBRARY_CELLS,
    ),
    "hdetach": Protocol(
        settings={
            **ANY,
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

TRANSFER_COPY = {
    "hdetach": COPY["hdetach"],
    "small": COPY["hdetach"]._replace(
        settings={
            **COPY["hdetach"].settings,
            "tokens": Sourced(5, "ours: h-detach's task at a size that two cores learn in minutes"),
            "length": Sourced(20, "ours: as tokens"),
            "inputs": Sourced("one_hot", "ours: learnt sooner than from the raw number"),
            "sequences": Sourced(0, "ours: as tokens"),
            "held_out_sequences": Sourced(1000, "ours: a standard error below half a percent"),
            "hidden_size": Sourced(64, "ours: as tokens"),
            "steps": Sourced(25_000, "ours: as tokens; the plain LSTM needs 20,000"),
            "batch_size": Sourced(50, "ours: as tokens"),
            "learning_rates": Sourced((3e-3,), "ours: as tokens"),
        }
    ),
}
