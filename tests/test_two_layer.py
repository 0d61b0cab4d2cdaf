"""The two-layer increment from its inputs: values and gradients against a loop over everything."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import recurrent_gates as rg
from recurrent_gates.backends.shared import two_layer
from recurrent_gates.scan import Loop, Settings
from tests.support import array, assert_close, parameters, quick_jit, state, thinned
from tests.test_gato import Doubled

pytestmark = pytest.mark.usefixtures("x64")

FORMS = pytest.mark.parametrize("form", [two_layer._total, two_layer._total_by_products])
HIDDEN, UNITS = 18, 3  # more than one group of hidden units, the last not full
WIDE = {"param_dtype": jnp.float64}


def weights(features):
    return (
        array(1, HIDDEN, features, UNITS),
        array(2, HIDDEN, UNITS),
        array(3, HIDDEN, UNITS),
    )


def by_hand(x, r, first, on_r, out, d):
    """The sum and all its gradients, hidden unit by hidden unit and row by row."""
    x, r, first, on_r, out, d = (np.asarray(a) for a in (x, r, first, on_r, out, d))
    total = np.zeros_like(r)
    d_x, d_r, d_first, d_on_r, d_out = (np.zeros_like(a) for a in (x, r, first, on_r, out))
    for n in range(len(x)):
        for i in range(HIDDEN):
            for j in range(UNITS):
                p = x[n] @ first[i, :, j] + on_r[i, j] * r[n, j]
                if p <= 0:
                    continue
                total[n, j] += out[i, j] * p
                d_out[i, j] += d[n, j] * p
                d_p = d[n, j] * out[i, j]
                d_x[n] += d_p * first[i, :, j]
                d_r[n, j] += d_p * on_r[i, j]
                d_first[i, :, j] += d_p * x[n]
                d_on_r[i, j] += d_p * r[n, j]
    return total, (d_x, d_r, d_first, d_on_r, d_out)


def pull(form):
    """(d, *operands) -> the sum and all its gradients."""

    def pulled(d, *operands):
        total, pullback = jax.vjp(form, *operands)
        return total, pullback(d)

    return pulled


@FORMS
@pytest.mark.parametrize(
    "rows", thinned([(1,), (15,), (16,), (97,), (200,)], (1, 97).__contains__, pytest.mark.long)
)
@pytest.mark.parametrize("features", [1, 4])
def test_value_and_gradients(form, rows, features, monkeypatch):
    monkeypatch.setattr(two_layer, "_PRODUCTS", 32 * 16 * UNITS)  # of 32 rows
    x, r, d = (array(4, rows, features), array(5, rows, UNITS), array(6, rows, UNITS))
    actual = quick_jit(pull(form))(d, x, r, *weights(features))
    assert_close(actual, by_hand(x, r, *weights(features), d))


@FORMS
@pytest.mark.long
def test_lanes(form):
    """Under vmap, with weights of their own or shared."""
    x, r, d = array(7, 2, 20, 3), array(8, 2, 20, UNITS), array(9, 2, 20, UNITS)
    own = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), weights(3))
    together = quick_jit(jax.vmap(pull(form)))(d, x, r, *own)
    for lane in range(2):
        expected = by_hand(x[lane], r[lane], *[w[lane] for w in own], d[lane])
        assert_close(jax.tree.map(lambda a: a[lane], together), expected)  # noqa: B023
    in_axes = (0, 0, 0, None, None, None)
    shared = quick_jit(jax.vmap(pull(form), in_axes))(d, x, r, *weights(3))
    assert_close(jax.tree.map(lambda a: a[1], shared), by_hand(x[1], r[1], *weights(3), d[1]))


@FORMS
def test_what_is_not_a_number_stays_so(form):
    x, r, d = array(10, 20, 2), array(11, 20, UNITS), jnp.ones((20, UNITS))
    r = r.at[3, 1].set(jnp.nan)
    total, slopes = quick_jit(pull(form))(d, x, r, *weights(2))
    _, d_r, d_first, d_on_r, d_out = slopes
    assert jnp.isnan(total[3, 1]) and jnp.isnan(d_on_r[:, 1]).all() and jnp.isnan(d_out[:, 1]).all()
    others = np.arange(UNITS) != 1
    assert jnp.isfinite(total[:, others]).all() and jnp.isfinite(d_first[:, :, others]).all()
    assert jnp.isfinite(d_r[:3]).all()


def serves(cell, params, xs, carry):
    """Whether the increments are computed from the inputs."""
    return two_layer.serves(Loop(Settings(cell, xs.ndim - 2), params, xs, carry, carry))


@pytest.mark.parametrize("inputs", [1, 4, 5, 7])
@pytest.mark.parametrize("bias_vectors", [1, 2])
@pytest.mark.long
def test_few_inputs_and_many_give_what_a_scan_gives(inputs, bias_vectors):
    cell = rg.GATO(2 * UNITS, g=rg.TwoLayer(HIDDEN), bias_vectors=bias_vectors, **WIDE)
    params, carry = parameters(cell, inputs), state(cell, (4,))
    xs, d = array(12, 9, 4, inputs), array(13, 9, 4, 2 * UNITS)
    assert serves(cell, params, xs, carry)

    def run(backend):
        def loss(params, xs, carry):
            last, ys = rg.unroll(cell, params, xs, carry, backend=backend)
            return jnp.vdot(ys, d) + sum(jnp.sum(a**2) for a in last)

        return quick_jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(params, xs, carry)

    assert_close(run("fused"), run("scan"))


def test_an_increment_of_ones_own_is_not_replaced():
    cell = Doubled(2 * UNITS, g=rg.TwoLayer(HIDDEN), **WIDE)
    params, xs = parameters(cell, 2), array(14, 6, 3, 2)
    assert not serves(cell, params, xs, cell.initial((3,)))
    assert_close(
        rg.unroll(cell, params, xs, backend="fused"), rg.unroll(cell, params, xs, backend="scan")
    )


@FORMS
def test_offset_inputs_lose_no_digits(form, x32):
    """float32 inputs near 1,000 whose weighted sum the bias takes back to about zero."""
    rng = np.random.default_rng(0)
    x = np.concatenate([1000 + rng.normal(size=(64, 1)), np.ones((64, 1))], axis=1)
    first = np.stack([np.ones((HIDDEN, UNITS)), np.full((HIDDEN, UNITS), -1000.0)], axis=1)
    given = [x, rng.normal(size=(64, UNITS)), first]
    given += [rng.normal(size=(HIDDEN, UNITS)) for _ in range(2)]
    given = [a.astype(np.float32) for a in given]
    d = rng.normal(size=(64, UNITS)).astype(np.float32)
    _, pullback = jax.vjp(form, *given)
    _, expected = by_hand(*[a.astype(np.float64) for a in (*given, d)])
    for ours, theirs in zip(pullback(d), expected, strict=True):
        assert np.linalg.norm(ours - theirs) < 1e-5 * np.linalg.norm(theirs)


@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_any_batch_axes_in_float32(batch, x32):
    cell = rg.GATO(2 * UNITS, g=rg.TwoLayer(HIDDEN))
    params = cell.init_params(jax.random.key(0), 2)
    xs = jax.random.normal(jax.random.key(1), (7, *batch, 2))

    def run(backend):
        return rg.unroll(cell, params, xs, cell.initial(batch), backend=backend)

    assert serves(cell, params, xs, cell.initial(batch))
    assert_close(run("fused"), run("scan"), 1e-6)


@FORMS
def test_no_rows(form):
    total, pullback = jax.vjp(form, array(16, 0, 2), array(17, 0, UNITS), *weights(2))
    assert total.shape == (0, UNITS)
    assert all((d == 0).all() for d in pullback(total)[2:])


def test_half_precision_keeps_its_own_roundings():
    cell = rg.GATO(2 * UNITS, g=rg.TwoLayer(HIDDEN), dtype=jnp.bfloat16)
    inputs = (parameters(cell, 2), array(15, 6, 3, 2), cell.initial((3,)))
    assert not serves(cell, *inputs)
