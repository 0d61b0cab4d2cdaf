"""A cell under Flax's own nnx.RNN, and the same parameters under this library's NNX layer."""

import jax
import jax.numpy as jnp
from flax import nnx

import recurrent_gates as rg

BATCH, TIME, INPUT, FEATURES = 4, 12, 3, 16
inputs = jax.random.normal(jax.random.key(0), (BATCH, TIME, INPUT))
lengths = jnp.array([12, 7, 3, 0])

cell = rg.nnx.Cell(rg.CELLS["ur_lstm"](FEATURES), INPUT, rngs=nnx.Rngs(0))
expected = nnx.RNN(cell)(inputs)  # [B, T, F]

# One cell serves both layers. Ours returns zeros at padding, and the state that each sequence
# had at its own end.
carry, outputs = rg.nnx.RNN(cell, return_carry=True)(inputs, seq_lengths=lengths)

valid = jnp.arange(TIME)[None, :, None] < lengths[:, None, None]
difference = jnp.max(jnp.abs(outputs - jnp.where(valid, expected, 0.0)))
assert difference < 1e-5, difference
assert jnp.allclose(carry.h[1], expected[1, 6], atol=1e-5)  # the second sequence has 7 steps
assert not jnp.any(carry.h[3])  # the last one has none

# Linen has the same names, so checkpoints move both ways.
params = rg.nnx.to_linen(nnx.RNN(cell))
linen = rg.RNN(cell.cell).apply({"params": params}, inputs, seq_lengths=lengths)
assert jnp.array_equal(linen, outputs)
print(f"nnx.RNN and our NNX layer on one cell: outputs differ by at most {difference:.0e}")
