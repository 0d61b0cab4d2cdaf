"""Examples of different lengths, padded with whatever stands there; the loss is per step.

Letters: T steps, B batch, N examples.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from experiments.settings.metrics import Metric
from experiments.training.models import Decoder, SequenceModel
from experiments.training.supervised import SupervisedTask
from experiments.training.task import Outcome

_KEY = 0x4A6


class Ragged(NamedTuple):
    """A batch with lengths.

    Attributes:
      inputs: float32 ``[T, B, 2]``.
      targets: float32 ``[T, B]``.
      lengths: int32 ``[1, B]``, from 1 to T.
      counts: bool ``[1, B]``; None: all examples count.
    """

    inputs: jax.Array
    targets: jax.Array
    lengths: jax.Array
    counts: jax.Array | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedTask(SupervisedTask):
    """The running mean of the first input; a step of any example weighs the same.

    Attributes:
      padding: what stands behind the end of an example: a number, or ``"nan"``.
      steps: T.
      examples: N of the training set.
      held_out_examples: N of the held-out set.
    """

    padding: str = "nan"
    steps: int = 5
    examples: int = 24
    held_out_examples: int = 11

    name = "ragged"
    unit = "steps"

    @property
    def metrics(self):
        return (Metric("loss", False, 1 / 3, "zero"),)

    @property
    def units_per_row(self):
        return (1 + self.steps) / 2

    def module(self, recurrent, model):
        del model
        return SequenceModel(nn.Dense(3), recurrent, Decoder((1,)))

    def load(self):
        keys = jax.random.split(jax.random.key(_KEY))
        return {
            "train": self._examples(keys[0], self.examples),
            "held_out": self._examples(keys[1], self.held_out_examples),
        }

    def _examples(self, key, count):
        values, lengths = jax.random.split(key)
        inputs = jax.random.uniform(values, (self.steps, count, 2), minval=-1.0)
        lengths = jax.random.randint(lengths, (1, count), 1, self.steps + 1)
        time = jnp.arange(1, self.steps + 1)[:, None]
        targets = jnp.cumsum(inputs[..., 0], axis=0) / time.astype(jnp.float32)
        padded, padding = time > lengths, jnp.float32(self.padding)
        return Ragged(
            jnp.where(padded[..., None], padding, inputs),
            jnp.where(padded, padding, targets),
            lengths,
        )

    def sets(self, loaded):
        return {"held_out": loaded["held_out"]}

    def batch(self, loaded, key, step, size):
        numbers = jax.random.randint(jax.random.fold_in(key, step), (size,), 0, self.examples)
        return jax.tree.map(lambda leaf: leaf[:, numbers], loaded["train"])

    def score(self, outputs, batch):
        """``{"loss": [B]}``, the sum over an example's steps."""
        valid = jnp.arange(self.steps)[:, None] < batch.lengths
        # A NaN in the part of a where that is not taken would be one in the gradient.
        error = outputs[..., 0] - jnp.where(valid, batch.targets, 0)
        return {"loss": jnp.where(valid, error**2, 0).sum(axis=0)}

    def loss(self, apply, params, window, stream, train):
        del train
        outputs = apply(params, window.inputs, seq_lengths=window.lengths[0])
        scores, lengths = self.score(outputs, window)["loss"], window.lengths[0]
        if window.counts is not None:
            scores, lengths = (jnp.where(window.counts[0], x, 0) for x in (scores, lengths))
        total = (scores.sum(), lengths.sum(dtype=jnp.float32))
        return Outcome(total, {"loss": total}, stream)
