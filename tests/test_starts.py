"""How parameters and carries start: in Flax as by hand, on a mesh, each in its own memory."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import recurrent_gates as rg
from tests.support import assert_close, assert_identical

pytestmark = pytest.mark.usefixtures("x64")


def test_the_lrus_gamma_is_made_of_nu_in_a_layer_too():
    """Orvieto et al., 3.4: gamma^2 = 1 - |lambda|^2."""
    cell = rg.LRU(64, param_dtype=jnp.float64)
    layer = rg.RNN(cell).init(jax.random.key(0), jnp.ones((1, 5, 3)))["params"]["cell"]
    for params in (cell.init_params(jax.random.key(0), 3), layer):
        modulus = jnp.exp(-jnp.exp(params["nu"]))
        assert_close(jnp.exp(2 * params["gamma"]), 1 - modulus**2)


class Twins(rg.Cell):
    """One draw in two entries."""

    def init_params(self, key, in_features):
        draw = jax.random.normal(key, (in_features,))
        return {"first": draw, "second": -draw}

    def initial(self, batch_shape):
        return jnp.zeros((*batch_shape, 1))

    def step(self, params, carry, z_t):
        return carry + (z_t @ (params["first"] + params["second"]))[..., None]


@pytest.mark.parametrize("start", ["init", "apply", "again"])
def test_entries_of_one_draw_agree_in_flax(start):
    """However a module comes to its parameters; those that are there need no key."""
    cell, x = Twins(), jnp.ones((2, 3))
    carry = cell.initial((2,))
    if start == "init":
        variables = cell.init(jax.random.key(0), carry, x)
    else:
        keys = {"params": jax.random.key(0)}
        _, variables = cell.apply({}, carry, x, rngs=keys, mutable=["params"])
    params = variables["params"]
    assert_identical(params["first"], -params["second"])
    if start == "again":
        _, again = cell.apply(variables, carry, x, mutable=["params"])
        assert_identical(again["params"], params)


@pytest.mark.parametrize(
    "name",
    [
        "ur_lstm",
        "gru",
        "gru_d",
        "rnn",
        "ur_gato",
        "mingru",
        "rg_lru",
        "lru",
        "slstm",
        "rmc",
        "dnc",
        "rma",
    ],
)
def test_every_array_of_a_start_can_be_donated(name):
    """No two leaves are one buffer."""
    settings = {"heads": 2} if name.endswith("rmc") else {}
    cell = rg.CELLS[name](8, **settings)
    for tree in (cell.init_params(jax.random.key(0), 3), cell.initial((2,))):
        leaves = jax.tree.leaves(tree)
        assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


def _partitioned(*names):
    return nn.with_partitioning(nn.initializers.normal(), names)


@pytest.mark.parametrize("name", ["lstm", "ur_gru", "slstm", "ur_mingru", "ur_gato"])
def test_boxed_biases_get_their_offsets_inside_the_box(name):
    """The draw plus the offset, and the box's axis names as they were."""
    key = jax.random.key(0)
    boxed, plain = (
        rg.CELLS[name](8, bias_init=init).init_params(key, 3)
        for init in (_partitioned("model"), nn.initializers.normal())
    )
    leaves = jax.tree.leaves(boxed, is_leaf=lambda leaf: isinstance(leaf, nn.Partitioned))
    assert {leaf.names for leaf in leaves if isinstance(leaf, nn.Partitioned)} == {("model",)}
    assert_identical(nn.unbox(boxed), plain)


@pytest.mark.parametrize("name", ["lstm", "gru", "slstm"])
def test_boxed_heads_have_an_axis_more(name):
    """Blocks are stacked along an axis that is not cut."""
    key = jax.random.key(0)
    boxed, plain = (
        rg.CELLS[name](8, heads=2, recurrent_kernel_init=init).init_params(key, 3)
        for init in (_partitioned("data", "model"), nn.initializers.normal())
    )
    boxes = boxed["recurrent_kernel"].values()
    assert {box.names for box in boxes} == {(None, "data", "model")}
    assert_identical(nn.unbox(boxed), plain)


@pytest.mark.parametrize("name", ["lstm", "ur_gru", "mingru"])
def test_boxed_initialisers_are_flaxs(name):
    """Partitioned parameters, as a mesh of devices needs them: the layer runs on both forms."""
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    layer, x = rg.RNN(rg.CELLS[name](8, kernel_init=init)), jnp.ones((2, 5, 3), jnp.float32)
    boxed = layer.init(jax.random.key(0), x)
    specs = {str(spec) for spec in jax.tree.leaves(nn.get_partition_spec(boxed))}
    assert any("model" in spec for spec in specs)
    expected = layer.apply(nn.unbox(boxed), x)
    assert_identical(layer.apply(boxed, x), expected)
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        assert_close(jax.jit(layer.apply)(boxed, x), expected, 1e-6)
