"""A bidirectional NNX layer over sequences of several lengths: nnx.Bidirectional over two RNNs."""

import jax
import jax.numpy as jnp
from flax import nnx

import recurrent_gates as rg

BATCH, TIME, INPUT, FEATURES = 3, 10, 3, 8
inputs_key, padding_key = jax.random.split(jax.random.key(0))
inputs = jax.random.normal(inputs_key, (BATCH, TIME, INPUT))
lengths = jnp.array([10, 6, 1])

cell, rngs = rg.GRU(FEATURES), nnx.Rngs(0)
directions = [rg.nnx.RNN(cell, INPUT, rngs=rngs) for _ in range(2)]
layer = nnx.Bidirectional(*directions, rngs=rngs)
outputs = layer(inputs, seq_lengths=lengths)
assert outputs.shape == (BATCH, TIME, 2 * FEATURES)  # forward features, then backward ones

# Neither direction sees padding, whatever it holds.
valid = jnp.arange(TIME)[None, :, None] < lengths[:, None, None]
noisy_inputs = jnp.where(valid, inputs, jax.random.normal(padding_key, inputs.shape))
assert jnp.array_equal(outputs, layer(noisy_inputs, seq_lengths=lengths))

# The backward half at step 0 has read the whole sequence, the forward half only its first input.
changed_inputs = inputs.at[0, -1].add(1.0)
change = jnp.abs(layer(changed_inputs, seq_lengths=lengths) - outputs)[0, 0]
forward, backward = change[:FEATURES], change[FEATURES:]
assert not jnp.any(forward)
assert jnp.all(backward > 0)
print(f"NNX: a change of the last input moves the backward output at 0 by {backward.max():.1e}")
