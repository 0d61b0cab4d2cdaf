"""The memory cells' equations in torch, step by step, as the authors' code lays them out.

There is no such layer in torch: these are what a user of it writes. Linear maps that read the same
thing are one product, as in a hand-tuned torch cell; loops over heads are products over batches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

import recurrent_gates as rg
from benchmarks.ours import Side
from benchmarks.work import Contender, Gradients, Size, make

Step = Callable[[Any, Any], tuple[Any, Any]]
"""(carry, x) -> (carry, y), of torch's tensors."""


def _packed(params: Mapping[str, Any], slots: tuple[str, ...]) -> tuple[Any, Any]:
    """One weight ``[out, in]`` and bias for all slots, over [x, h]."""
    import torch

    kernels = [torch.cat([params["kernel"][s], params["recurrent_kernel"][s]]) for s in slots]
    return torch.cat(kernels, dim=1).T, torch.cat([params["bias"][s] for s in slots])


# Relational Memory Core


def _rmc(cell: rg.RMC, params: Any) -> Step:
    import torch
    from torch.nn import functional as fn

    slots, heads, width = cell.memory_slots, cell.heads, cell.slot_size
    size = width // heads
    weight, bias = _packed(params["gates"], ("i", "f"))
    input_map = params["input"]

    def linear(weights: Any, x: Any) -> Any:
        return fn.linear(x, weights["kernel"].T, weights["bias"])

    def norm(weights: Any, x: Any) -> Any:
        return fn.layer_norm(x, x.shape[-1:], weights["scale"], weights["bias"], 1e-5)

    def attend(block: Any, rows: Any) -> Any:
        qkv = norm(block["qkv_norm"], linear(block["qkv"], rows))
        by_head = qkv.reshape(*qkv.shape[:2], heads, 3 * size).transpose(1, 2)
        q, k, v = by_head.split(size, dim=-1)
        weights = torch.softmax((q * size**-0.5) @ k.transpose(-1, -2), dim=-1)
        return (weights @ v).transpose(1, 2).reshape(rows.shape)

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        (memory,) = carry
        row = fn.linear(x, input_map["kernel"]["x"].T, input_map["bias"]["x"])[:, None]
        rows = torch.cat([memory, row], dim=1)
        for index in range(cell.blocks):
            block = params[f"block_{index}"]
            rows = norm(block["attention_norm"], rows + attend(block, rows))
            out = rows
            for layer in range(cell.mlp_layers):
                out = linear(params["mlp"][f"layer_{layer}"], torch.relu(out) if layer else out)
            rows = norm(block["mlp_norm"], rows + out)
        gate_inputs = torch.cat([row.expand(-1, slots, -1), torch.tanh(memory)], dim=-1)
        i, f = torch.sigmoid(fn.linear(gate_inputs, weight, bias)).split(width, dim=-1)
        memory = i * torch.tanh(rows[:, :slots]) + f * memory
        return (memory,), memory.flatten(1)

    return step


# Differentiable Neural Computer


def _dnc(cell: rg.DNC, params: Any) -> Step:
    import torch
    from torch.nn import functional as fn

    shapes = cell.interface
    sizes = [math.prod(shape) for shape in shapes.values()]
    weight, bias = _packed(params["controller"], ("i", "u", "f", "o"))
    interface, clip = params["interface"], cell.clip
    assert clip is not None

    def activated(signals: Any) -> dict[str, Any]:
        parts = zip(shapes.items(), signals.split(sizes, dim=-1), strict=True)
        out = {name: part.reshape(-1, *shape) for (name, shape), part in parts}
        for name in ("erase_vectors", "free_gates", "allocation_gates", "write_gates"):
            out[name] = torch.sigmoid(out[name])
        for name in ("write_strengths", "read_strengths"):
            out[name] = fn.softplus(out[name])
        return {**out, "read_modes": torch.softmax(out["read_modes"], dim=-1)}

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        c, h, reads, *access = carry
        gates = fn.linear(torch.cat([x, reads.flatten(1), h], dim=-1), weight, bias)
        i, u, f, o = gates.chunk(4, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(u)
        h = torch.sigmoid(o) * torch.tanh(c)
        c, h = c.clamp(-clip, clip), h.clamp(-clip, clip)
        signals = activated(fn.linear(h, interface["kernel"].T, interface["bias"]))
        reads, *access = _access(signals, access)
        return (c, h, reads, *access), torch.cat([h, reads.flatten(1)], dim=-1)

    return step


def _cosine(memory: Any, keys: Any, strengths: Any) -> Any:
    import torch

    def norm(x: Any) -> Any:
        return torch.sqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)

    lengths = norm(keys) @ norm(memory).transpose(1, 2)
    similarity = keys @ memory.transpose(1, 2) / (lengths + 1e-6)
    return torch.softmax(similarity * strengths[..., None], dim=-1)


def _allocation(usage: Any) -> Any:
    import torch

    usage = 1e-6 + (1 - 1e-6) * usage
    ordered, order = torch.sort(usage, dim=-1, stable=True)
    prefix_products = torch.cumprod(ordered, dim=-1)
    prefix_products = torch.cat(
        [torch.ones_like(prefix_products[:, :1]), prefix_products[:, :-1]], dim=-1
    )
    return torch.gather((1 - ordered) * prefix_products, 1, torch.argsort(order, dim=-1))


def _access(signals: Mapping[str, Any], carry: Any) -> tuple[Any, ...]:
    """(reads, memory, read weights, write weights, link, precedence, usage); one write head."""
    import torch

    memory, read_w, write_w, link, precedence, usage = carry
    write_mass = 1 - torch.prod(1 - write_w.detach(), dim=1)
    usage = usage + (1 - usage) * write_mass
    usage = usage * torch.prod(1 - signals["free_gates"][..., None] * read_w, dim=1)
    allocation = _allocation(usage)[:, None]
    content_weights = _cosine(memory, signals["write_keys"], signals["write_strengths"])
    gate = signals["allocation_gates"][..., None]
    write_w = signals["write_gates"][..., None] * (gate * allocation + (1 - gate) * content_weights)
    retention = torch.prod(1 - write_w[..., None] * signals["erase_vectors"][:, :, None], dim=1)
    memory = memory * retention + write_w.transpose(1, 2) @ signals["write_vectors"]
    w_i, w_j = write_w[..., :, None], write_w[..., None, :]
    link = (1 - w_i - w_j) * link + w_i * precedence[:, :, None]
    link = link * (1 - torch.eye(link.shape[-1]))
    precedence = (1 - write_w.sum(dim=-1, keepdim=True)) * precedence + write_w
    content_weights = _cosine(memory, signals["read_keys"], signals["read_strengths"])
    backward_weights, forward_weights = read_w @ link[:, 0], read_w @ link[:, 0].transpose(1, 2)
    modes = signals["read_modes"]
    read_w = (
        modes[..., :1] * backward_weights
        + modes[..., 1:2] * forward_weights
        + modes[..., 2:] * content_weights
    )
    return read_w @ memory, memory, read_w, write_w, link, precedence, usage


CELLS: dict[str, Callable[[Any, Any], Step]] = {"rmc": _rmc, "dnc": _dnc}


def torch_side(contender: Contender, size: Size, dtype: str) -> Side:
    """A memory cell in torch, time-major, on the CPU, with our weights."""
    import torch

    arrays = make(contender, size, dtype)
    cell: Any = contender.build(size.features, dtype)

    def tensor(array: Any) -> Any:
        array = torch.from_numpy(np.array(array, np.float32))
        return array.to(getattr(torch, dtype)).requires_grad_()

    params, xs, carry = (
        jax.tree.map(tensor, tree) for tree in (arrays.params, arrays.xs, tuple(arrays.carry))
    )
    cotangent = tensor(arrays.cotangent).detach()
    leaves, structure = jax.tree.flatten((params, xs, carry))

    def apply() -> Any:
        step, state, ys = CELLS[contender.cell](cell, params), carry, []
        for x in xs:
            state, y = step(state, x)
            ys.append(y)
        return torch.stack(ys)

    def forward() -> Any:
        with torch.no_grad():
            return apply()

    def train() -> tuple[Any, Any]:
        ys = apply()
        return ys, torch.autograd.grad(ys, leaves, cotangent, allow_unused=True)

    def array(value: Any) -> np.ndarray:
        return value.detach().float().numpy()

    def gradients(results: Any) -> Gradients:
        complete_gradients = [
            np.zeros(leaf.shape, np.float32) if grad is None else array(grad)
            for leaf, grad in itertools.zip_longest(leaves, results)
        ]
        d_params, d_xs, d_carry = jax.tree.unflatten(structure, complete_gradients)
        return Gradients(d_params, d_xs, type(arrays.carry)(*d_carry))

    facts = {"kind": f"{contender.cell} in torch", "threads": torch.get_num_threads()}
    return Side(forward, train, array, gradients, facts)
