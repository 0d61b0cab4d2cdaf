"""The figures of ``docs/RESULTS.md``: learning curves, drawn from the files of results."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.figures.canvas import page
from experiments.figures.curves import Curve, draw_baseline, draw_curves, draw_legend
from experiments.results.records import Record
from experiments.settings.metrics import Metric

_NOT_OF_A_NAME = re.compile(r"[^a-z0-9]+")
_SIZE = (6.4, 3.4)  # inches


class Figure(NamedTuple):
    """The learning curves of some rows of a file of results.

    Attributes:
      name: of the file of results, followed by the settings that all rows share.
      metric: on the vertical axis.
      rows: label and runs of each line; a run without a curve is left out.
    """

    name: str
    metric: Metric
    rows: tuple[tuple[str, tuple[Record, ...]], ...]

    @property
    def file(self) -> str:
        """The name of its PNG."""
        return _NOT_OF_A_NAME.sub("_", self.name.lower()).strip("_") + ".png"

    @property
    def digest(self) -> str:
        """SHA-256 of all that is drawn, which the PNG has as its ``Source``."""
        drawn = [(label, [(run.seeds, run.curve) for run in runs]) for label, runs in self.rows]
        content = json.dumps([self.name, self.metric._asdict(), drawn])
        return hashlib.sha256(content.encode()).hexdigest()


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
    curves = [_curve(label, runs) for label, runs in figure.rows]
    metric = figure.metric
    with page(path, *_SIZE, figure.name, source=figure.digest) as sheet:
        axes = sheet.subplots()
        if not metric.higher_is_better:
            axes.set_yscale("log")
        draw_curves(axes, curves, "mean", metric.higher_is_better)
        draw_baseline(axes, metric)
        if metric.higher_is_better:
            axes.set_ylim(0, 1.03)
        axes.set_xlim(0, max(curve.x[-1] for curve in curves))
        axes.set_xlabel("updates")
        axes.set_ylabel(metric.name.replace("_", " "))
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        axes.grid(alpha=0.25, linewidth=0.6)
        draw_legend(sheet, [curve.label for curve in curves])


def _curve(label: str, runs: Sequence[Record]) -> Curve:
    """The scores of all seeds at the steps that every run has."""
    tables = [dict(zip(run.curve["step"], run.curve["value"], strict=True)) for run in runs]
    steps = sorted(set.intersection(*(set(table) for table in tables)))
    values = [[value for table in tables for value in table[step]] for step in steps]
    return Curve(label, np.array(steps), np.array(values, float))  # None is NaN
