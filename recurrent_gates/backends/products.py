"""Recurrent products apart from their step: kept on the way forward, known on the way back.

What the hand-written backward passes share. Going forward a step hands out each of its
pre-activations. Going back it is replayed from them without computing a product again, and the
weights' gradients are formed after the loop, one product over all steps.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from recurrent_gates.backends.accumulation import CarryFns
from recurrent_gates.backends.rows import as_transpose, flat, on_one_cpu
from recurrent_gates.base import Carry, Cell, Params, SlotCell, Slots, pre_activations
from recurrent_gates.carry import Detach, get_field
from recurrent_gates.gato import GATO
from recurrent_gates.scan import Stream, advance


class Residuals(NamedTuple):
    """What a forward loop keeps for its backward loop.

    Attributes:
      weights: of the recurrent products, ``cell.recurrent_weights``.
      carry, fresh, carry_fns, stream: the loop's inputs.
      carries: the carries of all steps.
      pre: the pre-activations of all steps, by slot.
      apart: of the projections only the slots that ``update`` reads by themselves; the others
        are inside ``pre``.
      dtypes: a scalar of each projection's dtype, by slot.
    """

    weights: Params
    carry: Carry
    fresh: Carry
    carry_fns: CarryFns
    stream: Stream
    carries: Carry
    pre: Slots
    apart: Slots
    dtypes: Slots

    @property
    def dtype(self) -> Any:
        """The dtype of the products."""
        return next(iter(self.dtypes.values())).dtype


def residuals(
    cell: Cell,
    weights: Params,
    z: Slots,
    carry: Carry,
    fresh: Carry,
    carry_fns: CarryFns,
    stream: Stream,
    carries: Carry,
    pre: Slots,
) -> Residuals:
    """``Residuals`` of a loop over the projections z, ``[T, B, width]`` by slot."""
    apart = {slot: z[slot] for slot in cell.separate}
    dtypes = {slot: jnp.zeros((), value.dtype) for slot, value in z.items()}
    return Residuals(weights, carry, fresh, carry_fns, stream, carries, pre, apart, dtypes)


def recorded_step(
    cell: Cell,
    weights: Params,
    z_t: Slots,
    carry: Carry,
    fresh: Carry,
    carry_fns: CarryFns,
    stream_t: Stream,
) -> tuple[Carry, Slots]:
    """One step: the next carry, and the pre-activations that it used by slot.

    Raises:
      TypeError: if ``update`` asks for one slot twice.
    """
    pre: dict[str, jax.Array] = {}
    added = pre_activations(functools.partial(cell.product, weights), z_t, cell.separate)

    def product(slot: str, x: jax.Array) -> jax.Array:
        if slot in pre:
            raise TypeError(f"{type(cell).__name__}.update uses the product {slot!r} twice.")
        pre[slot] = added(slot, x)
        return pre[slot]

    carry = advance(lambda c: cell.update(c, z_t, product), carry, fresh, carry_fns, stream_t)
    return carry, pre


def gradients(
    cell: Cell, kept: Residuals, before: Carry, d_pre: Slots, d_apart: Slots
) -> tuple[Params, Slots]:
    """The cotangents of weights and projections from those of the pre-activations.

    Args:
      cell: the cell.
      kept: what the forward loop kept.
      before: the carry before each step, ``[T, ...]``.
      d_pre, d_apart: cotangents of ``kept.pre`` and ``kept.apart``.
    """

    def inputs_of(prev: Carry, pre_t: Slots, apart_t: Slots, stream_t: Stream) -> Slots:
        read: dict[str, jax.Array] = {}

        def product(slot: str, x: jax.Array) -> jax.Array:
            read[slot] = x
            return pre_t[slot]

        def update(carry: Carry) -> Carry:
            return cell.update(carry, apart_t, product)

        advance(update, prev, kept.fresh, kept.carry_fns, stream_t)
        return read

    # The products of all steps at once, on the vectors that they read.
    read = jax.vmap(inputs_of)(before, kept.pre, kept.apart, kept.stream)

    if on_one_cpu() and type(cell).product in (SlotCell.product, GATO.product):
        # One of our own products, of the last axis alone: of all rows at once.
        flat_rows = {id(x): flat(x, x.ndim - 1) for x in read.values()}  # slots may read one vector
        if any(leaf.ndim > 1 for leaf in jax.tree.leaves(kept.weights)):
            flat_rows = {name: as_transpose(x) for name, x in flat_rows.items()}
        read = {slot: flat_rows[id(x)] for slot, x in read.items()}
        d_pre_rows = {slot: flat(d, d.ndim - 1) for slot, d in d_pre.items()}
    else:
        d_pre_rows = dict(d_pre)

    def products(weights: Params) -> Slots:
        return {slot: cell.product(weights, slot, x, kept.dtype) for slot, x in read.items()}

    _, pullback = jax.vjp(products, kept.weights)
    (d_weights,) = pullback(d_pre_rows)
    d_z = {}
    for slot, like in kept.dtypes.items():
        d_z[slot] = d_apart[slot] if slot in d_apart else d_pre[slot].astype(like.dtype)
    return d_weights, d_z


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 4))
def known(
    cell: Cell, dtype: Any, weights: Params, value: jax.Array, slot: str, x: jax.Array
) -> jax.Array:
    """A recurrent product of x whose value is known; only its derivative is computed."""
    del cell, dtype, weights, slot, x
    return value


def _known_forward(
    cell: Cell, dtype: Any, weights: Params, value: jax.Array, slot: str, x: jax.Array
) -> tuple[jax.Array, Any]:
    del cell, dtype, slot
    return value, (weights, x)


def _known_backward(cell: Cell, dtype: Any, slot: str, kept: Any, d_out: jax.Array) -> tuple:
    weights, x = kept
    _, pullback = jax.vjp(lambda x: cell.product(weights, slot, x, dtype), x)
    return None, d_out, *pullback(d_out)


known.defvjp(_known_forward, _known_backward)


def detached(
    carry_fns: CarryFns, stream_t: Stream, carry: Carry, leaves: set[int]
) -> jax.Array | None:
    """Whether all these leaves are detached for the whole batch; None if that cannot be."""
    numbered = jax.tree.unflatten(jax.tree.structure(carry), range(len(jax.tree.leaves(carry))))
    masks: dict[int, jax.Array] = {}
    for fn, noise_t in zip(carry_fns, stream_t.noise, strict=True):
        if isinstance(fn, Detach) and noise_t is not None and noise_t.ndim == 0:
            leaf: Any = get_field(numbered, fn.field)
            mask = noise_t.astype(bool)
            masks[leaf] = masks[leaf] | mask if leaf in masks else mask
    if not leaves <= set(masks):
        return None
    return functools.reduce(jnp.logical_and, [masks[leaf] for leaf in sorted(leaves)])


def add(a: Carry, b: Carry) -> Carry:
    """The sum of two carries."""
    return jax.tree.map(jnp.add, a, b)
