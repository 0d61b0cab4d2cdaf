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

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from recurrent_gates.backends import fused, two_layer
from recurrent_gates.backends.accumulation import (
    CarryFns,
    joined,
    only,
    part,
    read_by_increments,
    sum_step,
    without,
)
from recurrent_gates.backends.pallas_gato import (
    MOST_FIRST_LAYER,
    padded_features,
    two_layer_increment,
)
from recurrent_gates.backends.pallas_recurrence import recurrence, resident
from recurrent_gates.base import Carry, Cell, Params, Product, Slots
from recurrent_gates.carry import CarryFn, Damp, Detach, Zoneout, get_field, set_field
from recurrent_gates.gato import GATO, GatedDecay
from recurrent_gates.scan import Request, Segment, Settings, Stream, masked_output
from recurrent_gates.shapes import is_symbolic

# Bytes of recurrent weights that a kernel keeps beside all else: in VMEM, in one SM's registers.
_RESIDENT = {"tpu": 5 * 2**20, "gpu": 2**17}
_NO_GATHER = ("TPU v2", "TPU v3", "TPU v4")


def unsupported(request: Request) -> str | None:
    """Why this backend does not serve a request, in one sentence; None if it does.

    What a chip cannot hold or a compiler cannot shape is refused on that chip alone.
    """
    carry_fns = request.carry_fns
    reason = fused.unsupported(request)
    if reason is not None:
        return reason
    if not jax.tree_util.treedef_is_leaf(jax.tree.structure(request.xs)):
        return "its kernels read inputs of one array."
    if is_symbolic(request.xs):
        return "its kernels are cut by sizes, and these are symbolic."
    batch = request.xs.shape[1:-1]
    if any(leaf.ndim != len(batch) + 1 for leaf in jax.tree.leaves(request.carry)):
        return "its kernels hold carries of one feature axis."
    weights = request.settings.cell.recurrent_weights(request.params)
    if any(leaf.ndim not in (1, 2) for leaf in jax.tree.leaves(weights)):
        return "its kernels hold recurrent weights of one axis or two."
    if any(jnp.ndim(leaf) for leaf in jax.tree.leaves(carry_fns)):
        return "a carry function with more than scalars does not fit its kernels."
    for fn, noise in zip(carry_fns, request.stream.noise, strict=True):
        if _is_key(noise) and type(fn) is not Zoneout:
            return f"{type(fn).__name__} draws inside the step, where its kernels have no keys."
        for leaf in jax.tree.leaves(noise):
            fits = leaf.ndim == 1 or leaf.shape[1 : len(batch) + 1] == batch
            if not fits or leaf.ndim > len(batch) + 2:
                return f"the noise of {type(fn).__name__} is not by step, example and unit."
    return _does_not_fit(request, jax.default_backend())


def _does_not_fit(request: Request, platform: str) -> str | None:
    """What keeps a request from the chips of a platform, in one sentence."""
    if platform not in _RESIDENT:
        return None if platform == "cpu" else f"its kernels are not written for {platform}."
    cell, params = request.settings.cell, request.params
    weights = cell.recurrent_weights(params)
    z = jax.eval_shape(cell.project, params, request.xs)
    dtype = jax.tree.leaves(cell.loop_input(z))[0].dtype  # of the products
    matrices = jax.tree.leaves(jax.eval_shape(lambda w: resident(cell, w, dtype), weights))
    numbers = jax.tree.leaves((request.carry, z, matrices))
    if platform == "tpu" and any(leaf.dtype.itemsize > 4 for leaf in numbers):
        return "a TPU kernel has no float64."
    shared = getattr(getattr(cell, "gate", None), "downsize", 1) > 1
    if platform == "tpu" and shared and jax.devices()[0].device_kind in _NO_GATHER:
        return "this TPU's kernels cannot hand a master gate to several units."
    widths = {leaf.shape[-1] for leaf in jax.tree.leaves((request.carry, weights))}
    if platform == "gpu" and any(width < 16 or width & (width - 1) for width in widths):
        return f"a GPU kernel needs widths that are powers of two from 16, got {sorted(widths)}."
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in matrices)
    if size > _RESIDENT[platform]:
        return (
            f"its recurrent weights are {size} bytes and must stay on the chip, "
            f"where {_RESIDENT[platform]} fit."
        )
    if two_layer.is_two_layer(cell):
        hidden, depth = cell.g.hidden, padded_features(request.xs.shape[-1])
        if hidden * depth > MOST_FIRST_LAYER:
            return (
                f"the two-layer increment holds k x D weights of each unit on the chip: "
                f"{hidden} x {depth} padded, above {MOST_FIRST_LAYER}."
            )
    return None


def chunk(request: Request) -> int | None:
    """None: nothing is kept that rematerialising a chunk would spare."""
    del request
    return None


def segment(
    settings: Settings,
    params: Params,
    xs: Any,
    carry: Carry,
    fresh: Carry,
    carry_fns: CarryFns,
    stream: Stream,
    keep_carries: bool,
) -> Segment:
    """A stretch of time; same contract as ``scan_segment``."""
    cell = settings.cell
    steps, *batch = jax.tree.leaves(xs)[0].shape[:-1]
    noise = tuple(_masks(fn, n, carry) for fn, n in zip(carry_fns, stream.noise, strict=True))
    stream = stream._replace(noise=noise)

    # One batch axis inside; masks get the features' axis, so that a block of them is a matrix.
    rows = math.prod(batch)
    xs = xs.reshape(steps, rows, xs.shape[-1])
    carry, fresh = jax.tree.map(lambda a: a.reshape(rows, a.shape[-1]), (carry, fresh))
    stream = jax.tree.map(lambda a: _flat_mask(a, batch), stream)

    z = _project(cell, params, xs)
    weights = cell.recurrent_weights(params)
    if not cell.accumulated:
        inputs = (weights, cell.loop_input(z), carry, fresh, carry_fns, stream)
        last, carries = recurrence(settings, False, *inputs)
    else:
        last, carries = _accumulating(settings, params, xs, z, carry, fresh, carry_fns, stream)
    ys = masked_output(stream.valid, cell.emit(params, carries, z))
    ys, carries = jax.tree.map(lambda a: a.reshape(steps, *batch, a.shape[-1]), (ys, carries))
    last = jax.tree.map(lambda a: a.reshape(*batch, a.shape[-1]), last)
    return Segment(last, ys, carries if keep_carries else None)


def _project(cell: Cell, params: Params, xs: jax.Array) -> Any:
    """``cell.project`` without the k * J pre-activations that a kernel forms by itself."""
    if not two_layer.is_two_layer(cell):
        return cell.project(params, xs)
    return {"f": cell.f.project(params["f"], xs, cell.dtype), "g": None}


def _masks(fn: CarryFn, noise: Any, carry: Carry) -> Any:
    """Noise without PRNG keys: zoneout's as the masks that it draws from them."""
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


class _Sum(Cell):
    """The accumulated fields of a cell as a recurrence of their own, over their increments."""

    whole: Cell

    @property
    def separate(self) -> tuple[str, ...]:
        return self.whole.accumulated

    @nn.nowrap
    def update(self, carry: Carry, z_t: Slots, product: Product) -> Carry:
        del product
        return sum_step(self.whole, carry, dict(z_t))


def _units_alike(cell: Cell, carry_fns: CarryFns) -> tuple[bool, bool]:
    """Whether units are independent and alike in the step, and in the sums.

    More than ``diagonal`` says, by which a map may yet use a unit's place; so of our own alone.
    """
    own_fns = all(type(fn) in (Damp, Detach, Zoneout) for fn in carry_fns)
    if not isinstance(cell, GATO) or not own_fns:
        return False, False
    own = type(cell)
    step = (own.update, own.product) == (GATO.update, GATO.product) and type(cell.f) is GatedDecay
    return step, (own.accumulate, own.bounded) == (GATO.accumulate, GATO.bounded)


def _accumulating(
    settings: Settings,
    params: Params,
    xs: jax.Array,
    z: Any,
    carry: Carry,
    fresh: Carry,
    carry_fns: CarryFns,
    stream: Stream,
) -> tuple[Carry, Carry]:
    """The last carry and those of all steps: first what feeds back, then increments, then sums."""
    cell, reverse = settings.cell, settings.reverse
    loop_fns, loop_stream = part(cell, carry_fns, stream, accumulated=False)
    sum_fns, sum_stream = part(cell, carry_fns, stream, accumulated=True)
    step_alike, sum_alike = _units_alike(cell, carry_fns)
    last, looped = recurrence(
        settings,
        step_alike,
        cell.recurrent_weights(params),
        cell.loop_input(z),
        without(cell, carry),
        without(cell, fresh),
        loop_fns,
        loop_stream,
    )
    before = read_by_increments(cell, carry, fresh, loop_fns, loop_stream, looped, reverse)
    if two_layer.is_two_layer(cell):
        added = {"s": two_layer_increment(params["g"], before.r, xs, cell.dtype)}
    else:
        added = cell.increment(params, before, z)
    last_sum, sums = recurrence(
        settings._replace(cell=_Sum(cell, parent=None)),
        sum_alike,
        {},
        added,
        only(cell, carry),
        only(cell, fresh),
        sum_fns,
        sum_stream,
    )
    return joined(cell, last, last_sum), joined(cell, looped, sums)
