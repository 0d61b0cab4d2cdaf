"""Linear recurrences against their papers in NumPy, and the parallel backend against the scan."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import recurrent_gates as rg
from recurrent_gates import scan
from recurrent_gates.backends import parallel
from recurrent_gates.testing import check_cell
from tests import reference
from tests.support import (
    array,
    assert_close,
    assert_identical,
    parameters,
    quick_jit,
    state,
    thinned,
    to_numpy,
)
from tests.test_carry import OwnZoneout, Scale

pytestmark = pytest.mark.usefixtures("x64")

FEATURES, INPUTS, BATCH, STEPS = 4, 3, 2, 37
FAMILIES = {"mingru": rg.MinGRU, "minlstm": rg.MinLSTM, "rg_lru": rg.RGLRU}
DISTINCT = ("standard", "u", "o", "r", "ur", "or", "om", "um")  # the others start apart alone


def build(name, **settings):
    return rg.CELLS[name](FEATURES, **{"param_dtype": jnp.float64, **settings})


def masks(seed, probability, *shape):
    return jnp.asarray(np.random.default_rng(seed).random(shape) < probability)


# The cells


def test_every_gate_is_on_every_family():
    for family, cell in FAMILIES.items():
        for gate in rg.GATES:
            name = family if gate == "standard" else f"{gate}_{family}"
            own = cell.gate if gate == "standard" else rg.GATES[gate]
            assert rg.CELLS[name](FEATURES) == cell(FEATURES, gate=own)


@pytest.mark.parametrize("gate", DISTINCT)
@pytest.mark.parametrize("family", FAMILIES)
def test_one_step_is_the_papers(family, gate):
    cell = build(family if gate == "standard" else f"{gate}_{family}")
    params, carry, x = parameters(cell, INPUTS), state(cell, (3,)), array(8, 3, INPUTS)
    z = cell.project(params, x)
    new = cell.step(params, carry, z)
    step = getattr(reference, family)
    assert_close(tuple(new), step(to_numpy(params), to_numpy(tuple(carry)), np.asarray(x), gate))
    gates = cell.gates(params, carry, z)
    assert_close(gates["f"] * carry.h + gates["i"] * gates["u"], new.h)
    assert cell.emit(params, new, z) is new.h or jnp.array_equal(cell.emit(params, new, z), new.h)


def test_the_lru_is_the_papers():
    cell = build("lru")
    params, carry, x = parameters(cell, INPUTS), state(cell, (3,)), array(8, 3, INPUTS)
    new, y = cell.apply({"params": params}, carry, x)
    numbers = to_numpy(params), to_numpy(tuple(carry)), np.asarray(x)
    expected = reference.lru(*numbers)
    assert_close(tuple(new), expected)
    assert_close(y, reference.lru_output(numbers[0], expected, numbers[2]))


def test_how_the_decays_start():
    """RG-LRU: a^c uniform between 0.9 and 0.999; LRU: |lambda|^2 uniform on its ring, gamma its
    complement."""
    decay = rg.RGLRU(4096).init_params(jax.random.key(0), 1)["decay"]
    powers = np.sort(reference.sigmoid(np.asarray(decay, np.float64)) ** 8)
    assert_close(powers, np.linspace(0.9, 0.999, 4096), 5e-3)
    params = rg.LRU(4096, r_min=0.5, r_max=0.9).init_params(jax.random.key(0), 1)
    squared = np.exp(-2 * np.exp(np.asarray(params["nu"], np.float64)))
    assert_close(np.sort(squared), np.linspace(0.25, 0.81, 4096), 3e-2)
    assert_close(np.exp(2 * np.asarray(params["gamma"])), 1 - squared, 1e-4)
    turn = np.sort(np.exp(np.asarray(params["theta"])))
    assert_close(turn, np.linspace(0, 2 * np.pi, 4096), 3e-2)


@pytest.mark.parametrize("name", [*FAMILIES, "gato"])
def test_a_forget_bias_is_where_the_bias_of_f_starts(name):
    def start(forget_bias):
        gate = rg.Gate(forget_bias=forget_bias)
        how = dict(f=rg.GatedDecay(gate=gate)) if name == "gato" else dict(gate=gate)
        params = build(name, **how).init_params(jax.random.key(0), INPUTS)
        return params.get("f", params)["bias"]

    low, high = start(-1.0), start(3.0)
    assert_close(high, {**low, "f": low["f"] + 4})


def test_how_the_maps_of_the_lru_start():
    """Normal, the real and the imaginary parts of B with half of a kernel's variance each."""
    units, inputs = 256, 64
    params = rg.LRU(units).init_params(jax.random.key(0), inputs)
    scales = {"kernel": (2 * inputs) ** -0.5, "out_kernel": units**-0.5, "skip": inputs**-0.5}
    for name, scale in scales.items():
        for leaf in jax.tree.leaves(params[name]):
            error = (2 * leaf.size) ** -0.5  # relative, of the deviation of so many numbers
            np.testing.assert_allclose(np.std(leaf), scale, rtol=4 * error, err_msg=name)


REFINED = rg.Gate(refine=True, refine_input=True)
COARSE = rg.Gate(bias="uniform", master=True, downsize=2)


@pytest.mark.parametrize(
    ("gate", "fine", "saturated", "start", "factor"),
    [
        (rg.GATES["standard"], {}, ("f", "i"), -60.0, 1),
        (rg.GATES["um"], {"f": 0.0, "i": 3.0}, ("mf", "mi"), -60.0, 1),
        (COARSE, {"f": 0.0, "i": 3.0}, ("mf", "mi"), -60.0, 1),
        (REFINED, {"r": 0.0, "ri": 0.0}, ("f", "i"), -60.0, 1),  # g = f
        (REFINED, {"r": -200.0, "ri": -200.0}, ("f", "i"), -30.0, 2),  # g = f^2
    ],
)
def test_saturated_gates_of_the_minlstm_keep_their_shares(gate, fine, saturated, start, factor):
    """f and i of 1e-25: their shares are exact, and so is the gradient."""
    cell = build("minlstm", gate=gate, param_dtype=jnp.float32)
    widths = gate.slots(FEATURES)
    low, high = saturated
    numbers = {**fine, low: start, high: start + 1}
    pre = {slot: jnp.full(widths[slot], numbers[slot], jnp.float32) for slot in widths}

    def share(f):
        u = jnp.zeros(FEATURES, jnp.float32)
        return cell._gates({}, {**pre, low: f, "u": u})["f"].sum()

    value, slope = jax.value_and_grad(share)(pre[low])
    exact = reference.sigmoid(-1.0 * factor)
    units = FEATURES // widths[low]
    assert_close(value, FEATURES * exact, 1e-5)
    assert_close(slope, np.full(widths[low], units * factor * exact * (1 - exact)), 1e-5)


@pytest.mark.parametrize("gate", [rg.GATES["u"], rg.GATES["um"], COARSE, REFINED])
def test_the_ratio_of_gates_is_that_of_the_gates(gate):
    """And both derivatives, also at 0, where a sigmoid is split."""
    pre = {slot: 3 * array(n, 5, width) for n, (slot, width) in enumerate(gate.slots(6).items())}
    pre = {slot: x.at[0].set(0) for slot, x in pre.items()}

    def ratio(pre):
        f, i = gate.activate(pre)
        return jnp.log(f / i).sum(), jnp.log(f / i)

    def log_ratio(pre):
        return gate.log_ratio(pre).sum(), gate.log_ratio(pre)

    slopes, values = jax.grad(log_ratio, has_aux=True)(pre)
    expected_slopes, expected = jax.grad(ratio, has_aux=True)(pre)
    assert_close(values, expected)
    assert_close(slopes, expected_slopes)

    def penalty(make):
        return lambda pre: sum(
            (jnp.sin(3 * leaf)).sum()
            for leaf in jax.tree.leaves(jax.grad(make, has_aux=True)(pre)[0])
        )

    assert_close(jax.grad(penalty(log_ratio))(pre), jax.grad(penalty(ratio))(pre))


@pytest.mark.parametrize(
    ("cell", "name"),
    [
        (rg.LRU(64, r_min=1 - 1e-7), "nu"),
        (rg.LRU(64, r_min=1 - 1e-7), "gamma"),
        (rg.LRU(64, r_max=1e-30), "nu"),
        (rg.RGLRU(64, slowest=1 - 1e-9, fastest=1 - 1e-8), "decay"),
    ],
)
def test_decays_that_round_to_0_or_1_start_finite(cell, name, x32):
    start = cell.init_params(jax.random.key(0), 1)[name]
    assert np.isfinite(start).all() and (name != "gamma" or np.max(start) < 0)


@pytest.mark.parametrize("name", ["minlstm", "ur_rg_lru", "lru"])
@pytest.mark.long
def test_a_linear_cell_conforms(name, x32):
    check_cell(rg.CELLS[name](4))


class Claims(rg.MinGRU):
    """Says that it is linear, and is not."""

    mixes: bool = False
    linear = rg.MinGRU.linear

    def step(self, params, carry, z_t):
        h = super().step(params, carry, z_t).h
        return rg.HiddenState(h + (h[..., ::-1] if self.mixes else h * h))


class Gateless(type(build("mingru")).__base__):
    """Has no gates."""


def test_a_cell_without_gates_is_told_in_one_sentence():
    cell = Gateless(4)
    params = cell.init_params(jax.random.key(0), 3)
    with pytest.raises(TypeError, match=r"^Gateless must define _gates\(params, pre\)\."):
        rg.unroll(cell, params, jnp.ones((2, 3), jnp.float32))


@pytest.mark.parametrize(("mixes", "words"), [(True, "units interact"), (False, "depends on")])
def test_a_cell_that_is_not_linear_is_found_out(mixes, words, x32):
    with pytest.raises(AssertionError, match=words):
        check_cell(Claims(4, mixes=mixes))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: rg.MinGRU(0), "0"),
        (lambda: rg.RGLRU(4, rate=0.0), "above 0"),
        (lambda: rg.RGLRU(4, fastest=1.0), "fastest < slowest"),
        (lambda: rg.LRU(4, r_min=1.0), "r_min < r_max"),
        (lambda: rg.CELLS["u_mingru"](2), "at least 3"),
        (lambda: rg.GatedDecay(gate=rg.Gate(master=True, downsize=2)), "downsize=1"),
    ],
)
def test_wrong_settings(make, words):
    with pytest.raises(ValueError, match=words):
        make()


# Any gate as GATO's decay


@pytest.mark.parametrize("gate", DISTINCT[1:])
def test_gato_with_another_gate(gate):
    cell = rg.GATO(8, f=rg.GatedDecay(gate=rg.GATES[gate]), param_dtype=jnp.float64)
    assert gate not in ("ur", "or") or rg.CELLS[f"{gate}_gato"](8) == rg.GATO(8, f=cell.f)
    params, carry, x = parameters(cell, INPUTS), state(cell, (3,)), array(8, 3, INPUTS)
    z = cell.project(params, x)
    numbers = to_numpy(params), np.asarray(carry.r), np.asarray(x)
    expected = reference.gated_gato_decay(numbers[0]["f"], *numbers[1:], gate)
    assert_close(cell.step(params, carry, z).r, expected)
    assert cell.diagonal == (rg.GATES[gate].activation != "cumax")


@pytest.mark.parametrize("name", ["ur_gato", pytest.param("or_gato", marks=pytest.mark.long)])
def test_gato_with_another_gate_is_one_under_all_backends(name):
    """With its kernels interpreted: cumax looks at all units, so units are not a kernel's lanes."""
    cell = rg.CELLS[name](8, hidden=2, param_dtype=jnp.float64)
    params, xs = parameters(cell, INPUTS), array(8, 5, BATCH, INPUTS)
    want = results(cell, {}, "scan", params, xs)
    for backend in ("fused", "pallas", *(["newton"] if cell.diagonal else [])):
        assert_close(results(cell, {}, backend, params, xs), want)


# The parallel backend


@pytest.fixture(params=["one", "many"])
def blocks(request, monkeypatch):
    """One block of all steps, as on a CPU, and blocks of 16 steps, as where many fit a device."""
    if request.param == "many":
        monkeypatch.setattr(parallel, "_block_steps", lambda steps, width: 16)


def results(cell, how, backend, params, xs):
    """Values, and the gradients of params, inputs, carry and reset_carry for random cotangents."""
    shape, dtype = xs.shape[1:-1], xs.dtype
    starts = [jax.tree.map(lambda a: a.astype(dtype), state(cell, shape, n)) for n in (0, 50)]

    @quick_jit
    def pull(params, xs, carry, reset_carry):
        def run(*operands):
            params, xs, carry, reset = operands
            how_ = {**how, "reset_carry": reset, "backend": backend}
            return rg.unroll(cell, params, xs, carry, **how_)

        out, pullback = jax.vjp(run, params, xs, carry, reset_carry)
        return out, pullback(jax.tree.map(lambda a: array(31, *a.shape).astype(a.dtype), out))

    return pull(params, xs, *starts)


def compare(name, how, steps=STEPS, scale=0.7, tolerance=1e-10):
    cell = build(name)
    params, xs = parameters(cell, INPUTS, scale=scale), array(8, steps, BATCH, INPUTS)
    got, want = (results(cell, how, backend, params, xs) for backend in ("parallel", "scan"))
    assert_close(got, want, tolerance)


SOME, RESETS = masks(3, 0.8, STEPS, BATCH), masks(5, 0.1, STEPS, BATCH)
UNITS = masks(4, 0.5, STEPS, BATCH, FEATURES)


def around(field):
    return dict(
        carry_fns=(rg.Zoneout(0.3, field), rg.Detach(0.5, field), rg.Damp(0.3, field)),
        noise=(UNITS, masks(7, 0.5, STEPS), None),
        resets=RESETS,
        valid=SOME,
        return_carries="all",
    )


HOW = {
    "lengths": dict(lengths=jnp.asarray([0, STEPS - 9]), reverse=True, return_carries="all"),
    "chunks": dict(remat=16, resets=RESETS, reverse=True, unroll=2),
    "around": around("h"),
    "mean": dict(carry_fns=(rg.Zoneout(0.3, "h"),), deterministic=True, resets=RESETS),
    "half": around("imag"),
}


@pytest.mark.parametrize(
    ("name", "how"),
    thinned(
        [
            *(("mingru", how) for how in ("lengths", "chunks", "around", "mean")),
            ("om_minlstm", "around"),
            ("ur_rg_lru", "around"),
            ("lru", "half"),
            ("lru", "chunks"),
        ],
        lambda name, how: (name, how) not in (("mingru", "around"), ("lru", "chunks")),
        pytest.mark.long,
    ),
)
def test_parallel_is_the_scan(name, how, blocks):
    compare(name, HOW[how])


@pytest.mark.parametrize("steps", [1, 32, 33])
def test_any_number_of_steps(steps, blocks):
    """One step, two blocks' worth in one, and just three blocks."""
    compare("minlstm", dict(reverse=True), steps)


def test_65536_steps_of_saturated_gates(blocks):
    """Gates that are 0 and 1 to the last digit."""
    compare("rg_lru", {}, 65_536, scale=20.0)


def test_float32(blocks):
    cell = build("u_mingru", param_dtype=jnp.float32)
    params, xs = jax.tree.map(
        lambda a: a.astype(jnp.float32), (parameters(cell, INPUTS), array(8, 4096, BATCH, INPUTS))
    )
    got, want = (results(cell, {}, backend, params, xs) for backend in ("parallel", "scan"))
    assert_close(got, want, 2e-5)


def test_gradients_match_finite_differences(blocks):
    cell = build("minlstm")
    params, xs = parameters(cell, INPUTS), array(8, 50, 1, INPUTS)
    run = jax.jit(lambda params, xs: rg.unroll(cell, params, xs, backend="parallel")[1])
    check_grads(run, (params, xs), order=1, modes=("rev",), eps=1e-6, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "fn"), [("mingru", None), ("lru", None), ("ur_rg_lru", rg.Damp(0.3))]
)
def test_second_derivatives_are_the_scans_or_refused(name, fn, blocks):
    """Of a penalty on the gradients of parameters, inputs and carry, where a_t depends on both."""
    cell = build(name)
    operands = parameters(cell, INPUTS), array(8, STEPS, BATCH, INPUTS), state(cell, (BATCH,))
    options = dict(resets=masks(1, 0.1, STEPS, BATCH), valid=masks(2, 0.9, STEPS, BATCH))
    if fn:
        options |= dict(carry_fns=(fn,))
    elif name == "mingru":  # in evaluation it does nothing
        options |= dict(carry_fns=(rg.Detach(0.3),), deterministic=True)

    def penalty(backend, *operands):
        def loss(*operands):
            return jnp.sum(jnp.sin(rg.unroll(cell, *operands, backend=backend, **options)[1]))

        gradients = jax.grad(loss, (0, 1, 2))(*operands)
        return sum(jnp.sum(jnp.sin(3 * leaf)) for leaf in jax.tree.leaves(gradients))

    def second(backend):
        return quick_jit(jax.grad(functools.partial(penalty, backend), (0, 1, 2)))(*operands)

    if fn:
        with pytest.raises(ValueError, match="first derivatives alone where a carry function acts"):
            second("parallel")
    else:
        assert_close(second("parallel"), second("scan"))


class Decaying(rg.Cell):
    """h_t = w * h_tm1 + x_t, each unit with its own decay."""

    features: int = 2

    @property
    def linear(self):
        return True

    def init_params(self, key, in_features):
        return {"w": jnp.zeros(self.features)}

    def initial(self, batch_shape):
        return rg.HiddenState(jnp.zeros((*batch_shape, self.features)))

    def project(self, params, x):
        return {"x": x}

    def step(self, params, carry, z_t):
        return rg.HiddenState(params["w"] * carry.h + z_t["x"])


def test_a_slope_of_0_has_its_second_derivative(blocks):
    """y_T = sum_k w^(T - k) x_k: the second derivative at w = 0 is 2 x_{T-2}."""
    cell, xs = Decaying(), array(8, STEPS, 2)

    def last(w):
        return rg.unroll(cell, {"w": w}, xs, backend="parallel")[1][-1].sum()

    second = jax.jacrev(jax.grad(last))(jnp.zeros(2))
    assert_close(jnp.diagonal(second), 2 * xs[-3])


def test_a_reset_stops_what_is_not_finite(blocks):
    """NaN before a reset reaches no value and no gradient after it."""
    cell = build("mingru")
    params, xs = parameters(cell, INPUTS), array(8, STEPS, 1, INPUTS)
    resets = jnp.zeros((STEPS, 1), bool).at[0].set(True)

    def loss(params, carry):
        return rg.unroll(cell, params, xs, carry, resets=resets, backend="parallel")[1].sum()

    nan = rg.HiddenState(jnp.full((1, FEATURES), jnp.nan))
    value, gradients = quick_jit(jax.value_and_grad(loss, (0, 1)))(params, nan)
    assert np.isfinite(value)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize(
    ("name", "fn", "words"),
    [
        ("lstm", rg.Damp(0.5), "LSTM does not say that its step is linear"),
        ("mingru", Scale(0.5), "Scale may not be linear"),
        ("mingru", OwnZoneout(0.5), "OwnZoneout may not be linear"),
    ],
)
def test_what_it_does_not_serve_is_refused(name, fn, words):
    cell = build(name)
    params, xs = parameters(cell, INPUTS), array(8, 3, BATCH, INPUTS)
    with pytest.raises(ValueError, match=f"parallel.*{words}"):
        rg.unroll(cell, params, xs, carry_fns=(fn,), deterministic=True, backend="parallel")


def test_auto_takes_it(caplog):
    cell = build("mingru")
    scan._log_choice.cache_clear()
    with caplog.at_level(logging.INFO, "recurrent_gates"):
        rg.unroll(cell, parameters(cell, INPUTS), array(8, 3, BATCH, INPUTS))
    assert "MinGRU on cpu: backend auto chose parallel" in caplog.text


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (np.ones((4, 2, INPUTS), np.int32), "must be floating point, got int32"),
        (np.ones((4, 2, INPUTS), np.complex64), "must be floating point, got complex64"),
        (np.ones((4, 2, INPUTS + 1), np.float32), f"do not fit a kernel for {INPUTS} input"),
    ],
)
def test_inputs_that_do_not_fit_an_lru_are_one_sentence(x, words):
    cell = rg.LRU(4)
    params = cell.init_params(jax.random.key(0), INPUTS)
    with pytest.raises(ValueError, match=words):
        cell.project(params, x)


@pytest.mark.parametrize(("make", "name"), [(rg.LRU, "r_min"), (rg.RGLRU, "slowest")])
def test_settings_that_are_no_numbers_are_one_sentence(make, name):
    with pytest.raises(ValueError, match=f"{name} must be a finite number, got the string 'a'"):
        make(8, **{name: "a"})


@pytest.mark.parametrize("number", [np.float64, np.float32])
@pytest.mark.parametrize(
    "make",
    [
        lambda number: rg.RGLRU(4, rate=number(8)),
        lambda number: rg.LRU(4, max_phase=number(1)),
        lambda number: rg.GATO(4, f=rg.GatedDecay(number(0.5)), g=rg.OneLayer()),
        lambda number: rg.GATO(4, g=rg.OneLayer(), wrap=number(2)),
        lambda number: rg.DNC(4, memory_slots=2, word_size=2, clip=number(1)),
        lambda number: rg.SLSTM(4, forget_bias=number(2)),
        lambda number: rg.LSTM(4, gate=rg.Gate(forget_bias=number(2))),
    ],
)
def test_numpys_numbers_are_settings_like_any(make, number):
    """And widen nothing, where JAX has float64."""
    key, xs = jax.random.key(0), array(8, 4, 2, INPUTS).astype(jnp.float32)
    plain, cell = make(lambda value: float(number(value))), make(number)
    assert cell == plain
    actual, expected = (
        rg.unroll(made, made.init_params(key, INPUTS), xs, backend="scan") for made in (cell, plain)
    )
    assert_identical(actual, expected)
    assert {leaf.dtype for leaf in jax.tree.leaves(expected)} == {jnp.dtype("float32")}
