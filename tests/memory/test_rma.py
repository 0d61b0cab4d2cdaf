"""RMA's core: its step against NumPy, which gradients there are, how much memory it takes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import recurrent_gates as rg
from recurrent_gates.memory import rma
from recurrent_gates.testing import check_cell
from tests.memory import reference
from tests.support import array, assert_close, assert_identical, parameters, quick_jit, to_numpy

pytestmark = pytest.mark.usefixtures("x64")

FEATURES, INPUTS = 6, 3
SMALL = dict(memory_slots=5, word_size=4, read_heads=2, top_k=3)


def build(gate="standard", **settings):
    name = "rma" if gate == "standard" else f"{gate}_rma"
    return rg.CELLS[name](FEATURES, **dict(param_dtype=jnp.float64) | SMALL | settings)


def carry_of(cell, batch):
    """A random carry in the middle of a run; the examples write to different rows."""
    start = cell.initial((batch,))
    position = jnp.arange(batch, dtype=jnp.int32)[:, None] * 2 + 3
    fields = [array(seed, *leaf.shape) for seed, leaf in enumerate(start[:-1])]
    return type(start)(*fields, position % cell.memory_slots)


def paper(gate, cell):
    how = dict(name=gate, heads=cell.read_heads, top_k=cell.top_k)
    return reference.by_example(functools.partial(reference.rma, **how))


def strengths(params, h):
    return reference.softplus(reference.affine(params["reader"], h)[..., -SMALL["read_heads"] :])


@pytest.mark.parametrize("few", [0, 9])
@pytest.mark.parametrize("top_k", [1, 4, 9])
def test_the_most_similar_rows_are_those_of_top_k(top_k, few, monkeypatch):
    """With many equals, of which the first count; compared by pairs, and sorted."""
    monkeypatch.setattr(rma, "_FEW_ROWS", few)
    similar = jax.random.randint(jax.random.key(0), (4, 3, 9), -1, 2).astype(jnp.float32)
    _, rows = jax.lax.top_k(similar, top_k)
    expected = (np.asarray(rows)[..., None] == np.arange(9)).any(axis=-2)
    np.testing.assert_array_equal(rma._among_top(similar, top_k), expected)


@pytest.mark.parametrize(
    ("gate", "settings"),
    [
        ("standard", {}),
        ("ur", dict(top_k=5, bias_vectors=2)),
        ("c", dict(top_k=2)),  # two heads copy four of the five rows; those above read in place
        ("om", dict(top_k=1)),
    ],
)
def test_one_step_is_the_papers(gate, settings):
    cell = build(gate, **settings)
    params, carry, x = parameters(cell, INPUTS), carry_of(cell, 2), array(8, 2, INPUTS)
    new, y = quick_jit(lambda *args: cell.apply({"params": args[0]}, *args[1:]))(params, carry, x)
    expected = paper(gate, cell)(to_numpy(params), to_numpy(tuple(carry)), np.asarray(x))
    assert_close(tuple(new), expected)
    assert new.position.dtype == jnp.int32
    _, h, z, reads, *_ = expected
    assert_close(y, np.concatenate([z, h, reads.reshape(2, -1)], axis=-1))


def test_a_sequence_that_goes_round_the_memory_is_the_papers():
    cell = build("ur", emit_parts=True)
    params, xs = parameters(cell, INPUTS), array(8, 7, 2, INPUTS)
    last, ys = quick_jit(lambda *args: rg.unroll(cell, *args))(params, xs)
    step, plain = paper("ur", cell), to_numpy(params)
    carry, outputs = to_numpy(tuple(cell.initial((2,)))), []
    for x in np.asarray(xs):
        carry = step(plain, carry, x)
        outputs.append((carry[2], carry[1], carry[3].reshape(2, -1), strengths(plain, carry[1])))
    assert_close(tuple(last), carry, 1e-8)
    assert isinstance(ys, rg.RMAOutput)
    assert_close(tuple(ys), tuple(np.stack(leaves) for leaves in zip(*outputs, strict=True)), 1e-8)


def test_gradients_of_a_step():
    """What is written carries none, so the memory after the step is left out."""
    cell = build("ur")
    params, carry, x = parameters(cell, INPUTS), carry_of(cell, 2), array(8, 1, 2, INPUTS)

    def run(params, x, c, h, reads):
        start = carry._replace(c=c, h=h, reads=reads)
        new, ys = rg.unroll(cell, params, x, start)
        return new.c, ys

    check_grads(
        jax.jit(run),
        (params, x, carry.c, carry.h, carry.reads),
        order=1,
        modes=("rev",),
        eps=1e-6,
        atol=1e-6,
        rtol=1e-6,
    )


def test_a_sequence_has_the_gradients_of_a_memory_that_is_given():
    """Over time: finite differences of a run whose rows are those of another, fixed run."""
    cell = build("ur", top_k=5)
    params, xs, steps = parameters(cell, INPUTS), array(8, 4, 2, INPUTS), 4
    start = carry_of(cell, 2)
    carries, _ = rg.unroll(cell, params, xs, start, return_carries="all")
    rows = [start.memory, *carries.memory[:-1]]

    def given(params, xs):
        carry = start
        for t in range(steps):
            carry = carry._replace(memory=rows[t])
            carry = cell.step(params, carry, cell.project(params, xs[t]))
        return jnp.sum(jnp.sin(carry.h)) + jnp.sum(jnp.cos(carry.reads))

    def whole(params, xs):
        carry, _ = rg.unroll(cell, params, xs, start)
        return jnp.sum(jnp.sin(carry.h)) + jnp.sum(jnp.cos(carry.reads))

    run = jax.jit(given)
    check_grads(run, (params, xs), order=1, modes=("rev",), eps=1e-6, atol=1e-6, rtol=1e-6)
    assert_close(jax.jit(jax.grad(whole, (0, 1)))(params, xs), jax.grad(run, (0, 1))(params, xs))


def test_what_is_written_carries_no_gradient():
    cell = build()
    params, xs, start = parameters(cell, INPUTS), array(8, 3, 2, INPUTS), carry_of(cell, 2)

    def memory(params, xs, rows):
        carry, ys = rg.unroll(cell, params, xs, start._replace(memory=rows))
        return jnp.sum(carry.memory**2), jnp.sum(ys)

    rows = start.memory
    into = jax.jit(jax.jacobian(memory, (0, 1, 2)))(params, xs, rows)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(into[0]))
    assert not np.any(into[1][2]) and np.any(into[1][1])


def test_only_the_chosen_rows_are_read():
    """A row that is less similar than the top k may change: neither reads nor gradients do."""
    cell = build(read_heads=1, top_k=2)
    params, carry, x = parameters(cell, INPUTS), carry_of(cell, 1), array(8, 1, INPUTS)

    @jax.jit
    def reads(params, memory):
        new = cell.step(params, carry._replace(memory=memory), cell.project(params, x))
        return jnp.sum(jnp.sin(new.reads)), new.h

    h = np.asarray(reads(params, carry.memory)[1])
    key = reference.affine(to_numpy(params["reader"]), h)[0, :-1]
    rows = np.asarray(carry.memory[0])
    order = np.argsort(-(rows @ key) / np.sqrt((rows**2).sum(axis=-1)))
    run = jax.jit(jax.value_and_grad(reads, has_aux=True))
    plain = run(params, carry.memory)
    away = carry.memory.at[0, order[2:]].set(-7.0 * key)
    assert_identical(run(params, away), plain)
    near = carry.memory.at[0, order[1]].multiply(-1.0)
    assert abs(run(params, near)[0][0] - plain[0][0]) > 1e-3


def test_a_reset_starts_with_an_empty_memory():
    cell = build()
    params, xs = parameters(cell, INPUTS), array(8, 6, 2, INPUTS)
    resets = jnp.zeros((6, 2), bool).at[4, 1].set(True)
    run = quick_jit(lambda xs, **masks: rg.unroll(cell, params, xs, **masks))
    carry, _ = run(xs, resets=resets)
    whole, fresh = run(xs)[0], run(xs[4:])[0]
    assert_close(jax.tree.map(lambda leaf: leaf[1], carry), jax.tree.map(lambda x: x[1], fresh))
    assert_close(jax.tree.map(lambda leaf: leaf[0], carry), jax.tree.map(lambda x: x[0], whole))


@pytest.mark.usefixtures("x32")
@pytest.mark.long
def test_the_core_conforms():
    check_cell(rg.RMA(6, gate=rg.GATES["ur"], **SMALL), stops_gradients=True)


def test_bfloat16_computes_and_float32_carries(x32):
    exact, coarse = (
        rg.CELLS["ur_rma"](FEATURES, dtype=dtype, emit_parts=True, **SMALL)
        for dtype in (None, jnp.bfloat16)
    )
    params = exact.init_params(jax.random.key(0), INPUTS)
    xs = jax.random.normal(jax.random.key(1), (4, 3, INPUTS))
    carry, ys = rg.unroll(coarse, params, xs)
    assert {leaf.dtype for leaf in carry[:-1]} == {jnp.dtype(jnp.float32)}
    assert {leaf.dtype for leaf in ys} == {jnp.dtype(jnp.bfloat16)}
    assert_close(carry.h, rg.unroll(exact, params, xs)[0].h, 0.05)


def test_float64_parameters_carry_what_float32_computes():
    xs = jnp.ones((4, 3, INPUTS), jnp.float32)
    exact, coarse = (build(dtype=dtype) for dtype in (jnp.float64, jnp.float32))
    params = parameters(exact, INPUTS)
    with jax.numpy_dtype_promotion("standard"):
        carry, ys = rg.unroll(coarse, params, xs)
    assert {leaf.dtype for leaf in carry[:-1]} == {jnp.dtype(jnp.float64)}
    assert {leaf.dtype for leaf in jax.tree.leaves(ys)} == {jnp.dtype(jnp.float32)}
    assert_close(carry.h, rg.unroll(exact, params, xs.astype(jnp.float64))[0].h, 1e-5)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: rg.RMA(8, memory_slots=20, top_k=21), "top_k = 21 .* only 20"),
        (lambda: rg.RMA(8, memory_slots=40), "top_k = 50 .* only 40"),
        (lambda: rg.RMA(8, word_size=0), "word_size is a whole number, at least 1, got 0"),
        (lambda: rg.RMA(8, read_heads=2.0), "read_heads"),
        (lambda: rg.RMA(8, emit_parts=1), "emit_parts must be True or False"),
        (lambda: rg.CELLS["ur_rma"](2), "at least 3"),
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
