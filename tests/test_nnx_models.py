"""Models of NNX layers: training, checkpoints, parameters from linen and back, wrong use."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import recurrent_gates as rg
from tests.support import array, assert_close, assert_identical, parameters, randomize
from tests.test_layers import BATCH, FEATURES, INPUTS, STEPS, build
from tests.test_nnx import layer

pytestmark = pytest.mark.usefixtures("x64")


# Training and checkpoints.


class Recall(nnx.Module):
    """Reads a sequence, answers with its first element."""

    def __init__(self, cell, rngs):
        self.recurrent = rg.nnx.RNN(cell, 1, rngs=rngs, carry_fns=(rg.Detach(0.25),))
        self.readout = nnx.Linear(FEATURES * 2, 1, rngs=rngs)

    def __call__(self, inputs):
        return self.readout(self.recurrent(inputs)[:, -1])


def test_training_leaves_frozen_gate_biases_as_they_are(x32):
    """nnx.Optimizer with weight decay and trainable_mask; h-detach; the error falls tenfold."""
    cell = rg.CELLS["ur_lstm"](FEATURES * 2, bias_mode="frozen")
    model = Recall(cell, nnx.Rngs(0))
    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        decayed = optax.masked(optax.adamw(2e-2, weight_decay=1e-4), rg.trainable_mask)
        optimizer = nnx.Optimizer(model, decayed, wrt=nnx.Param)

        @nnx.jit
        def update(model, optimizer, inputs):
            def loss(model):
                return jnp.mean((model(inputs) - inputs[:, 0]) ** 2)

            value, by = nnx.value_and_grad(loss)(model)
            optimizer.update(model, by)
            return value

        start = rg.nnx.to_linen(model)
        losses = [
            float(update(model, optimizer, jax.random.normal(key, (32, 5, 1))))
            for key in jax.random.split(jax.random.key(2), 200)
        ]
    end = rg.nnx.to_linen(model)
    assert np.mean(losses[:5]) > 0.5
    assert np.mean(losses[-10:]) < 0.05
    frozen = [tree["recurrent"]["cell"]["gate"].pop("frozen_b") for tree in (start, end)]
    assert_identical(*frozen)
    moved = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), start, end)
    assert all(jax.tree.leaves(moved))
    assert int(model.recurrent.rngs.carry.count.get_value()) == len(losses)


def test_the_mask_reads_states_and_dicts():
    module = rg.nnx.Cell(build("ur_lstm", bias_mode="frozen"), INPUTS, rngs=nnx.Rngs(0))
    state = nnx.state(module, nnx.Param)
    mask = nnx.to_pure_dict(rg.trainable_mask(state))
    assert mask == rg.trainable_mask(nnx.to_pure_dict(state))
    assert mask["gate"] == {"frozen_b": False}
    assert all(jax.tree.leaves(mask | {"gate": {}}))


class LinenTagger(nn.Module):
    def setup(self):
        self.embed = nn.Embed(7, INPUTS, param_dtype=jnp.float64)
        # Without parent=None linen would take the cells for this module's own, under other names.
        self.recurrent = rg.Stack([build(name, parent=None) for name in ("ur_lstm", "gru")])
        self.readout = nn.Dense(5, param_dtype=jnp.float64)

    def __call__(self, tokens):
        return self.readout(self.recurrent(self.embed(tokens)))


class Tagger(nnx.Module):
    def __init__(self, rngs):
        cells = [build("ur_lstm"), build("gru")]
        self.embed = nnx.Embed(7, INPUTS, param_dtype=jnp.float64, rngs=rngs)
        self.recurrent = rg.nnx.Stack(cells, INPUTS, rngs=rngs)
        self.readout = nnx.Linear(FEATURES, 5, param_dtype=jnp.float64, rngs=rngs)

    def __call__(self, tokens):
        return self.readout(self.recurrent(self.embed(tokens)))


def test_parameters_move_both_ways(tmp_path):
    """A whole model, through orbax, to the bit."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 7, (BATCH, STEPS)))
    linen, module = LinenTagger(), Tagger(nnx.Rngs(1))
    variables = randomize(linen.init(jax.random.key(0), tokens), 3)
    with ocp.StandardCheckpointer() as checkpoints:
        checkpoints.save(tmp_path / "linen", variables["params"])
        checkpoints.wait_until_finished()
        rg.nnx.load_linen(module, checkpoints.restore(tmp_path / "linen"))
        assert_identical(module(tokens), linen.apply(variables, tokens))

        rg.nnx.load_linen(module, randomize(variables["params"], 4))
        checkpoints.save(tmp_path / "nnx", rg.nnx.to_linen(module))
        checkpoints.wait_until_finished()
        restored = checkpoints.restore(tmp_path / "nnx", variables["params"])
    assert_identical(module(tokens), linen.apply({"params": restored}, tokens))


def test_a_state_is_restored_with_its_streams(tmp_path):
    """What a restored model draws is what the saved one would have drawn."""
    x = array(8, BATCH, STEPS, INPUTS)
    make = functools.partial(layer, build("gato1"), carry_fns=(rg.Zoneout(p=0.5, field="r"),))
    module = make(carry=3)
    module(x)
    graphdef, abstract = nnx.split(
        nnx.eval_shape(
            lambda: rg.nnx.RNN(build("gato1"), INPUTS, rngs=nnx.Rngs(0), carry_fns=module.carry_fns)
        )
    )
    with ocp.StandardCheckpointer() as checkpoints:
        checkpoints.save(tmp_path / "state", nnx.state(module))
        checkpoints.wait_until_finished()
        restored = nnx.merge(graphdef, checkpoints.restore(tmp_path / "state", abstract))
    assert_identical(restored(x), module(x))


def test_partitioned_parameters_are_arrays_with_names():
    """One layer, a stack and Flax's own layer, all as linen's; then back and forth."""
    kernel_init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    cell, x = build("lstm", kernel_init=kernel_init), array(8, BATCH, STEPS, INPUTS)
    linen = rg.RNN(cell)
    variables = linen.init(jax.random.key(0), x)
    module = rg.nnx.RNN(cell, INPUTS, rngs=nnx.Rngs(0))
    rg.nnx.load_linen(module, variables["params"])
    expected = linen.apply(variables, x)
    assert_identical(module(x), expected)
    assert_identical(rg.nnx.to_linen(module), nn.unbox(variables["params"]))
    spec = nnx.get_partition_spec(nnx.state(module))
    assert spec["cell"]["kernel"]["f"].get_value() == jax.sharding.PartitionSpec(None, "model")
    assert_close(nnx.RNN(module.cell)(x), expected)
    stack = rg.nnx.Stack([module.cell, build("gru", kernel_init=kernel_init)], rngs=nnx.Rngs(1))
    params = rg.nnx.to_linen(stack)
    expected = rg.Stack((cell, build("gru"))).apply({"params": params}, x)
    assert_close(stack(x), expected)


# Wrong use.


def module_of(**settings):
    return rg.nnx.RNN(build("lstm"), INPUTS, rngs=nnx.Rngs(params=0), **settings)


class Named(rg.Cell):
    def init_params(self, key, in_features):
        return {"cell": jnp.zeros(in_features)}


X = np.zeros((BATCH, STEPS, INPUTS))
DETACH = dict(carry_fns=(rg.Detach(p=0.5),))


@pytest.mark.parametrize(
    ("use", "error", "words"),
    [
        (lambda: rg.nnx.Cell(rg.LSTM, 3, rngs=nnx.Rngs(0)), TypeError, r"write LSTM\(features\)"),
        (lambda: rg.nnx.RNN(nn.LSTMCell(3), 3, rngs=nnx.Rngs(0)), TypeError, "FlaxCell"),
        (lambda: rg.nnx.Stack(["lstm"], 3, rngs=nnx.Rngs(0)), TypeError, "got str"),
        (lambda: rg.nnx.Cell(rg.LSTM(3), 3), TypeError, r"give rngs=nnx.Rngs\(seed\)"),
        (lambda: rg.nnx.Cell(rg.LSTM(3), 3, rngs=0), TypeError, "must be an nnx.Rngs.*got int"),
        (lambda: rg.nnx.Cell(rg.LSTM(3), 3, rngs=nnx.Rngs(carry=0)), ValueError, "no stream for"),
        (lambda: rg.nnx.RNN(rg.LSTM(3), rngs=nnx.Rngs(0)), ValueError, "Give in_features"),
        (lambda: rg.nnx.Cell(rg.LSTM(3), 0, rngs=nnx.Rngs(0)), ValueError, "positive width.*got 0"),
        (lambda: rg.nnx.Cell(rg.LSTM(3), None, rngs=nnx.Rngs(0)), ValueError, "got None"),
        (lambda: rg.nnx.Cell(Named(), 3, rngs=nnx.Rngs(0)), ValueError, "parameter 'cell'"),
        (lambda: rg.nnx.RNN(module_of().cell, 9), ValueError, "width 2, not 9"),
        (lambda: rg.nnx.Stack([module_of().cell] * 2), ValueError, "width 2, not 4"),
        (lambda: rg.nnx.Stack([]), ValueError, "at least one cell"),
        (lambda: module_of()(X[..., :1]), ValueError, "width 2, got shape"),
        (lambda: module_of()(X[0, 0]), ValueError, "time and feature"),
        (lambda: module_of().cell(rg.LSTM(4).initial(()), X[0, 0, :1]), ValueError, "width 2, got"),
        (lambda: module_of(**DETACH)(X), ValueError, r"stream 'carry'.*Rngs\(carry=seed\)"),
        (lambda: module_of()(X, rngs=0, **DETACH), TypeError, "must be an nnx.Rngs"),
        (lambda: module_of()(X, length=3), TypeError, "unexpected keyword argument 'length'"),
        (lambda: nnx.RNN(rg.CELLS["ur_lstm"](32))(X), TypeError, "recurrent_gates.nnx.Cell"),
        (
            lambda: module_of().cell.initialize_carry((1,), carry_init=jnp.zeros),
            ValueError,
            "initial_carry",
        ),
    ],
)
def test_wrong_use_is_one_sentence(use, error, words):
    with pytest.raises(error, match=words) as raised:
        use()
    assert "\n" not in str(raised.value)


def test_parameters_that_do_not_fit_change_nothing():
    module = module_of()
    good = rg.nnx.to_linen(module)
    wide = rg.nnx.to_linen(rg.nnx.RNN(build("lstm"), 9, rngs=nnx.Rngs(0)))
    gato = rg.nnx.to_linen(rg.nnx.RNN(build("gato1"), INPUTS, rngs=nnx.Rngs(0)))
    for params, words in (
        (
            {"params": good},
            r"expects one of shape \(4,\) .*f, got none .*variables\['params'\]",
        ),
        (wide, r"cell/kernel/f, got one of shape \(9, 4\)"),
        (gato, "expects one of shape .* got none"),
        (good | {"more": jnp.ones(1)}, r"expects none as parameter more, got one of shape \(1,\)"),
    ):
        with pytest.raises(ValueError, match=words):
            rg.nnx.load_linen(module, params)
    assert_identical(rg.nnx.to_linen(module), good)
    assert parameters(build("lstm"), INPUTS).keys() == good["cell"].keys()
