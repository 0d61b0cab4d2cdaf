"""What a backend refuses: derivatives that it does not have, gradients that are not linear."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from recurrent_gates.carry import Damp, Detach, Zoneout
from recurrent_gates.scan import Loop

_LINEAR = (Detach, Damp, Zoneout)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def refuse_derivative(sentence: str, tree: Any) -> Any:
    """A tree of arrays as it is; a derivative with respect to it is an error, which says why.

    Raises:
      ValueError: with the sentence, where it is differentiated.
    """
    del sentence
    return tree


@refuse_derivative.defjvp
def _refused(sentence: str, primals: tuple, tangents: tuple) -> Any:
    del primals, tangents
    raise ValueError(sentence)


def nonlinear_gradient(loop: Loop) -> str | None:
    """Why a loop's gradient cannot be taken in parts that are added, in one sentence, or None.

    What JAX differentiates itself is linear in the cotangent; a ``custom_vjp``, such as one that
    clips it, need not be.
    """
    for fn, noise in zip(loop.carry_fns, loop.stream.noise, strict=True):
        if type(fn) in _LINEAR:
            continue

        def around(noise_t: Any, carry: Any, fn: Any = fn) -> Any:
            return fn.after(noise_t, carry, fn.before(noise_t, carry))

        if _has_own_gradient(around, _at_one_time(noise), loop.carry):
            return f"{type(fn).__name__} has a gradient of its own, a custom_vjp."
    return None


def nonlinear_gate(loop: Loop) -> str | None:
    """The same of a gate of one's own."""
    cell = loop.settings.cell
    gate = getattr(cell, "gate", None)
    if gate is None or not gate.has_own_equations:
        return None
    z = _at_one_time(jax.eval_shape(cell.project, loop.params, loop.xs))
    if _has_own_gradient(functools.partial(cell.step, loop.params), loop.carry, z):
        return f"{type(gate).__name__} has a gradient of its own, a custom_vjp."
    return None


def _at_one_time(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), tree)


def _has_own_gradient(f: Callable[..., Any], *args: Any) -> bool:
    return "custom_vjp_call" in str(jax.make_jaxpr(f)(*args))
