"""What a sweep's file asks for: every combination of the values of its grid.

::

    binary = "adding"

    [settings]                      # flags of every run
    protocol = "gato"
    hidden_size = 128

    [grid]                          # each combination of these is a run
    cell = ["gato", "lstm", "gru"]
    halve_every = [0, 10000]
    seed = [0, 1, 2]
    learning_rate = [1e-3, 4e-3]    # the best one is chosen, by validation where there is one

``[[also]]`` tables with settings and grids of their own, ``[also.grid]``, add runs to those of the
grid; a setting there takes the place of one of ``[settings]``.
"""

from __future__ import annotations

import itertools
import shlex
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.catalog import EXPERIMENTS
from experiments.command import flags
from experiments.settings.config import Config
from experiments.settings.errors import UserError
from experiments.settings.resolver import Experiment, resolve

Flags = Mapping[str, Any]

_SWEPT = ("seed", "learning_rate")  # they make no row of their own in the report

# What changes nothing of a run but how long it is, and how and where it is made.
_WITHOUT_DIRECTORY = (
    *("steps", "epochs", "backend", "mesh", "data_dir"),
    *("profile", "keep_checkpoints", "on_full_disk"),
)


class Run(NamedTuple):
    """A run of a sweep.

    Attributes:
      experiment: what it trains.
      flags: its command line, by name.
      config: what these mean.
      workdir: where it goes.
    """

    experiment: Experiment
    flags: Flags
    config: Config
    workdir: Path

    @property
    def command(self) -> list[str]:
        """The command line of its process, which joins no others: a cluster that started the
        sweep's workers as tasks of one job has set what JAX would take for a group of processes."""
        return [sys.executable, *self._words, "--distributed=off"]

    @property
    def line(self) -> str:
        """The command line for a person."""
        return shlex.join(["python", *self._words])

    @property
    def _words(self) -> list[str]:
        texts = [f"--{name}={_text(value)}" for name, value in self.flags.items()]
        module = f"experiments.{self.experiment.name}"
        return ["-m", module, *texts, f"--workdir={self.workdir}"]

    @property
    def row(self) -> dict[str, str]:
        """The flags that it shares with the other seeds and rates of its row."""
        items = self.flags.items()
        return {name: _text(value) for name, value in items if name not in _SWEPT}

    @property
    def row_key(self) -> frozenset[tuple[str, float | str]]:
        """The same for all runs of a row, whatever the order of the flags; 1 is 1.0 and "1"."""
        return frozenset((name, _number(text)) for name, text in self.row.items())


def read(path: Path, directory: Path) -> list[Run]:
    """The runs that a file asks for, each checked.

    Args:
      path: of the file.
      directory: where the runs go, each in a folder of its flags' digest.

    Raises:
      UserError: if the file cannot be read, or one of its runs cannot be.
    """
    experiment, combinations = asked(path)
    runs = [_run(path, experiment, combination, directory) for combination in combinations]
    _check_places(path, runs)
    _check_seeds(path, runs)
    return runs


def _check_places(path: Path, runs: Sequence[Run]) -> None:
    """Raises ``UserError`` if two runs would go into one directory."""
    first_runs: dict[Path, Run] = {}
    for run in runs:
        first = first_runs.setdefault(run.workdir, run)
        if first is run:
            continue
        names = [n for n in _WITHOUT_DIRECTORY if first.flags.get(n) != run.flags.get(n)]
        if names:
            raise UserError(
                f"{path}: runs that differ in {' and '.join(names)} alone share one directory, so "
                f"give each a file of its own: {run.line}."
            )
        raise UserError(f"{path} asks twice for the same run: {run.line}.")


def _check_seeds(path: Path, runs: Sequence[Run]) -> None:
    """Raises ``UserError`` if two runs of a row have a seed in common, which would count twice."""
    lanes = set()
    for run in runs:
        count = run.config.training.seeds
        for seed, rate in run.config.training.lanes:
            if (run.row_key, seed, rate) in lanes:
                raise UserError(
                    f"{path} asks twice for seed {seed} of {run.line}: with seeds = {count} the "
                    f"seeds of the grid must be {count} apart, such as [0, {count}]."
                )
            lanes.add((run.row_key, seed, rate))


def asked(path: Path) -> tuple[Experiment, list[Flags]]:
    """The binary of a file and the flags of each of its runs; their values are not checked.

    Args:
      path: of the file.

    Raises:
      UserError: if the file cannot be read, or is not of a sweep.
    """
    try:
        content = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not TOML: {error}.") from None
    _check_names(path, content, {"binary", "settings", "grid", "also"})
    experiments = {
        experiment.name: experiment for experiment in EXPERIMENTS if not experiment.study
    }
    binary = content.get("binary")
    if not isinstance(binary, str) or binary not in experiments:
        raise UserError(f'{path}: binary = "..." must be one of {", ".join(experiments)}.')
    return experiments[binary], list(_combinations(path, content))


def _combinations(path: Path, content: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    shared = _table(path, "settings", content.get("settings", {}))
    grids: list[tuple[Flags, Any]] = [({}, content["grid"])] if "grid" in content else []
    additions = content.get("also", [])
    if not isinstance(additions, list):
        raise UserError(f"{path}: also must be tables, each under [[also]].")
    for addition in additions:
        extra_flags = dict(_table(path, "also", addition))
        grid = extra_flags.pop("grid", {})
        grids.append((extra_flags, grid))
    if not grids:
        raise UserError(f"{path} has no [grid].")
    for own_flags, grid in grids:
        for name, values in _table(path, "grid", grid).items():
            if not isinstance(values, list) or not values:
                raise UserError(f"{path}: {name} in the grid must be a list of values.")
        for values in itertools.product(*grid.values()):
            yield {**shared, **own_flags, **dict(zip(grid, values, strict=True))}


def _table(path: Path, name: str, content: Any) -> Mapping[str, Any]:
    if not isinstance(content, dict):
        raise UserError(f"{path}: {name} must be a table.")
    return content


def _check_names(path: Path, content: Mapping[str, Any], allowed: set[str]) -> None:
    for name in content:
        if name not in allowed:
            raise UserError(f"{path}: there is no {name!r}; known: {', '.join(sorted(allowed))}.")


def _run(path: Path, experiment: Experiment, flag_values: Flags, directory: Path) -> Run:
    try:
        config = configured(experiment, flag_values)
    except (UserError, flags.flags.Error) as error:
        raise UserError(f"{path}: {' '.join(_texts(flag_values))}: {error}") from None
    label = f"{config.model.cell.replace(':', '.')}-{config.protocol}-{config.hash()}"
    return Run(experiment, dict(flag_values), config, directory / label)


def configured(experiment: Experiment, flag_values: Flags) -> Config:
    """What the flags of a run mean.

    Args:
      experiment: of its binary.
      flag_values: by name.

    Raises:
      UserError: if they cannot be met, or are not for a run of a sweep.
      absl.flags.Error: if there is no such flag, or it has no such value.
    """
    parsed_flags = flags.parse(
        ["sweep", *_texts(flag_values)], lambda values: flags.define_experiment(experiment, values)
    )
    request = flags.request(experiment, parsed_flags)
    if request.workdir or request.describe or request.compile_for:
        raise UserError("--workdir, --describe and --compile_for are not for a sweep.")
    if any(name in flag_values for name in flags.OF_PROCESSES):
        raise UserError("a run of a sweep is one process.")
    return resolve(experiment, request.protocol, request.settings)


def _texts(flag_values: Flags) -> list[str]:
    return [f"--{name}={_text(value)}" for name, value in flag_values.items()]


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_text, value)) or "none"  # as the flags have it
    return str(value).lower() if isinstance(value, bool) else str(value)
