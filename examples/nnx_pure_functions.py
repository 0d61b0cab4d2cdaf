"""An NNX layer in a pure training step: nnx.split, nnx.merge, and optax without nnx.Optimizer."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import recurrent_gates as rg

BATCH, TIME, FEATURES, STEPS = 32, 16, 32, 300
layer = rg.nnx.RNN(rg.CELLS["gato"](FEATURES), 1, rngs=nnx.Rngs(0), time_major=True)
graphdef, params, other_state = nnx.split(layer, nnx.Param, ...)
optimizer = optax.adam(1e-2)


def loss_of(params, readout, xs):
    """Squared error of recalling the first input after the last; the mean alone scores 1/3."""
    outputs = nnx.merge(graphdef, params, other_state)(xs)
    return jnp.mean((outputs[-1] @ readout - xs[0]) ** 2)


@jax.jit
def update(trained, state, key):
    xs = jax.random.uniform(key, (TIME, BATCH, 1), minval=-1.0, maxval=1.0)
    loss, gradients = jax.value_and_grad(lambda trained: loss_of(*trained, xs))(trained)
    changes, state = optimizer.update(gradients, state)
    return optax.apply_updates(trained, changes), state, loss


trained = params, jnp.zeros((FEATURES, 1))
state = optimizer.init(trained)
losses = []
for key in jax.random.split(jax.random.key(1), STEPS):
    trained, state, loss = update(trained, state, key)
    losses.append(loss)
error = jnp.mean(jnp.stack(losses[-10:]))
assert error < 0.05, error
print(f"NNX, split: recall over {TIME} steps: squared error {error:.3f}, no memory {1 / 3:.3f}")
