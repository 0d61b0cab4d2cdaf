"""When a curriculum goes on to the next level: the rule of Santoro et al.'s published code.

The losses of a level are gathered; with ten of them, and from then on with each new one, the last
ten decide: the level is left if their mean change, over their mean, is below a threshold.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

_LOSSES = 10


class Climb(NamedTuple):
    """Where a curriculum is; nothing has an axis of the batch.

    Attributes:
      level: int32 ``[]``, from 0.
      losses: the last ones on this level, float32 ``[10]``.
      gathered: how many there have been, int32 ``[]``.
      total: the sum of the steps' losses since the last of them, float32 ``[]``.
      steps: how many these are, int32 ``[]``.
    """

    level: jax.Array
    losses: jax.Array
    gathered: jax.Array
    total: jax.Array
    steps: jax.Array


def begin() -> Climb:
    """Before the first step."""
    zero = jnp.int32(0)
    return Climb(zero, jnp.zeros(_LOSSES, jnp.float32), zero, jnp.float32(0), zero)


def after(climb: Climb, loss: jax.Array, every: int, threshold: float, last: int) -> Climb:
    """After a step.

    Args:
      climb: before it.
      loss: of the step, float32 ``[]``.
      every: so many steps make one loss, their mean.
      threshold: see the module.
      last: the highest level.
    """
    total, steps = climb.total + loss.astype(jnp.float32), climb.steps + 1
    due = steps >= every
    losses = jnp.append(climb.losses[1:], total / steps.astype(jnp.float32))
    losses = jnp.where(due, losses, climb.losses)
    gathered = climb.gathered + due
    change = (losses[-1] - losses[0]) / (_LOSSES - 1)  # the mean of the changes between them
    settled = change < threshold * losses.mean()
    advance = due & (gathered >= _LOSSES) & settled & (climb.level < last)
    return Climb(
        level=climb.level + advance,
        losses=losses,
        gathered=jnp.where(advance, 0, gathered),
        total=jnp.where(due, 0, total),
        steps=jnp.where(due, 0, steps),
    )
