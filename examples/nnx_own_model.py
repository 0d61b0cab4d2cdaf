"""UR-LSTM with h-detach inside one's own NNX model, trained with nnx.Optimizer and evaluated."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import recurrent_gates as rg

VOCABULARY, BATCH, TIME, STEPS = 8, 32, 20, 300


class Tagger(nnx.Module):
    """Reads tokens, answers with the first one at the end."""

    def __init__(self, rngs: nnx.Rngs):
        cell = rg.CELLS["ur_lstm"](32)
        self.embed = nnx.Embed(VOCABULARY, 8, rngs=rngs)
        self.recurrent = rg.nnx.RNN(cell, 8, rngs=rngs, carry_fns=(rg.Detach(0.25),))
        self.readout = nnx.Linear(32, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        return self.readout(self.recurrent(self.embed(tokens))[:, -1])


def tokens_of(key):
    return jax.random.randint(key, (BATCH, TIME), 0, VOCABULARY)


def loss_of(model, tokens):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens), tokens[:, 0])
    return jnp.mean(losses)


@nnx.jit
def update(model, optimizer, key):
    gradients = nnx.grad(loss_of)(model, tokens_of(key))
    optimizer.update(model, gradients)


model = Tagger(nnx.Rngs(params=4, carry=1))  # h-detach draws from the stream "carry"
descent = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-2))
optimizer = nnx.Optimizer(model, descent, wrt=nnx.Param)
train_key, test_key = jax.random.split(jax.random.key(2))
for key in jax.random.split(train_key, STEPS):
    update(model, optimizer, key)
model.eval()
tokens = tokens_of(test_key)
accuracy = jnp.mean(jnp.argmax(model(tokens), axis=-1) == tokens[:, 0])
assert accuracy > 0.9, accuracy
print(f"NNX, recall over {TIME} steps: accuracy {accuracy:.2f}, chance {1 / VOCABULARY:.3f}")
