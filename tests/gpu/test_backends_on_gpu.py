"""The backends on a GPU: `make test-gpu`. Not collected by default."""

import jax
import jax.numpy as jnp
import pytest

import recurrent_gates as rg
from tests.support import assert_close, parameters, state

pytestmark = pytest.mark.usefixtures("x64")


def test_there_is_a_gpu():
    assert jax.default_backend() == "gpu", "make test-gpu needs a GPU that JAX can see"


@pytest.mark.parametrize("name", ["lstm", "ur_lstm", "gru", "ur_gru", "janet", "gato1", "gato2"])
def test_fused_is_the_scan_on_a_gpu(name):
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
    assert_close(run("fused", params, xs, carry), run("scan", params, xs, carry))
