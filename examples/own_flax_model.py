"""UR-LSTM with h-detach inside one's own Flax model, trained and evaluated."""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import recurrent_gates as rg

VOCABULARY, BATCH, TIME, STEPS = 8, 32, 20, 400


class Tagger(nn.Module):
    """Reads tokens, answers with the first one at the end."""

    @nn.compact
    def __call__(self, tokens, *, train):
        x = nn.Embed(VOCABULARY, 8)(tokens)
        cell = rg.CELLS["ur_lstm"](32)
        layer = rg.RNN(cell, carry_fns=(rg.Detach(0.25),))
        return nn.Dense(VOCABULARY)(layer(x, deterministic=not train)[:, -1])


model, optimizer = Tagger(), optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-2))


def tokens_of(key):
    return jax.random.randint(key, (BATCH, TIME), 0, VOCABULARY)


def loss_of(params, tokens, key):
    logits = model.apply({"params": params}, tokens, train=True, rngs={"carry": key})
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 0])
    return jnp.mean(losses)


@jax.jit
def update(params, state, key):
    data_key, carry_key = jax.random.split(key)
    gradients = jax.grad(loss_of)(params, tokens_of(data_key), carry_key)
    changes, state = optimizer.update(gradients, state)
    return optax.apply_updates(params, changes), state


params_key, train_key, test_key = jax.random.split(jax.random.key(0), 3)
tokens = tokens_of(test_key)
params = model.init(params_key, tokens, train=False)["params"]
state = optimizer.init(params)
for key in jax.random.split(train_key, STEPS):
    params, state = update(params, state, key)
logits = model.apply({"params": params}, tokens, train=False)
accuracy = jnp.mean(jnp.argmax(logits, axis=-1) == tokens[:, 0])
assert accuracy > 0.9, accuracy
print(f"recall over {TIME} steps: accuracy {accuracy:.2f}, chance {1 / VOCABULARY:.3f}")
