"""The memory cells under the driver: carry functions, masks, chunks of time, lanes, export, and how
much memory a train step takes."""

import functools

import jax
import jax.numpy as jnp
import pytest

import recurrent_gates as rg
from tests.support import array, assert_close, parameters, quick_jit

pytestmark = pytest.mark.usefixtures("x64")

INPUTS, STEPS, BATCH = 3, 6, 2
CELLS = {
    "rmc": functools.partial(rg.RMC, 12),
    "dnc": functools.partial(rg.DNC, 6, memory_slots=4, word_size=3, read_heads=2),
    "rma": functools.partial(rg.RMA, 6, memory_slots=4, word_size=3, read_heads=2, top_k=3),
}
FIELDS = {"rmc": ("memory",), "dnc": ("h", "memory"), "rma": ("h", "reads")}


def build(name, gate="ur", **settings):
    return CELLS[name](gate=rg.GATES[gate], param_dtype=jnp.float64, **settings)


def trained(cell, **how):
    """The gradient of a sequence's outputs, and these; the carry functions draw from one key."""

    def loss(params, xs):
        _, ys = rg.unroll(cell, params, xs, key=jax.random.key(0), **how)
        return jnp.sum(jnp.sin(ys)), ys

    return quick_jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.long
def test_chunks_of_time_change_nothing(name):
    """Together with all that a step may meet: detaching, zoneout, masks, resets."""
    cell = build(name)
    params, xs = parameters(cell, INPUTS), array(8, STEPS, BATCH, INPUTS)
    first, *more = FIELDS[name]
    carry_fns = [rg.Detach(0.5, first, per_example=True), *(rg.Zoneout(0.3, f) for f in more)]
    valid = jnp.ones((STEPS, BATCH), bool).at[3, 1].set(False)
    resets = jnp.zeros((STEPS, BATCH), bool).at[2, 0].set(True)
    how = dict(carry_fns=carry_fns, valid=valid, resets=resets)
    whole = trained(cell, **how)(params, xs)
    assert_close(trained(cell, remat=4, **how)(params, xs), whole)
    plain = trained(cell, valid=valid, resets=resets)(params, xs)
    gradients = jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(whole[1])])
    without = jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(plain[1])])
    assert not jnp.allclose(gradients, without)


@pytest.mark.parametrize("name", CELLS)
def test_detaching_cuts_what_the_next_step_reads(name):
    """With p = 1 on a field, the gradient of one step's output to that field before it is zero."""
    cell, (field, *_) = build(name), FIELDS[name]
    params, xs = parameters(cell, INPUTS), array(8, 1, BATCH, INPUTS)
    start = cell.initial((BATCH,))

    def total(value, p):
        carry = start._replace(**{field: value})
        _, ys = rg.unroll(cell, params, xs, carry, carry_fns=[rg.Damp(p, field)])
        return jnp.sum(jnp.sin(ys))

    value = array(3, *getattr(start, field).shape)
    gradient = jax.jit(jax.grad(total))
    assert not jnp.any(gradient(value, 1.0)) and jnp.any(gradient(value, 0.0))
    assert_close(gradient(value, 0.25), 0.75 * gradient(value, 0.0))


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.long
def test_lanes_train_together(name):
    """One vmap over parameters, as seeds train: the numbers of each alone."""
    cell = build(name, "om")
    lanes = [parameters(cell, INPUTS, seed) for seed in (0, 1)]
    xs = array(8, STEPS, BATCH, INPUTS)
    step = jax.grad(lambda params: jnp.sum(jnp.sin(rg.unroll(cell, params, xs)[1])))
    together = quick_jit(jax.vmap(step))(jax.tree.map(lambda *leaves: jnp.stack(leaves), *lanes))
    alone = [quick_jit(step)(params) for params in lanes]
    assert_close(together, jax.tree.map(lambda *leaves: jnp.stack(leaves), *alone), 1e-8)


@pytest.mark.parametrize("name", CELLS)
def test_any_number_of_batch_dimensions_and_reverse(name):
    cell = build(name)
    params, xs = parameters(cell, INPUTS), array(8, 3, 4, INPUTS)
    run = quick_jit(lambda xs, **how: rg.unroll(cell, params, xs, reverse=True, **how))
    carry, ys = run(xs)
    wide_carry, wide = run(xs.reshape(3, 2, 2, INPUTS))
    assert_close(wide.reshape(ys.shape), ys)
    assert_close(jax.tree.map(lambda a, b: a.reshape(b.shape), wide_carry, carry), carry)
    alone = [run(xs[:, row]) for row in range(2)]
    assert_close(jnp.stack([y for _, y in alone], axis=1), ys[:, :2])


@pytest.mark.usefixtures("x32")
@pytest.mark.parametrize("name", CELLS)
def test_one_exported_program_serves_any_sizes(name):
    cell = CELLS[name]()
    params = cell.init_params(jax.random.key(0), INPUTS)
    run = quick_jit(lambda params, xs: rg.unroll(cell, params, xs))
    time, batch = jax.export.symbolic_shape("time, batch")
    shape = jax.ShapeDtypeStruct((time, batch, INPUTS), jnp.float32)
    exported = jax.export.export(run)(params, shape)
    xs = jax.random.normal(jax.random.key(1), (4, BATCH, INPUTS))
    assert_close(exported.call(params, xs), run(params, xs), 1e-5)


@pytest.mark.usefixtures("x32")
@pytest.mark.parametrize(
    ("cell", "steps", "inputs", "megabytes"),
    [
        (rg.RMA(256), 121, 505, 300),
        (rg.DNC(64, memory_slots=64, word_size=64), 100, 8, 200),
    ],
    ids=["rma", "dnc"],
)
def test_a_train_step_keeps_no_memory_for_each_step(cell, steps, inputs, megabytes):
    """RMA's memories of all steps would be 1.5 GB."""
    assert _temporary_bytes(cell, steps, inputs) < megabytes * 10**6


@pytest.mark.usefixtures("x32")
@pytest.mark.parametrize("cell", [rg.RMC(128), rg.DNC(64)], ids=["rmc", "dnc"])
@pytest.mark.long
def test_of_a_step_on_a_cpu_the_carry_alone_is_kept(cell):
    """Beside a chunk of all steps, in which what the backward pass needs of each is kept."""
    assert _temporary_bytes(cell, 30, 8) < _temporary_bytes(cell, 30, 8, remat=30) / 2


def _temporary_bytes(cell, steps, inputs, **how):
    """Of a train step, by XLA's own account, without running it."""

    def loss(params, xs):
        return jnp.mean(jnp.square(rg.unroll(cell, params, xs, **how)[1]))

    params = jax.eval_shape(lambda key: cell.init_params(key, inputs), jax.random.key(0))
    xs = jax.ShapeDtypeStruct((steps, 16, inputs), jnp.float32)
    compiled = quick_jit(jax.grad(loss)).lower(params, xs).compile()
    return compiled.memory_analysis().temp_size_in_bytes
