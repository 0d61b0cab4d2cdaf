"""The learning curve of one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from experiments.figures.canvas import available, page
from experiments.figures.curves import Curve, draw_baseline, draw_curves
from experiments.records.workdir import Workdir, read_rows
from experiments.settings.config import Config


def draw(config: Config, work: Workdir, say: Callable[[str], None]) -> None:
    """Draws ``figures/learning_curve.png``: training loss above held-out metric (GATO, Figure 1).

    One line for each learning rate: the mean over seeds, with a band from the least to the
    greatest. It ends where a seed diverged, which is infinitely bad, an asterisk in the legend.

    Args:
      config: of the run.
      work: its workdir.
      say: is told if matplotlib is missing.

    Raises:
      OSError: if it cannot be written.
    """
    if not available(say):
        return
    rows = list(read_rows(work.metrics))
    metric = config.task.metrics[0]
    watched = next(name for name, value in rows[-1].items() if isinstance(value, dict))
    examples = np.array([row[config.task.unit] for row in rows])
    loss = np.array([row["train_loss"] for row in rows], float)  # None is NaN
    score = np.array([row[watched][metric.name] for row in rows], float)

    path = work.path / "figures" / "learning_curve.png"
    with page(path, 6.4, 5.6, _title(config), of_a_run=True) as figure:
        above, below = figure.subplots(2, 1, sharex=True)
        diverged = rows[-1]["diverged"]
        labels = _labels(config, diverged)
        draw_curves(above, _curves(config, examples, loss, labels), "mean", False)
        draw_curves(
            below, _curves(config, examples, score, labels), "mean", metric.higher_is_better
        )
        for axes, shown in ((above, "loss"), (below, metric.name)):
            for level in config.task.metrics:
                if level.name == shown:
                    draw_baseline(axes, level)
        above.set_ylabel("training loss")
        below.set_ylabel(f"{watched.replace('_', '-')}\n{metric.name.replace('_', ' ')}")
        below.set_xlabel(f"training {config.task.unit}")
        below.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        below.set_xlim(0, examples[-1] or 1)
        if metric.higher_is_better:  # probabilities in [0, 1], or rewards
            below.set_ylim(np.nanmin(score, initial=0), 1.03 * np.nanmax(score, initial=1))
        for axes in (above, below):
            axes.grid(alpha=0.25, linewidth=0.6)
        if len(labels) > 1 or any(diverged):
            note = "\n(*: a seed that diverged)" if any(diverged) else ""
            above.legend(frameon=False, title=f"learning rate{note}")


def _labels(config: Config, diverged: Sequence[bool]) -> list[str]:
    """Each learning rate with an asterisk for each seed that diverged."""
    lanes_by_rate = config.training.lanes_by_rate
    return [f"{rate}" + "*" * sum(diverged[lanes]) for rate, lanes in lanes_by_rate.items()]


def _curves(
    config: Config, examples: np.ndarray, table: np.ndarray, labels: Sequence[str]
) -> list[Curve]:
    """One for each learning rate; lanes are ordered by rate, then seed."""
    lanes = config.training.lanes_by_rate.values()
    return [Curve(label, examples, table[:, own]) for label, own in zip(labels, lanes, strict=True)]


def _title(config: Config) -> str:
    seeds = config.training.seeds
    lanes = f"{seeds} seeds, mean and range" if seeds > 1 else f"seed {config.training.seed}"
    parts = [config.task.name, config.model.cell, f"protocol {config.protocol}", lanes]
    return "  ·  ".join(parts)
