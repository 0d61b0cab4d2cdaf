"""Steps and examples as the rows of one matrix, where that is fast: on one CPU device."""

from __future__ import annotations

import math
from typing import Any

import jax

from recurrent_gates import target
from recurrent_gates.scan import Loop


def on_one_cpu() -> bool:
    """Whether what is traced surely runs on one CPU device: there is no other, or by shard_map."""
    if target.platform() != "cpu":
        return False
    return target.device_count() == 1 or jax.sharding.get_abstract_mesh().are_all_axes_manual


def flat(x: jax.Array, axes: int) -> jax.Array:
    """x with its first ``axes`` axes as one.

    XLA's CPU compiler transposes a copy before it sums products over several axes. A batch that is
    sharded must stay an axis of its own: steps times a part of the batch is no part of the rows.
    """
    return x.reshape(math.prod(x.shape[:axes]), *x.shape[axes:])


def unflat(x: Any, axes: tuple[int, ...]) -> Any:
    """What ``flat`` was before, as every leaf of a tree."""
    return jax.tree.map(lambda a: a.reshape(*axes, *a.shape[1:]), x)


def as_transpose(x: jax.Array) -> jax.Array:
    """A matrix that is held as its transpose: sums over its rows are 1.2 to 1.6 times as fast.

    The barrier keeps XLA from undoing the one transpose with the other.
    """
    return jax.lax.optimization_barrier(x.T).T


def projected(loop: Loop) -> Any:
    """``cell.project`` of a loop's inputs, where that is fast of all rows at once."""
    cell = loop.settings.cell
    if not on_one_cpu():
        return cell.project(loop.params, loop.xs)
    axes = loop.lead
    rows = jax.tree.map(lambda x: flat(x, len(axes)), loop.xs)
    return unflat(cell.project(loop.params, rows), axes)
