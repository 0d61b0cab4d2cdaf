"""A step's batch in two halves, where that is fast: forward, on one CPU device with two cores.

XLA's CPU compiler shares a product out among the cores, poorly if it is small, and runs what
follows it (some ten thousand numbers) on one of them. Two halves of the batch do not wait for each
other: each core has a product and what follows it. Examples are independent, so that nothing
changes but the last bits of products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from recurrent_gates import target
from recurrent_gates.scan import Loop

# Where halves of lstm and ur_lstm were measured to be 1.0 to 1.8 times as fast (0.94 at worst).
# Elsewhere, 0.54 to 1.15: each half reads all weights, which have to fit a core's second-level
# cache.
_FEATURES = (160, 400)
_WORK = (2_200_000, 38_000_000)  # multiply-adds of a step
_MOST_PRODUCTS = 4  # with om_lstm's six 0.77 to 1.4


def count(loop: Loop) -> int:
    """How many parts a step's batch has: two where that is fast, else one.

    Args:
      loop: a product loop.
    """
    if target.platform() != "cpu" or target.device_count() > 1 or target.cores() != 2:
        return 1
    return 2 if not loop.symbolic and _is_fast(loop) and _is_divisible(loop) else 1


def _is_fast(loop: Loop) -> bool:
    matrices = loop.params.matrices.values()
    fields = jax.tree.leaves(loop.carry)
    # With a single field XLA finds too little in a step to run any of it beside the rest.
    if not 0 < len(matrices) <= _MOST_PRODUCTS or len(fields) < 2:
        return False
    low, high = _FEATURES
    if not all(low <= matrix.shape[-2] <= high for matrix in matrices):
        return False
    low, high = _WORK
    return low <= fields[0].shape[0] * sum(matrix.size for matrix in matrices) <= high


def _is_divisible(loop: Loop) -> bool:
    """Whether all that a step reads, beside the weights, is rows of the batch or one number."""
    batch = jax.tree.leaves(loop.carry)[0].shape[0]

    def is_rows_or_number(leaf: jax.Array) -> bool:
        """Of noise ``[T, ...]``; keys are left whole."""
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return False
        return leaf.ndim == 1 or leaf.shape[1] == batch

    return (
        loop.settings.batch_dims == 1
        and all(fn.elementwise for fn in loop.carry_fns)
        and all(map(is_rows_or_number, jax.tree.leaves(loop.stream.noise)))
        and all(jnp.ndim(leaf) == 0 for leaf in jax.tree.leaves(loop.carry_fns))
    )


def loops(loop: Loop, parts: int) -> list[Loop]:
    """The loop for each part of the batch; their inputs and streams are those of all."""
    carries = divided((loop.carry, loop.reset_carry), parts)
    return [loop.replace(carry=carry, reset_carry=reset) for carry, reset in carries]


def divided(tree: Any, parts: int) -> list[Any]:
    """The rows of each part, of a tree whose arrays lead with the batch; a number is everyone's."""
    if parts == 1:
        return [tree]

    def rows(leaf: jax.Array, part: int) -> jax.Array:
        if leaf.ndim == 0:
            return leaf
        middle = leaf.shape[0] // 2
        return leaf[middle:] if part else leaf[:middle]

    return [jax.tree.map(lambda leaf, part=part: rows(leaf, part), tree) for part in range(parts)]


def joined(trees: Sequence[Any]) -> Any:
    """The tree that ``divided`` has divided."""
    if len(trees) == 1:
        return trees[0]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *trees)
