"""The learning curve of one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from experiments.figures.canvas import available, page
from experiments.figures.curves import Curve, draw_baseline, draw_curves
from experiments.records.workdir import Workdir, read_rows
from experiments.settings.config import Config


def draw(config: Config, work: Workdir, say: Callable[[str], None]) -> None:
    """Draws ``figures/learning_curve.png``: training loss above held-out metric (GATO, Figure 1).

    Between them is what else the task reports of training.
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
    directions = {
        task_metric.name: task_metric.higher_is_better for task_metric in config.task.metrics
    }
    panels = [
        Panel(
            f"training {name}",
            name,
            directions.get(name, False),
            [row[f"train_{name}"] for row in rows],
        )
        for name in ("loss", *config.task.train_scores)
    ]
    title = f"{watched.replace('_', '-')}\n{metric.name}"
    score = [row[watched][metric.name] for row in rows]
    panels.append(Panel(title, metric.name, metric.higher_is_better, score))

    path = work.path / "figures" / "learning_curve.png"
    with page(path, 6.4, 1.6 + 2 * len(panels), _title(config), of_a_run=True) as figure:
        panel_axes = figure.subplots(len(panels), 1, sharex=True)
        diverged = rows[-1]["diverged"]
        labels = _labels(config, diverged)
        for axes, panel in zip(panel_axes, panels, strict=True):
            table = np.array(panel.values, float)  # None is NaN
            curves = _curves(config, examples, table, labels)
            draw_curves(axes, curves, "mean", panel.higher_is_better)
            levels = [
                task_metric
                for task_metric in config.task.metrics
                if task_metric.name == panel.metric
            ]
            for level in levels:
                draw_baseline(axes, level)
            axes.set_ylabel(panel.title.replace("_", " "))
            if panel.higher_is_better:  # probabilities in [0, 1], or rewards
                numbers = np.append(table, [level.baseline for level in levels])
                axes.set_ylim(np.nanmin(numbers, initial=0), 1.03 * np.nanmax(numbers, initial=1))
            axes.grid(alpha=0.25, linewidth=0.6)
        bottom_axes = panel_axes[-1]
        bottom_axes.set_xlabel(f"training {config.task.unit}")
        bottom_axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        bottom_axes.set_xlim(0, examples[-1] or 1)
        if len(labels) > 1 or any(diverged):
            note = "\n(*: a seed that diverged)" if any(diverged) else ""
            panel_axes[0].legend(frameon=False, title=f"learning rate{note}")


class Panel(NamedTuple):
    """One of the figure's axes.

    Attributes:
      title: of its y.
      metric: whose baseline it shows, if the task has that metric.
      higher_is_better: of its values.
      values: of each lane at each evaluation; None: there is none.
    """

    title: str
    metric: str
    higher_is_better: bool
    values: list[list[float | None]]


def _labels(config: Config, diverged: Sequence[bool]) -> list[str]:
    """Each learning rate with an asterisk for each seed that diverged."""
    lanes_by_rate = config.training.lanes_by_rate
    return [f"{rate}" + "*" * sum(diverged[lanes]) for rate, lanes in lanes_by_rate.items()]


def _curves(
    config: Config, examples: np.ndarray, table: np.ndarray, labels: Sequence[str]
) -> list[Curve]:
    """One for each learning rate; lanes are ordered by rate, then seed."""
    lanes = config.training.lanes_by_rate.values()
    return [
        Curve(label, examples, table[:, columns])
        for label, columns in zip(labels, lanes, strict=True)
    ]


def _title(config: Config) -> str:
    seeds = config.training.seeds
    lanes = f"{seeds} seeds, mean and range" if seeds > 1 else f"seed {config.training.seed}"
    parts = [config.task.name, config.model.cell, f"protocol {config.protocol}", lanes]
    return "  ·  ".join(parts)
