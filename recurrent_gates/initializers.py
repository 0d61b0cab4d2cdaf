"""Initializers: gate biases, torch's defaults and plain uniform draws.

Everything here is, or returns, a Flax-style initializer ``(key, shape, dtype) -> array``.
Factories are cached: equal arguments give the same object, so that two cells built with
equal settings compare equal and share one compilation.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from recurrent_gates import checks

__all__ = [
    "chrono_bias",
    "orthogonal",
    "symmetric_uniform",
    "torch_embedding",
    "torch_linear_bias",
    "torch_linear_kernel",
    "torch_recurrent",
    "uniform_gate_bias",
]

Initializer = Callable[..., jax.Array]

_ORTHOGONAL = nn.initializers.orthogonal()

# Chrono's unknown timescale: terms summed one by one before the tail is integrated.
_CHRONO_TABLE = 10_000


def uniform_gate_bias(
    key: jax.Array,
    features: int,
    shape: Sequence[int] | None = None,
    dtype: Any = jnp.float32,
) -> jax.Array:
    """Uniform gate initialisation: b = logit(u), u ~ U[1/d, 1 - 1/d] (UR-gates, eq. 9, D.5).

    Args:
      key: PRNG key.
      features: d, the hidden size, at least 3. Master gates use the hidden size too.
      shape: shape of the draw; default ``[features]``.
      dtype: dtype of the result; it is drawn in float32 at least.

    Returns:
      The biases; ``sigmoid(b)`` is uniform on [1/d, 1 - 1/d].

    Raises:
      ValueError: if ``features`` is below 3, where the interval is empty.
    """
    checks.key("key", key)
    if not isinstance(features, (int, np.integer)) or features < 3:
        raise ValueError(
            "Uniform gate initialisation draws from U[1/d, 1 - 1/d] and needs d >= 3; "
            f"got d = {features}."
        )
    shape = (features,) if shape is None else checks.shape("shape", shape)
    u = jax.random.uniform(key, shape, _draw_dtype(dtype), 1 / features, 1 - 1 / features)
    return (jnp.log(u) - jnp.log1p(-u)).astype(dtype)


def _draw_dtype(dtype: Any) -> Any:
    """The dtype of a draw: bfloat16 has no number between 1 - 1/128 and 1 to draw."""
    return dtype if jnp.dtype(dtype).itemsize >= 4 else jnp.float32


def chrono_bias(
    key: jax.Array,
    shape: Sequence[int],
    tmax: float | None = None,
    dtype: Any = jnp.float32,
) -> jax.Array:
    """Chrono initialisation of the forget bias (UR-gates, eq. 17; Tallec & Ollivier, 2018).

    Args:
      key: PRNG key.
      shape: shape of the draw.
      tmax: the longest dependency in steps, above 2: b = log U(1, tmax - 1). ``None``: the
        unknown timescale of UR-gates B.3, b = log T with P(T = k) proportional to
        1 / (k log^2(k + 1)). That law has no mean, so a few units start at forget gates that
        round to 1.
      dtype: dtype of the result; it is drawn in float32 at least.

    Returns:
      The biases, all >= 0. The input gate's are their negatives (eq. 18).

    Raises:
      ValueError: if ``tmax`` is 2 or less, or not finite.
    """
    checks.key("key", key)
    shape, result_dtype, dtype = checks.shape("shape", shape), dtype, _draw_dtype(dtype)
    if tmax is not None:
        if isinstance(tmax, str) or not 2 < tmax < math.inf:
            raise ValueError(f"Chrono initialisation needs a finite tmax above 2, got {tmax!r}.")
        return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, tmax - 1.0)).astype(result_dtype)
    k = np.arange(1, _CHRONO_TABLE + 1, dtype=np.float64)
    # Beyond the table 1/(k log^2(k+1)) integrates to 1/log k.
    edge = math.log(_CHRONO_TABLE + 1.0)
    weights = 1 / (k * np.log(k + 1) ** 2)
    total = weights.sum() + 1 / edge
    cdf = jnp.asarray(np.cumsum(weights) / total, dtype)
    u = jax.random.uniform(key, shape, dtype)
    index = jnp.searchsorted(cdf, u, side="right")
    survival = jnp.maximum(1 - u, jnp.finfo(dtype).tiny) * jnp.asarray(total, dtype)
    tail = 1 / survival  # P(T > t) = 1/log t there, so log T = 1/P
    head = jnp.asarray(np.log(k), dtype)[jnp.minimum(index, _CHRONO_TABLE - 1)]
    tail = jnp.maximum(tail, jnp.asarray(edge, dtype))
    return jnp.where(index < _CHRONO_TABLE, head, tail).astype(result_dtype)


def orthogonal(key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
    """``nn.initializers.orthogonal()``, drawn in float32 at least: a CPU factorises no bfloat16.

    Args:
      key: PRNG key.
      shape: of the array, two axes or more.
      dtype: of the result.

    Returns:
      An array whose rows or columns, whichever are fewer, are orthonormal.
    """
    return _ORTHOGONAL(key, tuple(shape), _draw_dtype(dtype)).astype(dtype)


@dataclasses.dataclass(frozen=True)
class _SymmetricUniform:
    scale: float

    def __call__(self, key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
        return jax.random.uniform(key, tuple(shape), dtype, -self.scale, self.scale)


@functools.cache
def symmetric_uniform(scale: float) -> Initializer:
    """U[-scale, scale] for every leaf; GATO's is ``symmetric_uniform(0.1)`` (GATO, B.2).

    Args:
      scale: the largest magnitude.

    Returns:
      An initializer ``(key, shape, dtype) -> array``.
    """
    return _SymmetricUniform(scale)


def torch_recurrent(features: int) -> Initializer:
    """torch's default for every leaf of nn.LSTM, nn.GRU and nn.RNN: U(±1/sqrt(features)).

    Args:
      features: F, the hidden size.

    Returns:
      An initializer ``(key, shape, dtype) -> array``.

    Example:
      >>> uniform = rg.initializers.torch_recurrent(16)
      >>> draw = uniform(jax.random.key(0), (3, 16))
      >>> bool(jnp.all(jnp.abs(draw) <= 0.25))
      True
    """
    return symmetric_uniform(1 / math.sqrt(features))


def torch_linear_kernel(
    key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32
) -> jax.Array:
    """torch's default for the weight of nn.Linear, stored ``[in, out]``: U(±1/sqrt(in)).

    Args:
      key: PRNG key.
      shape: ``[in, out]``.
      dtype: dtype of the result.

    Returns:
      The array.
    """
    return torch_recurrent(shape[0])(key, shape, dtype)


def torch_linear_bias(in_features: int) -> Initializer:
    """torch's default for the bias of nn.Linear: U(±1/sqrt(in_features)).

    Args:
      in_features: inputs of the layer.

    Returns:
      An initializer ``(key, shape, dtype) -> array``.
    """
    return torch_recurrent(in_features)


def torch_embedding(key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
    """torch's default for nn.Embedding: N(0, 1).

    Args:
      key: PRNG key.
      shape: shape of the result.
      dtype: dtype of the result.

    Returns:
      The array.
    """
    return jax.random.normal(key, tuple(shape), dtype)
