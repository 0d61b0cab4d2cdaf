"""Initializers: the laws they draw from, and that equal arguments give one object."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from scipy import stats

import recurrent_gates as rg
from recurrent_gates import initializers

KEY = jax.random.key(7)
DRAWS = 50_000


def sample(values):
    return np.asarray(values, np.float64).ravel()


def assert_law(values, cdf):
    """Kolmogorov-Smirnov at a fixed key: a right law fails this once in a thousand keys."""
    assert stats.kstest(sample(values), cdf).pvalue > 1e-3


@pytest.mark.parametrize("d", [3, 16, 256])
def test_uniform_gate_bias(d):
    b = rg.uniform_gate_bias(KEY, d, (DRAWS,))
    u = 1 / (1 + np.exp(-sample(b)))
    assert_law(u, stats.uniform(1 / d, 1 - 2 / d).cdf)
    assert u.min() >= 1 / d - 1e-6 and u.max() <= 1 - 1 / d + 1e-6


def test_uniform_gate_bias_defaults_to_one_number_per_unit():
    b = rg.uniform_gate_bias(KEY, 5)
    assert b.shape == (5,) and b.dtype == jnp.float32 and len(set(b.tolist())) == 5


@pytest.mark.parametrize("d", [0, 1, 2])
def test_uniform_gate_bias_needs_an_interval(d):
    with pytest.raises(ValueError, match=f"{d}"):
        rg.uniform_gate_bias(KEY, d)


@pytest.mark.parametrize("tmax", [3, 10, 784])
def test_chrono_bias_covers_the_timescales(tmax):
    """UR eq. 17: exp(b) is uniform on [1, Tmax - 1]."""
    b = rg.chrono_bias(KEY, (DRAWS,), tmax)
    assert_law(np.exp(sample(b)), stats.uniform(1, tmax - 2).cdf)


def test_chrono_bias_without_a_known_timescale():
    """UR B.3: b = log T with P(T = k) proportional to 1 / (k log^2(k + 1))."""
    b = sample(rg.chrono_bias(KEY, (4 * DRAWS,), None))
    k = np.arange(1, 3_000_001)
    weights = 1 / (k * np.log(k + 1) ** 2)
    total = weights.sum() + 1 / np.log(k[-1] + 1.5)  # and the integral of the tail
    assert np.isfinite(b).all() and b.min() == 0.0
    for timescale in (1, 2, 3, 10):
        p = weights[timescale - 1] / total
        share = np.mean(np.abs(b - np.log(timescale)) < 1e-5)
        assert abs(share - p) < 4 * np.sqrt(p * (1 - p) / b.size)
    for log_timescale in (
        5.0,
        9.0,
        12.0,
        20.0,
        100.0,
    ):  # inside the table, about its end, far beyond
        exact = weights[: int(np.exp(min(log_timescale, 14.0)))].sum() / total
        if log_timescale > 14.0:
            exact = 1 - 1 / log_timescale / total
        assert (
            abs(np.mean(b <= log_timescale) - exact)
            < 4 * np.sqrt(exact * (1 - exact) / b.size) + 1e-5
        )


@pytest.mark.parametrize("tmax", [2, 1, 0, -3, np.inf, np.nan])
def test_chrono_bias_needs_an_interval(tmax):
    with pytest.raises(ValueError, match="tmax"):
        rg.chrono_bias(KEY, (4,), tmax)


def test_torchs_defaults():
    """torch.nn: U(+-1/sqrt(fan in)) for Linear, U(+-1/sqrt(H)) for every recurrent leaf, N(0, 1)
    for Embedding."""
    kernel = initializers.torch_linear_kernel(KEY, (25, 2000))
    assert_law(kernel, stats.uniform(-0.2, 0.4).cdf)
    assert_law(initializers.torch_linear_bias(25)(KEY, (DRAWS,)), stats.uniform(-0.2, 0.4).cdf)
    for shape in ((100, 500), (DRAWS,)):
        assert_law(initializers.torch_recurrent(64)(KEY, shape), stats.uniform(-0.125, 0.25).cdf)
    assert_law(initializers.torch_embedding(KEY, (100, 500)), stats.norm().cdf)


def test_symmetric_uniform():
    values = initializers.symmetric_uniform(0.1)(KEY, (100, 500))
    assert_law(values, stats.uniform(-0.1, 0.2).cdf)
    assert np.abs(values).max() <= 0.1


@pytest.mark.parametrize(
    "factory",
    [
        lambda: initializers.symmetric_uniform(0.25),
        lambda: initializers.torch_recurrent(9),
        lambda: initializers.torch_linear_bias(9),
    ],
)
def test_equal_arguments_give_one_object(factory):
    assert factory() is factory()


@pytest.mark.parametrize(
    "draw",
    [
        lambda key, dtype: rg.uniform_gate_bias(key, 8, (4,), dtype),
        lambda key, dtype: rg.chrono_bias(key, (4,), 10.0, dtype),
        lambda key, dtype: rg.chrono_bias(key, (4,), None, dtype),
        lambda key, dtype: initializers.symmetric_uniform(0.5)(key, (4,), dtype),
        lambda key, dtype: initializers.torch_linear_kernel(key, (4, 4), dtype),
        lambda key, dtype: initializers.torch_embedding(key, (4, 4), dtype),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_draws_have_the_dtype_and_follow_the_key(draw, dtype):
    first, again, other = draw(KEY, dtype), draw(KEY, dtype), draw(jax.random.key(8), dtype)
    assert first.dtype == dtype
    np.testing.assert_array_equal(np.asarray(first, np.float32), np.asarray(again, np.float32))
    assert (np.asarray(first, np.float32) != np.asarray(other, np.float32)).any()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gate_biases_reach_every_timescale_in_any_dtype(dtype):
    """1 - 1/d is no bfloat16 from d = 256 on, but its logit is; the draw is float32's, rounded."""
    d = 1024
    for draw in (
        lambda dtype: rg.uniform_gate_bias(KEY, d, (DRAWS,), dtype),
        lambda dtype: rg.chrono_bias(KEY, (DRAWS,), d, dtype),
        lambda dtype: rg.chrono_bias(KEY, (DRAWS,), None, dtype),
    ):
        b, wide = draw(dtype), draw(jnp.float32)
        assert b.dtype == dtype
        np.testing.assert_array_equal(sample(b), sample(wide.astype(dtype)))
    longest = 1 + np.exp(sample(rg.uniform_gate_bias(KEY, d, (DRAWS,), dtype)).max())
    assert 0.95 * d < longest < 1.02 * d  # in bfloat16 it was 128


def test_orthogonal_is_flaxs_and_serves_bfloat16():
    theirs = nn.initializers.orthogonal()
    for shape in ((8, 8), (8, 4), (4, 8)):
        np.testing.assert_array_equal(initializers.orthogonal(KEY, shape), theirs(KEY, shape))
    half = initializers.orthogonal(KEY, (8, 8), jnp.bfloat16)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_array_equal(sample(half), sample(theirs(KEY, (8, 8)).astype(jnp.bfloat16)))
