"""The Flax layers: in the place of nn.RNN, in both directions, stacked, lifted, bridged to NNX."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, struct

import recurrent_gates as rg
from tests.support import (
    array,
    assert_close,
    assert_identical,
    dot,
    parameters,
    quick_jit,
    randomize,
    state,
    thinned,
)

pytestmark = pytest.mark.usefixtures("x64")

STEPS, BATCH, INPUTS, FEATURES = 6, 3, 2, 4
NAMES = ("lstm", "ur_gru", "gato2", "om_lstm")


def build(name, **settings):
    return rg.CELLS[name](FEATURES, **dict(param_dtype=jnp.float64) | settings)


class Identity(rg.Cell):
    """Emits its input; its carry is one bare array."""

    features: int = INPUTS

    def init_params(self, key, in_features):
        return {}

    def initial(self, batch_shape):
        return jnp.zeros((*batch_shape, self.features))

    def step(self, params, carry, z_t):
        return z_t


@struct.dataclass
class Reveal(rg.CarryFn):
    """Adds its own noise to the carry that is kept, so that outputs show what was drawn."""

    @property
    def draws(self):
        return True

    def draw(self, key, steps, batch_shape):
        return jax.random.uniform(key, (steps, *batch_shape))

    def after(self, noise_t, prev, new):
        return new if noise_t is None else new + noise_t[..., None]


def reveal():
    return Reveal(p=0.5, field=None)


def variables(model, x, seed=5, **how):
    shapes = jax.eval_shape(
        lambda key: model.init({"params": key, "carry": key}, x, **how), jax.random.key(0)
    )
    return randomize(shapes, seed)


def apply(model, variables, *inputs, **how):
    """`model.apply`, compiled; keywords stay outside, as Python values."""
    return quick_jit(lambda variables, *x: model.apply(variables, *x, **how))(variables, *inputs)


@quick_jit(static_argnums=0, static_argnames=("reverse", "deterministic"))
def unroll(cell, params, xs, **how):
    return rg.unroll(cell, params, xs, **how)


# In the place of nn.RNN.


@pytest.mark.parametrize(
    "name", thinned([(name,) for name in NAMES], ("lstm", "gato2").__contains__, pytest.mark.long)
)
def test_rnn_starts_as_flaxs_rnn(name):
    """The same parameters from the same key."""
    x = array(8, BATCH, STEPS, INPUTS)
    ours, theirs = (layer(build(name)) for layer in (rg.RNN, nn.RNN))
    started = quick_jit(theirs.init)(jax.random.key(3), x)
    assert_identical(quick_jit(ours.init)(jax.random.key(3), x), started)


SETTINGS = (dict(), dict(reverse=True), dict(reverse=True, keep_order=True, time_major=True))


@pytest.mark.parametrize(
    ("name", "settings"),
    [*((name, dict()) for name in NAMES), *(("gato2", how) for how in SETTINGS[1:])],
    ids=str,
)
def test_rnn_is_flaxs_rnn(name, settings):
    """The same values, the same gradients."""
    x = array(8, BATCH, STEPS, INPUTS)
    x = jnp.swapaxes(x, 0, 1) if settings.get("time_major") else x
    ours, theirs = (layer(build(name), return_carry=True, **settings) for layer in (rg.RNN, nn.RNN))
    moved = variables(theirs, x)

    def results(model):
        def loss(moved, x):
            out = model.apply(moved, x)
            return dot(out, jax.tree.map(lambda leaf: array(17, *leaf.shape), out)), out

        return quick_jit(jax.grad(loss, (0, 1), has_aux=True))(moved, x)

    assert_close(results(ours), results(theirs))


@pytest.mark.parametrize(
    ("name", "reverse"),
    [("lstm", False), ("lstm", True), ("ur_gru", True), ("gato2", False), ("om_lstm", True)],
)
def test_lengths_agree_with_flax_where_flax_defines_them(name, reverse):
    """The same carries and the same outputs at valid steps; in padding ours are zeros."""
    x, lengths = array(8, BATCH, STEPS, INPUTS), jnp.asarray([STEPS, 1, 4])
    ours, theirs = (
        layer(build(name), return_carry=True, reverse=reverse) for layer in (rg.RNN, nn.RNN)
    )
    moved = variables(theirs, x)
    (carry, ys), (their_carry, their_ys) = (
        quick_jit(lambda moved, model=model: model.apply(moved, x, seq_lengths=lengths))(moved)
        for model in (ours, theirs)
    )
    valid = (np.arange(STEPS) < np.asarray(lengths)[:, None])[..., None]
    assert_close(carry, their_carry)
    assert_close(ys, np.where(valid, their_ys, 0.0))


@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, backend) for name in ("lstm", "gato1", "gato2") for backend in ("fused", "pallas")]
    + [("gato1", "newton")],
)
def test_every_backend_serves_a_layer(name, backend):
    x = array(8, BATCH, STEPS, INPUTS)
    moved = variables(rg.RNN(build(name)), x)

    def results(backend):
        layer = rg.RNN(build(name), backend=backend)

        def loss(moved):
            ys = layer.apply(moved, x)
            return dot(ys, array(17, *ys.shape))

        return quick_jit(jax.value_and_grad(loss))(moved)

    assert_close(results(backend), results("scan"))


@pytest.mark.parametrize("batch", [(), (BATCH,), (2, BATCH)])
@pytest.mark.parametrize("time_major", [False, True])
def test_where_time_and_batch_are(batch, time_major):
    """Masks are laid out as the inputs; the values do not depend on the layout."""
    cell, xs = build("lstm"), array(8, STEPS, *batch, INPUTS)
    draw = np.random.default_rng(0)
    valid, resets = (jnp.asarray(draw.random((STEPS, *batch)) < p) for p in (0.8, 0.2))
    params = parameters(cell, INPUTS)
    carry, ys = unroll(cell, params, xs, valid=valid, resets=resets)

    def place(array):
        return array if time_major else jnp.moveaxis(array, 0, len(batch))

    model = rg.RNN(cell, time_major=time_major, return_carry=True)
    got_carry, got_ys = apply(
        model, {"params": {"cell": params}}, place(xs), valid=place(valid), resets=place(resets)
    )
    assert_close((got_carry, got_ys), (carry, place(ys)), tolerance=1e-14)


@pytest.mark.parametrize("vectors", [1, 2])
def test_a_layer_adds_a_second_bias_where_there_is_one(vectors):
    """Whatever the cell starts with, as ``unroll`` does."""
    cell, xs = build("lstm", bias_vectors=3 - vectors), array(8, STEPS, BATCH, INPUTS)
    params = parameters(build("lstm", bias_vectors=vectors), INPUTS)
    assert ("recurrent_bias" in params) == (vectors == 2)
    ys = apply(rg.RNN(cell, time_major=True), {"params": {"cell": params}}, xs)
    assert_identical(ys, unroll(cell, params, xs)[1])


def test_outputs_are_turned_around_by_at_most_all_steps():
    """Under jit lengths have no values to check: more than T counts as T, less than 0 as 0."""
    model, x = rg.RNN(build("lstm"), reverse=True), array(8, BATCH, STEPS, INPUTS)
    held = variables(model, x)
    turned = quick_jit(lambda lengths: model.apply(held, x, seq_lengths=lengths))
    beyond = jnp.array([STEPS + 2, -3, STEPS + 1])
    assert_identical(turned(beyond), turned(jnp.array([STEPS, 0, STEPS])))


@pytest.mark.parametrize(("dtype", "steps"), [(np.uint32, STEPS), (np.int8, 200)])
def test_lengths_of_any_dtype_turn_outputs_around(dtype, steps):
    model, x = rg.RNN(build("lstm"), reverse=True), array(8, BATCH, steps, INPUTS)
    lengths = np.array([0, 2, 5])
    held = variables(model, x)
    expected = apply(model, held, x, seq_lengths=lengths.astype(np.int32))
    assert_identical(apply(model, held, x, seq_lengths=lengths.astype(dtype)), expected)
    assert not np.any(np.asarray(expected)[np.arange(steps) >= lengths[:, None]])


def test_call_arguments_override_attributes():
    cell, x = build("lstm"), array(8, BATCH, STEPS, INPUTS)
    plain, turned = (
        rg.RNN(cell),
        rg.RNN(cell, time_major=True, return_carry=True, reverse=True, keep_order=True),
    )
    moved, start = (
        variables(plain, x),
        rg.LSTMState(array(1, BATCH, FEATURES), array(2, BATCH, FEATURES)),
    )
    arguments = dict(
        time_major=True, return_carry=True, reverse=True, keep_order=True, initial_carry=start
    )
    expected = apply(turned, moved, jnp.swapaxes(x, 0, 1), initial_carry=start)
    assert_identical(apply(plain, moved, jnp.swapaxes(x, 0, 1), **arguments), expected)
    first = cell.apply({"params": moved["params"]["cell"]}, start, x[:, -1])
    assert_close(expected[1][-1], first[1], tolerance=1e-14)


@pytest.mark.parametrize(
    "how", [dict(remat=4), dict(unroll=2), dict(backend="scan"), dict(backend="fused")], ids=str
)
def test_attributes_reach_the_driver(how):
    cell, x = build("gato2"), array(8, BATCH, STEPS, INPUTS)
    moved = variables(rg.RNN(cell), x)
    assert_close(
        apply(rg.RNN(cell, **how), moved, x), apply(rg.RNN(cell), moved, x), tolerance=1e-13
    )


# Lifted, bridged.


def test_bidirectional_is_two_runs_side_by_side():
    cell, x, lengths = build("ur_gru"), array(8, BATCH, STEPS, INPUTS), jnp.asarray([STEPS, 1, 4])
    model = nn.Bidirectional(rg.RNN(cell), rg.RNN(build("ur_gru")), return_carry=True)
    moved = variables(model, x)
    (forward, backward), ys = apply(model, moved, x, seq_lengths=lengths)
    params = moved["params"]
    xs = jnp.swapaxes(x, 0, 1)
    runs = [
        unroll(cell, params[f"{name}_rnn"]["cell"], xs, lengths=lengths, reverse=name == "backward")
        for name in ("forward", "backward")
    ]
    assert_close((forward, backward), (runs[0][0], runs[1][0]), tolerance=1e-14)
    assert_close(
        jnp.swapaxes(ys, 0, 1), jnp.concatenate([runs[0][1], runs[1][1]], axis=-1), tolerance=1e-14
    )


def test_a_stack_in_both_directions_with_carry_functions():
    cells = build("lstm"), build("lstm")
    stacks = [rg.Stack(cells, carry_fns=(rg.Detach(p=0.5),)) for _ in range(2)]
    model, x = nn.Bidirectional(*stacks), array(8, BATCH, STEPS, INPUTS)
    moved = variables(model, x)
    plain = nn.Bidirectional(*(rg.Stack(cells) for _ in range(2)))
    ys = apply(model, moved, x, rngs={"carry": jax.random.key(0)})
    assert_close(ys, apply(plain, moved, x), tolerance=1e-14)
    assert ys.shape[-1] == 2 * FEATURES

    def slope(model):
        return quick_jit(
            jax.grad(lambda moved: model.apply(moved, x, rngs={"carry": jax.random.key(0)}).sum())
        )(moved)

    detached, whole = (jax.tree.leaves(slope(m)) for m in (model, plain))
    assert max(float(jnp.abs(a - b).max()) for a, b in zip(detached, whole, strict=True)) > 1e-3


def test_nn_scan_over_layers():
    """Three layers as one scanned layer with stacked parameters."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return rg.RNN(build("lstm"), name="rnn")(x), None

    scanned = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()
    x = array(8, BATCH, STEPS, FEATURES)
    moved = randomize(scanned.init(jax.random.key(0), x, None), 3)
    y, _ = apply(scanned, moved, x, None)
    for layer in range(3):
        x, _ = apply(Block(), jax.tree.map(lambda leaf, layer=layer: leaf[layer], moved), x, None)
    assert_close(y, x, tolerance=1e-14)


def test_nn_scan_over_time():
    """The cell itself under Flax's lifted scan, parameters broadcast."""
    cell, xs = build("gato2"), array(8, STEPS, BATCH, INPUTS)
    scanned = nn.scan(type(cell), variable_broadcast="params", split_rngs={"params": False})
    settings = {name: getattr(cell, name) for name in ("f", "g", "param_dtype")}
    params, start = parameters(cell, INPUTS), cell.initial((BATCH,))
    out = scanned(FEATURES, **settings).apply({"params": params}, start, xs)
    assert_close(out, unroll(cell, params, xs), tolerance=1e-13)


def test_vmap_over_models_and_over_examples():
    model, x = rg.RNN(build("ur_gru")), array(8, BATCH, STEPS, INPUTS)
    lanes = [variables(model, x, seed) for seed in (1, 2)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *lanes)
    apart = jnp.stack([apply(model, lane, x) for lane in lanes])
    assert_close(quick_jit(jax.vmap(model.apply, (0, None)))(stacked, x), apart, tolerance=1e-13)
    assert_close(
        quick_jit(jax.vmap(model.apply, (None, 0)))(lanes[0], x), apart[0], tolerance=1e-13
    )


def test_the_nnx_bridge():
    model, x = rg.RNN(build("ur_lstm")), array(8, BATCH, STEPS, INPUTS)
    bridged = nnx.bridge.ToNNX(model, rngs=nnx.Rngs(0)).lazy_init(x)
    params = nnx.to_pure_dict(nnx.state(bridged, nnx.Param))
    expected = apply(model, {"params": params}, x)
    assert_close(bridged(x), expected, tolerance=1e-14)
    slope = nnx.to_pure_dict(nnx.grad(lambda bridged: jnp.sum(bridged(x) ** 2))(bridged))
    assert_close(
        slope,
        quick_jit(jax.grad(lambda params: jnp.sum(model.apply({"params": params}, x) ** 2)))(
            params
        ),
    )


def test_bfloat16_layers():
    cells = [rg.CELLS["lstm"](8, dtype=jnp.bfloat16), rg.CELLS["gato2"](8, dtype=jnp.bfloat16)]
    model, x = (
        rg.Stack(cells, return_carry=True),
        array(8, BATCH, STEPS, INPUTS).astype(jnp.bfloat16),
    )
    moved = quick_jit(model.init)(jax.random.key(0), x)
    assert {leaf.dtype for leaf in jax.tree.leaves(moved)} == {jnp.dtype(jnp.float32)}
    carries, ys = apply(model, moved, x)
    assert ys.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(carries)} == {jnp.dtype(jnp.float32)}
    exact = rg.Stack([rg.CELLS["lstm"](8), rg.CELLS["gato2"](8)], return_carry=True)
    exact_carries, _ = apply(exact, moved, x.astype(jnp.float32))
    assert_close(
        carries, exact_carries, tolerance=STEPS * 12 * 2.0**-9
    )  # 12 roundings at 2^-9 a step


# Where the randomness of a layer comes from.


def test_a_layer_draws_from_its_own_collection():
    cell, x = build("lstm"), array(8, BATCH, STEPS, INPUTS)
    model = rg.RNN(cell, carry_fns=(rg.Zoneout(p=0.5),))
    moved = variables(model, x)
    one, same, other = (
        apply(model, moved, x, rngs={"carry": jax.random.key(seed)}) for seed in (0, 0, 1)
    )
    assert_identical(one, same)
    assert np.abs(one - other).max() > 1e-3
    with pytest.raises(ValueError, match="carry"):
        apply(model, moved, x)
    from_one_key = jax.jit(model.init)(jax.random.key(0), x)
    from_two = jax.jit(model.init)({"params": jax.random.key(0), "carry": jax.random.key(1)}, x)
    assert_identical(from_one_key, from_two)
    mean = apply(model, moved, x, deterministic=True)
    params, xs = moved["params"]["cell"], jnp.swapaxes(x, 0, 1)
    expected = unroll(cell, params, xs, carry_fns=model.carry_fns, deterministic=True)[1]
    assert_close(jnp.swapaxes(mean, 0, 1), expected, tolerance=1e-14)
    noise = (jnp.asarray(np.random.default_rng(0).random((STEPS, BATCH, FEATURES)) < 0.5),)
    expected = unroll(cell, params, xs, carry_fns=model.carry_fns, noise=noise)[1]
    assert_close(jnp.swapaxes(apply(model, moved, x, noise=noise), 0, 1), expected, tolerance=1e-14)


@pytest.mark.parametrize("shared", [False, True])
def test_layers_share_a_draw_or_have_their_own(shared):
    """Three layers that emit their input plus what they drew."""
    model = rg.Stack(
        [Identity()] * 3, carry_fns=(reveal(),), shared_noise=shared, return_carry=True
    )
    x = jnp.zeros((5, 1, INPUTS))
    carries, _ = apply(model, {}, x, rngs={"carry": jax.random.key(0)})
    sums = np.stack([carry[:, 0] for carry in carries])
    first, second, third = np.diff(np.concatenate([np.zeros((1, 5)), sums]), axis=0)
    if shared:
        np.testing.assert_allclose([second, third], [first, first], atol=1e-15)
    else:
        assert (
            min(
                np.abs(first - second).min(),
                np.abs(first - third).min(),
                np.abs(second - third).min(),
            )
            > 1e-4
        )


def test_layers_may_have_different_carry_functions():
    model = rg.Stack([Identity()] * 2, carry_fns=[(), (reveal(),)], return_carry=True)
    carries, _ = apply(model, {}, jnp.zeros((5, 1, INPUTS)), rngs={"carry": jax.random.key(0)})
    np.testing.assert_array_equal(carries[0], 0.0)
    assert float(jnp.abs(carries[1]).min()) > 0


# Stack.


@pytest.mark.parametrize(
    "how",
    [dict(), dict(reverse=True), dict(reverse=True, keep_order=True), dict(time_major=True)],
    ids=str,
)
def test_a_stack_is_its_layers_in_turn(how):
    cells = build("lstm"), build("ur_gru"), build("gato1")
    model, x = rg.Stack(cells, return_carry=True, **how), array(8, BATCH, STEPS, INPUTS)
    x = jnp.swapaxes(x, 0, 1) if how.get("time_major") else x
    lengths = jnp.asarray([STEPS, 2, 0])
    moved = variables(model, x)
    assert sorted(moved["params"]) == ["cells_0", "cells_1", "cells_2"]
    carries, ys = apply(model, moved, x, seq_lengths=lengths)
    y = x if how.get("time_major") else jnp.swapaxes(x, 0, 1)
    reverse = how.get("reverse", False)
    for index, cell in enumerate(cells):
        carry, y = unroll(
            cell, moved["params"][f"cells_{index}"], y, lengths=lengths, reverse=reverse
        )
        assert_close(carries[index], carry, tolerance=1e-13)
    y = np.asarray(y)
    if reverse and not how.get("keep_order"):  # in the order of processing, padding at the end
        y = np.stack(
            [
                np.concatenate([y[:n, row][::-1], y[n:, row]])
                for row, n in enumerate(lengths.tolist())
            ],
            axis=1,
        )
    assert_close(ys if how.get("time_major") else jnp.swapaxes(ys, 0, 1), y, tolerance=1e-13)
    again, _ = apply(model, moved, x, initial_carry=carries, seq_lengths=jnp.zeros(BATCH, int))
    assert_identical(again, carries)


def test_every_layer_of_a_stack_is_masked_and_reset():
    cells = build("lstm"), build("ur_gru")
    model, x = rg.Stack(cells, return_carry=True), array(8, BATCH, STEPS, INPUTS)
    draw = np.random.default_rng(0)
    valid, resets = (jnp.asarray(draw.random((BATCH, STEPS)) < p) for p in (0.7, 0.3))
    again = tuple(state(cell, (BATCH,), seed) for seed, cell in enumerate(cells))
    moved = variables(model, x)
    carries, ys = apply(model, moved, x, valid=valid, resets=resets, reset_carry=again)
    y = jnp.swapaxes(x, 0, 1)
    for index, cell in enumerate(cells):
        how = dict(valid=valid.T, resets=resets.T, reset_carry=again[index])
        carry, y = unroll(cell, moved["params"][f"cells_{index}"], y, **how)
        assert_close(carries[index], carry, tolerance=1e-13)
    assert_close(jnp.swapaxes(ys, 0, 1), y, tolerance=1e-13)


@pytest.mark.parametrize("time_major", [False, True])
def test_given_masks_are_factors_between_layers(time_major):
    """Instead of what would be drawn; laid out as the layers' outputs."""
    cells = build("lstm"), build("ur_gru"), build("gato1")
    model = rg.Stack(cells, dropout=0.9, time_major=time_major)
    x, *masks = (array(seed, STEPS, BATCH, width) for seed, width in ((8, INPUTS), (9, 4), (10, 4)))

    def laid_out(leaf):
        return leaf if time_major else jnp.swapaxes(leaf, 0, 1)

    moved = variables(model, laid_out(x))
    y, params = x, moved["params"]
    for index, cell in enumerate(cells):
        y = y * masks[index - 1] if index else y
        y = unroll(cell, params[f"cells_{index}"], y)[1]
    ys = apply(model, moved, laid_out(x), masks=[laid_out(mask) for mask in masks])
    assert_close(laid_out(ys), y, tolerance=1e-13)


@pytest.mark.parametrize(
    ("layers", "factors"), [(1, [1.0]), (2, [0.0, 1 / 0.7]), (3, [0.0, 1 / 0.7**2])]
)
def test_dropout_is_torchs(layers, factors):
    """On the output of each layer but the last, rescaled, drawn apart for each step, example and
    unit."""
    model = rg.Stack([Identity(features=50)] * layers, dropout=0.3)
    x = jnp.ones((20, 30, 50))
    y = np.asarray(apply(model, {}, x, rngs={"dropout": jax.random.key(0)}))
    assert_close(np.unique(np.round(y, 12)), np.asarray(factors), tolerance=1e-11)
    assert_identical(apply(model, {}, x, deterministic=True), x)
    if layers > 1:
        kept = (y > 0).astype(float)
        share = 0.7 ** (layers - 1)
        assert abs(kept.mean() - share) < 4 * np.sqrt(share * (1 - share) / y.size)
        for a, b in (
            (kept[1:], kept[:-1]),
            (kept[:, 1:], kept[:, :-1]),
            (kept[..., 1:], kept[..., :-1]),
        ):
            assert abs((a * b).mean() - share**2) < 4 * np.sqrt(share**2 / a.size)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: rg.Stack([]), ValueError, "cell"),
        (lambda: rg.Stack([Identity()], dropout=1.5), ValueError, "dropout"),
        (
            lambda: rg.Stack([Identity()] * 2, carry_fns=[()] * 3).apply({}, jnp.zeros((1, 2, 2))),
            ValueError,
            "3",
        ),
        (
            lambda: rg.Stack([Identity()] * 2).apply({}, jnp.zeros((1, 2, 2)), initial_carry=(0,)),
            ValueError,
            "initial_carry",
        ),
        (
            lambda: rg.Stack([Identity()] * 3).apply({}, jnp.zeros((1, 2, 2)), masks=[1]),
            ValueError,
            "masks needs one entry per layer but the last: 2, got 1",
        ),
        (lambda: rg.RNN(Identity()).apply({}, jnp.zeros(2)), ValueError, "time"),
        (
            lambda: rg.RNN(nn.LSTMCell(2)).init(jax.random.key(0), jnp.zeros((1, 2, 2))),
            TypeError,
            "FlaxCell",
        ),
        (lambda: rg.RNN(Identity(), variable_axes={"params": 0}), ValueError, "variable_axes"),
    ],
)
def test_wrong_use_is_one_sentence(make, error, words):
    with pytest.raises(error, match=words) as raised:
        make()
    assert "\n" not in str(raised.value)


# Trees, and the carry of a reset


class Sum(rg.Cell):
    """Adds up ``a`` and the mean of ``b``, hands out both names."""

    def init_params(self, key, in_features):
        return {"scale": jnp.ones((in_features["a"],))}

    def initial(self, batch_shape):
        return rg.HiddenState(jnp.zeros((*batch_shape, 2)))

    def project(self, params, x):
        return x["a"] * 1.0 + x["b"].mean(axis=-2)

    def step(self, params, carry, z_t):
        return rg.HiddenState(carry.h + z_t)

    def emit(self, params, carry, z):
        return {"h": carry.h, "pair": jnp.stack([carry.h, z], axis=-2)}


@pytest.mark.parametrize("time_major", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_trees_pass_through_layers(time_major, given):
    a, b = array(1, 3, 5, 2), array(2, 3, 5, 4, 2)  # [B, T, ...]
    wanted = np.cumsum(np.asarray(a + b.mean(axis=2)), axis=1)
    inputs = {"a": a, "b": b}
    if time_major:
        inputs = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), inputs)
    layer = rg.RNN(Sum(), time_major=time_major, reverse=True)
    start = rg.HiddenState(jnp.zeros((3, 2))) if given else None
    flipped = jax.tree.map(lambda x: jnp.flip(x, 0 if time_major else 1), inputs)
    ys, _ = layer.init_with_output(jax.random.key(0), flipped, initial_carry=start)
    ys = jax.tree.map(lambda y: jnp.swapaxes(y, 0, 1), ys) if time_major else ys
    assert_close(ys["h"], wanted)
    assert_close(ys["pair"][:, :, 0], wanted)


@pytest.mark.parametrize("time_major", [False, True])
def test_a_reset_takes_its_own_carry(time_major):
    cell = rg.GRU(4, param_dtype=jnp.float64)
    start, again = (state(cell, (3,), seed) for seed in (1, 2))
    xs = array(3, 3, 6, 2)
    resets = jnp.zeros((3, 6), bool).at[:, 4].set(True)
    xs_, resets_ = (jnp.swapaxes(a, 0, 1) if time_major else a for a in (xs, resets))
    for layer, around in ((rg.RNN(cell), lambda c: c), (rg.Stack([cell]), lambda c: (c,))):
        params = layer.init(jax.random.key(0), xs)
        how = dict(time_major=time_major, initial_carry=around(start))
        ys = layer.apply(params, xs_, resets=resets_, reset_carry=around(again), **how)
        ys = jnp.swapaxes(ys, 0, 1) if time_major else ys
        assert_close(ys[:, 4:], layer.apply(params, xs[:, 4:], initial_carry=around(again)))
        assert_close(ys[:, :4], layer.apply(params, xs[:, :4], initial_carry=around(start)))
