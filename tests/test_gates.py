"""Gates against the UR paper: values, identities, how they start, options, errors."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import recurrent_gates as rg
from tests import reference
from tests.support import array, assert_close, to_numpy

pytestmark = pytest.mark.usefixtures("x64")

UNIT = st.floats(0.0, 1.0)
B_SIGNS = {
    "c": "f+ i-",
    "u": "f+ i-",
    "ur": "f+ r-",
    "cr": "f+ r-",
    "um": "mf+ mi-",
    "cm": "mf+ mi-",
}


def gate(name, downsize=1):
    spec = rg.GATES[name]
    return dataclasses.replace(spec, downsize=downsize) if spec.master else spec


def pre_activations(spec, features, seed=0, batch=()):
    slots = spec.slots(features).items()
    return {
        slot: array(seed + n, *batch, width, scale=2.0) for n, (slot, width) in enumerate(slots)
    }


def own_parameters(spec, features, seed=9):
    params = spec.init(jax.random.key(0), features)
    return jax.tree.map(lambda leaf: array(seed, *leaf.shape), params)


@pytest.mark.parametrize("downsize", [1, 2, 4])
@pytest.mark.parametrize("name", rg.GATES)
def test_gates_are_the_papers(name, downsize):
    spec = gate(name, downsize)
    pre, params = pre_activations(spec, 8, batch=(5,)), own_parameters(spec, 8)
    b = to_numpy(params).get("b")
    expected = reference.gate(name, lambda slot: np.asarray(pre[slot]), b, downsize=downsize)
    assert_close(spec(params, pre), expected)


@pytest.mark.parametrize("name", [name for name in rg.GATES if name not in ("om", "um", "cm")])
def test_a_tied_gate_takes_one_minus_f(name):
    spec = dataclasses.replace(rg.GATES[name], tied=True)
    pre, params = pre_activations(spec, 6), own_parameters(spec, 6)
    assert "i" not in spec.slots(6)
    b = to_numpy(params).get("b")
    expected = reference.gate(name, lambda slot: np.asarray(pre[slot]), b, tied=True)
    assert_close(spec(params, pre), expected)


def test_slots_are_the_maps_of_table_1():
    """Every gate keeps the two maps of the LSTM, but for the masters' two of width F/C."""
    maps = {"standard": "f i", "c": "f i", "u": "f i", "o": "f i"}
    maps |= {"r": "f r", "ur": "f r", "cr": "f r", "or": "f r"}
    for name, slots in maps.items():
        assert rg.GATES[name].slots(8) == dict.fromkeys(slots.split(), 8)
    for name in ("om", "um", "cm"):
        assert gate(name, 4).slots(8) == {"f": 8, "i": 8, "mf": 2, "mi": 2}


@pytest.mark.parametrize("name", rg.GATES)
def test_offsets_have_the_signs_of_table_1(name):
    spec = gate(name, 2 if name in ("om", "um", "cm") else 1)
    params = own_parameters(spec, 8)
    assert set(params) == ({"b"} if name in B_SIGNS else set())
    signs = {token[:-1]: {"+": 1, "-": -1}[token[-1]] for token in B_SIGNS.get(name, "").split()}
    expected = {slot: sign * params["b"] for slot, sign in signs.items()}
    assert_close({slot: offset for slot, offset in spec.offsets(params).items()}, expected)


@given(UNIT, UNIT)
def test_refine_is_antisymmetric_and_stays_in_its_band(f, r):
    f, r = np.float64(f), np.float64(r)
    g = float(rg.refine(f, r))
    assert abs(float(rg.refine(1 - f, 1 - r)) - (1 - g)) < 1e-15
    assert f**2 - 1e-15 <= g <= 1 - (1 - f) ** 2 + 1e-15
    assert abs(g - reference.refine(f, r)) < 1e-15


@given(UNIT)
def test_refine_reaches_both_ends_of_its_band(f):
    assert abs(float(rg.refine(np.float64(f), np.float64(1.0))) - (1 - (1 - f) ** 2)) < 1e-15
    assert abs(float(rg.refine(np.float64(f), np.float64(0.0))) - f**2) < 1e-15
    assert abs(float(rg.refine(np.float64(f), np.float64(0.5))) - f) < 1e-15


@given(UNIT, UNIT)
def test_proposition_4_rescaled_tied_masters_are_a_refine_gate(master, fine):
    """UR eq. 24-27, the master gate playing f and the fine gate playing r."""
    w = master * (1 - master)
    f_hat = 2 * fine * w + (master - w)
    i_hat = 2 * (1 - fine) * w + (1 - master - w)
    assert abs(float(rg.refine(np.float64(master), np.float64(fine))) - f_hat) < 1e-15
    assert abs(float(rg.refine(np.float64(1 - master), np.float64(1 - fine))) - i_hat) < 1e-15
    assert abs(f_hat + i_hat - 1) < 1e-15


@given(st.lists(st.floats(-700, 700), min_size=1, max_size=12))
def test_cumax_is_a_cumulative_softmax(x):
    x = np.asarray(x)
    values = np.asarray(rg.cumax(jnp.asarray(x)))
    np.testing.assert_allclose(values, reference.cumax(x), rtol=0, atol=1e-14)
    assert (np.diff(values) >= 0).all() and values.min() >= 0 and values.max() <= 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_cumax_never_leaves_the_unit_interval(dtype):
    """Summed in bfloat16, 300 shares would reach 1.016."""
    x = array(3, 200, 300).astype(dtype)
    values = rg.cumax(x)
    assert values.dtype == jnp.float32
    assert float(values.max()) <= 1.0 and float(values.min()) >= 0.0
    np.testing.assert_allclose(values[:, -1], 1.0, atol=300 * 2.0**-24)


@pytest.mark.parametrize(
    ("start", "printed"), [("negative", (0.027, 0.5, 0.973)), ("zero", (0.014, 0.5, 0.986))]
)
def test_quantiles_of_a_refined_uniform_gate(start, printed):
    """The 1, 50 and 99% points of g at zero pre-activation, d = 256, with -b and with 0 on r."""
    spec = dataclasses.replace(rg.GATES["ur"], refine_bias=start)
    draws = 2**21
    b = rg.uniform_gate_bias(jax.random.key(5), 256, (draws,), jnp.float64)
    zeros = jnp.zeros(draws)
    g, i = spec({"b": b}, {"f": zeros, "r": zeros})
    quantiles = np.quantile(np.asarray(g), (0.01, 0.5, 0.99))
    assert (
        np.abs(quantiles - printed).max() < 5e-4 + 4e-4
    )  # the rounding of the print, 3 sigma of the sample
    u = 1 / 256 + np.asarray([0.01, 0.5, 0.99]) * (1 - 2 / 256)  # the exact quantiles of f
    exact = 2 * u - 3 * u**2 + 2 * u**3 if start == "negative" else u
    assert np.abs(exact - printed).max() < 5e-4
    zeros = jnp.zeros(3)
    assert_close(spec({"b": jnp.asarray(np.log(u / (1 - u)))}, {"f": zeros, "r": zeros})[0], exact)
    assert_close(g + i, np.ones(draws))


@pytest.mark.parametrize("masters", [1, 2, 5, 16])
@pytest.mark.parametrize("downsize", [1, 3])
def test_expected_master_gates_at_zero(masters, downsize):
    """UR Proposition 3 with finite n: its 5/6 is E(f^ + i^), and f^ alone has 5/12."""
    spec = gate("om", downsize)
    pre = {slot: jnp.zeros(width) for slot, width in spec.slots(masters * downsize).items()}
    f, i = (np.asarray(value) for value in spec({}, pre))
    n = masters
    assert abs(f.mean() - (5 / 12 + 1 / (2 * n) + 1 / (12 * n**2))) < 1e-14
    assert abs((f + i).mean() - (5 / 6 + 1 / (6 * n**2))) < 1e-14


@pytest.mark.parametrize("slot", ["mf", "mi"])
def test_unit_j_reads_master_j_over_c(slot):
    spec = gate("um", 3)
    pre, params = pre_activations(spec, 12), own_parameters(spec, 12)
    before = np.stack(spec(params, pre))
    for master in range(4):
        after = np.stack(spec(params, pre | {slot: pre[slot].at[master].add(1.0)}))
        moved = (before != after).any(axis=0)
        assert moved.tolist() == [j // 3 == master for j in range(12)]


@pytest.mark.parametrize("name", rg.GATES)
def test_saturated_gates_are_finite(name):
    spec = gate(name)
    slots = list(spec.slots(4))
    params = own_parameters(spec, 4)
    value_and_slope = jax.jit(
        lambda pre: (spec(params, pre), jax.grad(lambda p: sum(map(jnp.sum, spec(params, p))))(pre))
    )
    for signs in itertools.product((-1e4, 1e4), repeat=len(slots)):
        pre = {slot: jnp.full((4,), sign) for slot, sign in zip(slots, signs, strict=True)}
        (f, i), slopes = value_and_slope(pre)
        for value in (f, i):
            assert (
                np.isfinite(value).all()
                and (np.asarray(value) >= 0).all()
                and (np.asarray(value) <= 1).all()
            )
        assert all(np.isfinite(slope).all() for slope in slopes.values())


@pytest.mark.parametrize("refine_bias", ["negative", "zero"])
@pytest.mark.parametrize("refine_input", [False, True])
def test_a_free_input_gate_with_its_own_refine_gate(refine_input, refine_bias):
    """Each refine gate starts against the gate that it refines: f at +b with r at -b, i at -b
    with its own at +b."""
    spec = rg.Gate(bias="uniform", refine=True, refine_input=refine_input, refine_bias=refine_bias)
    pre, params = pre_activations(spec, 5), own_parameters(spec, 5)
    assert set(pre) == {"f", "i", "r"} | ({"ri"} if refine_input else set())
    p, b = {slot: np.asarray(value) for slot, value in pre.items()}, np.asarray(params["b"])
    rb = b if refine_bias == "negative" else 0.0
    f = reference.refine(reference.sigmoid(p["f"] + b), reference.sigmoid(p["r"] - rb))
    i = reference.sigmoid(p["i"] - b)
    if refine_input:
        i = reference.refine(i, reference.sigmoid(p["ri"] + rb))
    assert_close(spec(params, pre), (f, i))


def test_refine_may_act_on_a_free_forget_gate_alone():
    spec = rg.Gate(refine=True)
    pre = pre_activations(spec, 5)
    p = {slot: np.asarray(value) for slot, value in pre.items()}
    f = reference.refine(reference.sigmoid(p["f"]), reference.sigmoid(p["r"]))
    assert_close(spec({}, pre), (f, reference.sigmoid(p["i"])))


@pytest.mark.parametrize("name", B_SIGNS)
def test_a_folded_bias_is_a_start_and_no_parameter(name):
    """The same draw, once beside the maps and once inside their biases, gives the same gate."""
    key = jax.random.key(4)
    separate, folded = gate(name), dataclasses.replace(gate(name), bias_mode="folded")
    b = separate.init(key, 6, jnp.float64)["b"]
    assert folded.init(key, 6) == {}
    start = folded.slot_bias(key, 6, jnp.float64)
    signs = {token[:-1]: {"+": 1, "-": -1}[token[-1]] for token in B_SIGNS[name].split()}
    assert set(start) == set(signs)
    drawn = start["mf" if name.endswith("m") else "f"]
    for slot, sign in signs.items():
        np.testing.assert_array_equal(start[slot], sign * drawn)
    assert separate.slot_bias(key, 6) == {}
    pre = pre_activations(separate, 6)
    shifted = {slot: value + signs.get(slot, 0) * b for slot, value in pre.items()}
    assert_close(folded({}, shifted), separate({"b": b}, pre))


@pytest.mark.parametrize("name", B_SIGNS)
def test_a_frozen_bias_acts_and_never_learns(name):
    key = jax.random.key(4)
    separate, frozen = gate(name), dataclasses.replace(gate(name), bias_mode="frozen")
    params = frozen.init(key, 6, jnp.float64)
    (b,) = params.values()
    pre = pre_activations(frozen, 6)
    np.testing.assert_array_equal(np.stack(frozen(params, pre)), np.stack(separate({"b": b}, pre)))
    slope = jax.grad(lambda params: jnp.sum(frozen(params, pre)[0]))(params)
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(slope))
    learning = jax.grad(lambda params: jnp.sum(separate(params, pre)[0]))({"b": b})
    assert (np.asarray(learning["b"]) != 0).all()


def test_where_the_linear_bias_of_f_starts():
    """Standard and R start at +1 on f; ordered gates and everything under masters at 0."""
    for name in rg.GATES:
        start = rg.GATES[name].slot_bias(jax.random.key(0), 5)
        expected = {"f": 1.0} if name in ("standard", "r") else {}
        assert {
            slot: set(np.asarray(value).tolist()) for slot, value in start.items() if np.any(value)
        } == {slot: {value} for slot, value in expected.items()}
    assert (
        np.asarray(rg.Gate(forget_bias=2.5).slot_bias(jax.random.key(0), 3)["f"]).tolist()
        == [2.5] * 3
    )


def test_uniform_masters_draw_from_the_hidden_size():
    """d is the hidden size and not the number of masters: 1/d with d = 64 lies below 1/16."""
    spec = gate("um", 16)
    draws = np.concatenate([spec.init(jax.random.key(seed), 64)["b"] for seed in range(500)])
    assert draws.shape == (2000,)
    u = reference.sigmoid(draws.astype(np.float64))
    assert (
        u.min() < 1 / 32 and u.max() > 1 - 1 / 32
    )  # impossible with d = 4, whose u stays in [1/4, 3/4]
    assert u.min() > 1 / 64 - 1e-6 and u.max() < 1 - 1 / 64 + 1e-6


def test_gates_are_values():
    assert rg.GATES["ur"] == rg.Gate(bias="uniform", refine=True, tied=True)
    assert (
        len(
            {hash(spec) for spec in rg.GATES.values()} | {hash(dataclasses.replace(rg.GATES["ur"]))}
        )
        == 11
    )
    assert set(rg.GATES) == {"standard", "c", "u", "o", "r", "ur", "cr", "or", "om", "um", "cm"}


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        (dict(activation="tanh"), "activation"),
        (dict(bias="normal"), "bias"),
        (dict(bias_mode="shared"), "bias_mode"),
        (dict(refine_bias="positive"), "refine_bias"),
        (dict(downsize=0), "downsize"),
        (dict(tmax=1.5, bias="chrono"), "tmax"),
        (dict(tmax=math.inf, bias="chrono"), "tmax"),
        (dict(tmax=math.nan, bias="chrono"), "tmax"),
        (dict(refine_input=True, tied=True), "input"),
        (dict(master=True, refine=True), "master"),
    ],
)
def test_impossible_gates_are_refused_in_one_sentence(settings, word):
    with pytest.raises(ValueError, match=word) as error:
        rg.Gate(**settings)
    assert str(error.value).count("\n") == 0


@pytest.mark.parametrize(
    ("spec", "features"), [(gate("om", 3), 8), (rg.GATES["u"], 2), (gate("um", 2), 2)]
)
def test_sizes_that_do_not_fit_are_refused(spec, features):
    with pytest.raises(ValueError, match=str(features)):
        spec.slots(features)
    with pytest.raises(ValueError, match=str(features)):
        spec.init(jax.random.key(0), features)


def test_a_refined_input_gate_alone_cannot_be_tied():
    gate = rg.Gate(refine_input=True)
    for make in (rg.GRU, rg.MinGRU):
        with pytest.raises(ValueError, match="refine_input=True has no effect where i is 1 - f"):
            make(8, gate=gate)
    assert rg.LSTM(8, gate=gate).gate == gate
