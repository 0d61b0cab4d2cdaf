"""Supervised tasks: batches as pure functions of a key, and a score for each example.

Letters: T time, B batch. Every leaf of a batch is time-major, ``[time, batch, ...]``.
"""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments.machine.mesh import Rows
from experiments.settings.errors import UserError
from experiments.training.task import Apply, BaseTask, Fresh, Outcome, Resident, Total

_EVALUATION_ROWS = 256  # most examples that a device evaluates at a time, and
_EVALUATION_STEPS = 2**18  # most of their steps together: bounds the memory and the time to stop


class Batch(NamedTuple):
    """Examples.

    Attributes:
      inputs: ``[T, B, ...]``.
      targets: ``[T or fewer, B, ...]``.
      counts: which examples count, bool ``[1, B]``; None: all of them.
    """

    inputs: jax.Array
    targets: jax.Array
    counts: jax.Array | None = None


class SupervisedTask(BaseTask, abc.ABC):
    """A task of examples, averaged over examples.

    A subclass defines, beside its settings, ``name``, ``metrics``, ``module`` and the abstract
    methods. Where its arrays come from files, it has ``read()`` too, which returns them as NumPy
    arrays; ``load`` is then only asked for their shapes.
    """

    axes = 1

    @abc.abstractmethod
    def load(self) -> Any:
        """Arrays that stay on the devices for the whole run, handed to the methods below."""

    @abc.abstractmethod
    def sets(self, loaded: Any) -> dict[str, Batch]:
        """The evaluation sets by name, see ``Task.held_out``."""

    @abc.abstractmethod
    def batch(self, loaded: Any, key: jax.Array, step: jax.Array, size: int) -> Batch:
        """The training batch of a step; ``key`` belongs to the seed, not to the step."""

    @abc.abstractmethod
    def score(self, outputs: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        """``{"loss": [B], metric name: [B], ...}``, one value for each example."""

    def masks(self, batch: Batch) -> dict[str, jax.Array]:
        """Which steps of ragged examples count: ``valid`` or ``seq_lengths``, see
        ``SequenceModel``; all of them."""
        del batch
        return {}

    def rows(self, outputs: jax.Array, batch: Batch) -> Any:
        """What the host needs of each held-out example to finish a score, see ``Outcome``;
        nothing. With the batch's ``counts``: some examples come twice."""
        del outputs, batch
        return ()

    def example(self) -> tuple[jax.Array]:
        inputs = next(iter(self.shapes(1)["sets"].values())).inputs
        return (jnp.zeros((1, 1, *inputs.shape[2:]), inputs.dtype),)

    def shapes(self, rows: int) -> dict[str, Any]:
        del rows
        return jax.eval_shape(lambda: self._arrays(self.load()))

    def data(self) -> Resident:
        return self.resident(self.read() if hasattr(self, "read") else jax.jit(self.load)())

    def resident(self, loaded: Any) -> Resident:
        """What ``load`` or ``read`` returns, with the evaluation sets."""
        return Resident(jax.jit(self._arrays)(loaded))

    def _arrays(self, loaded: Any) -> dict[str, Any]:
        return {"loaded": loaded, "sets": self.sets(loaded)}

    def draw(
        self, act: Apply, data: Any, stream: Any, key: jax.Array, step: jax.Array, rows: Rows
    ) -> tuple[Batch, Any]:
        del act
        return rows.of(self.batch(data["loaded"], key, step, rows.total), self.axes), stream

    def loss(self, apply: Apply, params: Any, window: Batch, stream: Any, train: bool) -> Outcome:
        outputs = apply(params, window.inputs, **self.masks(window))
        scores = self.score(outputs, window)
        task: Any = self
        metrics = task.metrics if type(self).scores is BaseTask.scores else ()
        for name in ("loss", *(metric.name for metric in metrics)):
            if name not in scores:
                raise UserError(
                    f"the score of the task {task.name} has no {name!r}, it has "
                    f"{' and '.join(scores) or 'nothing'}."
                )
        sums = {name: _total(score, window.counts) for name, score in scores.items()}
        return Outcome(sums["loss"], sums, stream, () if train else self.rows(outputs, window))

    def held_out(self, data: Any, devices: int) -> dict[str, _Parts]:
        return {
            name: _Parts(name, batch.inputs.shape[0], batch.inputs.shape[1], devices)
            for name, batch in data["sets"].items()
        }


def _total(score: jax.Array, counts: jax.Array | None) -> Total:
    if counts is None:
        return score.sum(), len(score)
    return jnp.where(counts[0], score, 0).sum(), counts.sum(dtype=jnp.float32)


class _Parts:
    """A set in parts of about equal size, which the devices share.

    The last part begins early, with examples that count elsewhere.
    """

    def __init__(self, name: str, steps: int, examples: int, devices: int) -> None:
        self._name, self._examples = name, examples
        devices = devices if examples >= devices else 1
        capacity = max(1, min(_EVALUATION_ROWS, _EVALUATION_STEPS // steps)) * devices
        parts = -(-examples // capacity)
        size = -(-examples // (parts * devices)) * devices
        self.rows = size if size <= examples else size - devices
        self.windows = -(-examples // self.rows)

    def start(self, fresh: Fresh, data: Any, rows: Rows) -> tuple[()]:
        del fresh, data, rows
        return ()

    def draw(
        self, act: Apply, data: Any, stream: Any, index: jax.Array, rows: Rows
    ) -> tuple[Batch, Any]:
        del act
        start = index * self.rows
        first = jnp.minimum(start, self._examples - self.rows)
        batch = jax.tree.map(
            lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, first, self.rows, axis=1),
            data["sets"][self._name],
        )
        counts = first + jnp.arange(self.rows, dtype=first.dtype) >= start
        return rows.of(batch._replace(counts=counts[None]), 1), stream
