"""The receiver operating characteristic of a finished run, beside chance and the best rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.command.runs import Finished
from experiments.figures.canvas import available, page
from experiments.figures.curves import draw_legend, line_style
from experiments.records.reporting import say
from experiments.stay import generated
from experiments.training.supervised import Batch

_ROWS = 256  # scored at a time


def log_odds(finished: Finished, params: Any, batch: Batch) -> np.ndarray:
    """The log odds of stays under the parameters of one lane, ``[N]``."""
    task = finished.learner.task

    @jax.jit
    def score(params: Any, chunk: Batch) -> jax.Array:
        outputs = finished.learner.apply(params, chunk.inputs, **task.masks(chunk))  # type: ignore[attr-defined]
        return outputs[-1, :, 0]

    count = batch.inputs.shape[1]
    chunks = [
        jax.tree.map(lambda leaf, first=first: leaf[:, first : first + _ROWS], batch)
        for first in range(0, count, _ROWS)
    ]
    return np.concatenate([np.asarray(score(params, chunk)) for chunk in chunks])


def draw(finished: Finished, workdir: Path) -> None:
    """Draws ``figures/roc.png``: a line for each lane, on the test stays.

    Raises:
      OSError: if it cannot be written.
    """
    if not available(say):
        return
    from sklearn.metrics import roc_auc_score, roc_curve

    learner, config = finished.learner, finished.config
    learner.load()
    test = learner.data["sets"]["test"]
    long_stay = np.asarray(test.targets[0]) == 1
    path = workdir / "figures" / "roc.png"
    title = f"stay  ·  {config.model.cell}  ·  protocol {config.protocol}  ·  test stays"
    with page(path, 5.2, 5.2, title, of_a_run=True) as figure:
        axes = figure.subplots()
        labels = []
        for lane, (seed, rate) in enumerate(config.training.lanes):
            if finished.diverged[lane] or len(np.unique(long_stay)) < 2:
                continue
            logit = log_odds(finished, finished.lane(finished.params, lane), test)
            labels.append(f"seed {seed}, rate {rate:g}: area {roc_auc_score(long_stay, logit):.3f}")
            false_rates, true_rates, _ = roc_curve(long_stay, logit)
            axes.plot(false_rates, true_rates, label=labels[-1], **line_style(lane))
        if config.task.generated:
            best = np.asarray(generated.log_odds(test.inputs))
            labels.append(f"best possible: area {roc_auc_score(long_stay, best):.3f}")
            false_rates, true_rates, _ = roc_curve(long_stay, best)
            axes.plot(false_rates, true_rates, label=labels[-1], color="black", linewidth=1)
        labels.append("chance: area 0.5")
        axes.plot([0, 1], [0, 1], label=labels[-1], color="0.45", linestyle="--", linewidth=1)
        axes.set_aspect("equal")
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        axes.set_xlabel("short stays taken for long ones")
        axes.set_ylabel("long stays recognised")
        draw_legend(figure, labels)
    say(f"figure: {path}")
