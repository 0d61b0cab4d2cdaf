"""A cell of one's own in NNX: three methods, then nnx.RNN, our layer, and an ensemble of it."""

import jax
import jax.numpy as jnp
from flax import nnx

import recurrent_gates as rg


class Leaky(rg.Cell):
    """h_t = decay * h_tm1 + tanh(x_t W)."""

    features: int = 8
    decay: float = 0.9

    def init_params(self, key, in_features):
        return {"W": jax.random.normal(key, (in_features, self.features))}

    def initial(self, batch_shape):
        return rg.HiddenState(jnp.zeros((*batch_shape, self.features)))

    def step(self, params, carry, z_t):
        return rg.HiddenState(self.decay * carry.h + jnp.tanh(z_t @ params["W"]))


inputs = jax.random.normal(jax.random.key(0), (4, 20, 3))  # [B, T, D]
rngs = nnx.Rngs(params=0, carry=5)
layer = rg.nnx.RNN(Leaky(), 3, rngs=rngs, carry_fns=(rg.Detach(0.3),))
outputs = layer(inputs)
assert isinstance(layer.cell.W, nnx.Param)
assert jnp.allclose(nnx.RNN(layer.cell)(inputs), outputs, atol=1e-6)  # detaching keeps values


@nnx.grad(argnums=1)
def slope(layer, inputs):
    return jnp.sum(layer(inputs)[:, -1] ** 2)


reach = int(jnp.sum(jnp.any(slope(layer, inputs) != 0, axis=(0, 2))))
assert reach < inputs.shape[1]  # this cell has no other path back in time than h


@nnx.split_rngs(splits=5)
@nnx.vmap
def ensemble(rngs):
    return rg.nnx.RNN(Leaky(), 3, rngs=rngs)


members = ensemble(nnx.Rngs(1))
results = nnx.vmap(lambda member, inputs: member(inputs), in_axes=(0, None))(members, inputs)
assert results.shape == (5, *outputs.shape)
print(f"Leaky in NNX: the gradient reaches {reach} of 20 inputs; an ensemble of {len(results)}")
