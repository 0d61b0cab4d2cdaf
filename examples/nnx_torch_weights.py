"""Weights of a torch.nn.GRU, as NumPy arrays, in an NNX stack and back; torch is not needed."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

import recurrent_gates as rg
from recurrent_gates import interop

INPUT, FEATURES, LAYERS, TIME, BATCH = 3, 5, 2, 7, 2
draws = np.random.default_rng(0)


def draw(*shape):
    return draws.uniform(-0.5, 0.5, shape).astype(np.float32)


# With torch: {name: value.numpy() for name, value in module.state_dict().items()}
state_dict = {}
for layer in range(LAYERS):
    rows, width = 3 * FEATURES, FEATURES if layer else INPUT
    state_dict[f"weight_ih_l{layer}"] = draw(rows, width)
    state_dict[f"weight_hh_l{layer}"] = draw(rows, FEATURES)
    state_dict[f"bias_ih_l{layer}"] = draw(rows)
    state_dict[f"bias_hh_l{layer}"] = draw(rows)

layers = interop.from_torch(state_dict)
cells = [rg.GRU(FEATURES, bias_vectors=2) for _ in layers]
stack = rg.nnx.Stack(cells, INPUT, rngs=nnx.Rngs(0), time_major=True)
rg.nnx.load_linen(stack, {f"cells_{i}": layer["forward"] for i, layer in enumerate(layers)})
xs = draw(TIME, BATCH, INPUT)
ys = stack(xs)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


# torch.nn.GRU's equations, rows of the weights in its order: r, z, n.
expected = xs
for layer in range(LAYERS):
    weights, h, outputs = state_dict, np.zeros((BATCH, FEATURES)), []
    for x in expected:
        pre = x @ weights[f"weight_ih_l{layer}"].T + weights[f"bias_ih_l{layer}"]
        recurrent = h @ weights[f"weight_hh_l{layer}"].T + weights[f"bias_hh_l{layer}"]
        (r, z, n), (r_h, z_h, n_h) = (np.split(a, 3, axis=-1) for a in (pre, recurrent))
        z = sigmoid(z + z_h)
        h = (1 - z) * np.tanh(n + sigmoid(r + r_h) * n_h) + z * h
        outputs.append(h)
    expected = np.stack(outputs)

difference = np.max(np.abs(np.asarray(ys) - expected))
assert difference < 1e-5, difference
params = rg.nnx.to_linen(stack)
round_trip = interop.to_torch([{"forward": params[f"cells_{i}"]} for i in range(LAYERS)])
assert all(np.array_equal(round_trip[name], value) for name, value in state_dict.items())
assert jnp.isfinite(ys).all()
print(f"torch weights in an NNX stack: outputs equal torch's equations to {difference:.0e}")
