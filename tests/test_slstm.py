"""sLSTM against the paper's equations in NumPy: without its stabiliser, and with weights as a
softmax over time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from scipy.special import log_expit, softmax

import recurrent_gates as rg
from recurrent_gates.testing import check_cell
from tests import reference
from tests.support import array, assert_close, parameters, quick_jit, to_numpy
from tests.test_heads import whole

pytestmark = pytest.mark.usefixtures("x64")

STEPS, BATCH, INPUTS, FEATURES = 6, 3, 4, 6


def build(**settings):
    return rg.CELLS["slstm"](FEATURES, param_dtype=jnp.float64, **settings)


def plain(params, xs, forget):
    """c, n and h of all steps by Beck et al., eq. 8-14: exponentials as they are printed."""
    c = n = h = np.zeros((xs.shape[1], FEATURES))
    out = []
    for x in xs:
        pre = {slot: reference.affine(params, slot, x, h) for slot in ("i", "f", "o", "z")}
        i = np.exp(pre["i"])
        f = np.exp(pre["f"]) if forget == "exp" else reference.sigmoid(pre["f"])
        c = f * c + i * np.tanh(pre["z"])
        n = f * n + i
        h = reference.sigmoid(pre["o"]) * c / n
        out.append((c, n, h))
    return tuple(np.stack(field) for field in zip(*out, strict=True))


def over_time(params, xs, forget):
    """h of all steps: c / n is the mean of the candidates z_k, weighted by
    i_k f_k+1 ... f_t over their sum. No exponential of a gate is formed."""
    h, logs, candidates, out = np.zeros((xs.shape[1], FEATURES)), [], [], []
    for x in xs:
        pre = {slot: reference.affine(params, slot, x, h) for slot in ("i", "f", "o", "z")}
        log_f = pre["f"] if forget == "exp" else log_expit(pre["f"])
        logs = [log + log_f for log in logs] + [pre["i"]]
        candidates.append(np.tanh(pre["z"]))
        mean = np.sum(softmax(np.stack(logs), axis=0) * np.stack(candidates), axis=0)
        h = reference.sigmoid(pre["o"]) * mean
        out.append(h)
    return np.stack(out)


def forward(cell, params, xs, backend="scan"):
    return rg.unroll(cell, params, xs, return_carries="all", backend=backend)


@pytest.mark.parametrize("forget", ["sigmoid", "exp"])
@pytest.mark.parametrize("heads", [1, 2])
def test_values_are_the_papers(forget, heads):
    cell, xs = build(forget=forget, heads=heads, bias_vectors=2), array(8, STEPS, BATCH, INPUTS)
    params = parameters(cell, INPUTS)
    carries, ys = forward(cell, params, xs)
    dense = to_numpy(whole(params) if heads > 1 else params)
    c, n, h = plain(dense, np.asarray(xs), forget)
    scale = jnp.exp(carries.m)
    assert_close((carries.c * scale, carries.n * scale, carries.h, ys), (c, n, h, h))
    assert_close(ys, over_time(dense, np.asarray(xs), forget))


@pytest.mark.parametrize("forget", ["sigmoid", "exp"])
@pytest.mark.parametrize("size", [30.0, 3000.0])
def test_large_gates_stay_finite_and_right(forget, size):
    """Where exp(size) is infinite, and so is its inverse."""
    cell, xs = build(forget=forget), array(8, STEPS, BATCH, INPUTS)
    params = parameters(cell, INPUTS)
    for slot in ("i", "f"):
        params["kernel"][slot] *= size
    carries, ys = forward(cell, params, xs)
    assert_close(ys, over_time(to_numpy(params), np.asarray(xs), forget), tolerance=1e-9)
    assert jnp.all((carries.n >= 1) & (carries.n <= STEPS))
    grads = jax.grad(lambda *args: jnp.sum(forward(cell, *args)[1] ** 2), (0, 1))(params, xs)
    assert all(jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(grads))


def test_float32_survives_gates_that_a_step_of_it_cannot_hold(x32):
    """exp(-200) is 0 in float32: a first input of so little weight is still all there is."""
    cell = rg.SLSTM(FEATURES)
    params = cell.init_params(jax.random.key(0), INPUTS)
    params["bias"]["i"] -= 200
    xs = jax.random.normal(jax.random.key(1), (STEPS, BATCH, INPUTS))
    expected = over_time(to_numpy(params), np.asarray(xs, np.float64), "sigmoid")
    assert_close(forward(cell, params, xs)[1], expected.astype(np.float32), tolerance=1e-5)


@pytest.mark.parametrize("forget", ["sigmoid", "exp"])
def test_fused_is_the_scan_and_gradients_match_differences(forget):
    cell, xs = build(forget=forget, heads=2), array(8, STEPS, BATCH, INPUTS)
    params, start = parameters(cell, INPUTS), cell.initial((BATCH,))
    lengths, draws = jnp.array([6, 0, 4]), (jnp.arange(STEPS) % 3 == 1,)
    how = dict(lengths=lengths, carry_fns=(rg.Detach(0.5),), noise=draws, return_carries="all")

    def results(backend, params, xs):
        def run(params, xs):
            return rg.unroll(cell, params, xs, start, backend=backend, **how)

        out, pullback = jax.vjp(run, params, xs)
        return out, pullback(jax.tree.map(lambda leaf: array(31, *leaf.shape), out))

    @quick_jit
    def both(params, xs):
        return results("fused", params, xs), results("scan", params, xs)

    assert_close(*both(params, xs))
    loss = jax.jit(lambda params, xs: jnp.sum(forward(cell, params, xs)[1] ** 2))
    check_grads(loss, (params, xs), order=1, modes=["rev"], atol=1e-6, rtol=1e-6)


@pytest.mark.long
def test_it_conforms(x32):
    check_cell(rg.SLSTM(4, heads=2))


def test_step_gates_and_stepper_are_one():
    cell, xs = build(), array(8, STEPS, BATCH, INPUTS)
    params = parameters(cell, INPUTS)
    step, carry, ys = rg.stepper(cell, params, BATCH), cell.initial((BATCH,)), []
    served = step.initial()
    for x in xs:
        z_t, before = cell.project(params, x), carry
        carry = rg.slstm_step(params, carry, z_t)
        gates = cell.gates(params, before, z_t)
        assert_close(carry.c, gates["f"] * before.c + gates["i"] * gates["z"])
        served, y = step(served, x)
        assert_close(y, carry.h)
        ys.append(carry.h)
    assert_close(jnp.stack(ys), forward(cell, params, xs)[1])


def test_its_forget_bias_starts_where_it_is_said():
    bias = build(forget_bias=3.0).init_params(jax.random.key(0), INPUTS)["bias"]
    assert_close(bias["f"], np.full(FEATURES, 3.0))
    assert not any(np.any(bias[slot]) for slot in ("i", "o", "z"))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: rg.SLSTM(6, forget="tanh"), "'sigmoid' or 'exp'"),
        (lambda: rg.SLSTM(6, heads=4), "must divide the 6 units"),
        (lambda: rg.SLSTM(0), "features"),
    ],
)
def test_wrong_settings_are_one_sentence(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("make", [rg.Zoneout, rg.Detach, rg.Damp])
@pytest.mark.parametrize("field", ["c", "n", "m", 0, -1, -3, -4])
def test_what_acts_on_a_part_of_the_memory_is_refused(make, field):
    """It would depend on the stabiliser, of which y is independent."""
    cell = build()
    params = parameters(cell, INPUTS)
    with pytest.raises(ValueError, match=r"would depend on the stabiliser.*; take h"):
        fns = [make(0.5, field=field)]
        rg.unroll(cell, params, array(8, 2, BATCH, INPUTS), carry_fns=fns, key=jax.random.key(0))


@pytest.mark.parametrize("forget", ["sigmoid", "exp"])
def test_a_gate_beside_a_normaliser_has_no_timescale(forget):
    with pytest.raises(ValueError, match="f alone has no timescale"):
        rg.analysis.initial_timescales(build(forget=forget), jax.random.key(0))


def test_torch_has_none():
    params = build(bias_vectors=2).init_params(jax.random.key(0), INPUTS)
    with pytest.raises(ValueError, match="plain LSTM and GRU only"):
        rg.to_torch([{"forward": params}])
