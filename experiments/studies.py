"""Several runs that belong together: trained one after another, read again when finished."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments import protocols, train
from experiments.checkpoints import Checkpoints
from experiments.config import CarryConfig, Config, ModelConfig, TrainingConfig, UserError
from experiments.learner import Learner
from experiments.reporting import say
from experiments.state import State
from experiments.workdir import Workdir


class Finished(NamedTuple):
    """A run that came to its end.

    Attributes:
      config: of the run.
      learner: of that config.
      state: after the last step, on the devices.
      summary: what ``summary.json`` holds.
    """

    config: Config
    learner: Learner
    state: State
    summary: dict[str, Any]

    @property
    def params(self) -> Any:
        """The parameters that the run reports, with an axis of lanes if there are several."""
        return self.state.params if self.state.best is None else self.state.best.params

    @property
    def diverged(self) -> list[bool]:
        """Which lanes diverged."""
        return [bool(at >= 0) for at in np.atleast_1d(self.state.diverged_at)]

    def lane(self, tree: Any, lane: int) -> Any:
        """A lane's part of a tree that the learner made."""
        if len(self.config.training.lanes) == 1:
            return tree
        return jax.tree.map(lambda leaf: leaf[lane], tree)


def by_rate(label: str, config: Config) -> dict[str, slice]:
    """``{label: slice}``: the lanes of each learning rate; of several each is in its label."""
    lanes = config.training.lanes_by_rate
    several = len(lanes) > 1
    return {f"{label} rate {rate}" if several else label: lanes[rate] for rate in lanes}


def recorded_config(workdir: str | Path) -> Config:
    """The config of the run in a workdir.

    Raises:
      UserError: if it is no workdir, or one of another version of these experiments.
    """
    recorded = Workdir(workdir).read_json("config.json")
    if recorded is None:
        raise UserError(f"{workdir} is not a workdir: it has no config.json.")
    try:
        parts = recorded["config"]
        task = dict(parts["task"])
        config = Config(
            protocol=recorded["protocol"],
            overrides=_tuples(recorded["overrides"]),
            task=protocols.TASKS[task.pop("name")].task(**_tuples(task)),
            model=ModelConfig(**_tuples(parts["model"])),
            carry=CarryConfig(**_tuples(parts["carry"])),
            training=TrainingConfig(**_tuples(parts["training"])),
        )
    except (KeyError, TypeError):
        raise UserError(f"{workdir} was made by another version of these experiments.") from None
    try:
        config.check()
    except UserError as error:
        raise UserError(f"the run in {workdir} cannot be read: {error}") from None
    return config


def _tuples(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()
    }


def finished(workdir: str | Path) -> Finished:
    """The finished run in a workdir.

    Raises:
      UserError: if there is none.
    """
    work = Workdir(workdir)
    config = recorded_config(workdir)
    summary = work.summary()
    if summary is None or not (work.path / "checkpoints").is_dir():
        raise UserError(
            f"the run in {workdir} is not finished; "
            f"its command with --steps={config.training.steps} goes on."
        )
    learner = Learner(config)
    with contextlib.closing(Checkpoints(work.path / "checkpoints")) as checkpoints:
        state = checkpoints.read(summary["steps"], learner.shapes())
    if state is None:  # an earlier one is not what the summary is of
        raise UserError(
            f"the checkpoint of step {summary['steps']} in {workdir} is missing, damaged or of "
            "another version; the command of that run goes on from an earlier one, if one is good."
        )
    return Finished(config, learner, learner.place(state), summary)


def train_all(runs: Mapping[str, Config], directory: Path) -> dict[str, Finished] | None:
    """Trains runs, each in a subdirectory of its label; those that are finished are read.

    Returns:
      The finished runs by label; None if they were asked to stop before.

    Raises:
      UserError: if a config or a subdirectory cannot be.
    """
    for config in runs.values():  # before any is trained
        Learner(config)
    for label, config in runs.items():
        say(f"{label}:")
        if train.run(config, directory / label) is None:
            return None
    return {label: finished(directory / label) for label in runs}


def describe(runs: Mapping[str, Config]) -> str:
    """One JSON object: the first run's description, with all of them as ``"runs"``."""
    described = {label: train.describe(config) for label, config in runs.items()}
    first = next(iter(described.values()))
    return json.dumps({**first, "runs": described}, indent=2)


def directory(task: str, protocol: str, configs: Sequence[Config]) -> Path:
    """The default directory of such runs."""
    digest = hashlib.sha256(" ".join(config.hash() for config in configs).encode()).hexdigest()
    return Path("runs", task, f"{protocol}-{digest[:8]}")


def write(path: Path, content: str) -> None:
    """Writes a file whole or not at all.

    Raises:
      UserError: if it cannot be written.
    """
    part = path.with_name(path.name + ".part")
    make(path.parent)
    try:
        part.write_text(content)
        os.replace(part, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}.") from None


def make(directory: Path) -> None:
    """Makes a directory, if need be.

    Raises:
      UserError: if it cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the directory {directory}: {error.strerror}.") from None


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is aligned left, the others right."""
    cells = [list(head), *map(list, rows)]
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(head))]

    def line(row: Sequence[str]) -> str:
        first, *others = zip(row, widths, strict=True)
        padded = [first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(cells[0]), f"| {' | '.join(rule)} |", *map(line, cells[1:])])
