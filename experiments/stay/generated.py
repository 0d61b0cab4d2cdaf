"""Vital signs that are drawn, measured at irregular times, with a best answer that is known.

Every vital sign v of a stay has a level of its own, which says nothing, and a slow trend upwards
or downwards, whose direction depends on whether the stay is a long one:

    x_v(t) = level_v + y trend_v t + noise,    y = 1 (long) or -1, t in [0, 1] of the 48 hours,

with level_v ~ N(0, LEVEL^2) and noise ~ N(0, NOISE^2). Whether and when a sign is measured does
not depend on y. Given these times the values of a sign are Gaussian with means y trend_v t and
covariance NOISE^2 I + LEVEL^2 1 1', so the log odds of a long stay are linear in them, and no
rule is right more often than their sign.

Letters: T times, B stays, V vital signs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

SIGNS = 12
TIMES = 32  # most times of measurement
FEWEST = 12
LEVEL = 0.5
NOISE = 1.0
_TREND = 0.35  # in 48 hours, of every sign, in one direction or the other
_OFTEN, _RARELY = 0.9, 0.1  # how likely a sign is measured at a time: the first, the last sign


def _measured_prob() -> jax.Array:
    return jnp.linspace(_OFTEN, _RARELY, SIGNS, dtype=jnp.float32)


def trends() -> jax.Array:
    """The trends of the signs in a long stay, float32 ``[V]``."""
    direction = 1 - 2 * (jnp.arange(SIGNS) % 3 == 1).astype(jnp.float32)
    return jnp.float32(_TREND) * direction


def draw(key: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Stays.

    Args:
      key: decides them.
      count: B.

    Returns:
      float32 ``[T, B, V + 1]``: values, NaN where there is none, and last the time in 48 hours,
      NaN in the padding before the first time; int32 ``[B]``: 1 for a long stay.
    """
    label_key, count_key, time_key, measured_key, level_key, noise_key = jax.random.split(key, 6)
    shape = (TIMES, count, SIGNS)
    long_stay = jax.random.bernoulli(label_key, 0.5, (count,))
    times = jax.random.randint(count_key, (count,), FEWEST, TIMES + 1)
    padding = jnp.arange(TIMES)[:, None] < (TIMES - times)[None]
    # Those of the padding are sorted to the front.
    random_times = jax.random.uniform(time_key, (TIMES, count), jnp.float32)
    time = jnp.sort(jnp.where(padding, -1.0, random_times), axis=0)
    measured = jax.random.bernoulli(measured_key, jnp.broadcast_to(_measured_prob(), shape))
    level = jnp.float32(LEVEL) * jax.random.normal(level_key, shape[1:], jnp.float32)
    noise = jnp.float32(NOISE) * jax.random.normal(noise_key, shape, jnp.float32)
    y = jnp.where(long_stay, jnp.float32(1), jnp.float32(-1))
    trend = y[:, None] * trends()[None]
    values = level[None] + trend[None] * time[..., None] + noise
    values = jnp.where(measured & ~padding[..., None], values, jnp.nan)
    time = jnp.where(padding, jnp.nan, time)
    return jnp.concatenate([values, time[..., None]], axis=-1), long_stay.astype(jnp.int32)


def log_odds(inputs: jax.Array) -> jax.Array:
    """The log odds of a long stay given all that was measured, ``[B]``.

    By the formula of Sherman and Morrison the inverse covariance of a sign that was measured n
    times is ``(I - c 1 1') / NOISE^2`` with ``c = LEVEL^2 / (NOISE^2 + n LEVEL^2)``.

    Args:
      inputs: as ``draw`` makes them.
    """
    values, time = inputs[..., :-1], inputs[..., -1:]
    measured = ~jnp.isnan(values)
    n = measured.sum(axis=0)
    x = jnp.where(measured, values, 0)
    t = jnp.where(measured, time, 0)
    c = LEVEL**2 / (NOISE**2 + n * LEVEL**2)
    products = (t * x).sum(axis=0) - c * t.sum(axis=0) * x.sum(axis=0)
    return (2 / NOISE**2 * trends()[None] * products).sum(axis=-1)
