"""What an actor and a critic learn from: returns, advantages, losses, and RMA's reconstructions.

Letters: T steps of a window, B batch, A actions. All arrays are time-major. ``discounts`` are zero
where an episode ends; ``values`` have one entry more than the rewards, the last of which stands for
what comes after the window.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

_STRENGTH_COST, _FREE_STRENGTH = 5e-5, 2.0  # the public code


class Targets(NamedTuple):
    """What the critic should have said and by how much each action was better, ``[T, B]``."""

    returns: jax.Array
    advantages: jax.Array


class Costs(NamedTuple):
    """Weights of half the squared error of the values, and of the entropy."""

    baseline: float
    entropy: float


def lambda_targets(
    rewards: jax.Array, discounts: jax.Array, values: jax.Array, decay: float
) -> Targets:
    """Lambda-returns G_t = r_t + d_t ((1 - lambda) v_{t+1} + lambda G_{t+1}) (Sutton and Barto,
    12.3), and what they are above the values.

    Args:
      rewards, discounts: ``[T, B]``.
      values: ``[T + 1, B]``.
      decay: lambda; 1: the discounted rewards to the end, 0: of one step.
    """

    def backup(next_return: jax.Array, step: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        reward, discount, value = step
        target = reward + discount * ((1 - decay) * value + decay * next_return)
        return target, target

    inputs = (rewards, discounts, values[1:])
    _, returns = jax.lax.scan(backup, values[-1], inputs, reverse=True)
    return Targets(returns, returns - values[:-1])


def n_step_targets(
    rewards: jax.Array, discounts: jax.Array, values: jax.Array, steps: int
) -> Targets:
    """Returns of n rewards and the value after them (Mnih et al., 2016); fewer before the window's
    end."""
    length = len(rewards)
    n = min(steps, length)
    returns = jnp.concatenate(
        [values[n:], jnp.broadcast_to(values[-1], (n - 1, *values[-1].shape))]
    )
    for offset in reversed(range(n)):
        mask = jnp.arange(length)[:, None] + offset < length
        reward = jnp.roll(rewards, -offset, axis=0)
        discount = jnp.roll(discounts, -offset, axis=0)
        returns = jnp.where(mask, reward + discount * returns, returns)
    return Targets(returns, returns - values[:-1])


def v_trace_targets(
    rewards: jax.Array, discounts: jax.Array, values: jax.Array, ratios: jax.Array, decay: float
) -> Targets:
    """V-trace (Espeholt et al., 2018, Eq. 1 and 4.2) with clips of 1.

    Args:
      rewards, discounts: ``[T, B]``.
      values: ``[T + 1, B]``.
      ratios: how much likelier an action is now than when it was taken, ``[T, B]``.
      decay: lambda, a factor on c.
    """
    rho = jnp.minimum(1, ratios)
    c = decay * rho
    errors = rho * (rewards + discounts * values[1:] - values[:-1])

    def backup(
        next_correction: jax.Array, step: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array]:
        error, discount, cut = step
        correction = error + discount * cut * next_correction  # Eq. (1), as in its Remark 1
        return correction, correction

    last_correction = jnp.zeros_like(values[-1])
    _, corrections = jax.lax.scan(backup, last_correction, (errors, discounts, c), reverse=True)
    returns = values[:-1] + corrections
    next_values = jnp.concatenate([returns[1:], values[-1:]])
    # An action's worth mixes what follows as the returns do: with lambda 1, of section 4.2.
    next_values = (1 - decay) * values[1:] + decay * next_values
    return Targets(returns, rho * (rewards + discounts * next_values - values[:-1]))


def actor_critic(
    logits: jax.Array, values: jax.Array, actions: jax.Array, targets: Targets, costs: Costs
) -> jax.Array:
    """The loss of each step, ``[T, B]``; targets are constants.

    Args:
      logits: ``[T, B, A]``.
      values: ``[T, B]``.
      actions: that were taken, int32 ``[T, B]``.
      targets: of the same steps.
      costs: weights of its parts.
    """
    targets = jax.lax.stop_gradient(targets)
    policy = -log_probability(logits, actions) * targets.advantages
    baseline = jnp.square(targets.returns - values) / 2
    return policy + costs.baseline * baseline - costs.entropy * entropy(logits)


def entropy(logits: jax.Array) -> jax.Array:
    """Of the actions, ``[T, B, A]`` -> ``[T, B]``."""
    log_p = jax.nn.log_softmax(logits)
    return -(jnp.exp(log_p) * log_p).sum(axis=-1)


def log_probability(logits: jax.Array, actions: jax.Array) -> jax.Array:
    """Of actions int32 ``[T, B]`` under logits ``[T, B, A]``."""
    log_p = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(log_p, actions[..., None], axis=-1)[..., 0]


class Targeted(NamedTuple):
    """What a memory is asked to give back: pixels in [0, 1], the action and the reward before."""

    pixels: jax.Array
    action: jax.Array
    reward: jax.Array


def reconstruction(prediction: Targeted, target: Targeted, image_cost: float) -> jax.Array:
    """RMA's losses of what its latents are decoded into, ``[T, B]``.

    Bernoulli's cross-entropy of the pixels, times ``image_cost`` over their number; the actions'
    cross-entropy; half the squared error of the reward (Hung et al., 2018, and its code).

    Args:
      prediction: logits ``[T, B, P]`` and ``[T, B, A]``, and a number ``[T, B]``.
      target: numbers ``[T, B, P]``, int32 ``[T, B]`` and ``[T, B]``.
      image_cost: 50 in that code.
    """
    image = optax.sigmoid_binary_cross_entropy(prediction.pixels, target.pixels).mean(axis=-1)
    action = -log_probability(prediction.action, target.action)
    return image_cost * image + action + jnp.square(prediction.reward - target.reward) / 2


def strength(strengths: jax.Array) -> jax.Array:
    """RMA's price of strong reading: ``[T, B, R]`` -> ``[T, B]`` (the public code)."""
    return _STRENGTH_COST * jnp.maximum(strengths, _FREE_STRENGTH).sum(axis=-1)
