"""A product loop and its hand-written backward pass, the fused backend's, as two kernels.

Kept are the carries and the pre-activations of all steps; nothing is formed again but the vectors
that the weights' gradients need, all at once after the backward kernel.

Programs of one row on a GPU join up to four matrices that multiply one vector, with the columns of
a unit side by side: one product makes the pre-activations of all these slots, and a thread gets all
of a unit's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from recurrent_gates import target
from recurrent_gates.backends.pallas.loop import OnGpu, on_gpu, time_loop
from recurrent_gates.backends.shared.products import (
    Moment,
    Residuals,
    SlotProduct,
    add,
    gradients,
    recorded_step,
    residuals,
    slots_of_one_vector,
    step_gradients,
)
from recurrent_gates.declared import (
    Carry,
    Weights,
    inputs_dtype,
    matrix_product,
    product_of,
    state_dtype,
    with_bias,
)
from recurrent_gates.scan import Loop
from recurrent_gates.shapes import shifted


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def recurrence(elementwise: bool, loop: Loop) -> tuple[Carry, Carry]:
    """The last carry and the carries of all steps.

    Args:
      elementwise: whether the units are independent and alike, carry functions included.
      loop: a product loop; inputs are ``[T, B, width]``, carries ``[B, F]`` and masks ``[T]``,
        ``[T, B, 1]`` or ``[T, B, F]``.
    """
    return _forward(elementwise, loop)[0]


def _forward(elementwise: bool, loop: Loop) -> tuple[tuple[Carry, Carry], Residuals]:
    dtype = inputs_dtype(loop.xs)
    weights, gpu = resident(loop.params, dtype), _programs(elementwise, loop, dtype)
    operands, product_by = _kernel_weights(loop, weights, dtype, gpu, transposed=False)

    def body(shared: Any, reset_carry: Carry, c: Carry, inputs: Any) -> tuple[Carry, Any]:
        operands, carry_fns = shared
        z_t, stream_t = inputs
        step_loop = loop.replace(
            params=operands.weights, reset_carry=reset_carry, carry_fns=carry_fns
        )
        c, pre = recorded_step(step_loop, product_by(operands), z_t, c, stream_t)
        return c, (c, pre)

    last, (carries, pre) = time_loop(
        body,
        (operands, loop.carry_fns),
        None if loop.stream.resets is None else loop.reset_carry,
        loop.carry,
        (loop.xs, loop.stream),
        reverse=loop.settings.reverse,
        gpu=gpu,
        elementwise=elementwise,
        heads=heads_of(loop.params),
    )
    return (last, carries), residuals(loop, carries, pre)


def _backward(
    elementwise: bool, residual: Residuals, cotangents: tuple[Carry, Carry]
) -> tuple[Loop]:
    loop, reverse = residual.loop, residual.loop.settings.reverse
    d_last, d_carries = cotangents
    previous = shifted(loop.carry, residual.carries, reverse)

    weights, gpu = (
        resident(loop.params, residual.dtype),
        _programs(elementwise, loop, residual.dtype),
    )
    operands, product_by = _kernel_weights(loop, weights, residual.dtype, gpu, transposed=True)

    def body(shared: Any, reset_carry: Carry, state: Any, inputs: Any) -> tuple[Any, Any]:
        operands, carry_fns = shared
        d_carry, d_reset = state
        *moment, d_here = inputs
        step_loop = loop.replace(
            params=operands.weights, reset_carry=reset_carry, carry_fns=carry_fns
        )
        product, d_new = product_by(operands), add(d_carry, d_here)
        d = step_gradients(step_loop, product, residual.dtype, Moment(*moment), d_new, skip=True)
        if d_reset is not None:
            d_reset = add(d_reset, d.reset_carry)
        return (d.prev, d_reset), (d.pre, d.apart)

    zeros = jax.tree.map(jnp.zeros_like, loop.reset_carry)
    rows, d_rows = (None, None) if loop.stream.resets is None else (loop.reset_carry, zeros)
    (d_carry, d_rows), (d_pre, d_apart) = time_loop(
        body,
        (operands, loop.carry_fns),
        rows,
        (d_last, d_rows),
        (previous, residual.pre, loop.xs, loop.stream, d_carries),
        reverse=not reverse,
        gpu=gpu,
        elementwise=elementwise,
        heads=heads_of(loop.params),
    )
    d_weights, d_inputs = gradients(residual, previous, d_pre, d_apart)
    d_loop = loop.replace(params=d_weights, xs=d_inputs, carry=d_carry)
    d_reset = zeros if d_rows is None else d_rows
    return (d_loop.replace(reset_carry=d_reset, carry_fns=None, stream=None),)


recurrence.defvjp(_forward, _backward)


def heads_of(weights: Weights) -> int:
    """N, the heads of block-diagonal matrices, or 1."""
    return max((w.shape[0] for w in weights.matrices.values() if w.ndim == 3), default=1)


def resident(weights: Weights, dtype: Any) -> Weights:
    """The weights as a kernel holds them: matrices in the dtype of the products, rows of others."""
    return Weights(
        jax.tree.map(lambda w: w.astype(dtype), weights.matrices),
        *jax.tree.map(lambda w: w[None], (weights.vectors, weights.biases)),
    )


# On a GPU.


def _programs(elementwise: bool, loop: Loop, dtype: Any) -> OnGpu:
    """The programs of a product loop on a GPU, its products being of ``dtype``."""
    matrices = loop.params.matrices
    if elementwise or not matrices:
        return OnGpu(1, 4)
    heads = heads_of(loop.params)
    batch = math.prod(jax.tree.leaves(loop.carry)[0].shape[:-1])
    size = sum(w.size for w in matrices.values()) // heads
    return on_gpu(batch, heads, size * jnp.dtype(dtype).itemsize)


class KernelWeights(NamedTuple):
    """What the products of a kernel read.

    Attributes:
      weights: of all slots; a kernel loads of them only what it reads.
      joined: one matrix for each group of slots, ``[m, 2 n]`` or ``[m, 4 n]`` for those of
        ``[m, n]``, with the columns of a unit side by side, or its transpose; with heads,
        ``[N, m, 4 n]``.
    """

    weights: Weights
    joined: list[jax.Array]


def _kernel_weights(
    loop: Loop, weights: Weights, dtype: Any, gpu: OnGpu, *, transposed: bool
) -> tuple[KernelWeights, Callable[[KernelWeights], SlotProduct]]:
    """What the kernels of a loop hold, and the products by it."""
    groups = _groups(loop, dtype) if gpu.rows == 1 and target.platform() == "gpu" else []
    joined = [_joined_matrix([weights.matrices[slot] for slot in slots]) for slots in groups]
    if transposed:  # so that the sums on the way back are over rows, as those forward are
        joined = [jnp.swapaxes(w, -1, -2) for w in joined]

    def product_by(operands: KernelWeights) -> SlotProduct:
        cache: dict[str, jax.Array] = {}

        def product(slot: str, x: jax.Array, dtype: Any) -> jax.Array:
            n = next((n for n, slots in enumerate(groups) if slot in slots), None)
            if n is None:
                return product_of(operands.weights, slot, x, dtype)
            if slot not in cache:
                multiply = _transposed_product if transposed else matrix_product
                out = multiply(x, operands.joined[n], dtype)
                products = _slot_products(out, _columns_of_a_unit(groups[n]))
                cache.update(zip(groups[n], products, strict=False))  # of three slots without zeros
            return with_bias(operands.weights, slot, cache[slot])

        return product

    return KernelWeights(weights, joined), product_by


def _groups(loop: Loop, dtype: Any) -> list[list[str]]:
    """Slots by twos, threes and fours whose matrices read one vector and are of one shape."""
    groups = []
    for slots in slots_of_one_vector(loop, dtype):
        shapes = [loop.params.matrices[slot].shape for slot in slots]
        for shape in dict.fromkeys(shapes):
            peers = [slot for slot, s in zip(slots, shapes, strict=True) if s == shape]
            fours = [peers[n : n + 4] for n in range(0, len(peers), 4)]
            groups += [four for four in fours if len(four) > 1]
    return groups


def _columns_of_a_unit(slots: list[str]) -> int:
    """The columns of a unit in the matrix of a group: a power of two."""
    return 2 if len(slots) == 2 else 4


def _joined_matrix(matrices: list[jax.Array]) -> jax.Array:
    """Matrices as one whose columns are a unit's first, then the next one's; three with zeros."""
    zeros = [jnp.zeros_like(matrices[0])] * (len(matrices) == 3)
    stacked = jnp.stack([*matrices, *zeros], axis=-1)
    return stacked.reshape(*stacked.shape[:-2], -1)


def _slot_products(out: jax.Array, width: int) -> list[jax.Array]:
    """``[..., F]`` of each slot from the product of a group: by halves, which Triton knows."""
    units = out.shape[-1] // width
    blocks = [out.reshape(*out.shape[:-1], units, *[2] * (width // 2))]
    for _ in range(width // 2):  # the last axis comes first: a second half is every other slot
        evens, odds = zip(*(jnp.split(block, 2, axis=-1) for block in blocks), strict=True)
        blocks = [half.reshape(half.shape[:-1]) for half in (*evens, *odds)]
    return blocks


def _transposed_product(x: jax.Array, transpose: jax.Array, dtype: Any) -> jax.Array:
    """``matrix_product`` by the transpose of the matrix, or by that of each block."""
    x, transpose = x.astype(dtype), transpose.astype(dtype)
    sums = state_dtype(dtype)
    if transpose.ndim == 2:
        dims = (((x.ndim - 1,), (1,)), ((), ()))
        return jax.lax.dot_general(x, transpose, dims, preferred_element_type=sums)
    return matrix_product(x, jnp.swapaxes(transpose, -1, -2), dtype)
