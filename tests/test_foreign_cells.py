"""Cells of Flax and of other people, behind ``FlaxCell``."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import recurrent_gates as rg
from tests.support import array, assert_close, assert_identical, dot, quick_jit
from tests.test_layers import BATCH, FEATURES, INPUTS, STEPS, build, variables

pytestmark = pytest.mark.usefixtures("x64")


def test_a_foreign_cell_behind_the_adapter():
    """nn.LSTMCell in our layer equals itself in nn.RNN, with its gradient detached by index."""
    foreign, x = nn.LSTMCell(FEATURES, param_dtype=jnp.float64), array(8, BATCH, STEPS, INPUTS)
    ours, theirs = rg.RNN(rg.FlaxCell(foreign)), nn.RNN(foreign)
    moved = variables(theirs, x)
    inner = moved["params"]["cell"]
    mine = variables(ours, x)
    assert jax.tree.map(jnp.shape, mine["params"]["cell"]) == jax.tree.map(jnp.shape, inner)
    wanted = array(9, BATCH, STEPS, FEATURES)

    def slope(model, **how):
        return quick_jit(jax.grad(lambda moved: dot(model.apply(moved, x, **how), wanted)))(moved)

    assert_close(slope(ours), slope(theirs))
    slots = {"i": "i", "f": "f", "u": "g", "o": "o"}
    native = {
        "kernel": {slot: inner[f"i{name}"]["kernel"] for slot, name in slots.items()},
        "recurrent_kernel": {slot: inner[f"h{name}"]["kernel"] for slot, name in slots.items()},
        "bias": {slot: inner[f"h{name}"]["bias"] for slot, name in slots.items()},
    }
    masks = (jnp.asarray([0, 1, 1, 0, 1, 0], bool),)
    native_slope = quick_jit(
        jax.grad(
            lambda native: dot(
                rg.RNN(build("lstm"), carry_fns=(rg.Detach(p=0.5),)).apply(
                    {"params": {"cell": native}}, x, noise=masks
                ),
                wanted,
            )
        )
    )(native)
    detached = slope(ours, carry_fns=(rg.Detach(p=0.5, field=1),), noise=masks)["params"]["cell"]
    for slot, name in slots.items():
        assert_close(detached[f"i{name}"]["kernel"], native_slope["kernel"][slot])
        assert_close(detached[f"h{name}"]["kernel"], native_slope["recurrent_kernel"][slot])


FOREIGN = {
    nn.LSTMCell: 1,
    nn.OptimizedLSTMCell: 1,
    nn.GRUCell: 0,
    nn.SimpleCell: 0,
    nn.MGUCell: 0,
}


@pytest.mark.parametrize("drawn", [False, True], ids=["mean", "drawn"])
@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_cell_emits_what_zoneout_kept(kind, drawn, x32):
    """h as a loop over Flax's cell has it, mixed by hand, is the output and what is fed back."""
    module, field, p = kind(FEATURES), FOREIGN[kind], 0.4
    cell, xs = rg.FlaxCell(module), jax.random.normal(jax.random.key(1), (STEPS, BATCH, INPUTS))
    params = cell.init_params(jax.random.key(0), INPUTS)
    kept = np.random.default_rng(0).random((STEPS, BATCH, FEATURES)) < p
    how = dict(noise=(jnp.asarray(kept),)) if drawn else dict(deterministic=True)
    carries, ys = rg.unroll(
        cell, params, xs, carry_fns=(rg.Zoneout(p, field),), return_carries="all", **how
    )
    carry = module.initialize_carry(jax.random.key(0), xs[0].shape)
    for t, x in enumerate(xs):
        new, _ = module.apply({"params": params}, carry, x)
        old, new = jax.tree.leaves(carry), jax.tree.leaves(new)
        share = np.where(kept[t], 1.0, 0.0) if drawn else p
        new[field] = jnp.asarray(share * old[field] + (1 - share) * new[field], jnp.float32)
        carry = jax.tree.unflatten(jax.tree.structure(carry), new)
        assert_close(ys[t], new[field], 1e-6)
        assert_close(jax.tree.map(lambda leaf, t=t: leaf[t], carries), (*new, new[field]), 1e-6)


class WithHead(nn.RNNCellBase):
    """A foreign cell whose output is made from its state and is none of its fields."""

    @nn.compact
    def __call__(self, carry, x):
        carry = jnp.tanh(nn.Dense(3)(x) + carry)
        return carry, nn.Dense(3)(carry)

    @nn.nowrap
    def initialize_carry(self, rng, input_shape):
        return jnp.zeros((*input_shape[:-1], 3))

    @property
    def num_feature_axes(self):
        return 1


def test_zoneout_that_would_not_reach_the_output_is_refused(x32):
    cell, xs = rg.FlaxCell(WithHead()), jnp.ones((4, 2, 3))
    params = cell.init_params(jax.random.key(0), 3)
    with pytest.raises(ValueError, match=r"WithHead.*output") as error:
        rg.unroll(cell, params, xs, carry_fns=(rg.Zoneout(0.5, 0),), deterministic=True)
    assert "\n" not in str(error.value)
    carries, ys = rg.unroll(
        cell,
        params,
        xs,
        carry_fns=(rg.Zoneout(0.5, -1),),
        deterministic=True,
        return_carries="all",
    )
    _, plain = rg.unroll(cell, params, xs)
    assert_close(ys[0], plain[0] / 2, 1e-6)  # the output alone, of a start at zero
    assert_close(carries[1], ys, 1e-6)


@pytest.mark.parametrize("width", ["x32", "x64"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_a_foreign_cell_keeps_the_dtype_of_its_parameters(kind, dtype, width, request):
    """Whatever JAX's own is; Flax's orthogonal kernels are not made in 16 bits on a CPU."""
    if width == "x32":
        request.getfixturevalue("x32")
    normal = nn.initializers.lecun_normal()
    module = kind(FEATURES, param_dtype=dtype, recurrent_kernel_init=normal)
    cell, xs = rg.FlaxCell(module), array(8, STEPS, BATCH, INPUTS).astype(dtype)
    params = cell.init_params(jax.random.key(0), INPUTS)
    carry, ys = rg.unroll(cell, params, xs)
    assert {leaf.dtype for leaf in jax.tree.leaves((carry, ys))} == {jnp.dtype(dtype)}
    expected = nn.RNN(module, time_major=True).apply({"params": {"cell": params}}, xs)
    assert_identical(ys, expected)
    _, mean = rg.unroll(cell, params, xs, carry_fns=(rg.Zoneout(0.0, -1),), deterministic=True)
    assert_identical(mean, ys)
