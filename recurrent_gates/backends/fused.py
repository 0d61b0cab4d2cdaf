"""A hand-written backward pass for cells that name their recurrent products.

The forward loop keeps each carry and each pre-activation once; in chunks of its own choice one of
the two, and forms the other again: pre-activations all at once, carries without a product. The
backward loop replays a step from them without computing a recurrent product again, and hands out
the cotangents of the pre-activations; the weights' gradients are formed after it, one product over
all steps. A step that is detached for the whole batch skips its products in the backward loop,
but on a GPU.

Where fields only accumulate (GATO's s) the loop runs the other fields alone. The increments
of a whole chunk are then computed at once, outside the loop, and accumulated. Chunks are
rematerialised by the driver, so that the [T, B, k * J] activations are never all alive.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from recurrent_gates.backends import two_layer
from recurrent_gates.backends.accumulation import (
    CarryFns,
    joined,
    only,
    part,
    read_by_increments,
    shifted,
    sum_step,
    without,
)
from recurrent_gates.backends.products import (
    Residuals,
    add,
    gradients,
    merged_products,
    recorded_step,
    residuals,
    step_gradients,
    step_product,
)
from recurrent_gates.backends.rows import flat, on_one_cpu, unflat
from recurrent_gates.base import Carry, Cell, Params, Slots
from recurrent_gates.carry import get_field
from recurrent_gates.gato import GATO
from recurrent_gates.scan import (
    Request,
    Segment,
    Settings,
    Stream,
    advance,
    kept,
    masked_output,
)
from recurrent_gates.shapes import is_symbolic

_CACHE_BYTES = 2**20  # of projections in a chunk, on a CPU
_CHUNK_BYTES = 2**26  # the same elsewhere
_REPLAYED = 300  # the largest F that is formed again: on a CPU 256 gains, 512 loses


def unsupported(request: Request) -> str | None:
    """Why this backend does not serve a request, in one sentence; None if it does."""
    cell = request.settings.cell
    if cell.recurrent_weights(request.params) is None:
        return f"{type(cell).__name__} with these settings does not name its recurrent products."
    for fn in request.carry_fns:
        get_field(request.carry, fn.field)  # an unknown field is an error under any backend
        if cell.accumulated and not isinstance(fn.field, str):
            return "a carry function must name its field where fields accumulate."
    return None


def chunk(request: Request) -> int | None:
    """The steps per rematerialised chunk that this backend wants, or None for no chunks.

    On a CPU what a chunk computes should stay in a core's cache, since touching fresh memory
    costs more than the arithmetic, but outweigh the weights' gradients, which each chunk adds to
    the sum of the others. Elsewhere only the increments of accumulated fields, far larger
    than their sums, are not to be alive for all steps.
    """
    cell, steps = request.settings.cell, jax.tree.leaves(request.xs)[0].shape[0]
    cpu = jax.default_backend() == "cpu"
    if not (cpu or cell.accumulated) or not steps or is_symbolic(request.xs):
        return None
    weights = cell.recurrent_weights(request.params)
    z = jax.eval_shape(cell.project, request.params, request.xs)
    if two_layer.serves(cell, request.params, request.xs, request.carry):
        z = cell.loop_input(z)  # what increments read is never formed
    whole = _bytes(z)
    budget = max(_CACHE_BYTES, 2 * _bytes(weights)) if cpu else _CHUNK_BYTES
    most = max(2, steps * budget // max(whole, 1))
    if most >= steps:
        return None
    # Without a rest, if that costs little: a rest is a second program to compile.
    return next((n for n in range(most, most // 2, -1) if steps % n == 0), most)


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def segment(
    settings: Settings,
    params: Params,
    xs: Any,
    carry: Carry,
    fresh: Carry,
    carry_fns: CarryFns,
    stream: Stream,
    keep_carries: bool,
) -> Segment:
    """A stretch of time; same contract as ``scan_segment``."""
    cell = settings.cell
    z = _project(cell, params, xs)
    weights = cell.recurrent_weights(params)
    z_loop = cell.loop_input(z)
    if not cell.accumulated:
        last, carries = _recurrence(settings, weights, z_loop, carry, fresh, carry_fns, stream)
    else:
        loop_fns, loop_stream = part(cell, carry_fns, stream, accumulated=False)
        _, looped = _recurrence(
            settings,
            weights,
            z_loop,
            without(cell, carry),
            without(cell, fresh),
            loop_fns,
            loop_stream,
        )
        start = (carry, fresh, carry_fns, stream)
        last, carries = _accumulate(settings, params, xs, z, *start, looped)
    ys = masked_output(stream.valid, cell.emit(params, carries, z))
    return Segment(last, ys, carries if keep_carries else None)


def _project(cell: Cell, params: Params, xs: Any) -> Any:
    """``cell.project``, where that is fast of all rows at once."""
    if not on_one_cpu():
        return cell.project(params, xs)
    lead = jax.tree.leaves(xs)[0].shape[:-1]
    return unflat(cell.project(params, jax.tree.map(lambda x: flat(x, len(lead)), xs)), lead)


# The loop over the fields that feed back.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recurrence(
    settings: Settings,
    weights: Params,
    z: Slots,
    carry: Carry,
    fresh: Carry,
    carry_fns: CarryFns,
    stream: Stream,
) -> tuple[Carry, Carry]:
    """The carries of all steps, and the last one."""
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

    merged = merged_products(cell, weights, carry, z, next(iter(z.values())).dtype)

    def body(c: Carry, inputs: tuple[Slots, Stream]) -> tuple[Carry, Any]:
        z_t, stream_t = inputs
        product = step_product(cell, weights, merged)
        c, pre = recorded_step(cell, product, z_t, c, fresh, carry_fns, stream_t)
        return c, (c, pre)

    last, (carries, pre) = jax.lax.scan(
        body, carry, (z, stream), reverse=settings.reverse, unroll=settings.unroll
    )
    carries = kept(carries)  # though not if they are formed again and nothing else reads them
    read = carries
    inputs = (weights, z, carry, fresh, carry_fns, stream)
    if settings.keep and _replays(weights):
        pre = _replay(settings, *inputs, carries)
    elif settings.keep:
        pre = kept(pre)
        read = _rebuild(cell, z, carry, fresh, carry_fns, stream, pre, reverse=settings.reverse)
    # The backward loop's products are with the transposes: a CPU's take half as long again where
    # each of them transposes by itself. They are kept, or each chunk would transpose again.
    # XLA folds the second transpose into the product.
    transposed = kept(jax.tree.map(_transposed, weights))
    return (last, carries), (residuals(cell, *inputs, read, pre), transposed)


def _replays(weights: Params) -> bool:
    """Whether a chunk keeps its carries and forms the products again, or the other way round.

    All products of a chunk at once take F multiply-adds a number, in cache; a number that is
    kept is written to fresh memory and read back, and there are more pre-activations than
    carries.
    """
    return all(leaf.ndim < 2 or leaf.shape[0] <= _REPLAYED for leaf in jax.tree.leaves(weights))


def _rebuild(
    cell: Cell,
    z: Slots,
    carry: Carry,
    fresh: Carry,
    carry_fns: CarryFns,
    stream: Stream,
    pre: Slots,
    *,
    reverse: bool,
) -> Carry:
    """The carries of all steps from their pre-activations, without a product."""

    def body(c: Carry, inputs: Any) -> tuple[Carry, Carry]:
        pre_t, apart_t, stream_t = inputs

        def update(read: Carry) -> Carry:
            return cell.update(read, apart_t, lambda slot, x: pre_t[slot])

        c = advance(update, c, fresh, carry_fns, stream_t)
        return c, c

    apart = {slot: z[slot] for slot in cell.separate}
    return jax.lax.scan(body, carry, (pre, apart, stream), reverse=reverse)[1]


def _replay(
    settings: Settings,
    weights: Params,
    z: Slots,
    carry: Carry,
    fresh: Carry,
    carry_fns: CarryFns,
    stream: Stream,
    carries: Carry,
) -> Slots:
    """The pre-activations of all steps from their carries, one product for each slot."""
    cell = settings.cell

    def step(prev: Carry, z_t: Slots, stream_t: Stream) -> Slots:
        product = functools.partial(cell.product, weights)
        return recorded_step(cell, product, z_t, prev, fresh, carry_fns, stream_t)[1]

    return jax.vmap(step)(shifted(carry, carries, settings.reverse), z, stream)


def _backward(
    settings: Settings, saved: tuple[Residuals, Params], cotangents: tuple[Carry, Carry]
) -> tuple:
    loop, transposed = saved
    weights, carry, fresh, carry_fns, stream, carries, pre, apart, _ = loop
    cell, dtype, reverse = settings.cell, loop.dtype, settings.reverse
    d_last, d_carries = cotangents
    merged = merged_products(cell, weights, carry, apart, dtype)
    steps = jax.tree.leaves(carries)[0].shape[0]
    first, towards_first = (steps - 1, 1) if reverse else (0, -1)

    def previous(t: jax.Array) -> Carry:
        at = jnp.clip(t + towards_first, 0, steps - 1)
        return jax.tree.map(
            lambda all_, start: jnp.where(
                t == first, start, jax.lax.dynamic_index_in_dim(all_, at, keepdims=False)
            ),
            carries,
            carry,
        )

    def body(state: tuple[Carry, Carry], inputs: Any) -> tuple[tuple[Carry, Carry], Any]:
        d_carry, d_fresh = state
        t, pre_t, apart_t, stream_t, d_here = inputs
        product = step_product(cell, jax.tree.map(_transposed, transposed), merged)
        d_prev, d_fresh_t, d_pre, d_apart = step_gradients(
            cell,
            weights,
            product,
            dtype,
            previous(t),
            fresh,
            pre_t,
            apart_t,
            carry_fns,
            stream_t,
            add(d_carry, d_here),
            skip=_skips(),
        )
        if stream.resets is not None:
            d_fresh = add(d_fresh, d_fresh_t)
        return (d_prev, d_fresh), (d_pre, d_apart)

    start = (d_last, jax.tree.map(jnp.zeros_like, fresh))
    sequence = (jnp.arange(steps), pre, apart, stream, d_carries)
    (d_carry, d_fresh), (d_pre, d_apart) = jax.lax.scan(
        body, start, sequence, reverse=not reverse, unroll=settings.unroll
    )

    before = shifted(carry, carries, reverse)
    d_weights, d_z = gradients(cell, loop, before, d_pre, d_apart)
    return d_weights, d_z, d_carry, d_fresh, None, None


def _skips() -> bool:
    """Whether a product that is not due is skipped.

    On a GPU the host decides which branch runs, and the device waits for it at every step.
    """
    return jax.default_backend() != "gpu"


def _transposed(leaf: jax.Array) -> jax.Array:
    return leaf.T if leaf.ndim == 2 else leaf


_recurrence.defvjp(_forward, _backward)


# Fields that only accumulate.


def _accumulate(
    settings: Settings,
    params: Params,
    xs: Any,
    z: Any,
    carry: Carry,
    fresh: Carry,
    carry_fns: CarryFns,
    stream: Stream,
    looped: Carry,
) -> tuple[Carry, Carry]:
    """Takes the accumulated fields through all steps, given the other fields."""
    cell = settings.cell
    loop_fns, loop_stream = part(cell, carry_fns, stream, accumulated=False)
    sum_fns, sum_stream = part(cell, carry_fns, stream, accumulated=True)
    before = read_by_increments(cell, carry, fresh, loop_fns, loop_stream, looped, settings.reverse)
    if two_layer.serves(cell, params, xs, carry):
        assert isinstance(cell, GATO)
        added = {"s": two_layer.increment(params["g"], before.r, xs, cell.dtype)}
    else:
        added = cell.increment(params, before, z)

    def body(total: Carry, inputs: Any) -> tuple[Carry, Carry]:
        added_t, stream_t = inputs
        total = advance(
            lambda c: sum_step(cell, c, added_t), total, only(cell, fresh), sum_fns, stream_t
        )
        return total, total

    last, totals = jax.lax.scan(
        body,
        only(cell, carry),
        (added, sum_stream),
        reverse=settings.reverse,
        unroll=settings.unroll,
    )
    last_looped = jax.tree.map(lambda x: x[0 if settings.reverse else -1], looped)
    return joined(cell, last_looped, last), joined(cell, looped, totals)
