"""Flax's own LSTMCell through FlaxCell: h-detach, lengths and resets for a cell from elsewhere."""

import jax
import jax.numpy as jnp
from flax import linen as nn

import recurrent_gates as rg

BATCH, TIME, INPUT, FEATURES = 4, 15, 3, 8
params_key, inputs_key, carry_key = jax.random.split(jax.random.key(0), 3)
inputs = jax.random.normal(inputs_key, (BATCH, TIME, INPUT))

foreign = nn.LSTMCell(FEATURES)
cell = rg.FlaxCell(foreign)  # its carry: c, h, and the output y
layer = rg.RNN(cell, carry_fns=(rg.Detach(1.0, field=1),))  # field 1 is h
variables = layer.init({"params": params_key, "carry": carry_key}, inputs)
expected = nn.RNN(foreign).apply(variables, inputs)  # the same parameters


def outputs_of(variables, inputs, **options):
    return layer.apply(variables, inputs, rngs={"carry": carry_key}, **options)


assert jnp.allclose(outputs_of(variables, inputs), expected, atol=1e-5)  # forward: nothing changes

resets = jnp.zeros((BATCH, TIME), bool).at[:, 9].set(True)
restart = outputs_of(variables, inputs[:, 9:], deterministic=True)
assert jnp.allclose(outputs_of(variables, inputs, resets=resets)[:, 9:], restart, atol=1e-5)


def norm(detach):
    """The norm of the gradient of the last output through time."""

    def loss(inputs):
        return jnp.sum(outputs_of(variables, inputs, deterministic=not detach)[:, -1])

    return jnp.linalg.norm(jax.grad(loss)(inputs)[:, 0])


plain, detached = norm(False), norm(True)
assert 0 < detached != plain  # with h detached at every step the way back leads through c
print(f"gradient at the first input: {plain:.1e} plain, {detached:.1e} with h detached")
