"""nn.scan over a cell, where a layer will not do: every output is fed back as the next input."""

import jax
import jax.numpy as jnp
from flax import linen as nn

import recurrent_gates as rg


class Generate(nn.Module):
    """One step: a cell reads the last value, a linear layer makes the next one."""

    cell: rg.Cell

    @nn.compact
    def __call__(self, state, _):
        carry, value = state
        carry, hidden = self.cell(carry, value)
        value = nn.Dense(value.shape[-1])(hidden)
        return (carry, value), value


STEPS, BATCH, WIDTH, FEATURES = 8, 2, 3, 16
cell = rg.JANET(FEATURES)
generator = nn.scan(
    Generate, variable_broadcast="params", split_rngs={"params": False}, length=STEPS
)(cell)
state = cell.initial((BATCH,)), jnp.ones((BATCH, WIDTH))
variables = generator.init(jax.random.key(0), state, None)
_, values = jax.jit(generator.apply)(variables, state, None)  # [T, B, WIDTH]
assert values.shape == (STEPS, BATCH, WIDTH)

# The same by hand, with the cell's pure methods.
carry, value = state
params, dense = variables["params"]["cell"], variables["params"]["Dense_0"]
for step in range(STEPS):
    z = cell.project(params, value)
    carry = cell.step(params, carry, z)
    value = cell.emit(params, carry, z) @ dense["kernel"] + dense["bias"][None]
    assert jnp.allclose(values[step], value, atol=1e-5), step
print(f"{STEPS} steps fed back through nn.scan equal the same steps by hand")
