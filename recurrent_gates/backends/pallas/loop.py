"""A loop over time as one Pallas kernel: what ``jax.lax.scan`` does, with its state on the chip.

The kernel runs in three ways. On a TPU (Mosaic) time is the inner, sequential axis of the grid:
blocks of steps stream through VMEM while the state and everything shared stay there. On a GPU
(Triton) one program owns a few rows of the batch, most often one, of some units where these are
independent, and walks through all steps. On a CPU Pallas interprets the TPU's kernel, slowly and
exactly.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as pltriton

from recurrent_gates.backends.pallas.body import in_kernel
from recurrent_gates.shapes import kernel_result

ON_CHIP = 12 * 2**20
"""Bytes of VMEM that the blocks of a kernel may take: what Mosaic grants by default (16 MB) less
room for temporaries."""

MOST_STEPS = 32
"""Steps per block on a TPU where memory does not ask for fewer."""

GPU_ROWS = 16
"""Rows of the batch per program on a GPU where one row each would hold too many copies of the
weights: the fewest that a tensor-core product takes."""

GPU_HELD = 2**27
"""Bytes of weights that all programs of one row may hold together on a GPU. On an H200, to train an
LSTM of 64 units, they took 0.63 of the time of ``fused`` at this size, and 0.14 with a sixteenth of
it."""

GPU_FEW = 264
"""Programs that an H100 runs at once: two on each of its 132 multiprocessors."""

GPU_UNITS = 128
"""Units per program on a GPU where they do not interact: one to a thread."""

GPU_AHEAD = 8
"""Steps whose inputs such a program loads at once: a load takes longer than a step's arithmetic. A
step with products takes as long as a load, and loads what the next one reads."""

Body = Callable[[Any, Any, Any, Any], tuple[Any, Any]]


class OnGpu(NamedTuple):
    """The programs of a loop on a GPU: the rows and the warps of each."""

    rows: int
    warps: int


def on_gpu(batch: int, heads: int, matrix_bytes: int) -> OnGpu:
    """How a loop with products is cut into programs on a GPU.

    A program has one row: its threads hold the weights, and a step takes a fraction of the time of
    sixteen rows on tensor cores. That pays until each multiprocessor has many such programs.

    Args:
      batch: rows.
      heads: N, each a program's own.
      matrix_bytes: bytes of the matrices of a head.
    """
    if batch * heads * matrix_bytes > GPU_HELD:
        return OnGpu(GPU_ROWS, 8 if matrix_bytes >= 2**16 else 4)
    # A thread has 128 registers for weights. Where few programs run, each has at least 128 threads.
    warps = max(matrix_bytes // 2**14, 4 if batch * heads <= GPU_FEW else 1)
    return OnGpu(1, 1 << (warps - 1).bit_length())


def on_platform(kernel_call: Callable[..., Any], *args: Any) -> Any:
    """``kernel_call(platform, *args)`` for the platform that the program is lowered for."""
    calls = {name: functools.partial(kernel_call, name) for name in ("cpu", "tpu", "cuda")}
    return jax.lax.platform_dependent(*args, **calls)


def compiler_params(platform: str, axes: int, *, state: bool, warps: int | None = None) -> Any:
    """What each compiler is told.

    Args:
      platform: of the kernel.
      axes: of its grid.
      state: whether the last of them carries state, on a TPU.
      warps: of a program of a loop over time, on a GPU.
    """
    if platform == "tpu":
        last = pltpu.ARBITRARY if state else pltpu.PARALLEL
        semantics = (*[pltpu.PARALLEL] * (axes - 1), last)
        return pltpu.CompilerParams(dimension_semantics=semantics)
    if platform == "cuda" and warps is not None:
        # No pipeline: no load of a step feeds a tensor core, and its buffers would take the
        # weights' room on the chip.
        return pltriton.CompilerParams(num_warps=warps, num_stages=1)
    return pltriton.CompilerParams() if platform == "cuda" else None


def time_loop(
    body: Body,
    shared: Any,
    rows: Any,
    carry: Any,
    xs: Any,
    *,
    reverse: bool,
    gpu: OnGpu,
    elementwise: bool = False,
    heads: int = 1,
) -> tuple[Any, Any]:
    """``lax.scan(lambda c, x: body(shared, rows, c, x), carry, xs)`` as one kernel.

    Args:
      body: (shared, rows, carry, x_t) -> (carry, y_t); it must treat rows independently and its
        y_t must be ``[B, width]``.
      shared: what every row reads at every step; arrays ``[m, n]``, and scalars; with heads,
        ``[N, m, n]``, of which each head has its own.
      rows: what each row reads at every step; arrays ``[B, width]``.
      carry: the state; arrays ``[B, width]``.
      xs: inputs by step; arrays ``[T, B, width]``, and scalars by step ``[T]``.
      reverse: run t from T - 1 to 0.
      gpu: its programs on a GPU.
      elementwise: whether body treats the columns independently and alike, too; all that it
        returns then has as many as the carry, and all that it reads as many or one.
      heads: N; where it is above 1, body treats N blocks of columns independently and alike, also
        where it is given one of them alone; nothing has 1 column but what all heads read.

    Returns:
      (carry, ys), ys ``[T, B, width]`` with every y at the t of its x.

    The caller defines the first derivative. Higher ones come from ``lax.scan``.
    """
    shared = jax.tree.map(jnp.asarray, shared)
    # Bools travel as integers.
    is_bool = jax.tree.map(lambda a: a.dtype == bool, xs)
    xs = jax.tree.map(lambda a, b: a.astype(jnp.int32) if b else a, xs, is_bool)

    def typed(shared: Any, rows: Any, carry: Any, x_t: Any) -> tuple[Any, Any]:
        x_t = jax.tree.map(lambda a, b: a != 0 if b else a, x_t, is_bool)
        return body(shared, rows, carry, x_t)

    options: Any = dict(reverse=reverse, elementwise=elementwise, heads=heads, gpu=gpu)
    call = functools.partial(_time_loop, body=typed, **options)

    def scanned(shared: Any, rows: Any, carry: Any, xs: Any) -> tuple[Any, Any]:
        def step(carry: Any, x_t: Any) -> tuple[Any, Any]:
            return typed(shared, rows, carry, x_t)

        return jax.lax.scan(step, carry, xs, reverse=reverse)

    @jax.custom_jvp
    def run(*arrays: Any) -> tuple[Any, Any]:
        return on_platform(call, *arrays)

    @run.defjvp
    def _(arrays: Any, tangents: Any) -> Any:
        return jax.jvp(scanned, arrays, tangents)

    return run(shared, rows, carry, xs)


def _time_loop(
    platform: str, shared: Any, rows: Any, carry: Any, xs: Any, **options: Any
) -> tuple[Any, Any]:
    batch = jax.tree.leaves(carry)[0].shape[0]
    if platform == "cuda":  # Triton checks no bounds: whole blocks only
        padding = -batch % options["gpu"].rows
        rows, carry, xs = jax.tree.map(
            lambda a: _pad_axis(a, a.ndim - 2, padding) if a.ndim > 1 else a, (rows, carry, xs)
        )
        last, ys = _call(platform, shared, rows, carry, xs, **options)
        return jax.tree.map(lambda a: a[..., :batch, :], (last, ys))
    return _call(platform, shared, rows, carry, xs, **options)


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
    heads: int,
    gpu: OnGpu,
) -> tuple[Any, Any]:
    """The kernel of one platform: a plan of its blocks, and the loop inside of one of them."""
    steps = jax.tree.leaves(xs)[0].shape[0]
    arguments = shared, rows, carry, jax.tree.map(lambda a: a[0], xs)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arguments)
    y_t = jax.eval_shape(body, *shapes)[1]
    template = jax.tree.leaves(carry)[0]
    ys = jax.tree.map(lambda a: kernel_result((steps, *a.shape), template, a.dtype), y_t)
    last = jax.tree.map(lambda a: kernel_result(a.shape, a), carry)

    ins, out = (shared, rows, carry, xs), (last, ys)
    plan = _plan(platform, ins, ys, gpu.rows, reverse=reverse, elementwise=elementwise, heads=heads)
    shared = jax.tree.map(lambda a: a if a.ndim > 1 else a.reshape(1), shared)
    ins = (shared, rows, carry, xs)
    specs = (
        jax.tree.map(plan.shared, shared),
        jax.tree.map(plan.by_row, (rows, carry)),
        jax.tree.map(plan.by_time, xs),
    )
    out_specs = (jax.tree.map(plan.by_row, last), jax.tree.map(plan.by_time, ys))
    results = pl.pallas_call(
        _kernel(plan, body, jax.tree.structure((ins, out))),
        grid=plan.grid,
        in_specs=jax.tree.leaves(specs),
        out_specs=jax.tree.leaves(out_specs),
        out_shape=jax.tree.leaves(out),
        compiler_params=compiler_params(platform, 3, state=True, warps=gpu.warps),
        interpret=platform == "cpu",
    )(*jax.tree.leaves(ins))
    return jax.tree.unflatten(jax.tree.structure(out), results)


class _Plan(NamedTuple):
    """How a loop is cut into programs, on a grid of rows, units and time.

    Attributes:
      platform: of the kernel.
      reverse: whether time runs backwards.
      batch, width, steps: B, the columns of the carry, and T.
      rows, units, chunk: how many of each a block has.
      ahead: steps whose inputs are loaded at once.
      heads: blocks of columns, each a program's own.
    """

    platform: str
    reverse: bool
    batch: int
    width: int
    steps: int
    rows: int
    units: int
    chunk: int
    ahead: int
    heads: int

    @property
    def chunks(self) -> int:
        """The blocks of time."""
        return pl.cdiv(self.steps, self.chunk)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Programs by rows and by units; on the last axis time, which carries the state."""
        return pl.cdiv(self.batch, self.rows), self.width // self.units, self.chunks

    def at(self, i: Any) -> Any:
        """The block of time of a grid step."""
        return self.chunks - 1 - i if self.reverse else i

    def wide(self, a: Any) -> int:
        """The columns of an array's block: some units, a head's, or all there are."""
        return _columns(a, self.width, self.units, self.heads)

    def _column(self, a: Any, u: Any) -> Any:
        return u if self.wide(a) < a.shape[-1] else 0

    def _scalars(self) -> pl.BlockSpec:
        """All of a vector of scalars, where the core can index it by a number."""
        smem = self.platform == "tpu"
        return pl.BlockSpec(memory_space=pltpu.SMEM) if smem else pl.BlockSpec()

    def shared(self, a: Any) -> pl.BlockSpec:
        """The block of what every row reads: ``[m, n]``, a head's of them, or one scalar."""
        if a.ndim == 3:
            return pl.BlockSpec((None, *a.shape[1:]), lambda b, u, i: (u, 0, 0))
        if a.ndim != 2:
            return self._scalars()
        return pl.BlockSpec((a.shape[0], self.wide(a)), lambda b, u, i: (0, self._column(a, u)))

    def by_row(self, a: Any) -> pl.BlockSpec:
        """The block of ``[B, width]``."""
        return pl.BlockSpec((self.rows, self.wide(a)), lambda b, u, i: (b, self._column(a, u)))

    def by_time(self, a: Any) -> pl.BlockSpec:
        """The block of ``[T, B, width]``, or all scalars by step."""
        if a.ndim == 1:
            return self._scalars()
        return pl.BlockSpec(
            (self.chunk, self.rows, self.wide(a)),
            lambda b, u, i: (self.at(i), b, self._column(a, u)),
        )


def _columns(a: Any, width: int, units: int, heads: int) -> int:
    """The columns of an array's block, where a block of the carry has some units of its width."""
    columns: int = a.shape[-1]
    if heads > 1:
        return columns // heads if columns > 1 else 1
    return units if columns == width else columns


def _plan(
    platform: str,
    ins: Any,
    ys: Any,
    gpu_rows: int,
    *,
    reverse: bool,
    elementwise: bool,
    heads: int,
) -> _Plan:
    shared, rows, carry, xs = ins
    batch, width = jax.tree.leaves(carry)[0].shape
    steps = jax.tree.leaves(xs)[0].shape[0]
    units, ahead = width // heads, 1
    if platform == "cuda":
        block, chunk = gpu_rows, steps
        if elementwise:
            units, ahead = math.gcd(width, GPU_UNITS), GPU_AHEAD
    else:
        wide = functools.partial(_columns, width=width, units=units, heads=heads)
        block, chunk = _tpu_blocks(shared, (rows, carry, carry), (xs, ys), batch, steps, wide)
    return _Plan(platform, reverse, batch, width, steps, block, units, chunk, ahead, heads)


def _kernel(plan: _Plan, body: Body, structure: Any) -> Callable[..., None]:
    """What a program does with its blocks: the steps of one block of time, in a loop.

    On a TPU the state lives in the block of the last carry, which stays where it is from one block
    of time to the next; the first of them fills it.
    """
    steps, chunk, ahead = plan.steps, plan.chunk, plan.ahead
    gpu = plan.platform == "cuda"
    kernel_body = in_kernel(body, one_row=gpu and plan.rows == 1)

    def kernel(*refs: Any) -> None:
        (shared_ref, rows_ref, carry_ref, xs_ref), (last_ref, ys_ref) = jax.tree.unflatten(
            structure, refs
        )
        i = plan.at(pl.program_id(2))
        if not gpu:

            @pl.when(pl.program_id(2) == 0)
            def _() -> None:
                jax.tree.map(_copy, last_ref, carry_ref)

        shared = jax.tree.map(lambda ref: ref[...] if len(ref.shape) > 1 else ref[0], shared_ref)
        rows = jax.tree.map(lambda ref: ref[...], rows_ref)
        count = chunk if steps % chunk == 0 else jnp.minimum(chunk, steps - i * chunk)

        def time(n: Any) -> Any:
            """Of the n-th step."""
            return count - 1 - n if plan.reverse else n

        def load(n: Any) -> Any:
            t = time(n)
            return jax.tree.map(
                lambda ref: ref[t] if len(ref.shape) == 3 else ref[i * chunk + t], xs_ref
            )

        def step(n: Any, carry: Any, x_t: Any) -> Any:
            carry, y_t = kernel_body(shared, rows, carry, x_t)
            jax.tree.map(functools.partial(_store, time(n)), ys_ref, y_t)
            return carry

        def run(n: Any, carry: Any, number: int) -> Any:
            """Some steps from the n-th on; all their loads come before the first store."""
            for k, x_t in [(k, load(n + k)) for k in range(number)]:
                carry = step(n + k, carry, x_t)
            return carry

        def run_step(n: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
            """The n-th step, beside the loads of the next."""
            carry, x_t = state
            following = load(jnp.minimum(n + 1, count - 1))
            return step(n, carry, x_t), following

        # A thread of a GPU does not see what another one has just stored.
        state = jax.tree.map(lambda ref: ref[...], carry_ref if gpu else last_ref)
        if ahead > 1:  # all steps are in one block
            rounds, remainder = divmod(steps, ahead)
            state = jax.lax.fori_loop(0, rounds, lambda n, c: run(n * ahead, c, ahead), state)
            state = run(rounds * ahead, state, remainder)
        elif gpu:
            state, _ = jax.lax.fori_loop(0, count, run_step, (state, load(0)))
        else:
            state = jax.lax.fori_loop(0, count, lambda n, c: run(n, c, 1), state)
        jax.tree.map(_set, last_ref, state)

    return kernel


def _copy(target: Any, source: Any) -> None:
    target[...] = source[...]


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


def _tpu_blocks(
    shared: Any, fixed: Any, by_time: Any, batch: int, steps: int, wide: Callable[[Any], int]
) -> tuple[int, int]:
    """Rows and steps per block that fit on the chip, each block being held twice."""
    matrices = [a for a in jax.tree.leaves(shared) if a.ndim > 1]
    resident = sum(padded_bytes(a.shape[-2], a.shape[-1], a.dtype) for a in matrices)

    def room(block: int) -> float:
        """How many steps fit beside what stays."""

        def total(tree: Any) -> int:
            return sum(
                padded_bytes(block, wide(a), a.dtype) for a in jax.tree.leaves(tree) if a.ndim > 1
            )

        return (ON_CHIP / 2 - resident - total(fixed)) / total(by_time)

    blocks = [batch]
    while blocks[-1] > 8:  # halves, in whole tiles
        blocks.append(max(8, math.ceil(blocks[-1] / 16) * 8))
    # Eight steps hide the start of a block's copy; taller blocks use the matrix unit better.
    block = next((b for b in blocks if room(b) >= min(8, steps)), blocks[-1])
    return block, max(1, min(steps, MOST_STEPS, int(room(block))))
