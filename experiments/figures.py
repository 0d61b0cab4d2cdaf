"""Figures from a run's metrics; matplotlib is imported when one is drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments.config import Config
from experiments.study_figures import band
from experiments.tasks import Metric
from experiments.workdir import Workdir, read_rows

_COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#edae49", "#6a4c93", "#5f6b6d")


def learning_curve(config: Config, work: Workdir, say: Callable[[str], None]) -> None:
    """Draws ``figures/learning_curve.png``: training loss above held-out metric (GATO, Figure 1).

    One line for each learning rate: the mean over seeds, with a band from the least to the
    greatest. It ends where a seed diverged, which is infinitely bad, an asterisk in the legend.

    Args:
      config: of the run.
      work: its workdir.
      say: is told if matplotlib is missing.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        say("matplotlib is not installed: no figure is drawn.")
        return
    rows = list(read_rows(work.metrics))
    metric = config.task.metrics[0]
    watched = next(name for name, value in rows[-1].items() if isinstance(value, dict))
    examples = np.array([row["examples"] for row in rows])
    loss = _table([row["train_loss"] for row in rows])
    score = _table([row[watched][metric.name] for row in rows])

    style: dict[Any, Any] = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 10}
    with rc_context(style):
        figure = Figure(figsize=(6.4, 5.6), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
        diverged = rows[-1]["diverged"]
        labels = _labels(config, diverged)
        _curves(above, config, examples, loss, labels, higher_is_better=False)
        _curves(below, config, examples, score, labels, metric.higher_is_better)
        for axes, shown in ((above, "loss"), (below, metric.name)):
            for level in config.task.metrics:
                if level.name == shown:
                    _baseline(axes, level)
        above.set_ylabel("training loss")
        below.set_ylabel(f"{watched.replace('_', '-')}\n{metric.name.replace('_', ' ')}")
        below.set_xlabel("training examples")
        below.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        below.set_xlim(0, examples[-1] or 1)
        if metric.higher_is_better:
            below.set_ylim(0, 1.03)
        for axes in (above, below):
            axes.grid(alpha=0.25, linewidth=0.6)
        if len(labels) > 1 or any(diverged):
            note = "\n(*: a seed that diverged)" if any(diverged) else ""
            above.legend(frameon=False, title=f"learning rate{note}")
        figure.suptitle(_title(config), x=0.01, ha="left", fontsize=11)
        path = work.path / "figures" / "learning_curve.png"
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, dpi=160)


def _table(values: list[list[float | None]]) -> np.ndarray:
    """``[rows, lanes]``, NaN where there is no number."""
    return np.array([[math.nan if v is None else v for v in row] for row in values])


def _labels(config: Config, diverged: Sequence[bool]) -> list[str]:
    """Each learning rate with an asterisk for each seed that diverged."""
    found = config.training.lanes_by_rate
    return [f"{rate}" + "*" * sum(diverged[lanes]) for rate, lanes in found.items()]


def _curves(
    axes: Any,
    config: Config,
    x: np.ndarray,
    table: np.ndarray,
    labels: Sequence[str],
    higher_is_better: bool,
) -> None:
    """One line and band for each learning rate; lanes are ordered by rate, then seed."""
    for index, lanes in enumerate(config.training.lanes_by_rate.values()):
        middle, lower, upper = band(table[:, lanes], "mean", higher_is_better)
        colour = _COLOURS[index % len(_COLOURS)]
        axes.plot(x, middle, color=colour, linewidth=1.8, label=labels[index])
        if config.training.seeds > 1:
            axes.fill_between(x, lower, upper, color=colour, alpha=0.2, linewidth=0)


def _baseline(axes: Any, metric: Metric) -> None:
    axes.axhline(metric.baseline, color="0.45", linestyle="--", linewidth=1)
    axes.annotate(
        f"{metric.baseline_name} ({metric.baseline:.3g})",
        (1, metric.baseline),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        color="0.35",
        fontsize=9,
    )


def _title(config: Config) -> str:
    seeds = config.training.seeds
    lanes = f"{seeds} seeds, mean and range" if seeds > 1 else f"seed {config.training.seed}"
    parts = [config.task.name, config.model.cell, f"protocol {config.protocol}", lanes]
    return "  ·  ".join(parts)
