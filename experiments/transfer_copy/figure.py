"""Accuracy against the delay at evaluation (h-detach, Table 1)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from experiments.figures.canvas import available, page
from experiments.figures.curves import Curve, draw_baseline, draw_curves
from experiments.settings.metrics import Metric


def draw(
    accuracies: Mapping[str, np.ndarray],
    delays: Sequence[int],
    trained_at: Collection[int],
    chance: float,
    path: Path,
    say: Callable[[str], None],
) -> None:
    """A line for each run.

    Args:
      accuracies: ``[delays, lanes]`` by run, NaN for a lane that diverged (an asterisk).
      delays: at evaluation.
      trained_at: the delays that runs were trained at.
      chance: the accuracy of guessing.
      path: of the PNG.
      say: is told where the figure is, or why there is none.

    Raises:
      UserError: if it cannot be written.
    """
    if not available(say):
        return
    with page(path, 6.4, 4.0, "transfer_copy") as figure:
        axes = figure.subplots()
        curves = [
            Curve(label + "*" * np.isnan(values[0]).sum(), np.array(delays), values)
            for label, values in accuracies.items()
        ]
        draw_curves(axes, curves, "mean", higher_is_better=True)
        for line in axes.lines:
            line.set_marker("o")
            line.set_markersize(4)
        draw_baseline(axes, Metric("accuracy", True, chance, "chance"), "left")
        for delay in sorted(trained_at):
            axes.axvline(delay, color="0.6", linewidth=0.8, zorder=0)
            axes.annotate(" trained", (delay, 0.02), color="0.35", fontsize=9)
        axes.set_xscale("log")
        axes.set_xticks(list(delays), [f"{delay:,}" for delay in delays], rotation=35)
        axes.minorticks_off()
        axes.set_xlabel("delay at evaluation, steps")
        axes.set_ylabel("accuracy on the copied tokens")
        axes.set_ylim(0, 1.03)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.legend(fontsize=9)
    say(f"figure: {path}")
