"""A product loop and its hand-written backward pass, the fused backend's, as two kernels.

Kept are the carries and the pre-activations of all steps; nothing is formed again but the vectors
that the weights' gradients need, all at once after the backward kernel.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from recurrent_gates.backends.pallas.loop import time_loop
from recurrent_gates.backends.shared.accumulation import shifted
from recurrent_gates.backends.shared.products import (
    Moment,
    Residuals,
    add,
    gradients,
    recorded_step,
    residuals,
    step_gradients,
    step_product,
)
from recurrent_gates.declared import Carry, Weights, inputs_dtype
from recurrent_gates.scan import Loop


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
    def body(shared: Any, reset_carry: Carry, c: Carry, inputs: Any) -> tuple[Carry, Any]:
        weights, carry_fns = shared
        z_t, stream_t = inputs
        own = loop.replace(params=weights, reset_carry=reset_carry, carry_fns=carry_fns)
        c, pre = recorded_step(own, step_product(weights), z_t, c, stream_t)
        return c, (c, pre)

    last, (carries, pre) = time_loop(
        body,
        (resident(loop.params, inputs_dtype(loop.xs)), loop.carry_fns),
        None if loop.stream.resets is None else loop.reset_carry,
        loop.carry,
        (loop.xs, loop.stream),
        reverse=loop.settings.reverse,
        elementwise=elementwise,
        heads=heads_of(loop.params),
    )
    return (last, carries), residuals(loop, carries, pre)


def _backward(elementwise: bool, kept: Residuals, cotangents: tuple[Carry, Carry]) -> tuple[Loop]:
    loop, reverse = kept.loop, kept.loop.settings.reverse
    d_last, d_carries = cotangents
    before = shifted(loop.carry, kept.carries, reverse)

    def body(shared: Any, reset_carry: Carry, state: Any, inputs: Any) -> tuple[Any, Any]:
        weights, carry_fns = shared
        d_carry, d_reset = state
        *moment, d_here = inputs
        own = loop.replace(params=weights, reset_carry=reset_carry, carry_fns=carry_fns)
        product, d_new = step_product(weights), add(d_carry, d_here)
        d = step_gradients(own, product, kept.dtype, Moment(*moment), d_new, skip=True)
        if d_reset is not None:
            d_reset = add(d_reset, d.reset_carry)
        return (d.prev, d_reset), (d.pre, d.apart)

    zeros = jax.tree.map(jnp.zeros_like, loop.reset_carry)
    rows, d_rows = (None, None) if loop.stream.resets is None else (loop.reset_carry, zeros)
    (d_carry, d_rows), (d_pre, d_apart) = time_loop(
        body,
        (resident(loop.params, kept.dtype), loop.carry_fns),
        rows,
        (d_last, d_rows),
        (before, kept.pre, loop.xs, loop.stream, d_carries),
        reverse=not reverse,
        elementwise=elementwise,
        heads=heads_of(loop.params),
    )
    d_weights, d_inputs = gradients(kept, before, d_pre, d_apart)
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
