"""The backends on a GPU: `make test-gpu`. Not collected by default."""

import functools

import jax
import jax.numpy as jnp
import pytest

import recurrent_gates as rg
from recurrent_gates.backends.pallas import loop
from tests.support import array, assert_close, parameters, state

pytestmark = pytest.mark.usefixtures("x64")


def test_there_is_a_gpu():
    assert jax.default_backend() == "gpu", "make test-gpu needs a GPU that JAX can see"


CELLS = ["lstm", "ur_lstm", "gru", "ur_gru", "janet", "gato1", "gato2"]


@pytest.mark.parametrize(
    ("backend", "name"),
    [*(("fused", name) for name in CELLS), ("newton", "gato1"), ("newton", "gato2")],
)
def test_fused_and_newton_are_the_scan_on_a_gpu(backend, name):
    cell = rg.CELLS[name](32, param_dtype=jnp.float64)
    field = cell.initial(())._fields[0 if name.startswith("gato") else -1]
    params, carry = parameters(cell, 5), state(cell, (4,))
    keys = jax.random.split(jax.random.key(0), 3)
    xs = jax.random.normal(keys[0], (50, 4, 5), jnp.float64)
    cotangent = jax.random.normal(keys[1], (50, 4, 32), jnp.float64)

    def loss(backend, params, xs, carry):
        _, ys = rg.unroll(
            cell,
            params,
            xs,
            carry,
            lengths=jnp.array([50, 31, 7, 0]),
            carry_fns=(rg.Detach(0.5, field=field),),
            key=keys[2],
            backend=backend,
        )
        return jnp.sum(ys * cotangent)

    run = jax.jit(jax.value_and_grad(loss, argnums=(1, 2, 3)), static_argnums=0)
    assert_close(run(backend, params, xs, carry), run("scan", params, xs, carry))


# jax 0.12
pallas_warns = pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")


@pallas_warns
@pytest.mark.parametrize("held", [2**27, 0], ids=["one row", "sixteen rows"])
@pytest.mark.parametrize("name", ["lstm", "gru", "ur_gru", "om_lstm", "gato1", "gato2", "heads"])
def test_pallas_is_the_scan_on_a_gpu(x32, name, held, monkeypatch):
    monkeypatch.setattr(loop, "GPU_HELD", held)
    cell = rg.LSTM(128, heads=4) if name == "heads" else rg.CELLS[name](64)
    field, units = cell.initial(())._fields[0 if name.startswith("gato") else -1], cell.features
    trees = parameters(cell, 5), array(0, 50, 4, 5), state(cell, (4,))
    cotangents = state(cell, (4,), seed=1), array(1, 50, 4, units)
    # A fifth of the random numbers: a GRU of 64 units with all of them is chaotic.
    trees, cotangents = jax.tree.map(lambda x: x.astype(jnp.float32) / 5, (trees, cotangents))
    draws = jax.random.bernoulli(jax.random.key(0), 0.5, (2, 50, 4))
    fns = rg.Detach(0.5, field=field), rg.Detach(0.5, field=field, per_example=True)

    def run(backend):
        def forward(params, xs, carry):
            lengths, noise = jnp.array([50, 31, 7, 0]), (draws[0, :, 0], draws[1])
            driver = functools.partial(rg.unroll, cell, backend=backend, lengths=lengths)
            return driver(params, xs, carry, carry_fns=fns, noise=noise)

        @jax.jit
        def pull(*arrays):
            out, pullback = jax.vjp(forward, *arrays)
            return out, pullback(cotangents)

        return pull(*trees)

    with jax.default_matmul_precision("highest"):  # no TF32
        assert_close(run("pallas"), run("scan"), 1e-5)


@pallas_warns
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_pallas_has_lanes_and_second_derivatives_on_a_gpu(x32, name, dtype):
    cell = rg.CELLS[name](64, dtype=dtype)
    params = jax.tree.map(lambda x: x.astype(jnp.float32) / 5, parameters(cell, 5))
    xs = array(0, 2, 50, 4, 5).astype(dtype)

    def penalty(backend, params, xs):
        def loss(xs):
            ys = rg.unroll(cell, params, xs, backend=backend)[1]
            return jnp.sum(jnp.sin(ys.astype(jnp.float32)))

        slope = jax.grad(loss)(xs).astype(jnp.float32)
        return loss(xs) + jnp.sum(slope**2)

    def run(backend):
        slopes = jax.value_and_grad(functools.partial(penalty, backend), (0, 1))
        out = jax.jit(jax.vmap(slopes, (None, 0)))(params, xs)
        return jax.tree.map(lambda x: x.astype(jnp.float32), out)

    with jax.default_matmul_precision("highest"):
        assert_close(run("pallas"), run("scan"), 1e-5 if dtype == jnp.float32 else 2**-4)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", ["lstm", "c_lstm", "u_lstm"])
def test_cudnn_is_the_scan_on_a_gpu(x32, name, reverse):
    cell = rg.CELLS[name](32)
    trees = parameters(cell, 5), array(0, 50, 4, 5), state(cell, (4,))
    cotangents = state(cell, (4,), seed=1), array(1, 50, 4, 32)
    trees, cotangents = jax.tree.map(lambda x: x.astype(jnp.float32), (trees, cotangents))

    def run(backend, lanes=False):
        def step(params, xs, carry):
            unroll = functools.partial(rg.unroll, cell, reverse=reverse, backend=backend)
            out, pullback = jax.vjp(lambda *arrays: unroll(*arrays), params, xs, carry)
            return out, pullback(cotangents)

        if not lanes:
            return jax.jit(step)(*trees)
        return jax.jit(jax.vmap(step))(*jax.tree.map(lambda x: jnp.stack([x, -x]), trees))

    with jax.default_matmul_precision("highest"):  # no TF32; float32 over some hundred terms
        assert_close(run("cudnn"), run("scan"), 1e-4)
        assert_close(run("cudnn", lanes=True), run("scan", lanes=True), 1e-4)
