"""The equations of the memory cells in plain NumPy (float64), one step at a time.

Written from the papers and from what their authors' code does where the two differ; parameters
come in the library's tree. Nothing else of the library is used here.
"""

import numpy as np

from tests.reference import gate, lstm, sigmoid


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


# Differentiable Neural Computer (Graves et al., 2016, Methods)


def softplus(x):
    return np.logaddexp(0.0, x)


def content(memory, key, strength):
    """C(M, k, beta) of one head, with the small numbers of the authors' code."""

    def norm(x):
        return np.sqrt((x**2).sum() + 1e-6)

    cosine = [key @ row / (norm(key) * norm(row) + 1e-6) for row in memory]
    return softmax(strength * np.array(cosine))


def allocation(usage):
    """a_t: the free list, sorted by usage."""
    usage = 1e-6 + (1 - 1e-6) * usage
    out, product = np.zeros_like(usage), 1.0
    for slot in np.argsort(usage, kind="stable"):
        out[slot] = (1 - usage[slot]) * product
        product *= usage[slot]
    return out


def dnc_access(said, carry):
    """(reads, memory, read weights, write weights, link, precedence, usage) after one step."""
    _, memory, read_w, write_w, link, precedence, usage = carry
    slots, writes = len(memory), len(write_w)
    # Usage, from the last step's weights.
    written = 1 - np.prod(1 - write_w, axis=0)
    retained = np.prod(1 - said["free_gates"][:, None] * read_w, axis=0)
    usage = (usage + written - usage * written) * retained
    # Where to write.
    new_w, about = np.zeros_like(write_w), usage
    for head in range(writes):
        free = allocation(about)
        named = content(memory, said["write_keys"][head], said["write_strengths"][head])
        ga, gw = said["allocation_gates"][head], said["write_gates"][head]
        new_w[head] = gw * (ga * free + (1 - ga) * named)
        about = about + (1 - about) * ga * gw * free
    # Erase, then add.
    for head in range(writes):
        memory = memory * (1 - np.outer(new_w[head], said["erase_vectors"][head]))
    for head in range(writes):
        memory = memory + np.outer(new_w[head], said["write_vectors"][head])
    # The order of writing.
    new_link = np.zeros_like(link)
    for head in range(writes):
        for i in range(slots):
            for j in range(slots):
                if i != j:
                    w_i, w_j = new_w[head, i], new_w[head, j]
                    new_link[head, i, j] = (1 - w_i - w_j) * link[head, i, j]
                    new_link[head, i, j] += w_i * precedence[head, j]
    precedence = np.stack([(1 - w.sum()) * p + w for w, p in zip(new_w, precedence, strict=True)])
    # Where to read.
    new_r = np.zeros_like(read_w)
    for head in range(len(read_w)):
        modes = said["read_modes"][head]
        named = content(memory, said["read_keys"][head], said["read_strengths"][head])
        new_r[head] = modes[2 * writes] * named
        for graph in range(writes):
            new_r[head] += modes[graph] * (new_link[graph].T @ read_w[head])
            new_r[head] += modes[writes + graph] * (new_link[graph] @ read_w[head])
    return new_r @ memory, memory, new_r, new_w, new_link, precedence, usage


def dnc(params, carry, x, name="standard", *, shapes, clip):
    """One step for one example; ``shapes``: of what the controller says, by name, in order."""
    c, h, *rest = carry
    into = np.concatenate([x, rest[0].ravel()])
    c, h = (np.clip(s, -clip, clip) for s in lstm(params["controller"], (c, h), into, name))
    flat, said, start = affine(params["interface"], h), {}, 0
    for what, shape in shapes.items():
        end = start + int(np.prod(shape))
        said[what], start = flat[start:end].reshape(shape), end
    assert start == len(flat)
    for what in ("erase_vectors", "free_gates", "allocation_gates", "write_gates"):
        said[what] = sigmoid(said[what])
    for what in ("write_strengths", "read_strengths"):
        said[what] = softplus(said[what])
    said["read_modes"] = softmax(said["read_modes"])
    return (c, h, *dnc_access(said, rest))


# The core of the Reconstructive Memory Agent (Hung et al., 2018)


def rma(params, carry, x, name="standard", *, heads, top_k):
    """One step for one example."""
    c, h, _, reads, memory, position = carry
    units = len(h) // 2
    first, second = (params["encoder"][layer] for layer in ("layer_0", "layer_1"))
    seen = np.concatenate([x, h, reads.ravel()])
    z = affine(second, np.tanh(seen @ first["kernel"]["z"] + first["bias"]["z"]))
    c_0, h_0 = lstm(params["controller_0"], (c[:units], h[:units]), z, name)
    both = np.concatenate([z, h_0])
    c_1, h_1 = lstm(params["controller_1"], (c[units:], h[units:]), both, name)
    c, h = np.concatenate([c_0, c_1]), np.concatenate([h_0, h_1])
    said = affine(params["reader"], h)
    keys, strengths = said[:-heads].reshape(heads, -1), softplus(said[-heads:])

    def unit(row):
        return row / np.sqrt(max((row**2).sum(), 1e-12))

    reads = np.zeros_like(keys)
    for head in range(heads):
        similar = strengths[head] * np.array([unit(keys[head]) @ unit(row) for row in memory])
        best = np.argsort(-similar, kind="stable")[:top_k]
        reads[head] = softmax(similar[best]) @ memory[best]
    memory = memory.copy()
    memory[position[0]] = z
    return c, h, z, reads, memory, (position + 1) % len(memory)
