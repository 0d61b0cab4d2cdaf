"""Ahead-of-time compilation for an NVIDIA GPU: `make test-cuda`. Not collected by default.

XLA's CUDA compiler runs on this machine, which needs no GPU but JAX's CUDA plugin. Nothing is
timed here, but what a step of a loop launches is counted: on a GPU that is most of what it costs.
"""

import functools
import os
import re

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh
from jaxlib import xla_client

import recurrent_gates as rg
from recurrent_gates.backends.newton import backend as newton

# An H100, as its data sheet describes it: what the compiler wants to know of a chip.
H100 = """
gpu_device_info {
  name: "NVIDIA H100 80GB HBM3" device_vendor: "NVIDIA Corporation"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  device_address_bits: 64
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
ABSTRACT = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")

pytestmark = pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend:DeprecationWarning"  # jax 0.12
)


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch):
    """What the library asks before it chooses between forms for a CPU and for others."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    # Calls back to the host need a device.
    monkeypatch.setattr(newton, "_warn", lambda *_: None)


@functools.cache
def device():
    jax.devices()  # finds the plugins
    if not xla_client.pjrt_plugin_initialized("cuda"):
        xla_client.initialize_pjrt_plugin("cuda")
    described = dict(topology="1x1x1", target_config=H100)
    return topologies.get_topology_desc("h100", platform="cuda", **described).devices[0]


def compiled(program, *shapes):
    """The executable of a program for one H100."""
    sharding = SingleDeviceSharding(device())
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=ABSTRACT)):
        traced = jax.jit(program, in_shardings=sharding, out_shardings=sharding).trace(*shapes)
        executable = traced.lower(lowering_platforms=("cuda",)).compile()
    for own in jax.tree.leaves((executable.input_shardings, executable.output_shardings)):
        assert {d.platform for d in own.device_set} == {"gpu"}
    return executable


def training_step(cell, backend, **how):
    def step(params, xs, *masks):
        def loss(params, xs):
            noise = dict(noise=masks) if masks else {}
            _, ys = rg.unroll(cell, params, xs, backend=backend, **noise, **how)
            return jnp.mean(ys.astype(jnp.float32) ** 2)

        return jax.value_and_grad(loss, (0, 1))(params, xs)

    return step


def shapes(cell, steps, batch, inputs, dtype=jnp.float32):
    params = jax.eval_shape(lambda key: cell.init_params(key, inputs), jax.random.key(0))
    return params, jax.ShapeDtypeStruct((steps, batch, inputs), dtype)


def temporary_bytes(executable):
    return executable.memory_analysis().temp_size_in_bytes


BF16 = dict(dtype=jnp.bfloat16)
CASES = {
    "lstm": (rg.LSTM(256), 100, 64, 16),
    "lstm bfloat16": (rg.LSTM(256, **BF16), 100, 64, 16, jnp.bfloat16),
    "gato1": (rg.CELLS["gato1"](512), 300, 32, 8),
    "gato2": (rg.CELLS["gato2"](512), 300, 32, 2),
}


@pytest.mark.parametrize("backend", ["scan", "fused", "newton"])
@pytest.mark.parametrize("name", CASES)
def test_backends_compile(backend, name):
    cell, *sizes = CASES[name]
    if backend == "newton" and not cell.diagonal:
        with pytest.raises(ValueError, match="newton"):
            jax.eval_shape(training_step(cell, backend), *shapes(cell, *sizes))
        return
    executable = compiled(training_step(cell, backend), *shapes(cell, *sizes))
    print(f"{backend:8} {name:16} {temporary_bytes(executable) / 1e6:8.1f} MB")


# The widest of their families that a kernel takes: the weights fill what an SM holds.
KERNELS = {
    "lstm": (rg.LSTM(64), jnp.float32),
    "lstm bfloat16": (rg.LSTM(128, **BF16), jnp.bfloat16),
    "gru": (rg.GRU(64), jnp.float32),
    "gru bfloat16": (rg.GRU(128, **BF16), jnp.bfloat16),
    "gru before": (rg.GRU(64, reset="before"), jnp.float32),
    "janet": (rg.JANET(128), jnp.float32),
    "rnn bfloat16": (rg.Elman(256, **BF16), jnp.bfloat16),
    **{
        name: (rg.CELLS[name](64), jnp.float32)
        for name in ("ur_lstm", "o_lstm", "or_gru", "om_lstm", "um_janet")
    },
    "lstm heads": (rg.LSTM(1024, heads=16), jnp.float32),
    "lstm heads bfloat16": (rg.LSTM(1024, heads=8, **BF16), jnp.bfloat16),
    "gru heads bfloat16": (rg.GRU(1024, heads=8, **BF16), jnp.bfloat16),
    "gato1": (rg.CELLS["gato1"](1024), jnp.float32),
    "gato2": (rg.CELLS["gato2"](512), jnp.float32),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile(name):
    """A training step with h-detach."""
    cell, dtype = KERNELS[name]
    field = "r" if name.startswith("gato") else "h"
    step = training_step(cell, "pallas", carry_fns=(rg.Detach(0.5, field=field),))
    mask = jax.ShapeDtypeStruct((50,), bool)
    executable = compiled(step, *shapes(cell, 50, 32, 16, dtype), mask)
    wanted = {"gato1": 4, "gato2": 6}.get(name, 2)
    assert executable.as_text().count("__gpu$xla.gpu.triton") == wanted
    print(f"pallas   {name:16} {temporary_bytes(executable) / 1e6:8.1f} MB")


LAUNCHED = re.compile(
    r" (fusion|custom-call|copy|reduce|transpose|dynamic-update-slice|while|conditional)\("
)


def launches(executable):
    """By loop, in the order of the program: (its trip count, the programs that a trip starts)."""
    text = executable.as_text()
    bodies = dict(re.findall(r"^%([\w.\-]+) \([^\n]*\{\n(.*?)^\}", text, re.M | re.S))
    found = []
    for line in text.splitlines():
        loop = re.search(r" while\(.*body=%([\w.\-]+)", line)
        if loop:
            trips = int(re.search(r'known_trip_count":\{"n":"(\d+)"', line).group(1))
            found.append((trips, len(LAUNCHED.findall(bodies[loop.group(1)]))))
    return found


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("name", ["lstm", "ur_lstm", "gru", "janet"])
def test_a_step_of_fused_launches_little(name, detach):
    """A product, what follows it, and an eighth of all stores, in either direction; and nothing
    that the host must decide."""
    cell, steps = rg.CELLS[name](256), 160
    how = dict(carry_fns=(rg.Detach(0.5),)) if detach else {}
    masks = [jax.ShapeDtypeStruct((steps,), bool)] if detach else []
    step = training_step(cell, "fused", **how)
    executable = compiled(step, *shapes(cell, steps, 64, 16), *masks)
    assert " conditional(" not in executable.as_text()
    loops = launches(executable)
    assert [trips for trips, _ in loops] == [steps / 8] * 2
    for _, count in loops:
        assert 2 <= count / 8 <= 4
    print(f"fused    {name:16} {[count / 8 for _, count in loops]} launches a step")


def test_a_step_of_gato_launches_less_than_a_program():
    """Steps without products join."""
    cell, steps = rg.CELLS["gato1"](512), 320
    executable = compiled(training_step(cell, "fused"), *shapes(cell, steps, 16, 8))
    loops = launches(executable)
    assert {trips for trips, _ in loops} == {steps / 8}
    assert sum(count for _, count in loops) / 8 <= 3
    print(f"fused    gato1            {sum(count for _, count in loops) / 8} launches a step")
