"""Figures that set several runs beside each other; matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from experiments.config import Config, UserError
from experiments.tasks import Metric

_COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#edae49", "#6a4c93", "#5f6b6d")
_DASHES = ("-", "--", ":", "-.")
_STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "font.size": 10,
    "legend.frameon": False,
}


_THICKNESS = {"before": 0.8, "after": 1.8}  # of lines that stand for before and after training
_BAD = 1e300  # stands for infinity, between which and a number no quantile can be found


class Curve(NamedTuple):
    """A line of a comparison.

    Attributes:
      label: of the line.
      x: ``[n]``.
      values: ``[n, lanes]``, NaN where there is no number: the lane has diverged, or nothing
        was measured.
    """

    label: str
    x: np.ndarray
    values: np.ndarray


def _pyplot(say: Callable[[str], None]) -> Any:
    """matplotlib's pyplot, or None, which is said."""
    try:
        import matplotlib
    except ImportError:
        say("matplotlib is not installed: no figure is drawn.")
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(plt: Any, figure: Any, path: Path, say: Callable[[str], None]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160)
    except (OSError, ValueError) as error:  # a place, or a name such as x.foo
        raise UserError(f"the figure {path} cannot be written: {error}.") from None
    finally:
        plt.close(figure)
    say(f"figure: {path}")


def line_style(index: int) -> dict[str, str]:
    """Colour and dashes of the line of that number: the first 24 differ."""
    colour = _COLOURS[index % len(_COLOURS)]
    return {"color": colour, "linestyle": _DASHES[index // len(_COLOURS) % len(_DASHES)]}


def band(
    values: np.ndarray, style: str, higher_is_better: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Middle, lower and upper line of values ``[n, lanes]``.

    ``"mean"``: mean, least, greatest (GATO); ``"median"``: median and quartiles (UR-gates).
    A lane without a number is infinitely bad, and so may a line be: NaN there, and where no lane
    has a number.
    """
    alive = np.isfinite(values)
    whole = np.where(alive, values, -_BAD if higher_is_better else _BAD)
    if style == "mean":
        lines = np.stack([whole.mean(axis=1), whole.min(axis=1), whole.max(axis=1)])
    else:
        lines = np.quantile(whole, (0.5, 0.25, 0.75), axis=1)
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


def _baseline(axes: Any, metric: Metric, side: Literal["left", "right"] = "right") -> None:
    axes.axhline(metric.baseline, color="0.45", linestyle="--", linewidth=1, zorder=0)
    axes.annotate(
        f"{metric.baseline_name} ({metric.baseline:.3g})",
        (0.06 if side == "left" else 1, metric.baseline),
        xycoords=("axes fraction", "data"),
        xytext=(0, -12 if metric.higher_is_better else 3),  # on the side without lines
        textcoords="offset points",
        ha=side,
        color="0.35",
        fontsize=9,
    )


def _limit(axes: Any, metric: Metric, curves: Sequence[Curve]) -> None:
    """From nothing to everything; of an error, to twice what no learning at all has, unless
    all of it lies above."""
    top = 1.03
    if not metric.higher_is_better:
        values = np.concatenate([np.ravel(curve.values) for curve in curves])
        values = values[np.isfinite(values)]
        top = axes.get_ylim()[1]
        if np.any(values < 2 * metric.baseline):
            top = min(top, 2 * metric.baseline)
    axes.set_ylim(0, top)


def _legend(figure: Any, labels: Sequence[str]) -> None:
    """A legend below the axes, in as many columns of at most three as its labels leave room for."""
    inches = 0.6 + 0.08 * max(map(len, labels))  # of a column at this size of letters
    width, height = figure.get_size_inches()
    columns = max(1, min(3, len(labels), int(width / inches)))
    rows = -(-len(labels) // columns)
    figure.set_size_inches(max(width, inches), height + 0.22 * rows)
    figure.legend(loc="outside lower center", ncols=columns, fontsize=9)


def learning_curves(
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
    """
    if (plt := _pyplot(say)) is None:
        return
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(6.8, 3.9), constrained_layout=True)
        draw_curves(axes, curves, style, metric.higher_is_better)
        _baseline(axes, metric)
        axes.set_xlabel("training examples")
        axes.set_ylabel(f"{watched} {metric.name}".replace("_", " "))
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        axes.set_xlim(0, max(curve.x[-1] for curve in curves) or 1)
        _limit(axes, metric, curves)
        axes.grid(alpha=0.25, linewidth=0.6)
        _legend(figure, [curve.label for curve in curves])
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        _save(plt, figure, path, say)


def forgetting(
    curves: Sequence[Curve],
    reports: Mapping[str, Mapping[str, Any]],
    config: Config,
    path: Path,
    say: Callable[[str], None],
) -> None:
    """Learning curves beside the timescales of units before and after (UR-gates, Fig. 9).

    Args:
      curves: held-out errors.
      reports: by label, ``{"before", "after", ...}``; see ``timescale_study``.
      config: of one of the runs.
      path: of the PNG.
      say: is told where the figure is, or why there is none.
    """
    if (plt := _pyplot(say)) is None:
        return
    with plt.rc_context(_STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 4.0), constrained_layout=True)
        draw_curves(left, curves, "mean", higher_is_better=False)
        _baseline(left, config.task.metrics[0])
        left.set_xlabel("training examples")
        left.set_ylabel("held-out mse")
        left.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:,g}k")
        left.set_xlim(0, max(curve.x[-1] for curve in curves))
        _limit(left, config.task.metrics[0], curves)
        for index, found in enumerate(reports.values()):
            for moment, thickness in _THICKNESS.items():
                periods = np.sort(np.concatenate(found[moment]))
                if not len(periods):
                    continue  # every seed diverged
                share = np.arange(1, len(periods) + 1) / len(periods)
                finite = np.isfinite(periods)
                right.step(
                    periods[finite],
                    share[finite],
                    where="post",
                    linewidth=thickness,
                    **line_style(index),
                )
        right.set_xscale("log")
        right.set_ylim(0, 1.02)
        right.set_xlabel("timescale 1 / (1 - f) of a unit, steps")
        right.set_ylabel("share of units with at most this")
        grey = {
            f"{moment} training": plt.Line2D([], [], color="0.45", linewidth=thickness)
            for moment, thickness in _THICKNESS.items()
        }
        right.legend(grey.values(), grey.keys(), fontsize=8.5)
        _legend(figure, [curve.label for curve in curves])
        for axes in (left, right):
            axes.grid(alpha=0.25, linewidth=0.6)
        title = f"{config.task.name}  ·  protocol {config.protocol}  ·  {_seeds(config)}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        _save(plt, figure, path, say)


def transfer(
    accuracies: Mapping[str, np.ndarray],
    delays: Sequence[int],
    trained_at: Collection[int],
    chance: float,
    path: Path,
    say: Callable[[str], None],
) -> None:
    """Accuracy against the delay at evaluation, a line for each run (h-detach, Table 1).

    Args:
      accuracies: ``[delays, lanes]`` by run, NaN for a lane that diverged (an asterisk).
      delays: at evaluation.
      trained_at: the delays that runs were trained at.
      chance: the accuracy of guessing.
      path: of the PNG.
      say: is told where the figure is, or why there is none.
    """
    if (plt := _pyplot(say)) is None:
        return
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(6.4, 4.0), constrained_layout=True)
        curves = [
            Curve(label + "*" * np.isnan(values[0]).sum(), np.array(delays), values)
            for label, values in accuracies.items()
        ]
        draw_curves(axes, curves, "mean", higher_is_better=True)
        for line in axes.lines:
            line.set_marker("o")
            line.set_markersize(4)
        _baseline(axes, Metric("accuracy", True, chance, "chance"), "left")
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
        figure.suptitle("transfer_copy", x=0.01, ha="left", fontsize=11)
        _save(plt, figure, path, say)


def _seeds(config: Config) -> str:
    training = config.training
    return f"{training.seeds} seeds each" if training.seeds > 1 else f"seed {training.seed}"
