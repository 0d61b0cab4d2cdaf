"""The figures of ``docs/RESULTS.md``, drawn from the files of results: learning curves, and scores
against a setting."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.figures.canvas import page
from experiments.figures.curves import Curve, draw_baseline, draw_curves, draw_legend, limit
from experiments.results.records import Record
from experiments.settings.metrics import Metric

_NOT_OF_A_NAME = re.compile(r"[^a-z0-9]+")
_SIZE = (6.4, 3.4)  # inches


class Figure(NamedTuple):
    """The learning curves of some rows of a file of results, or their scores against a setting.

    Attributes:
      name: of the file of results, followed by the settings that all rows share.
      metric: on the vertical axis.
      rows: label and runs of each line; a run without a curve is left out of learning curves.
      against: the setting on the horizontal axis, a number; "": learning curves.
    """

    name: str
    metric: Metric
    rows: tuple[tuple[str, tuple[Record, ...]], ...]
    against: str = ""

    @property
    def file(self) -> str:
        """The name of its PNG."""
        return _NOT_OF_A_NAME.sub("_", self.name.lower()).strip("_") + ".png"

    @property
    def digest(self) -> str:
        """SHA-256 of all that is drawn, which the PNG has as its ``Source``."""
        lines = [(label, [self._run_data(run) for run in runs]) for label, runs in self.rows]
        content = json.dumps([self.name, self.metric._asdict(), lines])
        return hashlib.sha256(content.encode()).hexdigest()

    def _run_data(self, run: Record) -> tuple[Any, ...]:
        if self.against:
            return run.seeds, run.settings[self.against], run.values
        return run.seeds, run.curve


def is_of(path: Path, figure: Figure) -> bool:
    """Whether a PNG is there, and was drawn from the same data."""
    try:
        return figure.digest.encode() in path.read_bytes()
    except OSError:
        return False


def draw(figure: Figure, path: Path) -> None:
    """Draws a line for each row: the mean over seeds, with a band from the least to the greatest.

    An error has a logarithmic axis.

    Args:
      figure: what to draw.
      path: of the PNG.

    Raises:
      UserError: if it cannot be written.
    """
    if figure.against:
        curves = [_scores(label, runs, figure.against) for label, runs in figure.rows]
    else:
        curves = [_curve(label, runs) for label, runs in figure.rows]
    metric = figure.metric
    with page(path, *_SIZE, figure.name, source=figure.digest) as sheet:
        axes = sheet.subplots()
        if not metric.higher_is_better:
            axes.set_yscale("log")
        draw_curves(axes, curves, "mean", metric.higher_is_better)
        draw_baseline(axes, metric)
        if metric.higher_is_better:
            limit(axes, metric, curves)
        if figure.against:
            axes.set_xscale("log")
            axes.set_xticks(sorted({x for curve in curves for x in curve.x}), minor=False)
            axes.minorticks_off()
            axes.set_xlabel(figure.against.replace("_", " "))
        else:
            axes.set_xlim(0, max(curve.x[-1] for curve in curves))
            axes.set_xlabel("updates")
        axes.set_ylabel(metric.name.replace("_", " "))
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        axes.grid(alpha=0.25, linewidth=0.6)
        draw_legend(sheet, [curve.label for curve in curves])


def _curve(label: str, runs: Sequence[Record]) -> Curve:
    """The scores of all seeds at the steps of any run, as far as every run goes.

    Between the steps that a run has kept, its scores lie on a line.
    """
    kept = [np.array(run.curve["step"]) for run in runs]
    first, last = max(steps[0] for steps in kept), min(steps[-1] for steps in kept)
    steps = np.unique(np.concatenate(kept))
    steps = steps[(first <= steps) & (steps <= last)]
    values = [
        np.interp(steps, own_steps, seed)
        for own_steps, run in zip(kept, runs, strict=True)
        for seed in np.array(run.curve["value"], float).T  # None is NaN
    ]
    return Curve(label, steps, np.stack(values, axis=-1))


def _scores(label: str, runs: Sequence[Record], setting: str) -> Curve:
    """The scores of all seeds at each value of a setting."""
    values: dict[float, list[float | None]] = {}
    for run in runs:
        values.setdefault(run.settings[setting], []).extend(run.values)
    positions = sorted(values)
    return Curve(label, np.array(positions, float), np.array([values[x] for x in positions], float))
