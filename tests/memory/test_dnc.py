"""The DNC: its step against NumPy, gradients, what its weights and links are bounded by, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import recurrent_gates as rg
from recurrent_gates.memory.addressing import allocation_weights
from recurrent_gates.testing import check_cell
from tests.memory import reference
from tests.support import array, assert_close, parameters, quick_jit, to_numpy

pytestmark = pytest.mark.usefixtures("x64")

FEATURES, INPUTS = 8, 3
SMALL = dict(memory_slots=6, word_size=5, read_heads=2)
TWO = dict(memory_slots=5, word_size=4, read_heads=3, write_heads=2)


def build(gate="standard", **settings):
    name = "dnc" if gate == "standard" else f"{gate}_dnc"
    return rg.CELLS[name](FEATURES, **dict(param_dtype=jnp.float64) | SMALL | settings)


def carry_of(cell, batch, seed=0):
    """A random carry that a run could have: weights that sum to 1 at most, and so on."""
    draw = np.random.default_rng(seed)
    shapes = cell.initial((batch,))

    def weights(leaf):
        return draw.dirichlet(np.ones(leaf.shape[-1] + 1), leaf.shape[:-1])[..., :-1]

    link = weights(shapes.link) * (1 - np.eye(cell.memory_slots))
    link = link / np.maximum(link.sum(axis=-2, keepdims=True), 1)
    fields = dict(
        read_weights=weights(shapes.read_weights),
        write_weights=weights(shapes.write_weights),
        precedence=weights(shapes.precedence),
        link=link,
        usage=draw.uniform(size=shapes.usage.shape),
    )
    for name in ("c", "h", "reads", "memory"):
        fields[name] = draw.normal(size=getattr(shapes, name).shape)
    return type(shapes)(**{name: jnp.asarray(leaf) for name, leaf in fields.items()})


@pytest.mark.parametrize(
    ("gate", "settings"),
    [("standard", {}), ("standard", TWO), ("ur", dict(bias_vectors=2)), ("om", dict(clip=0.3))],
)
def test_one_step_is_the_papers(gate, settings):
    cell = build(gate, **settings)
    params, carry = parameters(cell, INPUTS, scale=1.0), carry_of(cell, 2)
    x = array(8, 2, INPUTS)
    step = functools.partial(reference.dnc, name=gate, shapes=cell.interface, clip=cell.clip)
    new, y = quick_jit(lambda *args: cell.apply({"params": args[0]}, *args[1:]))(params, carry, x)
    expected = reference.by_example(step)(to_numpy(params), to_numpy(tuple(carry)), np.asarray(x))
    assert_close(tuple(new), expected)
    assert_close(y, np.concatenate([expected[1], expected[2].reshape(2, -1)], axis=-1))


def test_a_sequence_from_the_start_is_the_papers():
    """From zeros, where slots are equal and the first of them is taken."""
    cell = build("ur")
    params, xs = parameters(cell, INPUTS), array(8, 5, 2, INPUTS)
    last, ys = quick_jit(lambda *args: rg.unroll(cell, *args))(params, xs)
    step = reference.by_example(
        functools.partial(reference.dnc, name="ur", shapes=cell.interface, clip=20.0)
    )
    carry, outputs = to_numpy(tuple(cell.initial((2,)))), []
    for x in np.asarray(xs):
        carry = step(to_numpy(params), carry, x)
        outputs.append(np.concatenate([carry[1], carry[2].reshape(2, -1)], axis=-1))
    assert_close(tuple(last), carry, 1e-8)
    assert_close(ys, np.stack(outputs), 1e-8)


@pytest.mark.parametrize("settings", [{}, TWO])
def test_gradients_of_a_sequence(settings):
    """Of usage the gradient to where was written is cut, so that field is held here."""
    cell = build("ur", **settings)
    params, carry, xs = parameters(cell, INPUTS), carry_of(cell, 2), array(8, 1, 2, INPUTS)
    fixed = carry.write_weights

    def run(params, carry, xs):
        return rg.unroll(cell, params, xs, carry._replace(write_weights=fixed))

    check_grads(
        jax.jit(run), (params, carry, xs), order=1, modes=("rev",), eps=1e-6, atol=1e-5, rtol=1e-5
    )


def test_usage_gives_no_gradient_to_where_was_written():
    cell = build()
    params, carry, x = parameters(cell, INPUTS), carry_of(cell, 2), array(8, 2, INPUTS)

    def total(write_weights):
        z = cell.project(params, x)
        new = cell.step(params, carry._replace(write_weights=write_weights), z)
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in new)

    assert not np.any(jax.grad(total)(carry.write_weights))


@pytest.mark.parametrize("settings", [{}, TWO])
def test_weights_and_links_stay_in_their_bounds(settings):
    cell = build(**settings)
    params, xs = parameters(cell, INPUTS, scale=3.0), array(8, 40, 8, INPUTS, scale=2.0)
    carries, _ = quick_jit(lambda *args: rg.unroll(cell, *args, return_carries="all"))(params, xs)
    slack = 1 + 1e-12
    for name in ("usage", "read_weights", "write_weights", "precedence", "link"):
        leaf = np.asarray(getattr(carries, name))
        assert leaf.min() >= -1e-12 and leaf.max() <= slack, name
        assert leaf.max() > 0.3, f"{name} hardly moved"
    for name in ("read_weights", "write_weights", "precedence"):
        assert np.asarray(getattr(carries, name)).sum(axis=-1).max() <= slack, name
    link = np.asarray(carries.link)
    assert not np.einsum("...ii->...i", link).any()
    assert link.sum(axis=-1).max() <= slack and link.sum(axis=-2).max() <= slack


def test_allocation_is_the_sorted_free_list():
    draw = np.random.default_rng(0)
    usage = np.concatenate([draw.uniform(size=(20, 9)), draw.integers(0, 3, (20, 9)) / 2])
    out = np.asarray(allocation_weights(jnp.asarray(usage)))
    assert_close(out, np.stack([reference.allocation(row) for row in usage]))
    assert out.sum(axis=-1).max() <= 1 + 1e-12


def test_the_controllers_gate_is_all_that_a_gate_changes():
    params = {name: parameters(build(name), INPUTS) for name in ("standard", "ur")}
    shapes = {name: jax.tree.map(jnp.shape, tree) for name, tree in params.items()}
    assert shapes["standard"]["interface"] == shapes["ur"]["interface"]
    counts = {name: rg.count_parameters(tree) for name, tree in params.items()}
    assert counts["ur"] == counts["standard"] + FEATURES
    assert set(shapes["ur"]["controller"]["kernel"]) == {"f", "r", "o", "u"}
    cell = build("ur")
    carry, x = carry_of(cell, 2), array(8, 2, INPUTS)
    z = cell.project(params["ur"], x)
    gates, new = cell.gates(params["ur"], carry, z), cell.step(params["ur"], carry, z)
    assert_close(gates["f"] * carry.c + gates["i"] * gates["u"], new.c)


@pytest.mark.usefixtures("x32")
@pytest.mark.long
def test_the_core_conforms():
    check_cell(rg.DNC(8, gate=rg.GATES["ur"], **SMALL), stops_gradients=True)


def test_bfloat16_computes_and_float32_carries(x32):
    exact, coarse = (
        rg.CELLS["ur_dnc"](FEATURES, dtype=dtype, **SMALL) for dtype in (None, jnp.bfloat16)
    )
    params = exact.init_params(jax.random.key(0), INPUTS)
    xs = jax.random.normal(jax.random.key(1), (4, 3, INPUTS))
    carry, ys = rg.unroll(coarse, params, xs)
    assert {leaf.dtype for leaf in carry} == {jnp.dtype(jnp.float32)}
    assert ys.dtype == jnp.bfloat16
    assert_close(carry.h, rg.unroll(exact, params, xs)[0].h, 0.05)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: rg.DNC(8, memory_slots=0), "memory_slots is a whole number, at least 1, got 0"),
        (lambda: rg.DNC(8, word_size=1.5), "word_size"),
        (lambda: rg.DNC(8, read_heads=0), "read_heads"),
        (lambda: rg.DNC(8, write_heads=-1), "write_heads"),
        (lambda: rg.DNC(8, clip=0.0), "above 0 or None, got 0.0"),
        (lambda: rg.DNC(8, clip="20"), "clip must be a finite number"),
        (lambda: rg.CELLS["ur_dnc"](2), "at least 3"),
    ],
)
def test_wrong_settings_are_one_sentence(make, words):
    with pytest.raises(ValueError, match=words) as error:
        make()
    assert "\n" not in str(error.value)


def test_wrong_inputs_are_one_sentence():
    cell = build()
    with pytest.raises(ValueError, match="kernel for 3 input features") as error:
        cell.project(parameters(cell, INPUTS), jnp.zeros((2, 4)))
    assert "\n" not in str(error.value)
