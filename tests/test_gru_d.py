"""GRU-D: its inputs by the paper's recursion, its decays, sequences under every backend."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import recurrent_gates as rg
from recurrent_gates.testing import check_cell, check_replay
from tests import reference
from tests.support import array, assert_close, assert_identical, parameters, to_numpy

pytestmark = pytest.mark.usefixtures("x64")

STEPS, BATCH, VARIABLES, FEATURES = 9, 4, 3, 5


def measured(seed=0):
    """Values ``[T, B, V]`` of which half are missing, and times with padding before the first:
    none in the first row, all in the last."""
    draw = np.random.default_rng(seed)
    values = draw.normal(size=(STEPS, BATCH, VARIABLES))
    values[draw.random(values.shape) < 0.5] = np.nan
    times = np.cumsum(draw.exponential(size=(STEPS, BATCH)), axis=0)
    for row, padding in enumerate((0, 1, 4, STEPS)):
        times[:padding, row] = np.nan
    return values, times


def test_inputs_follow_the_papers_recursion():
    """The mask, the last value, and delta_t = s_t - s_(t-1) + (0 if m_(t-1) else delta_(t-1)),
    0 at the first step, and at each that starts anew."""
    values, times = measured()
    resets = np.random.default_rng(1).random(times.shape) < 0.2
    got = rg.gru_d_inputs(jnp.asarray(values), jnp.asarray(times), jnp.asarray(resets))
    assert got.dtype == jnp.float64
    expected = np.zeros((STEPS, BATCH, 3, VARIABLES))
    for row in range(BATCH):
        for variable in range(VARIABLES):
            last = delta = 0.0
            m = s = None  # of the step before
            for t in range(STEPS):
                if resets[t, row]:
                    last, m, s = 0.0, None, None
                if np.isnan(times[t, row]):
                    continue
                delta = 0.0 if s is None else times[t, row] - s + (0.0 if m else delta)
                m, s = not np.isnan(values[t, row, variable]), times[t, row]
                last = values[t, row, variable] if m else last
                expected[t, row, :, variable] = last, m, delta
    np.testing.assert_allclose(got, expected.reshape(STEPS, BATCH, -1), rtol=1e-14, atol=1e-14)
    assert resets[1:].any() and not np.isnan(got).any()
    alone = rg.gru_d_inputs(values[:, 1], times[:, 1], resets[:, 1])  # without a batch
    assert_identical(alone, got[:, 1])


@pytest.mark.parametrize(
    ("values", "times", "sentence"),
    [
        (np.zeros((4, 2), int), np.zeros(4), "values must be a floating array"),
        (np.zeros(4), np.zeros(4), "values must be a floating array"),
        (np.zeros((4, 2, 3)), np.zeros(4), r"times must have shape \(4, 2\), got \(4,\)"),
        (np.zeros((4, 2, 3)), np.zeros((4, 2)), r"resets must have shape \(4, 2\), got \(4, 3\)"),
    ],
)
def test_inputs_that_cannot_be(values, times, sentence):
    resets = np.ones((4, 3), bool) if "resets" in sentence else None
    with pytest.raises(ValueError, match=sentence):
        rg.gru_d_inputs(values, times, resets)


@pytest.mark.parametrize("resets", [None, np.zeros((0, BATCH), bool)])
def test_no_steps_run_like_any(resets):
    cell = rg.GRUD(FEATURES, param_dtype=jnp.float64)
    xs = rg.gru_d_inputs(np.zeros((0, BATCH, VARIABLES)), np.zeros((0, BATCH)), resets)
    assert xs.dtype == jnp.float64
    carry, _ = rg.unroll(cell, parameters(cell, 3 * VARIABLES), xs)
    assert_identical(carry, cell.initial((BATCH,)))


def test_widths_that_cannot_be():
    cell = rg.GRUD(FEATURES)
    with pytest.raises(ValueError, match=r"multiple of 3, got 4\.$"):
        cell.init_params(jax.random.key(0), 4)
    with pytest.raises(ValueError, match=r"do not fit a decay of 2 variables"):
        cell.project(cell.init_params(jax.random.key(0), 6), jnp.zeros((2, 9)))
    with pytest.raises(ValueError, match="must be floating point, got int"):
        cell.project(cell.init_params(jax.random.key(0), 6), np.zeros((2, 6), int))
    with pytest.raises(ValueError, match="decay_init must be a function"):
        rg.GRUD(FEATURES, decay_init="zeros")


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", [np.int64, np.float64, jnp.int32])
def test_times_since_1970_keep_their_seconds(dtype, kind, x32):
    times = 1_700_000_000 + np.array([0, 1, 3, 6])[:, None]
    values = jnp.zeros((4, 1, 1), dtype).at[2].set(jnp.nan)
    since = rg.gru_d_inputs(values, kind(times))[:, 0, 2]
    assert since.dtype == dtype
    assert since.tolist() == [0, 1, 2, 5]


def test_times_of_any_width_do_not_wrap_around(x32):
    values = jnp.zeros((3, 1, 1)).at[1].set(jnp.nan)
    for times in (np.array([-100, 0, 100], np.int8), np.array([0, 2**20, 2**33])):
        since = rg.gru_d_inputs(values, times[:, None])[:, 0, 2]
        assert since.tolist() == [0, *(times[1:].astype(float) - times[0])]


@pytest.mark.parametrize("bias_vectors", [1, 2])
def test_the_public_functions_are_the_cell(bias_vectors):
    cell = rg.GRUD(FEATURES, bias_vectors=bias_vectors, param_dtype=jnp.float64)
    params, x = parameters(cell, 3 * VARIABLES), array(8, BATCH, 3 * VARIABLES)
    carry = rg.HiddenState(array(9, BATCH, FEATURES))
    z = rg.gru_d_project(params, x)
    assert_identical(z, cell.project(params, x))
    assert_identical(rg.gru_d_step(params, carry, z), cell.step(params, carry, z))
    gates = cell.gates(params, carry, z)
    (new,) = reference.gru_d(to_numpy(params), (np.asarray(carry.h),), np.asarray(x))
    decayed = gates["decay"] * carry.h
    assert_close(gates["f"] * decayed + gates["i"] * gates["u"], new)
    count = 3 * FEATURES * (2 * VARIABLES + FEATURES + bias_vectors)
    count += 2 * VARIABLES + VARIABLES * FEATURES + FEATURES
    assert rg.count_parameters(params) == count


@pytest.mark.parametrize("backend", ["scan", "fused"])
def test_a_sequence_is_the_papers(backend):
    cell = rg.GRUD(FEATURES, param_dtype=jnp.float64)
    values, times = measured()
    valid = ~np.isnan(times)
    params = parameters(cell, 3 * VARIABLES)
    xs = rg.gru_d_inputs(jnp.asarray(values), jnp.asarray(times))
    carry, ys = rg.unroll(cell, params, xs, valid=jnp.asarray(valid), backend=backend)
    h = np.zeros((BATCH, FEATURES))
    for t in range(STEPS):
        (new,) = reference.gru_d(to_numpy(params), (h,), np.asarray(xs[t]))
        h = np.where(valid[t][:, None], new, h)
        assert_close(ys[t], np.where(valid[t][:, None], h, 0))
    assert_close(carry.h, h)


def test_without_a_measurement_all_decays_to_the_mean():
    """At a rate that does not vanish nothing is left of the value and the state after a long
    time; at no rate all of it is."""
    cell = rg.GRUD(FEATURES, param_dtype=jnp.float64)
    params, carry = parameters(cell, 3), rg.HiddenState(array(9, 2, FEATURES))
    after = jnp.array([[2.0, 0.0, 1e9]] * 2)
    never = jnp.array([[0.0, 0.0, 0.0]] * 2)
    for rate in (0.1, 0.0):
        own = dict(params)
        own["decay"] = jax.tree.map(
            lambda leaf, rate=rate: jnp.full_like(leaf, rate), params["decay"]
        )
        own["decay"]["bias"] = jax.tree.map(jnp.zeros_like, params["decay"]["bias"])
        new = cell.step(own, carry, cell.project(own, after)).h
        if rate:
            assert_identical(new, cell.step(own, cell.initial((2,)), cell.project(own, never)).h)
        else:
            now = jnp.array([[2.0, 0.0, 0.0]] * 2)
            assert_identical(new, cell.step(own, carry, cell.project(own, now)).h)


@pytest.mark.parametrize("bias_init", [nn.initializers.zeros, nn.initializers.uniform(-0.5)])
def test_rates_start_with_a_gradient(bias_init):
    """Also beside biases that are drawn: a rate that starts at 0 or below has none."""
    cell = rg.GRUD(FEATURES, bias_init=bias_init)
    params = cell.init_params(jax.random.key(0), 3 * VARIABLES)
    assert all(leaf.min() > 0 for leaf in jax.tree.leaves(params["decay"]["kernel"]))
    values, times = measured()
    xs = rg.gru_d_inputs(*(jnp.asarray(a, jnp.float32)[:, :1] for a in (values, times)))
    gradient = jax.grad(lambda params: jnp.sum(rg.unroll(cell, params, xs)[1] ** 2))(params)
    assert all((leaf != 0).all() for leaf in jax.tree.leaves(gradient["decay"]["kernel"]))


@pytest.mark.long
def test_contract(x32):
    away = nn.initializers.uniform(1.0)  # rates near 0 are at a corner, for finite differences
    check_cell(rg.GRUD(FEATURES, decay_init=away), 6)
    check_replay(rg.GRUD(FEATURES), 6)


def test_times_that_go_back_are_one_sentence():
    values = np.ones((3, 2, 4), np.float32)
    times = np.array([[0.0, 0.0], [1.0, 2.0], [2.0, 1.5]])
    sentence = "times must not go back, but step 2 is before an earlier one; .* padding is NaN"
    with pytest.raises(ValueError, match=sentence):
        rg.gru_d_inputs(values, times)
    with pytest.raises(ValueError, match=sentence):
        rg.gru_d_inputs(values, times, np.zeros((3, 2), bool))
    with pytest.raises(ValueError, match=sentence):
        rg.gru_d_inputs(values[:, 0], np.array([5.0, np.nan, 1.0]))
    with pytest.raises(ValueError, match="but step 1 is before"):
        rg.gru_d_inputs(values[:, 0], np.array([5, 1, 6], np.uint32))
    rg.gru_d_inputs(values, times, np.array([[0, 0], [0, 0], [0, 1]], bool))  # another sequence
    rg.gru_d_inputs(values[:, 0], np.array([0.0, 1.0, np.nan]))
