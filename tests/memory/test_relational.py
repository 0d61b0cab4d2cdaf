"""The Relational Memory Core: its step against NumPy, gradients, its start, counts, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.test_util import check_grads

import recurrent_gates as rg
from recurrent_gates.testing import check_cell
from tests.memory import reference
from tests.reference import sigmoid
from tests.support import array, assert_close, parameters, quick_jit, state, to_numpy

pytestmark = pytest.mark.usefixtures("x64")

FEATURES, INPUTS = 24, 5
GATES = tuple(rg.GATES)


def build(gate="standard", **settings):
    name = "rmc" if gate == "standard" else f"{gate}_rmc"
    return rg.CELLS[name](FEATURES, **dict(param_dtype=jnp.float64) | settings)


def paper(gate, cell):
    how = {name: getattr(cell, name) for name in ("heads", "blocks", "mlp_layers", "gate_style")}
    how["key_size"] = cell.key_size or cell.slot_size // cell.heads
    return reference.by_example(functools.partial(reference.rmc, name=gate, **how))


CASES = [(name, {}) for name in GATES] + [
    ("standard", dict(gate_style=None)),
    ("standard", dict(gate_style="memory")),
    ("r", dict(gate_style="memory", bias_vectors=2)),
    ("ur", dict(memory_slots=4, heads=3, blocks=3, key_size=5, mlp_layers=3, bias_vectors=2)),
    ("u", dict(memory_slots=1, heads=1, blocks=2, mlp_layers=1)),
    ("ur", dict(memory_slots=6, heads=2)),  # more rows than are summed one by one
]


@pytest.mark.parametrize(("gate", "settings"), CASES)
def test_one_step_is_the_papers(gate, settings):
    cell = build(gate, **settings)
    params, carry, x = parameters(cell, INPUTS), state(cell, (3,)), array(8, 3, INPUTS)
    new, y = quick_jit(lambda *args: cell.apply({"params": args[0]}, *args[1:]))(params, carry, x)
    expected = paper(gate, cell)(to_numpy(params), to_numpy(tuple(carry)), np.asarray(x))
    assert_close(tuple(new), expected)
    assert_close(y, expected[0].reshape(3, FEATURES))


@pytest.mark.parametrize(
    "settings", [{}, dict(blocks=2, memory_slots=3, heads=4), dict(memory_slots=6, heads=2)]
)
def test_gradients_of_a_sequence(settings):
    cell = build("ur", **settings)
    params, xs = parameters(cell, INPUTS), array(8, 3, 2, INPUTS)
    carry = state(cell, (2,))
    run = jax.jit(lambda *args: rg.unroll(cell, *args))
    check_grads(run, (params, xs, carry), order=1, modes=("rev",), eps=1e-6, atol=1e-6, rtol=1e-6)


def test_reported_gates_rebuild_the_memory():
    """Eq. 7: i tanh(attended) + f memory is linear in f and i."""
    cell = build("ur")
    params, carry, x = parameters(cell, INPUTS), state(cell, (2,)), array(8, 2, INPUTS)
    z = cell.project(params, x)
    gates, new = cell.gates(params, carry, z), cell.step(params, carry, z)
    candidate = (new.memory - gates["f"] * carry.memory) / gates["i"]
    bare = build(gate_style=None)
    own = {name: value for name, value in params.items() if name != "gates"}
    attended = bare.step(own, carry, bare.project(own, x)).memory
    assert_close(candidate, jnp.tanh(attended), 1e-9)


@pytest.mark.parametrize(("slots", "width"), [(2, 12), (8, 3)])
def test_the_memory_starts_as_the_identity(slots, width):
    cell = rg.RMC(slots * width, memory_slots=slots, heads=1)
    expected = np.zeros((slots, width))
    np.fill_diagonal(expected, 1.0)
    (memory,) = cell.initial((2,))
    np.testing.assert_array_equal(memory, np.stack([expected, expected]))


def count(cell):
    shapes = jax.eval_shape(lambda key: cell.init_params(key, INPUTS), jax.random.key(0))
    return rg.count_parameters(shapes)


@pytest.mark.parametrize("bias_vectors", [1, 2])
def test_gates_keep_the_count(bias_vectors):
    """UR-gates: the refine gate takes the input gate's map; b of one slot is all that is added."""
    plain = count(build(bias_vectors=bias_vectors))
    width = FEATURES // 2
    assert count(build("r", bias_vectors=bias_vectors)) == plain
    assert count(build("or", bias_vectors=bias_vectors)) == plain
    for name in ("c", "u", "ur", "cr"):
        assert count(build(name, bias_vectors=bias_vectors)) == plain + width
    gates = 2 * (2 * width * width + bias_vectors * width)
    norms, qkv = 2 * width * 2 + 2 * 3 * width, width * 3 * width + 3 * width
    rest = (INPUTS + 1) * width + 2 * (width + 1) * width + norms + qkv
    assert plain == gates + rest


def test_gates_start_as_the_table_says():
    forget = {
        name: build(name).init_params(jax.random.key(0), INPUTS) for name in ("standard", "ur")
    }
    assert set(np.unique(forget["standard"]["gates"]["bias"]["f"])) == {1.0}
    assert not np.any(forget["ur"]["gates"]["bias"]["f"])
    u = sigmoid(np.asarray(forget["ur"]["gates"]["gate"]["b"]))
    width = FEATURES // 2
    assert u.shape == (width,) and u.min() >= 1 / width - 1e-12 and u.max() <= 1 - 1 / width + 1e-12


def test_one_input_row_is_enough():
    """What the input's row becomes in the last round is read by nobody: its queries are unused."""
    cell = build(memory_slots=2, heads=2)
    params, x = parameters(cell, INPUTS), array(8, 1, INPUTS)
    z = cell.project(params, x)
    step = jax.jit(lambda z: cell.step(params, cell.initial((1,)), z))
    queries = np.zeros(z["qkv"].shape, bool).reshape(1, 2, -1)
    queries[..., :6] = True
    changed = {**z, "qkv": jnp.where(queries.reshape(1, -1), 100.0, z["qkv"])}
    np.testing.assert_array_equal(step(z).memory, step(changed).memory)


@pytest.mark.usefixtures("x32")
@pytest.mark.long
def test_the_core_conforms():
    check_cell(rg.RMC(12, gate=rg.GATES["ur"], blocks=2))


def test_bfloat16_computes_and_float32_carries(x32):
    exact, coarse = (rg.CELLS["ur_rmc"](FEATURES, dtype=dtype) for dtype in (None, jnp.bfloat16))
    params = exact.init_params(jax.random.key(0), INPUTS)
    xs = jax.random.normal(jax.random.key(1), (4, 3, INPUTS))
    (memory,), ys = rg.unroll(coarse, params, xs)
    assert memory.dtype == jnp.float32 and ys.dtype == jnp.bfloat16
    assert_close(memory, rg.unroll(exact, params, xs)[0].memory, 0.05)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: rg.RMC(24, heads=5), "5 heads do not divide 12 units"),
        (lambda: rg.RMC(24, memory_slots=5), "5 slots do not divide 24 features"),
        (lambda: rg.RMC(24, blocks=0), "blocks"),
        (lambda: rg.RMC(24, mlp_layers=0), "mlp_layers"),
        (lambda: rg.RMC(24, key_size=2.5), "key_size"),
        (lambda: rg.RMC(24, gate_style="slot"), "'memory' or None, got 'slot'"),
        (lambda: rg.RMC(24, gate_style=None, gate=rg.GATES["ur"]), "gate has no .*=None leaves"),
        (lambda: rg.RMC(24, gate_style=None, bias_vectors=2), "bias_vectors has no .*=None leaves"),
        (
            lambda: rg.RMC(24, gate_style=None, recurrent_kernel_init=nn.initializers.zeros),
            "recurrent_kernel_init has no .*=None leaves",
        ),
        (lambda: rg.RMC(24, gate_style="memory", gate=rg.GATES["ur"]), "one gate for a slot"),
        (lambda: rg.RMC(24, gate_style="memory", gate=rg.GATES["om"]), "one gate for a slot"),
        (lambda: rg.CELLS["ur_rmc"](4), "at least 3"),
        (lambda: rg.CELLS["om_rmc"](24, downsize=5), "C = 5"),
        (lambda: rg.RMC(24, gate="ur"), "RMC gate"),
    ],
)
def test_wrong_settings_are_one_sentence(make, words):
    with pytest.raises(ValueError, match=words) as error:
        make()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("x", [jnp.zeros((2, 4)), jnp.zeros((2, INPUTS), jnp.int32)])
def test_wrong_inputs_are_one_sentence(x):
    cell = build()
    with pytest.raises(ValueError, match="Inputs") as error:
        cell.project(parameters(cell, INPUTS), x)
    assert "\n" not in str(error.value)
