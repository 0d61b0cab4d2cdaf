"""A layer inside an NNX model, through flax.nnx.bridge.ToNNX; trained with optax."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.nnx import bridge

import recurrent_gates as rg

BATCH, TIME, FEATURES, STEPS = 32, 10, 16, 200


class Recall(nnx.Module):
    """Reads a sequence, answers with its first element."""

    def __init__(self, rngs: nnx.Rngs):
        layer = rg.RNN(rg.GATO(FEATURES), carry_fns=(rg.Detach(0.25, field="r"),))
        example = jnp.zeros((BATCH, TIME, 1))
        self.recurrent = bridge.lazy_init(bridge.ToNNX(layer, rngs=rngs), example)
        self.readout = nnx.Linear(FEATURES, 1, rngs=rngs)

    def __call__(self, inputs):
        return self.readout(self.recurrent(inputs)[:, -1])


def loss_of(model, inputs):
    return jnp.mean((model(inputs) - inputs[:, 0]) ** 2)


@nnx.jit
def update(model, optimizer, inputs):
    loss, gradients = nnx.value_and_grad(loss_of)(model, inputs)
    optimizer.update(model, gradients)
    return loss


model = Recall(nnx.Rngs(params=0, carry=1))  # h-detach draws from the stream "carry"
optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
losses = []
for key in jax.random.split(jax.random.key(2), STEPS):
    losses.append(update(model, optimizer, jax.random.normal(key, (BATCH, TIME, 1))))
error = jnp.mean(jnp.stack(losses[-10:]))
assert error < 0.2, error
print(f"NNX model, recall over {TIME} steps: squared error {error:.2f}, with no memory 1")
