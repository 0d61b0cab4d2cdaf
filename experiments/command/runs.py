"""Several runs that belong together: trained one after another, read again when finished."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.command import ahead
from experiments.records.checkpoints import Checkpoints
from experiments.records.reporting import say
from experiments.records.storage import DEFAULTS, Storage
from experiments.records.workdir import Workdir
from experiments.settings.config import Config, as_tuples
from experiments.settings.errors import UserError
from experiments.settings.fields import declared, defaults
from experiments.settings.model import CarrySettings, ModelSettings
from experiments.settings.optimization import TrainingSettings
from experiments.settings.resolver import Experiment, explain
from experiments.training import loop
from experiments.training.learner import Learner
from experiments.training.state import State
from experiments.training.supervised import Batch


class Finished(NamedTuple):
    """A run that came to its end.

    Attributes:
      config: of the run.
      learner: of that config.
      state: after the last step, on this process's first device.
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
        return [bool(step >= 0) for step in np.atleast_1d(self.state.diverged_at)]

    @property
    def sound_lanes(self) -> list[int]:
        """The lanes that did not diverge."""
        return [lane for lane, diverged in enumerate(self.diverged) if not diverged]

    def lane(self, tree: Any, lane: int) -> Any:
        """A lane's part of a tree that the learner made."""
        return self.learner.lanes.of(tree, lane)

    @property
    def sequence_steps(self) -> int:
        """T of the set that was watched, of a supervised run."""
        return int(self.learner.task.shapes(1)["sets"][self.learner.watched].inputs.shape[0])

    def features(self, params: Any, count: int) -> jax.Array:
        """What the cell reads of the first examples of the set that was watched.

        Args:
          params: of one lane; its cell's are ``params["recurrent"]["cell"]``.
          count: how many examples.

        Returns:
          ``[T, count, D]``.
        """
        return self.learner.encoded(params, self._batch(count).inputs)

    def valid(self, count: int) -> jax.Array:
        """Which steps of these are no padding, bool ``[T, count]``."""
        task: Any = self.learner.task
        batch = self._batch(count)
        masks = task.masks(batch)
        return masks.get("valid", jnp.ones(batch.inputs.shape[:2], bool))

    def _batch(self, count: int) -> Batch:
        self.learner.load()
        batch = self.learner.data["sets"][self.learner.watched]
        return batch._replace(inputs=batch.inputs[:, :count])


def by_rate(label: str, config: Config) -> dict[str, slice]:
    """``{label: slice}``: the lanes of each learning rate; of several each is in its label."""
    lanes = config.training.lanes_by_rate
    several = len(lanes) > 1
    return {f"{label} rate {rate}" if several else label: lanes[rate] for rate in lanes}


def recorded_config(workdir: str | Path, experiments: Collection[Experiment]) -> Config:
    """The config of the run in a workdir.

    Args:
      workdir: a directory.
      experiments: those that it may be of, each known by its task's name.

    Raises:
      UserError: if it is no workdir, one of another version or of another experiment.
    """
    record = Workdir(workdir).read_json("config.json")
    if record is None:
        raise UserError(f"{workdir} is not a workdir: it has no config.json.")
    try:
        settings = record["config"]
        task = dict(settings["task"])
        name = task.pop("name")
        by_name = {experiment.name: experiment for experiment in experiments}
        if name not in by_name:
            raise UserError(
                f"the run in {workdir} is one of {name}, not of {' or '.join(by_name)}."
            )
        config = Config(
            protocol=record["protocol"],
            overrides=as_tuples(record["overrides"]),
            task=_settings(by_name[name].task(), task),
            model=_settings(ModelSettings, settings["model"]),
            carry=_settings(CarrySettings, settings["carry"]),
            training=_settings(TrainingSettings, settings["training"]),
        )
    except (KeyError, TypeError):
        raise UserError(f"{workdir} was made by another version of these experiments.") from None
    try:
        config.check()
    except UserError as error:
        raise UserError(f"the run in {workdir} cannot be read: {error}") from None
    return config


def _settings(cls: Any, record: Mapping[str, Any]) -> Any:
    """Settings from a config; one that it does not know yet has its default, or is the cell's."""
    values = {name: None for name, setting in declared(cls).items() if setting.optional}
    values |= {name: entry.value for name, entry in defaults(cls)}
    return cls(**values | as_tuples(record))


def finished(workdir: str | Path, experiments: Collection[Experiment]) -> Finished:
    """The finished run in a workdir; for ``experiments`` see ``recorded_config``.

    Raises:
      UserError: if there is none.
    """
    work = Workdir(workdir)
    config = recorded_config(workdir, experiments)
    _warn_of_source(work, config)
    summary = work.summary()
    if summary is None or not (work.checkpoints).is_dir():
        raise UserError(
            f"the run in {workdir} is not finished; "
            f"its command with --steps={config.training.steps} goes on."
        )
    if jax.process_count() == 1:  # to read a run takes neither its devices nor parts of its words
        training = dataclasses.replace(config.training, mesh="auto")
        config = dataclasses.replace(config, training=training)
    learner = Learner(config)
    with contextlib.closing(Checkpoints(work.checkpoints)) as checkpoints:
        state = checkpoints.read(summary["steps"], learner.shapes())
    if state is None:  # an earlier one is not what the summary is of
        raise UserError(
            f"the checkpoint of step {summary['steps']} in {workdir} is missing, damaged or of "
            "another version; the command of that run goes on from an earlier one, if one is good."
        )
    return Finished(config, learner, jax.tree.map(jnp.asarray, state), summary)


def _warn_of_source(work: Workdir, config: Config) -> None:
    """Tells that a cell of the user's own may not be the one that a run trained: Python versions
    differ in what they make of a source, so that it is no error."""
    name = "model.cell_source"
    identity = (work.read_json("config.json") or {}).get("identity")
    recorded = identity.get(name) if isinstance(identity, dict) else None
    if recorded is not None and recorded != config.identity_without_data().get(name):
        say(
            f"warning: the source of {config.model.cell} is not that which the run in {work.path} "
            "was trained with; if its step has changed, what follows is not of that run."
        )


def train_all(
    runs: Mapping[str, Config],
    experiment: Experiment,
    directory: Path,
    profile: int = 0,
    storage: Storage = DEFAULTS,
) -> dict[str, Finished] | None:
    """Trains runs, each in a subdirectory of its label; those that are finished are read.

    Args:
      runs: configs by label.
      experiment: what they train, known by its task's name.
      directory: of the runs.
      profile: so many steps of each are traced; 0: none.
      storage: see ``loop.run``.

    Returns:
      The finished runs by label; None if they were asked to stop before.

    Raises:
      UserError: if a config or a subdirectory cannot be, or there are several processes.
    """
    if jax.process_count() > 1:
        raise UserError("several processes train one run, and these are several: use one process.")
    for config in runs.values():  # before any is trained
        Learner(config).check_memory()
    for label, config in runs.items():
        say(f"{label}:")
        if loop.run(config, directory / label, profile, storage=storage) is None:
            return None
    return {label: finished(directory / label, [experiment]) for label in runs}


def description(experiment: Experiment, config: Config) -> dict[str, Any]:
    """The resolved config, the parameter counts, and every setting with meaning and source."""
    return {**loop.describe(config), "settings": explain(experiment, config)}


def describe(experiment: Experiment, runs: Mapping[str, Config]) -> str:
    """One JSON object: the first run's description, with all of them as ``"runs"``."""
    descriptions = {label: description(experiment, config) for label, config in runs.items()}
    first = next(iter(descriptions.values()))
    return json.dumps({**first, "runs": descriptions}, indent=2)


def compiled(runs: Mapping[str, Config], topology: str) -> str:
    """One JSON object: what the compiler for a TPU says of each run; see ``ahead.report``."""
    reports = {label: ahead.report(config, topology) for label, config in runs.items()}
    return json.dumps({"runs": reports}, indent=2)


def directory(task: str, protocol: str, configs: Sequence[Config]) -> Path:
    """The default directory of such runs."""
    digest = hashlib.sha256(" ".join(config.hash() for config in configs).encode()).hexdigest()
    return Path("runs", task, f"{protocol}-{digest[:8]}")
