"""torch's state dicts: torch's equations from its own layout, round trips, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import recurrent_gates as rg
from tests import reference
from tests.support import array, assert_close, assert_identical, parameters

pytestmark = pytest.mark.usefixtures("x64")

STEPS, BATCH, INPUTS, FEATURES = 5, 2, 3, 4
BLOCKS = {"lstm": 4, "gru": 3}


def state_dict(kind, layers=1, directions=1, seed=0):
    draw, named = np.random.default_rng(seed), {}
    rows = BLOCKS[kind] * FEATURES
    for layer in range(layers):
        width = INPUTS if layer == 0 else directions * FEATURES
        for suffix in ("", "_reverse")[:directions]:
            shapes = {
                "weight_ih": (rows, width),
                "weight_hh": (rows, FEATURES),
                "bias_ih": (rows,),
                "bias_hh": (rows,),
            }
            named |= {
                f"{name}_l{layer}{suffix}": draw.normal(size=shape)
                for name, shape in shapes.items()
            }
    return named


def torch_step(kind, weights, carry, x):
    """torch.nn.LSTM's and torch.nn.GRU's documentation, on the rows of their own matrices."""
    gates_x = x @ weights["weight_ih_l0"].T + weights["bias_ih_l0"]
    gates_h = carry[-1] @ weights["weight_hh_l0"].T + weights["bias_hh_l0"]
    if kind == "lstm":
        i, f, g, o = np.split(gates_x + gates_h, 4, axis=-1)
        c = reference.sigmoid(f) * carry[0] + reference.sigmoid(i) * np.tanh(g)
        return c, reference.sigmoid(o) * np.tanh(c)
    (r, z, n), (hr, hz, hn) = np.split(gates_x, 3, axis=-1), np.split(gates_h, 3, axis=-1)
    r, z = reference.sigmoid(r + hr), reference.sigmoid(z + hz)
    n = np.tanh(n + r * hn)
    return ((1 - z) * n + z * carry[-1],)


@pytest.mark.parametrize("kind", BLOCKS)
def test_loaded_weights_compute_torchs_equations(kind):
    weights, xs = state_dict(kind), array(8, STEPS, BATCH, INPUTS)
    cell = rg.CELLS[kind](FEATURES, bias_vectors=2, param_dtype=jnp.float64)
    ((layer),) = rg.from_torch(weights)
    carry, ys = rg.unroll(cell, layer["forward"], xs)
    start = (np.zeros((BATCH, FEATURES)),) * len(carry)
    _, expected, expected_ys = reference.unroll(
        lambda carry, x: torch_step(kind, weights, carry, x),
        start,
        np.asarray(xs),
        emit=lambda carry: carry[-1],
    )
    assert_close((tuple(carry), ys), (expected, expected_ys))


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize(("layers", "directions"), [(1, 1), (2, 1), (1, 2), (3, 2)])
def test_round_trips(kind, layers, directions):
    weights = state_dict(kind, layers, directions)
    loaded = rg.from_torch(weights)
    assert [sorted(layer) for layer in loaded] == [
        ["backward", "forward"][2 - directions :]
    ] * layers
    written = rg.to_torch(loaded)
    assert list(written) and set(written) == set(weights)
    for name, value in weights.items():
        assert isinstance(written[name], np.ndarray) and written[name].dtype == value.dtype
        np.testing.assert_array_equal(written[name], value)
    assert_identical(rg.from_torch(written), loaded)


@pytest.mark.parametrize("kind", BLOCKS)
def test_one_bias_vector_is_written_beside_zeros(kind):
    """The written weights compute the same; a GRU's candidate keeps its own recurrent bias."""
    cell, xs = rg.CELLS[kind](FEATURES, param_dtype=jnp.float64), array(8, STEPS, BATCH, INPUTS)
    params = parameters(cell, INPUTS)
    (layer,) = rg.from_torch(rg.to_torch([{"forward": params}]))
    twice = rg.CELLS[kind](FEATURES, bias_vectors=2, param_dtype=jnp.float64)
    assert_close(rg.unroll(twice, layer["forward"], xs), rg.unroll(cell, params, xs))


def test_loaded_trees_are_the_cells_own():
    for kind in BLOCKS:
        (layer,) = rg.from_torch(state_dict(kind))
        own = rg.CELLS[kind](FEATURES, bias_vectors=2).init_params(jax.random.key(0), INPUTS)
        assert jax.tree.map(jnp.shape, layer["forward"]) == jax.tree.map(jnp.shape, own)


def without(weights, name):
    return {key: value for key, value in weights.items() if key != name}


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({}, "weight_hh_l0"),
        (without(state_dict("lstm"), "bias_hh_l0"), "bias_hh_l0"),
        (without(state_dict("lstm", 2), "weight_ih_l1"), "weight_ih_l1"),
        (without(state_dict("gru", 1, 2), "bias_ih_l0_reverse"), "bias_ih_l0_reverse"),
        (state_dict("lstm") | {"weight_hr_l0": np.zeros((2, 4))}, "weight_hr_l0"),
        (state_dict("lstm") | {"weight_hh_l0": np.zeros((20, 4))}, "weight_hh_l0"),
        (state_dict("lstm") | {"bias_ih_l0": np.zeros(12)}, "bias_ih_l0"),
    ],
)
def test_what_is_no_torch_lstm_or_gru_is_one_sentence(weights, words):
    with pytest.raises(ValueError, match=words) as error:
        rg.from_torch(weights)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["ur_lstm", "om_lstm", "rnn", "janet"])
def test_what_torch_does_not_have_is_not_written(name):
    params = rg.CELLS[name](FEATURES).init_params(jax.random.key(0), INPUTS)
    with pytest.raises(ValueError, match="torch") as error:
        rg.to_torch([{"forward": params}])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("prefix", ["lstm.", "encoder.rnn."])
def test_a_prefix_is_left_out(kind, prefix):
    weights = state_dict(kind, 2, 2)
    prefixed = {prefix + name: value for name, value in weights.items()}
    assert_identical(rg.from_torch(prefixed), rg.from_torch(weights))


@pytest.mark.parametrize("kind", BLOCKS)
def test_weights_without_biases_compute_torchs_equations(kind):
    """torch's bias=False is its equations with zeros, which is what is loaded."""
    weights = {k: v for k, v in state_dict(kind).items() if not k.startswith("bias")}
    rows = BLOCKS[kind] * FEATURES
    zeros = {"bias_ih_l0": np.zeros(rows), "bias_hh_l0": np.zeros(rows)}
    assert_identical(rg.from_torch(weights), rg.from_torch(weights | zeros))
    ((layer),) = rg.from_torch(weights)
    assert all(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(layer))
    cell, xs = rg.CELLS[kind](FEATURES, bias_vectors=2), array(8, STEPS, BATCH, INPUTS)
    carry, _ = rg.unroll(cell.clone(param_dtype=jnp.float64), layer["forward"], xs)
    expected = (np.zeros((BATCH, FEATURES)),) * len(carry)
    for x in np.asarray(xs):
        expected = torch_step(kind, weights | zeros, expected, x)
    assert_close(tuple(carry), expected)
