"""The native kernels' threads and devices: what they share changes no number.

They need a C++ compiler, as in test_native.py.
"""

import ast
import functools
import hashlib
import itertools
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import recurrent_gates as rg
from recurrent_gates import target
from tests.support import assert_close, assert_identical
from tests.test_native import CELLS, SHARED, TOLERANCE, arrays, everything, two_cores

__all__ = ["two_cores"]


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *itertools.product(("lstm", "gru"), ("rows", "units", "small", *SHARED)),
        *itertools.product(("gato1",), ("many_examples", "many_units")),
    ],
)
def test_threads_change_no_bit(name, size, monkeypatch):
    cell, values = arrays(CELLS[name], size)
    masks = () if name.startswith("gato") else ("valid", "resets")
    shared = everything(cell, "native", masks=masks)(*values)
    monkeypatch.setattr(target, "cores", lambda: 1)
    assert_identical(everything(cell, "native", masks=masks)(*values), shared)


def results_of_threads(cores, names, size):
    """Digests of what kernels give on so many cores."""
    digests = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "cores", lambda: cores)
        for name in names:
            cell, values = arrays(CELLS[name], size)
            out = everything(cell, "native", masks=("valid", "resets"))(*values)
            digests += [hashlib.sha256(np.asarray(x)).hexdigest() for x in jax.tree.leaves(out)]
    return digests


@pytest.mark.long
def test_more_threads_share_units_too():
    """Of weights in place, whose rows two threads share; XLA has as many as NPROC says."""
    names, size = ("lstm", "gru"), "few_steps_of_many_units"
    call = f"test_native_threads.results_of_threads(5, {names}, {size!r})"
    process = subprocess.run(
        [sys.executable, "-c", f"from tests import test_native_threads; print({call})"],
        env={**os.environ, "NPROC": "5"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ast.literal_eval(process.stdout) == results_of_threads(2, names, size)


def test_many_calls_at_once_end():
    """Each waits for helpers from a pool that all of them use; none waits for one that is not to be
    had."""
    cell, values = arrays(CELLS["lstm"], "units")
    run = everything(cell, "native")
    alone = run(*values)

    @jax.jit
    def many(params, xs, carry):
        return [run(params, xs, carry) for _ in range(6)]

    for _ in range(20):
        for out in many(*values):
            assert_close(out, alone, 1e-7)


def test_helpers_may_still_use_every_core():
    """One put on the core of the thread that it helps is sent away, for that moment alone."""
    cell, values = arrays(CELLS["lstm"], "units")
    run = everything(cell, "native")
    for _ in range(100):
        jax.block_until_ready(run(*values))

    def allowed():
        threads = map(int, os.listdir("/proc/self/task"))
        return {frozenset(os.sched_getaffinity(thread)) for thread in threads}

    end = time.monotonic() + 60  # a leader between its two calls needs a core to go on
    while len(allowed()) > 1 and time.monotonic() < end:
        time.sleep(0.01)
    assert allowed() == {frozenset(os.sched_getaffinity(0))}


@pytest.mark.parametrize("name", ["ur_gru", "gru", "r_janet"])
def test_blocks_of_rows_in_place_do_not_meet(name):
    """Five rows of weights in place are blocks of two and three where four would fit."""
    cell, (params, xs, carry) = arrays(CELLS[name], "five_rows_in_place")
    run = jax.jit(functools.partial(rg.unroll, cell, backend="native"))
    expected = rg.unroll(cell, params, xs, carry, backend="scan")
    for _ in range(200):
        assert_close(run(params, xs, carry), expected, TOLERANCE)


@pytest.mark.parametrize("name", ["lstm", "gato1", "gato2"])
def test_shard_map_runs_kernels_and_keeps_what_varies(name):
    cell, (params, xs, carry) = arrays(CELLS[name], "rows")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("batch",))

    def loss(params, xs, carry):
        return jax.lax.psum(
            jnp.sum(jnp.sin(rg.unroll(cell, params, xs, carry, backend="native")[1])), "batch"
        )

    specs = (P(), P(None, "batch"), P("batch"))
    mapped = jax.jit(jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=specs, out_specs=P()))
    assert "custom_call @recurrent_gates" in mapped.lower(params, xs, carry).as_text()

    def alone(params, xs, carry):
        return jnp.sum(jnp.sin(rg.unroll(cell, params, xs, carry, backend="scan")[1]))

    assert_close(mapped(params, xs, carry), jax.grad(alone)(params, xs, carry), 1e-5)


@pytest.mark.long
def test_several_devices_without_shard_map_run_the_portable_form():
    """Two devices of a process of their own: the partitioner cannot cut a kernel."""
    code = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import recurrent_gates as rg
cell = rg.LSTM(8)
params = cell.init_params(jax.random.key(0), 3)
xs = jax.random.normal(jax.random.key(1), (5, 4, 3))



def loss(params, xs):
    return jnp.sum(jnp.sin(rg.unroll(cell, params, xs, backend="native")[1]))


run = jax.jit(jax.value_and_grad(loss, (0, 1)))
mesh = Mesh(np.array(jax.devices()), ("batch",))
shards = jax.device_put(xs, NamedSharding(mesh, P(None, "batch")))
assert "recurrent_gates_lstm" in run.lower(params, xs).as_text()
assert "recurrent_gates_lstm" not in run.lower(params, shards).as_text()
assert "all-gather" not in run.lower(params, shards).compile().as_text()
both = map(jax.tree.leaves, (run(params, shards), run(params, xs)))
for a, b in zip(*both, strict=True):
    np.testing.assert_allclose(a, b, atol=2e-6)

# Parts of the batch by shard_map, differentiated from outside, without jit.
parts = jax.shard_map(
    lambda params, xs: jax.lax.psum(loss(params, xs), "batch"),
    mesh=mesh,
    in_specs=(P(), P(None, "batch")),
    out_specs=P(),
    check_vma=False,
)
both = map(jax.tree.leaves, (jax.grad(parts)(params, xs), run(params, xs)[1][0]))
for a, b in zip(*both, strict=True):
    np.testing.assert_allclose(a, b, atol=2e-6)

# A carry that resets take on all devices gets the gradients of all of them.
resets = jnp.arange(20).reshape(5, 4) % 3 == 0


def reset(params, reset_carry, xs, carry, resets):
    options = {"reset_carry": reset_carry, "resets": resets, "backend": "native"}
    return jnp.sum(jnp.sin(rg.unroll(cell, params, xs, carry, **options)[1]))


mapped = jax.shard_map(
    lambda *values: jax.lax.psum(reset(*values), "batch"),
    mesh=mesh,
    in_specs=(P(), P(), P(None, "batch"), P("batch"), P(None, "batch")),
    out_specs=P(),
)
start = cell.initial((4,))
again = jax.tree.map(lambda x: x[:2] + 0.5, start)
twice = lambda again: jax.tree.map(lambda x: jnp.concatenate([x, x]), again)
whole = jax.grad(lambda params, again: reset(params, twice(again), xs, start, resets), (0, 1))
actual = jax.jit(jax.grad(mapped, (0, 1)))(params, again, xs, start, resets)
for a, b in zip(*map(jax.tree.leaves, (actual, whole(params, again))), strict=True):
    np.testing.assert_allclose(a, b, atol=2e-6)

# Devices that run a program together share the cores; one of several that runs it alone has all.
from recurrent_gates import target
from recurrent_gates.backends.native.kernel import threads

target.cores = lambda: 4
for count, share in ((1, 4), (2, 2)):
    seen = []
    some = Mesh(np.array(jax.devices()[:count]), ("batch",))
    rows = P("batch")
    jax.shard_map(lambda x: seen.append(threads()) or x, mesh=some, in_specs=rows, out_specs=rows)(
        jnp.zeros(2)
    )
    assert set(seen) == {share}, (count, seen)

# The axes of an explicit mesh are in the types of arrays: another backend's.
with jax.set_mesh(jax.make_mesh((2,), ("batch",), axis_types=(jax.sharding.AxisType.Explicit,))):
    xs = jax.device_put(xs, P(None, "batch"))
    carry = jax.device_put(cell.initial((4,)), P("batch"))
    ys = jax.jit(lambda params, xs, carry: rg.unroll(cell, params, xs, carry)[1])(params, xs, carry)
    np.testing.assert_allclose(ys, rg.unroll(cell, params, np.asarray(xs))[1], atol=2e-6)

    # A linear recurrence in blocks, as on a GPU.
    from recurrent_gates.backends import parallel

    parallel._block_steps = lambda steps, width: 4
    linear = rg.LRU(4)
    params = linear.init_params(jax.random.key(0), xs.shape[-1])
    carry = jax.device_put(linear.initial((4,)), P("batch"))
    run = jax.jit(rg.unroll, static_argnums=0, static_argnames="backend")
    ys = run(linear, params, xs, carry, backend="parallel")[1]
    np.testing.assert_allclose(ys, rg.unroll(linear, params, np.asarray(xs))[1], atol=2e-5)
"""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
