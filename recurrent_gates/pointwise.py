"""cos and softplus, which GATO takes at every step, and sums that stay within a period.

In float32 XLA's own take most of a one-layer GATO's time on a CPU: its cos reduces arguments of
any size and its softplus is a logaddexp. What is here is a few multiply-adds. Other dtypes take
XLA's; other platforms were not measured.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

_SINE = [(-1) ** n / math.factorial(2 * n + 1) for n in range(7)]  # to 7e-10 at pi / 2
_COSINE = [(-1) ** n / math.factorial(2 * n) for n in range(8)]  # to 7e-11
_ARTANH = [1 / (2 * n + 1) for n in range(8)]


def wrap(s: jax.Array, period: float | None) -> jax.Array:
    """s less whole periods: in [0, period), to a rounding of s; derivative 1. None: s itself."""
    return s if period is None else _less(s, jnp.floor(s / period), period)


def _less(s: jax.Array, turns: jax.Array, period: float) -> jax.Array:
    # 2 pi in float32 is off by 2e-7: over 65,536 steps and 7,000 turns, by 1e-3 without the rest.
    rounded = np.asarray(period, s.dtype).item()
    return s - rounded * turns - (period - rounded) * turns


@jax.custom_jvp
def cos(s: jax.Array) -> jax.Array:
    """cos(s) for an s that is kept within a period, any shape.

    In float32 off by at most 2e-7 within [0, 2 pi], and beyond by up to twice the spacing of
    float32 numbers at s more. NaN for an s that is not finite.
    """
    if s.dtype != jnp.float32:
        return jnp.cos(s)
    sign, remainder = _half_turns(s)
    return sign * _polynomial(_COSINE, remainder * remainder)


@jax.custom_jvp
def _sin(s: jax.Array) -> jax.Array:
    if s.dtype != jnp.float32:
        return jnp.sin(s)
    sign, remainder = _half_turns(s)
    return sign * remainder * _polynomial(_SINE, remainder * remainder)


@cos.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return cos(*primals), -_sin(*primals) * tangents[0]


@_sin.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return _sin(*primals), cos(*primals) * tangents[0]


def _half_turns(s: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(-1)^n and s - n pi for the nearest whole n; cos(s) is the one times the other's cos."""
    turns = jnp.round(s / math.pi)
    sign = 1 - 2 * wrap(turns, 2.0)
    remainder = _less(s, turns, math.pi)
    return sign, jnp.clip(remainder, -math.pi / 2, math.pi / 2)  # a huge s has no digits left


@jax.custom_jvp
def softplus(x: jax.Array) -> jax.Array:
    """log(1 + exp(x)), any shape; to float32's relative precision, also where it is small.

    log(1 + e) is 2 artanh(e / (2 + e)), a series in at most 1/9 for e = exp(-|x|).
    """
    if x.dtype != jnp.float32:
        return jax.nn.softplus(x)
    e = jnp.exp(-jnp.abs(x))
    ratio = e / (2 + e)
    return jnp.maximum(x, 0) + 2 * ratio * _polynomial(_ARTANH, ratio * ratio)


@softplus.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return softplus(*primals), jax.nn.sigmoid(*primals) * tangents[0]


def _polynomial(coefficients: list[float], x: jax.Array) -> jax.Array:
    total = jnp.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        total = total * x + coefficient
    return total
