"""How fast a train step could be: its operations and bytes, and the rates of the device.

Counted is the algorithm of the fused backend where it keeps every activation, with every array
that outlives a step moved once in each direction and nothing else; forming some again can be
faster. Pointwise functions count as nothing, so the floor of GATO, which has little besides, is
one of memory alone on a device with fast products. The rate of a copy is that of main memory: a
step whose arrays stay in caches can be faster than its floor.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.work import DTYPES, Contender, Size


def count(contender: Contender, size: Size, bytes_per_number: int = 4) -> dict[str, float]:
    """Floating-point operations and bytes of a train step, all lanes together.

    Args:
      contender: the cell.
      size: B, T, D, F.
      bytes_per_number: 4 in float32, 2 in bfloat16 (carries are float32 all the same).

    Returns:
      ``{"operations", "bytes"}``.
    """
    cell = contender.build(size.features)
    params = jax.eval_shape(lambda key: cell.init_params(key, size.inputs), jax.random.key(0))
    carry = jax.eval_shape(lambda: cell.initial(()))
    state = sum(leaf.size for leaf in jax.tree.leaves(carry))
    rows = size.batch * size.steps * contender.lanes
    if "f" in params and "g" in params:
        operations, numbers = _gato(params, size, state)
    elif "kernel" in params:
        operations, numbers = _dense(params, size, state, contender.detach)
    else:
        operations, numbers = _memory(params, size, state)
    weights = sum(leaf.size for leaf in jax.tree.leaves(params)) * contender.lanes
    # Weights are read in each pass and their gradients written, once for all steps.
    return {
        "operations": float(rows * operations),
        "bytes": float(bytes_per_number * (rows * numbers + 3 * weights)),
    }


def _width(params: Any, role: str) -> int:
    return sum(leaf.shape[-1] for leaf in params.get(role, {}).values())


def _dense(params: Any, size: Size, state: int, detach: float) -> tuple[float, float]:
    """Of a step and example: operations, and numbers moved."""
    # An LRU's outputs are products of their own, which no step waits for either.
    outer_params = [params.get(role, ()) for role in ("kernel", "out_kernel", "skip")]
    from_input = 2 * sum(leaf.size for leaf in jax.tree.leaves(outer_params))
    recurrent = 2 * size.features * _width(params, "recurrent_kernel")
    # Each product has three forms: forward, the cotangent of its input, that of its weights. A
    # detached step has no cotangent of its state.
    operations = 3 * from_input + (3 - detach) * recurrent
    activations = _width(params, "kernel") + state  # pre-activations and carries
    numbers = (
        # Forward: x is read, what is kept is written (the outputs are in it).
        (size.inputs + activations)
        # Backward loop: it is read with the cotangent of the outputs.
        + (activations + size.features)
        + 2 * _width(params, "kernel")  # cotangents of pre-activations, there and back
        + (size.features + 2 * size.inputs)  # weights' gradients read h and x; x's is written
    )
    return operations, numbers


def _gato(params: Any, size: Size, state: int) -> tuple[float, float]:
    """Of a step and example: operations, and numbers moved; chunks of g are computed again."""
    f, g = _width(params["f"], "kernel"), _width(params["g"], "kernel")
    second = 2 * g if "out_kernel" in params["g"] else 0
    # f's maps as in _dense, with a diagonal product; g's forward pass runs twice.
    operations = 3 * f * (2 * size.inputs + 2) + 4 * (g * (2 * size.inputs + 2) + second)
    numbers = (
        (size.inputs + f + state + size.features)  # forward: x; pre-activations, r, s, outputs
        + (f + state + size.features)  # backward: these, and the cotangent of the outputs
        + 2 * f  # cotangents of f's pre-activations, there and back
        + 3 * size.inputs  # x for g and for the weights' gradients, x's gradient
    )
    return operations, numbers


def _memory(params: Any, size: Size, state: int) -> tuple[float, float]:
    """Of a cell with a memory: its matrices, once for a step, and its state there and back."""
    matrices = sum(leaf.size for leaf in jax.tree.leaves(params) if leaf.ndim == 2)
    return 6 * matrices, size.inputs + 2 * state


def rates(dtype: str = "float32", tf32: bool = False, scale: int | None = None) -> dict[str, float]:
    """What the devices reach together: the best of a few runs, each on all of them.

    Args:
      dtype: of the matrix product.
      tf32: whether a float32 product may use TF32.
      scale: side of the matrices; default 2048 on a CPU, 8192 elsewhere.

    Returns:
      ``{"operations_per_second", "bytes_per_second"}`` of a product and of a copy.
    """
    jax.config.update("jax_default_matmul_precision", None if tf32 else "highest")
    side = scale or (2048 if jax.default_backend() == "cpu" else 8192)
    mesh = Mesh(np.array(jax.devices()), ("rows",))
    row_sharding, full_sharding = NamedSharding(mesh, P("rows")), NamedSharding(mesh, P())
    rows = side // mesh.size * mesh.size
    a = jax.device_put(jnp.ones((rows, side), DTYPES[dtype]), row_sharding)
    b = jax.device_put(jnp.ones((side, side), DTYPES[dtype]), full_sharding)
    product = _best(lambda: jax.block_until_ready(_product(a, b)))
    buffer = jax.device_put(jnp.ones((16 * rows, side), jnp.float32), row_sharding)
    size = buffer.nbytes

    def copy() -> None:
        nonlocal buffer
        buffer = jax.block_until_ready(_copy(buffer))

    return {
        "operations_per_second": 2.0 * rows * side * side / product,
        "bytes_per_second": 2.0 * size / _best(copy),
    }


@jax.jit
def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return a @ b


@functools.partial(jax.jit, donate_argnums=0)  # in place: fresh pages would be timed too
def _copy(x: jax.Array) -> jax.Array:
    return -x


def _best(run: Callable[[], Any], repeats: int = 7) -> float:
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
