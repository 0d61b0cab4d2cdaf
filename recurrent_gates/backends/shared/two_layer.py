"""GATO's two-layer increment for few inputs on a CPU, without its k * J pre-activations.

F is piecewise linear in what it reads. With p_i = first_i x + on_r_i r (x has a constant input, for
the bias), the mask m_i = [p_i > 0] and the cotangent d of F = sum_i out_i relu(p_i),

    dF/dr       = sum_i m_i out_i on_r_i          sums over the hidden units,
    dF/dx       = sum_i m_i out_i first_i
    d first_i   = out_i sum_n m_i d x             sums over the rows n,
    d on_r_i    = out_i sum_n m_i d r
    d out_i     = sum_n d relu(p_i).

Each p_i is formed where it is used, which for a few inputs costs less than to write it and to read
it back; sums are written out, since XLA's CPU compiler makes vector code of additions but not of
reductions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from recurrent_gates import pointwise
from recurrent_gates.backends.shared.rows import on_one_cpu
from recurrent_gates.base import Cell
from recurrent_gates.declared import Params
from recurrent_gates.gato import GATO, GATOState, TwoLayer
from recurrent_gates.scan import Loop
from recurrent_gates.shapes import lead

_FEW = 6  # inputs; each sum forms p again, and at 7 that costs what it saves
_SUMMED = 16  # rows in one sum; with 8 XLA's loop is not made of vector operations
_HIDDEN = 16  # hidden units in one sum; likewise, and what is compiled grows with them
_ROWS = 6 * _SUMMED  # rows at a time otherwise: what is formed of them stays in cache

Total = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def is_two_layer(cell: Cell) -> bool:
    """Whether the increment is what its name says; a subclass may have overridden it."""
    return type(cell) is GATO and type(cell.g) is TwoLayer and cell.s_update != "zero"


def serves(loop: Loop) -> bool:
    """Whether a cell's increments are faster by ``increment``: few inputs, on one CPU device."""
    cell, xs = loop.settings.cell, loop.xs
    if not is_two_layer(cell) or not on_one_cpu() or loop.symbolic:
        return False
    assert isinstance(loop.carry, GATOState)
    dtype = cell.dtype or jnp.result_type(xs, loop.params["g"]["kernel"]["s"])
    return xs.shape[-1] < _FEW and jnp.dtype(dtype) == loop.carry.r.dtype  # p is in one dtype


def increment(
    params: Params,
    r: jax.Array,
    x: jax.Array,
    dtype: Any,
    total: Total | None = None,
    zeros: int = 0,
) -> jax.Array:
    """``TwoLayer()(params, r, project(params, x))``: softplus(F(x, r)) (GATO, eq. 6).

    Args:
      params: of a ``TwoLayer``, k hidden units for each of J.
      r: ``[..., J]``, float32 or wider.
      x: inputs ``[..., D]``.
      dtype: dtype of the product with x; None: that of x and the kernel together.
      total: the sum over the hidden units; default: ``_total`` below.
      zeros: how many inputs that are zero ``total`` wants, beside the constant one.

    Returns:
      ``[..., J]`` in r's dtype.
    """
    kernel, out = params["kernel"]["s"], params["out_kernel"].astype(r.dtype)
    dtype = dtype or jnp.result_type(x, kernel)
    hidden, units = out.shape
    bias = params["bias"]["s"]
    if "recurrent_bias" in params:
        bias = bias + params["recurrent_bias"]["s"]
    # The bias is the weight of an input that is 1.
    x = jnp.concatenate([x.astype(dtype), jnp.ones((*x.shape[:-1], 1), dtype)], axis=-1)
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, zeros)])
    first = jnp.concatenate([kernel.astype(dtype), bias.astype(dtype)[None]])
    first = jnp.pad(first, ((0, zeros), (0, 0))).reshape(-1, hidden, units).swapaxes(0, 1)
    on_r = params["recurrent_kernel"]["s"].astype(r.dtype).reshape(hidden, units)
    rows = (x.reshape(-1, x.shape[-1]), r.reshape(-1, units))
    sums = (total or _total)(*rows, first, on_r, out).reshape(r.shape)
    sums = sums + lead(params["out_bias"].astype(sums.dtype), sums)
    return pointwise.softplus(sums)  # GATO eq. (6)


@jax.custom_vjp
def _total(
    x: jax.Array, r: jax.Array, first: jax.Array, on_r: jax.Array, out: jax.Array
) -> jax.Array:
    """sum_i out_i * relu(x first_i + on_r_i * r).

    x ``[N, D]``, r ``[N, J]``, first ``[k, D, J]``, on_r and out ``[k, J]`` -> ``[N, J]``.
    """
    groups = _groups(first, on_r, out)

    def by_row(rows: Any) -> jax.Array:
        x, r = rows

        def add(total: jax.Array, group: Any) -> tuple[jax.Array, None]:
            terms = [out_i * jax.nn.relu(p) for p, *_, out_i in _hidden(x, r, group)]
            return functools.reduce(jnp.add, terms, total), None

        return jax.lax.scan(add, jnp.zeros_like(r), groups)[0]

    # In a loop of its own, or XLA forms the whole sum again wherever it is used.
    return _by_row(by_row, (x, r))


def _groups(*weights: jax.Array) -> tuple[jax.Array, ...]:
    """The weights of hidden units ``[k, ...]`` in groups, the last filled up with zeros."""
    size = min(_HIDDEN, len(weights[0]))
    short = -len(weights[0]) % size
    return tuple(
        jnp.pad(w, [(0, short)] + [(0, 0)] * (w.ndim - 1)).reshape(-1, size, *w.shape[1:])
        for w in weights
    )


def _hidden(x: jax.Array, r: jax.Array, group: tuple[jax.Array, ...]) -> Iterator[Any]:
    """For each hidden unit its p of rows x ``[n, D]`` and r, and its weights, as rows."""
    columns = [x[:, d, None] for d in range(x.shape[1])]
    for first, on_r, out in zip(*group, strict=True):
        yield _pre_activation(columns, r, first[:, None], on_r[None]), first, on_r[None], out[None]


def _pre_activation(
    x: Sequence[jax.Array], r: jax.Array, first: jax.Array, on_r: jax.Array
) -> jax.Array:
    """p, from inputs and r that broadcast against ``first[d]`` and on_r."""
    return functools.reduce(jnp.add, [a * b for a, b in zip(x, first, strict=True)]) + on_r * r


def _forward(*inputs: jax.Array) -> tuple[jax.Array, Any]:
    return _total(*inputs), inputs


def _backward(inputs: Any, d_total: jax.Array) -> tuple[jax.Array, ...]:
    x, r, first, on_r, out = inputs
    by_feature = first.swapaxes(0, 1)  # [D, k, J]
    groups = _groups(first, on_r, out)

    def by_row(rows: Any) -> tuple[jax.Array, jax.Array]:
        """d_x and d_r of a few rows."""
        x, r, d = rows

        def add(sums: Any, group: Any) -> tuple[Any, None]:
            d_x, d_r = sums
            for p, first_i, on_r_i, out_i in _hidden(x, r, group):
                d_x = d_x + _on(p, d) @ (out_i * first_i).T
                d_r = d_r + _on(p, out_i * on_r_i)
            return (d_x, d_r), None

        zeros = (jnp.zeros(x.shape, r.dtype), jnp.zeros_like(r))
        (d_x, d_r), _ = jax.lax.scan(add, zeros, groups)
        return d_x, d * d_r

    def by_weight(sums: list[jax.Array], rows: Any) -> tuple[list[jax.Array], None]:
        """The masked sums of a few rows, added."""
        for x, r, d in zip(*rows, strict=True):
            p = _pre_activation(list(x), r[None], by_feature, on_r)
            values = [d * x_c for x_c in x] + [d * r]
            terms = [_on(p, value[None]) for value in values] + [d[None] * jax.nn.relu(p)]
            sums = [a + b for a, b in zip(sums, terms, strict=True)]
        return sums, None

    d_x, d_r = _by_row(by_row, (x, r, d_total))
    zeros = [jnp.zeros_like(out)] * (len(by_feature) + 2)
    sums, _ = jax.lax.scan(by_weight, zeros, _blocks((x, r, d_total), _SUMMED))
    d_first, d_on_r, d_out = out[:, None] * jnp.stack(sums[:-2], axis=1), out * sums[-2], sums[-1]
    return d_x.astype(x.dtype), d_r, d_first.astype(first.dtype), d_on_r, d_out


def _by_row(function: Callable[[Any], Any], arrays: tuple[jax.Array, ...]) -> Any:
    """A function of rows ``[n, ...]``, taken of few at a time."""
    count = len(arrays[0])
    values = jax.lax.map(function, _blocks(arrays, max(1, min(_ROWS, count))))
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:count], values)


def _blocks(arrays: tuple[jax.Array, ...], length: int) -> tuple[jax.Array, ...]:
    """Rows in blocks, the last filled up with zeros: they add nothing to a masked sum."""
    short = -len(arrays[0]) % length
    return tuple(jnp.pad(a, ((0, short), (0, 0))).reshape(-1, length, a.shape[-1]) for a in arrays)


def _on(p: jax.Array, value: jax.Array) -> jax.Array:
    """The value where a hidden unit is on, and where it is NaN."""
    return jnp.where(p <= 0, 0, value)


_total.defvjp(_forward, _backward)
