"""A loop over time as one Pallas kernel: what ``jax.lax.scan`` does, with its state on the chip.

The kernel runs in three ways. On a TPU (Mosaic) time is the inner, sequential axis of the grid:
blocks of steps stream through VMEM while the state and everything shared stay there. On a GPU
(Triton) one program owns a few rows of the batch, of some units where these are independent, and
walks through all steps. On a CPU Pallas interprets the TPU's kernel, slowly and exactly.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as pltriton

from recurrent_gates.backends.pallas_body import in_kernel

ON_CHIP = 12 * 2**20
"""Bytes of VMEM that the blocks of a kernel may take: what Mosaic grants by default (16 MB) less
room for temporaries."""

MOST_STEPS = 32
"""Steps per block on a TPU where memory does not ask for fewer."""

GPU_ROWS = 16
"""Rows of the batch per program on a GPU, the fewest that a tensor-core product takes; one row
where nothing is multiplied."""

GPU_UNITS = 128
"""Units per program on a GPU where they do not interact: one to a thread."""

GPU_AHEAD = 8
"""Steps whose inputs such a program loads at once: a load takes longer than a step's arithmetic."""

Body = Callable[[Any, Any, Any, Any], tuple[Any, Any]]


def on_platform(kernel_call: Callable[..., Any], *args: Any) -> Any:
    """``kernel_call(platform, *args)`` for the platform that the program is lowered for."""
    ways = {name: functools.partial(kernel_call, name) for name in ("cpu", "tpu", "cuda")}
    return jax.lax.platform_dependent(*args, **ways)


def compiler_params(platform: str, axes: int, *, state: bool, held: int | None = None) -> Any:
    """What each compiler is told.

    Args:
      platform: of the kernel.
      axes: of its grid.
      state: whether the last of them carries state, on a TPU.
      held: bytes of weights that a program of a loop over time holds, on a GPU.
    """
    if platform == "tpu":
        last = pltpu.ARBITRARY if state else pltpu.PARALLEL
        semantics = (*[pltpu.PARALLEL] * (axes - 1), last)
        return pltpu.CompilerParams(dimension_semantics=semantics)
    if platform == "cuda" and held is not None:
        # More threads where the weights would take half of four warps' registers. No pipeline: no
        # load of a step feeds a product, and its buffers would take the weights' room on the chip.
        return pltriton.CompilerParams(num_warps=8 if held >= 2**16 else 4, num_stages=1)
    return pltriton.CompilerParams() if platform == "cuda" else None


def time_loop(
    body: Body,
    shared: Any,
    rows: Any,
    carry: Any,
    xs: Any,
    *,
    reverse: bool,
    elementwise: bool = False,
) -> tuple[Any, Any]:
    """``lax.scan(lambda c, x: body(shared, rows, c, x), carry, xs)`` as one kernel.

    Args:
      body: (shared, rows, carry, x_t) -> (carry, y_t); it must treat rows independently and its
        y_t must be ``[B, width]``.
      shared: what every row reads at every step; arrays ``[m, n]``, and scalars.
      rows: what each row reads at every step; arrays ``[B, width]``.
      carry: the state; arrays ``[B, width]``.
      xs: inputs by step; arrays ``[T, B, width]``, and scalars by step ``[T]``.
      reverse: run t from T - 1 to 0.
      elementwise: whether body treats the columns independently and alike, too; all that it
        returns then has as many as the carry, and all that it reads as many or one.

    Returns:
      (carry, ys), ys ``[T, B, width]`` with every y at the t of its x.

    Differentiation is the caller's business.
    """
    shared = jax.tree.map(jnp.asarray, shared)
    # Bools travel as integers.
    is_bool = jax.tree.map(lambda a: a.dtype == bool, xs)
    xs = jax.tree.map(lambda a, b: a.astype(jnp.int32) if b else a, xs, is_bool)

    def typed(shared: Any, rows: Any, carry: Any, x_t: Any) -> tuple[Any, Any]:
        x_t = jax.tree.map(lambda a, b: a != 0 if b else a, x_t, is_bool)
        return body(shared, rows, carry, x_t)

    call = functools.partial(_time_loop, body=typed, reverse=reverse, elementwise=elementwise)
    return on_platform(call, shared, rows, carry, xs)


def _time_loop(
    platform: str, shared: Any, rows: Any, carry: Any, xs: Any, **how: Any
) -> tuple[Any, Any]:
    batch = jax.tree.leaves(carry)[0].shape[0]
    if platform == "cuda":  # Triton checks no bounds: whole blocks only
        padding = -batch % _gpu_rows(shared)
        rows, carry, xs = jax.tree.map(
            lambda a: _pad_axis(a, a.ndim - 2, padding) if a.ndim > 1 else a, (rows, carry, xs)
        )
        last, ys = _call(platform, shared, rows, carry, xs, **how)
        return jax.tree.map(lambda a: a[..., :batch, :], (last, ys))
    return _call(platform, shared, rows, carry, xs, **how)


def _call(
    platform: str,
    shared: Any,
    rows: Any,
    carry: Any,
    xs: Any,
    *,
    body: Body,
    reverse: bool,
    elementwise: bool,
) -> tuple[Any, Any]:
    steps = next(a for a in jax.tree.leaves(xs)).shape[0]
    batch = jax.tree.leaves(carry)[0].shape[0]
    x_t = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), xs)
    y_t = jax.eval_shape(body, shared, rows, carry, x_t)[1]
    ys = jax.tree.map(lambda a: jax.ShapeDtypeStruct((steps, *a.shape), a.dtype), y_t)
    out = (jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), carry), ys)

    width = jax.tree.leaves(carry)[0].shape[1]
    units, ahead = width, 1
    if platform == "cuda":
        block, chunk = _gpu_rows(shared), steps
        if elementwise:
            units, ahead = math.gcd(width, GPU_UNITS), GPU_AHEAD
    else:
        block, chunk = _tpu_blocks(shared, (rows, carry, carry), (xs, ys), batch, steps)
    chunks = pl.cdiv(steps, chunk)

    def wide(a: Any) -> int:  # the columns of an array's block: some units, or all there are
        return units if a.shape[-1] == width else a.shape[-1]

    def column(a: Any, u: Any) -> Any:
        return u if a.shape[-1] == width else 0

    def at(i: Any) -> Any:  # the block of time of a grid step
        return chunks - 1 - i if reverse else i

    def fixed(a: Any) -> pl.BlockSpec:
        if a.ndim == 2:
            return pl.BlockSpec((a.shape[0], wide(a)), lambda b, u, i: (0, column(a, u)))
        return _scalars(platform)

    def by_row(a: Any) -> pl.BlockSpec:
        return pl.BlockSpec((block, wide(a)), lambda b, u, i: (b, column(a, u)))

    def by_time(a: Any) -> pl.BlockSpec:
        if a.ndim == 1:
            return _scalars(platform)
        return pl.BlockSpec((chunk, block, wide(a)), lambda b, u, i: (at(i), b, column(a, u)))

    def kernel(*refs: Any) -> None:
        inputs, (last_ref, ys_ref) = jax.tree.unflatten(structure, refs)
        shared_ref, rows_ref, carry_ref, xs_ref = inputs
        i = at(pl.program_id(2))

        @pl.when(pl.program_id(2) == 0)
        def _() -> None:
            jax.tree.map(_copy, last_ref, carry_ref)

        shared_ = jax.tree.map(lambda ref: ref[...] if len(ref.shape) == 2 else ref[0], shared_ref)
        rows_ = jax.tree.map(lambda ref: ref[...], rows_ref)
        count = chunk if steps % chunk == 0 else jnp.minimum(chunk, steps - i * chunk)

        ready = in_kernel(body)

        def load(t: Any) -> Any:
            return jax.tree.map(
                lambda ref: ref[t] if len(ref.shape) == 3 else ref[i * chunk + t], xs_ref
            )

        def run(n: Any, carry: Any, some: int) -> Any:
            """Some steps from the n-th on; all their loads come before the first store."""
            times = [count - 1 - n - k if reverse else n + k for k in range(some)]
            for t, x_t in [(t, load(t)) for t in times]:
                carry, y_t = ready(shared_, rows_, carry, x_t)
                jax.tree.map(functools.partial(_store, t), ys_ref, y_t)
            return carry

        state = jax.tree.map(lambda ref: ref[...], last_ref)
        if ahead == 1:
            state = jax.lax.fori_loop(0, count, lambda n, c: run(n, c, 1), state)
        else:  # all steps are in one block
            whole, rest = divmod(steps, ahead)
            state = jax.lax.fori_loop(0, whole, lambda n, c: run(n * ahead, c, ahead), state)
            state = run(whole * ahead, state, rest)
        jax.tree.map(_set, last_ref, state)

    shared = jax.tree.map(lambda a: a if a.ndim == 2 else a.reshape(1), shared)
    ins = (shared, rows, carry, xs)
    specs = (
        jax.tree.map(fixed, shared),
        jax.tree.map(by_row, rows),
        jax.tree.map(by_row, carry),
        jax.tree.map(by_time, xs),
    )
    structure = jax.tree.structure((ins, out))
    matrices = [a for a in jax.tree.leaves(shared) if a.ndim == 2]
    held = sum(a.shape[0] * wide(a) * a.dtype.itemsize for a in matrices)
    results = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(batch, block), width // units, chunks),
        in_specs=jax.tree.leaves(specs),
        out_specs=jax.tree.leaves((jax.tree.map(by_row, carry), jax.tree.map(by_time, ys))),
        out_shape=jax.tree.leaves(out),
        compiler_params=compiler_params(platform, 3, state=True, held=held),
        interpret=platform == "cpu",
    )(*jax.tree.leaves(ins))
    return jax.tree.unflatten(jax.tree.structure(out), results)


def _gpu_rows(shared: Any) -> int:
    return GPU_ROWS if any(a.ndim == 2 and a.shape[0] > 1 for a in jax.tree.leaves(shared)) else 1


def _scalars(platform: str) -> pl.BlockSpec:
    """All of a vector of scalars, where the core can index it by a number."""
    return pl.BlockSpec(memory_space=pltpu.SMEM) if platform == "tpu" else pl.BlockSpec()


def _copy(to: Any, from_: Any) -> None:
    to[...] = from_[...]


def _set(ref: Any, value: jax.Array) -> None:
    ref[...] = value


def _store(t: Any, ref: Any, value: jax.Array) -> None:
    ref[t] = value


def _pad_axis(a: jax.Array, axis: int, amount: int) -> jax.Array:
    widths = [(0, amount if n == axis else 0) for n in range(a.ndim)]
    return jnp.pad(a, widths) if amount else a


def padded_bytes(rows: int, columns: int, dtype: Any) -> int:
    """Bytes of an array in VMEM, whose tiles are 8 x 128 words."""
    size = jnp.dtype(dtype).itemsize
    tall = 8 * max(1, 4 // size)
    return -(-rows // tall) * tall * -(-columns // 128) * 128 * size


def _tpu_blocks(shared: Any, fixed: Any, by_time: Any, batch: int, steps: int) -> tuple[int, int]:
    """Rows and steps per block that fit on the chip, each block being held twice."""
    matrices = [a for a in jax.tree.leaves(shared) if a.ndim == 2]
    resident = sum(padded_bytes(a.shape[0], a.shape[1], a.dtype) for a in matrices)

    def room(block: int) -> float:
        """How many steps fit beside what stays."""

        def total(tree: Any) -> int:
            return sum(
                padded_bytes(block, a.shape[-1], a.dtype)
                for a in jax.tree.leaves(tree)
                if a.ndim > 1
            )

        return (ON_CHIP / 2 - resident - total(fixed)) / total(by_time)

    blocks = [batch]
    while blocks[-1] > 8:  # halves, in whole tiles
        blocks.append(max(8, math.ceil(blocks[-1] / 16) * 8))
    # Eight steps hide the start of a block's copy; taller blocks use the matrix unit better.
    block = next((b for b in blocks if room(b) >= min(8, steps)), blocks[-1])
    return block, max(1, min(steps, MOST_STEPS, int(room(block))))
