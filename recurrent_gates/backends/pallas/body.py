"""A step's mathematics in the operations that Pallas' compilers know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import partial_eval

_CALLS = {"jit": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}


def in_kernel(body: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of matrices and scalars, ready for a kernel.

    Neither Mosaic nor Triton knows all of ``jnp.cumsum``, which ordered gates are made of: it
    becomes a product with a triangle of ones. Nor does Triton multiply a mixed pair: a product
    in bfloat16 takes its cotangent in bfloat16, too. Calls are inlined, and what is not used
    (among it the tangents of masks, which have no type on a chip) is dropped.
    """

    def ready(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(body, return_shape=True)(*args)
        jaxpr, used = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
        leaves = [a for a, use in zip(jax.tree.leaves(args), used, strict=True) if use]
        out = _evaluate(jaxpr, closed.consts, leaves)
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return ready


def _evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        name, params = equation.primitive.name, equation.params
        if name == "cumsum":
            out = [_cumsum(*inputs, axis=params["axis"], reverse=params["reverse"])]
        elif name == "dot_general":
            narrow = min((a.dtype for a in inputs), key=lambda dtype: dtype.itemsize)
            out = [equation.primitive.bind(*(a.astype(narrow) for a in inputs), **params)]
        elif name in _CALLS:
            called = params[_CALLS[name]]
            out = _evaluate(called.jaxpr, called.consts, inputs)
        elif name == "cond":
            index, *operands = inputs
            out = jax.lax.switch(index, [_branch(b) for b in params["branches"]], *operands)
        else:
            out = equation.primitive.bind(*inputs, **params)
            out = out if equation.primitive.multiple_results else [out]
        values.update(zip(equation.outvars, out, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _branch(closed: Any) -> Callable[..., list[Any]]:
    return lambda *args: _evaluate(closed.jaxpr, closed.consts, args)


def _cumsum(x: jax.Array, *, axis: int, reverse: bool) -> jax.Array:
    """``lax.cumsum`` of a matrix over its last axis, in full precision."""
    if x.ndim != 2 or axis != 1:
        raise NotImplementedError(f"A kernel sums over the last axis of a matrix, not {axis}.")
    shape = (x.shape[1],) * 2
    from_, to = (jax.lax.broadcasted_iota(jnp.int32, shape, n) for n in (0, 1))
    ones = (from_ >= to if reverse else from_ <= to).astype(x.dtype)
    return jnp.matmul(x, ones, precision=jax.lax.Precision.HIGHEST)
