"""Accuracy of finished copy runs at delays that they were not trained at (h-detach, Table 1)."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import studies, study_figures
from experiments.config import Config, UserError
from experiments.learner import Learner
from experiments.reporting import say
from experiments.studies import Finished
from experiments.tasks.copy import CopyTask

FACTORS = (2, 4, 5, 10, 20, 50)  # h-detach: trained at 100, evaluated at 200 ... 5000


def given_runs(workdirs: Sequence[Path]) -> dict[str, Finished]:
    """Finished copy runs by label: the cell and its detaching, and the workdir if need be.

    Raises:
      UserError: if a workdir has no finished copy run.
    """
    found = [studies.finished(workdir) for workdir in workdirs]
    for workdir, run in zip(workdirs, found, strict=True):
        if not isinstance(run.config.task, CopyTask):
            raise UserError(f"the run in {workdir} is one of {run.config.task.name}, not of copy.")
    labels = [_label(run.config) for run in found]
    return {
        label if labels.count(label) == 1 else f"{label} ({workdir})": run
        for label, workdir, run in zip(labels, workdirs, found, strict=True)
    }


def _label(config: Config) -> str:
    carry = config.carry
    parts = [config.model.cell]
    parts += [f"detach {carry.detach_prob:g}"] if carry.detach_prob else []
    parts += [f"damp {carry.damp_prob:g}"] if carry.damp_prob else []
    return " ".join(parts)


def run(runs: Mapping[str, Finished], delays: Sequence[int], directory: Path) -> dict[str, Any]:
    """Evaluates runs at delays.

    Leaves ``transfer.json``, ``transfer.md`` and ``figures/transfer.png``.

    Args:
      runs: finished copy runs by label.
      delays: at evaluation, besides that of training; empty: ``FACTORS`` times the first's.
      directory: where the results go.

    Returns:
      What ``transfer.json`` holds: for each label, and each learning rate if a run has several,
      the delay of training, the lanes (seed, rate) and ``{delay: [accuracy of each lane, None if
      it diverged]}``.

    Raises:
      UserError: if the directory cannot be made.
    """
    first = _task(next(iter(runs.values())))
    studies.make(directory)
    trained_at = {_task(run).length for run in runs.values()}
    wanted = set(delays or [first.length * factor for factor in FACTORS]) | trained_at
    results: dict[str, Any] = {}
    for label, found in runs.items():
        rates = studies.by_rate(label, found.config)
        for name, lanes in rates.items():
            results[name] = {
                "trained_at": _task(found).length,
                "lanes": found.config.training.lanes[lanes],
                "accuracy": {},
            }
        for delay in sorted(wanted):
            accuracy = accuracies(found, delay)
            for name, lanes in rates.items():
                results[name]["accuracy"][str(delay)] = accuracy[lanes]
                say(f"{name}, delay {delay}: accuracy {_cell(accuracy[lanes])}")
    studies.write(directory / "transfer.json", json.dumps(results, indent=2) + "\n")
    table = markdown(results)
    studies.write(directory / "transfer.md", table + "\n")
    say(f"\n{table}\n")
    study_figures.transfer(
        {
            label: np.array(list(result["accuracy"].values()), float)
            for label, result in results.items()
        },
        sorted(wanted),
        trained_at,
        1 / first.symbols,
        directory / "figures" / "transfer.png",
        say,
    )
    return results


def _task(run: Finished) -> CopyTask:
    assert isinstance(run.config.task, CopyTask)
    return run.config.task


def accuracies(found: Finished, delay: int) -> list[float | None]:
    """Accuracy of each lane on the copied tokens of the held-out sequences; None: diverged.

    No training sequence has the tokens of a held-out one.
    """
    task = dataclasses.replace(_task(found), length=delay, loss_on="copied")
    learner = Learner(dataclasses.replace(found.config, task=task))
    learner.load()
    scores = np.atleast_1d(learner.final_scores(found.state)["accuracy"])
    return [
        None if bad else float(score) for score, bad in zip(scores, found.diverged, strict=True)
    ]


def markdown(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The table, accuracy in percent: a row for each delay, a column for each run."""
    delays = next(iter(results.values()))["accuracy"]
    rows = [
        [delay, *(_cell(result["accuracy"][delay]) for result in results.values())]
        for delay in delays
    ]
    return studies.markdown(["delay", *results], rows)


def _cell(values: Sequence[float | None]) -> str:
    """Percent: a number, or mean and range. A lane that diverged is an asterisk, and no accuracy
    at all: so are a mean and a minimum with it."""
    found = [-math.inf if value is None else 100 * value for value in values]
    shown = [
        f"{value:.2f}" if math.isfinite(value) else "-"
        for value in (sum(found) / len(found), min(found), max(found))
    ]
    text = "{} [{}, {}]".format(*shown) if len(found) > 1 else shown[0]
    return text + "*" * list(values).count(None)
