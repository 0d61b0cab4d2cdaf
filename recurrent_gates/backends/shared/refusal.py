"""What a backend refuses: derivatives that it does not have, gradients that are not linear."""

from __future__ import annotations

import functools
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
        noise_t, carry = jax.eval_shape(
            lambda noise, carry: (jax.tree.map(lambda leaf: leaf[0], noise), carry),
            noise,
            loop.carry,
        )

        def around(noise_t: Any, carry: Any, fn: Any = fn) -> Any:
            return fn.after(noise_t, carry, fn.before(noise_t, carry))

        if "custom_vjp_call" in str(jax.make_jaxpr(around)(noise_t, carry)):
            return f"{type(fn).__name__} has a gradient of its own, a custom_vjp."
    return None
