"""Runs of one task beside each other: a table of their results and their learning curves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.catalog import EXPERIMENTS
from experiments.command import runs, tables
from experiments.compare import figure
from experiments.figures.curves import Curve
from experiments.records.reporting import number, say
from experiments.records.workdir import Workdir, read_rows
from experiments.settings.config import Config
from experiments.settings.errors import UserError
from experiments.settings.metrics import Metric
from experiments.training import loop

_TRAINED = "train_"  # before the names of what the rows of a workdir have of training
_QUIET = {"cell", "seed", "seeds", "steps", "learning_rates", "backend"}  # shown otherwise, or not


class Entry(NamedTuple):
    """A run with one of its learning rates.

    Attributes:
      workdir: of the run.
      config: of the run.
      rate: the learning rate.
      metric: what is compared.
      watched: what it was measured on: ``"held_out"``, ``"validation"`` or ``"training"``.
      rows: the run's evaluations.
      curve: the metric at each, of each seed, None for one that diverged.
      finished: whether the run is.
      values: of each seed: a finished run's results, else the last of its curve; of training
        that in any case.
      parameters: of the recurrent layer.
      seconds: of training, all learning rates together.
    """

    workdir: Path
    config: Config
    rate: float
    metric: Metric
    watched: str
    rows: list[dict[str, Any]]
    curve: list[list[float | None]]
    finished: bool
    values: list[float | None]
    parameters: int
    seconds: float


def run(workdirs: Sequence[Path], style: str, path: Path, metric_name: str | None = None) -> str:
    """Prints the table and draws the figure.

    Args:
      workdirs: of the runs.
      style: ``"mean"`` (with range) or ``"median"`` (with quartiles): lines over seeds.
      path: of the PNG.
      metric_name: the metric: one of the task's, or of those that training reports with
        ``train_`` before its name, such as ``"train_loss"``; None: the task's headline.

    Returns:
      The table.

    Raises:
      UserError: if a directory is not a workdir or has no evaluation yet, if the runs are
        of different tasks or metrics, or have no such metric.
    """
    entries = [entry for workdir in workdirs for entry in read(workdir, metric_name)]
    tasks = {entry.config.task.name: None for entry in entries}
    if len(tasks) > 1:
        raise UserError(f"these runs are of different tasks: {' and '.join(tasks)}.")
    metrics = {entry.metric.name: None for entry in entries}
    if len(metrics) > 1:
        raise UserError(f"these runs have different metrics: {' and '.join(metrics)}.")
    metric = entries[0].metric
    labels = distinct_labels(entries)
    table = markdown(entries, labels, metric)
    say(f"{table}\n")
    if len({entry.config.protocol for entry in entries}) > 1:
        labels = [
            f"{label} ({entry.config.protocol})"
            for label, entry in zip(labels, entries, strict=True)
        ]
    title = "  ·  ".join([next(iter(tasks)), _band_name(entries, style)])
    figure.draw(
        [_curve(entry, label) for entry, label in zip(entries, labels, strict=True)],
        metric,
        entries[0].watched.replace("_", "-"),
        style,
        title,
        path,
        say,
    )
    return table


def read(workdir: Path, metric_name: str | None = None) -> list[Entry]:
    """The run in a workdir, once for each learning rate; for ``metric_name`` see ``run``.

    Raises:
      UserError: if it is not a workdir, has no evaluation yet or no such metric.
    """
    config = runs.recorded_config(workdir, EXPERIMENTS)
    work = Workdir(workdir)
    metric, rows = _metric(config, metric_name), list(read_rows(work.metrics))
    training = metric_name is not None and metric_name.startswith(_TRAINED)
    if training:
        rows = [row for row in rows if row["step"]]  # before the first step there is none
    if not rows:
        raise UserError(f"the run in {workdir} has no evaluation yet.")
    if training:
        watched, curve = "training", [row[f"{_TRAINED}{metric.name}"] for row in rows]
    else:
        watched = next(name for name, value in rows[-1].items() if isinstance(value, dict))
        curve = [row[watched][metric.name] for row in rows]
    values, summary = curve[-1], work.summary()
    if summary is None:
        # Its devices may be elsewhere.
        any_mesh = dataclasses.replace(config.training, mesh="auto")
        description = loop.describe(dataclasses.replace(config, training=any_mesh))
        parameters = description["recurrent_parameters"]
    else:
        parameters = summary["recurrent_parameters"]
        if not training:
            values = [lane["value"] for lane in summary["metrics"][metric.name]["per_run"]]
    finished, seconds = summary is not None, sum(row["seconds"] for row in read_rows(work.timing))
    return [
        Entry(
            workdir=workdir,
            config=config,
            rate=rate,
            metric=metric,
            watched=watched,
            rows=rows,
            curve=[row[lanes] for row in curve],
            finished=finished,
            values=values[lanes],
            parameters=parameters,
            seconds=seconds,
        )
        for rate, lanes in config.training.lanes_by_rate.items()
    ]


def _metric(config: Config, metric_name: str | None) -> Metric:
    metrics = {metric.name: metric for metric in config.task.metrics}
    if metric_name is None:
        return config.task.metrics[0]
    training_names = [name for name in ("loss", *config.task.train_scores) if name in metrics]
    metrics |= {f"{_TRAINED}{name}": metrics[name] for name in training_names}
    if metric_name not in metrics:
        *rest, last = metrics
        raise UserError(
            f"--metric={metric_name}: {config.task.name} has {', '.join(rest)} and {last}."
        )
    return metrics[metric_name]


def _curve(entry: Entry, label: str) -> Curve:
    star = "*" * entry.values.count(None)
    x = np.array([row["examples"] for row in entry.rows])
    return Curve(label + star, x, np.array(entry.curve, float))


def distinct_labels(entries: Sequence[Entry]) -> list[str]:
    """The cell, and the settings given beside the protocol that not all runs share.

    Where that and the protocol are the same for two, the directory follows: as much of its end as
    tells them apart.
    """
    overrides = [dict(entry.config.overrides) for entry in entries]
    for settings, entry in zip(overrides, entries, strict=True):
        settings["learning_rate"] = entry.rate
        for name in _QUIET & settings.keys():
            del settings[name]
    labels = []
    for settings, entry in zip(overrides, entries, strict=True):
        differences = [
            f"{name.rstrip('_')}={_every_digit(value)}"
            for name, value in settings.items()
            if any(options.get(name) != value for options in overrides)
        ]
        labels.append(" ".join([entry.config.model.cell, *differences]))
    groups: dict[tuple[str, str], list[Path]] = {}
    for label, entry in zip(labels, entries, strict=True):
        groups.setdefault((label, entry.config.protocol), []).append(entry.workdir)
    return [
        f"{label} in {_end(entry.workdir, group)}" if len(group) > 1 else label
        for label, entry in zip(labels, entries, strict=True)
        for group in [groups[label, entry.config.protocol]]
    ]


def _end(workdir: Path, group: Sequence[Path]) -> Path:
    """The shortest end of a directory's path that none of the others in the group has."""
    parts = workdir.resolve().parts
    siblings = [path.resolve().parts for path in group if path != workdir]
    length = next(
        count
        for count in range(1, len(parts) + 1)
        if all(sibling[-count:] != parts[-count:] for sibling in siblings)
    )
    return Path(*parts[-length:])


def _every_digit(value: Any) -> str:
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def markdown(entries: Sequence[Entry], labels: Sequence[str], metric: Metric) -> str:
    """The table: a row for each run and learning rate, an asterisk for each seed that diverged.

    A diverged run is infinitely bad: so is a mean over it, and the bound on that side.
    """
    quantity = f"training {metric.name}" if entries[0].watched == "training" else metric.name
    head = ["cell", "protocol", "parameters", f"{quantity}: mean [min, max]", "seconds"]
    rows = []
    for label, entry in zip(labels, entries, strict=True):
        step = entry.rows[-1]["step"]
        suffix = f" at step {step}" if step < entry.config.training.steps else ""
        if not entry.finished and entry.watched == "validation":  # finished ones are tested
            suffix += " (validation)"
        if entry.finished and entry.watched == "held_out" and entry.config.training.reports_best:
            suffix += " (best)"  # chosen by the same set
        rows.append(
            [
                label,
                entry.config.protocol,
                f"{entry.parameters:,}",
                statistics(entry.values, metric) + suffix,
                f"{entry.seconds:.0f}",
            ]
        )
    return tables.markdown(head, rows)


def statistics(
    values: Sequence[float | None],
    metric: Metric,
    weights: Sequence[float] | None = None,
    *,
    spread: bool = True,
) -> str:
    """``mean [min, max]`` of the seeds, and an asterisk for each that diverged.

    Args:
      values: a score of each run.
      metric: that they are of.
      weights: of the runs in the mean; None: equal ones.
      spread: whether ``[min, max]`` follow the mean of several values.
    """
    penalty = -np.inf if metric.higher_is_better else np.inf
    numbers = [penalty if value is None else value for value in values]
    mean = np.average(numbers, weights=weights)
    texts = [_number(mean), _number(min(numbers)), _number(max(numbers))]
    text = "{} [{}, {}]".format(*texts) if spread and len(numbers) > 1 else texts[0]
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
