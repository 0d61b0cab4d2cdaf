"""The learning curves of several runs in one figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from experiments.figures.canvas import available, page
from experiments.figures.curves import Curve, draw_baseline, draw_curves, draw_legend, limit
from experiments.settings.metrics import Metric


def draw(
    curves: Sequence[Curve],
    metric: Metric,
    watched: str,
    style: str,
    title: str,
    path: Path,
    say: Callable[[str], None],
) -> None:
    """A metric against training examples, a line for each run.

    Args:
      curves: of the runs.
      metric: what they are of.
      watched: what it was measured on: ``"held-out"``, ``"validation"`` or ``"training"``.
      style: see ``band``.
      title: what is compared.
      path: of the PNG.
      say: is told where the figure is, or why there is none.

    Raises:
      UserError: if it cannot be written.
    """
    if not available(say):
        return
    with page(path, 6.8, 3.9, title) as figure:
        axes = figure.subplots()
        draw_curves(axes, curves, style, metric.higher_is_better)
        draw_baseline(axes, metric)
        axes.set_xlabel("training examples")
        axes.set_ylabel(f"{watched} {metric.name}".replace("_", " "))
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        axes.set_xlim(0, max(curve.x[-1] for curve in curves) or 1)
        limit(axes, metric, curves)
        axes.grid(alpha=0.25, linewidth=0.6)
        draw_legend(figure, [curve.label for curve in curves])
    say(f"figure: {path}")
