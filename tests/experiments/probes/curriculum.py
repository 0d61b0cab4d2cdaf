"""A level that rises with success, and with it the length of what is drawn."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from experiments.settings.metrics import Metric
from experiments.training.models import Decoder, SequenceModel
from experiments.training.task import BaseTask, Outcome, Resident


class Window(NamedTuple):
    """Inputs float32 ``[T, B, 1]`` and targets float32 ``[B]``."""

    inputs: jax.Array
    targets: jax.Array


class Level(NamedTuple):
    """The level, int32 ``[]``, and the last losses on it, float32 ``[patience]``."""

    number: jax.Array
    losses: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class CurriculumTask(BaseTask):
    """The sum of a sequence whose first ``level`` numbers are drawn and whose others are zero.

    Attributes:
      levels: T, the highest level.
      patience: the level rises when the mean of so many losses
      threshold: is below this.
    """

    levels: int = 5
    patience: int = 2
    threshold: float = 0.25

    name = "curriculum"
    axes = Window(1, 0)
    stream_axes = None

    @property
    def metrics(self):
        return (Metric("loss", False, self.levels / 3, "zero"),)

    def module(self, recurrent, model):
        del model
        return SequenceModel(nn.Dense(3), recurrent, Decoder((1,)), outputs=1)

    def example(self):
        return (jnp.zeros((1, 1, 1)),)

    def data(self):
        return Resident(())

    def shapes(self, rows):
        del rows
        return ()

    def start(self, fresh, data, key, rows):
        del fresh, data, key, rows
        return Level(jnp.int32(1), jnp.full(self.patience, jnp.inf))

    def draw(self, act, data, stream, key, step, rows):
        del act, data
        return self.window(jax.random.fold_in(key, step), stream.number, rows), stream

    def window(self, key, level, rows):
        """These rows of the window of a key on a level."""
        numbers = jax.random.uniform(key, (self.levels, rows.total, 1), minval=-1.0)
        drawn = jnp.arange(self.levels)[:, None, None] < level
        inputs = jnp.where(drawn, numbers, 0)
        return rows.of(Window(inputs, inputs[..., 0].sum(axis=0)), self.axes)

    def loss(self, apply, params, window, stream, train):
        del train
        errors = apply(params, window.inputs)[0, :, 0] - window.targets
        total = ((errors**2).sum(), len(errors))
        return Outcome(total, {"loss": total}, stream)

    def adapt(self, stream, loss, weight):
        del weight
        losses = jnp.concatenate([stream.losses[1:], loss[None]])
        solved = losses.mean() < self.threshold
        return Level(
            jnp.minimum(stream.number + solved, self.levels), jnp.where(solved, jnp.inf, losses)
        )

    def held_out(self, data, devices):
        del data, devices
        return {"held_out": Hardest(self)}


class Hardest:
    """One window of the highest level."""

    windows = 1
    rows = 16

    def __init__(self, task):
        self._task = task

    def start(self, fresh, data, rows):
        return self._task.start(fresh, data, None, rows)

    def draw(self, act, data, stream, index, rows):
        del act, data
        return self._task.window(jax.random.key(index), self._task.levels, rows), stream
