"""Explicit broadcasting: nothing in the library relies on implicit rank promotion."""

from __future__ import annotations

from typing import Any

import jax
from jax import export


def expand(mask: jax.Array, like: jax.Array) -> jax.Array:
    """Adds trailing axes to a mask over leading dims until it has the rank of ``like``."""
    return mask.reshape(mask.shape + (1,) * (like.ndim - mask.ndim))


def is_symbolic(tree: Any) -> bool:
    """Whether a size of an array of a tree is symbolic, as ``jax.export`` has them: it cannot be
    compared with a number."""
    return any(
        export.is_symbolic_dim(size) for leaf in jax.tree.leaves(tree) for size in leaf.shape
    )


def lead(vector: jax.Array, like: jax.Array) -> jax.Array:
    """Adds leading axes to per-feature values until they have the rank of ``like``."""
    return vector.reshape((1,) * (like.ndim - vector.ndim) + vector.shape)
