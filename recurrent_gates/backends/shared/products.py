"""Recurrent products apart from their step: kept on the way forward, known on the way back.

What the hand-written backward passes share. They run a ``product loop``: its params are the
``Weights`` of a cell's declared products, its inputs what the cell's update reads. In words:

- Forward, each step hands out its pre-activations, U x + b + z by slot (``recorded_step``).
- Kept are the carries and the pre-activations of all steps, and of the inputs only those that
  ``update`` reads by themselves (``Residuals``). Inputs of slots are inside the pre-activations.
- Backward, each step is replayed from the carry before it and its pre-activations, without a
  product. Its cotangents come from the update's derivative, and through the products, whose
  derivative is one product with each transposed weight (``step_gradients``).
- After the loop the vectors that all products read are formed again at once, and the weights'
  gradients with one product over all steps (``gradients``).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from recurrent_gates import target
from recurrent_gates.backends.shared.rows import as_transpose, flat, on_one_cpu
from recurrent_gates.base import Cell
from recurrent_gates.carry import apply_before, get_field
from recurrent_gates.declared import (
    Carry,
    Products,
    Slots,
    Weights,
    inputs_dtype,
    is_inexact,
    matrix_product,
    pre_activations,
    product_of,
    recurrent_weights,
    with_bias,
)
from recurrent_gates.scan import Loop, Stream, select

_FEW_FEATURES = {False: 128, True: 48}  # of the products, and of those with the transposes
_SPLIT_ROWS = 64  # the least that XLA shares out well among threads
_ONE_THREAD = 2**22  # multiply-adds that XLA's CPU compiler gives to one thread, about
_LEAST_WORK = _ONE_THREAD // 2  # for which the other threads are worth their call

SlotProduct = Callable[[str, jax.Array, Any], jax.Array]
"""(slot, x, dtype) -> U x + b."""


def declared(cell: Cell) -> Products:
    """The products of a cell that declares some."""
    products = cell.products
    assert products is not None
    return products


def product_loop(loop: Loop, z: Any) -> Loop:
    """A loop over the declared products: params are their weights, inputs what update reads."""
    products = declared(loop.settings.cell)
    return loop.replace(params=recurrent_weights(products, loop.params), xs=products.inputs(z))


class Residuals(NamedTuple):
    """What a product loop keeps for its backward pass.

    Attributes:
      loop: the loop; of its inputs only those that ``update`` reads by themselves.
      carries: the carries of all steps.
      pre: the pre-activations of all steps, by slot.
      dtypes: a scalar of each input's dtype.
    """

    loop: Loop
    carries: Carry
    pre: Slots
    dtypes: Slots

    @property
    def dtype(self) -> Any:
        """The dtype of the products."""
        return inputs_dtype(self.dtypes)


def residuals(loop: Loop, carries: Carry, pre: Slots) -> Residuals:
    """``Residuals`` of a product loop."""
    dtypes = {name: jnp.zeros((), value.dtype) for name, value in loop.xs.items()}
    return Residuals(loop.replace(xs=apart(loop)), carries, pre, dtypes)


def apart(loop: Loop) -> Slots:
    """The inputs of a product loop that are no slots', which ``update`` reads by themselves."""
    slots = {*loop.params.matrices, *loop.params.vectors}
    return {name: value for name, value in loop.xs.items() if name not in slots}


# Forward: products, one by one or merged, and steps that hand out their pre-activations.


class Merged(NamedTuple):
    """Recurrent matrices of slots that read one vector, as one matrix.

    Attributes:
      slots: the widths of the slots in a block, in the order of the columns.
      weights: ``[F, sum of widths]``, or the blocks ``[N, F/N, sum of widths]``.
    """

    slots: dict[str, int]
    weights: jax.Array


def merges(loop: Loop, *, transposes: bool) -> bool:
    """Whether products of one vector had better be one.

    On a GPU each is a program of its own, which takes microseconds to start. On a CPU the pieces
    of a wide array cost more than they save, but for three cases. The products of one row with
    the transposes, on the way back, are up to 7 times as fast when they are one (F = 1024). Few
    features: what a product costs is its call (a gain of up to 1.8 forward, at F = 48, and up to
    1.2 back). And a product that XLA gives one thread by itself is given all of them when it is
    four times as large (a gain of 1.05 to 1.3).

    Args:
      loop: a product loop.
      transposes: whether the products are those with the transposes, on the way back.
    """
    backend = target.platform()
    if backend != "cpu" or loop.symbolic:
        return backend == "gpu"
    rows = math.prod(jax.tree.leaves(loop.carry)[0].shape[:-1])
    largest = max(loop.params.matrices.values(), key=lambda m: m.shape[-2], default=None)
    width = 0 if largest is None else largest.shape[-2]
    if rows == 1 or width <= _FEW_FEATURES[transposes]:
        return True
    assert largest is not None
    work = rows * width**2 * math.prod(largest.shape[:-2])
    return target.device_count() == 1 and rows >= _SPLIT_ROWS and _LEAST_WORK <= work <= _ONE_THREAD


def merged_products(
    loop: Loop, dtype: Any, *, transposes: bool = False, always: bool = False
) -> tuple[Merged, ...]:
    """The products of a step that can be one, where one large product beats several small ones.

    Args:
      loop: a product loop; of its inputs those that ``update`` reads by themselves, at least.
      dtype: of the products.
      transposes: whether they are those with the transposes.
      always: whether they are to be one in any case.
    """
    if not (always or merges(loop, transposes=transposes)):
        return ()
    kernels = loop.params.matrices
    return tuple(
        Merged(
            {slot: kernels[slot].shape[-1] for slot in slots},
            jnp.concatenate([kernels[slot].astype(dtype) for slot in slots], axis=-1),
        )
        for slots in slots_of_one_vector(loop, dtype)
    )


def slots_of_one_vector(loop: Loop, dtype: Any) -> list[list[str]]:
    """The slots whose matrices multiply one vector, where these are two or more.

    Args:
      loop: a product loop; of its inputs those that ``update`` reads by themselves, at least.
      dtype: of the products.
    """
    inputs = {
        name: jax.ShapeDtypeStruct(value.shape[1:], value.dtype) for name, value in loop.xs.items()
    }
    operands: list[tuple[str, jax.Array]] = []

    def update(carry: Carry, inputs: Slots) -> Carry:
        def product(slot: str, x: jax.Array) -> jax.Array:
            operands.append((slot, x))
            return product_of(loop.params, slot, x, dtype)

        return declared(loop.settings.cell).update(carry, inputs, product)

    jax.eval_shape(update, loop.carry, inputs)
    kernels = loop.params.matrices
    groups: dict[Any, list[str]] = {}
    for slot, x in operands:
        if slot in kernels:
            groups.setdefault((id(x), kernels[slot].shape[:-1]), []).append(slot)
    return [slots for slots in groups.values() if len(slots) > 1]


def step_product(weights: Weights, merged: Sequence[Merged] = ()) -> SlotProduct:
    """The products of these weights for one step."""
    cache: dict[str, jax.Array] = {}

    def product(slot: str, x: jax.Array, dtype: Any) -> jax.Array:
        group = next((group for group in merged if slot in group.slots), None)
        if group is None:
            return product_of(weights, slot, x, dtype)
        if slot not in cache:
            out = matrix_product(x, group.weights, dtype)
            heads, batch = group.weights.shape[:-2], x.shape[:-1]
            widths = list(itertools.accumulate(group.slots.values()))
            pieces = jnp.split(out.reshape(*batch, *heads, widths[-1]), widths[:-1], axis=-1)
            for name, piece in zip(group.slots, pieces, strict=True):
                cache[name] = piece.reshape(*batch, math.prod(heads) * piece.shape[-1])
        return with_bias(weights, slot, cache[slot])

    return product


def recorded_step(
    loop: Loop, product: SlotProduct, inputs: Slots, carry: Carry, stream_t: Stream
) -> tuple[Carry, Slots]:
    """One step of a product loop: the next carry, and the pre-activations that it used by slot.

    Args:
      loop: the loop; neither its weights nor its inputs are read.
      product: the products of its weights.
      inputs, carry, stream_t: as the driver has them at one time.

    Raises:
      TypeError: if ``update`` asks for one slot twice.
    """
    cell = loop.settings.cell
    pre: dict[str, jax.Array] = {}
    pre_activation = pre_activations(product, inputs)

    def recorded(slot: str, x: jax.Array) -> jax.Array:
        if slot in pre:
            raise TypeError(f"{type(cell).__name__}.update uses the product {slot!r} twice.")
        pre[slot] = pre_activation(slot, x)
        return pre[slot]

    update = declared(cell).update
    return loop.advance(lambda c: update(c, inputs, recorded), carry, stream_t), pre


# Backward, a step.


class Moment(NamedTuple):
    """A step that is to be replayed.

    Attributes:
      prev: the carry before it.
      pre: its pre-activations by slot.
      apart: the inputs that ``update`` read by themselves.
      stream: the stream at that time.
    """

    prev: Carry
    pre: Slots
    apart: Slots
    stream: Stream


class StepCotangents(NamedTuple):
    """The cotangents of what a step read."""

    prev: Carry
    reset_carry: Carry
    pre: Slots
    apart: Slots


def step_gradients(
    loop: Loop, product: SlotProduct, dtype: Any, moment: Moment, d_new: Carry, *, skip: bool
) -> StepCotangents:
    """The cotangents of what a step read, from that of the carry that it made.

    The step is replayed from its pre-activations. A product of a field of the carry as it is (most
    are) is cut out of the replay: its value is given, and its cotangent is taken on by
    ``_through_products``, for all such slots at once. A product of anything else (r * h in a GRU)
    stays inside, with its value known and only its derivative computed.

    Args:
      loop: a product loop; its inputs are not read.
      product: the products of its weights.
      dtype: of the products.
      moment: the step.
      d_new: cotangent of the next carry.
      skip: whether to leave out the derivative of products at run time, where the whole batch is
        detached from what they read.
    """
    direct: dict[str, int] = {}  # slot -> the leaf of the carry that its product reads

    numbers = {name: x for name, x in moment.apart.items() if is_inexact(x)}

    def read(prev: Carry, reset_carry: Carry) -> Carry:
        carry = select(moment.stream.resets, reset_carry, prev)
        return apply_before(loop.carry_fns, moment.stream.noise, carry)

    def replay(carry: Carry, prev: Carry, reset_carry: Carry, pre: Slots, numbers: Slots) -> Carry:
        apart = {**moment.apart, **numbers}

        def replayed(slot: str, x: jax.Array) -> jax.Array:
            for index, leaf in enumerate(jax.tree.leaves(carry)):
                if leaf is x:
                    direct[slot] = index
                    return pre[slot]
            return known_product(dtype, loop.params, pre[slot], slot, x)

        def update(_: Carry) -> Carry:  # of what is read, from which the gradient goes on below
            return declared(loop.settings.cell).update(carry, apart, replayed)

        return loop.replace(reset_carry=reset_carry).advance(update, prev, moment.stream)

    carry, read_pullback = jax.vjp(read, moment.prev, loop.reset_carry)
    _, pullback = jax.vjp(replay, carry, moment.prev, loop.reset_carry, moment.pre, numbers)
    d_carry, *rest = pullback(d_new)
    d = StepCotangents(*rest)
    if direct:
        d_read = _through_products(loop, product, dtype, moment, direct, d.pre, skip=skip)
        d_carry = add(d_carry, jax.tree.unflatten(jax.tree.structure(d_carry), d_read))
    # Once, with all that has been read: a carry function's gradient need not be linear.
    d_prev, d_reset = read_pullback(d_carry)
    return d._replace(prev=add(d.prev, d_prev), reset_carry=add(d.reset_carry, d_reset))


def _through_products(
    loop: Loop,
    product: SlotProduct,
    dtype: Any,
    moment: Moment,
    direct: dict[str, int],
    d_pre: Slots,
    *,
    skip: bool,
) -> list[jax.Array]:
    """The cotangents of the leaves of the carry that products read, from those of the products."""

    def derivative(d_pre: Slots) -> list[jax.Array]:
        def products(leaves: list[jax.Array]) -> Slots:
            return {slot: product(slot, leaves[index], dtype) for slot, index in direct.items()}

        _, pullback = jax.vjp(products, jax.tree.leaves(moment.prev))
        return pullback({slot: d_pre[slot] for slot in direct})[0]

    is_detached = _detached(loop, moment, set(direct.values())) if skip else None
    if is_detached is None or not loop.params.matrices:
        return derivative(d_pre)
    zeros = [jnp.zeros_like(a) for a in jax.tree.leaves(moment.prev)]
    return jax.lax.cond(is_detached, lambda _: zeros, derivative, d_pre)  # h-detach: none passes


def _detached(loop: Loop, moment: Moment, leaves: set[int]) -> jax.Array | None:
    """Whether all these leaves are detached for the whole batch; None if that cannot be."""
    if not all(fn.elementwise for fn in loop.carry_fns):
        return None  # such a function may make a leaf that is detached from another one
    leaf_numbers = range(len(jax.tree.leaves(moment.prev)))
    numbered = jax.tree.unflatten(jax.tree.structure(moment.prev), leaf_numbers)
    masks: dict[int, jax.Array] = {}
    for fn, noise_t in zip(loop.carry_fns, moment.stream.noise, strict=True):
        mask = fn.detached(noise_t)
        if mask is not None and mask.ndim == 0:
            leaf: Any = get_field(numbered, fn.field)
            masks[leaf] = masks[leaf] | mask if leaf in masks else mask
    if not leaves <= set(masks):
        return None
    return functools.reduce(jnp.logical_and, [masks[leaf] for leaf in sorted(leaves)])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def known_product(
    dtype: Any, weights: Weights, value: jax.Array, slot: str, x: jax.Array
) -> jax.Array:
    """A recurrent product of x whose value is known; only its derivative is computed."""
    del dtype, weights, slot, x
    return value


def _known_product_forward(
    dtype: Any, weights: Weights, value: jax.Array, slot: str, x: jax.Array
) -> tuple[jax.Array, Any]:
    del dtype, slot
    return value, (weights, x)


def _known_product_backward(dtype: Any, slot: str, residual: Any, d_out: jax.Array) -> tuple:
    weights, x = residual
    _, pullback = jax.vjp(lambda x: product_of(weights, slot, x, dtype), x)
    return None, d_out, *pullback(d_out)


known_product.defvjp(_known_product_forward, _known_product_backward)


# Backward, after the loop.


def gradients(
    residual: Residuals, previous: Carry, d_pre: Slots, d_apart: Slots
) -> tuple[Weights, Slots]:
    """The cotangents of weights and inputs from those of the pre-activations.

    Args:
      residual: what the forward loop kept.
      previous: the carry before each step, ``[T, ...]``.
      d_pre, d_apart: cotangents of ``residual.pre`` and of the inputs that were read apart.
    """
    vectors, d_rows = _product_vectors(residual, previous), dict(d_pre)
    if on_one_cpu():  # products are of the last axis alone: of all rows at once
        rows = {id(x): flat(x, x.ndim - 1) for x in vectors.values()}  # slots may read one vector
        if residual.loop.params.matrices:
            rows = {name: as_transpose(x) for name, x in rows.items()}
        vectors = {slot: rows[id(x)] for slot, x in vectors.items()}
        d_rows = {slot: flat(d, d.ndim - 1) for slot, d in d_pre.items()}

    def products(weights: Weights) -> Slots:
        return {slot: product_of(weights, slot, x, residual.dtype) for slot, x in vectors.items()}

    _, pullback = jax.vjp(products, residual.loop.params)
    (d_weights,) = pullback(d_rows)
    d_inputs: dict[str, Any] = {}
    for name, like in residual.dtypes.items():  # None: an integer, or a slot that is not read
        d_inputs[name] = d_pre[name].astype(like.dtype) if name in d_pre else d_apart.get(name)
    return d_weights, d_inputs


def _product_vectors(residual: Residuals, previous: Carry) -> Slots:
    """The vectors that the products of all steps read, ``[T, ...]`` by slot."""
    update = declared(residual.loop.settings.cell).update

    def vectors_at(prev: Carry, pre: Slots, apart: Slots, stream_t: Stream) -> Slots:
        vectors: dict[str, jax.Array] = {}

        def product(slot: str, x: jax.Array) -> jax.Array:
            vectors[slot] = x
            return pre[slot]

        residual.loop.advance(lambda carry: update(carry, apart, product), prev, stream_t)
        return vectors

    return jax.vmap(vectors_at)(previous, residual.pre, residual.loop.xs, residual.loop.stream)


def add(a: Carry, b: Carry) -> Carry:
    """The sum of two carries."""
    return jax.tree.map(jnp.add, a, b)
