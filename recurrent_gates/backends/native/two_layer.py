"""Two-layer GATO: its increments by kernels, everything else as the backend ``fused`` has it.

All of r is known before the first increment is formed, so that the kernels
(``kernels/two_layer.cc``) see rows, without time. Each is an operation of two forms, see
``switch``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from recurrent_gates.backends import fused
from recurrent_gates.backends.native import library, switch
from recurrent_gates.backends.native.kernel import call, threads
from recurrent_gates.backends.shared import two_layer
from recurrent_gates.gato import GATO, TwoLayer
from recurrent_gates.scan import Loop, Segment, mark_residuals

NAME = "two_layer"  # in ``library.KERNELS``

NUMBERS = 8
"""How many of a unit and step a backward pass reads: of f two projections and two pre-activations,
r before and after the step, s, and the sum over the hidden units."""

_MOST_WEIGHTS = 3200  # k (D + 1) of a unit, in a core's cache; 32 hidden units have 99 inputs


def unsupported(loop: Loop) -> str | None:
    """Why a loop of a two-layer GATO in float32 is not served, in one sentence; None if it is."""
    cell = loop.settings.cell
    assert isinstance(cell, GATO) and isinstance(cell.g, TwoLayer)
    reason = fused.unsupported(loop)
    if reason is not None:
        return reason
    if not two_layer.serves(loop):
        return "kernels of a two-layer GATO are for one CPU device."
    if cell.g.hidden * (loop.xs.shape[-1] + 1) > _MOST_WEIGHTS:
        return (
            "kernels of a two-layer GATO are for few inputs: hidden units times one more than the "
            f"inputs must be at most {_MOST_WEIGHTS}."
        )
    return library.missing(NAME)


def segment(loop: Loop) -> Segment:
    """A stretch of time; same contract as ``scan_segment``."""
    return fused.summed_segment(loop, total)


@jax.custom_vjp
def total(
    x: jax.Array, r: jax.Array, first: jax.Array, on_r: jax.Array, out: jax.Array
) -> jax.Array:
    """sum_i out_i * relu(x first_i + on_r_i * r).

    x ``[N, D]``, r ``[N, J]``, first ``[k, D, J]``, on_r and out ``[k, J]`` -> ``[N, J]``.
    """
    return switch.run(_Forward(threads()), x, r, first, on_r, out)[0]


def _forward(*inputs: CustomVJPPrimal) -> tuple[jax.Array, Any]:
    values = [primal.value for primal in inputs]
    # The cotangent of x is a third of the work, and nobody asks for that of data.
    of_x = () if inputs[0].perturbed else None
    return mark_residuals(total(*values)), (values, of_x)


def _backward(saved: Any, d_total: Any) -> tuple[Any, ...]:
    values, of_x = saved
    if isinstance(d_total, SymbolicZero):
        return (None,) * len(values)
    cotangents = switch.run(_Backward(threads(), of_x is not None), *values, d_total)
    return (*([None] if of_x is None else []), *cotangents)


total.defvjp(_forward, _backward, symbolic_zeros=True)


@dataclasses.dataclass(frozen=True)
class _Forward:
    """``total``.

    Attributes:
      threads: of each device.
    """

    threads: int

    def native(self, *inputs: jax.Array) -> list[jax.Array]:
        return [*call(NAME, "forward", [inputs[1].shape], inputs, threads=self.threads)]

    def portable(self, *inputs: jax.Array) -> list[jax.Array]:
        return [two_layer.total(*inputs)]


@dataclasses.dataclass(frozen=True)
class _Backward:
    """(inputs of ``total``, cotangent of its value) -> cotangents of the inputs.

    Attributes:
      threads: of each device.
      of_x: whether that of x is asked for; if not, it is left out.
    """

    threads: int
    of_x: bool

    def native(self, *leaves: jax.Array) -> list[jax.Array]:
        shapes = [leaf.shape for leaf in leaves[not self.of_x : -1]]
        return [*call(NAME, "backward", shapes, leaves, threads=self.threads, of_x=int(self.of_x))]

    def portable(self, *leaves: jax.Array) -> list[jax.Array]:
        *inputs, d_total = leaves
        return [*jax.vjp(two_layer.total, *inputs)[1](d_total)][not self.of_x :]
