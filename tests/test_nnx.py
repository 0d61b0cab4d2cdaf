"""NNX: linen's numbers and names, Flax's own layers and transforms."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import recurrent_gates as rg
from tests import test_golden as golden
from tests.support import (
    array,
    assert_close,
    assert_identical,
    count_traces,
    dot,
    quick_jit,
    randomize,
    state,
    thinned,
)
from tests.test_layers import BATCH, FEATURES, INPUTS, NAMES, STEPS, build

pytestmark = pytest.mark.usefixtures("x64")


def randomized(module, seed=5):
    """The module with random parameters, so that no gate sits at its start."""
    rg.nnx.load_linen(module, randomize(rg.nnx.to_linen(module), seed))
    return module


def layer(cell, seed=5, carry=0, **settings):
    return randomized(
        rg.nnx.RNN(cell, INPUTS, rngs=nnx.Rngs(params=0, carry=carry), **settings), seed
    )


def next_key(stream):
    """The key that a stream gives next, without taking it."""
    return jax.random.fold_in(stream.key.get_value(), stream.count.get_value())


def call(module, *inputs, **keywords):
    """A module, compiled; keywords stay outside, as Python values."""
    graphdef, leaves = nnx.split(module)
    return quick_jit(lambda leaves, *x: nnx.merge(graphdef, leaves)(*x, **keywords))(
        leaves, *inputs
    )


def slopes(module, x, **keywords):
    """The output, and gradients by the parameters and the inputs of a scalar of it, compiled."""
    graphdef, leaves = nnx.split(module)

    def loss(module, x):
        out = module(x, **keywords)
        return dot(out, jax.tree.map(lambda leaf: array(17, *leaf.shape), out)), out

    @quick_jit
    def run(leaves, x):
        by = nnx.grad(loss, argnums=(0, 1), has_aux=True)
        (by_module, by_x), out = by(nnx.merge(graphdef, leaves), x)
        return out, nnx.to_pure_dict(by_module), by_x

    return run(leaves, x)


def pure_slopes(function, params, x):
    """The same of ``function(params, x)``."""

    def loss(params, x):
        out = function(params, x)
        return dot(out, jax.tree.map(lambda leaf: array(17, *leaf.shape), out)), out

    (by_params, by_x), out = quick_jit(jax.grad(loss, (0, 1), has_aux=True))(params, x)
    return out, by_params, by_x


# The same numbers as in linen and in the driver.


def test_a_cell_starts_with_init_params():
    cell = build("ur_lstm")
    module = rg.nnx.Cell(cell, INPUTS, rngs=nnx.Rngs(params=7))
    key = next_key(nnx.Rngs(params=7).params)
    assert_identical(module.params, cell.init_params(key, INPUTS))
    assert module.in_features == INPUTS
    assert isinstance(module.kernel["f"], nnx.Param)


@pytest.mark.parametrize("name", NAMES)
def test_a_cell_takes_the_steps_of_linens(name):
    cell, x = build(name), array(8, BATCH, INPUTS)
    module = randomized(rg.nnx.Cell(cell, INPUTS, rngs=nnx.Rngs(0)))
    assert_identical(module.initialize_carry((BATCH, INPUTS)), cell.initial((BATCH,)))
    carry = state(cell, (BATCH,))
    assert_identical(module(carry, x), cell.apply({"params": module.params}, carry, x))


@pytest.mark.parametrize(
    ("name", "settings"),
    thinned(
        [
            *((name, dict()) for name in NAMES),
            ("lstm", dict(reverse=True, return_carry=True, remat=4)),
            ("gato2", dict(reverse=True, keep_order=True, time_major=True, unroll=2)),
        ],
        lambda name, settings: settings or name not in ("lstm", "gato2"),
        pytest.mark.long,
    ),
    ids=str,
)
def test_a_layer_is_linens(name, settings):
    """Values, and gradients by parameters and inputs; each attribute reaches the layer."""
    cell, x = build(name), array(8, BATCH, STEPS, INPUTS)
    module, linen = layer(cell, **settings), rg.RNN(cell, **settings)
    params = rg.nnx.to_linen(module)
    assert_close(
        slopes(module, x),
        pure_slopes(lambda params, x: linen.apply({"params": params}, x), params, x),
        tolerance=1e-14,
    )


@pytest.mark.parametrize(
    "how", [dict(lengths=[STEPS, 1, 0]), dict(valid=0.7), dict(resets=0.3)], ids=str
)
@pytest.mark.parametrize("reverse", [False, True])
def test_a_call_is_unroll(how, reverse):
    """Masks, another start, both directions: values, carries and gradients."""
    cell, xs = build("ur_gru"), array(8, STEPS, BATCH, INPUTS)
    start, module = state(cell, (BATCH,)), layer(cell)
    draw = np.random.default_rng(0).random((STEPS, BATCH))
    masks = {
        name: jnp.asarray(value) if name == "lengths" else jnp.asarray(draw < value)
        for name, value in how.items()
    }

    def unrolled(params, xs):
        return rg.unroll(cell, params, xs, start, reverse=reverse, **masks)

    expected, by_params, by_xs = pure_slopes(unrolled, module.cell.params, xs)
    names = {"lengths": "seq_lengths"}
    out = slopes(
        module,
        xs,
        initial_carry=start,
        return_carry=True,
        time_major=True,
        reverse=reverse,
        keep_order=True,
        **{names.get(name, name): mask for name, mask in masks.items()},
    )
    assert_close(out, (expected, {"cell": by_params}, by_xs), tolerance=1e-14)


@pytest.mark.parametrize("backend", ["fused", "newton", "pallas"])
def test_every_backend_serves_a_layer(backend):
    x = array(8, BATCH, STEPS, INPUTS)
    results, expected = (
        slopes(layer(build("gato1"), backend=name), x) for name in (backend, "scan")
    )
    assert_close(results, expected)
    with pytest.raises(ValueError, match="newton backend does not serve"):
        layer(build("lstm"), backend="newton")(x)


def test_a_foreign_cell_and_a_cell_of_bare_parameters():
    """Any tree of parameters, lists included, by its names."""

    class Bare(rg.Cell):
        def init_params(self, key, in_features):
            return {"scale": jnp.full((in_features,), 0.5), "more": [jnp.ones(1), jnp.zeros(1)]}

        def initial(self, batch_shape):
            return jnp.zeros((*batch_shape, INPUTS))

        def step(self, params, carry, z_t):
            more = sum(leaf[None] for leaf in params["more"])
            return carry * params["scale"][None] + z_t + more

    x = array(8, BATCH, STEPS, INPUTS)
    for cell in (Bare(), rg.FlaxCell(nn.LSTMCell(FEATURES, param_dtype=jnp.float64))):
        module = layer(cell)
        params = rg.nnx.to_linen(module)
        assert_close(module(x), rg.RNN(cell).apply({"params": params}, x), tolerance=1e-14)
        moved = rg.nnx.to_linen(layer(cell, seed=6))
        rg.nnx.load_linen(module, moved)
        assert_identical(rg.nnx.to_linen(module), moved)


@pytest.mark.long
def test_the_output_of_a_stack_is_linens():
    cells = build("lstm"), rg.JANET(6, param_dtype=jnp.float64), build("ur_gru")
    x = array(8, BATCH, STEPS, INPUTS)
    settings = dict(reverse=True, time_major=True, remat=2, return_carry=True)
    module = randomized(rg.nnx.Stack(cells, INPUTS, rngs=nnx.Rngs(0), **settings))
    linen, params = rg.Stack(cells, **settings), rg.nnx.to_linen(module)
    widths = [params[f"cells_{i}"]["kernel"]["u"].shape[0] for i in range(3)]
    assert widths == [INPUTS, FEATURES, 6]
    assert_close(
        slopes(module, x),
        pure_slopes(lambda params, x: linen.apply({"params": params}, x), params, x),
        tolerance=1e-14,
    )


def test_cells_are_shared_where_they_are_one_object():
    x = array(8, BATCH, STEPS, FEATURES)
    shared = randomized(rg.nnx.Cell(build("lstm"), FEATURES, rngs=nnx.Rngs(0)))
    stack = rg.nnx.Stack([shared, shared])
    assert list(rg.nnx.to_linen(stack)) == ["cells_0"]
    once = rg.nnx.RNN(shared)
    assert_close(stack(x), once(once(x)), tolerance=1e-14)
    cell = build("lstm")
    own = randomized(rg.nnx.Stack([cell, cell], FEATURES, rngs=nnx.Rngs(0)))
    assert sorted(rg.nnx.to_linen(own)) == ["cells_0", "cells_1"]
    first, second = rg.nnx.RNN(own.cells_0), rg.nnx.RNN(own.cells_1)
    assert_close(own(x), second(first(x)), tolerance=1e-14)


# Under Flax's own layers.


@pytest.mark.parametrize("name", ["lstm_plain", "ur_lstm", "on_lstm_chunk1", "on_lstm_chunk4"])
def test_golden_values_through_flaxs_rnn(name):
    """Other people's numbers, to 1e-10: outputs, carries, and every gradient."""
    cell, params, grads, data, _, _ = golden.problem(name)
    x, carry = jnp.asarray(data["x"]), golden.initial(data)
    module = nnx.RNN(rg.nnx.Cell(cell, x.shape[-1], rngs=nnx.Rngs(0)), time_major=True)
    rg.nnx.load_linen(module, {"cell": params})

    @nnx.jit
    def run(module, x, carry):
        def loss(module, x, carry):
            last, ys = module(x, initial_carry=carry, return_carry=True)
            return dot(ys, jnp.asarray(data["cotangent"])), (last, ys)

        return nnx.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(module, x, carry)

    (loss, (last, ys)), (by_module, by_x, by_carry) = run(module, x, carry)
    assert_close(ys, data["ys"])
    assert_close(last.c, data["cs"][-1].reshape(last.c.shape))
    assert_close(loss, data["loss"])
    assert_close(nnx.to_pure_dict(by_module), {"cell": grads})
    assert_close(by_x, data["grad_x"])
    assert_close(by_carry.h, data["grad_state0_0"])
    assert_close(by_carry.c, data["grad_state0_1"].reshape(by_carry.c.shape))


@pytest.mark.parametrize("name", ["lstm_h_detach", "lstm_c_detach", "lstm_h_detach_all"])
def test_golden_values_of_h_detach(name):
    cell, params, grads, data, carry_fns, noise = golden.problem(name)
    x, carry = jnp.asarray(data["x"]), golden.initial(data)
    module = rg.nnx.RNN(cell, x.shape[-1], rngs=nnx.Rngs(0), time_major=True, carry_fns=carry_fns)
    rg.nnx.load_linen(module, {"cell": params})

    @nnx.jit
    def run(module, x):
        def loss(module, x):
            ys = module(x, initial_carry=carry, noise=noise)
            return dot(ys, jnp.asarray(data["cotangent"])), ys

        return nnx.grad(loss, argnums=(0, 1), has_aux=True)(module, x)

    (by_module, by_x), ys = run(module, x)
    assert_close(ys, data["ys"])
    assert_close(nnx.to_pure_dict(by_module), {"cell": grads})
    assert_close(by_x, data["grad_x"])


@pytest.mark.parametrize("ours", [False, True])
def test_bidirectional_is_linens(ours):
    """Flax's layer over Flax's nnx.RNN with our cell, and over our layer, which takes lengths."""
    cell, x = build("ur_gru"), array(8, BATCH, STEPS, INPUTS)
    rngs = nnx.Rngs(0)

    def direction():
        if ours:
            return rg.nnx.RNN(cell, INPUTS, rngs=rngs)
        return nnx.RNN(rg.nnx.Cell(cell, INPUTS, rngs=rngs))

    module = randomized(nnx.Bidirectional(direction(), direction(), return_carry=True))
    linen = nn.Bidirectional(rg.RNN(cell), rg.RNN(build("ur_gru")), return_carry=True)
    lengths = jnp.asarray([STEPS, 1, 4]) if ours else None
    params = rg.nnx.to_linen(module)
    expected = quick_jit(lambda params: linen.apply({"params": params}, x, seq_lengths=lengths))(
        params
    )
    assert_close(call(module, x, seq_lengths=lengths), expected, tolerance=1e-14)


def test_bidirectional_layers_draw_from_its_stream():
    """One after the other, so that the directions do not share what they draw."""
    cell, x = build("lstm"), array(8, BATCH, STEPS, INPUTS)
    zoneout = (rg.Zoneout(p=0.5),)
    forward, backward = (layer(cell, carry=carry, carry_fns=zoneout) for carry in (3, 4))
    module = nnx.Bidirectional(forward, backward, rngs=nnx.Rngs(carry=9))
    keys = [jax.random.fold_in(module.rngs.key.get_value(), count) for count in (0, 1)]
    linen = rg.RNN(cell, carry_fns=zoneout)
    halves = [
        linen.apply(
            {"params": rg.nnx.to_linen(run)},
            x,
            rngs={"carry": key},
            reverse=run is backward,
            keep_order=True,
        )
        for run, key in zip((forward, backward), keys, strict=True)
    ]
    assert_close(module(x), jnp.concatenate(halves, axis=-1), tolerance=1e-14)


# What is drawn.


def test_h_detach_has_the_gradient_of_unroll():
    """With noise that is given, and with what the layer's stream draws."""
    cell, x = build("lstm"), array(8, BATCH, STEPS, INPUTS)
    detach = (rg.Detach(p=0.5, per_example=True),)
    module = layer(cell, carry_fns=detach)
    xs, params = jnp.swapaxes(x, 0, 1), module.cell.params
    noise = (jnp.asarray(np.random.default_rng(1).random((STEPS, BATCH)) < 0.5),)

    def expected(noise):
        _, by_params, by_xs = pure_slopes(
            lambda params, xs: rg.unroll(cell, params, xs, carry_fns=detach, noise=noise)[1],
            params,
            xs,
        )
        return {"cell": by_params}, by_xs

    _, *given = slopes(module, xs, noise=noise, time_major=True)
    assert_close(tuple(given), expected(noise))
    _, *plain = slopes(module, xs, deterministic=True, time_major=True)
    assert_close(tuple(plain), expected((jnp.zeros((STEPS, BATCH), bool),)))

    linen, key = rg.RNN(cell, carry_fns=detach, time_major=True), next_key(module.rngs.carry)
    _, *drawn = slopes(module, xs, time_major=True)
    rngs = {"carry": key}
    _, by_params, by_xs = pure_slopes(
        lambda params, xs: linen.apply({"params": params}, xs, rngs=rngs),
        rg.nnx.to_linen(module),
        xs,
    )
    assert_close(tuple(drawn), (by_params, by_xs), tolerance=1e-14)
    assert np.abs(drawn[1] - plain[1]).max() > 1e-3


def test_each_call_draws_anew_unless_in_evaluation():
    x = array(8, BATCH, STEPS, INPUTS)
    module = layer(build("lstm"), carry_fns=(rg.Zoneout(p=0.5),))
    again = nnx.clone(module)
    first, second = module(x), module(x)
    assert np.abs(first - second).max() > 1e-3
    assert_identical(again(x), first)  # the stream is part of the state
    assert_identical(module(x, rngs=nnx.Rngs(carry=3)), module(x, rngs=nnx.Rngs(carry=3).carry))

    count = module.rngs.carry.count.get_value()
    mean = module(x, deterministic=True)
    module.eval()
    assert_identical(module(x), mean)
    module.train()
    assert_identical(nnx.view(module, deterministic=True)(x), mean)
    assert module.rngs.carry.count.get_value() == count
    assert np.abs(module(x) - mean).max() > 1e-3
    expected = rg.unroll(
        module.cell.cell,
        module.cell.params,
        jnp.swapaxes(x, 0, 1),
        carry_fns=module.carry_fns,
        deterministic=True,
    )
    assert_close(jnp.swapaxes(mean, 0, 1), expected[1], tolerance=1e-14)


def test_a_probability_that_is_an_array_is_data():
    """It changes without another trace, and each lane of an ensemble may have its own."""
    x = array(8, BATCH, STEPS, INPUTS)
    module = layer(build("lstm"), carry_fns=(rg.Damp(p=jnp.asarray(0.3)),))
    function, traces = count_traces(lambda module, x: module(x).sum())
    slope = nnx.jit(nnx.grad(function, argnums=1))
    for p in (0.3, 0.9):
        module.carry_fns = (rg.Damp(p=jnp.asarray(p)),)
        expected = layer(build("lstm"), carry_fns=(rg.Damp(p=p),))
        assert_close(slope(module, x), slopes_of_sum(expected, x), tolerance=1e-13)
    assert len(traces) == 1


def slopes_of_sum(module, x):
    return jax.grad(lambda x: module(x).sum())(x)


@pytest.mark.long
def test_a_stack_draws_as_linens():
    """Carry functions and dropout from the streams "carry" and "dropout"."""
    cells = build("lstm"), build("ur_gru"), build("lstm")
    x = array(8, BATCH, STEPS, INPUTS)
    for settings in (dict(), dict(shared_noise=True)):
        rngs = nnx.Rngs(params=0, carry=1, dropout=2)
        settings |= dict(dropout=0.4, carry_fns=[(rg.Zoneout(p=0.3),), (), (rg.Detach(p=0.5),)])
        module = randomized(rg.nnx.Stack(cells, INPUTS, rngs=rngs, **settings))
        keys = {name: next_key(module.rngs[name]) for name in ("carry", "dropout")}
        params, linen = rg.nnx.to_linen(module), rg.Stack(cells, **settings)

        def apply(params, x, linen=linen, keys=keys):
            return linen.apply({"params": params}, x, rngs=keys)

        assert_close(slopes(module, x), pure_slopes(apply, params, x), tolerance=1e-14)
        plain = rg.Stack(cells).apply({"params": params}, x)
        masks = [jnp.ones((BATCH, STEPS, FEATURES))] * 2
        noise = [(jnp.zeros((STEPS, BATCH, FEATURES), bool),), (), (jnp.zeros(STEPS, bool),)]
        before = nnx.to_pure_dict(nnx.state(module, nnx.RngCount))
        assert_close(module(x, masks=masks, noise=noise), plain, tolerance=1e-14)
        assert_identical(nnx.to_pure_dict(nnx.state(module, nnx.RngCount)), before)


# Transforms.


def test_one_trace_for_equal_modules():
    function, traces = count_traces(lambda module, x: module(x))
    run = nnx.jit(function)
    x = array(8, BATCH, STEPS, INPUTS)
    for seed in (0, 1):
        module = layer(build("lstm"), seed, carry_fns=[rg.Zoneout(p=0.5)])
        assert np.abs(run(module, x) - run(module, x)).max() > 1e-3  # the stream goes on
        stack = rg.nnx.Stack([build("lstm"), build("gru")], INPUTS, rngs=nnx.Rngs(seed))
        run(stack, x)
    assert len(traces) == 2


def make_lanes(cell, in_features, count, **settings):
    @nnx.split_rngs(splits=count)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return rg.nnx.RNN(cell, in_features, rngs=rngs, **settings)

    return make(nnx.Rngs(0))


def lane(module, index):
    graphdef, leaves = nnx.split(module)
    return nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf[index], leaves))


@pytest.mark.long
def test_an_ensemble_under_vmap():
    """Each lane has parameters and a stream of its own."""
    x = array(8, BATCH, STEPS, INPUTS)
    lanes = make_lanes(build("lstm"), INPUTS, 3, carry_fns=(rg.Zoneout(p=0.5),))
    apart = [lane(lanes, index) for index in range(3)]
    expected = jnp.stack([one(x) for one in apart])
    ys = nnx.jit(nnx.vmap(lambda module, x: module(x), in_axes=(0, None)))(lanes, x)
    assert_close(ys, expected, tolerance=1e-13)
    assert np.abs(ys[0] - ys[1]).max() > 1e-3
    assert_identical(lanes.rngs.carry.count.get_value(), np.ones(3))

    def loss(module, x):
        return jnp.sum(module(x, deterministic=True) ** 2)

    slope = nnx.jit(nnx.vmap(nnx.grad(loss), in_axes=(0, None)))(lanes, x)
    alone = [nnx.to_pure_dict(nnx.grad(loss)(one, x)) for one in apart]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *alone)
    assert_close(nnx.to_pure_dict(slope), stacked)


@pytest.mark.long
def test_layers_under_scan():
    """Three layers with stacked parameters in one scan are three layers in turn."""
    x = array(8, BATCH, STEPS, FEATURES)
    deep = make_lanes(build("ur_lstm"), FEATURES, 3, carry_fns=(rg.Detach(p=0.5),))
    apart = [lane(deep, index) for index in range(3)]

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def forward(module, x):
        return module(x)

    def in_turn(modules, x):
        for module in modules:
            x = module(x)
        return x

    by, out = nnx.jit(
        nnx.grad(lambda module, x: (jnp.sum(forward(module, x) ** 2),) * 2, has_aux=True)
    )(deep, x)
    slopes = nnx.grad(lambda modules, x: jnp.sum(in_turn(modules, x) ** 2))(nnx.List(apart), x)
    each = [nnx.to_pure_dict(slopes)[index] for index in range(3)]
    assert_close(nnx.to_pure_dict(by), jax.tree.map(lambda *leaves: jnp.stack(leaves), *each))
    assert_close(out, jnp.sum(in_turn([lane(deep, index) for index in range(3)], x) ** 2))
