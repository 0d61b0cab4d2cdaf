"""Where the fused backend takes which form, in which chunks, that each form is the scan, and a
step's memory."""

import bisect

import jax
import jax.numpy as jnp
import pytest
from flax import struct

import recurrent_gates as rg
from recurrent_gates import target
from recurrent_gates.backends import fused
from recurrent_gates.backends.shared import halves, products, stepwise
from recurrent_gates.declared import Weights
from recurrent_gates.scan import Loop, Settings, Stream
from tests.support import array, assert_close, parameters, state, thinned, users_jit
from tests.test_fused import FEATURES, INPUTS, STEPS, build, outgrow_the_cache

pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.parametrize(
    ("batch", "features", "devices", "forward", "back"),
    [
        ((), 200, 1, True, True),  # one row
        ((1, 1), 200, 2, True, True),
        ((50,), 48, 2, True, True),  # few features
        ((2,), 49, 1, True, False),
        ((2,), 128, 2, True, False),
        ((2,), 129, 1, False, False),
        ((64,), 256, 1, True, True),  # a product alone is for one thread
        ((8, 16), 150, 1, True, True),
        ((64,), 256, 2, False, False),  # a device has one thread
        ((63,), 256, 1, False, False),
        ((64,), 257, 1, False, False),
        ((64,), 181, 1, False, False),
    ],
)
def test_where_products_are_one_on_a_cpu(batch, features, devices, forward, back, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    cell = rg.GRU(features)
    params = jax.eval_shape(lambda: cell.init_params(jax.random.key(0), 1))
    xs = jax.ShapeDtypeStruct((2, *batch, 1), jnp.float32)
    start = jax.eval_shape(lambda: cell.initial(batch))
    loop = Loop(Settings(cell, batch_dims=len(batch)), params, xs, start, start)
    z = jax.eval_shape(cell.project, params, xs)
    loop = products.product_loop(loop, z)
    assert products.merges(loop, transposes=False) is forward
    assert products.merges(loop, transposes=True) is back


AROUND = ("nothing", "masks", "noise", "noise by example", "reverse")


def loop_options(name, field, *shape):
    """Arguments of ``unroll``: masks, resets, carry functions."""
    return {
        "nothing": {},
        "masks": dict(valid=array(11, *shape) > -0.5, resets=array(9, *shape) > 0.5),
        "noise": dict(carry_fns=(rg.Detach(p=0.5),), noise=(array(10, shape[0]) > 0,)),
        "noise by example": dict(
            carry_fns=(rg.Zoneout(p=0.5, field=field),), noise=(array(10, *shape, FEATURES) > 0,)
        ),
        "reverse": dict(reverse=True),
    }[name]


@pytest.mark.parametrize("chunk", ["whole", "replayed"])
@pytest.mark.parametrize("around", AROUND)
def test_halves_are_the_whole(around, chunk, monkeypatch):
    """Forward: nothing is divided where there is a gradient."""
    outgrow_the_cache(monkeypatch, chunk)
    monkeypatch.setattr(halves, "count", lambda loop: 2)
    cell = build("lstm", "ur")
    batch = 5  # halves of two and three
    shape = (STEPS, batch)
    how = loop_options(around, "c", *shape)
    carry, reset_carry = state(cell, (batch,)), state(cell, (batch,))
    arguments = parameters(cell, INPUTS), array(8, *shape, INPUTS), carry

    def run(backend):
        @jax.jit
        def run(params, xs, carry):
            options = dict(reset_carry=reset_carry, return_carries="all", backend=backend)
            return rg.unroll(cell, params, xs, carry, **options, **how)

        return run(*arguments), run.lower(*arguments).as_text().count("dot_general")

    (fused_out, fused_products), (scanned, scan_products) = run("fused"), run("scan")
    assert_close(fused_out, scanned)
    chunks = 2 if chunk == "replayed" else 1  # and a rest
    assert (fused_products, scan_products) == (chunks * (4 + 2), 4 + 4)


@struct.dataclass
class Centred(rg.CarryFn):
    """Its h has no mean over the batch."""

    def after(self, noise_t, prev, new):
        del noise_t, prev
        return new._replace(h=new.h - new.h.mean(axis=0, keepdims=True))


@pytest.mark.parametrize(
    ("name", "batch", "features", "changes", "parts"),
    [
        ("lstm", 64, 256, {}, 2),
        ("ur_lstm", 64, 256, {}, 2),
        ("om_lstm", 64, 256, {}, 1),  # more products
        ("gru", 64, 256, {}, 1),  # one field
        ("lstm", 64, 159, {}, 1),
        ("lstm", 64, 401, {}, 1),
        ("lstm", 8, 256, {}, 1),  # too little work
        ("lstm", 160, 256, {}, 1),  # enough for both cores
        ("lstm", 64, 256, {"cores": 1}, 1),
        ("lstm", 64, 256, {"cores": 4}, 1),
        ("lstm", 64, 256, {"devices": 2}, 1),
        ("lstm", 64, 256, {"fns": (rg.Detach(jnp.float32(0.5)),)}, 2),
        ("lstm", 64, 256, {"fns": (rg.Detach(jnp.float32(0.5), per_example=True),)}, 2),
        ("lstm", 64, 256, {"fns": (rg.Zoneout(p=0.5, field="c"),)}, 1),  # keys
        ("lstm", 64, 256, {"fns": (Centred(p=0.5),)}, 1),  # examples read each other
    ],
)
def test_where_a_batch_has_halves(name, batch, features, changes, parts, monkeypatch):
    monkeypatch.setattr(target, "cores", lambda: changes.get("cores", 2))
    monkeypatch.setattr(jax, "device_count", lambda: changes.get("devices", 1))
    cell = rg.CELLS[name](features)
    params = jax.eval_shape(lambda: cell.init_params(jax.random.key(0), 1))
    xs = jax.ShapeDtypeStruct((2, batch, 1), jnp.float32)
    start = jax.eval_shape(lambda: cell.initial((batch,)))
    fns = changes.get("fns", ())
    stream = Stream(noise=rg.draw_noise(fns, jax.random.key(0), 2, (batch,)))
    loop = Loop(Settings(cell, batch_dims=1), params, xs, start, start, fns, stream)
    z = jax.eval_shape(cell.project, params, xs)
    assert halves.count(products.product_loop(loop, z)) == parts


@pytest.mark.parametrize(
    ("name", "chunk", "around"),
    thinned(
        (
            (*pair, around)
            for pair in [("gru", "replayed"), ("ur_gru", "whole"), ("janet", "whole")]
            for around in AROUND
        ),
        lambda name, chunk, around: name == "gru" or around in ("masks", "reverse"),
        long=lambda name, chunk, around: (
            around in ("nothing", "noise by example") or (around == "reverse" and name != "gru")
        ),
    ),
)
def test_steps_that_project_their_inputs_are_the_scan(name, around, chunk, monkeypatch):
    """Forward; where there is a gradient all inputs are projected at once."""
    outgrow_the_cache(monkeypatch, chunk)
    for limit in ("_FEATURES", "_WIDTH", "_INPUTS"):
        monkeypatch.setattr(stepwise, limit, 0)
    monkeypatch.setattr(products, "merges", lambda loop, **_: False)
    cell = rg.CELLS[name](FEATURES, bias_vectors=2, param_dtype=jnp.float64)
    shape = (STEPS, 2)
    field = "h" if "h" in cell.initial(()).__class__._fields else "c"
    how = loop_options(around, field, *shape)
    carry, reset_carry = state(cell, (2,)), state(cell, (2,))
    arguments = parameters(cell, INPUTS), array(8, *shape, INPUTS), carry

    def run(backend):
        def run(params, xs, carry):
            options = dict(reset_carry=reset_carry, return_carries="all", backend=backend)
            return rg.unroll(cell, params, xs, carry, **options, **how)

        def total(*arguments):
            return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(run(*arguments)))

        gradient = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(*arguments)
        compiled = jax.jit(run)
        return compiled(*arguments), gradient, compiled.lower(*arguments).as_text()

    (out, gradient, program), (scanned, expected, _) = run("fused"), run("scan")
    assert_close(out, scanned)
    assert_close(gradient, expected)
    loops = program[program.index("stablehlo.while") :]
    chunks = 2 if chunk == "replayed" else 1  # and a rest
    assert loops.count("dot_general") == chunks * 2 * len(cell.slots)


@pytest.mark.parametrize(
    ("name", "batch", "features", "inputs", "serves"),
    [
        ("gru", (64,), 256, 8, True),
        ("gru", (8, 8), 180, 30, True),
        ("ur_janet", (12,), 256, 1, True),
        ("lstm", (64,), 256, 8, False),  # two fields
        ("gru", (64,), 179, 8, False),
        ("gru", (11,), 256, 8, False),  # too few numbers in a step
        ("gru", (64,), 256, 43, False),  # too many inputs
        ("gato", (64,), 256, 2, False),
    ],
)
def test_where_a_step_projects_its_input(name, batch, features, inputs, serves):
    cell = rg.CELLS[name](features)
    params = jax.eval_shape(lambda: cell.init_params(jax.random.key(0), inputs))
    xs = jax.ShapeDtypeStruct((2, *batch, inputs), jnp.float32)
    start = jax.eval_shape(lambda: cell.initial(batch))
    loop = Loop(Settings(cell, batch_dims=len(batch)), params, xs, start, start)
    assert stepwise.serves(loop) is serves


def temporary_bytes(backend):
    """What one training step of the adding task's GATO keeps in temporaries, as the compiler
    plans it."""
    cell, steps, batch = rg.CELLS["gato2"](512), 750, 64

    def train(params, moments, xs, targets):
        def loss(params):
            _, ys = rg.unroll(cell, params, xs, backend=backend)
            return jnp.mean((ys[-1].mean(axis=-1) - targets) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        moments = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments, grads)
        return value, jax.tree.map(lambda p, m: p - 1e-3 * m, params, moments), moments

    params = jax.eval_shape(lambda key: cell.init_params(key, 2), jax.random.key(0))
    arrays = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((steps, batch, 2), (batch,)))
    return (
        jax.jit(train).lower(params, params, *arrays).compile().memory_analysis().temp_size_in_bytes
    )


def test_the_memory_of_a_gato_training_step(x32):
    """750 steps, batch 64, J = 256, k = 32: at most 400 MB, where [T, B, J, k] alone would take
    1.6 GB."""
    planned = temporary_bytes("fused")
    assert planned <= 400e6
    assert temporary_bytes("scan") > 4 * planned


def test_chunks_have_the_size_of_the_cache_and_no_rest_where_that_costs_little(monkeypatch):
    cell = rg.LSTM(8)  # projections of 4 slots, 8 wide, 4 bytes, for 3 examples: 384 bytes a step

    def chunk(steps, budget, reused=0, inputs=INPUTS):
        monkeypatch.setattr(fused, "_REUSED_BYTES", reused)
        monkeypatch.setattr(fused, "_CACHE_BYTES", budget)
        params = jax.eval_shape(lambda key: cell.init_params(key, inputs), jax.random.key(0))
        xs = jnp.zeros((steps, 3, inputs), jnp.float32)
        start = cell.initial((3,))
        return fused.chunk(Loop(Settings(cell, batch_dims=1), params, xs, start, start))

    assert chunk(100, 100 * 384) is None
    assert chunk(100, 100 * 384 - 1) == 50
    assert chunk(100, 34 * 384) == 25
    assert chunk(100, 33 * 384) == 25
    assert chunk(101, 60 * 384) == 60
    # The recurrent weights are 8 x 32 numbers, 1024 bytes, and twice that is more than 5 steps.
    assert chunk(101, 1) == 5
    # Three times the projections and twice the carries, two fields 8 wide, 192 bytes a step.
    assert chunk(100, 1, reused=100 * (3 * 384 + 2 * 192)) is None
    assert chunk(100, 1, reused=100 * (3 * 384 + 2 * 192) - 1) == 5
    # Of wide inputs it is enough that the projections and carries of a forward pass are reused.
    assert chunk(100, 1, reused=100 * (384 + 192), inputs=128) is None
    assert chunk(100, 1, reused=100 * (384 + 192) - 1, inputs=128) == 5
    assert chunk(100, 1, reused=100 * (384 + 192), inputs=127) == 5


def train_step_bytes(cell, inputs, steps, batch):
    """What XLA plans for a train step."""

    def step(params, xs, cotangent):
        def run(params, xs):
            return rg.unroll(cell, params, xs, backend="fused")[1]

        ys, pullback = jax.vjp(run, params, xs)
        return ys, pullback(cotangent)

    shapes = [
        jax.eval_shape(lambda key: cell.init_params(key, inputs), jax.random.key(0)),
        jax.ShapeDtypeStruct((steps, batch, inputs), jnp.float32),
        jax.ShapeDtypeStruct((steps, batch, cell.features), jnp.float32),
    ]
    return users_jit(step).lower(*shapes).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("name", ["lstm", "gru", "om_lstm", "gato1", "gato2"])
@pytest.mark.long
def test_what_needs_no_chunks_takes_no_more_memory_than_is_reused(name, monkeypatch, x32):
    monkeypatch.setattr(fused, "_REUSED_BYTES", 2**21)
    monkeypatch.setattr(fused, "_CACHE_BYTES", 1)
    cell, inputs, batch = rg.CELLS[name](32), 2, 16
    params, start = parameters(cell, inputs), cell.initial((batch,))

    def is_whole(steps):
        xs = jax.ShapeDtypeStruct((steps, batch, inputs), jnp.float32)
        return fused.chunk(Loop(Settings(cell, batch_dims=1), params, xs, start, start)) is None

    longest = bisect.bisect(range(1, 400), False, key=lambda steps: not is_whole(steps))
    assert 30 < longest < 399
    assert is_whole(longest)
    assert not is_whole(longest + 1)
    # The weights and their gradients are not counted.
    assert 2**19 < train_step_bytes(cell, inputs, longest, batch) <= 1.02 * 2**21


def test_weights_of_a_large_hidden_state_keep_their_products():
    assert not fused._replays(Weights({"i": jnp.zeros((301, 301))}, {}, {}))
    assert fused._replays(
        Weights({"i": jnp.zeros((256, 256))}, {"a": jnp.zeros(1024)}, {"u": jnp.zeros(1024)})
    )
