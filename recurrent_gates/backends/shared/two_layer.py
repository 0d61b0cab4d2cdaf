"""GATO's two-layer increment on a CPU, without keeping its k * J pre-activations.

F is piecewise linear in what it reads. With p_i = first_i x + on_r_i r (x has a constant input, for
the bias), the mask m_i = [p_i > 0] and the cotangent d of F = sum_i out_i relu(p_i),

    dF/dr       = sum_i m_i out_i on_r_i          sums over the hidden units,
    dF/dx       = sum_i m_i out_i first_i
    d first_i   = out_i sum_n m_i d x             sums over the rows n,
    d on_r_i    = out_i sum_n m_i d r
    d out_i     = sum_n d relu(p_i).

Of a few inputs each p_i is formed where it is used, which costs less than to write it and to read
it back (``_total``). Of more inputs one product forms those of some rows, and all sums read them
(``_total_by_products``). Sums are written out, since XLA's CPU compiler makes vector code of
additions but not of reductions.
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
from recurrent_gates.scan import Loop, mark_residuals
from recurrent_gates.shapes import lead

_FEW = 5  # inputs, with the constant one; each sum forms p again, and of 6 that costs 1.2 to 1.6
_SUMMED = 16  # rows in one sum; with 8 XLA's loop is not made of vector operations
_HIDDEN = 16  # hidden units in one sum; likewise, and what is compiled grows with them
_ROWS = 6 * _SUMMED  # rows at a time otherwise: what is formed of them stays in cache
_PRODUCTS = 2**20  # pre-activations that one product forms: 4 MB

Total = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def is_two_layer(cell: Cell) -> bool:
    """Whether the increment is what its name says; a subclass may have overridden it."""
    return type(cell) is GATO and type(cell.g) is TwoLayer and cell.s_update != "zero"


def serves(loop: Loop) -> bool:
    """Whether a cell's increments are faster by ``increment``: on one CPU device."""
    cell, xs = loop.settings.cell, loop.xs
    if not is_two_layer(cell) or not on_one_cpu() or loop.symbolic:
        return False
    assert isinstance(loop.carry, GATOState)
    dtype = cell.dtype or jnp.result_type(xs, loop.params["g"]["kernel"]["s"])
    return jnp.dtype(dtype) == loop.carry.r.dtype  # p is in one dtype


def increment(
    params: Params,
    r: jax.Array,
    x: jax.Array,
    dtype: Any,
    sum_up: Total | None = None,
    zeros: int = 0,
) -> jax.Array:
    """``TwoLayer()(params, r, project(params, x))``: softplus(F(x, r)) (GATO, eq. 6).

    Args:
      params: of a ``TwoLayer``, k hidden units for each of J.
      r: ``[..., J]``, float32 or wider.
      x: inputs ``[..., D]``.
      dtype: dtype of the product with x; None: that of x and the kernel together.
      sum_up: the sum over the hidden units; None: ``total``.
      zeros: how many inputs that are zero ``sum_up`` wants, beside the constant one.

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
    sums = (sum_up or total)(*rows, first, on_r, out).reshape(r.shape)
    sums = sums + lead(params["out_bias"].astype(sums.dtype), sums)
    return pointwise.softplus(sums)  # GATO eq. (6)


def total(
    x: jax.Array, r: jax.Array, first: jax.Array, on_r: jax.Array, out: jax.Array
) -> jax.Array:
    """As ``_total``, of few inputs and of many."""
    form = _total if x.shape[-1] <= _FEW else _total_by_products
    return form(x, r, first, on_r, out)


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
    padding = -len(weights[0]) % size
    return tuple(
        jnp.pad(w, [(0, padding)] + [(0, 0)] * (w.ndim - 1)).reshape(-1, size, *w.shape[1:])
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
    return mark_residuals(_total(*inputs)), inputs


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

        zeros = (jnp.zeros_like(x, r.dtype), jnp.zeros_like(r))
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


def _by_row(
    function: Callable[[Any], Any], arrays: tuple[jax.Array, ...], limit: int = _ROWS
) -> Any:
    """A function of rows ``[n, ...]``, taken of few at a time."""
    count = len(arrays[0])
    values = jax.lax.map(function, _blocks(arrays, max(1, min(limit, count))))
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:count], values)


def _blocks(arrays: tuple[jax.Array, ...], length: int) -> tuple[jax.Array, ...]:
    """Rows in blocks, the last filled up with zeros: they add nothing to a masked sum."""
    padding = -len(arrays[0]) % length
    return tuple(
        jnp.pad(a, ((0, padding), (0, 0))).reshape(-1, length, a.shape[-1]) for a in arrays
    )


def _on(p: jax.Array, value: jax.Array) -> jax.Array:
    """The value where a hidden unit is on, and where it is NaN."""
    return jnp.where(p <= 0, 0, value)


_total.defvjp(_forward, _backward)


# Of more inputs.


@jax.custom_vjp
def _total_by_products(
    x: jax.Array, r: jax.Array, first: jax.Array, on_r: jax.Array, out: jax.Array
) -> jax.Array:
    """As ``_total``."""
    groups = _groups(first, on_r, out)

    def by_row(rows: Any) -> jax.Array:
        x, r = rows

        def add(total: jax.Array, group: Any) -> tuple[jax.Array, None]:
            terms = [
                out_i[None] * jax.nn.relu(z_i + on_r_i[None] * r)
                for z_i, on_r_i, out_i in zip(_units(x, group[0]), *group[1:], strict=True)
            ]
            return functools.reduce(jnp.add, terms, total), None

        return jax.lax.scan(add, jnp.zeros_like(r), groups)[0]

    return _by_row(by_row, (x, r), _rows_of_products(groups, len(x)))


def _rows_of_products(groups: tuple[jax.Array, ...], count: int) -> int:
    """How many of the rows one product takes, a multiple of those in a sum."""
    limit = max(_SUMMED, _PRODUCTS // groups[2][0].size)
    tiles = -(-count // limit)
    return max(1, -(-count // (_SUMMED * max(1, tiles)))) * _SUMMED


def _product(x: jax.Array, first: jax.Array) -> jax.Array:
    """x first_i of rows ``[n, D]`` and a group's ``[g, D, J]``: ``[n, g * J]``."""
    by_feature = first.swapaxes(0, 1).reshape(x.shape[1], -1)
    return jax.lax.optimization_barrier(x @ by_feature)  # formed once for all that read it


def _units(x: jax.Array, first: jax.Array) -> list[jax.Array]:
    """The product for each hidden unit of a group, ``[n, J]``."""
    return jnp.split(_product(x, first), len(first), axis=1)


def _backward_by_products(inputs: Any, d_total: jax.Array) -> tuple[jax.Array, ...]:
    x, r, first, on_r, out = inputs
    groups = _groups(first, on_r, out)

    def by_tile(sums: Any, rows: Any) -> tuple[Any, tuple[jax.Array, jax.Array]]:
        """The masked sums of some rows, added, and their d_x and d_r."""
        x, r, d = rows

        def by_group(d_rows: Any, group: Any) -> tuple[Any, Any]:
            (first, on_r, out), (on_x_sum, on_r_sum, out_sum) = group
            d_x, d_r = d_rows
            z = _product(x, first)
            terms = [
                _on(z_i + on_r_i[None] * r, (out_i * on_r_i)[None])
                for z_i, on_r_i, out_i in zip(
                    jnp.split(z, len(out), axis=1), on_r, out, strict=True
                )
            ]
            z = z.reshape(len(x), *out.shape)
            masked = _on(z + on_r[None] * r[:, None], d[:, None]).reshape(len(x), -1)
            by_feature = (out[:, None] * first).swapaxes(0, 1).reshape(x.shape[1], -1)
            d_rows = d_x + masked @ by_feature.T, functools.reduce(jnp.add, terms, d_r)
            sums = _row_sums((on_r_sum, out_sum), (z, r, d), on_r)
            return d_rows, (on_x_sum + x.T @ masked, *sums)

        zeros = (jnp.zeros_like(x, r.dtype), jnp.zeros_like(r))
        (d_x, d_r), sums = jax.lax.scan(by_group, zeros, (groups, sums))
        return sums, (d_x, d * d_r)

    width = groups[2][0].size
    no_sums = jnp.zeros_like(groups[2])
    start = (jnp.zeros_like(r, shape=(len(no_sums), x.shape[1], width)), no_sums, no_sums)
    tiles = _blocks((x, r, d_total), _rows_of_products(groups, len(x)))
    (on_x, d_on_r, d_out), (d_x, d_r) = jax.lax.scan(by_tile, start, tiles)
    hidden, units = out.shape
    on_x = on_x.reshape(len(no_sums), x.shape[1], -1, units).swapaxes(1, 2)
    d_first, d_on_r, d_out = (a.reshape(-1, *a.shape[2:])[:hidden] for a in (on_x, d_on_r, d_out))
    d_x, d_r = (a.reshape(-1, a.shape[-1])[: len(x)] for a in (d_x, d_r))
    d_first = (out[:, None] * d_first).astype(first.dtype)
    return d_x.astype(x.dtype), d_r, d_first, out * d_on_r, d_out


def _row_sums(sums: Any, rows: tuple[jax.Array, ...], on_r: jax.Array) -> Any:
    """sum_n m_i d r and sum_n d relu(p_i) of rows (z, r, d), added, ``[g, J]`` each."""

    def add(sums: Any, rows: Any) -> tuple[Any, None]:
        on_r_sum, out_sum = sums
        for z, r, d in zip(*rows, strict=True):
            p = z + on_r * r[None]
            on_r_sum += _on(p, (d * r)[None])
            out_sum += d[None] * jax.nn.relu(p)
        return (on_r_sum, out_sum), None

    blocks = tuple(a.reshape(-1, _SUMMED, *a.shape[1:]) for a in rows)
    return jax.lax.scan(add, sums, blocks)[0]


def _forward_by_products(*inputs: jax.Array) -> tuple[jax.Array, Any]:
    return mark_residuals(_total_by_products(*inputs)), inputs


_total_by_products.defvjp(_forward_by_products, _backward_by_products)
