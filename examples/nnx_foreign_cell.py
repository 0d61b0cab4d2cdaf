"""Flax's own LSTMCell in an NNX layer: h-detach and resets for a cell from elsewhere."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

import recurrent_gates as rg

BATCH, TIME, INPUT, FEATURES = 4, 15, 3, 8
inputs = jax.random.normal(jax.random.key(0), (BATCH, TIME, INPUT))

foreign = nn.LSTMCell(FEATURES)
cell = rg.FlaxCell(foreign)  # its carry: c, h, and the output y
detach = (rg.Detach(1.0, field=1),)  # field 1 is h
layer = rg.nnx.RNN(cell, INPUT, rngs=nnx.Rngs(params=0, carry=1), carry_fns=detach)
params = rg.nnx.to_linen(layer)
expected = nn.RNN(foreign).apply({"params": params}, inputs)  # the same parameters
assert jnp.allclose(layer(inputs), expected, atol=1e-5)  # forward: nothing changes

resets = jnp.zeros((BATCH, TIME), bool).at[:, 9].set(True)
assert jnp.allclose(layer(inputs, resets=resets)[:, 9:], layer(inputs[:, 9:]), atol=1e-5)


def norm(layer):
    """The norm of the gradient of the last output through time."""
    slope = nnx.grad(lambda layer, inputs: jnp.sum(layer(inputs)[:, -1]), argnums=1)
    return jnp.linalg.norm(slope(layer, inputs)[:, 0])


detached = norm(layer)
layer.eval()  # nothing is drawn, so nothing is detached
plain = norm(layer)
assert 0 < detached != plain  # with h detached at every step the way back leads through c
print(f"NNX: gradient at the first input: {plain:.1e} plain, {detached:.1e} with h detached")
