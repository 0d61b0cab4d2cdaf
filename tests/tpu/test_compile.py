"""Ahead-of-time compilation for TPUs: `make test-tpu`. Not collected by default: needs libtpu.

The TPU's own compiler runs on this machine, which needs no TPU. Each test prints what memory the
executable plans; arrays that the compiler places in VMEM are not in that figure.
"""

import functools
import os

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("TPU_WORKER_ID", "0")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # test processes side by side

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import recurrent_gates as rg

KINDS = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
NOT_FOR_TPU = ("auto", "cudnn")  # what chooses another backend, and what is for GPUs alone
BACKENDS = [b.value for b in rg.Backend if b.value not in NOT_FOR_TPU]

# (cell, T, B, D, dtype): the copy task's LSTM, a GATO of two layers, heads.
CASES = {
    "lstm": (rg.LSTM(128), 100, 128, 16, jnp.float32),
    "lstm bfloat16": (rg.LSTM(128, dtype=jnp.bfloat16), 100, 128, 16, jnp.bfloat16),
    "gato2": (rg.CELLS["gato2"](512), 64, 256, 2, jnp.float32),
    "lstm heads": (rg.LSTM(1024, heads=8), 100, 128, 16, jnp.float32),
    "gru heads": (rg.GRU(1024, heads=8), 100, 128, 16, jnp.float32),
}


@pytest.fixture(autouse=True)
def on_tpu(monkeypatch):
    """What the library asks before it chooses between forms for a CPU and for others."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")


@functools.cache
def device(kind):
    return topologies.get_topology_desc(platform="tpu", topology_name=KINDS[kind]).devices[0]


def compiled(kind, program, *shapes):
    """The executable of a program for one TPU of a kind."""
    sharding = SingleDeviceSharding(device(kind))
    jitted = jax.jit(program, in_shardings=sharding, out_shardings=sharding)
    executable = jitted.trace(*shapes).lower(lowering_platforms=("tpu",)).compile()
    shardings = jax.tree.leaves((executable.input_shardings, executable.output_shardings))
    for own in shardings:  # without this it could quietly be an executable for the CPU
        assert {d.platform for d in own.device_set} == {"tpu"}
        assert {d.device_kind for d in own.device_set} == {device(kind).device_kind}
    return executable


def report(kind, backend, name, executable):
    temporary = executable.memory_analysis().temp_size_in_bytes
    print(f"{kind:4} {backend:8} {name:24} {temporary / 1e6:8.1f} MB")
    assert temporary < 16e9  # of one TPU v5e


def forward(cell, backend, **how):
    return lambda params, xs: rg.unroll(cell, params, xs, backend=backend, **how)[1]


def training_step(cell, backend, **how):
    run = forward(cell, backend, **how)

    def step(params, xs):
        def loss(params):
            return jnp.mean(run(params, xs).astype(jnp.float32) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return value, jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads)

    return step


def shapes(cell, steps, batch, inputs, dtype):
    params = jax.eval_shape(lambda key: cell.init_params(key, inputs), jax.random.key(0))
    return params, jax.ShapeDtypeStruct((steps, batch, inputs), dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_backends_compile(kind, backend, name):
    cell, *sizes = CASES[name]
    serves = {"newton": cell.diagonal, "parallel": cell.linear}
    if not serves.get(backend, True):
        with pytest.raises(ValueError, match=backend):
            jax.eval_shape(forward(cell, backend), *shapes(cell, *sizes))
        return
    for make in (forward, training_step):
        executable = compiled(kind, make(cell, backend), *shapes(cell, *sizes))
        assert ("tpu_custom_call" in executable.as_text()) == (backend == "pallas")
        report(kind, backend, f"{name}, {make.__name__}", executable)


GATED = {
    "gru": rg.GRU(128),
    "gru before": rg.GRU(128, reset="before"),
    "janet": rg.JANET(128),
    **{name: rg.CELLS[name](128) for name in ("r_lstm", "o_lstm", "or_gru", "om_lstm", "um_janet")},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", GATED)
def test_gates_compile_as_kernels(kind, name):
    cell = GATED[name]
    sizes = shapes(cell, 9, 16, 16, jnp.float32)
    executable = compiled(kind, training_step(cell, "pallas"), *sizes)
    assert executable.as_text().count('custom_call_target="tpu_custom_call"') == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["rg_lru", "ur_minlstm"])
def test_linear_recurrences_compile(kind, name):
    cell = rg.CELLS[name](128)
    executable = compiled(
        kind, training_step(cell, "parallel"), *shapes(cell, 1000, 16, 16, jnp.float32)
    )
    report(kind, "parallel", name, executable)


@pytest.mark.parametrize("kind", KINDS)
def test_shared_master_gates_need_a_tpu_after_v4(kind):
    cell = rg.CELLS["um_lstm"](128, downsize=16)
    program, sizes = training_step(cell, "pallas"), shapes(cell, 9, 16, 16, jnp.float32)
    if kind == "v4":
        # The compiler's own words, of libtpu 0.0.51 and of 0.0.42, whose type of error differs too.
        with pytest.raises(Exception, match=r"this TPU generation|unsupported shape cast"):
            compiled(kind, program, *sizes)
    else:
        compiled(kind, program, *sizes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["lstm", "gato2"])
def test_detach_masks_and_resets_compile_as_kernels(kind, name):
    cell, *sizes = CASES[name]
    steps, batch = sizes[:2]
    fields = cell.initial(())._fields
    carry_fns = [rg.Detach(0.5, field=fields[0 if "r" in fields else -1])]
    masks = [jax.ShapeDtypeStruct(shape, bool) for shape in ((steps,), (steps, batch))]

    def step(params, xs, detached, valid):
        how = dict(carry_fns=carry_fns, noise=(detached,), valid=valid, resets=~valid)
        return training_step(cell, "pallas", **how)(params, xs)

    executable = compiled(kind, step, *shapes(cell, *sizes), *masks)
    report(kind, "pallas", f"{name}, detach and masks", executable)
