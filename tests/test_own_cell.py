"""Cells of one's own: one in 15 lines, and one whose inputs and outputs are trees."""

import dataclasses
import functools
import inspect
import itertools
import logging
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

import recurrent_gates as rg
from recurrent_gates.testing import check_cell, check_replay
from tests.support import (
    array,
    assert_close,
    assert_identical,
    parameters,
    quick_jit,
    randomize,
    state,
    thinned,
)

pytestmark = pytest.mark.usefixtures("x64")

STEPS, BATCH, INPUTS, FEATURES = 9, 3, 2, 4
KEY = jax.random.key(3)


class Leaky(rg.Cell):
    features: int = FEATURES

    def init_params(self, key, in_features):
        keys, rows = jax.random.split(key), {"W": in_features, "U": self.features}
        draws = zip(keys, rows.items(), strict=True)
        return {name: jax.random.normal(k, (n, self.features)) / n for k, (name, n) in draws}

    def initial(self, batch_shape):
        return rg.HiddenState(jnp.zeros((*batch_shape, self.features)))

    def project(self, params, x):
        return {"h": x @ params["W"]}

    @property
    def products(self):
        def update(carry, inputs, product):
            return rg.HiddenState(0.9 * carry.h + 0.1 * jnp.tanh(product("h", carry.h)))

        return rg.Products(lambda params: {"h": params["U"]}, update)


def test_a_cell_of_fifteen_lines():
    lines = [line for line in inspect.getsource(Leaky).splitlines() if line.strip()]
    assert len(lines) <= 15
    check_cell(Leaky(), tolerance=1e-10)


class Narrow(Leaky):
    def init_params(self, key, in_features):
        return jax.tree.map(jnp.float32, super().init_params(key, in_features))

    def initial(self, batch_shape):
        return jax.tree.map(jnp.float32, super().initial(batch_shape))


def test_a_cell_of_float32_conforms_where_jax_has_float64():
    check_cell(Narrow())
    check_replay(Narrow())


class Clipped(rg.LSTM):
    def step(self, params, carry, z_t):
        new = super().step(params, carry, z_t)
        return new._replace(c=jnp.clip(new.c, -0.05, 0.05))


class Clipping:
    def step(self, params, carry, z_t):
        new = super().step(params, carry, z_t)
        return new._replace(h=jnp.clip(new.h, -0.05, 0.05))


class Mixed(Clipping, rg.GRU):
    """Its step is a mixin's."""


class Halved(rg.GATO):
    def step(self, params, carry, z_t):
        new = super().step(params, carry, z_t)
        return new._replace(r=new.r / 2)


class Squashed(rg.MinGRU):
    def step(self, params, carry, z_t):
        return rg.HiddenState(jnp.tanh(3 * super().step(params, carry, z_t).h))


class Unwrapped(rg.GATO):
    """s grows without bound, and by half; r is what it was, and so are its products."""

    products = rg.GATO.products

    def step(self, params, carry, z_t):
        new = super().step(params, carry, z_t)
        return new._replace(s=carry.s + self._increment(params, carry, z_t)["s"] / 2)


@dataclasses.dataclass(frozen=True)
class ClippedMap(rg.GatedDecay):
    def __call__(self, params, r, z):
        return jnp.clip(super().__call__(params, r, z), -0.05, 0.05)


def test_a_map_of_ones_own_has_no_inherited_declarations():
    cell = rg.GATO(FEATURES, f=ClippedMap(), param_dtype=jnp.float64)
    params, xs = parameters(cell, INPUTS), array(8, STEPS, BATCH, INPUTS)
    last, _ = rg.unroll(cell, params, xs)
    assert jnp.abs(last.r).max() <= 0.05
    assert_close(rg.unroll(cell, params, xs), rg.unroll(cell, params, xs, backend="scan"))
    for backend in ("fused", "newton"):
        with pytest.raises(ValueError, match="does not"):
            rg.unroll(cell, params, xs, backend=backend)
    check_cell(cell, tolerance=1e-10)


def test_zoneouts_mean_of_a_step_of_ones_own_has_no_inherited_bound():
    cell = Unwrapped(FEATURES, param_dtype=jnp.float64)
    params, xs = parameters(cell, INPUTS), array(8, 40, BATCH, INPUTS)
    carry = cell.initial((BATCH,))
    for x in xs:
        new = cell.step(params, carry, cell.project(params, x))
        carry = new._replace(s=0.1 * carry.s + 0.9 * new.s)
    assert carry.s.max() > 2 * jnp.pi
    request = {"carry_fns": [rg.Zoneout(0.1, "s")], "deterministic": True}
    assert_close(rg.unroll(cell, params, xs, **request)[0], carry)


@pytest.mark.parametrize(
    ("cell", "declared", "backends"),
    [
        (Clipped(FEATURES, param_dtype=jnp.float64), "products", ["fused", "pallas"]),
        (Mixed(FEATURES, param_dtype=jnp.float64), "products", ["fused", "pallas"]),
        (Halved(FEATURES, param_dtype=jnp.float64), "products", ["fused", "pallas"]),
        (Halved(FEATURES, param_dtype=jnp.float64), "diagonal", ["newton"]),
        (Squashed(FEATURES, param_dtype=jnp.float64), "linear", ["parallel"]),
        (Unwrapped(FEATURES, param_dtype=jnp.float64), "sums", ["fused", "pallas"]),
    ],
)
def test_a_step_of_ones_own_has_no_inherited_declarations(cell, declared, backends):
    params, xs = parameters(cell, INPUTS), array(8, STEPS, BATCH, INPUTS)
    carry, expected = cell.initial((BATCH,)), []
    for x in xs:
        carry = cell.step(params, carry, cell.project(params, x))
        expected.append(carry)
    base = next(one for one in (rg.LSTM, rg.GRU, rg.GATO, rg.MinGRU) if isinstance(cell, one))
    assert_close(rg.unroll(cell, params, xs)[0], expected[-1])
    others = rg.unroll(base(FEATURES, param_dtype=jnp.float64), params, xs)[0]
    assert max(jnp.abs(a - b).max() for a, b in zip(carry, others, strict=True)) > 1e-3
    check_cell(cell, tolerance=1e-10)
    for backend in backends:
        owner = "Clipping" if isinstance(cell, Clipping) else type(cell).__name__
        message = f"{owner} defines a step of its own and inherits the {declared} of"
        with pytest.raises(ValueError, match=message):
            rg.unroll(cell, params, xs, backend=backend)


def test_declarations_repeated_beside_a_step_hold():
    class Checked(rg.LSTM):
        products = rg.LSTM.products

        def step(self, params, carry, z_t):
            return super().step(params, carry, z_t)

    cell, xs = Checked(FEATURES, param_dtype=jnp.float64), array(8, STEPS, BATCH, INPUTS)
    params = parameters(cell, INPUTS)
    fused = rg.unroll(cell, params, xs, backend="fused")
    assert_close(fused, rg.unroll(cell, params, xs, backend="scan"))
    check_cell(cell, tolerance=1e-10)


def test_it_is_the_loop_that_it_says(caplog):
    """Values against a loop by hand; auto takes fused."""
    cell, params, xs = Leaky(), parameters(Leaky(), INPUTS), array(8, STEPS, BATCH, INPUTS)
    h, wanted = jnp.zeros((BATCH, FEATURES)), []
    for x in xs:
        h = 0.9 * h + 0.1 * jnp.tanh(x @ params["W"] + h @ params["U"])
        wanted.append(h)
    rg.scan._log_choice.cache_clear()
    with caplog.at_level(logging.INFO, logger="recurrent_gates"):
        assert_close(rg.unroll(cell, params, xs)[1], jnp.stack(wanted))
    assert "Leaky on cpu: backend auto chose fused" in caplog.text


def compare(cell, params, xs, backend, **how):
    """Values, and gradients of all inputs, against the plain scan's."""
    carry, reset_carry = (state(cell, (BATCH,), seed) for seed in (0, 50))

    def results(backend):
        @quick_jit
        def run(params, xs, carry, reset_carry):
            def forward(params, xs, carry, reset_carry):
                how_ = dict(how, reset_carry=reset_carry, backend=backend)
                return rg.unroll(cell, params, xs, carry, **how_)

            out, pullback = jax.vjp(forward, params, xs, carry, reset_carry)
            return out, pullback(randomize(out, 7))

        return run(params, xs, carry, reset_carry)

    assert_close(results(backend), results("scan"))


MASKS = dict(
    valid=jnp.asarray([[t != 3, t < 6, True] for t in range(STEPS)]),
    resets=jnp.asarray([[t == 5, False, t == 2] for t in range(STEPS)]),
)


@pytest.mark.parametrize("backend", ["fused", "pallas"])
@pytest.mark.parametrize("reverse", [False, True])
def test_it_takes_masks_and_h_detach(backend, reverse):
    noise = [jnp.asarray([0, 1, 0, 0, 1, 1, 0, 1, 0], bool)]
    how = dict(carry_fns=[rg.Detach(0.5)], noise=noise, reverse=reverse, **MASKS)
    cell = Leaky()
    compare(cell, parameters(cell, INPUTS), array(8, STEPS, BATCH, INPUTS), backend, **how)


class Pair(NamedTuple):
    fed: jax.Array
    total: jax.Array


class Weighing(rg.Cell):
    """Reads two arrays of other ranks, hands out a tree; a vector of weights, and a sum."""

    def init_params(self, key, in_features):
        draw = functools.partial(jax.random.normal, key)
        return {
            "a": draw((in_features["a"], FEATURES)),
            "b": draw((in_features["b"], FEATURES)),
            "on_h": draw((FEATURES,)),
            "own": draw((FEATURES,)),
        }

    def initial(self, batch_shape):
        zeros = jnp.zeros((*batch_shape, FEATURES))
        return Pair(zeros, zeros)

    def project(self, params, x):
        return {"h": x["a"] @ params["a"], "c": (x["b"] @ params["b"]).mean(axis=-2)}

    def emit(self, params, carry, z):
        return {"sine": jnp.sin(carry.total), "both": [carry.fed, z["c"]]}

    @property
    def diagonal(self):
        return True

    @property
    def products(self):
        def update(carry, inputs, product):
            gate = jax.nn.sigmoid(product("h", carry.fed))
            return carry._replace(fed=0.7 * gate * carry.fed + jnp.tanh(inputs["c"]))

        return rg.Products(
            weights=lambda params: {"h": params["on_h"]},
            update=update,
            biases=lambda params: {"h": params["own"]},
        )

    @property
    def sums(self):
        return rg.Sums(
            ("total",),
            increment=lambda params, carry, z: {"total": carry.fed * z["h"]},
        )


def weighing():
    cell = Weighing()
    params = parameters(cell, {"a": 2, "b": 5})
    return cell, params, {"a": array(1, STEPS, BATCH, 2), "b": array(2, STEPS, BATCH, 3, 5)}


@pytest.mark.parametrize(
    ("backend", "remat"),
    thinned(
        itertools.product(["fused", "newton", "pallas"], [None, 4]),
        lambda backend, remat: (backend == "fused") == (remat is None),
        pytest.mark.long,
    ),
)
def test_trees_run_under_every_backend(backend, remat):
    compare(*weighing(), backend, remat=remat, **MASKS)


@pytest.mark.parametrize("rule", ["replace", "zero"])
@pytest.mark.parametrize("backend", ["fused", "newton", "pallas"])
@pytest.mark.long
def test_other_rules_of_sums(backend, rule):
    class Ruled(Weighing):
        @property
        def sums(self):
            return dataclasses.replace(super().sums, rule=rule)

    _, params, xs = weighing()
    compare(Ruled(), params, xs, backend, **MASKS)
    carry, _ = rg.unroll(Ruled(), params, xs)
    before, _ = rg.unroll(Ruled(), params, jax.tree.map(lambda x: x[:-1], xs))
    last = Ruled().project(params, jax.tree.map(lambda x: x[-1], xs))["h"] * before.fed
    assert_close(carry.total, last if rule == "replace" else jnp.zeros_like(last))


def test_sums_without_a_step_are_one_sentence():
    class Lost(Weighing):
        products = None

    with pytest.raises(TypeError, match="Lost must define recur"):
        rg.unroll(Lost(), *weighing()[1:])


def test_a_cell_without_a_step_is_one_sentence():
    class Still(rg.Cell):
        def init_params(self, key, in_features):
            return {}

        def initial(self, batch_shape):
            return jnp.zeros((*batch_shape, 1))

    with pytest.raises(TypeError, match="Still must define step"):
        rg.unroll(Still(), {}, jnp.zeros((2, 1, 1)))


class Gap(Leaky):
    """Reads beside x how many steps ago the last value was, and a factor in half precision."""

    def project(self, params, x):
        return {"h": x["v"] @ params["W"], "gap": x["gap"], "dim": x["dim"]}

    def init_params(self, key, in_features):
        return super().init_params(key, in_features["v"])

    emit = rg.SlotCell.emit

    @property
    def products(self):
        def update(carry, inputs, product):
            faded = 0.9 ** inputs["gap"] * carry.h
            return rg.HiddenState(0.5 * faded + jnp.tanh(product("h", faded)) * inputs["dim"])

        return rg.Products(lambda params: {"h": params["U"]}, update)


@pytest.fixture
def mixed_dtypes():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.usefixtures("mixed_dtypes")
@pytest.mark.parametrize("backend", ["scan", "fused", "pallas"])
def test_products_have_the_dtype_of_the_widest_input(backend):
    """Not that of the first by name: a tree's are sorted on the way into a loop."""
    cell, params = Gap(), parameters(Gap(), {"v": INPUTS, "gap": 1, "dim": 1})
    xs = {
        "v": array(8, STEPS, BATCH, INPUTS),
        "gap": jnp.arange(STEPS * BATCH).reshape(STEPS, BATCH, 1) % 3,
        "dim": jnp.full((STEPS, BATCH, 1), 0.5, jnp.float16),
    }

    def by_hand(params, v):
        h, hs = jnp.zeros((BATCH, FEATURES)), []
        for v_t, gap in zip(v, xs["gap"], strict=True):
            faded = 0.9**gap * h
            h = 0.5 * faded + 0.5 * jnp.tanh(v_t @ params["W"] + faded @ params["U"])
            hs.append(h)
        return jnp.stack(hs)

    def unrolled(params, v):
        return rg.unroll(cell, params, {**xs, "v": v}, backend=backend)[1]

    operands = params, xs["v"]
    assert unrolled(*operands).dtype == jnp.float64
    assert_close(unrolled(*operands), by_hand(*operands))
    expected = jax.grad(lambda *args: jnp.sin(by_hand(*args)).sum(), argnums=(0, 1))(*operands)
    actual = jax.grad(lambda *args: jnp.sin(unrolled(*args)).sum(), argnums=(0, 1))(*operands)
    assert_close(actual, expected)


class Counted(NamedTuple):
    h: jax.Array
    count: jax.Array


class Counting(Leaky):
    """Slower with every step that it has taken."""

    def initial(self, batch_shape):
        zeros = jnp.zeros((*batch_shape, self.features))
        return Counted(zeros, jnp.zeros((*batch_shape, 1), jnp.int32))

    @property
    def products(self):
        def update(carry, inputs, product):
            rate = 1 / (1 + carry.count.astype(carry.h.dtype))
            h = (1 - rate) * carry.h + rate * jnp.tanh(product("h", carry.h))
            return Counted(h, carry.count + 1)

        return rg.Products(lambda params: {"h": params["U"]}, update)


class Sparing(rg.SlotCell):
    """Has a slot that its update does not ask for."""

    @property
    def slots(self):
        return {"h": self.features, "spare": self.features}

    def initial(self, batch_shape):
        return rg.HiddenState(self.zeros(batch_shape))

    def update(self, carry, inputs, product):
        return rg.HiddenState(jnp.tanh(product("h", carry.h)))


@pytest.mark.parametrize(
    ("cell", "backends"),
    [(Counting(), ["auto"]), (Sparing(FEATURES, param_dtype=jnp.float64), ["auto", "fused"])],
    ids=["counting", "sparing"],
)
def test_what_trains_as_a_loop_trains_under_auto(cell, backends):
    params, xs = parameters(cell, INPUTS), array(8, STEPS, BATCH, INPUTS)

    def loss(params, xs, backend):
        return jnp.sum(jnp.sin(rg.unroll(cell, params, xs, backend=backend)[1]))

    gradients = jax.grad(loss, argnums=(0, 1))
    expected = gradients(params, xs, "scan")
    assert max(jnp.abs(leaf).max() for leaf in jax.tree.leaves(expected)) > 0.01
    for backend in backends:
        assert_close(gradients(params, xs, backend), expected)


def test_whole_numbers_in_a_carry_are_one_sentence():
    params, xs = parameters(Counting(), INPUTS), array(8, STEPS, BATCH, INPUTS)
    with pytest.raises(ValueError, match="a carry of Counting has other numbers than floating-po"):
        rg.unroll(Counting(), params, xs, backend="fused")


def test_gates_that_read_the_carry_are_not_linear():
    """In a linear cell the gates are the step."""

    class Peeping(rg.MinGRU):
        def gates(self, params, carry_tm1, z):
            gates = super().gates(params, carry_tm1, z)
            f = gates["f"] * jax.nn.sigmoid(carry_tm1.h)
            return {**gates, "f": f, "i": 1 - f}

    cell = Peeping(FEATURES, param_dtype=jnp.float64)
    params, xs = parameters(cell, INPUTS), array(8, STEPS, BATCH, INPUTS)
    expected = rg.unroll(cell, params, xs, backend="scan")
    assert_close(rg.unroll(cell, params, xs, backend="auto"), expected)
    with pytest.raises(ValueError, match=r"Peeping does not say .*, of which its own gates"):
        rg.unroll(cell, params, xs, backend="parallel")


class Tally(rg.Cell):
    """A mean that fades, and beside it the whole number of steps."""

    linear = True

    def init_params(self, key, in_features):
        return {"W": jax.random.normal(key, (in_features, FEATURES))}

    def initial(self, batch_shape):
        zeros = jnp.zeros((*batch_shape, FEATURES))
        return Counted(zeros, zeros.astype(jnp.int32))

    def project(self, params, x):
        return x @ params["W"]

    def step(self, params, carry, z_t):
        return Counted(0.9 * carry.h + z_t, carry.count + 1)

    def emit(self, params, carry, z):
        return carry.h


def test_a_linear_cell_that_counts_is_a_loop():
    params, xs = parameters(Tally(), INPUTS), array(8, STEPS, BATCH, INPUTS)
    with pytest.raises(ValueError, match="a carry of Tally has other numbers than floating-point"):
        rg.unroll(Tally(), params, xs, backend="parallel")

    def loss(params, backend):
        return jnp.sin(rg.unroll(Tally(), params, xs, backend=backend)[1]).sum()

    assert_close(jax.grad(loss)(params, "auto"), jax.grad(loss)(params, "scan"))


def test_parameters_may_be_numbers():
    class Scaled(Leaky):
        def init_params(self, key, in_features):
            return {**super().init_params(key, in_features), "scale": 2.0}

        def project(self, params, x):
            return {"h": params["scale"] * (x @ params["W"])}

    class Linear(Scaled):
        linear = True
        products = None

        def step(self, params, carry, z_t):
            return rg.HiddenState(0.9 * carry.h + z_t["h"])

    xs = array(8, STEPS, BATCH, INPUTS)
    params = Scaled().init_params(jax.random.key(0), INPUTS)
    doubled = {**params, "W": 2 * params["W"], "scale": 1.0}
    for cell, backend in ((Scaled(), "fused"), (Linear(), "parallel")):
        expected = rg.unroll(cell, doubled, xs, backend="scan")
        assert_close(rg.unroll(cell, params, xs, backend=backend), expected)


class Noisy(Leaky):
    """Carries the key of its noise, one for each example."""

    def initial(self, batch_shape):
        return jnp.zeros((*batch_shape, self.features)), jax.random.split(KEY, batch_shape)

    def step(self, params, carry, z_t):
        split = jnp.vectorize(jax.random.split, signature="()->(n)")
        normal = jnp.vectorize(lambda key: jax.random.normal(key, (2,)), signature="()->(n)")
        keys = split(carry[1])
        noise = normal(keys[..., 1]).sum(axis=-1, keepdims=True)
        return jnp.tanh(carry[0] + z_t["h"] + noise), keys[..., 0]

    def emit(self, params, carry, z):
        return carry[0]

    products = None


def test_a_key_in_a_carry_is_handed_back():
    cell, xs = Noisy(), array(8, STEPS, BATCH, INPUTS)
    params = cell.init_params(KEY, INPUTS)
    last, ys = rg.unroll(cell, params, xs)
    carry, head = rg.unroll(cell, params, xs[:4])
    end, tail = rg.unroll(cell, params, xs[4:], carry)
    assert_close((end[0], jnp.concatenate([head, tail])), (last[0], ys))
    assert_identical(*(jax.random.key_data(carry[1]) for carry in (end, last)))
    resets = jnp.zeros((STEPS, BATCH), bool).at[4].set(True)
    assert_close(rg.unroll(cell, params, xs, reset_carry=carry, resets=resets)[1], ys)
    layer = rg.RNN(cell, time_major=True)
    variables = {"params": {"cell": params}}
    assert_close(layer.apply(variables, xs[4:], initial_carry=carry), tail)
    step = rg.stepper(cell, params, BATCH, in_features=INPUTS)
    assert_close(step(jax.tree.map(jnp.copy, carry), xs[4].astype(step._x.dtype))[1], tail[0])


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda h, keys: (h, jnp.zeros(BATCH)), r"must hold PRNG keys key<fry>, got an array floa"),
        (lambda h, keys: (h, jax.random.split(jax.random.key(0, impl="rbg"), BATCH)), "key<rbg>"),
        (
            lambda h, keys: (jax.random.split(KEY, h.shape), keys),
            "must hold arrays of numbers, got",
        ),
        (lambda h, keys: (h, keys[:2]), "this cell and batch need"),
    ],
)
def test_another_carry_than_one_with_a_key_is_one_sentence(wrong, sentence):
    cell, xs = Noisy(), array(8, STEPS, BATCH, INPUTS)
    with pytest.raises(ValueError, match=sentence):
        rg.unroll(cell, cell.init_params(KEY, INPUTS), xs, wrong(*cell.initial((BATCH,))))
