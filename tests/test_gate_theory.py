"""UR-gates' Table 4, Propositions 1-4 and Figure 2 against sums, integrals and autodiff."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, optimize

import recurrent_gates as rg
from recurrent_gates import gate_theory as theory

pytestmark = pytest.mark.usefixtures("x64")

DENSITIES = {
    "chrono_known": (theory.chrono_known(50.0), lambda x: 1.0, 2.0, 50.0),
    "chrono_unknown": (theory.chrono_unknown(2.0), lambda x: 1 / (x * np.log(x) ** 2), 2.0, np.inf),
    "uniform": (theory.uniform_gates(), lambda x: x**-2.0, 1.0, np.inf),
    "uniform, d = 8": (theory.uniform_gates(8), lambda x: x**-2.0, 8 / 7, 8.0),
    "cumax": (theory.cumax_gates(), lambda x: x**-2.0, 1.0, np.inf),
}


@pytest.mark.parametrize("name", DENSITIES)
def test_laws_integrate_the_densities_of_table_4(name):
    law, density, low, high = DENSITIES[name]
    if name == "chrono_unknown":  # in log x, where the tail is integrable numerically
        total = integrate.quad(lambda u: u**-2.0, np.log(low), np.inf)[0]
    else:
        total = integrate.quad(density, low, high)[0]
    for x in (1.2, 2.5, 4.0, 7.0, 30.0):
        want = integrate.quad(density, low, min(max(x, low), high))[0] / total
        np.testing.assert_allclose(law.cdf(x), want, rtol=0, atol=1e-8)


def test_the_constant_bias_is_one_period():
    law = theory.constant_bias(2.0)
    np.testing.assert_allclose(law.quantile([0.1, 0.9]), 1 + np.exp(2.0))
    np.testing.assert_array_equal(law.cdf([8.38, 8.39]), [0.0, 1.0])  # 1 + e^2 = 8.389


def test_quantiles_invert():
    laws = [
        *theory.timescale_laws()[1:],
        theory.uniform_gates(64),
        theory.refined(theory.uniform_gates(64)),
    ]
    q = np.linspace(0.02, 0.9, 45)
    for law in laws:
        np.testing.assert_allclose(law.cdf(law.quantile(q)), q, rtol=0, atol=1e-9)


def test_chrono_as_drawn_is_its_sum():
    law = theory.chrono_drawn()
    k = np.arange(1, 3_000_001, dtype=float)
    terms = 1 / (k * np.log(k + 1) ** 2)
    total = terms.sum() + 1 / np.log(3_000_001)
    for T in (1, 2, 5, 100, 10_000):
        want = terms[:T].sum() / total
        np.testing.assert_allclose(law.cdf(1.0 + T), want, rtol=0, atol=1e-7)
        np.testing.assert_allclose(law.cdf(1.0 + T - 0.01), want - terms[T - 1] / total, atol=1e-7)
        np.testing.assert_allclose(law.quantile(want - terms[T - 1] / total / 2), 1.0 + T)
    # Beyond, the law and the density of Table 4 have one tail.
    x = np.array([1e4, 1e8, 1e15])
    tail = theory.chrono_unknown()
    np.testing.assert_allclose(1 - law.cdf(x), 1 - tail.cdf(x), rtol=1e-4)
    np.testing.assert_allclose(tail.cdf(1.3), 0.0, atol=0)
    np.testing.assert_allclose(tail.quantile(0.0), 1.3434, atol=5e-5)  # as its docstring says


def test_refining_pulls_periods_to_the_middle():
    """B.3 with Listing 2's refine bias: g = 2u - 3u^2 + 2u^3, of at most d about d / 2."""
    law = theory.refined(theory.uniform_gates(256))
    u = 1 / 256 + (1 - 2 / 256) * np.array([0.0, 0.3, 1.0])
    g = rg.refine(u, 1 - u)
    np.testing.assert_allclose(g, 2 * u - 3 * u**2 + 2 * u**3)
    np.testing.assert_allclose(law.quantile([0.0, 0.3, 1.0]), 1 / (1 - g), rtol=1e-12)
    assert 128 < law.quantile(1.0) < 131


def test_laws_of_gates():
    gates = {name: theory.gate_law(gate, 64) for name, gate in rg.GATES.items()}
    names = {name: law and law.name for name, law in gates.items()}
    assert names == {
        "standard": "constant bias 1",
        "c": "chrono, as drawn",
        "u": "uniform",
        "o": "cumax",
        "r": "constant bias 1",
        "ur": "uniform, refined",
        "cr": "chrono, as drawn, refined",
        "or": "cumax",
        "om": None,
        "um": None,
        "cm": None,
    }
    assert theory.gate_law(rg.Gate(bias="chrono", tmax=30.0), 64).quantile(1.0) == 30
    zero = rg.Gate(bias="uniform", refine=True, tied=True, refine_bias="zero")
    assert theory.gate_law(zero, 64).name == "uniform"


def test_the_distance_of_samples():
    law = theory.uniform_gates()
    exact = law.quantile((np.arange(50) + 0.5) / 50)
    np.testing.assert_allclose(theory.distance(exact, law), 0.01, atol=1e-4)
    np.testing.assert_allclose(theory.distance([2.0], law), 0.5, atol=1e-4)
    np.testing.assert_allclose(theory.distance([1e9], law), 1.0, atol=1e-4)
    assert theory.distance(np.full(9, np.float32(1 + np.e)), theory.constant_bias()) == 0
    assert theory.distance([3.0], theory.constant_bias()) == 1


# ---------------------------------------------------------------------------------------
# Propositions
# ---------------------------------------------------------------------------------------


def test_uniform_gates_are_pareto():
    found = theory.pareto_fit(jax.random.key(4))
    assert found["distance"] < 1.63 / np.sqrt(100_000)
    assert abs(found["shape"] - 1) < 0.01  # not 2, as the paper's name for it says


def test_the_range_of_a_refined_timescale():
    f = np.linspace(0.001, 0.999, 999)
    found = theory.timescale_range(f)
    np.testing.assert_allclose(
        found["shortest"], 1 / (1 - np.asarray(rg.refine(f, 0 * f))), rtol=1e-12
    )
    np.testing.assert_allclose(found["longest"], found["period"] ** 2, rtol=1e-12)
    assert np.all(found["shortest"] > found["period"] / 2)


@pytest.mark.parametrize("features", [4, 100, 1000])
def test_the_mean_of_master_gates_is_of_the_sum(features):
    """By hand: mean_j of 1 - (j/n)(1 - j/n), and of j/n - (j/n)(1 - j/n)/2."""
    found = theory.master_gate_means(features)
    n = features
    np.testing.assert_allclose(found["sum"], 1 - (n * n - 1) / (6 * n * n), rtol=1e-6)
    np.testing.assert_allclose(
        found["f"], (n + 1) / (2 * n) - (n * n - 1) / (12 * n * n), rtol=1e-6
    )
    if features == 1000:
        assert abs(found["sum"] - 5 / 6) < 1e-6
        assert abs(found["f"] - 5 / 12) < 1e-3


def test_tied_master_gates_are_a_refine_gate():
    grid = np.linspace(0, 1, 21)
    found = theory.tied_master_gates(grid[:, None], grid)
    np.testing.assert_allclose(found["master_gate"], found["refine_gate"], rtol=0, atol=1e-15)
    f, r = np.meshgrid(grid, grid, indexing="ij")
    by_eq_16 = (1 - r) * f**2 + r * (1 - (1 - f) ** 2)
    np.testing.assert_allclose(found["refine_gate"], by_eq_16, rtol=0, atol=1e-15)


# ---------------------------------------------------------------------------------------
# Figure 2
# ---------------------------------------------------------------------------------------


def test_the_band():
    f = np.linspace(0, 1, 11)
    np.testing.assert_allclose(theory.band(f), f - f**2, atol=1e-16)
    x = np.linspace(-5, 5, 11)
    s = 1 / (1 + np.exp(-x))
    got = theory.effective_band(x)
    np.testing.assert_allclose(got.f, s, atol=1e-15)
    np.testing.assert_allclose(got.lower, s**2, atol=1e-15)
    np.testing.assert_allclose(got.upper, 1 - (1 - s) ** 2, atol=1e-15)
    # The text's example: g = 0.99 when f is only 0.9.
    np.testing.assert_allclose(theory.effective_gate(0.9, 1.0), 0.99, rtol=1e-15)


def test_the_gradient_is_autodiffs():
    points = np.random.default_rng(0).normal(0, 2, (50, 2))

    def gate(point):
        f, r = jax.nn.sigmoid(point)
        return rg.refine(f, r)

    want = np.linalg.norm(jax.vmap(jax.grad(gate))(jnp.asarray(points)), axis=-1)
    s = np.asarray(jax.nn.sigmoid(points))
    np.testing.assert_allclose(theory.gate_gradient(s[:, 0], s[:, 1]), want, rtol=1e-12)


@pytest.mark.parametrize("g", [0.003, 0.2, 0.5, 0.77, 0.99])
def test_gradient_bounds_are_extremes_over_r(g):
    got = theory.gradient_bounds(np.array([g]))

    def size(r):  # f from g and r: (1 - 2r) f^2 + 2 r f - g = 0
        a = 1 - 2 * r
        f = g / (r + np.sqrt(r * r + a * g))
        assert abs(theory.effective_gate(f, r) - g) < 1e-12
        return theory.gate_gradient(f, r)

    tries = [size(r) for r in np.linspace(0, 1, 2001)]
    around = np.argmin(tries) / 2000
    ends = {"bounds": (max(around - 1e-3, 0), min(around + 1e-3, 1)), "options": {"xatol": 1e-12}}
    least = min(optimize.minimize_scalar(size, method="bounded", **ends).fun, min(tries))
    np.testing.assert_allclose(got.lower[0], least, rtol=1e-9)
    np.testing.assert_allclose(got.upper[0], max(tries), rtol=1e-9)
    np.testing.assert_allclose(got.plain[0], g * (1 - g), rtol=1e-14)
    np.testing.assert_allclose(got.upper_ratio[0], max(tries) / (g * (1 - g)), rtol=1e-9)
    # At r = 1/2 the gate is plain but r can move too: never worse than without.
    assert got.lower_ratio[0] > 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: theory.chrono_known(2), "tmax must be above 2 and finite, got 2"),
        (lambda: theory.timescale_laws(tmax=float("nan")), "tmax must be above 2"),
        (lambda: theory.uniform_gates(2), "a hidden size of at least 3, got 2"),
    ],
)
def test_a_law_of_no_width_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
