"""GATO's two-layer increment as Pallas kernels: its k * J hidden units never leave the chip.

Every row (a step of an example) is by itself once r is known, so the kernels have no loop over
time. A program holds the first layer of a block of units and passes tiles of rows by it, one
hidden unit of all of them at a time. The backward kernel computes the hidden units again.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from recurrent_gates.backends.pallas.loop import ON_CHIP, compiler_params, on_platform
from recurrent_gates.backends.shared import two_layer
from recurrent_gates.backends.shared.refusal import refuse_derivative
from recurrent_gates.declared import Params
from recurrent_gates.shapes import kernel_result

MOST_FIRST_LAYER = 4096
"""The largest k times (padded) D that a kernel holds for a block of 128 units."""

TILE = 32
"""Rows at a time: with a block of units, what the registers hold."""

_NO_SECOND_DERIVATIVES = (
    "The pallas backend serves first derivatives alone of GATO's two-layer increment. "
    "Use backend='scan'."
)


def two_layer_increment(params: Params, r: jax.Array, x: jax.Array, dtype: Any) -> jax.Array:
    """``TwoLayer()(params, r, project(params, x))``: softplus(F(x, r)) (GATO, eq. 6).

    As ``two_layer.increment``.
    """
    zeros = padded_features(x.shape[-1]) - x.shape[-1] - 1  # to fit tensor cores
    return two_layer.increment(params, r, x, dtype, _two_layer_sum, zeros)


def padded_features(features: int) -> int:
    """Rows of a block of the first layer: inputs and bias, a power of two and at least 16."""
    return max(16, 1 << features.bit_length())


@jax.custom_vjp
def _two_layer_sum(
    x: jax.Array, r: jax.Array, first: jax.Array, on_r: jax.Array, out: jax.Array
) -> jax.Array:
    """sum_i out_i * relu(x first_i + on_r_i * r).

    x ``[N, D]``, r ``[N, J]``, first ``[k, D, J]``, on_r and out ``[k, J]`` -> ``[N, J]``.
    """
    return on_platform(_forward_call, x, r, first, on_r, out)


def _forward(*inputs: jax.Array) -> tuple[jax.Array, Any]:
    return _two_layer_sum(*inputs), inputs


def _backward(inputs: Any, d_total: jax.Array) -> tuple:
    return on_platform(
        _backward_call, *refuse_derivative(_NO_SECOND_DERIVATIVES, (*inputs, d_total))
    )


_two_layer_sum.defvjp(_forward, _backward)


def _forward_call(platform: str, x: Any, r: Any, first: Any, on_r: Any, out: Any) -> jax.Array:
    count, (hidden, depth, units) = r.shape[0], first.shape
    rows, block = _blocks(platform, count, first, backward=False)
    x, r = _padded(x, rows), _padded(r, rows, block)
    first, on_r, out = (_padded(a, 1, block) for a in (first, on_r, out))

    def kernel(x_ref, r_ref, first_ref, on_r_ref, out_ref, total_ref):
        def tile(n: Any, _: None) -> None:
            span = pl.ds(n * TILE, TILE)
            x, r = x_ref[span, :], r_ref[span, :]

            def unit(i: Any, total: jax.Array) -> jax.Array:
                index = pl.ds(i, 1)
                pre = _dot(x, first_ref[i], 1, 0, r.dtype) + on_r_ref[index, :] * r
                return total + out_ref[index, :] * jnp.maximum(pre, 0)

            total_ref[span, :] = jax.lax.fori_loop(0, hidden, unit, jnp.zeros_like(r))

        jax.lax.fori_loop(0, rows // TILE, tile, None)

    by_unit = pl.BlockSpec((hidden, block), lambda u, n: (0, u))
    total = pl.pallas_call(
        kernel,
        grid=(r.shape[1] // block, x.shape[0] // rows),
        in_specs=[
            pl.BlockSpec((rows, depth), lambda u, n: (n, 0)),
            pl.BlockSpec((rows, block), lambda u, n: (n, u)),
            pl.BlockSpec((hidden, depth, block), lambda u, n: (0, 0, u)),
            by_unit,
            by_unit,
        ],
        out_specs=pl.BlockSpec((rows, block), lambda u, n: (n, u)),
        out_shape=kernel_result(r.shape, r),
        compiler_params=compiler_params(platform, 2, state=False),
        interpret=platform == "cpu",
    )(x, r, first, on_r, out)
    return total[:count, :units]


def _backward_call(
    platform: str, x: Any, r: Any, first: Any, on_r: Any, out: Any, d_total: Any
) -> tuple[jax.Array, ...]:
    count, (hidden, depth, units) = r.shape[0], first.shape
    rows, block = _blocks(platform, count, first, backward=True)
    x, r, d_total = _padded(x, rows), _padded(r, rows, block), _padded(d_total, rows, block)
    first, on_r, out = (_padded(a, 1, block) for a in (first, on_r, out))
    blocks, unit_blocks = x.shape[0] // rows, r.shape[1] // block
    # On a TPU one program after another adds to the weights' gradients; on a GPU all run at
    # once and each has its own, added up at the end.
    partials, turns = (blocks, 1) if platform == "cuda" else (1, blocks)

    def row(p: Any, n: Any) -> Any:
        return p * turns + n

    by_unit = pl.BlockSpec((hidden, block), lambda p, u, n: (0, u))
    by_row = pl.BlockSpec((rows, block), lambda p, u, n: (row(p, n), u))
    partial_spec = pl.BlockSpec((1, hidden, block), lambda p, u, n: (p, 0, u))
    sums = kernel_result((partials, *out.shape), r)
    d_x, d_r, d_first, d_on_r, d_out = pl.pallas_call(
        functools.partial(_backward_kernel, hidden, rows),
        grid=(partials, unit_blocks, turns),
        in_specs=[
            pl.BlockSpec((rows, depth), lambda p, u, n: (row(p, n), 0)),
            by_row,
            by_row,
            pl.BlockSpec((hidden, depth, block), lambda p, u, n: (0, 0, u)),
            by_unit,
            by_unit,
        ],
        out_specs=[
            pl.BlockSpec((1, rows, depth), lambda p, u, n: (u, row(p, n), 0)),
            by_row,
            pl.BlockSpec((1, hidden, depth, block), lambda p, u, n: (p, 0, 0, u)),
            partial_spec,
            partial_spec,
        ],
        out_shape=[
            kernel_result((unit_blocks, *x.shape), r),
            kernel_result(r.shape, r),
            kernel_result((partials, *first.shape), r),
            sums,
            sums,
        ],
        compiler_params=compiler_params(platform, 3, state=True),
        interpret=platform == "cpu",
    )(x, r, d_total, first, on_r, out)
    d_x = d_x.sum(axis=0)[:count].astype(x.dtype)
    d_first, d_on_r, d_out = (a.sum(axis=0)[..., :units] for a in (d_first, d_on_r, d_out))
    return d_x, d_r[:count, :units], d_first.astype(first.dtype), d_on_r, d_out


def _backward_kernel(hidden: int, rows: int, *refs: Any) -> None:
    """A block of rows and units: its d_x and d_r, and what it adds to the weights' gradients."""
    x_ref, r_ref, d_total_ref, first_ref, on_r_ref, out_ref, *d_refs = refs
    d_x_ref, d_r_ref, d_first_ref, d_on_r_ref, d_out_ref = d_refs

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        for ref in (d_first_ref, d_on_r_ref, d_out_ref):
            ref[...] = jnp.zeros(ref.shape, ref.dtype)

    def tile(n: Any, _: None) -> None:
        span = pl.ds(n * TILE, TILE)
        x, r, d_total = x_ref[span, :], r_ref[span, :], d_total_ref[span, :]

        def unit(i: Any, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            d_x, d_r = sums
            index = pl.ds(i, 1)
            pre = _dot(x, first_ref[i], 1, 0, r.dtype) + on_r_ref[index, :] * r
            d_out_ref[0, index, :] += jnp.sum(d_total * jnp.maximum(pre, 0), axis=0, keepdims=True)
            d_pre = jnp.where(pre > 0, d_total * out_ref[index, :], 0)
            d_on_r_ref[0, index, :] += jnp.sum(d_pre * r, axis=0, keepdims=True)
            d_r = d_r + d_pre * on_r_ref[index, :]
            d_pre = d_pre.astype(x.dtype)
            d_first_ref[0, i] += _dot(x, d_pre, 0, 0, r.dtype)
            return d_x + _dot(d_pre, first_ref[i], 1, 1, r.dtype), d_r

        zeros = (jnp.zeros(x.shape, r.dtype), jnp.zeros_like(r))
        d_x_ref[0, span, :], d_r_ref[span, :] = jax.lax.fori_loop(0, hidden, unit, zeros)

    jax.lax.fori_loop(0, rows // TILE, tile, None)


def _dot(a: jax.Array, b: jax.Array, over_a: int, over_b: int, dtype: Any) -> jax.Array:
    """The product of two matrices over an axis of each."""
    axes = (((over_a,), (over_b,)), ((), ()))
    return jax.lax.dot_general(a, b, axes, preferred_element_type=dtype)


def _blocks(platform: str, count: int, first: jax.Array, *, backward: bool) -> tuple[int, int]:
    """Rows and units of a program."""
    hidden, depth, units = first.shape
    if platform == "cuda":
        limit, block = (1024 if backward else 256), math.gcd(units, 64)
    else:
        limit, block = 512, units
        fits = ON_CHIP // 2 // (hidden * depth * 4 * (4 if backward else 2))
        if units > fits:
            block = 128
    rows = math.gcd(count, limit)
    if rows < min(4 * TILE, limit):  # else whole blocks, with rows of zeros
        rows = min(limit, -(-count // TILE) * TILE)
    return rows, block


def _padded(a: jax.Array, rows: int, columns: int = 1) -> jax.Array:
    """With zeros on the first and the last axis up to whole blocks."""
    padding = (-a.shape[0] % rows, -a.shape[-1] % columns)
    widths = ((0, padding[0]), *[(0, 0)] * (a.ndim - 2), (0, padding[1]))
    return jnp.pad(a, widths) if any(padding) else a
