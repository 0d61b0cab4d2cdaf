"""The Relational Memory Core: memory slots that attend to each other and to the input.

Santoro et al., 2018, "Relational recurrent neural networks". Letters: N slots of S = F / N units
each, H heads of S / H units.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import export

from recurrent_gates import checks
from recurrent_gates.base import add_offsets, linear_project
from recurrent_gates.declared import (
    Params,
    Slots,
    inputs_dtype,
    state_dtype,
)
from recurrent_gates.memory.core import MemoryCell, linear, rows_product
from recurrent_gates.shapes import lead

_EPSILON = 1e-5  # of the layer norms, as in the authors' code
_FEW_ROWS = 5  # so many are summed one by one


class RMCState(NamedTuple):
    """Carry of the Relational Memory Core.

    Attributes:
      memory: the slots ``[*batch, N, S]``, float32 at least.
    """

    memory: jax.Array


export.register_namedtuple_serialization(RMCState, serialized_name="recurrent_gates.RMCState")


class RMC(MemoryCell):
    """Relational Memory Core (Santoro et al., 2018) with any gate mechanism.

    In each of ``blocks`` rounds all slots and the input, as one more row, attend to each other;
    each row then goes through a perceptron, both with a layer norm of the sum. The slots' gates, on
    the memory before and the input, mix what came out with what was there. Emits all slots side by
    side, ``[..., F]``. The memory starts as rows of the identity.

    Attributes:
      features: F = N * S, the size of the whole memory, as UR-gates counts it (D).
      memory_slots: N.
      heads: H; it divides S.
      blocks: rounds of attention at each step; they share the perceptron.
      key_size: width of a head's queries and keys; None: that of its values, S / H.
      mlp_layers: layers of the perceptron, all S wide, with ReLU between them.
      gate_style: ``"unit"``: a gate for each unit; ``"memory"``: one for each slot; None: no
        gates, what comes out of the attention is the new memory.
      gate: how f and i are made; its biases are shared by all slots, and d of the uniform gates
        is S.

    Raises:
      ValueError: if N does not divide F, or H does not divide S, or for a gate that does not fit.

    Note:
      Follows the authors' code where it and the paper differ: one layer norm is over queries, keys
      and values together, the gates read the tanh of the memory and the projected input, and what
      is emitted is the memory without an output gate.
    """

    memory_slots: int = 2
    heads: int = 2
    blocks: int = 1
    key_size: int | None = None
    mlp_layers: int = 2
    gate_style: str | None = "unit"

    @nn.nowrap
    def _check(self) -> None:
        self._check_sizes("memory_slots", "blocks", "mlp_layers")
        if self.key_size is not None:
            self._check_sizes("key_size")
        if self.features % self.memory_slots:
            raise ValueError(
                f"RMC divides its features among its slots: {self.memory_slots} slots do not "
                f"divide {self.features} features."
            )
        if self.slot_size % self.heads:
            raise ValueError(
                f"RMC divides the units of a slot among its heads: {self.heads} heads do not "
                f"divide {self.slot_size} units."
            )
        if self.gate_style not in ("unit", "memory", None):
            raise ValueError(
                f"RMC gate_style must be 'unit', 'memory' or None, got {self.gate_style!r}."
            )
        self._check_gate()

    @nn.nowrap
    def _check_gate(self) -> None:
        if self.gate_style == "unit":
            self.gate.check(self.slot_size)
            return
        if self.gate_style is None:
            defaults = {field.name: field.default for field in dataclasses.fields(self)}
            for name in ("gate", "bias_vectors", "recurrent_kernel_init"):
                if getattr(self, name) != defaults[name]:
                    raise ValueError(f"RMC {name} has no effect: gate_style=None leaves no gates.")
        is_scalar = self.gate.activation == "sigmoid" and self.gate.bias != "uniform"
        if self.gate_style == "memory" and (self.gate.master or not is_scalar):
            raise ValueError(
                "RMC gate_style='memory' has one gate for a slot: the gate must be neither uniform "
                "nor ordered, and without masters."
            )

    @property
    def slot_size(self) -> int:
        """S, the units of a slot."""
        return self.features // self.memory_slots

    @property
    def _head_widths(self) -> tuple[int, int, int]:
        """Of a head's query, key and value."""
        value = self.slot_size // self.heads
        key = self.key_size or value
        return key, key, value

    @property
    def _gate_slots(self) -> dict[str, int]:
        if self.gate_style is None:
            return {}
        return self.gate.slots(self.slot_size if self.gate_style == "unit" else 1)

    @nn.nowrap
    def init_params(self, key: jax.Array, in_features: int) -> dict[str, Any]:
        checks.key("key", key)
        in_features = checks.in_features(in_features)
        width, dtype = self.slot_size, self.param_dtype
        x_key, gates_key, mlp_key, blocks_key = jax.random.split(key, 4)
        first = self.init_linear(x_key, in_features, width)
        params: dict[str, Any] = {"input": {role: {"x": leaf} for role, leaf in first.items()}}
        keys = jax.random.split(mlp_key, self.mlp_layers)
        params["mlp"] = {
            f"layer_{i}": self.init_linear(key, width, width) for i, key in enumerate(keys)
        }

        def norm(width: int) -> dict[str, jax.Array]:
            return {"scale": jnp.ones((width,), dtype), "bias": jnp.zeros((width,), dtype)}

        qkv = self.heads * sum(self._head_widths)
        for i, key in enumerate(jax.random.split(blocks_key, self.blocks)):
            params[f"block_{i}"] = {
                "qkv": self.init_linear(key, width, qkv),
                "qkv_norm": norm(qkv),
                "attention_norm": norm(width),
                "mlp_norm": norm(width),
            }
        if self.gate_style is not None:
            params["gates"] = self._init_gates(gates_key)
        return params

    @nn.nowrap
    def _init_gates(self, key: jax.Array) -> dict[str, Any]:
        slots, width, dtype = self._gate_slots, self.slot_size, self.param_dtype
        keys = iter(jax.random.split(key, 4 * len(slots) + 2))
        params: dict[str, Any] = {
            "kernel": {
                s: self.kernel_init(next(keys), (width, w), dtype) for s, w in slots.items()
            },
            "recurrent_kernel": {
                s: self.recurrent_kernel_init(next(keys), (width, w), dtype)
                for s, w in slots.items()
            },
        }
        for role in ("bias", "recurrent_bias")[: self.bias_vectors]:
            params[role] = {s: self.bias_init(next(keys), (w,), dtype) for s, w in slots.items()}
        features = width if self.gate_style == "unit" else 1
        offsets = self.gate.slot_bias(next(keys), features, dtype)
        params["bias"] = add_offsets(params["bias"], offsets)
        gate_params = self.gate.init(next(keys), features, dtype)
        return {**params, "gate": gate_params} if gate_params else params

    @nn.nowrap
    def initial(self, batch_shape: Sequence[int]) -> RMCState:
        zeros = self.zeros(batch_shape, self.memory_slots, self.slot_size)
        identity = jnp.eye(self.memory_slots, self.slot_size, dtype=zeros.dtype)
        return RMCState(zeros + lead(identity, zeros))

    @nn.nowrap
    def project(self, params: Params, x: jax.Array) -> dict[str, jax.Array]:
        """The input as a row ``x``, its queries, keys and values, its part of the gates."""
        checks.kernels(params.get("input", {}))
        row = linear_project(params["input"], x, dtype=self.dtype)["x"]
        # A layer norm of all steps at once is formed again in less time than what it leaves for
        # the backward pass is written.
        qkv = jax.checkpoint(_qkv, static_argnums=2)(params["block_0"], row, row.dtype)
        z = {"x": row, "qkv": qkv.astype(row.dtype)}
        if self.gate_style is not None:
            z |= linear_project(params["gates"], row, gate=self.gate, dtype=row.dtype)
        return z

    @nn.nowrap
    def step(self, params: Params, carry: RMCState, z_t: Slots) -> RMCState:
        checks.step(self, carry, z_t)
        memory = carry.memory
        attended = self._attend(params, memory, z_t)
        if self.gate_style is None:
            return RMCState(attended)
        f, i = self._gates(params["gates"], memory, z_t)
        return RMCState(i * jnp.tanh(attended) + f * memory)  # Eq. (7)

    @nn.nowrap
    def gates(self, params: Params, carry_tm1: RMCState, z: Slots) -> dict[str, jax.Array]:
        if self.gate_style is None:
            return {}
        f, i = self._gates(params["gates"], carry_tm1.memory, z)
        return {"f": f, "i": i}

    @nn.nowrap
    def emit(self, params: Params, carry: RMCState, z: Slots) -> jax.Array:
        del params
        memory = carry.memory
        return memory.reshape(*memory.shape[:-2], self.features).astype(inputs_dtype(z))

    @nn.nowrap
    def _gates(self, params: Params, memory: jax.Array, z: Slots) -> tuple[jax.Array, jax.Array]:
        """f and i ``[..., N, S]``, or ``[..., N, 1]``."""
        state, dtype = jnp.tanh(memory), inputs_dtype(z)
        pre = {}
        for slot, kernel in params["recurrent_kernel"].items():
            product = rows_product(state, kernel, dtype)
            pre[slot] = product + z[slot][..., None, :].astype(product.dtype)  # Eq. (4), (5)
        return self.gate.activate(pre)

    @nn.nowrap
    def _attend(self, params: Params, memory: jax.Array, z: Slots) -> jax.Array:
        """The slots after all rounds; the input's row is dropped when it is not read any more."""
        dtype, slots = inputs_dtype(z), self.memory_slots
        rows = memory
        for index in range(self.blocks):
            block, last = params[f"block_{index}"], index == self.blocks - 1
            qkv = _qkv(block, rows, dtype)
            if not index:  # the input's own is there already
                qkv = jnp.concatenate([qkv, z["qkv"][..., None, :].astype(qkv.dtype)], axis=-2)
                row = z["x"][..., None, :].astype(rows.dtype)
                rows = rows if last else jnp.concatenate([rows, row], axis=-2)
            elif last:
                rows = rows[..., :slots, :]
            attention = self._attention(qkv, rows.shape[-2], dtype)
            rows = _layer_norm(block["attention_norm"], rows + attention)
            rows = _layer_norm(
                block["mlp_norm"], rows + self._perceptron(params["mlp"], rows, dtype)
            )
        return rows

    @nn.nowrap
    def _attention(self, qkv: jax.Array, count: int, dtype: Any) -> jax.Array:
        """What the first ``count`` rows read of all rows, ``[..., count, S]`` (eq. 2)."""
        by_head = qkv.reshape(*qkv.shape[:-1], self.heads, sum(self._head_widths))
        key = self._head_widths[0]
        q, k, v = jnp.split(by_head, (key, 2 * key), axis=-1)
        q = q[..., :count, :, :] * key**-0.5
        total = state_dtype(dtype)
        similarity = jnp.einsum(
            "...ihk,...jhk->...hij", q.astype(dtype), k.astype(dtype), preferred_element_type=total
        )
        weights = jax.nn.softmax(similarity, axis=-1)
        values = _weighted(weights.astype(dtype), v.astype(dtype), total)
        return values.reshape(*values.shape[:-2], self.slot_size)

    @nn.nowrap
    def _perceptron(self, params: Params, rows: jax.Array, dtype: Any) -> jax.Array:
        for index in range(self.mlp_layers):
            rows = linear(params[f"layer_{index}"], jax.nn.relu(rows) if index else rows, dtype)
        return rows


def _weighted(weights: jax.Array, v: jax.Array, total: Any) -> jax.Array:
    """Sums of values ``[..., J, H, K]`` by weights ``[..., H, I, J]``: ``[..., I, H, K]``."""
    rows = v.shape[-3]
    if rows > _FEW_ROWS:
        return jnp.einsum("...hij,...jhk->...ihk", weights, v, preferred_element_type=total)
    # A CPU takes longer to start so many small products than to do them.
    by_row = jnp.swapaxes(weights, -3, -2).astype(total)  # [..., I, H, J]
    terms = [by_row[..., j, None] * v[..., j, None, :, :].astype(total) for j in range(rows)]
    return functools.reduce(jnp.add, terms)


def _qkv(block: Params, rows: jax.Array, dtype: Any) -> jax.Array:
    """Queries, keys and values of all heads in a row, under one layer norm."""
    return _layer_norm(block["qkv_norm"], linear(block["qkv"], rows, dtype))


def _layer_norm(params: Params, x: jax.Array) -> jax.Array:
    """Layer normalization over the last axis (Ba et al., 2016)."""
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(x - mean), axis=-1, keepdims=True)
    scale, bias = (lead(params[name].astype(x.dtype), x) for name in ("scale", "bias"))
    return (x - mean) * jax.lax.rsqrt(variance + _EPSILON) * scale + bias
