"""Recurrences as Pallas kernels, for TPUs and NVIDIA GPUs.

The loop over time is one kernel: the recurrent weights and the state stay on the chip, blocks
of pre-activations stream past them. The backward loop is a kernel as well; it replays each step
from its kept pre-activations, as the fused backend does, and the weights' gradients are formed
after it, one product over all steps. A step that is detached for the whole batch skips its
products in the backward kernel.

GATO runs three kernels: r, the increments of all steps in parallel, and their sum. The two-layer
increment keeps its ``k * J`` activations on the chip in both directions.

On a CPU the kernels are interpreted: exact, and slower than the other backends.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from recurrent_gates import target
from recurrent_gates.backends import fused
from recurrent_gates.backends.pallas.gato import (
    MOST_FIRST_LAYER,
    padded_features,
    two_layer_increment,
)
from recurrent_gates.backends.pallas.recurrence import heads_of, recurrence, resident
from recurrent_gates.backends.shared import two_layer
from recurrent_gates.backends.shared.accumulation import (
    feeding,
    increment_inputs,
    joined,
    summing,
)
from recurrent_gates.backends.shared.products import declared, product_loop
from recurrent_gates.base import Cell
from recurrent_gates.carry import CarryFn, get_field, set_field
from recurrent_gates.cells import GRU, JANET, LSTM
from recurrent_gates.declared import Carry, Slots, inputs_dtype, is_inexact, recurrent_weights
from recurrent_gates.gato import GATO, GatedDecay
from recurrent_gates.scan import Loop, Segment, with_zeros
from recurrent_gates.slstm import SLSTM

# Bytes of recurrent weights that a kernel keeps beside all else: in VMEM, in one SM's registers.
_RESIDENT = {"tpu": 5 * 2**20, "gpu": 2**17}
_NO_GATHER = ("TPU v2", "TPU v3", "TPU v4")
_LANES = 128  # of a TPU, what a block of some columns is a multiple of
# What surely acts on each unit by itself.
_POINTWISE = {jnp.tanh, jax.nn.sigmoid, jax.nn.relu, jax.nn.softplus}


def unsupported(loop: Loop) -> str | None:
    """Why this backend does not serve a loop, in one sentence; None if it does.

    What a chip cannot hold or a compiler cannot shape is refused on that chip alone.
    """
    cell, carry_fns = loop.settings.cell, loop.carry_fns
    reason = fused.unsupported(loop)
    if reason is not None:
        return reason
    if loop.symbolic:
        return "its kernels are cut by sizes, and these are symbolic."
    if not all(map(is_inexact, jax.tree.leaves(loop.carry))):
        return "its kernels hold carries of floating-point numbers."
    batch = loop.lead[1:]
    if any(leaf.ndim != len(batch) + 1 for leaf in jax.tree.leaves(loop.carry)):
        return "its kernels hold carries of one feature axis."
    if any(jnp.ndim(leaf) for leaf in jax.tree.leaves(carry_fns)):
        return "a carry function with more than scalars does not fit its kernels."
    for fn, noise in zip(carry_fns, loop.stream.noise, strict=True):
        if _is_key(noise) and not fn.chooses:
            return f"{type(fn).__name__} draws inside the step, where its kernels have no keys."
        for leaf in jax.tree.leaves(noise):
            fits = leaf.ndim == 1 or leaf.shape[1 : len(batch) + 1] == batch
            if not fits or leaf.ndim > len(batch) + 2:
                return f"the noise of {type(fn).__name__} is not by step, example and unit."
        if not fn.elementwise:
            return f"{type(fn).__name__} may mix examples, of which a kernel holds some at a time."
    weights = jax.eval_shape(functools.partial(recurrent_weights, declared(cell)), loop.params)
    heads = heads_of(weights)
    if heads > 1 and not _by_head(cell, heads):
        return (
            "its kernels hold one head at a time, where gates act on each unit by itself, and "
            "heads of a uniform gate have at least 3 units."
        )
    return _does_not_fit(loop, target.platform(), heads)


def _by_head(cell: Cell, heads: int) -> bool:
    """Whether nothing but the products joins units, so that a head's step is that of a cell."""
    if type(cell) is SLSTM:
        return True
    if not isinstance(cell, LSTM | GRU) or type(cell) not in (LSTM, GRU, JANET):
        return False
    gate = cell.gate
    if gate.has_own_equations or gate.activation != "sigmoid":
        return False
    if gate.bias == "uniform" and cell.features // heads < 3:  # is no cell
        return False
    activations = {cell.activation, getattr(cell, "output_activation", jnp.tanh)}
    return activations <= _POINTWISE


def _does_not_fit(loop: Loop, platform: str, heads: int) -> str | None:
    """What keeps a loop from the chips of a platform, in one sentence."""
    if platform not in _RESIDENT:
        return None if platform == "cpu" else f"its kernels are not written for {platform}."
    cell = loop.settings.cell
    weights = recurrent_weights(declared(cell), loop.params)
    z = jax.eval_shape(cell.project, loop.params, loop.xs)
    dtype = inputs_dtype(declared(cell).inputs(z))  # of the products
    matrices = jax.tree.leaves(jax.eval_shape(lambda w: resident(w, dtype), weights))
    numbers = jax.tree.leaves((loop.carry, z, matrices))
    if platform == "tpu" and any(leaf.dtype.itemsize > 4 for leaf in numbers):
        return "a TPU kernel has no float64."
    shared = getattr(getattr(cell, "gate", None), "downsize", 1) > 1
    if platform == "tpu" and shared and target.devices()[0].device_kind in _NO_GATHER:
        return "this TPU's kernels cannot hand a master gate to several units."
    widths = {leaf.shape[-1] for leaf in jax.tree.leaves((weights.matrices, weights.vectors))}
    widths |= {leaf.shape[-1] // heads for leaf in jax.tree.leaves((loop.carry, weights.biases))}
    if platform == "tpu" and heads > 1 and any(width % _LANES for width in widths):
        return f"a TPU's kernels hold heads of multiples of {_LANES}, got {sorted(widths)}."
    if platform == "gpu" and any(width < 16 or width & (width - 1) for width in widths):
        return f"a GPU kernel needs widths that are powers of two from 16, got {sorted(widths)}."
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in matrices) // heads
    if size > _RESIDENT[platform]:
        return (
            f"its recurrent weights are {size} bytes and must stay on the chip, "
            f"where {_RESIDENT[platform]} fit."
        )
    if two_layer.is_two_layer(cell):
        hidden, depth = cell.g.hidden, padded_features(loop.xs.shape[-1])
        if hidden * depth > MOST_FIRST_LAYER:
            return (
                f"the two-layer increment holds k x D weights of each unit on the chip: "
                f"{hidden} x {depth} padded, above {MOST_FIRST_LAYER}."
            )
    return None


def chunk(loop: Loop) -> int | None:
    """None: nothing is kept that rematerialising a chunk would spare."""
    del loop
    return None


def segment(loop: Loop) -> Segment:
    """A stretch of time; same contract as ``scan_segment``."""
    settings, cell, lead = loop.settings, loop.settings.cell, loop.lead
    loop = _by_row(loop)
    z = _project(loop)
    if cell.sums is None:
        last, carries = recurrence(False, product_loop(loop, z))
    else:
        last, carries = _accumulating(loop, z)
    ys = with_zeros(loop.stream.valid, cell.emit(loop.params, carries, z))
    ys, carries = jax.tree.map(lambda a: a.reshape(*lead, *a.shape[2:]), (ys, carries))
    last = jax.tree.map(lambda a: a.reshape(*lead[1:], *a.shape[1:]), last)
    return Segment(last, ys, carries if settings.keep_carries else None)


def _by_row(loop: Loop) -> Loop:
    """The loop with one batch axis, and masks with the features' axis: a block of them is a
    matrix then. Noise has no PRNG keys any more."""
    steps, *batch = loop.lead
    rows = math.prod(batch)
    masks = zip(loop.carry_fns, loop.stream.noise, strict=True)
    stream = loop.stream._replace(noise=tuple(_masks(fn, n, loop.carry) for fn, n in masks))
    carry, reset_carry = jax.tree.map(
        lambda a: a.reshape(rows, a.shape[-1]), (loop.carry, loop.reset_carry)
    )
    return loop.replace(
        settings=loop.settings._replace(batch_dims=1),
        xs=jax.tree.map(lambda x: x.reshape(steps, rows, *x.shape[1 + len(batch) :]), loop.xs),
        carry=carry,
        reset_carry=reset_carry,
        stream=jax.tree.map(lambda a: _flat_mask(a, batch), stream),
    )


def _project(loop: Loop) -> Any:
    """``cell.project`` without the k * J pre-activations that a kernel forms by itself."""
    cell = loop.settings.cell
    if not two_layer.is_two_layer(cell):
        return cell.project(loop.params, loop.xs)
    return {"f": cell.f.project(loop.params["f"], loop.xs, cell.dtype), "g": None}


def _masks(fn: CarryFn, noise: Any, carry: Carry) -> Any:
    """Noise without PRNG keys: those of a function that chooses as the masks drawn from them."""
    if not _is_key(noise):
        return noise
    shape = (noise.shape[0], *get_field(carry, fn.field).shape)
    old, new = (set_field(carry, fn.field, jnp.full(shape, value)) for value in (True, False))
    return get_field(fn.after(noise, old, new), fn.field)


def _is_key(noise: Any) -> bool:
    return hasattr(noise, "dtype") and jnp.issubdtype(noise.dtype, jax.dtypes.prng_key)


def _flat_mask(a: jax.Array, batch: list[int]) -> jax.Array:
    """``[T]``, ``[T, B, 1]`` or ``[T, B, width]`` from a mask over ``[T, *batch]``."""
    if a.ndim == 1:
        return a
    width = a.shape[-1] if a.ndim > 1 + len(batch) else 1
    return a.reshape(a.shape[0], math.prod(batch), width)


# Fields that only accumulate.


def _units_alike(cell: Cell) -> tuple[bool, bool]:
    """Whether units are independent and alike in the step, and in the sums.

    More than ``diagonal`` says, by which a map may yet use a unit's place; so of our own alone.
    """
    if type(cell) is not GATO:
        return False, False
    return type(cell.f) is GatedDecay and cell.f.diagonal, True


def _accumulating(loop: Loop, z: Any) -> tuple[Carry, Carry]:
    """The last carry and those of all steps: first what feeds back, then increments, then sums."""
    cell = loop.settings.cell
    assert cell.sums is not None
    step_alike, sum_alike = _units_alike(cell)
    last, looped = recurrence(step_alike, product_loop(feeding(loop), z))
    previous = increment_inputs(feeding(loop), looped)
    if two_layer.is_two_layer(cell):
        increments: Slots = {
            "s": two_layer_increment(loop.params["g"], previous.r, loop.xs, cell.dtype)
        }
    else:
        increments = cell.sums.increment(loop.params, previous, z)
    last_sum, sums = recurrence(sum_alike, product_loop(summing(loop, increments), increments))
    return joined(cell, last, last_sum), joined(cell, looped, sums)
