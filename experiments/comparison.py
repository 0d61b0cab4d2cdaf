"""Runs of one task beside each other: a table of their results and their learning curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import studies, study_figures, train
from experiments.config import Config, UserError
from experiments.reporting import number, say
from experiments.study_figures import Curve
from experiments.tasks import Metric
from experiments.workdir import Workdir, read_rows

_QUIET = {"cell", "seed", "seeds", "steps", "learning_rates", "backend"}  # shown otherwise, or not


class Entry(NamedTuple):
    """A run with one of its learning rates.

    Attributes:
      workdir: of the run.
      config: of the run.
      rate: the learning rate.
      rows: its evaluations.
      watched: the set that these are on: ``"held_out"`` or ``"validation"``.
      finished: whether the values are the run's results, or those of its last evaluation.
      values: of each seed, None for one that diverged.
      parameters: of the recurrent layer.
      seconds: of training, all learning rates together.
    """

    workdir: Path
    config: Config
    rate: float
    rows: list[dict[str, Any]]
    watched: str
    finished: bool
    values: list[float | None]
    parameters: int
    seconds: float

    @property
    def lanes(self) -> slice:
        """Which lanes of the run have this rate."""
        return self.config.training.lanes_by_rate[self.rate]


def run(workdirs: Sequence[Path], style: str, figure: Path) -> str:
    """Prints the table and draws the figure.

    Args:
      workdirs: of the runs.
      style: ``"mean"`` (with range) or ``"median"`` (with quartiles): lines over seeds.
      figure: path of the PNG.

    Returns:
      The table.

    Raises:
      UserError: if a directory is not a workdir or has no evaluation yet, or if the runs are
        of different tasks or metrics.
    """
    entries = [entry for workdir in workdirs for entry in read(workdir)]
    tasks = {entry.config.task.name: None for entry in entries}
    if len(tasks) > 1:
        raise UserError(f"these runs are of different tasks: {' and '.join(tasks)}.")
    metrics = {entry.config.task.metrics[0].name: None for entry in entries}
    if len(metrics) > 1:
        raise UserError(f"these runs have different metrics: {' and '.join(metrics)}.")
    metric = entries[0].config.task.metrics[0]
    table = markdown(entries, metric)
    say(f"{table}\n")
    labels = _names(entries)
    if len({entry.config.protocol for entry in entries}) > 1:
        labels = [
            f"{label} ({entry.config.protocol})"
            for label, entry in zip(labels, entries, strict=True)
        ]
    title = "  ·  ".join([next(iter(tasks)), _band_name(entries, style)])
    study_figures.learning_curves(
        [_curve(entry, metric, label) for entry, label in zip(entries, labels, strict=True)],
        metric,
        entries[0].watched.replace("held_out", "held-out"),
        style,
        title,
        figure,
        say,
    )
    return table


def read(workdir: Path) -> list[Entry]:
    """The run in a workdir, once for each learning rate.

    Raises:
      UserError: if it is not a workdir, or has no evaluation yet.
    """
    config = studies.recorded_config(workdir)
    work = Workdir(workdir)
    rows = list(read_rows(work.metrics))
    if not rows:
        raise UserError(f"the run in {workdir} has no evaluation yet.")
    metric = config.task.metrics[0].name
    watched = next(name for name, value in rows[-1].items() if isinstance(value, dict))
    summary = work.summary()
    if summary is None:
        values = rows[-1][watched][metric]
        parameters = train.describe(config)["recurrent_parameters"]
    else:
        values = [lane["value"] for lane in summary["metrics"][metric]["per_run"]]
        parameters = summary["recurrent_parameters"]
    seconds = sum(row["seconds"] for row in read_rows(work.timing))
    entries = [
        Entry(
            workdir, config, rate, rows, watched, summary is not None, values, parameters, seconds
        )
        for rate in config.training.learning_rates
    ]
    return [entry._replace(values=values[entry.lanes]) for entry in entries]


def _curve(entry: Entry, metric: Metric, label: str) -> Curve:
    values = [row[entry.watched][metric.name][entry.lanes] for row in entry.rows]
    star = "*" * entry.values.count(None)
    x = np.array([row["examples"] for row in entry.rows])
    return Curve(label + star, x, np.array(values, float))


def _names(entries: Sequence[Entry]) -> list[str]:
    """The cell, and the settings given beside the protocol that not all runs share.

    Where that and the protocol are the same for two, the directory follows.
    """
    given = [dict(entry.config.overrides) for entry in entries]
    for settings, entry in zip(given, entries, strict=True):
        settings["learning_rate"] = entry.rate
        for name in _QUIET & settings.keys():
            del settings[name]
    names = []
    for settings, entry in zip(given, entries, strict=True):
        own = [
            f"{name.rstrip('_')}={_shown(value)}"
            for name, value in settings.items()
            if any(other.get(name) != value for other in given)
        ]
        names.append(" ".join([entry.config.model.cell, *own]))
    rows = [(name, entry.config.protocol) for name, entry in zip(names, entries, strict=True)]
    return [
        f"{row[0]} in {entry.workdir.name}" if rows.count(row) > 1 else row[0]
        for row, entry in zip(rows, entries, strict=True)
    ]


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def markdown(entries: Sequence[Entry], metric: Metric) -> str:
    """The table: a row for each run and learning rate, an asterisk for each seed that diverged.

    A diverged run is infinitely bad: so is a mean over it, and the bound on that side.
    """
    head = ["cell", "protocol", "parameters", f"{metric.name}: mean [min, max]", "seconds"]
    rows = []
    for name, entry in zip(_names(entries), entries, strict=True):
        step = entry.rows[-1]["step"]
        at = f" at step {step}" if step < entry.config.training.steps else ""
        if not entry.finished and entry.watched == "validation":  # finished ones are tested
            at += " (validation)"
        rows.append(
            [
                name,
                entry.config.protocol,
                f"{entry.parameters:,}",
                statistics(entry.values, metric) + at,
                f"{entry.seconds:.0f}",
            ]
        )
    return studies.markdown(head, rows)


def statistics(values: Sequence[float | None], metric: Metric) -> str:
    """``mean [min, max]`` of the seeds, and an asterisk for each that diverged."""
    bad = -np.inf if metric.higher_is_better else np.inf
    numbers = [bad if value is None else value for value in values]
    shown = [_number(np.mean(numbers)), _number(min(numbers)), _number(max(numbers))]
    text = "{} [{}, {}]".format(*shown) if len(numbers) > 1 else shown[0]
    return text + "*" * list(values).count(None)


def _number(value: Any) -> str:
    """Infinite error is an infinite loss, or no accuracy at all."""
    if np.isfinite(value):
        return number(value)
    return "∞" if value > 0 else "-"


def _band_name(entries: Sequence[Entry], style: str) -> str:
    if all(len(entry.values) == 1 for entry in entries):
        return "one seed each"
    return "mean and range over seeds" if style == "mean" else "median and quartiles over seeds"
