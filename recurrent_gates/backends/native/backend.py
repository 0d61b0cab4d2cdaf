"""Whole loops as kernels: the forward pass, the backward pass, and the gradients of the weights.

The kernels (``kernels.cc``) do what ``fused`` does, with the same numbers kept between the passes,
but as one call each, on all cores that a device has. Where the inputs are few they are projected in
the loop: their share of the pre-activations then never goes through memory.

What is kept are h (and c) of all steps and the pre-activations, which the backward pass overwrites
with their cotangents. Each kernel is an operation of two forms, see ``switch``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from recurrent_gates import checks, target
from recurrent_gates.backends import fused
from recurrent_gates.backends.native import library, switch
from recurrent_gates.backends.shared.accumulation import shifted
from recurrent_gates.backends.shared.products import product_loop, residuals
from recurrent_gates.backends.shared.rows import flat, projected
from recurrent_gates.base import Cell, HiddenState, SlotCell
from recurrent_gates.carry import (
    CarryFn,
    Damp,
    Detach,
    get_field,
    scale_gradient,
    set_field,
    stop_gradient_where,
)
from recurrent_gates.cells import GRU, JANET, LSTM, LSTMState
from recurrent_gates.declared import Carry, Weights
from recurrent_gates.gates import Gate
from recurrent_gates.scan import Loop, Segment, Settings, Stream

# Bytes of what a backward pass keeps: up to so many nothing is formed again; beyond that time is
# taken in chunks that keep less.
_KEPT_BYTES = 2**28
_CHUNK_BYTES = 2**26
# From so many inputs their product of all steps at once, which goes through memory, costs less.
_FEW_INPUTS = 128
# For the kernels' own copies of weights and rows: no vector is wider, no chunk of rows longer.
_LANES = 16
_ROWS = 192


# ---------------------------------------------------------------------------------------
# What is served
# ---------------------------------------------------------------------------------------


class Kernels(NamedTuple):
    """Which kernels run a cell.

    Attributes:
      name: their name in ``library.CELLS``.
      slots: the cell's slots, in the order of the kernels.
      apart: whether the input's part of the last slot stays apart (a reset after the product).
      dtype: of the cell's products, or None.
    """

    name: str
    slots: tuple[str, ...]
    apart: bool
    dtype: Any


def kernels(cell: Cell) -> Kernels | None:
    """The kernels of a cell; None if there are none."""
    if type(cell) not in (LSTM, GRU, JANET):
        return None
    assert isinstance(cell, (LSTM, GRU))
    gate = cell.gate if isinstance(cell, LSTM) else cell.gate.tie()
    plain = cell.heads == 1 and cell.activation is jnp.tanh and type(gate) is Gate
    if not plain or gate.activation != "sigmoid" or gate.master or gate.refine_input:
        return None
    refined = ("r",) if gate.refine else ()
    dtype = None if cell.dtype is None else jnp.dtype(cell.dtype)
    suffix = "_refined" if refined else ""
    if isinstance(cell, LSTM):
        if cell.output_activation is not jnp.tanh or not cell.forget_gate:
            return None
        if gate.tied != gate.refine:  # i is free, or 1 - g
            return None
        return Kernels(f"lstm{suffix}", ("f", *(refined or ("i",)), "o", "u"), False, dtype)
    if cell.reset == "before":
        return None
    reset = ("reset",) if cell.reset else ()
    name = "gru" if reset else "janet"
    return Kernels(f"{name}{suffix}", ("f", *refined, *reset, "u"), bool(reset), dtype)


def unsupported(loop: Loop) -> str | None:
    """Why this backend does not serve a loop, in one sentence; None if it does."""
    cell = loop.settings.cell
    if target.platform() != "cpu":
        return "kernels are for CPUs."
    chosen = kernels(cell)
    if chosen is None:
        return f"there are no kernels for {type(cell).__name__} with these settings."
    for fn in loop.carry_fns:
        get_field(loop.carry, fn.field)  # an unknown field is an error under any backend
    if not checks.is_array(loop.xs):
        return "kernels read one array of inputs."
    if loop.symbolic or not loop.xs.shape[-1]:
        return "kernels have sizes that are known and inputs of some width."
    if any(map(_is_cut, jax.tree.leaves((loop.params, loop.xs, loop.carry)))):
        return "kernels are not cut along the axes of an explicit mesh."
    if any(leaf.dtype != jnp.float32 for leaf in jax.tree.leaves((loop.params, loop.xs))):
        return "kernels compute in float32."
    if chosen.dtype not in (None, jnp.dtype(jnp.float32)):
        return "kernels compute in float32."
    if loop.stream.valid is not None or loop.stream.resets is not None:
        return "kernels know no masks and resets."
    if not all(map(_scales, loop.carry_fns, loop.stream.noise)):
        return "of carry functions kernels know Detach and Damp of h, for the whole batch."
    return library.missing(chosen.name)


def _is_cut(leaf: Any) -> bool:
    """Whether the type of an array says that several devices have a part each."""
    sharding = getattr(jax.typeof(leaf), "sharding", None)
    return any(axis is not None for axis in getattr(sharding, "spec", ()))


def _scales(fn: CarryFn, noise: Any) -> bool:
    """Whether a carry function multiplies the gradient of h by a number a step."""
    if fn.field != "h":
        return False
    if type(fn) is Damp:
        return jnp.ndim(fn.p) == 0
    return type(fn) is Detach and (noise is None or noise.ndim == 1)


def chunk(loop: Loop) -> int | None:
    """The steps per rematerialised chunk that this backend wants, or None for no chunks."""
    fields = jax.tree.leaves(loop.carry)
    of_step = 4 * fields[0].size * (len(loop.params["recurrent_kernel"]) + len(fields))
    if loop.steps * of_step <= _KEPT_BYTES:
        return None
    return max(1, _CHUNK_BYTES // of_step)


def segment(loop: Loop) -> Segment:
    """A stretch of time; same contract as ``scan_segment``."""
    rows = _of_rows(loop)
    last, hs, cs = _recurrence(rows)
    shape = loop.lead[1:]
    last = jax.tree.map(lambda x: x.reshape(*shape, -1), last)
    ys = hs.reshape(loop.steps, *shape, -1)
    if not loop.settings.keep_carries:
        return Segment(last, ys, None)
    carries = _carry(ys, None if cs is None else cs.reshape(ys.shape))
    return Segment(last, ys, carries)


def _of_rows(loop: Loop) -> Loop:
    """The loop with one axis for the batch."""
    axes = loop.settings.batch_dims
    rows = math.prod(loop.lead[1:])
    xs = loop.xs.reshape(loop.steps, rows, loop.xs.shape[-1])
    carry, reset = jax.tree.map(
        lambda x: x.reshape(rows, x.shape[axes]), (loop.carry, loop.reset_carry)
    )
    settings = loop.settings._replace(batch_dims=1)
    return loop.replace(settings=settings, xs=xs, carry=carry, reset_carry=reset)


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
    at = 0 if loop.settings.reverse else -1
    return _carry(out.hs[at], None if out.cs is None else out.cs[at])


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
    of_weights = WeightGradients.of(loop, out, d)
    kernel = jnp.concatenate([params["kernel"][slot] for slot in slots], axis=-1)
    d_xs = d.z @ kernel.T

    def paired(params: Any, xs: jax.Array, carry: Carry) -> jax.Array:
        """The linear function whose gradient is asked for, also where a shard_map adds it up."""
        pairs = [(xs, d_xs), (_biases(cell, slots, params), of_weights.bias)]
        for slot, d_kernel, d_weight in zip(
            slots, of_weights.kernels, of_weights.weights, strict=True
        ):
            pairs.append((params["kernel"][slot], d_kernel))
            pairs.append((params["recurrent_kernel"][slot], d_weight))
        if of_weights.own_bias is not None and slots[-1] in params.get("recurrent_bias", {}):
            pairs.append((params["recurrent_bias"][slots[-1]], of_weights.own_bias))
        pairs += zip(jax.tree.leaves(carry), jax.tree.leaves(d.carry), strict=True)
        return jnp.sum(jnp.stack([jnp.sum(a * b) for a, b in pairs]))

    d_params, d_xs, d_carry = jax.grad(paired, (0, 1, 2))(params, loop.xs, loop.carry)
    d_loop = loop.replace(
        params=d_params,
        xs=d_xs,
        carry=d_carry,
        reset_carry=jax.tree.map(jnp.zeros_like, loop.reset_carry),
        carry_fns=None,
        stream=None,
    )
    return (d_loop,)


_recurrence.defvjp(_forward, _backward)


def _kernels_of(loop: Loop) -> Kernels:
    chosen = kernels(loop.settings.cell)
    assert chosen is not None
    return chosen


def _biases(cell: SlotCell, slots: Sequence[str], params: Any) -> jax.Array:
    """What no inputs make of the slots, ``[slots, F]``; not a bias that stays apart."""
    gate = cell._gate
    own = params.get("recurrent_bias", {})
    offsets = gate.offsets(params.get("gate", {})) if gate else {}

    def bias(slot: str) -> jax.Array:
        parts = [params["bias"][slot]]
        parts += [own[slot]] if slot in own and slot not in cell.separate else []
        parts += [offsets[slot]] if slot in offsets else []
        return functools.reduce(jnp.add, parts)

    return jnp.stack([bias(slot) for slot in slots])


def _scale(loop: Loop) -> jax.Array:
    """What the gradient of h is multiplied by before each step, ``[T]``."""
    scale = jnp.ones((loop.steps,), jnp.float32)
    for fn, noise in zip(loop.carry_fns, loop.stream.noise, strict=True):
        if type(fn) is Damp:
            scale = scale * (1 - jnp.asarray(fn.p, jnp.float32))
        elif noise is not None:
            scale = jnp.where(noise.astype(bool), 0.0, scale)
    return jax.lax.stop_gradient(scale)


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
    """What a backward pass makes: the cotangents of ``Outputs``' z and own, and of the carry."""

    z: jax.Array
    own: jax.Array | None
    carry: Carry


class Gradients(NamedTuple):
    """Of kernels and recurrent kernels by slot, of biases ``[slots, F]`` and the own bias."""

    kernels: list[jax.Array]
    weights: list[jax.Array]
    bias: jax.Array
    own_bias: jax.Array | None


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """What the three have in common.

    Attributes:
      cell: the cell.
      tree: the structure of the arrays that it reads, flattened.
      reverse: whether time runs backwards.
      threads: of each device.
    """

    cell: Cell
    tree: Any
    reverse: bool
    threads: int

    @property
    def kernels(self) -> Kernels:
        chosen = kernels(self.cell)
        assert chosen is not None
        return chosen

    @property
    def has_c(self) -> bool:
        return isinstance(self.cell, LSTM)

    def _call(
        self,
        function: str,
        shapes: Sequence[tuple[int, ...]],
        operands: Sequence[jax.Array],
        aliases: dict[int, int] | None = None,
        **attributes: bool,
    ) -> Sequence[jax.Array]:
        """Runs a kernel; the last of its results is memory that it works in."""
        results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        call = jax.ffi.ffi_call(
            library.target(self.kernels.name, function), results, input_output_aliases=aliases
        )
        numbers = {"reverse": self.reverse, "threads": self.threads, **attributes}
        return call(*operands, **{name: np.int64(n) for name, n in numbers.items()})[:-1]

    def _unroll(self, params: Any, xs: Any, carry: Carry) -> Loop:
        """The loop in JAX, for the portable form."""
        settings = Settings(self.cell, batch_dims=1, reverse=self.reverse)
        return Loop(settings, params, xs, carry, carry)


def _threads() -> int:
    """How many cores a device may use: all, unless others do the same at the same time."""
    if jax.sharding.get_abstract_mesh().are_all_axes_manual:  # of a shard_map
        return max(1, target.cores() // target.device_count())
    return target.cores()


@dataclasses.dataclass(frozen=True)
class Forward(_Kernel):
    """(params, xs, carry) -> ``Outputs``, flattened.

    Attributes:
      keep: whether a backward pass follows.
      all_cs: whether c of all steps is asked for.
    """

    keep: bool
    all_cs: bool

    @staticmethod
    def of(loop: Loop, *, keep: bool) -> Outputs:
        leaves, tree = jax.tree.flatten((loop.params, loop.xs, loop.carry))
        settings = loop.settings
        all_cs = keep or settings.keep_carries
        operation = Forward(settings.cell, tree, settings.reverse, _threads(), keep, all_cs)
        return operation._outputs(switch.run(operation, *leaves))

    def _outputs(self, arrays: Sequence[jax.Array]) -> Outputs:
        rest = list(arrays)
        hs = rest.pop(0)
        cs = rest.pop(0) if self.has_c else None
        return Outputs(hs, cs, *rest)

    def native(self, *leaves: jax.Array) -> list[jax.Array]:
        params, xs, carry = jax.tree.unflatten(self.tree, leaves)
        assert isinstance(self.cell, SlotCell)
        _, slots, apart, _ = self.kernels
        steps, rows, inputs = xs.shape
        features = carry.h.shape[-1]
        project = inputs <= _FEW_INPUTS
        if project:
            operands = [xs, *(params["kernel"][slot] for slot in slots)]
        else:
            kernel = jnp.concatenate([params["kernel"][slot] for slot in slots], axis=-1)
            operands = [(flat(xs, 2) @ kernel).reshape(steps, rows, -1)]
        operands.append(_biases(self.cell, slots, params))
        if apart:
            own = params.get("recurrent_bias", {})
            operands.append(own.get(slots[-1], jnp.zeros((features,), jnp.float32)))
        operands += [params["recurrent_kernel"][slot] for slot in slots]
        operands += [carry.c] if self.has_c else []
        operands.append(carry.h)
        state = steps, rows, features
        shapes: list[tuple[int, ...]] = []
        if self.keep:
            shapes = [(steps, rows, len(slots) * features), *[state] * apart]
        kept = len(shapes)
        shapes.append(state)
        if self.has_c:
            shapes.append(state if self.all_cs else (1, rows, features))
        shapes.append((_packed(features) * len(slots) * (features + inputs * project),))
        aliases = {0: 0} if self.keep and not project else None
        out = self._call("forward", shapes, operands, aliases, keep=self.keep, project=project)
        return [*out[kept:], *out[:kept]]

    def portable(self, *leaves: jax.Array) -> list[jax.Array]:
        loop = self._unroll(*jax.tree.unflatten(self.tree, leaves))
        inputs = product_loop(loop, projected(loop))
        last, carries, pre = fused.run(inputs)
        _, slots, apart, _ = self.kernels
        out = [carries.h]
        if self.has_c:
            out.append(carries.c if self.all_cs else last.c[None])
        if self.keep:
            alone = inputs.xs[f"{slots[-1]}_input"] if apart else pre[slots[-1]]
            sides = [*(pre[slot] for slot in slots[:-1]), alone]
            out += [jnp.concatenate(sides, axis=-1), *[pre[slots[-1]]] * apart]
        return out


def _packed(features: int) -> int:
    """F, up to whole vectors."""
    return math.ceil(features / _LANES) * _LANES


@struct.dataclass
class _Scale(CarryFn):
    """The gradient of h times a number that each step is given as noise."""

    def before(self, noise_t: jax.Array, carry: Carry) -> Carry:
        h = stop_gradient_where(noise_t == 0, scale_gradient(carry.h, noise_t))
        return set_field(carry, "h", h)


@dataclasses.dataclass(frozen=True)
class Backward(_Kernel):
    """(weights by slot, scale, initial carry, carries, z, own, cotangents) -> ``Cotangents``.

    Attributes:
      all_cs: whether c of all steps has a cotangent.
    """

    all_cs: bool

    @staticmethod
    def of(
        loop: Loop, out: Outputs, d_last: Carry, d_hs: jax.Array, d_cs: jax.Array | None
    ) -> Cotangents:
        weights = {slot: loop.params["recurrent_kernel"][slot] for slot in _kernels_of(loop).slots}
        carries = _carry(out.hs, out.cs)
        read = weights, _scale(loop), loop.carry, carries, out.z, out.own, d_last, d_hs, d_cs
        leaves, tree = jax.tree.flatten(read)
        cell, reverse = loop.settings.cell, loop.settings.reverse
        operation = Backward(cell, tree, reverse, _threads(), d_cs is not None)
        arrays = switch.run(operation, *leaves)
        own = arrays[1] if operation.kernels.apart else None
        return Cotangents(arrays[0], own, type(loop.carry)(*arrays[1 + operation.kernels.apart :]))

    def native(self, *leaves: jax.Array) -> list[jax.Array]:
        weights, scale, carry, carries, z, own, d_last, d_hs, d_cs = jax.tree.unflatten(
            self.tree, leaves
        )
        _, slots, apart, _ = self.kernels
        operands = [z, *([own] if apart else []), *(weights[slot] for slot in slots), scale]
        operands += [carry.c, carries.c, d_last.c] if self.has_c else [carry.h, carries.h]
        operands += [d_last.h, d_hs, *([d_cs] if self.all_cs else [])]
        features = carry.h.shape[-1]
        shapes = [z.shape, *[carries.h.shape] * apart, *[carry.h.shape] * (1 + self.has_c)]
        shapes.append((_packed(features) * len(slots) * features,))
        aliases = {number: number for number in range(1 + apart)}
        return [*self._call("backward", shapes, operands, aliases, keep=self.all_cs)]

    def portable(self, *leaves: jax.Array) -> list[jax.Array]:
        weights, scale, carry, carries, z, own, d_last, d_hs, d_cs = jax.tree.unflatten(
            self.tree, leaves
        )
        _, slots, apart, _ = self.kernels
        sides = dict(zip(slots, jnp.split(z, len(slots), axis=-1), strict=True))
        inputs = dict(sides)
        if apart:
            inputs[f"{slots[-1]}_input"] = inputs.pop(slots[-1])
            sides[slots[-1]] = own
        loop = self._unroll(Weights(weights, {}, {}), inputs, carry)
        stream = Stream(noise=(scale,))
        loop = loop.replace(carry_fns=(_Scale(0.0),), stream=stream)
        d_carries = _carry(d_hs, None)
        if self.has_c:
            d_carries = _carry(d_hs, jnp.zeros_like(d_hs) if d_cs is None else d_cs)
        d_carry, _, d_pre, d_apart = fused.run_back(
            residuals(loop, carries, sides), loop.params, (d_last, d_carries)
        )
        d_sides = {**d_pre}
        d_own = [d_sides[slots[-1]]] * apart
        if apart:
            d_sides[slots[-1]] = d_apart[f"{slots[-1]}_input"]
        d_z = jnp.concatenate([d_sides[slot] for slot in slots], axis=-1)
        return [d_z, *d_own, *d_carry]


@dataclasses.dataclass(frozen=True)
class WeightGradients(_Kernel):
    """(xs, initial h, h of all steps, cotangents of z and own) -> ``Gradients``, flattened."""

    @staticmethod
    def of(loop: Loop, out: Outputs, d: Cotangents) -> Gradients:
        leaves, tree = jax.tree.flatten((loop.xs, loop.carry.h, out.hs, d.z, d.own))
        settings = loop.settings
        operation = WeightGradients(settings.cell, tree, settings.reverse, _threads())
        arrays = switch.run(operation, *leaves)
        count = len(operation.kernels.slots)
        own_bias = arrays[2 * count + 1] if operation.kernels.apart else None
        kernels, weights = list(arrays[:count]), list(arrays[count : 2 * count])
        return Gradients(kernels, weights, arrays[2 * count], own_bias)

    def native(self, *leaves: jax.Array) -> list[jax.Array]:
        xs, h, _, d_z, _ = jax.tree.unflatten(self.tree, leaves)
        _, slots, apart, _ = self.kernels
        inputs, features, count = xs.shape[-1], h.shape[-1], len(slots)
        del d_z
        shapes: list[tuple[int, ...]] = [(inputs, features)] * count
        shapes += [(features, features)] * count
        shapes += [(count, features), *[(features,)] * apart]
        shapes.append((self.threads * _ROWS * (inputs + features + 5 * _LANES),))
        return [*self._call("gradients", shapes, leaves)]

    def portable(self, *leaves: jax.Array) -> list[jax.Array]:
        xs, h, hs, d_z, d_own = jax.tree.unflatten(self.tree, leaves)
        count = len(self.kernels.slots)
        before = shifted(h, hs, self.reverse)
        d_inputs = jnp.split(d_z, count, axis=-1)
        d_products = [*d_inputs[:-1], d_inputs[-1] if d_own is None else d_own]

        def product(x: jax.Array, d: jax.Array) -> jax.Array:
            return jnp.einsum("tbi,tbo->io", x, d)

        out = [product(xs, d) for d in d_inputs] + [product(before, d) for d in d_products]
        out.append(jnp.stack([d.sum((0, 1)) for d in d_inputs]))
        return out if d_own is None else [*out, d_own.sum((0, 1))]
