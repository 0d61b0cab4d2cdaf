"""Gated recurrences as kernels: both passes, and the gradients of weights and inputs.

The kernels (``kernels/gated.cc``) do what ``fused`` does, with the same numbers kept between the
passes, but as one call each, on all cores that a device has. They project the inputs themselves: in
the loop, so that their share of the pre-activations never goes through memory, or before it where
inputs are many and rows few.

What is kept are h (and c) of all steps and the pre-activations, which the backward pass overwrites
with their cotangents. Each kernel is an operation of two forms, see ``switch``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from recurrent_gates.backends import fused
from recurrent_gates.backends.native import switch
from recurrent_gates.backends.native.kernel import (
    InputCotangents,
    Kernel,
    Masks,
    gradient_scale,
    loop_of_cotangents,
    scaled_steps,
    threads,
)
from recurrent_gates.backends.shared.products import product_loop, residuals
from recurrent_gates.backends.shared.rows import projected
from recurrent_gates.base import Cell, HiddenState, SlotCell
from recurrent_gates.cells import GRU, JANET, LSTM, LSTMState
from recurrent_gates.declared import Carry, Weights
from recurrent_gates.scan import Loop, Segment, with_zeros
from recurrent_gates.shapes import shifted


class Kernels(NamedTuple):
    """Which kernels run a cell.

    Attributes:
      name: their name in ``library.KERNELS``.
      slots: the cell's slots, in the order of the kernels.
      apart: whether the input's part of the last slot stays apart (a reset after the product).
    """

    name: str
    slots: tuple[str, ...]
    apart: bool


def kernels(cell: Cell) -> Kernels | None:
    """The kernels of a cell; None if there are none."""
    if type(cell) not in (LSTM, GRU, JANET):
        return None
    assert isinstance(cell, (LSTM, GRU))
    gate = cell.gate if isinstance(cell, LSTM) else cell.gate.tie()
    if cell.heads > 1 or cell.activation is not jnp.tanh or gate.has_own_equations:
        return None
    if gate.activation != "sigmoid" or gate.master or gate.refine_input:
        return None
    refined = ("r",) if gate.refine else ()
    suffix = "_refined" if refined else ""
    if isinstance(cell, LSTM):
        if cell.output_activation is not jnp.tanh or not cell.forget_gate:
            return None
        if gate.tied != gate.refine:  # i is free, or 1 - g
            return None
        return Kernels(f"lstm{suffix}", ("f", *(refined or ("i",)), "o", "u"), False)
    if cell.reset == "before":
        return None
    reset = ("reset",) if cell.reset else ()
    name = "gru" if reset else "janet"
    return Kernels(f"{name}{suffix}", ("f", *refined, *reset, "u"), bool(reset))


def segment(loop: Loop) -> Segment:
    """A stretch of time of a loop with one axis for the batch."""
    if loop.stream.resets is not None:
        # As the carry, it differs between the devices of a shard_map, and so does its gradient.
        reset_carry = jax.tree.map(
            lambda x, like: jnp.where(False, like, x), loop.reset_carry, loop.carry
        )
        loop = loop.replace(reset_carry=reset_carry)
    last, hs, cs = _recurrence(loop)
    ys = with_zeros(loop.stream.valid, hs)
    return Segment(last, ys, _carry(hs, cs) if loop.settings.keep_carries else None)


def _carry(h: jax.Array, c: jax.Array | None) -> Carry:
    return HiddenState(h) if c is None else LSTMState(c, h)


# ---------------------------------------------------------------------------------------
# The recurrence and its derivative
# ---------------------------------------------------------------------------------------


@jax.custom_vjp
def _recurrence(loop: Loop) -> tuple[Carry, jax.Array, jax.Array | None]:
    """The last carry, h of all steps, and c of all steps if carries are asked for."""
    out = Forward.of(loop, keep=False)
    return _last(loop, out), out.hs, out.cs if loop.settings.keep_carries else None


def _last(loop: Loop, out: Outputs) -> Carry:
    index = 0 if loop.settings.reverse else -1
    return _carry(out.hs[index], None if out.cs is None else out.cs[index])


def _forward(loop: Loop) -> tuple[tuple[Carry, jax.Array, jax.Array | None], Any]:
    out = Forward.of(loop, keep=True)
    result = _last(loop, out), out.hs, out.cs if loop.settings.keep_carries else None
    return result, (loop, out)


def _backward(saved: tuple[Loop, Outputs], cotangents: tuple) -> tuple[Loop]:
    loop, out = saved
    d_last, d_hs, d_cs = cotangents
    cell, params = loop.settings.cell, loop.params
    assert isinstance(cell, SlotCell)
    slots = _kernels_of(loop).slots
    d = Backward.of(loop, out, d_last, d_hs, d_cs)
    gradients = WeightGradients.of(loop, out, d)
    d_xs = GatedInputCotangents.of(cell, d.z, [params["kernel"][slot] for slot in slots])

    def paired(params: Any, xs: jax.Array, carry: Carry, reset_carry: Carry) -> jax.Array:
        """The linear function whose gradient is asked for, also where a shard_map adds it up."""
        pairs = [(xs, d_xs)]
        for terms, d_bias in zip(_bias_parts(cell, slots, params), gradients.biases, strict=True):
            pairs += [(term, d_bias) for term in terms]
        for slot, d_kernel, d_weight in zip(
            slots, gradients.kernels, gradients.weights, strict=True
        ):
            pairs.append((params["kernel"][slot], d_kernel))
            pairs.append((params["recurrent_kernel"][slot], d_weight))
        if gradients.own_bias is not None and slots[-1] in params.get("recurrent_bias", {}):
            pairs.append((params["recurrent_bias"][slots[-1]], gradients.own_bias))
        pairs += zip(jax.tree.leaves(carry), jax.tree.leaves(d.carry), strict=True)
        if d.reset_carry is not None:
            leaves = jax.tree.leaves(reset_carry), jax.tree.leaves(d.reset_carry)
            pairs += zip(*leaves, strict=True)
        return jnp.sum(jnp.stack([jnp.sum(a * b) for a, b in pairs]))

    arguments = params, loop.xs, loop.carry, loop.reset_carry
    d_params, d_xs, d_carry, d_reset = jax.grad(paired, (0, 1, 2, 3))(*arguments)
    return loop_of_cotangents(loop, d_params, d_xs, d_carry, d_reset)


_recurrence.defvjp(_forward, _backward)


def _kernels_of(loop: Loop) -> Kernels:
    cell_kernels = kernels(loop.settings.cell)
    assert cell_kernels is not None
    return cell_kernels


def _bias_parts(cell: SlotCell, slots: Sequence[str], params: Any) -> list[list[jax.Array]]:
    """What no inputs make of each slot: one to three arrays for ``[F]``, which are to be added up.

    A bias that stays apart is none of them.
    """
    gate = cell._gate
    biases = params.get("recurrent_bias", {})
    offsets = gate.offsets(params.get("gate", {})) if gate else {}

    def terms(slot: str) -> list[jax.Array]:
        second = [biases[slot]] if slot in biases and slot not in cell.separate else []
        return [params["bias"][slot], *second, *([offsets[slot]] if slot in offsets else [])]

    return [terms(slot) for slot in slots]


# ---------------------------------------------------------------------------------------
# The kernels as operations
# ---------------------------------------------------------------------------------------


class Outputs(NamedTuple):
    """What a forward pass makes.

    Attributes:
      hs: h of all steps, ``[T, B, F]``.
      cs: c of all steps, or only the last, ``[1, B, F]``; None where the cell has none.
      z: pre-activations by slot, side by side, ``[T, B, slots * F]``, or None.
      own: U h_tm1 + b of the last slot, where its input stays apart; z then has the input alone.
    """

    hs: jax.Array
    cs: jax.Array | None
    z: jax.Array | None = None
    own: jax.Array | None = None


class Cotangents(NamedTuple):
    """What a backward pass makes: the cotangents of ``Outputs``' z and own, and of the carries.

    That of the carry which a reset takes is None where there are no resets.
    """

    z: jax.Array
    own: jax.Array | None
    carry: Carry
    reset_carry: Carry | None


class Gradients(NamedTuple):
    """Of kernels, recurrent kernels and biases by slot, and of the own bias."""

    kernels: list[jax.Array]
    weights: list[jax.Array]
    biases: list[jax.Array]
    own_bias: jax.Array | None


@dataclasses.dataclass(frozen=True)
class _Gated(Kernel):
    """A kernel of a gated cell."""

    @property
    def kernels(self) -> Kernels:
        cell_kernels = kernels(self.cell)
        assert cell_kernels is not None
        return cell_kernels

    @property
    def name(self) -> str:
        return self.kernels.name

    @property
    def field(self) -> str:
        return "h"

    @property
    def has_c(self) -> bool:
        return isinstance(self.cell, LSTM)


@dataclasses.dataclass(frozen=True)
class Forward(_Gated):
    """(params, xs, carry, scale, masks) -> ``Outputs``, flattened.

    No output depends on the scale, but their derivatives do.

    Attributes:
      keep: whether a backward pass follows.
      all_cs: whether c of all steps is asked for.
    """

    keep: bool
    all_cs: bool

    @staticmethod
    def of(loop: Loop, *, keep: bool) -> Outputs:
        arguments = loop.params, loop.xs, loop.carry, gradient_scale(loop), Masks.of(loop)
        leaves, tree = jax.tree.flatten(arguments)
        settings = loop.settings
        all_cs = keep or settings.keep_carries
        operation = Forward(settings.cell, tree, settings.reverse, threads(), keep, all_cs)
        return operation._outputs(switch.run(operation, *leaves))

    def _outputs(self, arrays: Sequence[jax.Array]) -> Outputs:
        outputs = list(arrays)
        hs = outputs.pop(0)
        cs = outputs.pop(0) if self.has_c else None
        return Outputs(hs, cs, *outputs)

    def native(self, *leaves: jax.Array) -> list[jax.Array]:
        params, xs, carry, _, masks = jax.tree.unflatten(self.tree, leaves)
        assert isinstance(self.cell, SlotCell)
        _, slots, apart = self.kernels
        steps, rows, _ = xs.shape
        features = carry.h.shape[-1]
        operands = [xs, *(params["kernel"][slot] for slot in slots)]
        biases = _bias_parts(self.cell, slots, params)
        operands += (jnp.broadcast_to(term, (features,)) for term in itertools.chain(*biases))
        if apart:
            recurrent_biases = params.get("recurrent_bias", {})
            operands.append(recurrent_biases.get(slots[-1], jnp.zeros((features,), jnp.float32)))
        operands += [params["recurrent_kernel"][slot] for slot in slots]
        operands += [carry.c] if self.has_c else []
        operands += [carry.h, *masks.flags, *jax.tree.leaves(masks.reset_carry)]
        state = steps, rows, features
        shapes: list[tuple[int, ...]] = []
        if self.keep:
            shapes = [(steps, rows, len(slots) * features), *[state] * apart]
        residual_count = len(shapes)
        shapes.append(state)
        if self.has_c:
            shapes.append(state if self.all_cs else (1, rows, features))
        counts = sum(len(terms) << 2 * n for n, terms in enumerate(biases))  # two bits a slot
        attributes = {"keep": self.keep, "masks": masks.kind, "bias_parts": counts}
        out = self._call("forward", shapes, operands, **attributes)
        return [*out[residual_count:], *out[:residual_count]]

    def portable(self, *leaves: jax.Array) -> list[jax.Array]:
        loop = self._loop(*jax.tree.unflatten(self.tree, leaves))
        inputs = product_loop(loop, projected(loop))
        last, carries, pre = fused.run(inputs)
        _, slots, apart = self.kernels
        out = [carries.h]
        if self.has_c:
            out.append(carries.c if self.all_cs else last.c[None])
        if self.keep:
            last_slot = inputs.xs[f"{slots[-1]}_input"] if apart else pre[slots[-1]]
            sides = [*(pre[slot] for slot in slots[:-1]), last_slot]
            out += [jnp.concatenate(sides, axis=-1), *[pre[slots[-1]]] * apart]
        return out


@dataclasses.dataclass(frozen=True)
class Backward(_Gated):
    """(weights by slot, scale, initial carry, ``Outputs``, cotangents, masks) -> ``Cotangents``.

    Attributes:
      all_cs: whether c of all steps has a cotangent.
    """

    all_cs: bool

    @staticmethod
    def of(
        loop: Loop, out: Outputs, d_last: Carry, d_hs: jax.Array, d_cs: jax.Array | None
    ) -> Cotangents:
        weights = {slot: loop.params["recurrent_kernel"][slot] for slot in _kernels_of(loop).slots}
        scale, masks = gradient_scale(loop), Masks.of(loop)
        arguments = weights, scale, loop.carry, out, (d_last, d_hs, d_cs), masks
        leaves, tree = jax.tree.flatten(arguments)
        cell, reverse = loop.settings.cell, loop.settings.reverse
        operation = Backward(cell, tree, reverse, threads(), d_cs is not None)
        arrays = switch.run(operation, *leaves)
        d_z, *rest = arrays
        d_own = rest.pop(0) if operation.kernels.apart else None
        d_carry, d_reset = rest[: len(loop.carry)], rest[len(loop.carry) :]
        kind = type(loop.carry)
        return Cotangents(d_z, d_own, kind(*d_carry), kind(*d_reset) if d_reset else None)

    def native(self, *leaves: jax.Array) -> list[jax.Array]:
        weights, scale, carry, out, cotangents, masks = jax.tree.unflatten(self.tree, leaves)
        d_last, d_hs, d_cs = cotangents
        _, slots, apart = self.kernels
        operands = [out.z, *([out.own] if apart else []), *(weights[slot] for slot in slots)]
        operands += [] if scale is None else [scale]
        operands += [carry.c, out.cs, d_last.c] if self.has_c else [carry.h, out.hs]
        operands += [d_last.h, d_hs, *([d_cs] if self.all_cs else [])]
        operands += [*masks.flags, *jax.tree.leaves(masks.reset_carry)]
        shapes = [out.z.shape, *[out.hs.shape] * apart]
        shapes += [carry.h.shape] * len(carry) * (1 if masks.resets is None else 2)
        aliases = {number: number for number in range(1 + apart)}
        attributes = {"keep": self.all_cs, "masks": masks.kind, "scaled": scale is not None}
        return [*self._call("backward", shapes, operands, aliases, **attributes)]

    def portable(self, *leaves: jax.Array) -> list[jax.Array]:
        weights, scale, carry, out, cotangents, masks = jax.tree.unflatten(self.tree, leaves)
        d_last, d_hs, d_cs = cotangents
        _, slots, apart = self.kernels
        sides = dict(zip(slots, jnp.split(out.z, len(slots), axis=-1), strict=True))
        inputs = dict(sides)
        if apart:
            inputs[f"{slots[-1]}_input"] = inputs.pop(slots[-1])
            sides[slots[-1]] = out.own
        loop = self._loop(Weights(weights, {}, {}), inputs, carry, scale, masks)
        d_carries = _carry(d_hs, None)
        if self.has_c:
            d_carries = _carry(d_hs, jnp.zeros_like(d_hs) if d_cs is None else d_cs)
        residual = residuals(loop, _carry(out.hs, out.cs), sides)
        d_carry, d_reset, d_pre, d_apart = fused.run_back(
            residual, loop.params, (d_last, d_carries)
        )
        d_sides = {**d_pre}
        d_own = [d_sides[slots[-1]]] * apart
        if apart:
            d_sides[slots[-1]] = d_apart[f"{slots[-1]}_input"]
        d_z = jnp.concatenate([d_sides[slot] for slot in slots], axis=-1)
        return [d_z, *d_own, *d_carry, *([] if masks.resets is None else d_reset)]


@dataclasses.dataclass(frozen=True)
class GatedInputCotangents(_Gated, InputCotangents):
    """The cotangents of a gated cell's inputs."""


@dataclasses.dataclass(frozen=True)
class WeightGradients(_Gated):
    """(xs, initial h, h of all steps, cotangents of z and own, scale, masks) -> ``Gradients``."""

    @staticmethod
    def of(loop: Loop, out: Outputs, d: Cotangents) -> Gradients:
        masks = Masks.of(loop)._replace(valid=None)  # cotangents of other steps are zero
        arguments = loop.xs, loop.carry.h, out.hs, d.z, d.own, gradient_scale(loop), masks
        leaves, tree = jax.tree.flatten(arguments)
        settings = loop.settings
        operation = WeightGradients(settings.cell, tree, settings.reverse, threads())
        arrays = switch.run(operation, *leaves)
        count = len(operation.kernels.slots)
        own_bias = arrays[3 * count] if operation.kernels.apart else None
        kernels, weights, biases = (arrays[n * count : (n + 1) * count] for n in range(3))
        return Gradients(kernels, weights, biases, own_bias)

    def native(self, *leaves: jax.Array) -> list[jax.Array]:
        xs, h, hs, d_z, d_own, _, masks = jax.tree.unflatten(self.tree, leaves)
        _, slots, apart = self.kernels
        inputs, features, count = xs.shape[-1], h.shape[-1], len(slots)
        operands = [xs, h, hs, d_z, *([d_own] if apart else []), *masks.flags]
        operands += [] if masks.resets is None else [masks.reset_carry.h]
        shapes: list[tuple[int, ...]] = [(inputs, features)] * count
        shapes += [(features, features)] * count
        shapes += [(features,)] * (count + apart)
        return [*self._call("gradients", shapes, operands, masks=masks.kind)]

    def portable(self, *leaves: jax.Array) -> list[jax.Array]:
        xs, h, hs, d_z, d_own, scale, masks = jax.tree.unflatten(self.tree, leaves)
        count = len(self.kernels.slots)
        previous = shifted(h, hs, self.reverse)
        if masks.resets is not None:
            previous = jnp.where(masks.resets[..., None], masks.reset_carry.h[None], previous)
        previous = scaled_steps(previous, scale)
        d_inputs = jnp.split(d_z, count, axis=-1)
        d_products = [*d_inputs[:-1], d_inputs[-1] if d_own is None else d_own]

        def product(x: jax.Array, d: jax.Array) -> jax.Array:
            return jnp.einsum("tbi,tbo->io", x, d)

        out = [product(xs, d) for d in d_inputs] + [product(previous, d) for d in d_products]
        out += [d.sum((0, 1)) for d in d_inputs]
        return out if d_own is None else [*out, d_own.sum((0, 1))]
