"""How far units of different cells have come from saturated gates (UR-gates, E.1, Fig. 9)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import studies, study_figures
from experiments.config import Config
from experiments.reporting import number, say
from experiments.studies import Finished
from experiments.workdir import read_rows
from recurrent_gates import analysis

_EXAMPLES = 64  # of the held-out set that gates are averaged over


def run(runs: Mapping[str, Config], directory: Path) -> dict[str, Any] | None:
    """Trains what is not trained yet, then reports errors and timescales.

    Leaves ``forgetting.json``, ``forgetting.md`` and ``figures/forgetting.png``.

    Args:
      runs: configs of a ``ForgettingTask`` by cell.
      directory: where the runs and the report go.

    Returns:
      What ``forgetting.json`` holds, ``{label: report}``: the label is the cell, and the learning
      rate if there are several (in the file an infinite timescale is null); None if a run was
      asked to stop.
    """
    trained = studies.train_all(runs, directory)
    if trained is None:
        return None
    reports, curves = {}, []
    for cell, found in trained.items():
        whole, rows = report(found), list(read_rows(directory / cell / "metrics.jsonl"))
        examples = np.array([row["examples"] for row in rows])
        errors = np.array([row["held_out"]["mse"] for row in rows], float)
        for label, lanes in studies.by_rate(cell, found.config).items():
            reports[label] = {name: values[lanes] for name, values in whole.items()}
            stars = "*" * reports[label]["mse"].count(None)
            curves.append(study_figures.Curve(label + stars, examples, errors[:, lanes]))
    studies.write(directory / "forgetting.json", json.dumps(_as_json(reports), indent=2) + "\n")
    table = markdown(reports)
    studies.write(directory / "forgetting.md", table + "\n")
    say(f"\n{table}\n")
    figure = directory / "figures" / "forgetting.png"
    study_figures.forgetting(curves, reports, next(iter(runs.values())), figure, say)
    return reports


def report(found: Finished) -> dict[str, Any]:
    """Errors and timescales of a run.

    Returns:
      ``{"mse": [value or None], "before": [[period of each unit]], "after": ...}``, by lane;
      a lane that diverged has no timescales after training.
    """
    found.learner.load()
    start = found.learner.initial().params
    lanes = range(len(found.config.training.lanes))
    before = [periods(found, found.lane(start, lane)) for lane in lanes]
    after = [
        [] if found.diverged[lane] else periods(found, found.lane(found.params, lane))
        for lane in lanes
    ]
    per_run = found.summary["metrics"]["mse"]["per_run"]
    return {"mse": [run["value"] for run in per_run], "before": before, "after": after}


def periods(found: Finished, params: Any) -> list[float]:
    """The timescale 1 / (1 - f) of each unit, in steps, from the shortest to the longest.

    f is the effective forget gate, averaged over time and held-out examples (UR-gates, D.1).
    """
    inputs = found.learner.features(params, _EXAMPLES)
    gates = analysis.gate_activations(found.learner.cell, params["recurrent"]["cell"], inputs)
    f = analysis.gate_means({"f": gates["f"]})["f"]
    return sorted(float(period) for period in analysis.timescales(f))


def markdown(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """The table: errors, then the shortest and the median timescale before and after.

    With several seeds the numbers are means. Each lane that diverged is an asterisk and an
    infinite error; it has no timescales after training: if all did, there is a dash.
    """
    head = ("cell", "mse", "shortest before", "median before", "shortest after", "median after")
    rows = []
    for cell, found in reports.items():
        stars = "*" * found["mse"].count(None)
        row = [cell, f"∞{stars}" if stars else number(_mean(found["mse"]))]
        for moment in ("before", "after"):
            lanes = [lane for lane in found[moment] if lane]
            for statistic in (np.min, np.median):
                mean = _mean([statistic(lane) for lane in lanes]) if lanes else math.nan
                row.append("-" if not lanes else "∞" if mean == math.inf else f"{mean:.1f}")
        rows.append(row)
    return studies.markdown(head, rows)


def _as_json(tree: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(tree, dict):
        return {name: _as_json(value) for name, value in tree.items()}
    if isinstance(tree, list):
        return [_as_json(value) for value in tree]
    return None if tree == math.inf else tree


def _mean(values: Sequence[Any]) -> float:
    return float(np.mean(values))
