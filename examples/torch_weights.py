"""Weights of a torch.nn.LSTM, as NumPy arrays: loaded, run and written back; torch not needed."""

import jax.numpy as jnp
import numpy as np

import recurrent_gates as rg
from recurrent_gates import interop

INPUT, FEATURES, LAYERS, TIME, BATCH = 3, 5, 2, 7, 2
rng = np.random.default_rng(0)


def draw(*shape):
    return rng.uniform(-0.5, 0.5, shape).astype(np.float32)


# With torch: {name: value.numpy() for name, value in module.state_dict().items()}
state_dict = {}
for layer in range(LAYERS):
    rows, width = 4 * FEATURES, FEATURES if layer else INPUT
    state_dict[f"weight_ih_l{layer}"] = draw(rows, width)
    state_dict[f"weight_hh_l{layer}"] = draw(rows, FEATURES)
    state_dict[f"bias_ih_l{layer}"] = draw(rows)
    state_dict[f"bias_hh_l{layer}"] = draw(rows)

layers = interop.from_torch(state_dict)
stack = rg.Stack([rg.LSTM(FEATURES, bias_vectors=2) for _ in layers], time_major=True)
params = {f"cells_{i}": layer["forward"] for i, layer in enumerate(layers)}
xs = draw(TIME, BATCH, INPUT)
ys = stack.apply({"params": params}, xs)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


# torch.nn.LSTM's equations, rows of the weights in its order: i, f, g, o.
expected = xs
for layer in range(LAYERS):
    weights, h, c, outputs = state_dict, np.zeros((BATCH, FEATURES)), 0.0, []
    for x in expected:
        pre = x @ weights[f"weight_ih_l{layer}"].T + weights[f"bias_ih_l{layer}"]
        pre = pre + h @ weights[f"weight_hh_l{layer}"].T + weights[f"bias_hh_l{layer}"]
        i, f, g, o = np.split(pre, 4, axis=-1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        outputs.append(h)
    expected = np.stack(outputs)

difference = np.max(np.abs(np.asarray(ys) - expected))
assert difference < 1e-5, difference
round_trip = interop.to_torch(layers)
assert all(np.array_equal(round_trip[name], value) for name, value in state_dict.items())
assert jnp.isfinite(ys).all()
print(f"two layers of torch weights: outputs equal torch's equations to {difference:.0e}")
