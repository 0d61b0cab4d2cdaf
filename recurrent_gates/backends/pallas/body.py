"""A step's mathematics in the operations that Pallas' compilers know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import partial_eval

_CALLS = {"jit": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}


def in_kernel(body: Callable[..., Any], *, one_row: bool = False) -> Callable[..., Any]:
    """The same function of matrices and scalars, ready for a kernel.

    Neither Mosaic nor Triton knows all of ``jnp.cumsum``, which ordered gates are made of: it
    becomes a product with a triangle of ones. Nor does Triton multiply a mixed pair: a product
    in bfloat16 takes its cotangent in bfloat16, too. Calls are inlined, and what is not used
    (among it the tangents of masks, which have no type on a chip) is dropped.

    Args:
      body: the function.
      one_row: whether it is of one row in a GPU's kernel, where a product is a sum by hand.
    """

    def inlined(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(body, return_shape=True)(*args)
        jaxpr, uses = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
        leaves = [a for a, is_used in zip(jax.tree.leaves(args), uses, strict=True) if is_used]
        out = _evaluate(jaxpr, closed.consts, leaves, one_row)
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return inlined


def _evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], one_row: bool) -> list[Any]:
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def value_of(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        inputs = [value_of(atom) for atom in equation.invars]
        name, params = equation.primitive.name, equation.params
        if name == "cumsum":
            (x,), axis, reverse = inputs, params["axis"], params["reverse"]
            out = [_cumsum(x, axis, reverse, one_row)]
        elif name == "dot_general" and one_row:
            (a, b), dims = inputs, params["dimension_numbers"]
            out = [_row_product(a, b, dims, params["preferred_element_type"])]
        elif name == "dot_general":
            narrow = min((a.dtype for a in inputs), key=lambda dtype: dtype.itemsize)
            out = [equation.primitive.bind(*(a.astype(narrow) for a in inputs), **params)]
        elif name in _CALLS:
            callee = params[_CALLS[name]]
            out = _evaluate(callee.jaxpr, callee.consts, inputs, one_row)
        elif name == "cond":
            index, *operands = inputs
            branches = [_branch(b, one_row) for b in params["branches"]]
            out = jax.lax.switch(index, branches, *operands)
        else:
            out = equation.primitive.bind(*inputs, **params)
            out = out if equation.primitive.multiple_results else [out]
        values.update(zip(equation.outvars, out, strict=True))
    return [value_of(atom) for atom in jaxpr.outvars]


def _branch(closed: Any, one_row: bool) -> Callable[..., list[Any]]:
    return lambda *args: _evaluate(closed.jaxpr, closed.consts, args, one_row)


def _row_product(a: jax.Array, b: jax.Array, dimension_numbers: Any, sums: Any) -> jax.Array:
    """``lax.dot_general`` of a row and a matrix, of which a program's threads hold their elements.

    A tensor core wants 16 rows, and their products in float32 take more steps of one
    multiprocessor than those of one row on each of sixteen.
    """
    ((over_a,), (over_b,)), batch = dimension_numbers
    free = [] if a.ndim != 2 or b.ndim != 2 else [a.shape[1 - over_a], b.shape[1 - over_b]]
    if batch != ((), ()) or 1 not in free:
        raise ValueError(
            "A GPU's kernel of one row multiplies that row and a matrix, got shapes "
            f"{a.shape} and {b.shape}; use backend='fused'."
        )
    first = free[0] == 1
    row, matrix, over = (a, b, over_b) if first else (b, a, over_a)
    # A scan over one element: unlike an elementwise operation Triton does not compute it again in
    # the layout that the product wants, where each thread would hold many elements of the row.
    row = jax.lax.cumsum(row.astype(sums or row.dtype), axis=row.shape.index(1))
    row = row.reshape((-1, 1) if over == 0 else (1, -1))
    out = jnp.sum(row * matrix.astype(row.dtype), axis=over)
    return out.reshape((1, -1) if first else (-1, 1))


def _cumsum(x: jax.Array, axis: int, reverse: bool, one_row: bool) -> jax.Array:
    """``lax.cumsum`` of a matrix over its last axis, in full precision."""
    if x.ndim != 2 or axis != 1:
        raise NotImplementedError(f"A kernel sums over the last axis of a matrix, not {axis}.")
    shape = (x.shape[1],) * 2
    row, column = (jax.lax.broadcasted_iota(jnp.int32, shape, n) for n in (0, 1))
    ones = (row >= column if reverse else row <= column).astype(x.dtype)
    if one_row:
        return _row_product(x, ones, (((1,), (0,)), ((), ())), None)
    return jnp.matmul(x, ones, precision=jax.lax.Precision.HIGHEST)
