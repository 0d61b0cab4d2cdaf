"""Recurrent products apart from their step: kept on the way forward, known on the way back.

What the hand-written backward passes share. Going forward a step hands out each of its
pre-activations. Going back it is replayed from them without computing a product again, and the
weights' gradients are formed after the loop, one product over all steps.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from recurrent_gates.backends.accumulation import CarryFns
from recurrent_gates.backends.rows import as_transpose, flat, on_one_cpu
from recurrent_gates.base import (
    Carry,
    Cell,
    Params,
    SlotCell,
    Slots,
    matrix_product,
    pre_activations,
    with_recurrent_bias,
)
from recurrent_gates.carry import Detach, apply_before, get_field
from recurrent_gates.gato import GATO
from recurrent_gates.scan import Stream, advance, select


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


class Merged(NamedTuple):
    """Recurrent weights of slots that read one vector, as one matrix.

    Attributes:
      slots: the widths of the slots, in the order of the columns.
      weights: ``[F, sum of widths]``.
    """

    slots: dict[str, int]
    weights: jax.Array


def merges() -> bool:
    """Whether products of one vector had better be one.

    On a GPU each is a program of its own, which takes microseconds to start. On a CPU the pieces
    of a wide array cost more than they save.
    """
    return jax.default_backend() == "gpu"


def merged_products(
    cell: Cell, weights: Params, carry: Carry, z: Slots, dtype: Any
) -> tuple[Merged, ...]:
    """The products of a step that can be one, where one large product beats several small ones.

    Args:
      cell: the cell.
      weights: of the recurrent products.
      carry: the carry, leaves ``[*batch, F]``.
      z: projections by slot, ``[T, *batch, width]``, those of ``separate`` at least.
      dtype: of the products.
    """
    if not merges() or type(cell).product is not SlotCell.product:
        return ()
    z_t = {slot: jax.ShapeDtypeStruct(value.shape[1:], value.dtype) for slot, value in z.items()}
    read: list[tuple[str, jax.Array]] = []

    def update(carry: Carry, z_t: Slots) -> Carry:
        def product(slot: str, x: jax.Array) -> jax.Array:
            read.append((slot, x))
            return cell.product(weights, slot, x, dtype)

        return cell.update(carry, z_t, product)

    jax.eval_shape(update, carry, z_t)
    kernels = weights["recurrent_kernel"]
    groups: dict[int, list[str]] = {}
    for slot, x in read:
        groups.setdefault(id(x), []).append(slot)
    return tuple(
        Merged(
            {slot: kernels[slot].shape[1] for slot in slots},
            jnp.concatenate([kernels[slot].astype(dtype) for slot in slots], axis=1),
        )
        for slots in groups.values()
        if len(slots) > 1
    )


def step_product(
    cell: Cell, weights: Params, merged: Sequence[Merged]
) -> Callable[[str, jax.Array, Any], jax.Array]:
    """``cell.product`` of these weights for one step: (slot, x, dtype) -> U x."""
    done: dict[str, jax.Array] = {}

    def product(slot: str, x: jax.Array, dtype: Any) -> jax.Array:
        group = next((group for group in merged if slot in group.slots), None)
        if group is None:
            return cell.product(weights, slot, x, dtype)
        if slot not in done:
            out = matrix_product(x, group.weights, dtype)
            widths = list(itertools.accumulate(group.slots.values()))[:-1]
            done.update(zip(group.slots, jnp.split(out, widths, axis=-1), strict=True))
        return with_recurrent_bias(weights, slot, done[slot], cell.separate)

    return product


def recorded_step(
    cell: Cell,
    product: Callable[[str, jax.Array, Any], jax.Array],
    z_t: Slots,
    carry: Carry,
    fresh: Carry,
    carry_fns: CarryFns,
    stream_t: Stream,
) -> tuple[Carry, Slots]:
    """One step: the next carry, and the pre-activations that it used by slot.

    Args:
      cell: the cell.
      product: (slot, x, dtype) -> U x, as ``cell.product`` of its weights.
      z_t, carry, fresh, carry_fns, stream_t: as the driver has them at one time.

    Raises:
      TypeError: if ``update`` asks for one slot twice.
    """
    pre: dict[str, jax.Array] = {}
    added = pre_activations(product, z_t, cell.separate)

    def recorded(slot: str, x: jax.Array) -> jax.Array:
        if slot in pre:
            raise TypeError(f"{type(cell).__name__}.update uses the product {slot!r} twice.")
        pre[slot] = added(slot, x)
        return pre[slot]

    carry = advance(lambda c: cell.update(c, z_t, recorded), carry, fresh, carry_fns, stream_t)
    return carry, pre


def step_gradients(
    cell: Cell,
    weights: Params,
    product: Callable[[str, jax.Array, Any], jax.Array],
    dtype: Any,
    prev: Carry,
    fresh: Carry,
    pre_t: Slots,
    apart_t: Slots,
    carry_fns: CarryFns,
    stream_t: Stream,
    d_new: Carry,
    *,
    skip: bool,
) -> tuple[Carry, Carry, Slots, Slots]:
    """The cotangents of what a step read, from that of the carry that it made.

    The step is replayed from its pre-activations; of the recurrent products only the derivative
    is computed.

    Args:
      cell: the cell.
      weights: of the recurrent products.
      product: (slot, x, dtype) -> U x, of the same weights.
      dtype: of the products.
      prev, fresh, carry_fns, stream_t: as the driver had them.
      pre_t, apart_t: the pre-activations by slot, and the projections that were read apart.
      d_new: cotangent of the next carry.
      skip: whether to leave out even that at run time, where the whole batch is detached from
        what the products read.

    Returns:
      Cotangents of (prev, fresh, pre_t, apart_t).
    """
    direct: dict[str, int] = {}  # slot -> the leaf of the carry that its product reads

    def update(read: Carry, pre_t: Slots, apart_t: Slots) -> Carry:
        def replayed(slot: str, x: jax.Array) -> jax.Array:
            for index, leaf in enumerate(jax.tree.leaves(read)):
                if leaf is x:
                    direct[slot] = index
                    return pre_t[slot]
            return known(cell, dtype, weights, pre_t[slot], slot, x)

        return cell.update(read, apart_t, replayed)

    def step(prev: Carry, fresh: Carry, pre_t: Slots, apart_t: Slots) -> Carry:
        return advance(lambda read: update(read, pre_t, apart_t), prev, fresh, carry_fns, stream_t)

    _, pullback = jax.vjp(step, prev, fresh, pre_t, apart_t)
    d_prev, d_fresh, d_pre, d_apart = pullback(d_new)
    if not direct:
        return d_prev, d_fresh, d_pre, d_apart

    # What the products read from the carry itself, all of them at once.
    def read_by_products(prev: Carry, fresh: Carry) -> list[jax.Array]:
        carry = select(stream_t.resets, fresh, prev)
        return jax.tree.leaves(apply_before(carry_fns, stream_t.noise, carry))

    def d_products(d_pre: Slots) -> list[jax.Array]:
        def products(read: list[jax.Array]) -> Slots:
            return {slot: product(slot, read[index], dtype) for slot, index in direct.items()}

        _, pullback = jax.vjp(products, jax.tree.leaves(prev))
        return pullback({slot: d_pre[slot] for slot in direct})[0]

    matrices = any(leaf.ndim > 1 and leaf.shape[0] > 1 for leaf in jax.tree.leaves(weights))
    none_due = detached(carry_fns, stream_t, prev, set(direct.values())) if skip else None
    if none_due is None or not matrices:
        d_read = d_products(d_pre)
    else:  # h-detach: no gradient passes
        d_read = jax.lax.cond(
            none_due,
            lambda _: [jnp.zeros_like(a) for a in jax.tree.leaves(prev)],
            d_products,
            d_pre,
        )
    _, pullback = jax.vjp(read_by_products, prev, fresh)
    d_prev_read, d_fresh_read = pullback(d_read)
    return add(d_prev, d_prev_read), add(d_fresh, d_fresh_read), d_pre, d_apart


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
