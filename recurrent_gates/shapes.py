"""Axes: explicit broadcasting (nothing relies on implicit rank promotion), trees of inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import export


def expand(mask: jax.Array, like: jax.Array) -> jax.Array:
    """Adds trailing axes to a mask over leading dims until it has the rank of ``like``."""
    return mask.reshape(mask.shape + (1,) * (like.ndim - mask.ndim))


def shifted(start: Any, values: Any, reverse: bool = False) -> Any:
    """What stands before each entry of trees over time.

    Args:
      start: ``[...]``, before the first entry, in reverse behind the last.
      values: ``[T, ...]``.
      reverse: whether the last entry comes first.

    Returns:
      ``[T, ...]``.
    """

    def shift(first: jax.Array, sequence: jax.Array) -> jax.Array:
        pieces = [sequence[1:], first[None]] if reverse else [first[None], sequence[:-1]]
        return jnp.concatenate(pieces)

    return jax.tree.map(shift, start, values)


def byte_count(tree: Any) -> int:
    """The memory of a tree's arrays; plain numbers take none."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")]
    return sum(array.size * array.dtype.itemsize for array in arrays)


def is_symbolic(tree: Any) -> bool:
    """Whether a size of an array of a tree is symbolic, as ``jax.export`` has them: it cannot be
    compared with a number."""
    return any(
        export.is_symbolic_dim(size) for leaf in jax.tree.leaves(tree) for size in leaf.shape
    )


def all_varying(tree: Any) -> Any:
    """In a ``jax.shard_map`` every array varies between devices as soon as one of a tree does.

    A loop's carry must not begin as a constant and go on as what each device has of its own. The
    gradients of parameters, which all devices share, are then summed once and not at each step.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return tree
    axes = {id(leaf): jax.typeof(leaf).manual_axis_type.varying for leaf in jax.tree.leaves(tree)}
    all_axes = frozenset().union(*axes.values())

    def vary(leaf: Any) -> Any:
        missing = tuple(all_axes - axes[id(leaf)])
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(vary, tree)


def kernel_result(shape: Sequence[int], like: jax.Array, dtype: Any = None) -> jax.ShapeDtypeStruct:
    """What a kernel returns: varying between the devices of a ``jax.shard_map`` as an array does.

    Args:
      shape: of the result.
      like: the array.
      dtype: of the result, by default that of the array.
    """
    aval = jax.typeof(like)
    return jax.ShapeDtypeStruct(shape, dtype or aval.dtype, manual_axis_type=aval.manual_axis_type)


def lead(vector: jax.Array, like: jax.Array) -> jax.Array:
    """Adds leading axes to per-feature values until they have the rank of ``like``."""
    return vector.reshape((1,) * (like.ndim - vector.ndim) + vector.shape)


def in_features(inputs: Any) -> Any:
    """The width of every leaf: an int for one array, a tree of ints for a tree of them."""
    return jax.tree.map(lambda x: jnp.shape(x)[-1], inputs)


def leading_axes(inputs: Any) -> tuple[int, ...]:
    """The sizes that the shapes of all leaves begin with, their last axes left out.

    For sequences these are time and batch: ``{"image": [T, B, H, W, C], "reward": [T, B, 1]}``
    begins with (T, B).
    """
    first, *rest = (jnp.shape(leaf)[:-1] for leaf in jax.tree.leaves(inputs))
    for count in range(min(map(len, (first, *rest))), 0, -1):
        if all(shape[:count] == first[:count] for shape in rest):
            return first[:count]
    return ()
