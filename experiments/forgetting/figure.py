"""Learning curves beside the timescales of units before and after (UR-gates, Fig. 9)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.figures.canvas import available, page
from experiments.figures.curves import (
    Curve,
    draw_baseline,
    draw_curves,
    draw_legend,
    limit,
    line_style,
)
from experiments.settings.config import Config

_THICKNESS = {"before": 0.8, "after": 1.8}  # of lines that stand for before and after training


def draw(
    curves: Sequence[Curve],
    reports: Mapping[str, Mapping[str, Any]],
    config: Config,
    path: Path,
    say: Callable[[str], None],
) -> None:
    """Errors on the left, timescales on the right.

    Args:
      curves: held-out errors.
      reports: by label, ``{"before", "after", ...}``; see ``study.report``.
      config: of one of the runs.
      path: of the PNG.
      say: is told where the figure is, or why there is none.

    Raises:
      UserError: if it cannot be written.
    """
    if not available(say):
        return
    training = config.training
    seeds = f"{training.seeds} seeds each" if training.seeds > 1 else f"seed {training.seed}"
    title = f"{config.task.name}  ·  protocol {config.protocol}  ·  {seeds}"
    with page(path, 9.6, 4.0, title) as figure:
        left, right = figure.subplots(1, 2)
        _draw_errors(left, curves, config)
        _draw_timescales(right, reports)
        draw_legend(figure, [curve.label for curve in curves])
        for axes in (left, right):
            axes.grid(alpha=0.25, linewidth=0.6)
    say(f"figure: {path}")


def _draw_errors(axes: Any, curves: Sequence[Curve], config: Config) -> None:
    draw_curves(axes, curves, "mean", higher_is_better=False)
    draw_baseline(axes, config.task.metrics[0])
    axes.set_xlabel("training examples")
    axes.set_ylabel("held-out mse")
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:,g}k")
    axes.set_xlim(0, max(curve.x[-1] for curve in curves))
    limit(axes, config.task.metrics[0], curves)


def _draw_timescales(axes: Any, reports: Mapping[str, Mapping[str, Any]]) -> None:
    from matplotlib.lines import Line2D

    for index, report in enumerate(reports.values()):
        for moment, thickness in _THICKNESS.items():
            periods = np.sort(np.concatenate(report[moment]))
            if not len(periods):
                continue  # every seed diverged
            share = np.arange(1, len(periods) + 1) / len(periods)
            finite = np.isfinite(periods)
            axes.step(
                periods[finite],
                share[finite],
                where="post",
                linewidth=thickness,
                **line_style(index),
            )
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("timescale 1 / (1 - f) of a unit, steps")
    axes.set_ylabel("share of units with at most this")
    handles = {
        f"{moment} training": Line2D([], [], color="0.45", linewidth=thickness)
        for moment, thickness in _THICKNESS.items()
    }
    axes.legend(handles.values(), handles.keys(), fontsize=8.5)
