"""The newton backend against the scan: values, gradients, precision, and what it serves."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import recurrent_gates as rg
from recurrent_gates.analysis import newton_report
from recurrent_gates.backends.newton import backend as newton
from recurrent_gates.backends.newton import blocks, shooting
from recurrent_gates.scan import Loop, Settings
from tests.support import array, assert_close, parameters, quick_jit, randomize, state, thinned
from tests.test_carry import OwnZoneout, Scale
from tests.test_gato import Count, StoreAtCount

STEPS, BATCH, INPUTS, FEATURES = 37, 2, 2, 4

pytestmark = pytest.mark.usefixtures("x64")


class Leaky(rg.Cell):
    """A diagonal cell in a few lines, whose carry is a bare array."""

    features: int = FEATURES

    @property
    def diagonal(self):
        return True

    def init_params(self, key, in_features):
        return {"W": jax.random.normal(key, (in_features, self.features)), "a": jnp.ones(4)}

    def initial(self, batch_shape):
        return jnp.zeros((*batch_shape, self.features))

    def step(self, params, carry, z_t):
        a = params["a"].reshape((1,) * (carry.ndim - 1) + (-1,))
        return 0.8 * carry + jnp.tanh(a * carry + z_t @ params["W"])


class Grow(Leaky):
    """A linear cell that doubles its carry every 7 steps."""

    diagonal = Leaky.diagonal

    def step(self, params, carry, z_t):
        return 1.1 * carry + z_t @ params["W"]


@pytest.fixture
def small(monkeypatch):
    """Blocks of 5 or 6 steps, so that short sequences have several and a rest."""
    monkeypatch.setattr(blocks, "BLOCK", 5)
    monkeypatch.setattr(shooting, "WARM_UP", 2)


class Run(Leaky):
    """A cell that grows without bound, and is far from linear before it does."""

    diagonal = Leaky.diagonal

    def step(self, params, carry, z_t):
        return 1.1 * carry + jnp.tanh(2 * carry + z_t @ params["W"])


CELLS = {
    "gato1": lambda **how: rg.CELLS["gato1"](FEATURES, bias_vectors=2, **how),
    "gato2": lambda **how: rg.CELLS["gato2"](FEATURES, hidden=3, **how),
    "zero": lambda **how: rg.CELLS["gato2"](FEATURES, hidden=3, s_update="zero", **how),
    "replace": lambda **how: rg.CELLS["gato2"](FEATURES, hidden=3, s_update="replace", **how),
    "own": lambda **how: Leaky(),
    "linear": lambda **how: Grow(),
}


def build(name):
    return CELLS[name](param_dtype=jnp.float64)


def masks(seed, probability, *shape):
    return jnp.asarray(np.random.default_rng(seed).random(shape) < probability)


def per_step(*shape):
    return masks(4, 0.5, STEPS, *shape)


SOME = masks(3, 0.8, STEPS, BATCH)
RESETS = masks(5, 0.1, STEPS, BATCH)
WIDTH = FEATURES // 2
HOW = {
    "plain": dict(unroll=2),
    "lengths": dict(lengths=jnp.asarray([0, STEPS - 9]), reverse=True, return_carries="all"),
    "chunks": dict(remat=16, return_carries="all", resets=RESETS, reverse=True),
    "detach": dict(
        carry_fns=(rg.Detach(p=0.5, field="r"), rg.Detach(p=0.5, field="s", per_example=True)),
        noise=(per_step(), per_step(BATCH)),
        resets=RESETS,
        valid=SOME,
    ),
    "damp": dict(
        carry_fns=(rg.Damp(p=0.4, field="r"), rg.Damp(p=0.3, field="s")), noise=(None, None)
    ),
    "zoneout": dict(
        carry_fns=(
            rg.Zoneout(p=0.5, field="s"),
            rg.Zoneout(p=0.3, field="r"),
            rg.Detach(p=0.3, field="r"),
        ),
        noise=(per_step(BATCH, WIDTH), per_step(BATCH, WIDTH), per_step()),
        reverse=True,
        valid=SOME,
    ),
    "mean": dict(carry_fns=(rg.Zoneout(p=0.3, field="r"),), deterministic=True),
    "keys": dict(carry_fns=(rg.Zoneout(p=0.3, field="r"),), key=jax.random.key(3)),
    "bare": dict(carry_fns=(rg.Detach(p=0.5, field=None),), noise=(per_step(),), resets=RESETS),
}
CASES = [
    *itertools.product(("gato1",), [how for how in HOW if how != "bare"]),
    *itertools.product(("gato2", "zero", "replace"), ("detach", "zoneout")),
    *itertools.product(("own",), ("chunks", "bare")),
    ("linear", "plain"),
]


def results(cell, how, backend, params, xs, carry, reset_carry, around=lambda run: run):
    """Values, and the gradients of params, inputs, carry and reset_carry for random cotangents."""

    @around
    def forward(params, xs, carry, reset_carry):
        return rg.unroll(cell, params, xs, carry, reset_carry=reset_carry, backend=backend, **how)

    @quick_jit
    def pull(*operands):
        out, pullback = jax.vjp(forward, *operands)
        random = jax.tree.map(lambda leaf: array(31, *leaf.shape).astype(leaf.dtype), out)
        return out, pullback(random)

    return pull(params, xs, carry, reset_carry)


def compare(cell, how, around=lambda run: run, lanes=(), tolerance=1e-10):
    operands = (
        parameters(cell, INPUTS),
        array(8, *lanes, STEPS, BATCH, INPUTS),
        *(state(cell, (*lanes, BATCH), seed) for seed in (0, 50)),
    )
    got, want = (
        results(cell, how, backend, *operands, around=around) for backend in ("newton", "scan")
    )
    assert_close(got, want, tolerance)


@pytest.mark.parametrize(
    ("name", "how"),
    thinned(
        CASES,
        lambda name, how: (
            (name == "gato1" and how in ("plain", "detach"))
            or (name, how) == ("gato2", "zoneout")
            or name in ("own", "linear")
        ),
        pytest.mark.long,
    ),
    ids=str,
)
def test_newton_is_the_scan(name, how, small):
    compare(build(name), HOW[how])


@pytest.mark.parametrize("steps", [1, 9, 10])
def test_any_number_of_steps(steps, small, monkeypatch):
    """Fewer than two blocks, and exactly two."""
    monkeypatch.setattr("tests.test_newton.STEPS", steps)
    compare(build("gato1"), dict(reverse=True))


@pytest.mark.parametrize("around", ["vmap", "checkpoint"])
@pytest.mark.long
def test_newton_inside_transformations(around, small):
    wrap = {
        "vmap": functools.partial(jax.vmap, in_axes=(None, 0, 0, 0)),
        "checkpoint": jax.checkpoint,
    }[around]
    compare(build("gato2"), dict(valid=SOME), wrap, lanes=(2,) if around == "vmap" else ())


@pytest.mark.long
def test_all_masks_of_detaching_six_steps(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 2)
    monkeypatch.setattr(shooting, "WARM_UP", 1)
    cell, fns = build("gato1"), (rg.Detach(p=0.5, field="r"),)
    params, xs, start = parameters(cell, INPUTS), array(8, 6, BATCH, INPUTS), state(cell, (BATCH,))
    weights = array(9, 6, BATCH, FEATURES)
    all_masks = jnp.asarray(list(itertools.product((False, True), repeat=6)))

    def gradients(backend):
        def loss(params, xs, start, mask):
            how = dict(carry_fns=fns, noise=(mask,), backend=backend)
            return jnp.sum(weights * rg.unroll(cell, params, xs, start, **how)[1])

        one = jax.grad(loss, (0, 1, 2))
        return quick_jit(jax.vmap(one, (None, None, None, 0)))(params, xs, start, all_masks)

    got, want = gradients("newton"), gradients("scan")
    assert_close(got, want)
    assert len(np.unique(np.asarray(want[2].r[:, 0, 0]))) > 2  # the masks make a difference


@pytest.mark.long
def test_increments_in_chunks(small, monkeypatch):
    """37 steps of (2 + 3) * 2 units and 2 examples, 100 numbers at once: chunks and a rest."""
    monkeypatch.setattr(newton, "INCREMENT_SIZE", 100)
    compare(build("gato2"), dict(reverse=True, resets=RESETS))


@pytest.mark.long
def test_chunks_of_time_where_the_carry_is_large(small, monkeypatch):
    monkeypatch.setattr(newton, "CARRY_SIZE", 16 * BATCH * FEATURES)
    cell = build("gato1")
    xs = array(8, STEPS, BATCH, INPUTS)
    start = cell.initial((BATCH,))
    assert newton.chunk(Loop(Settings(cell, batch_dims=1), {}, xs, start, start)) == 16
    compare(cell, {})


@struct.dataclass
class Shrink(rg.CarryFn):
    """A function of one's own that says that it treats units one by one, and all alike."""

    @property
    def elementwise(self):
        return True

    def before(self, noise_t, carry):
        return carry._replace(**{self.field: self.p * carry._asdict()[self.field]})

    def after(self, noise_t, prev, new):
        new, prev = new._asdict(), prev._asdict()
        return rg.GATOState(**(new | {self.field: jnp.sin(new[self.field]) + prev[self.field] / 8}))


def test_a_function_that_says_that_it_is_elementwise_is_served(small):
    compare(build("gato1"), dict(carry_fns=[Shrink(0.9, field="r")], resets=RESETS))


def gato(scale=1.0, features=64, inputs=4, dtype=jnp.float64, seed=0):
    """A one-layer GATO as it starts, with f's weights on r, a and b, times a scale."""
    cell = rg.CELLS["gato1"](features, param_dtype=dtype)
    params = cell.init_params(jax.random.key(seed), inputs)
    kernels = params["f"]["recurrent_kernel"]
    params["f"]["recurrent_kernel"] = jax.tree.map(lambda a: scale * a, kernels)
    return cell, params


# Under vmap, what is seldom needed is not run for every lane all the same


def lanes_and_calls(monkeypatch, steepness):
    """The report on two lanes of a recurrence; how often starts were searched for in them."""
    calls = []

    def search(*operands):
        jax.debug.callback(lambda: calls.append(1))
        return found(*operands)

    found = shooting._search
    monkeypatch.setattr(shooting, "_search", search)
    xs = array(1, 2, 300, 3)

    def step(c, z):
        return jnp.tanh(steepness * c + z)

    run = quick_jit(jax.vmap(lambda xs: shooting.solve(step, jnp.zeros(3), xs)))
    _, states, report = run(xs)
    jax.effects_barrier()
    want = jax.lax.scan(lambda c, x: (step(c, x),) * 2, jnp.zeros((2, 3)), jnp.swapaxes(xs, 0, 1))
    assert_close(jnp.swapaxes(states, 0, 1), want[1])
    return report, len(calls)


def test_starts_are_searched_for_only_where_they_are_not_found(small, monkeypatch):
    easy, calls = lanes_and_calls(monkeypatch, 0.3)
    assert (easy.passes > 1).all()
    assert (easy.passes <= shooting.PLAIN).all()
    assert calls == 0
    hard, calls = lanes_and_calls(monkeypatch, 3.0)
    assert (hard.passes > shooting.PLAIN).any()
    assert 1 <= calls <= 2  # once for each lane


@pytest.mark.parametrize("fell_back", [False, True])
def test_a_warning_that_is_not_due_does_not_call_the_host(fell_back, monkeypatch):
    calls = []
    monkeypatch.setattr(newton._LOGGER, "warning", lambda *_: calls.append("warned"))
    monkeypatch.setattr(jax.debug, "callback", counted(jax.debug.callback, calls))
    settings = Settings(Grow(), batch_dims=1)

    @jax.jit
    @jax.vmap
    def warn(lane):
        none = jnp.zeros((), lane.dtype)
        newton._warn(settings, "forward", shooting.Report(none, none, lane > 5, lane > 4))
        return lane

    warn(jnp.zeros((3, 2)).at[1, 1].set(5.0 if fell_back else 0.0))
    jax.effects_barrier()
    assert calls.count("called") == (3 if fell_back else 0)
    assert calls.count("warned") == (1 if fell_back else 0)


def counted(callback, calls):
    """A debug callback that notes every call of the host."""

    def debug_callback(function, *operands):
        def called(*values):
            calls.append("called")
            function(*values)

        callback(called, *operands)

    return debug_callback


# Precision


def in_both_precisions(features, steps):
    """(carries, ys) of a GATO at its start: newton in float32, and the scan in float64."""
    xs = array(1, steps, 2, 4).astype(jnp.float32)
    cell, params = gato(features=features, dtype=jnp.float32)
    exact = gato(features=features)[0]

    @quick_jit
    def run(params, xs):
        doubled = jax.tree.map(lambda a: a.astype(jnp.float64), (params, xs))
        return (
            rg.unroll(cell, params, xs, return_carries="all", backend="newton"),
            rg.unroll(exact, *doubled, return_carries="all", backend="scan"),
        )

    return run(params, xs)


def test_float32_r_and_y():
    """Against float64: r to 1e-5, and y = [cos(s), r] to 1e-4."""
    (got, got_y), (want, want_y) = in_both_precisions(64, 4096)
    assert got.r.dtype == got_y.dtype == jnp.float32
    assert_close(got.r, want.r, 1e-5)
    assert_close(got_y, want_y, 1e-4)


def test_float32_is_the_loop_to_its_roundings(small):
    """The first guesses are off by anything from 0.1 to 1e-7: each unit forgets at its own pace,
    and is a recurrence of its own, that no other unit's gaps keep going."""
    pace, xs = jnp.linspace(0.02, 0.98, 49, dtype=jnp.float32), array(8, 49, 60)

    def run(solve):
        def unit(pace, xs):
            return solve(lambda c, x: jnp.tanh(pace * c + x), jnp.zeros((), jnp.float32), xs)

        return quick_jit(jax.vmap(unit))(pace, xs.astype(jnp.float32))

    got = run(lambda step, start, xs: shooting.solve(step, start, xs)[1])
    want = run(lambda step, start, xs: jax.lax.scan(lambda c, x: (step(c, x),) * 2, start, xs)[1])
    assert_close(got, want, 1e-5)


@pytest.mark.long
def test_float32_s_over_65536_steps():
    """s in float32 is off by the roundings of its sum alone, 65,536 of up to 2.4e-7 at random:
    1.2e-4 for the worst of 16 units, where a plain sum would be off by 0.4."""
    (got, _), (want, _) = in_both_precisions(16, 65_536)
    turn = 2 * np.pi
    missed = np.abs((np.asarray(got.s) - np.asarray(want.s) + np.pi) % turn - np.pi)
    assert missed.max() < 2e-4
    assert (np.asarray(got.s) >= 0).all()
    assert (np.asarray(got.s) < turn + 1e-6).all()


# What it serves


@pytest.mark.parametrize(
    ("make", "fns", "why"),
    [
        (lambda: rg.LSTM(FEATURES), (), "LSTM does not say"),
        (lambda: rg.GATO(FEATURES, f=Count(), g=StoreAtCount()), (), "GATO does not say"),
        (lambda: rg.CELLS["gato1"](FEATURES), (Scale(p=0.5, field="r"),), "Scale may mix"),
        (
            lambda: rg.CELLS["gato1"](FEATURES),
            (OwnZoneout(p=0.5, field="r"),),
            "OwnZoneout may mix",
        ),
        (lambda: rg.CELLS["gato1"](FEATURES), (rg.Damp(p=0.5, field=0),), "must name its field"),
        (lambda: rg.CELLS["gato1"](FEATURES), (rg.Zoneout(p=0.5, field="s"),), "is no sum"),
        (lambda: rg.CELLS["gato1"](FEATURES), (Shrink(p=0.5, field="s"),), "is no sum"),
    ],
    ids=[
        "lstm",
        "maps of one's own",
        "function of one's own",
        "zoneout of one's own",
        "index",
        "mean of s",
        "s of one's own",
    ],
)
def test_what_newton_does_not_serve_is_refused_in_one_sentence(make, fns, why, x32):
    cell = make()
    params, xs = cell.init_params(jax.random.key(0), 1), jnp.ones((3, BATCH, 1))
    with pytest.raises(ValueError, match=f"newton.*{why}") as error:
        rg.unroll(cell, params, xs, carry_fns=fns, deterministic=True, backend="newton")
    assert "\n" not in str(error.value)


def test_nothing_to_report_for_a_cell_that_is_not_diagonal(x32):
    cell = rg.GRU(FEATURES)
    with pytest.raises(ValueError, match="GRU does not say"):
        newton_report(cell, cell.init_params(jax.random.key(0), 1), jnp.ones((3, BATCH, 1)))


def test_a_map_says_whether_its_units_interact():
    assert rg.GATO(FEATURES).diagonal
    assert not rg.GATO(FEATURES, f=Count()).diagonal
    assert rg.GATO(FEATURES, g=StoreAtCount()).diagonal  # g does not feed back
    assert not rg.LSTM(FEATURES).diagonal


def test_another_length_or_mask_compiles_nothing_else(small):
    """The program is traced once for masks and parameters of any value."""
    cell, traces = build("gato1"), []

    @quick_jit
    def run(params, xs, valid):
        traces.append(1)
        return rg.unroll(cell, params, xs, valid=valid, backend="newton")[1]

    for seed in (0, 1):
        run(randomize(parameters(cell, INPUTS), seed), array(seed, STEPS, BATCH, INPUTS), SOME)
        run(parameters(cell, INPUTS), array(seed, STEPS, BATCH, INPUTS), ~SOME)
    assert len(traces) == 1


class Counting(Leaky):
    """Beside what it holds it counts its steps, in whole numbers."""

    diagonal = Leaky.diagonal

    def initial(self, batch_shape):
        return super().initial(batch_shape), jnp.zeros(batch_shape, int)

    def emit(self, params, carry, z_t):
        return carry[0]

    def step(self, params, carry, z_t):
        return super().step(params, carry[0], z_t), carry[1] + 1


def test_whole_numbers_are_refused():
    cell, xs = Counting(), array(0, 9, INPUTS)
    params = cell.init_params(jax.random.key(0), INPUTS)
    with pytest.raises(ValueError, match="carry of Counting has other numbers than floating-point"):
        rg.unroll(cell, params, xs, backend="newton")


@pytest.mark.parametrize("derivative", [jax.grad, jax.jacfwd])
def test_second_derivatives_are_refused(small, derivative):
    """They would be those of the passes, which stop where values, not slopes, have settled."""
    cell, params = gato(features=4, inputs=INPUTS)
    xs = array(8, STEPS, BATCH, INPUTS)

    def slope(x):
        return jax.grad(lambda x: jnp.sum(rg.unroll(cell, params, x * xs, backend="newton")[1]))(x)

    with pytest.raises(ValueError, match="first derivatives in reverse mode alone"):
        jax.eval_shape(derivative(slope), 1.0)
