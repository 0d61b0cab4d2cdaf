"""A trained NNX cell's step through jax.export and back: what is loaded needs no Flax.

Needs ``pip install flatbuffers``.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import export

import recurrent_gates as rg

BATCH, INPUT, FEATURES, STEPS = 4, 3, 16, 6
layer = rg.nnx.RNN(rg.CELLS["gato"](FEATURES), INPUT, rngs=nnx.Rngs(0), time_major=True)
cell = layer.cell

carry = cell.initialize_carry((BATCH, INPUT))
exported = export.export(jax.jit(lambda carry, x: cell(carry, x)))(carry, jnp.zeros((BATCH, INPUT)))
data = exported.serialize()  # bytes, the parameters among them: write them to a file
served = export.deserialize(bytearray(data))

xs = jax.random.normal(jax.random.key(1), (STEPS, BATCH, INPUT))
outputs = []
for x in xs:
    carry, y = served.call(carry, x)
    outputs.append(y)
difference = jnp.max(jnp.abs(jnp.stack(outputs) - layer(xs)))
assert isinstance(carry, rg.GATOState)
assert difference < 1e-5, difference
print(f"NNX: {STEPS} calls of an exported step of {len(data)} bytes equal its layer")
