"""What training carries from step to step, and the keys that a lane draws from."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from experiments.optimizers import Halving


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
      loss_sum: of the training losses since the last evaluation.
      loss_count: how many these are.
      diverged_at: the first step with a loss that is not finite, or beyond return; or -1.
      halving: GATO's rule, where it is in force.
      best: the best parameters, where they are kept.
    """

    params: Any
    optimizer: Any
    loss_sum: jax.Array
    loss_count: jax.Array
    diverged_at: jax.Array
    halving: Halving | None
    best: Best | None


def key_of(lane: Lane, purpose: int) -> jax.Array:
    """A lane's key for parameters (0), data (1), noise (2) or dropout (3); rates share them."""
    return jax.random.fold_in(jax.random.key(lane.seed), purpose)
