"""What training carries from step to step, and the keys that a lane draws from."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

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


class Faults(NamedTuple):
    """Steps whose loss diverged or whose gradient was not finite; int32 scalars.

    Attributes:
      step: the first one since the last evaluation; -1: none.
      leaf: what was bad at it: 0 is the loss, n the gradient of the n-th parameter.
      recent: how many since the last evaluation.
      total: how many since the start.
    """

    step: jax.Array
    leaf: jax.Array
    recent: jax.Array
    total: jax.Array

    @classmethod
    def none(cls) -> Faults:
        """Before the first step."""
        return cls(jnp.int32(-1), jnp.int32(-1), jnp.int32(0), jnp.int32(0))

    def after(self, step: jax.Array, leaf: jax.Array) -> Faults:
        """After a step whose first bad leaf is this one; -1: none."""
        bad = leaf >= 0
        first = bad & (self.recent == 0)
        count = bad.astype(jnp.int32)
        return Faults(
            step=jnp.where(first, step, self.step),
            leaf=jnp.where(first, leaf, self.leaf),
            recent=self.recent + count,
            total=self.total + count,
        )

    def settled(self) -> Faults:
        """After an evaluation."""
        return Faults.none()._replace(total=self.total)


class State(NamedTuple):
    """What training carries from step to step, of one lane; all lanes have a leading axis.

    Attributes:
      params: the model's parameters.
      optimizer: optax's state.
      stream: the task's own; its rows are split over the devices.
      loss_total: of the training losses since the last evaluation, by weight.
      loss_weight: their weight, in windows of a weight of one for each row.
      score_totals: of the task's ``train_scores`` since the last evaluation, and their weights.
      diverged_at: the first step with a loss that is not finite, or beyond return; or -1.
      halving: GATO's rule, where it is in force.
      best: the best parameters, where they are kept.
      faults: the steps that were not finite, unless a lane is just marked.
    """

    params: Any
    optimizer: Any
    stream: Any
    loss_total: jax.Array
    loss_weight: jax.Array
    score_totals: dict[str, tuple[jax.Array, jax.Array]]
    diverged_at: jax.Array
    halving: Halving | None
    best: Best | None
    faults: Faults | None


class Purpose(enum.IntEnum):
    """What a lane's key is for; learning rates share them."""

    PARAMETERS = 0
    DATA = 1
    NOISE = 2
    DROPOUT = 3
    STREAM = 4
    UPDATE = 5


def threefry_key(seed: int | jax.Array) -> jax.Array:
    """The key of a seed, whatever ``jax_default_prng_impl`` says.

    What other implementations draw for a row depends on which rows are drawn with it, and so on
    the number of devices.
    """
    return jax.random.key(seed, impl="threefry2x32")


def key_of(lane: Lane, purpose: Purpose) -> jax.Array:
    """A lane's key for a purpose."""
    return jax.random.fold_in(threefry_key(lane.seed), int(purpose))
