"""The sweeps of the page: what each asks, and how many of its runs are among the results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl.flags import Error

from experiments.catalog import EXPERIMENTS
from experiments.command import tables
from experiments.results.records import read, row_digest
from experiments.settings.errors import UserError
from experiments.settings.resolver import Experiment
from experiments.sweep import plan

# What a seed with a rate is: the binary, the digest of its settings, steps, seed, rate.
_Lane = tuple[str, str, int, int, float]
_BY_NAME = {experiment.name: experiment for experiment in EXPERIMENTS}


def markdown(directory: Path) -> str:
    """A table of the sweeps: first those of which runs are missing.

    Args:
      directory: ``docs/results``.

    Raises:
      UserError: if a file is damaged, or a sweep's does not begin with a comment.
    """
    finished = _finished(directory)
    incomplete_rows: list[list[str]] = []
    complete_rows: list[list[str]] = []
    for path in sorted((directory / "sweeps").glob("*.toml")):
        experiment, combinations = plan.asked(path)
        runs = [_lanes(path, experiment, combination) for combination in combinations]
        finished_runs = [run for run in runs if all(lane in finished for lane in run)]
        names = sorted({finished[lane] for run in finished_runs for lane in run})
        (complete_rows if len(finished_runs) == len(runs) else incomplete_rows).append(
            [
                f"[{path.name}](results/sweeps/{path.name})",
                _question(path),
                f"{len(finished_runs)} of {len(runs)}",
                ", ".join(f"[{name}](results/{name})" for name in names),
            ]
        )
    head = ["sweep", "what it asks", "runs finished", "its results"]
    return tables.of_prose(head, incomplete_rows + complete_rows)


# Of whose data the sizes are not known without them; no sweep of the page asks for them.
_UNKNOWN_SIZES = ("own", "coco", "flickr8k")


def _finished(directory: Path) -> dict[_Lane, str]:
    """The file of each finished run of a seed, by what its command means today."""
    files = {}
    for path in sorted(directory.glob("*.json")):
        results = read(path)
        for run in results.runs:
            if run.finished and results.experiment in _BY_NAME:
                flag_values = _flags(run.command)
                experiment = _BY_NAME[results.experiment]
                own_cell = ":" in flag_values.get("cell", "")  # which no sweep of the page has
                if own_cell or _dataset(experiment, flag_values) in _UNKNOWN_SIZES:
                    continue
                for lane in _lanes(path, experiment, flag_values):
                    if lane[3] in run.seeds and run.rate in (None, lane[4]):
                        files[lane] = path.name
    return files


def steps(command: str) -> int | None:
    """How many steps a run's command asks for; None if that is not known without its data, or it
    can no longer be given.

    Args:
      command: of a record.
    """
    module, flag_values = command.split()[2], _flags(command)
    experiment = _BY_NAME.get(module.removeprefix("experiments."))
    try:
        if experiment is None or _dataset(experiment, flag_values) in _UNKNOWN_SIZES:
            return None
        return plan.configured(experiment, flag_values).training.steps
    except (UserError, Error):
        return None


def _flags(command: str) -> dict[str, str]:
    words = [word.removeprefix("--").partition("=") for word in command.split()[3:]]
    return {name: value for name, _, value in words}


def _dataset(experiment: Experiment, flags: Mapping[str, Any]) -> Any:
    default = experiment.values(flags.get("protocol", "small")).get("dataset")
    return flags.get("dataset", default and default.value)


def _lanes(path: Path, experiment: Experiment, flags: Mapping[str, Any]) -> list[_Lane]:
    """The seeds and rates of a run; of its data the published sizes are known."""
    flag_values = {name: value for name, value in flags.items() if name != "data_dir"}
    try:
        config = plan.configured(experiment, flag_values)
    except (UserError, Error) as error:
        raise UserError(f"{path}: {dict(flags)}: {error}") from None
    digest = row_digest(config.identity_without_data(), config.task)
    steps = config.training.steps
    return [(experiment.name, digest, steps, seed, rate) for seed, rate in config.training.lanes]


def _question(path: Path) -> str:
    lines = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    if not lines:
        raise UserError(f"{path} must begin with a comment that says what the sweep asks.")
    return " ".join(lines)
