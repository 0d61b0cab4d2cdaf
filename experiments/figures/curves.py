"""Lines with bands over seeds, and the axes that they are drawn in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from experiments.figures.canvas import COLOURS
from experiments.settings.metrics import Metric

_DASHES = ("-", "--", ":", "-.")
_BAD = 1e300  # stands for infinity, between which and a number no quantile can be found


class Curve(NamedTuple):
    """A line with its band.

    Attributes:
      label: of the line.
      x: ``[n]``.
      values: ``[n, lanes]``, NaN where there is no number: the lane has diverged, or nothing
        was measured.
    """

    label: str
    x: np.ndarray
    values: np.ndarray


def line_style(index: int) -> dict[str, str]:
    """Colour and dashes of the line of that number: the first 24 differ."""
    colour = COLOURS[index % len(COLOURS)]
    return {"color": colour, "linestyle": _DASHES[index // len(COLOURS) % len(_DASHES)]}


def band(
    values: np.ndarray, style: str, higher_is_better: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Middle, lower and upper line of values ``[n, lanes]``.

    ``"mean"``: mean, least, greatest (GATO); ``"median"``: median and quartiles (UR-gates).
    A lane without a number is infinitely bad, and so may a line be: NaN there, and where no lane
    has a number.
    """
    finite = np.isfinite(values)
    numbers = np.where(finite, values, -_BAD if higher_is_better else _BAD)
    if style == "mean":
        lines = np.stack([numbers.mean(axis=1), numbers.min(axis=1), numbers.max(axis=1)])
    else:
        lines = np.quantile(numbers, (0.5, 0.25, 0.75), axis=1)
    middle, lower, upper = np.where(np.abs(lines) < _BAD / 1e6, lines, np.nan)
    return middle, lower, upper


def draw_curves(axes: Any, curves: Sequence[Curve], style: str, higher_is_better: bool) -> None:
    """Each curve as a line with its band."""
    for index, curve in enumerate(curves):
        look = line_style(index)
        middle, lower, upper = band(curve.values, style, higher_is_better)
        axes.plot(curve.x, middle, linewidth=1.8, label=curve.label, **look)
        if curve.values.shape[1] > 1:
            axes.fill_between(curve.x, lower, upper, color=look["color"], alpha=0.18, linewidth=0)


def draw_baseline(axes: Any, metric: Metric, side: Literal["left", "right"] = "right") -> None:
    """What no learning at all scores, as a dashed line with its name on the side without lines."""
    axes.axhline(metric.baseline, color="0.45", linestyle="--", linewidth=1, zorder=0)
    axes.annotate(
        f"{metric.baseline_name} ({metric.baseline:.3g})",
        (0.06 if side == "left" else 1, metric.baseline),
        xycoords=("axes fraction", "data"),
        xytext=(0, -12 if metric.higher_is_better else 3),
        textcoords="offset points",
        ha=side,
        color="0.35",
        fontsize=9,
    )


def limit(axes: Any, metric: Metric, curves: Sequence[Curve]) -> None:
    """From nothing, or the lowest return, to everything: 1, or the highest return; of an error, to
    twice what no learning at all has, unless all of it lies above."""
    values = np.concatenate([np.ravel(curve.values) for curve in curves])
    values = values[np.isfinite(values)]
    bottom, top = np.min(values, initial=0), 1.03 * np.max(values, initial=1)
    if not metric.higher_is_better:
        bottom, top = 0, axes.get_ylim()[1]
        if np.any(values < 2 * metric.baseline):
            top = min(top, 2 * metric.baseline)
    axes.set_ylim(bottom, top)


def draw_legend(figure: Any, labels: Sequence[str]) -> None:
    """A legend below the axes, in as many columns of at most three as its labels leave room for."""
    inches = 0.6 + 0.08 * max(map(len, labels))  # of a column at this size of letters
    width, height = figure.get_size_inches()
    columns = max(1, min(3, len(labels), int(width / inches)))
    rows = -(-len(labels) // columns)
    figure.set_size_inches(max(width, inches), height + 0.22 * rows)
    figure.legend(loc="outside lower center", ncols=columns, fontsize=9)
