"""Runs that keep every carry, and the fields of a carry by name."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from recurrent_gates import checks
from recurrent_gates.base import Carry, Cell, Params
from recurrent_gates.carry import CarryFn, Noise, get_field
from recurrent_gates.scan import unroll, with_zeros

Field = str | int | None
"""A field of a carry as carry functions name it: by name, by index, or None for a bare array."""


class Trajectory(NamedTuple):
    """A run, every leaf with leading axis T.

    Attributes:
      before: the carry that step t reads, carry_{t-1}.
      after: the carry that it makes, carry_t.
      z: what ``cell.project`` made of the inputs.
    """

    before: Carry
    after: Carry
    z: Any


def field_names(carry: Carry) -> tuple[Field, ...]:
    """The floating fields of a carry, in order.

    Args:
      carry: a NamedTuple, a tuple or an array, of arrays or shapes.

    Returns:
      Their names; indices of a plain tuple; ``(None,)`` of a bare array.

    Raises:
      ValueError: if the carry is none of NamedTuple, tuple and array, or a field is no array.
    """
    names: Sequence[Field]
    if hasattr(carry, "shape"):
        names = (None,)
    elif isinstance(carry, tuple):
        names = getattr(carry, "_fields", range(len(carry)))
    else:
        raise ValueError(
            f"A carry must be a NamedTuple, a tuple or an array, got {type(carry).__name__}."
        )
    values = [get_field(carry, name) for name in names]
    if not all(hasattr(value, "dtype") for value in values):
        raise ValueError(f"The fields of a carry must be arrays, got {carry!r}.")
    floating = [jnp.issubdtype(value.dtype, jnp.floating) for value in values]
    return tuple(name for name, is_floating in zip(names, floating, strict=True) if is_floating)


def carry_dtype(carry: Carry) -> Any:
    """The dtype of a carry's floating fields together.

    Args:
      carry: as ``field_names`` takes it.

    Returns:
      The dtype to which they all promote.
    """
    return jnp.result_type(*(get_field(carry, name).dtype for name in field_names(carry)))


@functools.partial(jax.jit, static_argnames="cell")
def trajectory(
    cell: Cell,
    params: Params,
    xs: jax.Array,
    carry: Carry | None = None,
    *,
    valid: jax.Array | None = None,
    carry_fns: Sequence[CarryFn] = (),
    noise: Sequence[Noise] | None = None,
) -> Trajectory:
    """Runs a cell and keeps every carry.

    Args:
      cell: an unbound cell.
      params: its parameters.
      xs: inputs ``[T, *batch, D]``.
      carry: the carry before the first step; default ``cell.initial(batch)``.
      valid: bool ``[T, *batch]``, as ``unroll`` takes it: other steps hold the carry, and their
        inputs count as 0.
      carry_fns: what happens to the carry around each step.
      noise: their draws, as ``unroll`` takes them; None draws nothing.

    Returns:
      Carries before and after each step and projections, leaves ``[T, *batch, ...]``.

    Raises:
      TypeError: if ``cell`` is not a ``Cell``.
      ValueError: if the carry is not one of the cell's for this batch.
    """
    checks.cell("An analysis", cell, Cell)
    start = _start(cell, xs, carry)
    xs = with_zeros(valid, xs)
    after, _ = unroll(
        cell,
        params,
        xs,
        start,
        valid=valid,
        carry_fns=carry_fns,
        noise=noise,
        deterministic=noise is None,
        return_carries="all",
        backend="scan",
    )
    before = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b])[:-1], start, after)
    return Trajectory(before, after, cell.project(params, xs))


def _start(cell: Cell, xs: jax.Array, carry: Carry | None) -> Carry:
    """The carry before the first step."""
    initial = cell.initial(xs.shape[1:-1])
    return initial if carry is None else checks.carry("carry", carry, initial)


def largest_state(
    cell: Cell, params: Params, xs: jax.Array, carry: Carry | None = None
) -> dict[Field, jax.Array]:
    """How far the state goes: the largest magnitude in each field, before and after steps.

    GATO's eq. 2 (``exploding`` in ``CELLS``) may grow without bound once it is above 1, and may
    come back; a GRU that starts within [-1, 1] stays there (GATO, 2.2 and App. E).

    Args:
      cell: an unbound cell.
      params: its parameters.
      xs: inputs ``[T, *batch, D]``.
      carry: the carry before the first step; default ``cell.initial(batch)``.

    Returns:
      ``{field: [T + 1, *batch]}``; entry t is after t steps.

    Raises:
      TypeError: if ``cell`` is not a ``Cell``.
      ValueError: if the carry is not one of the cell's for this batch.
    """
    run, start = trajectory(cell, params, xs, carry), _start(cell, xs, carry)

    def largest(field: jax.Array) -> jax.Array:
        return jnp.max(jnp.abs(field), axis=tuple(range(xs.ndim - 1, field.ndim)))

    return {
        name: jnp.concatenate(
            [largest(get_field(start, name)[None]), largest(get_field(run.after, name))]
        )
        for name in field_names(run.after)
    }
