"""How far units of different cells have come from saturated gates (UR-gates, E.1, Fig. 9)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.command import runs, tables
from experiments.command.runs import Finished
from experiments.figures.curves import Curve
from experiments.forgetting import figure
from experiments.forgetting.settings import FORGETTING
from experiments.records.reporting import number, say
from experiments.records.storage import DEFAULTS, Storage
from experiments.records.workdir import read_rows
from experiments.settings.config import Config
from experiments.training.learner import Learner
from recurrent_gates import analysis

_EXAMPLES = 64  # of the held-out set that gates are averaged over


def check(configs: Mapping[str, Config]) -> None:
    """Raises ``UserError`` if a config cannot be trained, or its units have no timescales."""
    for config in configs.values():
        Learner(config).cell  # noqa: B018, a property that refuses several layers


def run(
    configs: Mapping[str, Config], directory: Path, profile: int = 0, storage: Storage = DEFAULTS
) -> dict[str, Any] | None:
    """Trains what is not trained yet, then reports errors and timescales.

    Leaves ``forgetting.json``, ``forgetting.md`` and ``figures/forgetting.png``.

    Args:
      configs: of a ``ForgettingTask``, by cell.
      directory: where the runs and the report go.
      profile: so many steps of each run are traced; 0: none.
      storage: see ``loop.run``.

    Returns:
      What ``forgetting.json`` holds, ``{label: report}``: the label is the cell, and the learning
      rate if there are several (in the file an infinite timescale is null); None if a run was
      asked to stop.

    Raises:
      UserError: if a config or the directory cannot be.
    """
    tables.claim(directory, (*configs, "forgetting.*", "figures"))
    finished_runs = runs.train_all(configs, FORGETTING, directory, profile, storage)
    if finished_runs is None:
        return None
    reports: dict[str, dict[str, Any]] = {}
    curves = []
    for cell, finished in finished_runs.items():
        run_report, rows = report(finished), list(read_rows(directory / cell / "metrics.jsonl"))
        examples = np.array([row["examples"] for row in rows])
        errors = np.array([row["held_out"]["mse"] for row in rows], float)
        for label, lanes in runs.by_rate(cell, finished.config).items():
            reports[label] = {name: values[lanes] for name, values in run_report.items()}
            stars = "*" * reports[label]["mse"].count(None)
            curves.append(Curve(label + stars, examples, errors[:, lanes]))
    tables.write(directory / "forgetting.json", json.dumps(_as_json(reports), indent=2) + "\n")
    table = markdown(reports)
    tables.write(directory / "forgetting.md", table + "\n")
    say(f"\n{table}\n")
    path = directory / "figures" / "forgetting.png"
    figure.draw(curves, reports, next(iter(configs.values())), path, say)
    return reports


def report(finished: Finished) -> dict[str, Any]:
    """Errors and timescales of a run.

    Returns:
      ``{"mse": [value or None], "before": [[period of each unit]], "after": ...}``, by lane;
      a lane that diverged has no timescales after training.
    """
    finished.learner.load()
    start = finished.learner.initial().params
    lanes = range(len(finished.config.training.lanes))
    before = [periods(finished, finished.lane(start, lane)) for lane in lanes]
    after = [
        [] if finished.diverged[lane] else periods(finished, finished.lane(finished.params, lane))
        for lane in lanes
    ]
    per_run = finished.summary["metrics"]["mse"]["per_run"]
    return {"mse": [lane["value"] for lane in per_run], "before": before, "after": after}


def periods(finished: Finished, params: Any) -> list[float]:
    """The timescale 1 / (1 - f) of each unit, in steps, from the shortest to the longest.

    An RMC's units are those of all of its slots.

    f is the effective forget gate, averaged over time and held-out examples (UR-gates, D.1).
    """
    inputs = finished.features(params, _EXAMPLES)
    gates = analysis.gate_activations(finished.learner.cell, params["recurrent"]["cell"], inputs)
    f = np.asarray(gates["f"], np.float64).mean(axis=(0, 1)).reshape(-1)  # 1 - f has few digits
    with np.errstate(divide="ignore"):
        return sorted((1 / (1 - f)).tolist())


def markdown(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """The table: errors, then the shortest and the median timescale before and after.

    With several seeds the numbers are means. Each lane that diverged is an asterisk and an
    infinite error; it has no timescales after training: if all did, there is a dash.
    """
    head = ("cell", "mse", "shortest before", "median before", "shortest after", "median after")
    rows = []
    for label, entry in reports.items():
        stars = "*" * entry["mse"].count(None)
        row = [label, f"∞{stars}" if stars else number(_mean(entry["mse"]))]
        for moment in ("before", "after"):
            lanes = [lane for lane in entry[moment] if lane]
            for statistic in (np.min, np.median):
                mean = _mean([statistic(lane) for lane in lanes]) if lanes else math.nan
                row.append("-" if not lanes else "∞" if mean == math.inf else f"{mean:.1f}")
        rows.append(row)
    return tables.markdown(head, rows)


def _as_json(tree: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(tree, dict):
        return {name: _as_json(value) for name, value in tree.items()}
    if isinstance(tree, list):
        return [_as_json(value) for value in tree]
    return None if tree == math.inf else tree


def _mean(values: Sequence[Any]) -> float:
    return float(np.mean(values))
