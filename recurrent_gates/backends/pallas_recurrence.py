"""A recurrence and its hand-written backward pass, the fused backend's, as two kernels."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from recurrent_gates.backends import fused
from recurrent_gates.backends.accumulation import shifted
from recurrent_gates.backends.pallas_loop import time_loop
from recurrent_gates.base import Carry, Cell, Params, SlotCell, Slots, pre_activations
from recurrent_gates.carry import CarryFn
from recurrent_gates.scan import Settings, Stream, advance

CarryFns = tuple[CarryFn, ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def recurrence(
    settings: Settings,
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
      weights: of the recurrent products, ``cell.recurrent_weights``; ``[F, width]``, or
        ``[width]`` where units do not interact.
      z: projections by slot, ``[T, B, width]``.
      carry, fresh: leaves ``[B, F]``.
      carry_fns, stream: as the driver has them; masks ``[T]``, ``[T, B, 1]`` or ``[T, B, F]``.
    """
    (last, carries), _ = _forward(settings, weights, z, carry, fresh, carry_fns, stream)
    return last, carries


def _forward(
    settings: Settings,
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
        pre: dict[str, jax.Array] = {}
        whole = pre_activations(functools.partial(cell.product, weights), z_t, cell.separate)

        def product(slot: str, x: jax.Array) -> jax.Array:
            pre[slot] = whole(slot, x)
            return pre[slot]

        c = advance(lambda c: cell.update(c, z_t, product), c, fresh, carry_fns, stream_t)
        return c, (c, pre)

    shared = (resident(cell, weights, dtype), carry_fns)
    rows = None if stream.resets is None else fresh
    last, (carries, pre) = time_loop(
        body, shared, rows, carry, (z, stream), reverse=settings.reverse
    )
    apart = {slot: z[slot] for slot in cell.separate}
    dtypes = {slot: jnp.zeros((), value.dtype) for slot, value in z.items()}
    kept = (weights, carry, fresh, carry_fns, stream, carries, pre, apart, dtypes)
    return (last, carries), kept


def _backward(settings: Settings, kept: Any, cotangents: tuple[Carry, Carry]) -> tuple:
    weights, carry, fresh, carry_fns, stream, carries, pre, apart, dtypes = kept
    cell, reverse = settings.cell, settings.reverse
    dtype = next(iter(dtypes.values())).dtype
    d_last, d_carries = cotangents
    before = shifted(carry, carries, reverse)

    def body(shared: Any, fresh: Carry, state: Any, inputs: Any) -> tuple[Any, Any]:
        weights, carry_fns = shared
        d_carry, d_fresh = state
        prev, pre_t, apart_t, stream_t, d_here = inputs
        direct = _read_directly(cell, prev, pre_t, apart_t)

        def pull(d_new: Carry, *, products: bool) -> tuple:
            def step(prev: Carry, fresh: Carry, pre_t: Slots, apart_t: Slots) -> Carry:
                def update(read: Carry) -> Carry:
                    leaves = jax.tree.leaves(read)

                    def product(slot: str, x: jax.Array) -> jax.Array:
                        if not products and any(leaf is x for leaf in leaves):
                            return pre_t[slot]
                        return fused._known(cell, dtype, weights, pre_t[slot], slot, x)

                    return cell.update(read, apart_t, product)

                return advance(update, prev, fresh, carry_fns, stream_t)

            _, pullback = jax.vjp(step, prev, fresh, pre_t, apart_t)
            return pullback(d_new)

        skip = fused._detached(carry_fns, stream_t, prev, direct) if direct else None
        pull_all = functools.partial(pull, products=True)
        d_new = fused._add(d_carry, d_here)
        if skip is None:
            pulled = pull_all(d_new)
        else:  # h-detach: no gradient passes these products, so they are not due
            pulled = jax.lax.cond(skip, functools.partial(pull, products=False), pull_all, d_new)
        d_prev, d_fresh_t, d_pre, d_apart = pulled
        if d_fresh is not None:
            d_fresh = fused._add(d_fresh, d_fresh_t)
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
    )
    d_fresh = zeros if d_rows is None else d_rows

    # d weights: the products of all steps at once, on the vectors that they read.
    def inputs_of(prev: Carry, pre_t: Slots, apart_t: Slots, stream_t: Stream) -> Slots:
        read: dict[str, jax.Array] = {}

        def product(slot: str, x: jax.Array) -> jax.Array:
            read[slot] = x
            return pre_t[slot]

        advance(lambda c: cell.update(c, apart_t, product), prev, fresh, carry_fns, stream_t)
        return read

    read = jax.vmap(inputs_of)(before, pre, apart, stream)

    def products(weights: Params) -> Slots:
        return {slot: cell.product(weights, slot, x, dtype) for slot, x in read.items()}

    _, pullback = jax.vjp(products, weights)
    (d_weights,) = pullback(d_pre)

    d_z = {}
    for slot, like in dtypes.items():
        d_z[slot] = d_apart[slot] if slot in d_apart else d_pre[slot].astype(like.dtype)
    return d_weights, d_z, d_carry, d_fresh, None, None


recurrence.defvjp(_forward, _backward)


def resident(cell: Cell, weights: Params, dtype: Any) -> Params:
    """The recurrent weights as a kernel holds them: matrices, in the dtype of the products."""

    def matrix(w: jax.Array) -> jax.Array:
        if w.ndim == 1:
            return w[None]
        return w.astype(dtype) if isinstance(cell, SlotCell) else w

    return jax.tree.map(matrix, weights)


def _read_directly(cell: Cell, carry: Carry, pre_t: Slots, apart_t: Slots) -> set[int]:
    """The leaves of the carry that recurrent products read as they are."""
    found: set[int] = set()

    def update(read: Carry) -> Carry:
        def product(slot: str, x: jax.Array) -> jax.Array:
            found.update(i for i, leaf in enumerate(jax.tree.leaves(read)) if leaf is x)
            return pre_t[slot]

        return cell.update(read, apart_t, product)

    jax.eval_shape(update, carry)
    return found
