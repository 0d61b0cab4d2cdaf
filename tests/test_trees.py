"""The driver over trees: inputs of several leaves and ranks, carries and outputs of any form."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import recurrent_gates as rg
from tests.support import array, assert_close, assert_identical, parameters
from tests.test_scan import BATCH, STEPS, run

pytestmark = pytest.mark.usefixtures("x64")


class Sensors(rg.Cell):
    """Reads an image and a reward, remembers a grid, hands out two things."""

    def init_params(self, key, in_features):
        draw = jax.random.normal
        return {
            "image": draw(key, (in_features["image"], 2)),
            "reward": draw(key, (in_features["reward"], 2)),
        }

    def initial(self, batch_shape):
        return {"grid": jnp.zeros((*batch_shape, 3, 2)), "steps": jnp.zeros((*batch_shape, 1))}

    def step(self, params, carry, z_t):
        seen = z_t["image"] @ params["image"] + (z_t["reward"] @ params["reward"])[..., None, :]
        return {"grid": jnp.tanh(carry["grid"] + seen), "steps": carry["steps"] + 1}

    def emit(self, params, carry, z):
        return {"grid": 2 * carry["grid"], "best": carry["grid"].max(axis=(-2, -1), keepdims=True)}


def sensors(*batch):
    """The cell, its parameters, inputs of STEPS, and both as nested loops see them."""
    cell = Sensors()
    xs = {"image": array(1, STEPS, *batch, 3, 5), "reward": array(2, STEPS, *batch, 4)}
    params = parameters(cell, {"image": 5, "reward": 4})
    return cell, params, xs


def by_hand(params, xs, start):
    """Grids of all steps of one example."""
    params = jax.tree.map(np.asarray, params)
    grid, grids = start, []
    for image, reward in zip(np.asarray(xs["image"]), np.asarray(xs["reward"]), strict=True):
        grid = np.tanh(grid + image @ params["image"] + reward @ params["reward"])
        grids.append(grid)
    return np.stack(grids)


@pytest.mark.parametrize("remat", [None, 3])
def test_trees_go_in_and_come_out(remat):
    cell, params, xs = sensors(BATCH)
    lengths = jnp.asarray([STEPS, 4, 0])
    carry, ys = run(cell, params, xs, remat=remat, lengths=lengths)
    for row, length in enumerate(lengths):
        one = jax.tree.map(lambda x, row=row, length=length: x[:length, row], xs)
        grids = by_hand(params, one, 0.0) if length else np.zeros((1, 3, 2))
        assert_close(carry["grid"][row], grids[-1])
        assert int(carry["steps"][row, 0]) == int(length)
        assert_close(ys["grid"][:length, row], 2 * grids[:length])
        assert_close(ys["best"][:length, row, 0, 0], grids[:length].max((1, 2)))
        assert not ys["grid"][length:, row].any()


def test_the_batch_is_what_all_leaves_share_and_the_carrys_where_there_is_one():
    cell, params, xs = sensors(2, BATCH)
    alone = run(cell, params, xs)
    assert alone[0]["grid"].shape == (2, BATCH, 3, 2)
    assert_identical(run(cell, params, xs, cell.initial((2, BATCH))), alone)
    # One leaf alone looks like a batch of (BATCH, 3): a carry says what it is.
    image = Images()
    images, kernel = xs["image"][:, 0], {"image": params["image"]}
    carry, _ = run(image, kernel, images, image.initial((BATCH,)))
    assert carry.shape == (BATCH, 3, 2)
    assert_close(carry, np.asarray(images @ params["image"]).sum(0))


class Images(rg.Cell):
    """Adds up images ``[*batch, 3, 5]``."""

    def init_params(self, key, in_features):
        return {"image": jnp.ones((in_features, 2))}

    def initial(self, batch_shape):
        return jnp.zeros((*batch_shape, 3, 2))

    def step(self, params, carry, z_t):
        return carry + z_t @ params["image"]


def test_a_step_of_arrays_of_several_axes():
    """The batch is that of the carry."""
    cell, x = Images(), array(3, BATCH, 3, 5)
    carry = cell.initial((BATCH,))
    variables = cell.init(jax.random.key(0), carry, x)
    new, y = cell.apply(variables, carry, x)
    assert_close(new, jnp.repeat(x.sum(axis=-1, keepdims=True), 2, axis=-1))
    assert_close(y, new)


@pytest.mark.parametrize(
    ("leaf", "batch"), [((STEPS, 2, 3, 5), (BATCH,)), ((STEPS - 1, BATCH, 3, 5), ())]
)
def test_leaves_that_do_not_fit_are_one_sentence(leaf, batch):
    cell, params, xs = sensors(BATCH)
    xs["image"] = array(3, *leaf)
    with pytest.raises(ValueError, match="xs") as error:
        rg.unroll(cell, params, xs, cell.initial(batch))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["lstm", "gato1", "mingru"])
def test_a_cell_that_is_part_of_a_module_runs(name, x32):
    """Flax binds it, and what is bound cannot be hashed."""

    class Model(nn.Module):
        cell: rg.Cell

        @nn.compact
        def __call__(self, xs):
            return rg.unroll(self.cell, self.cell.weights(xs.shape[-1]), xs)[1]

    cell, xs = rg.CELLS[name](4), jnp.ones((5, 2, 3), jnp.float32)
    model = Model(cell)
    held = model.init(jax.random.key(0), xs)
    params = held["params"]["cell"]
    assert_identical(model.apply(held, xs), rg.unroll(cell, params, xs)[1])


def test_a_carry_function_without_its_decorator_is_one_sentence(x32):
    class Scale(rg.CarryFn):
        def before(self, noise_t, carry):
            return carry

    cell, xs = rg.LSTM(4), jnp.ones((5, 2, 3), jnp.float32)
    params = cell.init_params(jax.random.key(0), 3)
    with pytest.raises(ValueError, match=r"^Scale needs the decorator @flax.struct.dataclass.$"):
        rg.unroll(cell, params, xs, carry_fns=[Scale(0.5)])
