"""Settings of a protocol that are made from other settings."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any, NamedTuple

from experiments.settings.errors import UserError


class Depends(NamedTuple):
    """A value by another setting: that of the first pattern that matches, ``*`` for anything."""

    setting: str
    values: Mapping[str, Any]


class OnlySeed(NamedTuple):
    """The run's seed, if there is one alone: what is made from it is the same for all lanes."""

    flag: str


class Epochs(NamedTuple):
    """So many passes over the training set, in steps; a number or the name of a setting."""

    passes: float | str


def without_dependence(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with every ``Depends`` and ``OnlySeed`` replaced by its value.

    Raises:
      UserError: if there are several seeds where there can be one alone.
    """

    def value(entry: Any) -> Any:
        if isinstance(entry, OnlySeed):
            if settings["seeds"] > 1:
                raise UserError(
                    f"--seeds={settings['seeds']}: each has a {entry.flag} of its own, so train "
                    f"them one by one, or give --{entry.flag} for one that all share."
                )
            return settings["seed"]
        if isinstance(entry, Depends):
            selector = str(value(settings[entry.setting]))
            patterns = entry.values
            return value(next(patterns[p] for p in patterns if fnmatch.fnmatchcase(selector, p)))
        return entry

    return {name: value(entry) for name, entry in settings.items()}


def in_steps(
    task: Any, settings: Mapping[str, Any], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """The settings with every ``Epochs`` in steps.

    Args:
      task: it has ``examples``, the size of its training set, if there is an ``Epochs``.
      settings: without dependence.
      overrides: those of them that the user gave.

    Raises:
      UserError: if the user gave both epochs and steps, or too few epochs, or a batch that is
        larger than the training set.
    """
    counts = {name: entry for name, entry in settings.items() if isinstance(entry, Epochs)}
    if "epochs" in overrides:
        if "steps" in overrides:
            raise UserError("--epochs and --steps exclude each other.")
        if overrides["epochs"] < 1:
            raise UserError(f"--epochs must be at least 1, got {overrides['epochs']}.")
    if not counts:
        return dict(settings)
    size = settings["batch_size"]
    if size > task.examples:
        raise UserError(f"--batch_size={size} is more than the {task.examples} training examples.")
    per_epoch = task.examples // max(1, size)
    values = dict(settings)
    for name, entry in counts.items():
        count = settings[entry.passes] if isinstance(entry.passes, str) else entry.passes
        values[name] = round(count * per_epoch)
    return values
