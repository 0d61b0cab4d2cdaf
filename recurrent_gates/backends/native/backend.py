"""Whole loops as kernels in C++: which loops are served, and on what conditions."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from recurrent_gates import checks, target
from recurrent_gates.backends import fused
from recurrent_gates.backends.native import gated, gato, library, two_layer
from recurrent_gates.backends.shared.two_layer import is_two_layer
from recurrent_gates.base import Cell
from recurrent_gates.carry import CarryFn, Damp, Detach, get_field
from recurrent_gates.cells import LSTM
from recurrent_gates.declared import Params
from recurrent_gates.scan import Loop, Segment

# Bytes of what a backward pass keeps: up to so many nothing is formed again; beyond that time is
# taken in chunks that keep less.
_KEPT_BYTES = 2**28
_CHUNK_BYTES = 2**26
# A single step of so few rows (kFewRows of kernels/shares.h), of so many multiplications, is a
# matter of how fast weights are read: kernels read them on all cores, where they are.
_FEW_ROWS = 12
_MANY_PRODUCTS = 2**19


class _Support(NamedTuple):
    """What is known of a cell that has kernels.

    Attributes:
      name: theirs, in ``library.KERNELS``.
      numbers: how many of a unit and step a backward pass reads.
      field: of the carry, what feeds back.
      masks: whether they know masks and resets.
    """

    name: str
    numbers: int
    field: str
    masks: bool


def _support(cell: Cell) -> _Support | None:
    """What is known of a cell; None if it has no kernels."""
    if gato.has_kernels(cell):
        return _Support(gato.NAME, len(gato.SLOTS) + 3, "r", masks=False)
    if is_two_layer(cell):
        return _Support(two_layer.NAME, two_layer.NUMBERS, "r", masks=True)
    kernels = gated.kernels(cell)
    if kernels is None:
        return None
    fields = 2 if isinstance(cell, LSTM) else 1
    numbers = len(kernels.slots) + kernels.apart + fields
    return _Support(kernels.name, numbers, "h", masks=True)


def unsupported(loop: Loop) -> str | None:
    """Why this backend does not serve a loop, in one sentence; None if it does."""
    cell = loop.settings.cell
    if target.platform() != "cpu":
        return "kernels are for CPUs."
    support = _support(cell)
    if support is None:
        return f"there are no kernels for {type(cell).__name__} with these settings."
    for fn in loop.carry_fns:
        get_field(loop.carry, fn.field)  # an unknown field is an error under any backend
    if not checks.is_array(loop.xs):
        return "kernels read one array of inputs."
    if loop.symbolic or not loop.xs.shape[-1]:
        return "kernels have sizes that are known and inputs of some width."
    if any(map(_is_cut, jax.tree.leaves((loop.params, loop.xs, loop.carry)))):
        return "kernels are not cut along the axes of an explicit mesh."
    arrays = loop.params, loop.xs, loop.carry, loop.reset_carry
    if any(leaf.dtype != jnp.float32 for leaf in jax.tree.leaves(arrays)):
        return "kernels compute in float32."
    if getattr(cell, "dtype", None) not in (None, jnp.dtype(jnp.float32)):
        return "kernels compute in float32."
    if is_two_layer(cell):
        return two_layer.unsupported(loop)
    has_masks = loop.stream.valid is not None or loop.stream.resets is not None
    if has_masks and not support.masks:
        return f"kernels of {type(cell).__name__} know no masks and resets."
    if not all(
        _scales(fn, noise, support.field)
        for fn, noise in zip(loop.carry_fns, loop.stream.noise, strict=True)
    ):
        return (
            f"of carry functions kernels know Detach and Damp of {support.field}, for the whole "
            "batch."
        )
    return library.missing(support.name)


def is_for_step(cell: Cell, params: Params, rows: int) -> bool:
    """Whether kernels are the fastest way to take one step at a time, of so many rows."""
    kernels = gated.kernels(cell)
    leaves = jax.tree.leaves(params)
    if kernels is None or target.platform() != "cpu" or target.cores() == 1:
        return False
    if rows > _FEW_ROWS or rows * sum(leaf.size for leaf in leaves) < _MANY_PRODUCTS:
        return False
    dtypes = {*(leaf.dtype for leaf in leaves), jnp.dtype(getattr(cell, "dtype", None) or "f4")}
    return dtypes == {jnp.dtype("f4")} and library.missing(kernels.name) is None


def _is_cut(leaf: Any) -> bool:
    """Whether the type of an array says that several devices have a part each."""
    sharding = getattr(jax.typeof(leaf), "sharding", None)
    return any(axis is not None for axis in getattr(sharding, "spec", ()))


def _scales(fn: CarryFn, noise: Any, field: str) -> bool:
    """Whether a carry function multiplies the gradient of a field by a number a step."""
    if fn.field != field:
        return False
    if type(fn) is Damp:
        return jnp.ndim(fn.p) == 0
    return type(fn) is Detach and (noise is None or noise.ndim == 1)


def chunk(loop: Loop) -> int | None:
    """The steps per rematerialised chunk that this backend wants, or None for no chunks."""
    support = _support(loop.settings.cell)
    assert support is not None
    step_bytes = 4 * jax.tree.leaves(loop.carry)[0].size * support.numbers
    if is_two_layer(loop.settings.cell):
        return None if loop.steps * step_bytes <= _CHUNK_BYTES else fused.chunk(loop)
    if loop.steps * step_bytes <= _KEPT_BYTES:
        return None
    return max(1, _CHUNK_BYTES // step_bytes)


def segment(loop: Loop) -> Segment:
    """A stretch of time; same contract as ``scan_segment``."""
    if is_two_layer(loop.settings.cell):
        return two_layer.segment(loop)
    run = gato.segment if gato.has_kernels(loop.settings.cell) else gated.segment
    out = run(_of_rows(loop))
    shape = loop.lead[1:]
    last = jax.tree.map(lambda x: x.reshape(*shape, -1), out.carry)
    ys, carries = jax.tree.map(
        lambda x: x.reshape(loop.steps, *shape, x.shape[-1]), (out.ys, out.carries)
    )
    return Segment(last, ys, carries)


def _of_rows(loop: Loop) -> Loop:
    """The loop with one axis for the batch."""
    axes = loop.settings.batch_dims
    rows = math.prod(loop.lead[1:])
    xs = loop.xs.reshape(loop.steps, rows, loop.xs.shape[-1])
    carry, reset = jax.tree.map(
        lambda x: x.reshape(rows, x.shape[axes]), (loop.carry, loop.reset_carry)
    )
    valid, resets = jax.tree.map(
        lambda x: x.reshape(loop.steps, rows), (loop.stream.valid, loop.stream.resets)
    )
    return loop.replace(
        settings=loop.settings._replace(batch_dims=1),
        xs=xs,
        carry=carry,
        reset_carry=reset,
        stream=loop.stream._replace(valid=valid, resets=resets),
    )
