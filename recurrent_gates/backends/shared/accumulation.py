"""Summed fields: a loop taken apart into what feeds back and what only accumulates.

Where a cell declares sums, a backend may run the other fields by themselves. The increments of the
summed ones are then known at all steps, and there is little left to do:

    looped = run(feeding(loop))
    increments = cell.sums.increment(params, increment_inputs(feeding(loop), looped), z)
    sums = run(summing(loop, increments))
    carries = joined(cell, looped, sums)
"""

from __future__ import annotations

import jax
from flax import linen as nn

from recurrent_gates.base import Cell
from recurrent_gates.carry import CarryFn, apply_before
from recurrent_gates.declared import Carry, Params, Product, Products, Slots, summed_fields
from recurrent_gates.scan import Loop, Stream, select
from recurrent_gates.shapes import shifted


class SumCell(Cell):
    """The summed fields of a cell as a recurrence of their own, over their increments."""

    source: Cell

    @property
    def products(self) -> Products:
        return Products(_no_weights, self._update)

    @nn.nowrap
    def _update(self, carry: Carry, inputs: Slots, product: Product) -> Carry:
        del product
        return self.step({}, carry, inputs)

    @nn.nowrap
    def step(self, params: Params, carry: Carry, z_t: Slots) -> Carry:
        del params
        sums = self.source.sums
        assert sums is not None
        return sums.add(carry, z_t)


def _no_weights(params: Params) -> Slots:
    del params
    return {}


def feeding(loop: Loop) -> Loop:
    """The loop over the fields that feed back; the summed ones are None."""
    fields = summed_fields(loop.settings.cell)
    return _restricted(loop, [f for f in loop.carry._fields if f not in fields])


def summing(loop: Loop, increments: Slots) -> Loop:
    """The loop over the summed fields, whose inputs are their increments ``[T, ...]``."""
    cell = loop.settings.cell
    settings = loop.settings._replace(cell=SumCell(cell, parent=None))
    sum_loop = _restricted(loop, list(summed_fields(cell)))
    return sum_loop.replace(settings=settings, params={}, xs=increments)


def _restricted(loop: Loop, fields: list[str]) -> Loop:
    """A loop with these fields of the carry alone, and the carry functions that act on them."""
    absent_fields = {field: None for field in loop.carry._fields if field not in fields}
    pairs = [
        (fn, noise)
        for fn, noise in zip(loop.carry_fns, loop.stream.noise, strict=True)
        if fn.field in fields
    ]
    carry_fns: tuple[CarryFn, ...] = tuple(fn for fn, _ in pairs)
    return loop.replace(
        carry=loop.carry._replace(**absent_fields),
        reset_carry=loop.reset_carry._replace(**absent_fields),
        carry_fns=carry_fns,
        stream=loop.stream._replace(noise=tuple(noise for _, noise in pairs)),
    )


def joined(cell: Cell, looped: Carry, sums: Carry) -> Carry:
    """A carry from its two parts."""
    return looped._replace(**{field: getattr(sums, field) for field in summed_fields(cell)})


def increment_inputs(feeding: Loop, looped: Carry) -> Carry:
    """What each step's increments read: the looped carry before it, ``[T, ...]``.

    Args:
      feeding: the loop over the fields that feed back.
      looped: these fields at all steps.
    """

    def step_inputs(prev: Carry, stream_t: Stream) -> Carry:
        prev = select(stream_t.resets, feeding.reset_carry, prev)
        return apply_before(feeding.carry_fns, stream_t.noise, prev)

    previous = shifted(feeding.carry, looped, feeding.settings.reverse)
    return jax.vmap(step_inputs)(previous, feeding.stream)


def unnamed_field(loop: Loop) -> str | None:
    """Why a loop cannot be taken apart, in one sentence; None if it can."""
    if summed_fields(loop.settings.cell) and any(
        not isinstance(fn.field, str) for fn in loop.carry_fns
    ):
        return "a carry function must name its field where fields accumulate."
    return None
