"""Our side of a comparison: a contender compiled for the devices there are."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import recurrent_gates as rg
from benchmarks import floor, work
from benchmarks.work import Arrays, Contender, Gradients, Size, make

_AXIS = "batch"
# From so many rows of each, rows of all steps of each, and operations of a train step, CPU devices
# share a batch: else one of them, whose calls use all cores, is as fast. It packs the weights once,
# and adds up no gradients.
LEAST_ROWS = 12
LEAST_ROWS_OF_STEPS = 1000
LEAST_OPERATIONS = 1e9


class Side(NamedTuple):
    """One side of a comparison. Both functions return when everything they return is computed.

    Attributes:
      forward: runs the forward pass and returns the outputs.
      train: runs it with the pullback of the cotangent to parameters, inputs and initial
        carry; returns the outputs and these gradients.
      outputs: what ``forward`` returned -> ys ``[T, B, F]``.
      gradients: the gradients that ``train`` returned -> ``Gradients`` like our own.
      facts: what is known beside times, for the row.
    """

    forward: Callable[[], Any]
    train: Callable[[], tuple[Any, Any]]
    outputs: Callable[[Any], Any]
    gradients: Callable[[Any], Gradients]
    facts: dict[str, Any]


Run = Callable[[Any, jax.Array, Any, Any], jax.Array]


def recurrence(contender: Contender, size: Size, dtype: str, remat: int | None = None) -> Run:
    """(params, xs, carry, noise) -> ys of one lane."""
    cell, carry_fns = contender.build(size.features, dtype), contender.carry_fns()

    def run(params: Any, xs: jax.Array, carry: Any, noise: Any) -> jax.Array:
        _, ys = rg.unroll(
            cell,
            params,
            xs,
            carry,
            carry_fns=carry_fns,
            noise=noise,
            remat=remat,
            backend=contender.backend,
        )
        return ys

    return run


def train_step(run: Run) -> Callable[[Arrays], tuple[jax.Array, Gradients]]:
    """The outputs, and the gradients of sum(ys * cotangent)."""

    def step(arrays: Arrays) -> tuple[jax.Array, Gradients]:
        ys, pullback = jax.vjp(
            lambda params, xs, carry: run(params, xs, carry, arrays.noise),
            arrays.params,
            arrays.xs,
            arrays.carry,
        )
        return ys, Gradients(*pullback(arrays.cotangent))

    return step


def forward_pass(run: Run) -> Callable[[Arrays], jax.Array]:
    return lambda arrays: run(arrays.params, arrays.xs, arrays.carry, arrays.noise)


def compiled_side(
    run: Run, arrays: Arrays, *, lanes: int = 1, devices: int = 1, kind: str = ""
) -> Side:
    """A side from a recurrence in JAX.

    Args:
      run: of one lane.
      arrays: its inputs.
      lanes: how many lanes the arrays have.
      devices: how many share the batch.
      kind: said in the facts.
    """
    step, forward = train_step(run), forward_pass(run)
    if lanes > 1:
        step, forward = jax.vmap(step), jax.vmap(forward)
    if devices > 1:
        mesh = Mesh(np.array(jax.devices()[:devices]), (_AXIS,))
        lane_axes = (None,) * (lanes > 1)
        rows, state = P(*lane_axes, None, _AXIS), P(*lane_axes, _AXIS)
        specs = Arrays(params=P(), xs=rows, carry=state, cotangent=rows, noise=P())
        local_step = step

        def summed(arrays: Arrays) -> tuple[jax.Array, Gradients]:
            ys, gradients = local_step(arrays)
            return ys, gradients._replace(params=jax.lax.psum(gradients.params, _AXIS))

        # Gradients are added up by hand, once, outside the time loop.
        shard = functools.partial(jax.shard_map, mesh=mesh, in_specs=(specs,), check_vma=False)
        step = shard(summed, out_specs=(rows, Gradients(P(), rows, state)))
        forward = shard(forward, out_specs=rows)
        placed_arrays = [
            jax.device_put(tree, NamedSharding(mesh, spec))
            for tree, spec in zip(arrays, specs, strict=True)
        ]
        arrays = Arrays(*placed_arrays)

    forward_jit = jax.jit(forward)  # compiled when it is first run, if it is
    start = time.perf_counter()
    train_compiled = jax.jit(step).lower(arrays).compile()
    seconds = time.perf_counter() - start
    memory = train_compiled.memory_analysis()
    facts = {
        "kind": kind,
        "devices": devices,
        "compile_seconds": seconds,
        # Of all devices together: XLA's figure is one device's.
        "temporary_bytes": memory.temp_size_in_bytes * devices if memory else None,
    }
    return Side(
        forward=lambda: jax.block_until_ready(forward_jit(arrays)),
        train=lambda: jax.block_until_ready(train_compiled(arrays)),
        outputs=lambda ys: ys,
        gradients=lambda gradients: gradients,
        facts=facts,
    )


def devices_of(contender: Contender, size: Size) -> int:
    """How many devices share a batch: the most that divide it, on a CPU where that pays."""
    least_rows = 1
    if jax.default_backend() == "cpu":
        if floor.count(contender, size)["operations"] < LEAST_OPERATIONS:
            return 1
        least_rows = max(LEAST_ROWS, -(-LEAST_ROWS_OF_STEPS // size.steps))
    counts = range(2, jax.device_count() + 1)
    return max([1, *(n for n in counts if size.batch % n == 0 and size.batch >= n * least_rows)])


def side(contender: Contender, size: Size, dtype: str) -> Side:
    """Our side of a comparison."""
    return compiled_side(
        recurrence(contender, size, dtype),
        make(contender, size, dtype),
        lanes=contender.lanes,
        devices=devices_of(contender, size),
        kind="ours",
    )


def expected(contender: Contender, size: Size, dtype: str) -> tuple[jax.Array, Gradients]:
    """What a contender, and any peer of its cell, has to compute: the plain scan's numbers.

    The scan runs on one device and keeps about sqrt(T) steps at a time.
    """
    return _expected(dataclasses.replace(contender, backend="scan"), size, dtype)


def forget() -> None:
    """Lets go of the arrays that were made for comparisons, which can be gigabytes."""
    _expected.cache_clear()
    work.forget()


@functools.cache
def _expected(scan: Contender, size: Size, dtype: str) -> tuple[jax.Array, Gradients]:
    step = train_step(recurrence(scan, size, dtype, remat=math.isqrt(size.steps - 1) + 1))
    step = jax.vmap(step) if scan.lanes > 1 else step
    return jax.jit(step)(make(scan, size, dtype))
