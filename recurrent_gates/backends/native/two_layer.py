"""Two-layer GATO: r of all steps, then all increments of s, by kernels.

r depends on nothing that the two layers make, so that it comes from the kernels of a one-layer
GATO, whose s nobody reads; where those do not serve, as the backend ``fused`` has it. The kernels
of the increments (``kernels/two_layer.cc``) see rows, without time. Each is an operation of two
forms, see ``switch``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from recurrent_gates.backends import fused
from recurrent_gates.backends.native import gato, library, switch
from recurrent_gates.backends.native.kernel import call, in_rows, scales, threads
from recurrent_gates.backends.shared import two_layer
from recurrent_gates.backends.shared.accumulation import feeding
from recurrent_gates.backends.shared.rows import projected
from recurrent_gates.gato import GATO, GATOState, OneLayer
from recurrent_gates.scan import Loop, Segment, mark_residuals

NAME = "two_layer"  # in ``library.KERNELS``

_MOST_INPUTS = 96  # of more, the weights of a block of units leave a core's cache


def unsupported(loop: Loop) -> str | None:
    """Why a loop of a two-layer GATO in float32 is not served, in one sentence; None if it is."""
    reason = fused.unsupported(loop)
    if reason is None and not two_layer.serves(loop):
        return "kernels of a two-layer GATO are for one CPU device."
    return reason or library.missing(NAME)


def segment(loop: Loop) -> Segment:
    """A stretch of time; same contract as ``scan_segment``."""
    sum_up = total if loop.xs.shape[-1] <= _MOST_INPUTS else two_layer.total
    one_layer = _one_layer(loop)
    if one_layer is None:
        return fused.summed_segment(loop, sum_up)
    cell = loop.settings.cell
    ys = in_rows(gato.segment, one_layer).ys
    r = ys[..., ys.shape[-1] // 2 :]
    looped = one_layer.carry._replace(r=r, s=None)
    last, carries = fused.accumulate(loop, None, looped, sum_up)
    z = jax.eval_shape(projected, loop)  # of which only the dtype is read
    ys = cell.emit(loop.params, carries, z)
    return Segment(last, ys, carries if loop.settings.keep_carries else None)


def _one_layer(loop: Loop) -> Loop | None:
    """A loop of a one-layer GATO that has the r of this one; None if it has no kernels."""
    cell, stream = loop.settings.cell, loop.stream
    assert isinstance(cell, GATO)
    one_layer = GATO(cell.features, f=cell.f, g=OneLayer(), parent=None)
    fed = feeding(loop)
    if not gato.has_kernels(one_layer) or library.missing(gato.NAME) is not None:
        return None
    if stream.valid is not None or stream.resets is not None:
        return None
    if not all(
        scales(fn, noise, "r") for fn, noise in zip(fed.carry_fns, fed.stream.noise, strict=True)
    ):
        return None
    zeros = jnp.zeros(cell.units, jnp.float32)
    on_x = jnp.zeros((loop.xs.shape[-1], cell.units), jnp.float32)
    slot = {"kernel": {"s": on_x}, "recurrent_kernel": {"s": zeros}, "bias": {"s": zeros}}
    start = GATOState(loop.carry.r, jnp.zeros_like(loop.carry.r))
    return fed.replace(
        settings=loop.settings._replace(cell=one_layer, keep_carries=False),
        params={"f": loop.params["f"], "g": slot},
        carry=start,
        reset_carry=start,
    )


@jax.custom_vjp
def total(
    x: jax.Array, r: jax.Array, first: jax.Array, on_r: jax.Array, out: jax.Array
) -> jax.Array:
    """sum_i out_i * relu(x first_i + on_r_i * r).

    x ``[N, D]``, r ``[N, J]``, first ``[k, D, J]``, on_r and out ``[k, J]`` -> ``[N, J]``.
    """
    return switch.run(_Forward(threads()), x, r, first, on_r, out)[0]


def _forward(*inputs: jax.Array) -> tuple[jax.Array, Any]:
    return mark_residuals(total(*inputs)), inputs


def _backward(inputs: tuple[jax.Array, ...], d_total: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(switch.run(_Backward(threads()), *inputs, d_total))


total.defvjp(_forward, _backward)


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
    """

    threads: int

    def native(self, *leaves: jax.Array) -> list[jax.Array]:
        shapes = [leaf.shape for leaf in leaves[:-1]]
        return [*call(NAME, "backward", shapes, leaves, threads=self.threads)]

    def portable(self, *leaves: jax.Array) -> list[jax.Array]:
        *inputs, d_total = leaves
        return [*jax.vjp(two_layer.total, *inputs)[1](d_total)]
