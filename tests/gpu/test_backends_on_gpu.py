"""The backends on a GPU: `make test-gpu`. Not collected by default."""

import functools

import jax
import jax.numpy as jnp
import pytest

import recurrent_gates as rg
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


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")  # jax 0.12
@pytest.mark.parametrize("name", ["lstm", "ur_gru", "gato1", "gato2"])
def test_pallas_is_the_scan_on_a_gpu(x32, name):
    cell = rg.CELLS[name](32)
    field = cell.initial(())._fields[0 if name.startswith("gato") else -1]
    trees = parameters(cell, 5), array(0, 50, 4, 5), state(cell, (4,))
    cotangents = state(cell, (4,), seed=1), array(1, 50, 4, 32)
    trees, cotangents = jax.tree.map(lambda x: x.astype(jnp.float32), (trees, cotangents))
    detached = jax.random.bernoulli(jax.random.key(0), 0.5, (50,))

    def run(backend):
        def forward(params, xs, carry):
            how = dict(lengths=jnp.array([50, 31, 7, 0]), noise=(detached,), backend=backend)
            return rg.unroll(
                cell, params, xs, carry, carry_fns=(rg.Detach(0.5, field=field),), **how
            )

        @jax.jit
        def pull(*arrays):
            out, pullback = jax.vjp(forward, *arrays)
            return out, pullback(cotangents)

        return pull(*trees)

    # No TF32. On an H200 ur_gru's scan itself is 7.2e-5 from float64, Pallas 9.9e-5.
    with jax.default_matmul_precision("highest"):
        assert_close(run("pallas"), run("scan"), 2e-4 if name == "ur_gru" else 1e-4)


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
