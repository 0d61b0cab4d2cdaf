"""A hand-written backward pass for cells that declare their recurrent products.

What is kept of a step, and what is formed again, depends on whether time is taken in chunks:

- In one piece: each carry and each pre-activation is kept once.
- In chunks of this backend's choice, carries are kept and pre-activations formed again, all at once
  and in cache (``_replay``); for a large F it is the other way round, pre-activations are kept and
  carries formed again without a product (``_rebuild``).
- In chunks that the caller asked for (``remat``), neither is kept.

Where no gradient is due, a step may project its own inputs (``stepwise``).

The backward loop replays a step from both without computing a recurrent product again, and hands
out the cotangents of the pre-activations; the weights' gradients are formed after it, one product
over all steps. A step that is detached for the whole batch skips its products in the backward
loop, but on a GPU.

Where fields only accumulate (GATO's s) the loop runs the other fields alone. The increments
of a whole chunk are then computed at once, outside the loop, and accumulated. Chunks are
rematerialised by the driver, so that the [T, B, k * J] activations are never all alive.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from recurrent_gates import target
from recurrent_gates.backends.shared import halves, stepwise, two_layer
from recurrent_gates.backends.shared.accumulation import (
    feeding,
    increment_inputs,
    joined,
    summing,
    unnamed_field,
)
from recurrent_gates.backends.shared.products import (
    Moment,
    Residuals,
    add,
    apart,
    declared,
    gradients,
    merged_products,
    product_loop,
    recorded_step,
    residuals,
    step_gradients,
    step_product,
)
from recurrent_gates.backends.shared.refusal import nonlinear_gradient
from recurrent_gates.backends.shared.rows import projected
from recurrent_gates.carry import get_field
from recurrent_gates.declared import (
    Carry,
    Slots,
    Weights,
    inputs_dtype,
    is_inexact,
    outdated,
    recurrent_weights,
)
from recurrent_gates.gato import GATO
from recurrent_gates.scan import Loop, Segment, Stream, mark_residuals, with_zeros
from recurrent_gates.shapes import byte_count, shifted

# Of a train step's temporary memory. glibc returns an allocation above this to the system, so that
# each call touches fresh pages: 14,000 of them, 15 ms, at (64, 64, 64, 256). Below it none are.
_REUSED_BYTES = 2**25
_CACHE_BYTES = 2**20  # of projections in a chunk, on a CPU
_FEW_CHUNKS = 8  # projections over weights: a chunk's weight gradients take 1.03 to 1.1 as long
_WIDE_INPUTS = 128  # features from which to project again costs a CPU more than fresh memory
_CHUNK_BYTES = 2**26  # of projections in a chunk elsewhere
_REPLAYED = 300  # the largest F that is formed again: on a CPU 256 gains, 512 loses


def unsupported(loop: Loop) -> str | None:
    """Why this backend does not serve a loop, in one sentence; None if it does."""
    cell = loop.settings.cell
    if cell.products is None:
        return f"{type(cell).__name__} with these settings does not declare recurrent products."
    reason = outdated(cell, "products", "sums")
    if reason is not None:
        return reason
    carry = loop.carry if cell.sums is None else feeding(loop).carry
    if not all(map(is_inexact, jax.tree.leaves(carry))):
        return f"a carry of {type(cell).__name__} has other numbers than floating-point ones."
    for fn in loop.carry_fns:
        get_field(loop.carry, fn.field)  # an unknown field is an error under any backend
        if cell.sums is not None and not fn.elementwise:
            return f"{type(fn).__name__} may read or change sums, which are formed after the loop."
    return unnamed_field(loop) or (None if cell.sums is None else nonlinear_gradient(loop))


def chunk(loop: Loop) -> int | None:
    """The steps per rematerialised chunk that this backend wants, or None for no chunks.

    On a CPU there is none as long as the memory of a call is that of the call before. Beyond that
    touching fresh memory costs more than the arithmetic, and what a chunk computes should stay in a
    core's cache, but outweigh the weights' gradients, which each chunk adds to the sum of the
    others; large weights leave no room for chunks, and projections of wide inputs are formed once
    where at least a forward pass reuses its memory. Elsewhere only the increments of accumulated
    fields, far larger than their sums, are not to be alive for all steps.
    """
    cell, steps = loop.settings.cell, loop.steps
    cpu = target.platform() == "cpu"
    if not (cpu or cell.sums) or loop.symbolic or not steps:
        return None
    weights = recurrent_weights(declared(cell), loop.params)
    z = jax.eval_shape(cell.project, loop.params, loop.xs)
    if two_layer.serves(loop):
        z = declared(cell).inputs(z)  # what increments read is never formed
    z_bytes = byte_count(z)
    # Alive at the backward pass: projections, pre-activations and their cotangents; the carries
    # twice. Increments of sums have hidden units of their own.
    carry_bytes = steps * byte_count(loop.carry)
    live_bytes = (6 if cell.sums else 3) * z_bytes + 2 * carry_bytes
    if cpu and (live_bytes <= _REUSED_BYTES or z_bytes <= _FEW_CHUNKS * byte_count(weights)):
        return None
    if cpu and not cell.sums and _is_wide(loop) and z_bytes + carry_bytes <= _REUSED_BYTES:
        return None
    budget = max(_CACHE_BYTES, 2 * byte_count(weights)) if cpu else _CHUNK_BYTES
    limit = max(2, steps * budget // max(z_bytes, 1))
    if limit >= steps:
        return None
    # Without a rest, if that costs little: a rest is a second program to compile.
    return next((n for n in range(limit, limit // 2, -1) if steps % n == 0), limit)


def _is_wide(loop: Loop) -> bool:
    features = (leaf.shape[len(loop.lead) :] for leaf in jax.tree.leaves(loop.xs))
    return max(map(math.prod, features)) >= _WIDE_INPUTS


def segment(loop: Loop) -> Segment:
    """A stretch of time; same contract as ``scan_segment``."""
    return summed_segment(loop)


def summed_segment(loop: Loop, total: two_layer.Total | None = None) -> Segment:
    """``segment`` by a sum of the caller's.

    Args:
      loop: the loop.
      total: what sums over the hidden units of a two-layer GATO; None: ``two_layer.total``.
    """
    settings = loop.settings
    if stepwise.serves(loop):
        last, carries = _stepwise(loop)
        z = jax.eval_shape(projected, loop)  # of which only the dtype is read
        ys = with_zeros(loop.stream.valid, settings.cell.emit(loop.params, carries, z))
        return Segment(last, ys, carries if settings.keep_carries else None)
    z = projected(loop)
    if settings.cell.sums is None:
        last, carries = _recurrence(product_loop(loop, z))
    else:
        _, looped = _recurrence(product_loop(feeding(loop), z))
        last, carries = accumulate(loop, z, looped, total)
    ys = with_zeros(loop.stream.valid, settings.cell.emit(loop.params, carries, z))
    return Segment(last, ys, carries if settings.keep_carries else None)


# The loop over the fields that feed back: a product loop.


@jax.custom_vjp
def _stepwise(loop: Loop) -> tuple[Carry, Carry]:
    """``_recurrence`` of a loop's own inputs, each of which is projected in its step."""
    last, carries, _ = run(stepwise.product_loop(loop), project=stepwise.projection(loop))
    return last, carries


def _stepwise_forward(loop: Loop) -> tuple[tuple[Carry, Carry], Any]:
    """Where a gradient is due the projections are needed once more, and formed all at once."""
    return jax.vjp(lambda loop: _recurrence(product_loop(loop, projected(loop))), loop)


def _stepwise_backward(pullback: Any, cotangents: tuple[Carry, Carry]) -> tuple[Loop]:
    return pullback(cotangents)


_stepwise.defvjp(_stepwise_forward, _stepwise_backward)


@jax.custom_vjp
def _recurrence(loop: Loop) -> tuple[Carry, Carry]:
    """The last carry, and those of all steps."""
    last, carries, _ = run(loop, halves.count(loop))
    return last, carries


def run(
    loop: Loop, parts: int = 1, project: Callable[[Any], Slots] | None = None
) -> tuple[Carry, Carry, Slots]:
    """The last carry, the carries of all steps, and their pre-activations by slot.

    Args:
      loop: a product loop.
      parts: of the batch, of which each has a step of its own; see ``halves``.
      project: makes of a step's input in ``loop.xs`` what the step reads; None: it is that.
    """
    settings = loop.settings
    project = project or dict
    like = loop.replace(xs=jax.eval_shape(project, loop.xs))
    merged = merged_products(like, inputs_dtype(like.xs), always=parts > 1)
    loops = halves.loops(loop, parts)

    def body(carries: list[Carry], inputs: tuple[Slots, Stream]) -> tuple[list[Carry], Any]:
        steps = [
            recorded_step(part_loop, step_product(loop.params, merged), project(z_t), c, stream_t)
            for part_loop, c, (z_t, stream_t) in zip(
                loops, carries, halves.divided(inputs, parts), strict=True
            )
        ]
        return [c for c, _ in steps], halves.joined(steps)

    last, (carries, pre) = jax.lax.scan(
        body,
        [part_loop.carry for part_loop in loops],
        (loop.xs, loop.stream),
        reverse=settings.reverse,
        unroll=settings.unroll,
    )
    return halves.joined(last), carries, pre


def _forward(loop: Loop) -> tuple[tuple[Carry, Carry], Any]:
    last, carries, pre = run(loop)
    # Saved with the chunk; JAX drops them where they are formed again and nothing else reads them.
    carries = mark_residuals(carries)
    loop_carries = carries  # by the backward loop
    if loop.settings.keep and _replays(loop.params):
        pre = _replay(loop, carries)
    elif loop.settings.keep:
        pre = mark_residuals(pre)
        loop_carries = _rebuild(loop, pre)
    # The backward loop's products are with the transposes: a CPU's take half as long again where
    # each of them transposes by itself. They are kept, or each chunk would transpose again.
    # XLA folds the second transpose into the product.
    transposed = mark_residuals(jax.tree.map(_transposed, loop.params))
    return (last, carries), (residuals(loop, loop_carries, pre), transposed)


def _replays(weights: Weights) -> bool:
    """Whether a chunk keeps its carries and forms the products again, or the other way round.

    All products of a chunk at once take F multiply-adds a number, in cache; a number that is
    kept is written to fresh memory and read back, and there are more pre-activations than
    carries.
    """
    return all(matrix.shape[-2] <= _REPLAYED for matrix in weights.matrices.values())


def _rebuild(loop: Loop, pre: Slots) -> Carry:
    """The carries of all steps from their pre-activations, without a product."""
    update = declared(loop.settings.cell).update

    def body(c: Carry, inputs: Any) -> tuple[Carry, Carry]:
        pre_t, apart_t, stream_t = inputs

        def step(carry: Carry) -> Carry:
            return update(carry, apart_t, lambda slot, x: pre_t[slot])

        c = loop.advance(step, c, stream_t)
        return c, c

    inputs = (pre, apart(loop), loop.stream)
    return jax.lax.scan(body, loop.carry, inputs, reverse=loop.settings.reverse)[1]


def _replay(loop: Loop, carries: Carry) -> Slots:
    """The pre-activations of all steps from their carries, one product for each slot."""

    def step(prev: Carry, z_t: Slots, stream_t: Stream) -> Slots:
        return recorded_step(loop, step_product(loop.params), z_t, prev, stream_t)[1]

    previous = shifted(loop.carry, carries, loop.settings.reverse)
    return jax.vmap(step)(previous, loop.xs, loop.stream)


def _backward(saved: tuple[Residuals, Weights], cotangents: tuple[Carry, Carry]) -> tuple[Loop]:
    residual, transposed = saved
    loop, carries = residual.loop, residual.carries
    weights = jax.tree.map(_transposed, transposed)
    d_carry, d_reset, d_pre, d_apart = run_back(residual, weights, cotangents)
    previous = shifted(loop.carry, carries, loop.settings.reverse)
    d_weights, d_inputs = gradients(residual, previous, d_pre, d_apart)
    d_loop = loop.replace(params=d_weights, xs=d_inputs, carry=d_carry, reset_carry=d_reset)
    return (d_loop.replace(carry_fns=None, stream=None),)


def run_back(
    residual: Residuals, weights: Weights, cotangents: tuple[Carry, Carry]
) -> tuple[Carry, Carry, Slots, Slots]:
    """The loop backwards in time.

    Args:
      residual: what the forward loop kept.
      weights: its weights.
      cotangents: those of the last carry and of the carries of all steps.

    Returns:
      The cotangents of the first carry, of the reset carry, of the pre-activations by slot and of
      the inputs that ``update`` reads by themselves.
    """
    loop, carries = residual.loop, residual.carries
    d_last, d_carries = cotangents
    merged = merged_products(loop, residual.dtype, transposes=True)

    def body(state: tuple[Carry, Carry], inputs: Any) -> tuple[tuple[Carry, Carry], Any]:
        d_carry, d_reset = state
        t, pre_t, apart_t, stream_t, d_here = inputs
        product = step_product(weights, merged)
        moment = Moment(_previous(loop, carries, t), pre_t, apart_t, stream_t)
        d_new = add(d_carry, d_here)
        d = step_gradients(loop, product, residual.dtype, moment, d_new, skip=_skips())
        if loop.stream.resets is not None:
            d_reset = add(d_reset, d.reset_carry)
        return (d.prev, d_reset), (d.pre, d.apart)

    steps = jax.tree.leaves(carries)[0].shape[0]
    start = (d_last, jax.tree.map(jnp.zeros_like, loop.reset_carry))
    sequence = (jnp.arange(steps), residual.pre, loop.xs, loop.stream, d_carries)
    reverse, unroll = loop.settings.reverse, loop.settings.unroll
    (d_carry, d_reset), (d_pre, d_apart) = jax.lax.scan(
        body, start, sequence, reverse=not reverse, unroll=unroll
    )
    return d_carry, d_reset, d_pre, d_apart


def _previous(loop: Loop, carries: Carry, t: jax.Array) -> Carry:
    """The carry before step t, from where it lies."""
    steps = jax.tree.leaves(carries)[0].shape[0]
    first, towards_first = (steps - 1, 1) if loop.settings.reverse else (0, -1)
    index = jnp.clip(t + towards_first, 0, steps - 1)
    return jax.tree.map(
        lambda sequence, start: jnp.where(
            t == first, start, jax.lax.dynamic_index_in_dim(sequence, index, keepdims=False)
        ),
        carries,
        loop.carry,
    )


def _skips() -> bool:
    """Whether a product that is not due is skipped.

    On a GPU the host decides which branch runs, and the device waits for it at every step.
    """
    return target.platform() != "gpu"


def _transposed(leaf: jax.Array) -> jax.Array:
    return jnp.swapaxes(leaf, -1, -2) if leaf.ndim > 1 else leaf


_recurrence.defvjp(_forward, _backward)


# Fields that only accumulate.


def accumulate(
    loop: Loop, z: Any, looped: Carry, total: two_layer.Total | None = None
) -> tuple[Carry, Carry]:
    """The last carry and those of all steps, from the fields that feed back."""
    settings, cell = loop.settings, loop.settings.cell
    assert cell.sums is not None
    previous = increment_inputs(feeding(loop), looped)
    if two_layer.serves(loop):
        assert isinstance(cell, GATO)
        increments: Slots = {
            "s": two_layer.increment(loop.params["g"], previous.r, loop.xs, cell.dtype, total)
        }
    else:
        increments = cell.sums.increment(loop.params, previous, z)
    sums = summing(loop, increments)

    def body(sums_tm1: Carry, inputs: Any) -> tuple[Carry, Carry]:
        added_t, stream_t = inputs
        step = sums.settings.cell.step
        sums_t = sums.advance(lambda c: step({}, c, added_t), sums_tm1, stream_t)
        return sums_t, sums_t

    last, totals = jax.lax.scan(
        body,
        sums.carry,
        (sums.xs, sums.stream),
        reverse=settings.reverse,
        unroll=settings.unroll,
    )
    last_looped = jax.tree.map(lambda x: x[0 if settings.reverse else -1], looped)
    return joined(cell, last_looped, last), joined(cell, looped, totals)
