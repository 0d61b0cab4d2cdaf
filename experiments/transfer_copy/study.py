"""Accuracy of finished copy runs at delays that they were not trained at (h-detach, Table 1)."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.command import runs, tables
from experiments.command.runs import Finished
from experiments.copy.settings import COPY
from experiments.copy.task import CopyTask
from experiments.records.reporting import say
from experiments.records.storage import DEFAULTS, Storage
from experiments.records.workdir import commit
from experiments.settings.config import Config
from experiments.settings.errors import UserError
from experiments.training.learner import Learner
from experiments.transfer_copy import figure

_REPORTS = ("transfer.*", "transfer-*.*", "figures")
FACTORS = (2, 4, 5, 10, 20, 50)  # h-detach: trained at 100, evaluated at 200 ... 5000
SEQUENCES = 5000  # h-detach code: transfer_copy.py draws so many for each delay
_FRESH_KEY = 0xF4E5  # of these sequences: the same for all runs and delays


@dataclasses.dataclass(frozen=True, kw_only=True)
class FreshCopyTask(CopyTask):
    """Copying, scored on other sequences than those that chose the best parameters.

    They are drawn as A is, and may be ones of the training set, as in the published code.
    """

    def load(self) -> dict[str, jax.Array]:
        return self.drawn(_FRESH_KEY)


def finished_runs(workdirs: Sequence[Path]) -> dict[str, Finished]:
    """Finished copy runs by label: the cell and its detaching, and the workdir if need be.

    Raises:
      UserError: if a workdir has no finished copy run.
    """
    finished = [runs.finished(workdir, [COPY]) for workdir in workdirs]
    labels = [_label(finished_run.config) for finished_run in finished]
    return {
        label if labels.count(label) == 1 else f"{label} ({workdir})": finished_run
        for label, workdir, finished_run in zip(labels, workdirs, finished, strict=True)
    }


def _label(config: Config) -> str:
    carry = config.carry
    parts = [config.model.cell]
    parts += [f"detach {carry.detach_prob:g}"] if carry.detach_prob else []
    parts += [f"damp {carry.damp_prob:g}"] if carry.damp_prob else []
    return " ".join(parts)


def check(configs: Sequence[Config], delays: Sequence[int]) -> None:
    """Refuses delays that cannot be.

    Args:
      configs: of copy runs.
      delays: at evaluation; see ``evaluate``.

    Raises:
      UserError: if a delay is out of range.
    """
    dataclasses.replace(COPY.declarations()["length"], name="delays", several=True).check(
        _delays(configs, delays)
    )


def check_memory(configs: Sequence[Config], delays: Sequence[int]) -> None:
    """Refuses runs and delays that need more memory than there is, before anything is trained.

    Args:
      configs: of copy runs.
      delays: at evaluation; see ``evaluate``.

    Raises:
      UserError: if they do.
    """
    chosen_delays = _delays(configs, delays)
    for config in configs:
        Learner(config).check_memory()
        try:
            Learner(_at_delay(config, chosen_delays[-1])).check_memory()
        except UserError as error:
            raise UserError(f"--delays={chosen_delays[-1]}: {error}") from None


def _delays(configs: Sequence[Config], delays: Sequence[int]) -> tuple[int, ...]:
    """Those of evaluation, from the shortest to the longest."""
    evaluation_delays = delays or [configs[0].task.length * factor for factor in FACTORS]
    return tuple(sorted({*evaluation_delays, *(config.task.length for config in configs)}))


def _at_delay(config: Config, delay: int) -> Config:
    changes = {"length": delay, "loss_on": "copied", "held_out_sequences": SEQUENCES}
    task = FreshCopyTask(**dataclasses.asdict(config.task) | changes)
    return dataclasses.replace(config, task=task)


def run(
    configs: Mapping[str, Config],
    delays: Sequence[int],
    directory: Path,
    profile: int = 0,
    storage: Storage = DEFAULTS,
) -> dict[str, Any] | None:
    """Trains what is not trained yet, then evaluates it.

    Args:
      configs: of copy runs by label.
      delays: at evaluation; see ``evaluate``.
      directory: where the runs and the results go.
      profile: so many steps of each run are traced; 0: none.
      storage: see ``loop.run``.

    Returns:
      As ``evaluate`` does; None if a run was asked to stop.

    Raises:
      UserError: if a config or the directory cannot be.
    """
    tables.claim(directory, (*configs, *_REPORTS))
    finished = runs.train_all(configs, COPY, directory, profile, storage)
    return None if finished is None else evaluate(finished, delays, directory)


def evaluate(
    finished: Mapping[str, Finished], delays: Sequence[int], directory: Path
) -> dict[str, Any]:
    """Evaluates runs at delays.

    Leaves ``transfer.json``, ``transfer.md`` and ``figures/transfer.png``. Those of other runs or
    delays are kept under other names, ``transfer-1.json`` and so on.

    Args:
      finished: copy runs by label.
      delays: at evaluation, besides that of training; empty: ``FACTORS`` times the first's.
      directory: where the results go.

    Returns:
      What ``transfer.json`` holds: for each label, and each learning rate if a run has several,
      the delay of training, what run it is, the lanes (seed, rate) and ``{delay: [accuracy of each
      lane, None if it diverged]}``.

    Raises:
      UserError: if the directory cannot be made.
    """
    tables.claim(directory, _REPORTS)
    configs = [finished_run.config for finished_run in finished.values()]
    chosen_delays = _delays(configs, delays)
    results: dict[str, Any] = {}
    for label, finished_run in finished.items():
        lanes_by_label = runs.by_rate(label, finished_run.config)
        for name, lanes in lanes_by_label.items():
            results[name] = {
                "trained_at": finished_run.config.task.length,
                "run": _described(finished_run),
                "lanes": finished_run.config.training.lanes[lanes],
                "accuracy": {},
            }
        for delay in chosen_delays:
            accuracy = accuracies(finished_run, delay)
            for name, lanes in lanes_by_label.items():
                results[name]["accuracy"][str(delay)] = accuracy[lanes]
                say(f"{name}, delay {delay}: accuracy in %: {_percent(accuracy[lanes])}")
    drawing = directory / "figures" / "transfer.png"
    if _asked(tables.read(directory / "transfer.json")) != _asked(results):
        tables.set_aside([directory / "transfer.json", directory / "transfer.md", drawing])
    tables.write(directory / "transfer.json", json.dumps(results, indent=2) + "\n")
    table = markdown(results)
    tables.write(directory / "transfer.md", table + "\n")
    say(f"\n{table}\n")
    figure.draw(
        {
            label: np.array(list(result["accuracy"].values()), float)
            for label, result in results.items()
        },
        chosen_delays,
        {config.task.length for config in configs},
        1 / configs[0].task.symbols,
        drawing,
        say,
    )
    return results


def _asked(results: Any) -> Any:
    """The runs and delays that results are of; None if they are none."""
    try:
        return [
            (result["run"]["identity"], result["run"]["steps"], list(result["accuracy"]))
            for result in results.values()
        ]
    except (AttributeError, KeyError, TypeError):
        return None


def _described(finished: Finished) -> dict[str, Any]:
    """Settings and origin of a run, for what is made of the file later."""
    config, summary = finished.config, finished.summary
    return {
        "cell": config.model.cell,
        "protocol": config.protocol,
        "overrides": config.overrides,
        "identity": config.identity(),
        "sequences": SEQUENCES,
        "steps": summary["steps"],
        "device": summary.get("device"),
        "commit": commit(),
    }


def accuracies(finished: Finished, delay: int) -> list[float | None]:
    """Accuracy of each lane on the copied tokens of ``SEQUENCES`` fresh ones; None: diverged.

    The published code draws them anew, too: the held-out ones chose the parameters.
    """
    learner = Learner(_at_delay(finished.config, delay))
    learner.load()
    scores = np.atleast_1d(learner.final_scores(learner.place(finished.state))["accuracy"])
    return [
        None if diverged else float(score)
        for score, diverged in zip(scores, finished.diverged, strict=True)
    ]


def markdown(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The table, accuracy in percent: a row for each delay, a column for each run."""
    delays = next(iter(results.values()))["accuracy"]
    rows = [
        [delay, *(_percent(result["accuracy"][delay]) for result in results.values())]
        for delay in delays
    ]
    return tables.markdown(["delay", *results], rows)


def _percent(values: Sequence[float | None]) -> str:
    """A number, or mean and range. A lane that diverged is an asterisk, and no accuracy at all:
    so are a mean and a minimum with it."""
    percentages = [-math.inf if value is None else 100 * value for value in values]
    mean = sum(percentages) / len(percentages)
    numbers = [
        f"{value:.2f}" if math.isfinite(value) else "-"
        for value in (mean, min(percentages), max(percentages))
    ]
    text = "{} [{}, {}]".format(*numbers) if len(percentages) > 1 else numbers[0]
    return text + "*" * list(values).count(None)
