"""What training carries from step to step, and the keys that a lane draws from."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import jax

from experiments.training.optimizers import Halving


class Lane(NamedTuple):
    """A seed, int32, and its learning rate, float32."""

    seed: jax.Array
    rate: jax.Array


class Best(NamedTuple):
    """The parameters that scored best so far.

    Attributes:
      params: these parameters.
      value: their score; more is better.
      stale: evaluations since.
    """

    params: Any
    value: jax.Array
    stale: jax.Array


class State(NamedTuple):
    """What training carries from step to step, of one lane; all lanes have a leading axis.

    Attributes:
      params: the model's parameters.
      optimizer: optax's state.
      stream: the task's own; its rows are split over the devices.
      loss_total: of the training losses since the last evaluation, by weight.
      loss_weight: their weight, in windows of a weight of one for each row.
      diverged_at: the first step with a loss that is not finite, or beyond return; or -1.
      halving: GATO's rule, where it is in force.
      best: the best parameters, where they are kept.
    """

    params: Any
    optimizer: Any
    stream: Any
    loss_total: jax.Array
    loss_weight: jax.Array
    diverged_at: jax.Array
    halving: Halving | None
    best: Best | None


class Purpose(enum.IntEnum):
    """What a lane's key is for; learning rates share them."""

    PARAMETERS = 0
    DATA = 1
    NOISE = 2
    DROPOUT = 3
    STREAM = 4
    UPDATE = 5


def key_of(lane: Lane, purpose: Purpose) -> jax.Array:
    """A lane's key for a purpose."""
    return jax.random.fold_in(jax.random.key(lane.seed), int(purpose))
