"""A recurrence and its hand-written backward pass, the fused backend's, as two kernels."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from recurrent_gates.backends.accumulation import CarryFns, shifted
from recurrent_gates.backends.pallas_loop import time_loop
from recurrent_gates.backends.products import (
    Residuals,
    add,
    gradients,
    recorded_step,
    residuals,
    step_gradients,
)
from recurrent_gates.base import Carry, Cell, Params, SlotCell, Slots
from recurrent_gates.scan import Settings, Stream


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def recurrence(
    settings: Settings,
    elementwise: bool,
    weights: Params,
    z: Slots,
    carry: Carry,
    fresh: Carry,
    carry_fns: CarryFns,
    stream: Stream,
) -> tuple[Carry, Carry]:
    """The last carry and the carries of all steps.

    Args:
      settings: the cell, and which way time runs.
      elementwise: whether the units are independent and alike, carry functions included.
      weights: of the recurrent products, ``cell.recurrent_weights``; ``[F, width]``, or
        ``[width]`` where units do not interact.
      z: projections by slot, ``[T, B, width]``.
      carry, fresh: leaves ``[B, F]``.
      carry_fns, stream: as the driver has them; masks ``[T]``, ``[T, B, 1]`` or ``[T, B, F]``.
    """
    (last, carries), _ = _forward(
        settings, elementwise, weights, z, carry, fresh, carry_fns, stream
    )
    return last, carries


def _forward(
    settings: Settings,
    elementwise: bool,
    weights: Params,
    z: Slots,
    carry: Carry,
    fresh: Carry,
    carry_fns: CarryFns,
    stream: Stream,
) -> tuple[tuple[Carry, Carry], Any]:
    cell = settings.cell
    dtype = next(iter(z.values())).dtype

    def body(shared: Any, fresh: Carry, c: Carry, inputs: Any) -> tuple[Carry, Any]:
        weights, carry_fns = shared
        z_t, stream_t = inputs
        product = functools.partial(cell.product, weights)
        c, pre = recorded_step(cell, product, z_t, c, fresh, carry_fns, stream_t)
        return c, (c, pre)

    shared = (resident(cell, weights, dtype), carry_fns)
    rows = None if stream.resets is None else fresh
    how: Any = dict(reverse=settings.reverse, elementwise=elementwise)
    last, (carries, pre) = time_loop(body, shared, rows, carry, (z, stream), **how)
    inputs = (weights, z, carry, fresh, carry_fns, stream)
    return (last, carries), residuals(cell, *inputs, carries, pre)


def _backward(
    settings: Settings, elementwise: bool, saved: Residuals, cotangents: tuple[Carry, Carry]
) -> tuple:
    weights, carry, fresh, carry_fns, stream, carries, pre, apart, _ = saved
    cell, dtype, reverse = settings.cell, saved.dtype, settings.reverse
    d_last, d_carries = cotangents
    before = shifted(carry, carries, reverse)

    def body(shared: Any, fresh: Carry, state: Any, inputs: Any) -> tuple[Any, Any]:
        weights, carry_fns = shared
        d_carry, d_fresh = state
        prev, pre_t, apart_t, stream_t, d_here = inputs
        d_prev, d_fresh_t, d_pre, d_apart = step_gradients(
            cell,
            weights,
            functools.partial(cell.product, weights),
            dtype,
            prev,
            fresh,
            pre_t,
            apart_t,
            carry_fns,
            stream_t,
            add(d_carry, d_here),
            skip=True,
        )
        if d_fresh is not None:
            d_fresh = add(d_fresh, d_fresh_t)
        return (d_prev, d_fresh), (d_pre, d_apart)

    zeros = jax.tree.map(jnp.zeros_like, fresh)
    rows, d_rows = (None, None) if stream.resets is None else (fresh, zeros)
    (d_carry, d_rows), (d_pre, d_apart) = time_loop(
        body,
        (resident(cell, weights, dtype), carry_fns),
        rows,
        (d_last, d_rows),
        (before, pre, apart, stream, d_carries),
        reverse=not reverse,
        elementwise=elementwise,
    )
    d_fresh = zeros if d_rows is None else d_rows

    d_weights, d_z = gradients(cell, saved, before, d_pre, d_apart)
    return d_weights, d_z, d_carry, d_fresh, None, None


recurrence.defvjp(_forward, _backward)


def resident(cell: Cell, weights: Params, dtype: Any) -> Params:
    """The recurrent weights as a kernel holds them: matrices, in the dtype of the products."""

    def matrix(w: jax.Array) -> jax.Array:
        if w.ndim == 1:
            return w[None]
        return w.astype(dtype) if isinstance(cell, SlotCell) else w

    return jax.tree.map(matrix, weights)
