"""The equations of the memory cells in plain NumPy (float64), one step at a time.

Written from the papers and from what their authors' code does where the two differ; parameters
come in the library's tree. Nothing else of the library is used here.
"""

import numpy as np

from tests.reference import gate


def softmax(x):
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def affine(params, x):
    return x @ params["kernel"] + params["bias"]


# Relational Memory Core (Santoro et al., 2018)


def layer_norm(params, x):
    centred = x - x.mean(axis=-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)
    return scaled * params["scale"] + params["bias"]


def rmc(params, carry, x, name="standard", *, heads, key_size, blocks, mlp_layers, gate_style):
    """One step for one example: memory ``[N, S]``, x ``[D]``."""
    (memory,) = carry
    slots, width = memory.shape
    value_size = width // heads
    row = x @ params["input"]["kernel"]["x"] + params["input"]["bias"]["x"]
    rows = np.vstack([memory, row])
    for index in range(blocks):
        block = params[f"block_{index}"]
        qkv = layer_norm(block["qkv_norm"], affine(block["qkv"], rows))
        per_head = 2 * key_size + value_size
        read = np.zeros_like(rows)
        for head in range(heads):
            own = qkv[:, head * per_head : (head + 1) * per_head]
            q, k, v = own[:, :key_size], own[:, key_size : 2 * key_size], own[:, 2 * key_size :]
            weights = softmax(q @ k.T / np.sqrt(key_size))
            read[:, head * value_size : (head + 1) * value_size] = weights @ v
        rows = layer_norm(block["attention_norm"], rows + read)
        out = rows
        for layer in range(mlp_layers):
            out = affine(params["mlp"][f"layer_{layer}"], np.maximum(out, 0) if layer else out)
        rows = layer_norm(block["mlp_norm"], rows + out)
    attended = rows[:slots]
    if gate_style is None:
        return (attended,)
    gates = params["gates"]

    def pre(slot):
        out = row @ gates["kernel"][slot] + np.tanh(memory) @ gates["recurrent_kernel"][slot]
        for role in ("bias", "recurrent_bias"):
            out = out + gates.get(role, {}).get(slot, 0.0)
        return out

    f, i = gate(name, pre, gates.get("gate", {}).get("b"))
    return (i * np.tanh(attended) + f * memory,)


def by_example(step):
    """A step for one example as a step for a batch ``[B, ...]``."""

    def batched(params, carry, x):
        count = len(x)
        new = [step(params, tuple(leaf[n] for leaf in carry), x[n]) for n in range(count)]
        return tuple(np.stack(leaves) for leaves in zip(*new, strict=True))

    return batched
