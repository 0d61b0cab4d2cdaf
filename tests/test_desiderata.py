"""GATO's five desiderata: exact values for toy cells, theory's verdicts for the library's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import recurrent_gates as rg
from recurrent_gates import desiderata as criteria
from recurrent_gates.desiderata import EXPECTED, family, identity, reading
from tests.support import quick_jit, thinned


@pytest.fixture(autouse=True, scope="module")
def quick():
    """The measurement compiled in a tenth of the time; most programs here run once."""
    whole = criteria._values
    criteria._values = quick_jit(whole.__wrapped__, static_argnums=(0, 1, 2, 3))
    yield
    criteria._values = whole


class Own(rg.Cell):
    """Three lines of the user's: h_t = decay * h_tm1 + tanh(x_t W)."""

    decay: float = 0.9
    features: int = 4

    def init_params(self, key, in_features):
        return {"W": jax.random.normal(key, (in_features, self.features))}

    def initial(self, batch_shape):
        return rg.HiddenState(jnp.zeros((*batch_shape, self.features)))

    def step(self, params, carry, z_t):
        return rg.HiddenState(self.decay * carry.h + jnp.tanh(z_t @ params["W"]))


def added_softplus(params, carry_tm1, z):
    return {"s": jax.nn.softplus(carry_tm1.r + z @ params["W"])}


class Summing(Own):
    """A field that only accumulates, read through a function of the user's."""

    reads: str = "sin"

    def initial(self, batch_shape):
        zeros = jnp.zeros((*batch_shape, self.features))
        return rg.GATOState(zeros, zeros)

    @property
    def sums(self):
        return rg.Sums(("s",), increment=added_softplus, recur=self.recur)

    @nn.nowrap
    def recur(self, params, carry, z_t):
        return carry._replace(r=self.decay * carry.r + jnp.tanh(z_t @ params["W"]))

    def step(self, params, carry, z_t):
        return rg.Cell.step(self, params, carry, z_t)

    def emit(self, params, carry, z):
        read = {"sin": jnp.sin, "square": jnp.square, "sigmoid": jax.nn.sigmoid}[self.reads]
        return jnp.concatenate([read(carry.s), carry.r], axis=-1)


class Hidden(Own):
    """(c, h) with h = tanh(c): what remembers is not what emit reads."""

    def initial(self, batch_shape):
        zeros = jnp.zeros((*batch_shape, self.features))
        return rg.LSTMState(zeros, zeros)

    def step(self, params, carry, z_t):
        c = self.decay * carry.c + jnp.tanh(z_t @ params["W"])
        return rg.LSTMState(c, jnp.tanh(c))


def measure(cell, **how):
    return criteria.measure(cell, 3, draws=2, batch=3, **how)


def met(results):
    return tuple(result.met for result in results)


def test_a_leaky_cell_by_hand():
    results = measure(Own())
    values = [result.value for result in results]
    np.testing.assert_allclose(values[0], 1 - 0.9**199, rtol=1e-6)
    np.testing.assert_allclose(values[1:4], [10, 1, 1], rtol=1e-6)
    # Inputs come again, and of the start 0.9^100 = 2.7e-5 is left after the first 100 steps.
    np.testing.assert_allclose(values[4], 1, rtol=1e-4)
    assert met(results) == (False, False, True, True, True)
    assert results[0].per_draw.shape == (2, 2)


def test_a_summing_cell_by_hand():
    """h_t = h_tm1 + tanh(x_t W) with a period of 100 steps: after n periods n * drift + start."""
    results = measure(Own(decay=1.0))
    assert results[0].value == 0
    assert met(results) == (True, False, True, True, False)
    assert 50 < results[4].value < 200  # 100 times the drift of a period, less the start


def test_growth_is_the_ratio_of_two_times():
    """A cell that only scales: 1.0001^9900."""
    results = measure(Own(decay=1.0001), recurrent=("h",))
    assert results[4].value > 1.0001**9000
    scaling = Scaling()
    np.testing.assert_allclose(measure(scaling)[4].value, 1.0001**9900, rtol=2e-3)  # float32


class Scaling(Own):
    decay: float = 1.0001

    def step(self, params, carry, z_t):
        del params, z_t
        return rg.HiddenState(self.decay * carry.h)


@pytest.mark.parametrize(
    ("reads", "verdicts"),
    [
        ("sin", (True, True, True, True, True)),
        ("square", (True, False, True, False, True)),
        ("sigmoid", (True, True, False, True, True)),
    ],
)
@pytest.mark.long
def test_an_accumulated_field_is_read_through_emit(reads, verdicts):
    cell = Summing(reads=reads, decay=0.5)
    how = reading(cell)
    assert (how.remembered, how.gamma, how.recurrent) == ("s", None, ("r",))
    results = measure(cell)
    assert met(results) == verdicts
    assert results[0].value == 0
    if reads == "square":  # (10 x)^2 / x^2, and its derivative; r in emit is left out
        np.testing.assert_allclose([results[1].value, results[3].value], [100, 10], rtol=1e-5)


@pytest.mark.long
def test_a_field_that_emit_does_not_read_is_read_one_step_on():
    cell = Hidden()
    how = reading(cell)
    assert (how.remembered, how.gamma, how.recurrent) == ("c", None, ("c", "h"))
    assert met(measure(cell)) == (False, True, False, True, True)
    # The same with everything given.
    given = measure(cell, remembered="c", gamma=jnp.tanh, recurrent=("h",))
    assert met(given) == (False, True, False, True, True)
    assert measure(cell, remembered="c", gamma=jnp.cos)[2].met


def test_states_have_their_size():
    """sup and mean of |gamma'| by hand: gamma = x^2 at root mean square 1 ... 10^4."""
    results = measure(Own(), gamma=jnp.square)
    # Of N(0, 1) directions brought to root mean square 1: mean |2x| is about 2 sqrt(2/pi).
    np.testing.assert_allclose(results[2].value, 2 * np.sqrt(2 / np.pi), rtol=0.15)
    np.testing.assert_allclose([results[1].value, results[3].value], [100, 10], rtol=1e-5)


@pytest.mark.long
def test_a_foreign_cell():
    cell = rg.FlaxCell(nn.SimpleCell(4))
    how = reading(cell)
    assert (how.remembered, how.recurrent) == (0, (0,))
    assert met(measure(cell))[1:] == (True, False, True, True)  # y is tanh one step on


def test_what_is_not_a_number_is_not_met():
    results = measure(Own(), gamma=jnp.sqrt)  # of negative numbers
    assert met(results)[1:4] == (False, False, False)
    assert results[1].value == np.inf
    assert results[2].value == -np.inf


def test_readings_of_the_librarys_cells():
    gato, lstm, gru = (rg.CELLS[name](4) for name in ("gato", "lstm", "gru"))
    assert (reading(gato).remembered, reading(gato).gamma) == ("s", jnp.cos)
    assert reading(gato).recurrent == ("r",)
    assert (reading(lstm).remembered, reading(lstm).gamma) == ("c", jnp.tanh)
    assert reading(lstm, "c").gamma is jnp.tanh
    assert reading(lstm, "h").gamma is None
    assert reading(lstm).recurrent == ("h",)
    assert (reading(gru).remembered, reading(gru).gamma) == ("h", identity)
    assert reading(gru, recurrent=()).text.endswith("nothing feeds back")
    with pytest.raises(ValueError, match="no floating field 'c'; it has h"):
        reading(gru, "c")


def test_every_cell_has_a_family():
    families = {name: family(make(32)) for name, make in rg.CELLS.items()}
    others = {
        "gru_d",
        "lru",
        "ur_gato",
        "or_gato",
        "slstm",
    }  # of which the papers' theory says nothing
    ends = ("rmc", "dnc", "rma", "mingru", "minlstm", "rg_lru")
    unasked = {name for name in rg.CELLS if name in others or name.endswith(ends)}
    assert {name for name, row in families.items() if row is None} == unasked
    assert set(families.values()) - {None} <= set(EXPECTED)
    assert families["ur_lstm"] == families["um_lstm"] == "lstm"
    assert families["on_lstm"] == families["or_lstm"] == "lstm_ordered"
    assert families["or_gru"] == families["o_janet"] == "gru_ordered"
    assert families["om_gru"] == "gru_master_ordered"
    assert families["um_gru"] == families["um_janet"] == "gru_master"
    assert families["cm_gru"] == families["cm_janet"] == "gru_master_chrono"
    assert family(rg.GATO(4, s_update="zero")) == "gato_ablated"
    # Where an option changes what theory says, nothing is claimed.
    assert family(rg.GATO(4, gamma=jnp.tanh)) is None
    assert family(rg.LSTM(4, forget_gate=False)) is None
    assert family(rg.Elman(4, activation=jax.nn.relu)) is None
    assert family(Own()) is None


@pytest.mark.parametrize(
    "name",
    thinned(
        [("gato2",), ("lstm",), ("gru",), ("ur_lstm",), ("rnn",)],
        lambda name: name in ("gato2", "lstm", "gru"),
        pytest.mark.long,
    ),
)
def test_cells_are_as_theory_says(name):
    cell = rg.CELLS[name](16)
    expected = EXPECTED[family(cell)]
    for result, verdict in zip(criteria.measure(cell, 3, draws=2), expected, strict=True):
        assert result.met == verdict.met, f"{name}: {result}; {verdict.because}"


@pytest.mark.parametrize(("name", "last"), [("cm_janet", 50.0), ("um_gru", 50.0), ("ur_gru", 1.0)])
def test_untied_gates_that_are_both_open_sum_up(name, last):
    """Why cm_gru and cm_janet miss criterion 5: with all gates at 1, h_t = h_tm1 + 1."""
    cell = rg.CELLS[name](4)
    params = jax.tree.map(jnp.zeros_like, cell.init_params(jax.random.key(0), 3))
    params["bias"] = {slot: b + 40 for slot, b in params["bias"].items()}
    if name == "ur_gru":
        params["bias"]["f"] -= 40  # f is 1 - i: half open
    carry, _ = rg.unroll(cell, params, jnp.zeros((50, 3)))
    np.testing.assert_allclose(carry.h, last, rtol=1e-6)


def test_the_ablation_of_gato_loses_its_first_criterion():
    cell = rg.CELLS["gato1"](8, s_update="replace")
    assert met(measure(cell)) == (False, True, True, True, True)


def test_scaling_leaves_integers_alone():
    tree = {"a": jnp.ones(2), "n": jnp.array(3)}
    assert criteria.scaled(tree, 3.0) == {"a": pytest.approx(3.0), "n": 3}
