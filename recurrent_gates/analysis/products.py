"""Long products of matrices, block by block, with the powers of two outside."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Scaled(NamedTuple):
    """A block of a matrix, ``matrix * 2**exponent``: its largest entry is in [1/2, 1), or 0.

    Attributes:
      matrix: ``[..., rows, columns]``.
      exponent: int ``[...]``.
    """

    matrix: jax.Array
    exponent: jax.Array


_ZERO = -(2**24)  # the exponent of a block of zeros, below that of any other
_Blocks = tuple[tuple[Scaled, ...], ...]  # by field of the rows and field of the columns


def _scaled(matrix: jax.Array, exponent: jax.Array) -> Scaled:
    largest = jnp.max(jnp.abs(matrix), axis=(-2, -1))
    _, shift = jnp.frexp(largest)
    exponent = jnp.where(largest == 0, _ZERO, exponent + shift)
    return Scaled(jnp.ldexp(matrix, -shift[..., None, None]), exponent)


def _aligned(blocks: Sequence[Scaled]) -> tuple[list[jax.Array], jax.Array]:
    """The matrices of blocks on their largest exponent, and that exponent."""
    exponent = functools.reduce(jnp.maximum, [block.exponent for block in blocks])
    floor = -2 * jnp.finfo(blocks[0].matrix.dtype).maxexp  # nothing is left of what is lower

    def aligned(block: Scaled) -> jax.Array:
        shift = jnp.maximum(block.exponent - exponent, floor)
        return jnp.ldexp(block.matrix, shift[..., None, None])

    return [aligned(block) for block in blocks], exponent


def scaled_products(factors: jax.Array, widths: Sequence[int]) -> _Blocks:
    """Products of the last g factors, g = 0 ... T, by blocks of these widths, ``[T + 1, ...]``.

    Powers of two are taken out of each block by itself, so that nothing overflows, a block is not
    lost beside a larger one, and nothing is rounded by it.
    """
    edges = [0, *itertools.accumulate(widths)]
    spans = [slice(*pair) for pair in itertools.pairwise(edges)]

    def blocks(matrix: jax.Array) -> _Blocks:
        zeros = jnp.zeros(matrix.shape[:-2], jnp.int32)
        return tuple(tuple(_scaled(matrix[..., i, j], zeros) for j in spans) for i in spans)

    identity = jnp.broadcast_to(jnp.eye(factors.shape[-1], dtype=factors.dtype), factors.shape[1:])
    start = blocks(identity)

    def product(row: Sequence[Scaled], column: Sequence[Scaled]) -> Scaled:
        terms = [
            _scaled(jnp.matmul(a.matrix, b.matrix, precision="highest"), a.exponent + b.exponent)
            for a, b in zip(row, column, strict=True)
        ]
        matrices, exponent = _aligned(terms)
        return _scaled(functools.reduce(jnp.add, matrices), exponent)

    def body(state: _Blocks, factor: jax.Array) -> Any:
        columns = list(zip(*blocks(factor), strict=True))
        state = tuple(tuple(product(row, column) for column in columns) for row in state)
        return state, state

    _, products = jax.lax.scan(body, start, factors, reverse=True)
    return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b[::-1]]), start, products)


def joined(blocks: Sequence[Sequence[Scaled]]) -> Scaled:
    """Blocks as one matrix."""
    matrices, exponent = _aligned([block for row in blocks for block in row])
    count = len(blocks[0])
    rows = [
        jnp.concatenate(matrices[start : start + count], axis=-1)
        for start in range(0, len(matrices), count)
    ]
    return Scaled(jnp.concatenate(rows, axis=-2), exponent)


def log10_norm(block: Scaled) -> jax.Array:
    """log10 of the spectral norm of a block."""
    largest = jnp.linalg.svd(block.matrix, compute_uv=False)[..., 0]
    return jnp.log10(largest) + block.exponent.astype(largest.dtype) * jnp.log10(2.0).astype(
        largest.dtype
    )
