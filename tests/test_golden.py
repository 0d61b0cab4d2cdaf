"""Every file of golden/ in values and all gradients, on both backends: numbers that others
computed."""

import itertools
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import recurrent_gates as rg
from tests import reference
from tests.support import assert_close, dot, thinned, users_jit

pytestmark = pytest.mark.usefixtures("x64")

FOLDER = pathlib.Path(__file__).parent / "golden"
BACKENDS = ("scan", "fused")
LSTM_ROWS = ("i", "f", "o", "u")
UR_ROWS = ("f", "r", "u", "o")


def load(name):
    with np.load(FOLDER / f"{name}.npz") as file:
        return dict(file)


def tree(data, prefix, rows, input_map, hidden_map, split=None):
    """Another implementation's two linear maps, as this library's tree: role, then slot, weights
    [in, out]."""
    split = split or (lambda matrix: dict(zip(rows, np.split(matrix, len(rows)), strict=True)))
    named = {
        "kernel": data[f"{prefix}.{input_map}.weight"],
        "bias": data[f"{prefix}.{input_map}.bias"],
        "recurrent_kernel": data[f"{prefix}.{hidden_map}.weight"],
        "recurrent_bias": data[f"{prefix}.{hidden_map}.bias"],
    }
    return {
        role: {slot: jnp.asarray(block.T) for slot, block in split(m).items()}
        for role, m in named.items()
    }


def split_on_lstm(features, chunk):
    """ON-LSTM's rows: master input, master forget, then out, cell, in, forget."""
    masters = features // chunk
    ends = np.cumsum([masters, masters, features, features, features])
    return lambda matrix: dict(
        zip(("mi", "mf", "o", "u", "i", "f"), np.split(matrix, ends), strict=True)
    )


def problem(name):
    """The cell, its parameters, the expected gradients of them, and the carry functions with
    their noise."""
    data = load(name)
    features = data["ys"].shape[-1]
    settings = dict(features=features, bias_vectors=2, param_dtype=jnp.float64)
    carry_fns, noise = (), None
    if name == "ur_lstm":
        cell = rg.CELLS["ur_lstm"](**settings)
        params, grads = (
            tree(data, prefix, UR_ROWS, "igates", "hgates") for prefix in ("param", "grad")
        )
        params["gate"] = {"b": jnp.asarray(data["param.forget_bias"])}
        grads["gate"] = {"b": data["grad.forget_bias"]}
    elif name.startswith("on_lstm"):
        chunk = int(data["chunk"])
        cell = rg.CELLS["on_lstm"](**settings, downsize=chunk)
        split = split_on_lstm(features, chunk)
        params, grads = (
            tree(data, prefix, None, "ih.0", "hh", split) for prefix in ("param", "grad")
        )
    else:
        cell = rg.CELLS["lstm"](**settings)
        params, grads = (
            tree(data, prefix, LSTM_ROWS, "i2h", "h2h") for prefix in ("param", "grad")
        )
        if "detach_mask" in data:
            carry_fns = (rg.Detach(p=0.5, field="c" if "c_detach" in name else "h"),)
            noise = (jnp.asarray(data["detach_mask"] == 1),)
    return cell, params, grads, data, carry_fns, noise


def initial(data):
    flat = data["x"].shape[1], data["ys"].shape[-1]
    return rg.LSTMState(
        c=jnp.asarray(data["state0_1"].reshape(flat)), h=jnp.asarray(data["state0_0"])
    )


CELLS = ("lstm_plain", "lstm_h_detach", "lstm_h_detach_all", "lstm_c_detach", "ur_lstm")
CELLS += ("on_lstm_chunk1", "on_lstm_chunk2", "on_lstm_chunk4")


@pytest.mark.parametrize(
    ("name", "backend"),
    thinned(
        itertools.product(CELLS, BACKENDS),
        lambda name, backend: (
            name not in ("lstm_h_detach_all", "on_lstm_chunk1", "on_lstm_chunk4")
            or (name, backend) == ("on_lstm_chunk4", "scan")
        ),
        pytest.mark.long,
    ),
)
def test_one_layer(name, backend):
    cell, params, grads, data, carry_fns, noise = problem(name)
    carry = initial(data)

    @users_jit
    def run(params, x, carry):
        def loss(params, x, carry):
            carries, ys = rg.unroll(
                cell,
                params,
                x,
                carry,
                carry_fns=carry_fns,
                noise=noise,
                return_carries="all",
                backend=backend,
            )
            return dot(ys, jnp.asarray(data["cotangent"])), (carries, ys)

        return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(params, x, carry)

    (loss, (carries, ys)), (grad_params, grad_x, grad_carry) = run(
        params, jnp.asarray(data["x"]), carry
    )
    shape = carry.c.shape
    assert_close(ys, data["ys"])
    assert_close(carries.h, data["ys"])
    assert_close(carries.c, data["cs"].reshape(carries.c.shape))
    assert_close(loss, data["loss"])
    assert_close(grad_params, grads)
    assert_close(grad_x, data["grad_x"])
    assert_close(grad_carry.h, data["grad_state0_0"])
    assert_close(grad_carry.c, data["grad_state0_1"].reshape(shape))


@pytest.mark.parametrize("name", CELLS)
def test_the_numpy_reference_agrees(name):
    """The equations that the other tests lean on give the same outputs as the other
    implementations."""
    _, params, _, data, _, _ = problem(name)
    gate = {"ur": "ur", "on": "om"}.get(name.split("_")[0], "standard")
    how = {"downsize": int(data["chunk"])} if "chunk" in data else {}
    params = jax.tree.map(np.asarray, params)
    carries, _, ys = reference.unroll(
        lambda carry, x: reference.lstm(params, carry, x, gate, **how),
        tuple(np.asarray(leaf) for leaf in initial(data)),
        data["x"],
        emit=lambda carry: carry[1],
    )
    assert_close(ys, data["ys"])
    assert_close(carries[0], data["cs"].reshape(carries[0].shape))


def test_detaching_changes_the_gradient_and_nothing_else():
    """The four LSTM files share one forward pass and have four different gradients."""
    files = [load(name) for name in CELLS[:4]]
    for file in files[1:]:
        np.testing.assert_array_equal(file["ys"], files[0]["ys"])
    weights = [file["grad.h2h.weight"] for file in files]
    differences = [np.abs(a - b).max() for n, a in enumerate(weights) for b in weights[n + 1 :]]
    assert min(differences) > 1e-3 * np.abs(weights[0]).max()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.long
def test_two_bidirectional_layers_of_torch(kind, backend):
    data = load(f"torch_{kind}_2layer_bidirectional_ragged")
    features = data["ys"].shape[-1] // 2
    settings = dict(features=features, bias_vectors=2, param_dtype=jnp.float64)
    lengths = jnp.asarray(data["lengths"])

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            carries = []
            for _ in range(2):
                directions = (rg.RNN(rg.CELLS[kind](**settings), backend=backend) for _ in range(2))
                layer = nn.Bidirectional(*directions, time_major=True, return_carry=True)
                carry, x = layer(x, seq_lengths=lengths)
                carries += carry
            return carries, x

    def layers(prefix):
        state_dict = {
            key.removeprefix(prefix): value for key, value in data.items() if key.startswith(prefix)
        }
        return rg.from_torch(state_dict)

    def as_variables(loaded):
        """The loaded layers under the names that Flax gives the cells made in `Model`."""
        cells = [layer[direction] for layer in loaded for direction in ("forward", "backward")]
        return {f"{kind.upper()}_{n}": cell for n, cell in enumerate(cells)}

    model = Model()
    template = jax.eval_shape(model.init, jax.random.key(0), jnp.asarray(data["x"]))["params"]
    params = jax.tree.map(jnp.asarray, as_variables(layers("param.")))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, template)

    @users_jit
    def run(params, x):
        def loss(params, x):
            carries, ys = model.apply({"params": params}, x)
            return dot(ys, jnp.asarray(data["cotangent"])), (carries, ys)

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)

    (loss, (carries, ys)), (grad_params, grad_x) = run(params, jnp.asarray(data["x"]))
    assert_close(ys, data["ys"])
    assert_close(loss, data["loss"])
    assert_close(np.stack([carry.h for carry in carries]), data["hn"])
    if kind == "lstm":
        assert_close(np.stack([carry.c for carry in carries]), data["cn"])
    assert_close(grad_x, data["grad_x"])
    assert_close(grad_params, as_variables(layers("grad.")))
    written = rg.to_torch(layers("param."))
    expected = {
        key.removeprefix("param."): value for key, value in data.items() if key.startswith("param.")
    }
    assert written.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(written[name], value)
