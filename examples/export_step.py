"""A jitted step through jax.export and back: what is loaded needs no cell and no parameters.

Needs ``pip install flatbuffers``.
"""

import jax
import jax.numpy as jnp
from jax import export

import recurrent_gates as rg

BATCH, INPUT, FEATURES, STEPS = 4, 3, 16, 6
cell = rg.CELLS["gato"](FEATURES)
params = cell.init_params(jax.random.key(0), INPUT)


@jax.jit
def step(carry: rg.GATOState, x: jax.Array) -> tuple[rg.GATOState, jax.Array]:
    z = cell.project(params, x)
    carry = cell.step(params, carry, z)
    return carry, cell.emit(params, carry, z)


carry = cell.initial((BATCH,))
exported = export.export(step)(carry, jnp.zeros((BATCH, INPUT)))
data = exported.serialize()  # bytes: write them to a file
served = export.deserialize(bytearray(data))

xs = jax.random.normal(jax.random.key(1), (STEPS, BATCH, INPUT))
outputs = []
for x in xs:
    carry, y = served.call(carry, x)
    outputs.append(y)
_, expected = rg.unroll(cell, params, xs)
difference = jnp.max(jnp.abs(jnp.stack(outputs) - expected))
assert isinstance(carry, rg.GATOState)
assert difference < 1e-5, difference
print(f"{STEPS} calls of an exported step of {len(data)} bytes equal unroll to {difference:.0e}")
