"""A cell under Flax's own nn.RNN, and the same parameters under this library's RNN layer."""

import jax
import jax.numpy as jnp
from flax import linen as nn

import recurrent_gates as rg

BATCH, TIME, INPUT, FEATURES = 4, 12, 3, 16
params_key, inputs_key = jax.random.split(jax.random.key(0))
inputs = jax.random.normal(inputs_key, (BATCH, TIME, INPUT))
lengths = jnp.array([12, 7, 3, 0])

cell = rg.CELLS["ur_lstm"](FEATURES)
theirs = nn.RNN(cell)
variables = theirs.init(params_key, inputs)
expected = theirs.apply(variables, inputs)  # [B, T, F]

# One tree of parameters serves both layers. Ours returns zeros at padding, and the state that
# each sequence had at its own end.
ours = rg.RNN(cell, return_carry=True)
carry, outputs = ours.apply(variables, inputs, seq_lengths=lengths)

valid = jnp.arange(TIME)[None, :, None] < lengths[:, None, None]
difference = jnp.max(jnp.abs(outputs - jnp.where(valid, expected, 0.0)))
assert difference < 1e-5, difference
assert jnp.allclose(carry.h[1], expected[1, 6], atol=1e-5)  # the second sequence has 7 steps
assert not jnp.any(carry.h[3])  # the last one has none
print(f"nn.RNN and RNN on one tree of parameters: outputs differ by at most {difference:.0e}")
