"""GATO's cos and softplus against numpy in float64: values, slopes, and where they end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurrent_gates import pointwise

pytestmark = pytest.mark.usefixtures("x64")

TURN = 2 * np.pi
ANGLES = np.concatenate(
    [np.linspace(0, TURN, 200_001), np.random.default_rng(0).uniform(0, TURN, 200_000)]
).astype(np.float32)
INPUTS = np.concatenate(
    [np.linspace(-85, 85, 200_001), np.random.default_rng(1).normal(0, 2, 200_000)]
).astype(np.float32)


def wide(x):
    return np.asarray(x, np.float64)


def slopes(function, x):
    return wide(jax.jit(jax.vmap(jax.grad(function)))(x))


def test_cos_within_a_period():
    assert np.abs(wide(jax.jit(pointwise.cos)(ANGLES)) - np.cos(wide(ANGLES))).max() < 2e-7


def test_slopes_of_cos():
    assert np.abs(slopes(pointwise.cos, ANGLES) + np.sin(wide(ANGLES))).max() < 2e-7
    second = slopes(jax.grad(pointwise.cos), ANGLES)
    assert np.abs(second + np.cos(wide(ANGLES))).max() < 2e-7
    third = slopes(jax.grad(jax.grad(pointwise.cos)), ANGLES[::20])
    assert np.abs(third - np.sin(wide(ANGLES[::20]))).max() < 2e-7


@pytest.mark.parametrize("scale", [30.0, 1e3, 1e5])
def test_cos_beyond_a_period_is_as_good_as_its_argument(scale):
    x = np.random.default_rng(2).normal(0, scale, 100_000).astype(np.float32)
    error = np.abs(wide(pointwise.cos(x)) - np.cos(wide(x)))
    assert (error < 2e-7 + 2 * wide(np.spacing(np.abs(x)))).all()


def test_cos_is_never_beyond_one():
    x = jnp.asarray([1e9, -3e20, 3e38], jnp.float32)
    assert (jnp.abs(pointwise.cos(x)) <= 1).all()
    assert jnp.isnan(pointwise.cos(jnp.asarray([np.inf, -np.inf, np.nan], jnp.float32))).all()


def test_softplus_keeps_its_relative_precision():
    value, expected = wide(jax.jit(pointwise.softplus)(INPUTS)), np.logaddexp(0, wide(INPUTS))
    relative = (value - expected) / expected
    assert np.abs(relative).max() < 4e-7  # exp's own
    # GATO adds it up: what is systematic grows with T.
    assert np.abs(relative[np.abs(INPUTS) < 2].mean()) < 3e-9


def test_slopes_of_softplus():
    expected = 1 / (1 + np.exp(-wide(INPUTS)))
    assert np.abs(slopes(pointwise.softplus, INPUTS) - expected).max() < 2e-7


def test_ends_of_softplus():
    ends = jnp.asarray([np.inf, -np.inf, 1e6, -1e6, np.nan], jnp.float32)
    np.testing.assert_array_equal(pointwise.softplus(ends), [np.inf, 0, 1e6, 0, np.nan])
    np.testing.assert_array_equal(slopes(pointwise.softplus, ends[:4]), [1, 0, 1, 0])


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.bfloat16])
def test_other_dtypes_take_their_own(dtype):
    x = jnp.asarray(ANGLES[::500], dtype)
    for ours, theirs in ((pointwise.cos, jnp.cos), (pointwise.softplus, jax.nn.softplus)):
        np.testing.assert_array_equal(wide(ours(x)), wide(theirs(x)))
        assert ours(x).dtype == dtype


@pytest.mark.parametrize("period", [TURN, 1.5])
def test_wrap_takes_whole_periods_off(period):
    s = jnp.asarray(np.random.default_rng(3).uniform(-50, 50, 1_000))
    wrapped = pointwise.wrap(s, period)
    np.testing.assert_allclose(wrapped, np.mod(s, period), rtol=0, atol=1e-13)
    np.testing.assert_array_equal(slopes(lambda s: pointwise.wrap(s, period), s), 1)
    np.testing.assert_array_equal(pointwise.wrap(s, None), s)


def test_wrap_in_float32_keeps_the_angle():
    """2 pi as a float32 is off by 1.7e-7, which 10,000 turns would make 1.7e-3."""
    s = np.random.default_rng(4).uniform(6e4, 6.5e4, 10_000).astype(np.float32)
    error = wide(pointwise.wrap(jnp.asarray(s), TURN)) - np.mod(wide(s), TURN)
    apart = np.abs((error + np.pi) % TURN - np.pi)
    assert (apart < 2 * wide(np.spacing(s))).all()
