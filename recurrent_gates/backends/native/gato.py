"""One-layer GATO as kernels: both passes, and the gradients of weights and inputs.

The kernels (``kernels/gato.cc``) project the inputs themselves and emit cos(s) beside r. What is
kept are s of all steps and the pre-activations, which the backward pass overwrites with their
cotangents; r of all steps is read from the outputs. Each kernel is an operation of two forms, see
``switch``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from recurrent_gates.backends import fused
from recurrent_gates.backends.native import switch
from recurrent_gates.backends.native.kernel import (
    InputCotangents,
    Kernel,
    gradient_scale,
    loop_of_cotangents,
    scaled_steps,
    threads,
)
from recurrent_gates.backends.shared.accumulation import feeding
from recurrent_gates.backends.shared.products import product_loop, residuals
from recurrent_gates.backends.shared.rows import projected
from recurrent_gates.base import Cell
from recurrent_gates.declared import Params, Weights
from recurrent_gates.gato import GATO, GatedDecay, GATOState, OneLayer
from recurrent_gates.scan import Loop, Segment
from recurrent_gates.shapes import lead, shifted

NAME = "gato"  # in ``library.KERNELS``

SLOTS = (("f", "gate"), ("f", "candidate"), ("g", "s"))
"""The map and the slot of each pre-activation, in the order of the kernels."""


def has_kernels(cell: Cell) -> bool:
    """Whether a cell is what its kernels compute."""
    return (
        type(cell) is GATO
        and type(cell.f) is GatedDecay
        and cell.f.gate is None
        and type(cell.g) is OneLayer
        and cell.gamma is jnp.cos
        and cell.s_update == "accumulate"
        and cell.period is not None
        and cell.period <= 2 * math.pi
    )


def segment(loop: Loop) -> Segment:
    """A stretch of time of a loop with one axis for the batch."""
    cell = _cell(loop)
    last, ys, ss = _recurrence(loop)
    carries = None if ss is None else GATOState(ys[..., cell.units :], ss)
    return Segment(last, ys[..., : cell.units] if cell.emit_s_only else ys, carries)


def _cell(loop: Loop) -> GATO:
    cell = loop.settings.cell
    assert isinstance(cell, GATO)
    return cell


def _by_slot(params: Params, role: str) -> list[jax.Array]:
    return [params[map_][role][slot] for map_, slot in SLOTS]


def _biases(params: Params) -> list[jax.Array]:
    """What no inputs make of each slot, a list of ``[J]``."""

    def bias(map_: str, slot: str) -> jax.Array:
        recurrent_biases = params[map_].get("recurrent_bias", {})
        first: jax.Array = params[map_]["bias"][slot]
        return first + recurrent_biases[slot] if slot in recurrent_biases else first

    return [bias(*names) for names in SLOTS]


def _numbers(cell: GATO) -> np.ndarray:
    """Lambda, the period that s is kept in, and what float32 leaves of it."""
    assert isinstance(cell.f, GatedDecay)
    assert cell.period is not None
    period = cell.period
    return np.array([cell.f.rate, period, period - float(np.float32(period))], np.float32)


# ---------------------------------------------------------------------------------------
# The recurrence and its derivative
# ---------------------------------------------------------------------------------------


@jax.custom_vjp
def _recurrence(loop: Loop) -> tuple[GATOState, jax.Array, jax.Array | None]:
    """The last carry, [cos(s), r] of all steps, and s of all steps if carries are asked for."""
    return _result(loop, Forward.of(loop, keep=False))


def _result(loop: Loop, out: Outputs) -> tuple[GATOState, jax.Array, jax.Array | None]:
    index = 0 if loop.settings.reverse else -1
    last = GATOState(out.ys[index, :, _cell(loop).units :], out.ss[index])
    return last, out.ys, out.ss if loop.settings.keep_carries else None


def _forward(loop: Loop) -> tuple[Any, Any]:
    out = Forward.of(loop, keep=True)
    return _result(loop, out), (loop, out)


def _backward(saved: tuple[Loop, Outputs], cotangents: tuple) -> tuple[Loop]:
    loop, out = saved
    params = loop.params
    d = Backward.of(loop, out, *cotangents)
    gradients = WeightGradients.of(loop, d)
    d_xs = GATOInputCotangents.of(_cell(loop), d.pre, _by_slot(params, "kernel"))

    def paired(params: Params, xs: jax.Array, carry: GATOState) -> jax.Array:
        """The linear function whose gradient is asked for, also where a shard_map adds it up."""
        pairs = [(xs, d_xs), *zip(_biases(params), gradients.biases, strict=True)]
        pairs += zip(_by_slot(params, "recurrent_kernel"), d.weights, strict=True)
        pairs += zip(_by_slot(params, "kernel"), gradients.kernels, strict=True)
        pairs += zip(carry, d.carry, strict=True)
        return jnp.sum(jnp.stack([jnp.sum(a * b) for a, b in pairs]))

    d_params, d_xs, d_carry = jax.grad(paired, (0, 1, 2))(params, loop.xs, loop.carry)
    return loop_of_cotangents(loop, d_params, d_xs, d_carry)


_recurrence.defvjp(_forward, _backward)


# ---------------------------------------------------------------------------------------
# The kernels as operations
# ---------------------------------------------------------------------------------------


class Outputs(NamedTuple):
    """What a forward pass makes.

    Attributes:
      ys: cos(s) and r of all steps side by side, ``[T, B, 2J]``.
      ss: s of all steps, or only of the last, ``[1, B, J]``.
      pre: pre-activations by slot, side by side, ``[T, B, slots * J]``, or None.
    """

    ys: jax.Array
    ss: jax.Array
    pre: jax.Array | None = None


class Cotangents(NamedTuple):
    """What a backward pass makes: of pre-activations, of the weights on r by slot, of the carry."""

    pre: jax.Array
    weights: list[jax.Array]
    carry: GATOState


class Gradients(NamedTuple):
    """Of kernels and biases, by slot."""

    kernels: list[jax.Array]
    biases: list[jax.Array]


class _GATO(Kernel):
    """A kernel of GATO."""

    @property
    def name(self) -> str:
        return NAME

    @property
    def field(self) -> str:
        return "r"

    @property
    def units(self) -> int:
        assert isinstance(self.cell, GATO)
        return self.cell.units

    @property
    def numbers(self) -> np.ndarray:
        assert isinstance(self.cell, GATO)
        return _numbers(self.cell)


@dataclasses.dataclass(frozen=True)
class Forward(_GATO):
    """(params, xs, carry, scale) -> ``Outputs``, flattened.

    No output depends on the scale, but their derivatives do.

    Attributes:
      keep: whether a backward pass follows.
      all_ss: whether s of all steps is asked for.
    """

    keep: bool
    all_ss: bool

    @staticmethod
    def of(loop: Loop, *, keep: bool) -> Outputs:
        leaves, tree = jax.tree.flatten((loop.params, loop.xs, loop.carry, gradient_scale(loop)))
        settings = loop.settings
        all_ss = keep or settings.keep_carries
        operation = Forward(settings.cell, tree, settings.reverse, threads(), keep, all_ss)
        return Outputs(*switch.run(operation, *leaves))

    def native(self, *leaves: jax.Array) -> list[jax.Array]:
        params, xs, carry, _ = jax.tree.unflatten(self.tree, leaves)
        operands = [jnp.asarray(self.numbers), xs, *_by_slot(params, "kernel"), *_biases(params)]
        operands += [*_by_slot(params, "recurrent_kernel"), carry.r, carry.s]
        (steps, rows, _), units, count = xs.shape, self.units, len(SLOTS)
        shapes: list[tuple[int, ...]] = [(steps, rows, 2 * units)]
        shapes.append((steps if self.all_ss else 1, rows, units))
        shapes += [(steps, rows, count * units)] * self.keep
        return [*self._call("forward", shapes, operands, keep=self.keep)]

    def portable(self, *leaves: jax.Array) -> list[jax.Array]:
        params, xs, carry, scale = jax.tree.unflatten(self.tree, leaves)
        loop = self._loop(params, xs, carry, scale)
        cell, z = self.cell, projected(loop)
        _, looped, pre = fused.run(product_loop(feeding(loop), z))
        last, carries = fused.accumulate(loop, z, looped)
        out = [cell.emit(loop.params, carries, z), carries.s if self.all_ss else last.s[None]]
        if isinstance(cell, GATO) and cell.emit_s_only:
            out[0] = jnp.concatenate([out[0], carries.r], axis=-1)
        if self.keep:
            previous = scaled_steps(shifted(loop.carry, carries, self.reverse).r, scale)
            on_r = loop.params["g"]["recurrent_kernel"]["s"]
            of_s = z["g"]["s"] + lead(on_r, previous) * previous
            out.append(jnp.concatenate([pre["gate"], pre["candidate"], of_s], axis=-1))
        return out


@dataclasses.dataclass(frozen=True)
class Backward(_GATO):
    """(weights on r by slot, scale, initial carry, ys, ss, pre, cotangents) -> ``Cotangents``.

    Attributes:
      all_ss: whether s of all steps has a cotangent.
    """

    all_ss: bool

    @staticmethod
    def of(
        loop: Loop, out: Outputs, d_last: GATOState, d_ys: jax.Array, d_ss: jax.Array | None
    ) -> Cotangents:
        weights = _by_slot(loop.params, "recurrent_kernel")
        arguments = weights, gradient_scale(loop), loop.carry, out, d_last, d_ys, d_ss
        leaves, tree = jax.tree.flatten(arguments)
        settings = loop.settings
        operation = Backward(settings.cell, tree, settings.reverse, threads(), d_ss is not None)
        d_pre, *d_weights, d_r, d_s = switch.run(operation, *leaves)
        return Cotangents(d_pre, d_weights, GATOState(d_r, d_s))

    def native(self, *leaves: jax.Array) -> list[jax.Array]:
        weights, scale, carry, out, d_last, d_ys, d_ss = jax.tree.unflatten(self.tree, leaves)
        operands = [jnp.asarray(self.numbers), out.pre, *weights]
        operands += [] if scale is None else [scale]
        operands += [carry.r, out.ys, out.ss]
        operands += [d_last.r, d_last.s, d_ys, *([d_ss] if self.all_ss else [])]
        shapes = [out.pre.shape, *(w.shape for w in weights), carry.r.shape, carry.s.shape]
        attributes = {"keep": self.all_ss, "scaled": scale is not None}
        return [*self._call("backward", shapes, operands, {1: 0}, **attributes)]

    def portable(self, *leaves: jax.Array) -> list[jax.Array]:
        weights, scale, carry, out, d_last, d_ys, d_ss = jax.tree.unflatten(self.tree, leaves)
        units, reverse = self.units, self.reverse
        gate, candidate, of_s = jnp.split(out.pre, len(SLOTS), axis=-1)
        d_cos, d_rs = jnp.split(d_ys, [units], axis=-1)
        # s feeds nothing back: its cotangent at a step is the sum of those of all later ones.
        d_totals = -jnp.sin(out.ss) * d_cos + (0 if d_ss is None else d_ss)
        d_totals = d_last.s[None] + jax.lax.cumsum(d_totals, axis=0, reverse=not reverse)
        d_of_s = d_totals * jax.nn.sigmoid(of_s)
        # What it reads of r is that of the step before.
        d_read = d_of_s * lead(weights[2], d_of_s)
        if scale is not None:
            scale_t = scale[:, None, None]
            d_read = jnp.where(scale_t == 0, 0, scale_t * d_read)
        zeros = jnp.zeros_like(d_read[:1])
        if reverse:
            d_rs, d_first = d_rs + jnp.concatenate([zeros, d_read[:-1]]), d_read[-1]
        else:
            d_rs, d_first = d_rs + jnp.concatenate([d_read[1:], zeros]), d_read[0]
        vectors = {"gate": weights[0], "candidate": weights[1]}
        pre = {"gate": gate, "candidate": candidate}
        loop = feeding(self._loop(Weights({}, vectors, {}), pre, carry, scale))
        rs = loop.carry._replace(r=out.ys[..., units:])
        cotangents = d_last._replace(s=None), loop.carry._replace(r=d_rs)
        d_carry, _, d_pre, _ = fused.run_back(residuals(loop, rs, pre), loop.params, cotangents)
        sides = [d_pre["gate"], d_pre["candidate"], d_of_s]
        previous = scaled_steps(shifted(carry.r, rs.r, reverse), scale)
        d_weights = [jnp.sum(d * previous, (0, 1)) for d in sides]
        d_s = d_totals[-1 if reverse else 0]
        return [jnp.concatenate(sides, axis=-1), *d_weights, d_carry.r + d_first, d_s]


@dataclasses.dataclass(frozen=True)
class GATOInputCotangents(_GATO, InputCotangents):
    """The cotangents of GATO's inputs."""


@dataclasses.dataclass(frozen=True)
class WeightGradients(_GATO):
    """(xs, cotangents of the pre-activations) -> ``Gradients``, flattened."""

    @staticmethod
    def of(loop: Loop, d: Cotangents) -> Gradients:
        leaves, tree = jax.tree.flatten((loop.xs, d.pre))
        settings = loop.settings
        operation = WeightGradients(settings.cell, tree, settings.reverse, threads())
        arrays, count = switch.run(operation, *leaves), len(SLOTS)
        return Gradients(arrays[:count], arrays[count:])

    def native(self, *leaves: jax.Array) -> list[jax.Array]:
        inputs, units, count = leaves[0].shape[-1], self.units, len(SLOTS)
        shapes: list[tuple[int, ...]] = [(inputs, units)] * count
        shapes += [(units,)] * count
        return [*self._call("gradients", shapes, leaves)]

    def portable(self, *leaves: jax.Array) -> list[jax.Array]:
        xs, d_pre = leaves
        sides = jnp.split(d_pre, len(SLOTS), axis=-1)
        kernels = [jnp.einsum("tbi,tbo->io", xs, d) for d in sides]
        return [*kernels, *(d.sum((0, 1)) for d in sides)]
