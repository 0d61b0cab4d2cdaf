"""Optimisers and schedules of optax by name, and GATO's rule that halves the learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from experiments.settings.optimization import TrainingSettings


def optimizer(
    settings: TrainingSettings, norm: Callable[[Any], jax.Array] | None = None
) -> optax.GradientTransformation:
    """Clipping, weight decay and the optimiser's direction; the caller multiplies by minus the
    rate.

    But for adamw the decay is added to the clipped gradient, as torch's ``weight_decay`` is, so
    that Adam scales it like the gradient itself. RMSprop is torch's, too.

    Args:
      settings: of the run.
      norm: of a gradient of which a device has a part only; None: it has all of it.
    """
    parts, decay = [], settings.weight_decay
    if settings.clip_norm:
        clip = settings.clip_norm
        parts.append(optax.clip_by_global_norm(clip) if norm is None else _clip_by(norm, clip))
    if settings.clip_value:
        parts.append(optax.clip(settings.clip_value))
    if decay and settings.optimizer != "adamw":
        parts.append(optax.add_decayed_weights(decay))
    momentum = [optax.trace(settings.momentum)] if settings.momentum else []
    directions: dict[str, Callable[[], list[optax.GradientTransformation]]] = {
        "adam": lambda: [optax.scale_by_adam()],
        "adamw": lambda: [optax.scale_by_adam(), optax.add_decayed_weights(decay)],
        "sgd": lambda: momentum or [optax.identity()],
        "rmsprop": lambda: [optax.scale_by_rms(decay=0.99, eps_in_sqrt=False), *momentum],
    }
    return optax.chain(*parts, *directions[settings.optimizer]())


def _clip_by(norm: Callable[[Any], jax.Array], largest: float) -> optax.GradientTransformation:
    """``optax.clip_by_global_norm`` with a norm of one's own."""

    def clipped(gradients: Any, params: Any) -> Any:
        del params
        length = norm(gradients)
        return jax.tree.map(
            lambda leaf: jnp.where(
                length < largest, leaf, leaf / length.astype(leaf.dtype) * largest
            ),
            gradients,
        )

    return optax.stateless(clipped)


def schedule(settings: TrainingSettings) -> Callable[[jax.Array], jax.Array] | None:
    """The factor on the learning rate at a step; None: it is 1 throughout."""
    warmup = settings.warmup_steps
    if settings.schedule == "constant":
        return None
    if settings.schedule == "warmup":
        factor: optax.Schedule = optax.linear_schedule(1 / warmup, 1.0, warmup - 1)
    else:
        factor = optax.warmup_cosine_decay_schedule(
            1 / warmup if warmup else 1.0, 1.0, warmup, settings.steps
        )
    return lambda step: jnp.asarray(factor(step), jnp.float32)


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

    def after(
        self, loss: jax.Array | None, step: jax.Array, batch_size: int, every: int
    ) -> Halving:
        """The state after a step: halved if the loss got worse at a check (GATO, B.3).

        Args:
          loss: of this step; None: it was left out, and a check that is due takes the others.
          step: its number, counted from 0.
          batch_size: examples per step.
          every: examples between checks; a check is due at the first step past each multiple.
        """
        loss_sum, losses = self.loss_sum, self.losses
        if loss is not None:
            loss_sum, losses = loss_sum + loss, losses + 1
        mean = loss_sum / jnp.maximum(losses, 1).astype(jnp.float32)
        # Checks repeat with this many steps; examples are more than an int32 holds.
        step %= every // math.gcd(batch_size, every)
        due = (step * batch_size % every + batch_size >= every) & (losses > 0)
        worse = due & (mean > self.previous)
        return Halving(
            scale=jnp.where(worse, self.scale / 2, self.scale),
            loss_sum=jnp.where(due, 0, loss_sum),
            losses=jnp.where(due, 0, losses),
            previous=jnp.where(due, mean, self.previous),
        )
