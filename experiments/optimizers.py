"""Adam as torch has it, and GATO's rule that halves the learning rate."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from experiments.config import TrainingConfig


def adam(config: TrainingConfig) -> optax.GradientTransformation:
    """Clipping, coupled weight decay, Adam's direction; the caller multiplies by minus the rate.

    The decay is added to the clipped gradient, as torch's ``weight_decay`` is, so Adam scales
    it like the gradient itself (AdamW does not).
    """
    parts = []
    if config.clip_norm:
        parts.append(optax.clip_by_global_norm(config.clip_norm))
    if config.clip_value:
        parts.append(optax.clip(config.clip_value))
    if config.weight_decay:
        parts.append(optax.add_decayed_weights(config.weight_decay))
    return optax.chain(*parts, optax.scale_by_adam())


class Halving(NamedTuple):
    """State of GATO's rule; scalars.

    Attributes:
      scale: the factor on the learning rate.
      loss_sum: of the training losses since the last check.
      losses: how many these are.
      previous: the mean loss at the last check.
    """

    scale: jax.Array
    loss_sum: jax.Array
    losses: jax.Array
    previous: jax.Array

    @classmethod
    def initial(cls) -> Halving:
        return cls(jnp.float32(1), jnp.float32(0), jnp.int32(0), jnp.float32(jnp.inf))

    def after(self, loss: jax.Array, step: jax.Array, batch_size: int, every: int) -> Halving:
        """The state after a step: halved if the loss got worse at a check (GATO, B.3).

        Args:
          loss: of this step.
          step: its number, counted from 0.
          batch_size: examples per step.
          every: examples between checks; a check is due at the first step past each multiple.
        """
        loss_sum, losses = self.loss_sum + loss, self.losses + 1
        mean = loss_sum / losses.astype(jnp.float32)
        due = (step + 1) * batch_size // every > step * batch_size // every
        worse = due & (mean > self.previous)
        return Halving(
            scale=jnp.where(worse, self.scale / 2, self.scale),
            loss_sum=jnp.where(due, 0, loss_sum),
            losses=jnp.where(due, 0, losses),
            previous=jnp.where(due, mean, self.previous),
        )
