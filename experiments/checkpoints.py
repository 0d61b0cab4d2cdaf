"""Checkpoints that survive a kill at any moment, and notice when a file was damaged."""

from __future__ import annotations

import hashlib
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from experiments.config import UserError

T = TypeVar("T")


class Checkpoints:
    """The last few states of a run, one directory each, named by step.

    A state is written beside its place and renamed into it, so it is there whole or not at
    all. With it goes a digest of its arrays; a state that no longer agrees is damaged.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory.absolute()
        self._open()

    def _open(self) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=3, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(self._directory, options=options)

    @property
    def last_step(self) -> int:
        """The newest state's step; 0 if there is none."""
        return max(self._manager.all_steps(), default=0)

    def save(self, step: int, state: Any) -> None:
        """Writes a state, in place of one of that step."""
        if step in self._manager.all_steps():
            self._manager.delete(step)
        leaves = _named_leaves(jax.device_get(state))
        content = {"state": leaves, "digest": _digest(leaves)}
        self._manager.save(step, args=ocp.args.StandardSave(content))

    def restore(self, like: T, say: Callable[[str], None]) -> tuple[int, T] | None:
        """The newest state that is good, with its step; None if there never was one.

        Args:
          like: a state of the same structure, arrays or shapes.
          say: is told of each damaged checkpoint; these are removed once a good one is found.

        Raises:
          UserError: if there are checkpoints and none is good.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        damaged: list[Path] = []
        for step in steps:
            state = self.read(step, like)
            if state is not None:
                for path in damaged:
                    say(f"warning: the checkpoint {path} is damaged; going on from step {step}.")
                    shutil.rmtree(path)
                if damaged:
                    self._manager.close()
                    self._open()
                return step, state
            damaged.append(self._directory / str(step))
        if damaged:
            raise UserError(
                f"every checkpoint in {self._directory} is damaged or of another version; "
                "remove the workdir to start again."
            )
        return None

    def read(self, step: int, like: T) -> T | None:
        """The state of a step; None if it is missing, damaged or of another structure.

        Args:
          step: whose state it is.
          like: a state of the same structure, arrays or shapes.
        """
        leaves = {
            name: np.empty(leaf.shape, leaf.dtype) for name, leaf in _named_leaves(like).items()
        }
        target = {"state": leaves, "digest": _digest(leaves)}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a damaged file may warn before it fails
                content = self._manager.restore(step, args=ocp.args.StandardRestore(target))
            good = np.array_equal(content["digest"], _digest(content["state"]))
        except Exception:  # whatever orbax makes of a damaged file
            return None
        if not good:
            return None
        values = [content["state"][name] for name in leaves]
        return jax.tree.unflatten(jax.tree.structure(like), values)

    def close(self) -> None:
        """Ends the manager's threads."""
        self._manager.close()


def _named_leaves(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _digest(leaves: dict[str, Any]) -> np.ndarray:
    """SHA-256 of names and bytes, uint8 ``[32]``."""
    sha = hashlib.sha256()
    for name, leaf in sorted(leaves.items()):
        sha.update(name.encode())
        sha.update(np.ascontiguousarray(leaf).tobytes())
    return np.frombuffer(sha.digest(), np.uint8)
