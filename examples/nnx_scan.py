"""nnx.scan over a cell, where a layer will not do: every output is fed back as the next input."""

import jax.numpy as jnp
from flax import nnx

import recurrent_gates as rg


class Generate(nnx.Module):
    """One step: a cell reads the last value, a linear layer makes the next one."""

    def __init__(self, cell, width, rngs):
        self.cell = rg.nnx.Cell(cell, width, rngs=rngs)
        self.readout = nnx.Linear(cell.features, width, rngs=rngs)

    def __call__(self, state):
        carry, value = state
        carry, hidden = self.cell(carry, value)
        value = self.readout(hidden)
        return (carry, value), value


STEPS, BATCH, WIDTH, FEATURES = 8, 2, 3, 16
generator = Generate(rg.JANET(FEATURES), WIDTH, nnx.Rngs(0))
first = generator.cell.initialize_carry((BATCH, WIDTH)), jnp.ones((BATCH, WIDTH))


@nnx.jit
@nnx.scan(in_axes=(None, nnx.Carry), out_axes=(nnx.Carry, 0), length=STEPS)
def generate(generator, state):
    return generator(state)


_, values = generate(generator, first)  # [T, B, WIDTH]
assert values.shape == (STEPS, BATCH, WIDTH)

# The same by hand, with the cell's pure methods.
cell, params = generator.cell.cell, generator.cell.params
carry, value = first
for step in range(STEPS):
    z = cell.project(params, value)
    carry = cell.step(params, carry, z)
    value = generator.readout(cell.emit(params, carry, z))
    assert jnp.allclose(values[step], value, atol=1e-5), step
print(f"{STEPS} steps fed back through nnx.scan equal the same steps by hand")
