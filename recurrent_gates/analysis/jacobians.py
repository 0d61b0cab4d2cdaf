"""Jacobians of steps and of whole runs, and the norms of gradients along their paths."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from recurrent_gates import checks
from recurrent_gates.analysis.products import joined, log10_norm, scaled_products
from recurrent_gates.analysis.trajectories import Field, carry_dtype, field_names, trajectory
from recurrent_gates.base import Carry, Cell, Params
from recurrent_gates.carry import CarryFn, Detach, Noise, get_field, set_field
from recurrent_gates.scan import Stream, advance

ALL = "all fields"
"""All fields side by side, where a field is asked for."""


@struct.dataclass
class Jacobian:
    """Derivatives of one carry by another: rows are the later carry, columns the earlier.

    Attributes:
      matrix: ``[..., N, N]``.
      widths: fields and their widths, in the order in which they lie in the matrix.
    """

    matrix: jax.Array
    widths: tuple[tuple[Field, int], ...] = struct.field(pytree_node=False)

    def where(self, field: Field) -> slice:
        """Where a field, or ``ALL``, lies in the matrix."""
        if field == ALL:
            return slice(None)
        start = 0
        for name, width in self.widths:
            if name == field:
                return slice(start, start + width)
            start += width
        raise ValueError(f"There is no field {field!r}; there are {self.fields}.")

    @property
    def fields(self) -> tuple[Field, ...]:
        """The names of the carry's floating fields, in order."""
        return tuple(name for name, _ in self.widths)

    def block(self, of: Field, wrt: Field) -> jax.Array:
        """d of / d wrt, ``[..., width of one, width of the other]``; either may be ``ALL``."""
        return self.matrix[..., self.where(of), self.where(wrt)]

    def without(self, field: Field) -> Jacobian:
        """The same with no gradient through a field of the earlier carry: its columns are zero.

        Of single steps this is what ``Detach(1.0, field)`` leaves.
        """
        return Jacobian(self.matrix.at[..., self.where(field)].set(0), self.widths)


def _flatten(carry: Carry, names: Sequence[Field], batch_dims: int) -> jax.Array:
    """``[*batch, N]``: the fields side by side, a memory's axes as one."""
    dtype = carry_dtype(carry)
    values = [get_field(carry, name).astype(dtype) for name in names]
    flat = [value.reshape(*value.shape[:batch_dims], -1) for value in values]
    return jnp.concatenate(flat, axis=-1)


def _insert(carry: Carry, flat: jax.Array, widths: Sequence[tuple[Field, int]]) -> Carry:
    start = 0
    for name, width in widths:
        old = get_field(carry, name)
        value = flat[..., start : start + width].astype(old.dtype)
        carry = set_field(carry, name, value.reshape(old.shape))
        start += width
    return carry


@functools.partial(jax.jit, static_argnames=("cell", "blocked"))
def step_jacobians(
    cell: Cell,
    params: Params,
    xs: jax.Array,
    carry: Carry | None = None,
    *,
    blocked: tuple[Field, ...] = (),
    carry_fns: Sequence[CarryFn] = (),
    noise: Sequence[Noise] | None = None,
) -> Jacobian:
    """d carry_t / d carry_{t-1} at every step of a run.

    Args:
      cell: an unbound cell.
      params: its parameters.
      xs: inputs ``[T, *batch, D]``.
      carry: the carry before the first step; default ``cell.initial(batch)``.
      blocked: fields through which the step passes no gradient: ``("h",)`` leaves an LSTM
        h-detach's A_t, ``("c",)`` its B_t (Theorem 1).
      carry_fns: what else happens to the carry around each step.
      noise: their draws; None draws nothing.

    Returns:
      Matrices ``[T, *batch, N, N]`` in the carry's dtype; of a field with several feature axes,
      a memory, N counts all of its numbers, in C order.

    Raises:
      TypeError: if ``cell`` is not a ``Cell``.
      ValueError: if the carry is not one of the cell's for this batch, or has no field of those
        that are blocked.
    """
    carry_fns = tuple(carry_fns)
    noise = (None,) * len(carry_fns) if noise is None else tuple(noise)
    run = trajectory(cell, params, xs, carry, carry_fns=carry_fns, noise=noise)
    cell, carry_fns, noise = cell._around(carry_fns, noise)
    steps = xs.shape[0]
    carry_fns += tuple(Detach(1.0, field) for field in blocked)
    noise += (jnp.ones((steps,), bool),) * len(blocked)
    names, batch_dims = field_names(run.after), xs.ndim - 2
    widths = tuple(
        (name, math.prod(get_field(run.after, name).shape[1 + batch_dims :])) for name in names
    )

    def one_step(moment: tuple[Carry, Any, Any]) -> jax.Array:
        previous, z_t, noise_t = moment

        def next_carry(flat: jax.Array) -> jax.Array:
            start = _insert(previous, flat, widths)
            new = advance(
                lambda c: cell.step(params, c, z_t),
                start,
                start,
                carry_fns,
                Stream(None, None, noise_t),
            )
            return _flatten(new, names, batch_dims)

        flat = _flatten(previous, names, batch_dims)

        def column(unit: jax.Array) -> jax.Array:  # one unit of every example at once
            return jax.jvp(next_carry, (flat,), (jnp.broadcast_to(unit, flat.shape),))[1]

        basis = jnp.eye(flat.shape[-1], dtype=flat.dtype)
        basis = basis.reshape(-1, *(1,) * (flat.ndim - 1), flat.shape[-1])
        return jax.vmap(column, out_axes=-1)(basis)

    return Jacobian(jax.lax.map(one_step, (run.before, run.z, noise)), widths)


@jax.jit
def state_jacobians(steps: Jacobian) -> Jacobian:
    """d carry_T / d carry_{T-g} for every gap g from the end of the run (GATO, eq. 3).

    Args:
      steps: Jacobians of single steps, ``[T, ..., N, N]``.

    Returns:
      Products ``[T + 1, ..., N, N]``; entry g is over the last g steps, entry 0 the identity.
    """
    products = scaled_products(steps.matrix, [width for _, width in steps.widths])
    rows = [
        jnp.concatenate(
            [jnp.ldexp(block.matrix, block.exponent[..., None, None]) for block in row], axis=-1
        )
        for row in products
    ]
    return Jacobian(jnp.concatenate(rows, axis=-2), steps.widths)


def _places(steps: Jacobian, field: Field) -> range:
    """Which of the fields a field, or ``ALL``, is."""
    if field == ALL:
        return range(len(steps.widths))
    steps.where(field)  # an unknown field is an error
    place = steps.fields.index(field)
    return range(place, place + 1)


@functools.partial(jax.jit, static_argnames=("of", "wrt"))
def gap_norms(steps: Jacobian, *, of: Field = ALL, wrt: Field = ALL) -> jax.Array:
    """log10 of the spectral norm of d of_T / d wrt_{T-g}, against the gap g.

    Args:
      steps: Jacobians of single steps, ``[T, ..., N, N]``.
      of: a field of the later carry.
      wrt: a field of the earlier carry.

    Returns:
      ``[T + 1, ...]``; entry g is over the last g steps. However small a block is beside the
      others, its norm is to the dtype's precision.

    Raises:
      ValueError: if there is no such field.

    Example:
      >>> gru, xs = rg.GRU(4), jnp.ones((10, 3))
      >>> params = gru.init_params(jax.random.key(0), 3)
      >>> steps = rg.analysis.step_jacobians(gru, params, xs)
      >>> norms = rg.analysis.gap_norms(steps)
      >>> norms.shape, float(norms[0])
      ((11,), 0.0)
    """
    products = scaled_products(steps.matrix, [width for _, width in steps.widths])
    rows, columns = _places(steps, of), _places(steps, wrt)
    return log10_norm(joined([[products[i][j] for j in columns] for i in rows]))


def gradient_paths(
    cell: Cell,
    params: Params,
    xs: jax.Array,
    carry: Carry | None = None,
    *,
    of: Field = ALL,
    wrt: Field = ALL,
) -> dict[tuple[Field, ...], jax.Array]:
    """Norms of d carry_T / d carry_{T-g} against the gap g, with all paths and without each.

    For an LSTM the entry without h is the norm of h-detach's product of A_t, the path through
    the cell state; the one without c is that of the B_t.

    Args:
      cell: an unbound cell.
      params: its parameters.
      xs: inputs ``[T, *batch, D]``.
      carry: the carry before the first step; default ``cell.initial(batch)``.
      of: a field of the later carry.
      wrt: a field of the earlier carry.

    Returns:
      ``{blocked fields: log10 norms [T + 1, *batch]}``; the key ``()`` is all paths.

    Raises:
      TypeError: if ``cell`` is not a ``Cell``.
      ValueError: if the carry is not one of the cell's for this batch, or there is no such field.
    """
    checks.cell("gradient_paths", cell, Cell)
    names = field_names(jax.eval_shape(lambda: cell.initial(xs.shape[1:-1])))
    return {
        blocked: gap_norms(step_jacobians(cell, params, xs, carry, blocked=blocked), of=of, wrt=wrt)
        for blocked in ((), *((name,) for name in names))
    }
