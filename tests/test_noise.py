"""What carry functions draw, whatever the key and whatever is drawn beside it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import recurrent_gates as rg
from tests.support import array, assert_close, assert_identical


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_noise_is_drawn_alike_whatever_is_drawn_beside_it(impl):
    """What an rbg key draws under vmap is of the first key that is mapped."""
    fns = [rg.Detach(0.5, per_example=True), rg.Zoneout(0.5)]
    keys = jax.random.split(jax.random.key(0, impl=impl), 3)

    def masks(key):
        mask, zoneout_keys = rg.draw_noise(fns, key, 4, (2,))
        return mask, jax.vmap(jax.vmap(jax.random.uniform))(zoneout_keys)

    together = jax.vmap(masks)(keys)
    for index in range(3):
        assert_identical(masks(keys[index]), jax.tree.map(lambda leaf, i=index: leaf[i], together))
    assert len(np.unique(together[1])) == 3 * 4 * 2


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_zoneout_s_gradient_is_of_its_own_masks_under_every_key(impl):
    cell, xs = rg.LSTM(4), array(3, 9, 2, 3)
    params, key = cell.init_params(jax.random.key(1), 3), jax.random.key(2, impl=impl)

    def gradient(backend, remat):
        def loss(params):
            fns = [rg.Zoneout(0.5)]
            out = rg.unroll(cell, params, xs, carry_fns=fns, key=key, backend=backend, remat=remat)
            return (out[1] ** 2).sum()

        return jax.jit(jax.grad(loss))(params)

    expected = gradient("scan", None)
    for backend, remat in (("scan", 2), ("fused", None), ("fused", 4)):
        assert_close(gradient(backend, remat), expected, 1e-6)


# Gradients of one's own.


@jax.custom_vjp
def clipped(x):
    """x, whose cotangent is clipped."""
    return x


clipped.defvjp(lambda x: (x, None), lambda _, d: (jnp.clip(d, -0.1, 0.1),))


@struct.dataclass
class Clip(rg.CarryFn):
    """Clips the gradient through a field, which is not linear in it."""

    alone: bool = struct.field(pytree_node=False, default=False)

    @property
    def elementwise(self):
        return self.alone

    @property
    def changes_values(self):
        return not self.alone

    def before(self, noise_t, carry):
        return carry._replace(**{self.field: clipped(getattr(carry, self.field))})


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(
    ("name", "field", "settings"),
    [("gru", "h", {}), ("gru", "h", {"heads": 2}), ("gato1", "r", {}), ("mingru", "h", {})],
)
def test_a_gradient_that_is_clipped_is_that_of_the_scan(name, field, settings, alone):
    """All that goes through a field is added before it is clipped, under every backend."""
    cell, xs = rg.CELLS[name](8, **settings), array(3, 7, 2, 3)
    params = cell.init_params(jax.random.key(1), 3)

    def gradient(backend):
        def loss(params, xs):
            fns = [Clip(0.0, field, alone)]
            return 3 * (rg.unroll(cell, params, xs, carry_fns=fns, backend=backend)[1] ** 2).sum()

        return jax.jit(jax.grad(loss, (0, 1)))(params, xs)

    expected = gradient("scan")
    served = ["auto"]
    for backend in ("fused", "parallel", "newton"):
        try:
            assert_close(gradient(backend), expected, 1e-5)
            served.append(backend)
        except ValueError as refusal:
            assert "does not serve this" in str(refusal)
    assert_close(gradient("auto"), expected, 1e-5)
    assert ("fused" in served) == (name == "gru")


class ClipGate(rg.Gate):
    """A gate whose gradient is not linear either."""

    def activate(self, pre):
        return super().activate({slot: clipped(value) for slot, value in pre.items()})


@pytest.mark.parametrize("make", [rg.MinGRU, rg.MinLSTM])
def test_a_gate_that_clips_its_gradient_is_that_of_the_scan(make):
    cell, xs = make(4, gate=ClipGate()), array(3, 7, 2, 3)
    params = cell.init_params(jax.random.key(1), 3)

    def gradient(backend):
        def loss(params):
            return 3 * (rg.unroll(cell, params, xs, backend=backend)[1] ** 2).sum()

        return jax.jit(jax.grad(loss))(params)

    assert_close(gradient("auto"), gradient("scan"), 1e-5)
    with pytest.raises(ValueError, match="ClipGate has a gradient of its own"):
        gradient("parallel")


@struct.dataclass
class Drawn(Clip):
    """Draws, and leaves values as they are."""

    @property
    def draws(self):
        return True

    def draw(self, key, steps, batch_shape):
        return jax.random.split(key, (steps, *batch_shape))


@pytest.mark.parametrize("backend", ["scan", "auto"])
def test_an_empty_sequence_with_a_function_of_one_s_own(backend):
    cell = rg.MinGRU(4)
    params, key = cell.init_params(jax.random.key(1), 3), jax.random.key(2)
    fns = [Drawn(0.0, "h", True)]
    xs = jnp.ones((0, 2, 3), jnp.float32)
    ys = rg.unroll(cell, params, xs, carry_fns=fns, key=key, backend=backend)[1]
    assert ys.shape == (0, 2, 4)
