"""Fields that only accumulate: a carry and its carry functions taken apart, and put together.

Where a cell names accumulated fields, a backend may run the other fields by themselves. The
increments of the accumulated ones are then known at all steps, and there is little left to do.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from recurrent_gates.base import Carry, Cell
from recurrent_gates.carry import CarryFn, apply_before
from recurrent_gates.scan import Stream, select

CarryFns = tuple[CarryFn, ...]


def without(cell: Cell, carry: Carry) -> Carry:
    """The fields that feed back, as a carry; the accumulated ones are None."""
    return carry._replace(**dict.fromkeys(cell.accumulated))


def only(cell: Cell, carry: Carry) -> Carry:
    """The accumulated fields, as a carry; the others are None."""
    return carry._replace(**{f: None for f in carry._fields if f not in cell.accumulated})


def joined(cell: Cell, looped: Carry, sums: Carry) -> Carry:
    """A carry from its two parts."""
    return looped._replace(**{f: getattr(sums, f) for f in cell.accumulated})


def part(
    cell: Cell, carry_fns: CarryFns, stream: Stream, *, accumulated: bool
) -> tuple[CarryFns, Stream]:
    """The carry functions, with their noise, that act on accumulated fields, or the others."""
    pairs = [
        (fn, noise)
        for fn, noise in zip(carry_fns, stream.noise, strict=True)
        if (fn.field in cell.accumulated) == accumulated
    ]
    return tuple(fn for fn, _ in pairs), stream._replace(noise=tuple(n for _, n in pairs))


def shifted(carry: Carry, carries: Carry, reverse: bool) -> Carry:
    """The carry before each step, ``[T, ...]``."""

    def shift(start: jax.Array, all_: jax.Array) -> jax.Array:
        pieces = [all_[1:], start[None]] if reverse else [start[None], all_[:-1]]
        return jnp.concatenate(pieces)

    return jax.tree.map(shift, carry, carries)


def read_by_increments(
    cell: Cell,
    carry: Carry,
    fresh: Carry,
    carry_fns: CarryFns,
    stream: Stream,
    looped: Carry,
    reverse: bool,
) -> Carry:
    """What each step's increments read: the looped carry before it, ``[T, ...]``.

    Args:
      cell: the cell.
      carry, fresh: whole carries, as the driver has them.
      carry_fns, stream: those of the looped fields.
      looped: the fields that feed back at all steps.
      reverse: whether time runs from the last step to the first.
    """

    def read(prev: Carry, stream_t: Stream) -> Carry:
        prev = select(stream_t.resets, without(cell, fresh), prev)
        return apply_before(carry_fns, stream_t.noise, prev)

    return jax.vmap(read)(shifted(without(cell, carry), looped, reverse), stream)


def sum_step(cell: Cell, total: Carry, added: dict[str, jax.Array]) -> Carry:
    """The accumulated fields one step on."""
    sums = {f: cell.accumulate(f, getattr(total, f), added[f]) for f in cell.accumulated}
    return total._replace(**sums)
