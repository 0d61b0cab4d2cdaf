"""An LSTM's gradient paths and their bound (the lecture), and a plain network's singular values.

The lecture is M. Khapra's on the gradients of LSTM and GRU.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from recurrent_gates.analysis.products import Scaled, log10_norm, scaled_products
from recurrent_gates.analysis.trajectories import trajectory
from recurrent_gates.base import Activation, Carry, Params, dense
from recurrent_gates.cells import LSTM, Elman
from recurrent_gates.checks import described


def _slope(activation: Activation, x: jax.Array) -> jax.Array:
    """The derivative of an elementwise function."""
    return jax.jvp(activation, (x,), (jnp.ones_like(x),))[1]


class LecturePaths(NamedTuple):
    """Two of an LSTM's paths back in time, as log10 of norms, all ``[T, *batch]``.

    Attributes:
      forget: t_0, h_T back to s_{T-g} through cell states alone, g = 0 ... T - 1: the largest
        entry of o_T * tanh'(s_T) * f_T * ... * f_{T-g+1}. It vanishes only as far as the
        forget gates close.
      output: t_1, h_T back to h_{T-n} through output gates alone, n = 1 ... T: the spectral
        norm of the product of n factors D(tanh(s_j) * o'_j) W_o.
      bound: the lecture's bound on t_1, ``(K |W_o|)^n``, with K the largest entry of the D.
    """

    forget: jax.Array
    output: jax.Array
    bound: jax.Array


@functools.partial(jax.jit, static_argnames="cell")
def lecture_paths(
    cell: LSTM, params: Params, xs: jax.Array, carry: Carry | None = None
) -> LecturePaths:
    """An LSTM's gradient path through its cell state, and the one that can explode (the lecture).

    The loss's own factor L'(h_T), which both share, is left out.

    Args:
      cell: an LSTM with any gate; its effective f is what the path multiplies.
      params: its parameters.
      xs: inputs ``[T, *batch, D]``.
      carry: the carry before the first step; default ``cell.initial(batch)``.

    Returns:
      The two paths and the bound, as log10 of norms.

    Raises:
      TypeError: if ``cell`` is not an LSTM.
      ValueError: if the cell has heads, or the carry is not one of its own for this batch.
    """
    if not isinstance(cell, LSTM):
        raise TypeError(f"The lecture's paths are those of an LSTM, got {described(cell)}.")
    if cell.heads > 1:
        raise ValueError(f"The lecture's paths are of one whole matrix, got {cell.heads} heads.")
    run = trajectory(cell, params, xs, carry)
    gates = cell.gates(params, run.before, run.z)
    c, o, f = run.after.c, gates["o"], gates["f"]
    readout = jnp.log10(o[-1:] * jnp.abs(_slope(cell.output_activation, c[-1:])))
    log_products = jnp.cumsum(jnp.log10(f)[:0:-1], axis=0)  # f_T, f_T f_{T-1}, ...
    retention = jnp.concatenate([jnp.zeros_like(f[:1]), log_products])
    scale = cell.output_activation(c) * o * (1 - o)
    weight = jnp.swapaxes(params["recurrent_kernel"]["o"], -1, -2).astype(scale.dtype)
    factors = scale[..., :, None] * weight.reshape((1,) * (scale.ndim - 1) + weight.shape)
    ((products,),) = scaled_products(factors, [factors.shape[-1]])
    largest = jnp.max(jnp.abs(scale), axis=(0, -1), initial=0)  # K
    step_bound = jnp.log10(largest * jnp.linalg.norm(weight, ord=2))
    steps = jnp.arange(1, len(c) + 1, dtype=step_bound.dtype).reshape(-1, *(1,) * step_bound.ndim)
    return LecturePaths(
        jnp.max(readout + retention, axis=-1),
        log10_norm(Scaled(products.matrix[1:], products.exponent[1:])),
        steps * step_bound[None],
    )


class SingularBounds(NamedTuple):
    """What U's singular values say of an Elman network's gradients (GATO, 2.2 and App. C).

    Attributes:
      smallest: U's smallest singular value, a scalar.
      largest: U's largest.
      slope_min: the least derivative of the activation over the run, ``[*batch]``.
      slope_max: the greatest.
      lower: log10 of (smallest * slope_min)^g, ``[T + 1, *batch]``: every singular value of
        dh_T/dh_{T-g} is at least that. Above 0 gradients explode.
      upper: log10 of (largest * slope_max)^g: none is above that. Below 0 gradients vanish.
    """

    smallest: jax.Array
    largest: jax.Array
    slope_min: jax.Array
    slope_max: jax.Array
    lower: jax.Array
    upper: jax.Array


@functools.partial(jax.jit, static_argnames="cell")
def singular_bounds(
    cell: Elman, params: Params, xs: jax.Array, carry: Carry | None = None
) -> SingularBounds:
    """Bounds on the growth and the decay of dh_T/dh_t of h_t = activation(U h_tm1 + W x_t + b).

    Args:
      cell: an Elman network.
      params: its parameters.
      xs: inputs ``[T, *batch, D]``.
      carry: the carry before the first step; default ``cell.initial(batch)``.

    Returns:
      What U's singular values and the activation's slopes allow, per gap.

    Raises:
      TypeError: if ``cell`` is not an Elman network.
      ValueError: if the carry is not one of the cell's for this batch.
    """
    if not isinstance(cell, Elman):
        raise TypeError(f"The bounds are those of an Elman network, got {described(cell)}.")
    run = trajectory(cell, params, xs, carry)
    slope = jnp.abs(_slope(cell.activation, dense(params, run.z)("h", run.before.h)))
    matrix = params["recurrent_kernel"]["h"].astype(slope.dtype)
    values = jnp.linalg.svd(matrix, compute_uv=False)
    low = jnp.min(slope, axis=(0, -1), initial=jnp.inf)
    high = jnp.max(slope, axis=(0, -1), initial=0)
    gaps = jnp.arange(len(slope) + 1, dtype=slope.dtype).reshape(-1, *(1,) * low.ndim)

    def power(base: jax.Array) -> jax.Array:
        return jnp.where(gaps > 0, gaps * jnp.log10(base)[None], 0)  # 0^0 is 1

    return SingularBounds(
        values[-1], values[0], low, high, power(values[-1] * low), power(values[0] * high)
    )


def alignment(a: Any, b: Any) -> jax.Array:
    """The cosine of the angle between two gradients, trees of the same structure.

    Clipping by norm keeps it at 1 (the lecture); clipping by value does not.

    Args:
      a: a tree of arrays.
      b: another.

    Returns:
      A scalar in [-1, 1].
    """

    def dot(a: Any, b: Any) -> jax.Array:
        products = jax.tree.map(lambda x, y: jnp.sum(x * y), a, b)
        return functools.reduce(jnp.add, jax.tree.leaves(products))

    return dot(a, b) / jnp.sqrt(dot(a, a) * dot(b, b))
