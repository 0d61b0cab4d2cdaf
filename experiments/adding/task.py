"""The adding problem: the sum of the two marked numbers of a sequence.

Letters: T steps, B batch.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn

from experiments.adding.settings import AddingSettings
from experiments.settings.metrics import Metric
from experiments.settings.model import ModelSettings
from experiments.training.models import Decoder, SequenceModel
from experiments.training.state import threefry_key
from experiments.training.supervised import Batch, SupervisedTask
from recurrent_gates import RNN, Stack

_HELD_OUT_KEY = 0xADD  # of the held-out sequences: the same for all seeds and cells


def lay_out(numbers: jax.Array, first: jax.Array, second: jax.Array) -> Batch:
    """Inputs (number, mark) and the sum of the two marked numbers (GATO, 5.3; UR-gates, 3.1).

    Args:
      numbers: ``[T, B]``.
      first: where the first mark is, integers ``[B]``.
      second: where the second mark is, integers ``[B]``.

    Returns:
      Inputs ``[T, B, 2]`` and targets ``[1, B]``.
    """
    step = jnp.arange(len(numbers))[:, None]
    marks = (step == first[None]) | (step == second[None])
    inputs = jnp.stack([numbers, marks.astype(numbers.dtype)], axis=-1)
    return Batch(inputs, jnp.where(marks, numbers, 0).sum(axis=0, keepdims=True))


class Raw(nn.Module):
    """Inputs are features already."""

    def __call__(self, inputs: jax.Array) -> jax.Array:
        return inputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class AddingTask(AddingSettings, SupervisedTask):
    """The adding problem.

    Numbers are uniform in [0, 1); one mark is in [0, T // 2), the other in [T // 2, T). The
    model answers after the last step.
    """

    name = "adding"

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return tuple(Metric(name, False, 1 / 6, "baseline") for name in ("mse", "loss"))

    def module(self, recurrent: RNN | Stack, model: ModelSettings) -> nn.Module:
        return SequenceModel(
            encoder=Raw(), recurrent=recurrent, decoder=Decoder((*model.decoder, 1)), outputs=1
        )

    def load(self) -> Batch:
        """The held-out set."""
        return self._draw(threefry_key(_HELD_OUT_KEY), self.held_out_sequences)

    def sets(self, loaded: Batch) -> dict[str, Batch]:
        return {"held_out": loaded}

    def batch(self, loaded: Batch, key: jax.Array, step: jax.Array, size: int) -> Batch:
        del loaded
        return self._draw(jax.random.fold_in(key, step), size)

    def score(self, outputs: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        """Squared errors of outputs ``[1, B, 1]``."""
        error = jnp.square(outputs[..., 0] - batch.targets)[0]
        return {"loss": error, "mse": error}

    def _draw(self, key: jax.Array, size: int) -> Batch:
        number_key, first_key, second_key = jax.random.split(key, 3)
        half = self.length // 2
        return lay_out(
            jax.random.uniform(number_key, (self.length, size), jnp.float32),
            jax.random.randint(first_key, (size,), 0, half),
            jax.random.randint(second_key, (size,), half, self.length),
        )
