"""One step at a time: ``rg.stepper`` against the scan, and what it does with a carry."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import recurrent_gates as rg
from recurrent_gates import target
from tests.support import array, assert_close, assert_identical, parameters

pytestmark = pytest.mark.usefixtures("x64")

FEATURES, INPUTS = 4, 3
ZEROS = np.zeros((2, FEATURES))


def build(name, **settings):
    return rg.CELLS[name](FEATURES, **{"param_dtype": jnp.float64, **settings})


@pytest.mark.parametrize(
    "name", ["lstm", "gru", "ur_gru", "om_lstm", "slstm", "exploding", "gato1", "lru"]
)
@pytest.mark.parametrize("batch", [(2,), (1,), ()])
def test_a_stepper_is_the_scan(name, batch):
    """Whatever a product reads: the state, the reset state, or the input alone."""
    cell = build(name, **({} if name == "lru" else {"bias_vectors": 2}))
    params, xs = parameters(cell, INPUTS), array(8, 4, *batch, INPUTS)
    step, ys = rg.stepper(cell, params, batch), []
    carry = step.initial()
    for x in xs:
        carry, y = step(carry, x)
        ys.append(y)
    assert_close((carry, jnp.stack(ys)), rg.unroll(cell, params, xs, backend="scan"))


@pytest.mark.parametrize("make", [rg.LSTM, rg.GRU])
@pytest.mark.parametrize("bias_vectors", [1, 2])
@pytest.mark.parametrize(("batch", "in_kernels"), [((), True), ((2, 3), True), ((13,), False)])
def test_a_step_of_few_rows_and_many_weights_runs_in_kernels(
    make, bias_vectors, batch, in_kernels, monkeypatch
):
    monkeypatch.setattr(target, "cores", lambda: 2)
    cell = make(450, bias_vectors=bias_vectors)
    params = jax.tree.map(lambda x: jnp.float32(0.2 * x), parameters(cell, INPUTS))
    xs = array(8, 4, *batch, INPUTS).astype(jnp.float32)
    step, ys = rg.stepper(cell, params, batch), []
    assert ("_forward" in step._compiled.as_text()) == in_kernels
    carry = step.initial()
    for x in xs:
        carry, y = step(carry, x)
        ys.append(y)
    wide = jax.tree.map(jnp.float64, (params, xs))
    expected = rg.unroll(cell.clone(param_dtype=jnp.float64), *wide, backend="scan")
    assert_close((carry, jnp.stack(ys)), expected, 1e-5)


def test_a_step_is_waited_for_as_long_as_patience_lasts():
    cell = rg.LSTM(512)
    step = rg.stepper(cell, cell.init_params(jax.random.key(0), 512), 256)
    carry, x = step.initial(), jnp.ones((256, 512), jnp.float32)
    step._patience = 60.0
    carry, y = step(carry, x)
    assert y.is_ready()
    step._patience = 1e-9
    ready = []
    for _ in range(5):
        carry, y = step(carry, x)
        ready.append(y.is_ready())
    assert not all(ready)


class Silent(rg.LSTM):
    """Emits nothing: its carry is what is wanted."""

    def emit(self, params, carry, z):
        return ()


def test_a_step_that_emits_nothing():
    cell = Silent(FEATURES, param_dtype=jnp.float64)
    params, xs = parameters(cell, INPUTS), array(8, 2, INPUTS)
    step = rg.stepper(cell, params, ())
    carry, y = step(step.initial(), xs[0])
    assert y == ()
    assert_close(carry, rg.unroll(cell, params, xs[:1])[0])


class Leak(rg.Cell):
    """Without parameters."""

    features: int = 3

    def init_params(self, key, in_features):
        return {}

    def initial(self, batch_shape):
        return jnp.zeros((*batch_shape, self.features), jnp.float32)

    def project(self, params, x):
        return x

    def step(self, params, carry, z_t):
        return 0.5 * carry + z_t

    def emit(self, params, carry, z):
        return carry


def test_a_stepper_takes_inputs_of_the_widest_parameters(x32):
    """Whatever they are called; float32 where there are none."""
    cell = build("lstm", dtype=None, param_dtype=jnp.float32)
    params = parameters(cell, INPUTS)
    narrow = {**params, "bias": {s: b.astype(jnp.bfloat16) for s, b in params["bias"].items()}}
    for made, made_params, width in ((cell, narrow, INPUTS), (Leak(), {}, 3)):
        step, x = rg.stepper(made, made_params, 2, in_features=width), jnp.ones((2, width))
        carry, y = step(step.initial(), x)
        expected = rg.unroll(made, made_params, x[None])
        assert y.dtype == expected[1].dtype == jnp.float32
        assert_close((carry, y), (expected[0], expected[1][0]), 1e-6)


def test_a_stepper_uses_up_its_carry():
    cell = build("lstm")
    step = rg.stepper(cell, parameters(cell, INPUTS))
    first = step.initial()
    step(first, jnp.ones(INPUTS))
    assert first.c.is_deleted()
    with pytest.raises(ValueError, match="used up by the call that took it before"):
        step(first, jnp.ones(INPUTS))


def test_numpys_float64_is_no_reason(x32):
    """Without x64 JAX takes it for float32."""
    cell = rg.LSTM(FEATURES)
    step = rg.stepper(cell, cell.init_params(jax.random.key(0), INPUTS))
    carry, x = step.initial(), np.ones(INPUTS)
    step(carry, x)
    with pytest.raises(ValueError, match="used up by the call that took it before"):
        step(carry, x)


def test_float64_beside_a_float32_carry_is_one_sentence():
    """In JAX's own promotion, which a user has."""
    cell = rg.LSTM(FEATURES)
    params = jax.tree.map(
        lambda leaf: leaf.astype(jnp.float64), cell.init_params(jax.random.key(0), INPUTS)
    )
    message = "float64 makes the carry of LSTM float64, and it starts as float32"
    with jax.numpy_dtype_promotion("standard"):
        with pytest.raises(ValueError, match=message):
            rg.stepper(cell, params)
        with pytest.raises(ValueError, match=message):
            rg.unroll(cell, params, jnp.ones((2, 3, INPUTS), jnp.float32))


class Independent(rg.SlotCell):
    """Each unit reads itself alone: a vector of recurrent weights."""

    @property
    def slots(self):
        return {"h": self.features}

    def init_params(self, key, in_features):
        params = super().init_params(key, in_features)
        return {**params, "recurrent_kernel": {"h": jnp.ones(FEATURES)}}

    def initial(self, batch_shape):
        return rg.HiddenState(self.zeros(batch_shape))

    def update(self, carry, inputs, product):
        return rg.HiddenState(jnp.tanh(product("h", carry.h)))


def test_a_stepper_of_vectors_is_the_scan():
    cell = Independent(FEATURES, param_dtype=jnp.float64)
    params, xs = parameters(cell, INPUTS), array(3, 5, INPUTS)
    step = rg.stepper(cell, params)
    carry = step.initial()
    for x, y in zip(xs, rg.unroll(cell, params, xs)[1], strict=True):
        carry, out = step(carry, x)
        assert_close(out, y)


def test_a_step_inside_a_program_is_jaxs_error():
    cell = build("lstm")
    step = rg.stepper(cell, parameters(cell, INPUTS))
    with pytest.raises(TypeError, match="Cannot apply JAX transformations"):
        jax.jit(step)(step.initial(), jnp.ones(INPUTS))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"x": np.ones(INPUTS)}, r"x must be float64\[2, 3\], got an array float64 \[3\]"),
        ({"x": np.ones((2, INPUTS), int)}, r"x must be float64\[2, 3\], got an array int64"),
        ({"x": [1.0]}, "x must be .*, got a list of 1"),
        ({"carry": None}, r"carry must be LSTMState\(c, h\), got None"),
        ({"carry": rg.LSTM(FEATURES).initial((2,))}, "carry must hold float64, got float32"),
        ({"carry": (ZEROS, ZEROS)}, r"carry must be LSTMState\(c, h\), got a tuple of 2"),
        ({"carry": [ZEROS, ZEROS]}, r"carry must be LSTMState\(c, h\), got a list of 2"),
        ({"carry": {"c": ZEROS, "h": ZEROS}}, r"LSTMState\(c, h\), got a mapping of c, h"),
        ({"carry": rg.LSTM(9).initial((2,))}, r"carry has shapes .*9.* need .*\(2, 4\)"),
    ],
)
def test_what_does_not_fit_is_one_sentence(wrong, sentence):
    cell = build("lstm")
    step = rg.stepper(cell, parameters(cell, INPUTS), batch=np.int64(2))
    with pytest.raises(ValueError, match=sentence):
        step(**({"carry": step.initial(), "x": np.ones((2, INPUTS))} | wrong))


class Paired(rg.Cell):
    """A carry with a NamedTuple in it."""

    def init_params(self, key, in_features):
        return {}

    def initial(self, batch_shape):
        h = jnp.zeros((*batch_shape, 2), jnp.float32)
        return rg.HiddenState(h), h

    def step(self, params, carry, z_t):
        return rg.HiddenState(carry[1]), carry[0].h + z_t

    def emit(self, params, carry, z):
        return carry[1]


def test_a_structure_that_differs_further_down_is_shown():
    step = rg.stepper(Paired(), {}, in_features=2)
    (h,), other = step.initial()
    with pytest.raises(ValueError, match=r"carry must be PyTreeDef.*HiddenState.*, got PyTreeDef"):
        step(((h,), other), jnp.ones(2, jnp.float32))


@pytest.mark.parametrize("shared", ["fields", "x"])
def test_what_shares_its_memory_is_used_up_by_no_call(shared):
    """And the sentence's way out is one."""
    cell = build("lstm")
    params = parameters(cell, FEATURES)
    step = rg.stepper(cell, params)
    c, h = array(0, FEATURES), array(1, FEATURES)
    carry, x = (rg.LSTMState(h, h), c) if shared == "fields" else (rg.LSTMState(c, h), h)
    with pytest.raises(ValueError, match="hand in a copy of one"):
        step(carry, x)
    expected = rg.unroll(cell, params, x[None], carry)
    new, y = step(carry._replace(h=jnp.copy(h)), x)
    assert_close((new, y[None]), expected)


@pytest.mark.parametrize(
    ("make", "in_kernels"), [(lambda: rg.LSTM(450), True), (lambda: build("gato1"), False)]
)
def test_parameters_stay_as_they_were(make, in_kernels, monkeypatch):
    monkeypatch.setattr(target, "cores", lambda: 2)
    cell = make()
    own = jax.tree.map(lambda x: np.array(0.2 * x, np.float32), parameters(cell, INPUTS))
    step, x = rg.stepper(cell, own), jnp.ones(INPUTS, jnp.float32)
    assert ("_forward" in step._compiled.as_text()) == in_kernels
    before = step(step.initial(), x)
    for leaf in jax.tree.leaves(own):
        leaf[...] = 0.0
    assert_identical(step(step.initial(), x), before)


@pytest.mark.parametrize(
    "name",
    [
        *("gru_d", "rmc", "lru", "gato2", "ur_mingru"),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("dnc", "rma")),
    ],
)
def test_the_parameters_of_every_kind_of_cell_tell_their_width(name):
    cell = rg.CELLS[name](FEATURES)
    # The order of the names is another one after any `jax.tree.map`.
    params = jax.tree.map(jnp.array, cell.init_params(jax.random.key(0), 9))
    step = rg.stepper(cell, params)
    assert step.in_features == 9
    x = array(8, 9).astype(jnp.float32)
    z = cell.project(params, x)
    new = cell.step(params, cell.initial(()), z)
    assert_close(step(step.initial(), x), (new, cell.emit(params, new, z)), 1e-5)


def test_a_width_that_flax_cells_tell(x32):
    cell = rg.FlaxCell(nn.OptimizedLSTMCell(FEATURES))
    assert rg.stepper(cell, cell.init_params(jax.random.key(0), 5)).in_features == 5


def test_kernels_take_parameters_without_the_second_bias(monkeypatch):
    monkeypatch.setattr(target, "cores", lambda: 2)
    params = rg.LSTM(450).init_params(jax.random.key(0), INPUTS)
    x = array(8, INPUTS).astype(jnp.float32)
    one, two = (rg.stepper(rg.LSTM(450, bias_vectors=n), params) for n in (1, 2))
    assert "_forward" in two._compiled.as_text()
    assert_close(two(two.initial(), x), one(one.initial(), x), 1e-6)


class Bare(rg.Cell):
    """A cell whose parameters tell no width."""

    def init_params(self, key, in_features):
        return {"w": jnp.ones(3)}

    def initial(self, batch_shape):
        return jnp.zeros((*batch_shape, 1))

    def step(self, params, carry, z_t):
        return carry + z_t @ params["w"][:, None]


def test_a_width_that_nothing_tells():
    with pytest.raises(ValueError, match="give in_features"):
        rg.stepper(Bare(), {"w": jnp.ones(3)})
    carry, y = rg.stepper(Bare(), {"w": jnp.ones(3)}, in_features=3)(jnp.zeros(1), jnp.ones(3))
    assert y == 3 and carry == 3
