"""What a sweep found: a table and a figure, a row for each combination but seed and rate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.command import tables
from experiments.compare import figure
from experiments.compare.table import statistics
from experiments.figures.curves import Curve
from experiments.records.reporting import say
from experiments.records.workdir import Workdir, read_rows
from experiments.settings.metrics import Metric
from experiments.sweep.plan import Run

NAMES = ("sweep.md", "sweep.json", "sweep.png")
SET_ASIDE = ("sweep-*.md", "sweep-*.json", "sweep-*.png")  # reports on other runs


class Row(NamedTuple):
    """A combination with its best rate.

    Attributes:
      label: the flags in which it differs from the others.
      rate: the rate that was best on the set that was watched.
      rates: how many were tried.
      runs: those with that rate, a seed each.
      values: their results, None for one that diverged.
      missing: how many of them are not finished.
    """

    label: str
    rate: float
    rates: int
    runs: tuple[Run, ...]
    values: tuple[float | None, ...]
    missing: int


def write(runs: Sequence[Run]) -> str:
    """Prints the table, and writes ``sweep.md``, ``sweep.json`` and ``sweep.png`` beside the runs.

    Reports on other runs than these are kept under other names, ``sweep-1.md`` and so on.

    Returns:
      The table.
    """
    directory = runs[0].workdir.parent
    metric = runs[0].config.task.metrics[0]
    rows = best_rows(runs, metric)
    head = ["run", "rate", f"{metric.name}: mean [min, max]", "n"]
    cells = [
        [
            row.label,
            f"{row.rate:g}" + (f" of {row.rates}" if row.rates > 1 else ""),
            statistics(row.values, metric) if row.values else "-",
            f"{len(row.values)}" + (f", {row.missing} missing" if row.missing else ""),
        ]
        for row in rows
    ]
    table = tables.markdown(head, cells)
    say(f"\n{table}\n")
    if not _runs_of(tables.read(directory / "sweep.json")) <= {run.workdir.name for run in runs}:
        tables.set_aside([directory / name for name in NAMES])
    tables.write(directory / "sweep.md", table + "\n")
    content = {
        row.label: {
            "learning_rate": row.rate,
            "runs": [str(run.workdir) for run in row.runs],
            "values": row.values,
        }
        for row in rows
    }
    tables.write(directory / "sweep.json", json.dumps(content, indent=2) + "\n")
    _draw(rows, metric, directory / "sweep.png")
    return table


def _runs_of(content: Any) -> set[str]:
    """The folders of the runs that a ``sweep.json`` reports on; none if it is damaged."""
    try:
        return {Path(workdir).name for row in content.values() for workdir in row["runs"]}
    except (AttributeError, KeyError, TypeError):
        return set()


def best_rows(runs: Sequence[Run], metric: Metric) -> list[Row]:
    """A row for each combination of flags but seed and rate, with its best rate.

    The best one has the best mean, over seeds, on the set that was watched in training: the
    validation set where there is one. A seed that diverged, or is missing, is infinitely bad.
    """
    groups: dict[frozenset[tuple[str, float | str]], dict[float, list[Run]]] = {}
    rows: dict[frozenset[tuple[str, float | str]], dict[str, str]] = {}
    for run in runs:
        rows.setdefault(run.row_key, run.row)
        for rate in run.config.training.learning_rates:
            groups.setdefault(run.row_key, {}).setdefault(rate, []).append(run)
    labels = _labels(list(rows.values()))
    return [
        _best_row(label, by_rate, metric)
        for label, by_rate in zip(labels, groups.values(), strict=True)
    ]


def _best_row(label: str, by_rate: dict[float, list[Run]], metric: Metric) -> Row:
    bad = -np.inf if metric.higher_is_better else np.inf
    scores = {
        rate: np.mean(
            [
                bad if value is None else value
                for run in runs
                for value in _watched(run, rate, metric) or [None]
            ]
        )
        for rate, runs in by_rate.items()
    }
    choose = max if metric.higher_is_better else min
    rate = choose(scores, key=lambda rate: scores[rate])
    finished_runs = [run for run in by_rate[rate] if _summary(run) is not None]
    values = [value for run in finished_runs for value in _results(run, rate, metric)]
    missing = len(by_rate[rate]) - len(finished_runs)
    return Row(label, rate, len(by_rate), tuple(finished_runs), tuple(values), missing)


def _summary(run: Run) -> dict[str, Any] | None:
    """Of a run that is finished, and was not trained for longer than it is asked to be."""
    summary = Workdir(run.workdir).summary()
    return None if summary is None or summary["steps"] > run.config.training.steps else summary


def _results(run: Run, rate: float, metric: Metric) -> list[float | None]:
    summary = _summary(run)
    assert summary is not None
    lanes = run.config.training.lanes_by_rate[rate]
    return [lane["value"] for lane in summary["metrics"][metric.name]["per_run"]][lanes]


def _watched(run: Run, rate: float, metric: Metric) -> list[float | None] | None:
    """The score of each seed on the set that was watched: the best one where that is reported."""
    summary = _summary(run)
    if summary is None:
        return None
    lanes = run.config.training.lanes_by_rate[rate]
    if "validation" in summary:
        return [lane["value"] for lane in summary["validation"][metric.name]["per_run"]][lanes]
    if run.config.training.reports_best:  # of the one held-out set, so what is reported
        return _results(run, rate, metric)
    last_row = list(read_rows(Workdir(run.workdir).metrics))[-1]
    scores = next(value for value in last_row.values() if isinstance(value, dict))
    return list(scores[metric.name][lanes])


def _labels(rows: Sequence[dict[str, str]]) -> list[str]:
    """The flags in which a row differs from another one; the cell always."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    differing = [n for n in names if n == "cell" or len({row.get(n) for row in rows}) > 1]
    labels = []
    for row in rows:
        texts = [row[n] if n == "cell" else f"{n}={row[n]}" for n in differing if n in row]
        labels.append(" ".join(texts) or "run")
    return labels


def _draw(rows: Sequence[Row], metric: Metric, path: Path) -> None:
    curves, watched = [], "held-out"
    for row in rows:
        tables_of_runs = [list(read_rows(Workdir(run.workdir).metrics)) for run in row.runs]
        if not tables_of_runs:
            continue
        steps = min(len(table) for table in tables_of_runs)
        name = next(n for n, value in tables_of_runs[0][0].items() if isinstance(value, dict))
        watched = name.replace("_", "-")
        lanes = [run.config.training.lanes_by_rate[row.rate] for run in row.runs]
        values = np.array(
            [
                [
                    value
                    for table, lane_slice in zip(tables_of_runs, lanes, strict=True)
                    for value in table[step][name][metric.name][lane_slice]
                ]
                for step in range(steps)
            ],
            float,
        )
        x = np.array([evaluation["examples"] for evaluation in tables_of_runs[0][:steps]])
        curves.append(Curve(row.label, x, values))
    if curves:
        figure.draw(curves, metric, watched, "mean", "sweep", path, say)
