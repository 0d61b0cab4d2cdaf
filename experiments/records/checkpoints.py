"""Checkpoints that survive a kill at any moment, and notice when a file was damaged."""

from __future__ import annotations

import asyncio
import enum
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from experiments.records.storage import DEFAULTS, written
from experiments.records.workdir import DamagedError, EarlierVersionError
from experiments.settings.errors import UserError

T = TypeVar("T")

_STEP = re.compile(r"0|[1-9][0-9]*")
_CONTENTS = "contents.json"  # of a checkpoint: its leaves' shapes, its files' digests, its own
_ORBAX = ".orbax-checkpoint-tmp"  # in the name of a checkpoint that Orbax writes
# A checkpoint that is being written, the one that it replaces, and one that is being removed.
_NEW, _OLD, _GONE = ".new", ".old", ".gone"


class _Condition(enum.Enum):
    GOOD = enum.auto()
    DAMAGED = enum.auto()
    OTHER = enum.auto()  # whole, but not like the state that is asked for


class Checkpoints:
    """The last few states of a run, one directory each, named by step.

    Args:
      directory: of the checkpoints; it is made with the first one.
      keep: how many stay, the newest ones.

    Orbax writes a state beside its place, and it is renamed into it: it is there whole or not at
    all. With it go the shapes of its arrays and a digest of each file. Orbax is asked to read
    only what agrees with them: where a file is damaged, its threads say more than they should.
    """

    def __init__(self, directory: Path, keep: int = DEFAULTS.keep_checkpoints) -> None:
        self._directory, self._keep = directory.absolute(), keep
        # Of several processes one writes, and waits for no other.
        options = ocp.options.MultiprocessingOptions(
            primary_host=0, active_processes={0}, barrier_sync_key_prefix="records"
        )
        handler = ocp.StandardCheckpointHandler(multiprocessing_options=options)
        self._orbax = ocp.Checkpointer(handler, multiprocessing_options=options)

    @property
    def steps(self) -> list[int]:
        """The steps that have a checkpoint, the newest one last."""
        names = os.listdir(self._directory) if self._directory.is_dir() else []
        return sorted(int(name) for name in names if _STEP.fullmatch(name))

    @property
    def last_step(self) -> int:
        """The newest state's step; 0 if there is none."""
        return max(self.steps, default=0)

    def save(self, step: int, state: Any) -> None:
        """Writes a state; one of that step is there until the new one is.

        Raises:
          StorageError: if it cannot be written; the other states are as they were.
        """
        path, new, old = self._path(step), self._path(step, _NEW), self._path(step, _OLD)
        leaves = _named_leaves(jax.device_get(state))
        self._tidy()  # a save that failed may have left the only state of this step as the old one
        try:
            with written(path):
                self._directory.mkdir(exist_ok=True)
                new.mkdir()
                with _quiet():
                    self._orbax.save(new / "default", args=ocp.args.StandardSave({"state": leaves}))
                contents = {"leaves": _shapes(leaves), "files": _digests(new)}
                with (new / _CONTENTS).open("w") as file:
                    json.dump({**contents, "digest": _digest(contents)}, file)
                    file.flush()
                    os.fsync(file.fileno())
                _sync(new)
                if path.exists():
                    path.rename(old)
                new.rename(path)
                _sync(self._directory)
        finally:
            _remove(new)
        _remove(old)
        for surplus_step in self.steps[: -self._keep]:
            self._discard(surplus_step)

    def restore(
        self,
        like: T,
        say: Callable[[str], None],
        fits: Callable[[int, T], bool] = lambda step, state: True,
    ) -> tuple[int, T] | None:
        """The newest state that is good and fits, with its step; the newest good one if none
        fits; None if there never was one. Those after it are removed.

        Args:
          like: a state of the same structure, arrays or shapes.
          say: is told of each damaged checkpoint.
          fits: whether the run can go on from a step with its state.

        Raises:
          EarlierVersionError: if none is good, and one is of another version.
          DamagedError: if there are checkpoints and none is good.
        """
        self._tidy()
        steps = self.steps[::-1]
        conditions: dict[int, _Condition] = {}
        good_states: list[tuple[int, T]] = []
        for step in steps:
            conditions[step] = self._condition(step, like)
            if conditions[step] is _Condition.GOOD:
                good_states = [*good_states[:1], (step, self._load(step, like))]
                if fits(*good_states[-1]):
                    break
        else:
            good_states = good_states[:1]  # none fits
        if not good_states and _Condition.OTHER in conditions.values():
            raise EarlierVersionError(self._directory.parent)
        if not good_states:
            if steps:
                raise DamagedError(self._directory)
            return None
        start, state = good_states[-1]
        for step in steps:
            if step > start:
                path = self._path(step)
                if conditions[step] is not _Condition.GOOD:
                    is_other = conditions[step] is _Condition.OTHER
                    fault = "of another version or configuration" if is_other else "damaged"
                    say(f"warning: the checkpoint {path} is {fault}; going on from step {start}.")
                self._discard(step)
        return start, state

    def read(self, step: int, like: T) -> T | None:
        """The state of a step; None if it is missing, damaged or of another structure.

        Args:
          step: whose state it is.
          like: a state of the same structure, arrays or shapes.
        """
        good = self._condition(step, like) is _Condition.GOOD
        return self._load(step, like) if good else None

    def close(self) -> None:
        """Ends Orbax's threads."""
        self._orbax.close()

    def _discard(self, step: int) -> None:
        """Removes a checkpoint: a kill does not leave half of it under the name of a whole one."""
        path, trash = self._path(step), self._path(step, _GONE)
        with written(path):
            path.rename(trash)
        _remove(trash)

    def _load(self, step: int, like: T) -> T:
        leaves = {
            name: np.empty(leaf.shape, leaf.dtype) for name, leaf in _named_leaves(like).items()
        }
        with _quiet():
            content = self._orbax.restore(
                self._path(step) / "default", args=ocp.args.StandardRestore({"state": leaves})
            )
        values = [content["state"][name] for name in leaves]
        return jax.tree.unflatten(jax.tree.structure(like), values)

    def _path(self, step: int, suffix: str = "") -> Path:
        return self._directory / f"{step}{suffix}"

    def _condition(self, step: int, like: Any) -> _Condition:
        path = self._path(step)
        if any(entry.is_symlink() for entry in (path, *path.rglob("*"))):
            return _Condition.DAMAGED  # what it leads to is not ours
        try:
            contents = json.loads((path / _CONTENTS).read_bytes().decode())
            digest = contents.pop("digest", None)  # earlier versions had none
            if contents["files"] != _digests(path) or digest not in (None, _digest(contents)):
                return _Condition.DAMAGED
            leaves = contents["leaves"]
        except FileNotFoundError:  # an earlier version had no such file
            earlier = (path / "default" / "_METADATA").is_file()
            return _Condition.OTHER if earlier else _Condition.DAMAGED
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return _Condition.DAMAGED
        return _Condition.GOOD if leaves == _shapes(_named_leaves(like)) else _Condition.OTHER

    def _tidy(self) -> None:
        """Ends what a kill interrupted."""
        if self._directory.exists() and not self._directory.is_dir():
            raise UserError(f"{self._directory} is not a directory.")
        names = os.listdir(self._directory) if self._directory.exists() else []
        for path in [self._directory / name for name in names]:
            if path.suffix == _OLD and not path.with_suffix("").exists():
                with written(path):
                    path.rename(path.with_suffix(""))
            elif path.suffix in (_OLD, _NEW, _GONE) or _ORBAX in path.name:
                _remove(path)


def _named_leaves(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _shapes(leaves: dict[str, Any]) -> dict[str, list[Any]]:
    return {name: [str(leaf.dtype), list(leaf.shape)] for name, leaf in leaves.items()}


def _digest(contents: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()


def _digests(directory: Path) -> dict[str, str]:
    """SHA-256 of every file but the contents."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path != directory / _CONTENTS
    }


def _remove(path: Path) -> None:
    """Removes a directory with all in it, as far as it can be; of a link the link alone."""
    if path.is_symlink():
        with written(path):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _sync(directory: Path) -> None:
    """Puts the names in a directory on disk."""
    number = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextmanager
def _quiet() -> Iterator[None]:
    """Orbax raises an error and says it too, from several threads: the first is enough."""
    verbosity, policy = logging.get_verbosity(), asyncio.get_event_loop_policy()
    logging.set_verbosity(logging.FATAL)
    asyncio.set_event_loop_policy(_Policy())
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(policy)
        logging.set_verbosity(verbosity)


class _Loop(asyncio.SelectorEventLoop):
    """Is closed once all that was begun has ended.

    Orbax closes its loop at the first error. An array that is still being written would put its
    file back into a directory that is being removed, and say its error when nobody could catch it.
    """

    def close(self) -> None:
        """Waits for the tasks first; only the first error was raised."""
        while tasks := () if self.is_closed() else asyncio.all_tasks(self):
            self.run_until_complete(asyncio.wait(tasks))
        super().close()

    def call_exception_handler(self, context: Any) -> None:
        """Says nothing of a task's error that nobody asked for."""


class _Policy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return _Loop()
