"""Explicit broadcasting: nothing in the library relies on implicit rank promotion."""

from __future__ import annotations

import jax


def expand(mask: jax.Array, like: jax.Array) -> jax.Array:
    """Adds trailing axes to a mask over leading dims until it has the rank of ``like``."""
    return mask.reshape(mask.shape + (1,) * (like.ndim - mask.ndim))


def lead(vector: jax.Array, like: jax.Array) -> jax.Array:
    """Adds leading axes to per-feature values until they have the rank of ``like``."""
    return vector.reshape((1,) * (like.ndim - vector.ndim) + vector.shape)
