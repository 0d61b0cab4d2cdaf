"""Figures of what ``recurrent_gates.analysis`` and its neighbours compute; each is one PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.figures.canvas import COLOURS, page
from recurrent_gates import gate_theory
from recurrent_gates.desiderata import Criterion, Verdict
from recurrent_gates.gate_theory import TimescaleLaw

_BLUE, _RED, _GREEN, _YELLOW, _VIOLET, _GREY = COLOURS
_FLOOR = 1e-30  # norms below are not drawn


def shown(value: float) -> str:
    """A measured number in a few characters."""
    return f"{value:.2g}" if abs(value) < 0.01 or abs(value) >= 1000 else f"{value:.3g}"


# ---------------------------------------------------------------------------------------
# One cell
# ---------------------------------------------------------------------------------------


def criteria(
    results: Sequence[Criterion],
    expected: Sequence[Verdict] | None,
    title: str,
    path: Path,
) -> None:
    """GATO's five criteria as a table.

    Args:
      results: as ``desiderata.measure`` returns them.
      expected: verdicts of the same criteria, or None.
      title: what was measured.
      path: of the PNG.
    """
    with page(path, 9.2, 2.9, title, layout=None) as figure:
        axes = figure.subplots()
        figure.subplots_adjust(left=0.015, right=0.985, top=0.86, bottom=0.02)
        axes.axis("off")
        axes.set_xlim(0, 1)
        axes.set_ylim(-len(results) + 0.45, 0.75)
        columns = (0.0, 0.41, 0.705, 0.72, 0.815, 0.915)
        heads = ("criterion", "measured, the worst draw", "", "limit", "expected", "verdict")
        for x, head in zip(columns, heads, strict=True):
            axes.text(x, 0.35, head, weight="bold", va="center")
        axes.axhline(0, color="0.3", linewidth=0.8)
        for row, result in enumerate(results):
            y = -row - 0.5
            sign = "≥" if result.number == 3 else "≤"
            axes.text(columns[0], y, f"{result.number}  {result.statement}", va="center")
            axes.text(columns[1], y, result.quantity, va="center", color="0.3")
            axes.text(columns[2], y, shown(result.value), va="center", ha="right")
            axes.text(columns[3], y, f"{sign} {result.limit:g}", va="center", color="0.3")
            if expected is not None:
                axes.text(columns[4], y, verdict(expected[row].met), va="center", color="0.3")
            axes.text(
                columns[5],
                y,
                verdict(result.met),
                va="center",
                weight="bold",
                color=_GREEN if result.met else _RED,
            )
            axes.axhline(-row - 1, color="0.85", linewidth=0.6)


def verdict(met: bool) -> str:
    return "met" if met else "not met"


def gradient_paths(
    panels: Mapping[str, Mapping[str, np.ndarray]],
    extras: Mapping[str, Mapping[str, np.ndarray]],
    title: str,
    path: Path,
) -> None:
    """Norms of d carry_T / d carry_t against the gap, panels side by side.

    Args:
      panels: ``{panel: {path: log10 norms [draws, T + 1]}}``: median and range over draws;
        the first path is that of all together.
      extras: the same, dashed and thin, for bounds: medians.
      title: what was measured.
      path: of the PNG.
    """
    with page(path, 4.6 * len(panels), 3.9, title) as figure:
        row = np.atleast_1d(figure.subplots(1, len(panels), sharey=True))
        extent: list[float] = []
        for axes, (name, lines) in zip(row, panels.items(), strict=True):
            for index, (label, table) in enumerate(lines.items()):
                # All paths together lie under the others, wide enough to be seen beneath one.
                width = 1.8 if index or len(lines) == 1 else 4.5
                colour = COLOURS[index % len(COLOURS)]
                extent += _band(axes, table, label, colour, "-", width)
            for index, (label, table) in enumerate(extras.get(name, {}).items()):
                colour = (_GREY, _YELLOW, _VIOLET)[index % 3]
                style = "--" if index % 2 == 0 else ":"
                _band(axes, table, label, colour, style, 1.3, fill=False)
            axes.set_yscale("log")
            axes.set_title(name, loc="left")
            axes.set_xlabel("gap T - t, steps")
            axes.axhline(1, color="0.6", linewidth=0.8, zorder=0)
            axes.grid(alpha=0.25, linewidth=0.6)
            axes.set_xlim(0, max(table.shape[-1] for table in lines.values()) - 1)
        positive_values = [value for value in extent if value > 0]
        low = max(min(positive_values, default=1), _FLOOR)
        row[0].set_ylim(low / 10, 100 * max(positive_values, default=1))
        row[0].set_ylabel("|d state$_T$ / d state$_t$|, spectral norm")
        handles, labels = row[0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=min(3, len(labels)), fontsize=9
        )


def _band(
    axes: Any,
    table: np.ndarray,
    label: str,
    colour: str,
    style: str,
    width: float,
    fill: bool = True,
) -> tuple[float, float]:
    """Median and range over draws. Returns the least and the greatest value drawn."""
    with np.errstate(over="ignore"):
        values = 10.0 ** np.clip(np.asarray(table, float), -300, 300)
    gaps = np.arange(values.shape[-1])
    axes.plot(
        gaps,
        np.median(values, axis=0),
        style,
        color=colour,
        linewidth=width,
        alpha=0.55 if width > 4 else 1,
        label=label,
    )
    if fill:
        axes.fill_between(
            gaps, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.18, linewidth=0
        )
    return float(values.min()), float(values.max())


def gate_histograms(
    moments: Mapping[str, Mapping[str, np.ndarray]], title: str, path: Path
) -> None:
    """Histograms of gate activations, a row for each moment, a column a gate (UR-gates, Fig. 4).

    Args:
      moments: ``{moment: {gate: averages over time and batch, a number for each unit}}``, the
        same gates at each.
      title: what was measured.
      path: of the PNG.
    """
    rows, columns = len(moments), len(next(iter(moments.values())))
    with page(path, max(5.0, 2.7 * columns), 0.5 + 2.4 * rows, title) as figure:
        grid = figure.subplots(rows, columns, squeeze=False, sharex="col")
        for index, (moment, means) in enumerate(moments.items()):
            grid[index, 0].set_ylabel(f"units, {moment}" if moment else "units")
            for axes, (name, values) in zip(grid[index], means.items(), strict=True):
                signed = min(gates[name].min() for gates in moments.values()) < 0
                axes.hist(
                    values,
                    bins=50,
                    range=(-1, 1) if signed else (0, 1),
                    color=_BLUE,
                    edgecolor="white",
                    linewidth=0.3,
                )
                axes.set_xlim(-1 if signed else 0, 1)
                if not index:
                    axes.set_title("candidate u" if name == "u" else f"gate {name}", loc="left")
        for axes in grid[-1]:
            axes.set_xlabel("mean activation of a unit")


def timescales(
    periods: np.ndarray,
    law: TimescaleLaw | None,
    rows: Sequence[TimescaleLaw],
    title: str,
    path: Path,
) -> None:
    """P(D > x) of a cell's decay periods at the start, and of UR-gates' Table 4.

    Args:
      periods: D of many units, any shape.
      law: the law that they should follow, or None.
      rows: those of the table.
      title: what was measured.
      path: of the PNG.
    """
    values = np.sort(np.ravel(periods))
    survival = 1 - np.arange(values.size) / values.size  # P(D >= x)
    finite = np.isfinite(values)
    end = max(300.0, min(1e6, values[finite].max() * 3)) if finite.any() else 1e6
    x = np.geomspace(1, end, 2000)
    with page(path, 6.6, 4.3, title) as figure:
        axes = figure.subplots()
        # Two rows of the table may be the same curve: the later is dotted over the earlier.
        styles = ("-", "-", "-", "-", (0, (1, 2.5)))
        colours = (_YELLOW, _VIOLET, _GREEN, _RED, "black")
        for row, style, colour in zip(rows, styles, colours, strict=True):
            axes.plot(
                x,
                np.maximum(1 - row.cdf(x), 1e-9),
                linestyle=style,
                color=colour,
                alpha=0.8,
                linewidth=1.3,
                label=f"Table 4: {row.name}",
            )
        if law is not None:
            axes.plot(
                x,
                np.maximum(1 - law.cdf(x), 1e-9),
                color="black",
                linestyle="--",
                linewidth=1.4,
                label=f"this gate's law: {law.name}",
            )
        axes.step(values[finite], survival[finite], where="pre", color=_BLUE, linewidth=2.4)
        axes.plot([], [], color=_BLUE, linewidth=2.4, label="measured")
        axes.set(xscale="log", yscale="log", xlim=(1, end), ylim=(0.5 / values.size, 1.5))
        axes.set_xlabel("decay period D = 1 / (1 - f), steps")
        axes.set_ylabel("P(D > x)")
        axes.grid(alpha=0.25, linewidth=0.6)
        figure.legend(loc="outside lower center", ncols=3, fontsize=8.5)


# ---------------------------------------------------------------------------------------
# The refine gate
# ---------------------------------------------------------------------------------------


def refine_gate(path: Path) -> None:
    """UR-gates' Figure 2: band, effective gate, contours, gradient bounds.

    Args:
      path: of the PNG.
    """
    title = r"The refine gate  ·  g = f + $\alpha$(f) (2r - 1)"
    with page(path, 8.2, 6.8, title) as figure:
        (a, b), (c, d) = figure.subplots(2, 2)
        _draw_band(a)
        _draw_effective_band(b)
        _draw_contours(c)
        _draw_gradient_bounds(d)
        for axes in (a, b, d):
            axes.grid(alpha=0.25, linewidth=0.6)


def _draw_band(axes: Any) -> None:
    f = np.linspace(0, 1, 401)
    axes.plot(f, gate_theory.band(f), color=_BLUE, linewidth=1.8, label=r"$\alpha$(f) = f (1 - f)")
    # What f itself leaves room for: g may not leave [0, 1].
    axes.plot(f, np.minimum(f, 1 - f), color=_GREY, linestyle="--", label="min(f, 1 - f)")
    axes.set_title("a  band", loc="left")
    axes.set(xlabel="forget gate f", ylabel=r"$\alpha$(f)", xlim=(0, 1), ylim=(0, 0.52))
    axes.legend(fontsize=9)


def _draw_effective_band(axes: Any) -> None:
    x = np.linspace(-6, 6, 401)
    f, lower, upper = gate_theory.effective_band(x)
    axes.fill_between(x, lower, upper, color=_BLUE, alpha=0.18, linewidth=0)
    axes.plot(x, upper, color=_BLUE, linewidth=1.4, label="r = 1: 1 - (1 - f)²")
    axes.plot(x, f, color="black", linewidth=1.8, label="r = 1/2: f")
    axes.plot(x, lower, color=_RED, linewidth=1.4, label="r = 0: f²")
    axes.set_title("b  effective gate", loc="left")
    axes.set(xlabel="pre-activation of f", ylabel="effective gate g", xlim=(-6, 6), ylim=(0, 1))
    axes.legend(fontsize=9, loc="upper left")


def _draw_contours(axes: Any) -> None:
    f, r = np.meshgrid(np.linspace(0, 1, 301), np.linspace(0, 1, 301))
    g = gate_theory.effective_gate(f, r)
    levels = [0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99]
    lines = axes.contour(f, r, g, levels=levels, cmap="viridis", linewidths=1.3)
    # Each label where its line crosses its own height, so that none meets another.
    spots = [(float(np.interp(h, gate_theory.effective_gate(_F, h), _F)), h) for h in levels]
    axes.clabel(lines, fmt="%g", fontsize=8, manual=[_between(x, y) for x, y in spots])
    axes.set_title("c  effective gate g by f and r", loc="left")
    axes.set(xlabel="forget gate f", ylabel="refine gate r", aspect="equal")


_F = np.linspace(0, 1, 2001)


def _between(x: float, y: float) -> tuple[float, float]:
    return min(max(x, 0.04), 0.96), min(max(y, 0.06), 0.94)


def _draw_gradient_bounds(axes: Any) -> None:
    g = np.linspace(0.001, 0.999, 999)
    bounds = gate_theory.gradient_bounds(g)
    axes.plot(g, bounds.upper_ratio, color=_BLUE, linewidth=1.8, label="greatest over r")
    axes.plot(g, bounds.lower_ratio, color="black", linewidth=1.8, label="least over r")
    axes.axhline(1, color=_GREY, linestyle="--", linewidth=1)
    axes.set_title("d  gradient, refined over plain", loc="left")
    axes.set(
        xlabel="effective gate g",
        ylabel="|∇g| with r / |∇g| without",
        xlim=(0, 1),
        ylim=(0, None),
    )
    axes.legend(fontsize=9)
