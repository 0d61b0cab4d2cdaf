"""The core of the Reconstructive Memory Agent: an LSTM over what was seen and what is recalled.

Hung et al., 2018, "Optimizing agent behavior over long time scales by transporting value".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import export

from recurrent_gates import checks
from recurrent_gates.base import linear_project
from recurrent_gates.cells import LSTM, LSTMState
from recurrent_gates.declared import Params, Slots, inputs_dtype, matrix_product
from recurrent_gates.memory.core import MemoryCell, flat, linear
from recurrent_gates.scan import mark_residuals
from recurrent_gates.shapes import lead

_LAYERS = 2
_FEW_ROWS = 100  # of which all pairs are compared in less time than they are sorted
_EPSILON = 1e-12  # least squared length of a row, as in the authors' code


class RMAState(NamedTuple):
    """Carry of RMA's core, float32 at least. N rows of Z units, R read heads.

    Attributes:
      c: the cell states of the controller's two layers side by side ``[*batch, 2 F]``.
      h: their hidden states ``[*batch, 2 F]``.
      z: the code of this step ``[*batch, Z]``.
      reads: what the heads have read ``[*batch, R, Z]``.
      memory: codes of the past ``[*batch, N, Z]``; no gradient goes through it.
      position: int32 ``[*batch, 1]``, the row that is written next.
    """

    c: jax.Array
    h: jax.Array
    z: jax.Array
    reads: jax.Array
    memory: jax.Array
    position: jax.Array


class RMAOutput(NamedTuple):
    """What RMA's core hands out at each step.

    Attributes:
      z: the code of this step ``[..., Z]``, which an agent learns to reconstruct from.
      h: the controller's hidden states ``[..., 2 F]``.
      reads: what was read ``[..., R * Z]``.
      strengths: of the read heads ``[..., R]``, at least 0; the authors bound them by a loss.
    """

    z: jax.Array
    h: jax.Array
    reads: jax.Array
    strengths: jax.Array


for _state in (RMAState, RMAOutput):
    export.register_namedtuple_serialization(
        _state, serialized_name=f"recurrent_gates.{_state.__name__}"
    )


class RMA(MemoryCell):
    """Core of the Reconstructive Memory Agent (Hung et al., 2018); LSTMs of any gate control it.

    A perceptron makes a code z of the input and of what the controller said and read a step
    before. Two LSTMs read z, the second beside what the first says. Heads name keys, and read the
    ``top_k`` most similar rows of the memory; only then z is written, to the rows in turn. Emits z,
    h and the reads side by side, ``[..., Z + 2 F + R * Z]``, or with ``emit_parts`` an
    ``RMAOutput``.

    Attributes:
      features: F, the hidden size of each of the controller's two layers; 256 in the paper's code.
      gate: how the controller's f and i are made.
      memory_slots: N, the rows of the memory.
      word_size: Z, the units of a code and of a row.
      read_heads: R.
      top_k: how many rows a head reads.
      emit_parts: emit an ``RMAOutput`` in the place of one array.

    Raises:
      ValueError: for a size below 1, a gate that does not fit, or a ``top_k`` above N.

    Note:
      As in the authors' code the memory carries no gradient: reads teach the controller where to
      look, not the past what to write. Rows that were never written are zeros, which compete.
    """

    memory_slots: int = 1000
    word_size: int = 200
    read_heads: int = 3
    top_k: int = 50
    emit_parts: bool = False

    @nn.nowrap
    def _check(self) -> None:
        self._check_sizes("memory_slots", "word_size", "read_heads", "top_k")
        checks.flag("RMA emit_parts", self.emit_parts)
        self.gate.check(self.features)
        if self.top_k > self.memory_slots:
            raise ValueError(
                f"RMA reads the top_k = {self.top_k} most similar rows of its memory, which has "
                f"only {self.memory_slots}."
            )

    @property
    def _fed_back(self) -> int:
        """How much of the encoder's input is h and the reads."""
        return _LAYERS * self.features + self.read_heads * self.word_size

    @property
    def emitted_features(self) -> int:
        return self.word_size + self._fed_back

    @property
    def _controller(self) -> LSTM:
        return self.controller(self.features)

    @nn.nowrap
    def init_params(self, key: jax.Array, in_features: int) -> dict[str, Any]:
        """``encoder``, ``controller_0``, ``controller_1`` and ``reader``."""
        checks.key("key", key)
        code, heads = self.word_size, self.read_heads
        keys = iter(jax.random.split(key, 5))
        inputs = checks.in_features(in_features) + self._fed_back
        first = self.init_linear(next(keys), inputs, 2 * code)
        return {
            "encoder": {
                "layer_0": {role: {"z": leaf} for role, leaf in first.items()},
                "layer_1": self.init_linear(next(keys), 2 * code, code),
            },
            "controller_0": self._controller.init_params(next(keys), code),
            "controller_1": self._controller.init_params(next(keys), code + self.features),
            "reader": self.init_linear(next(keys), _LAYERS * self.features, heads * (code + 1)),
        }

    @nn.nowrap
    def initial(self, batch_shape: Sequence[int]) -> RMAState:
        c, h = (self.zeros(batch_shape, _LAYERS * self.features) for _ in range(2))
        return RMAState(
            c=c,
            h=h,
            z=self.zeros(batch_shape, self.word_size),
            reads=self.zeros(batch_shape, self.read_heads, self.word_size),
            memory=self.zeros(batch_shape, self.memory_slots, self.word_size),
            position=jnp.zeros((*h.shape[:-1], 1), jnp.int32),
        )

    @nn.nowrap
    def project(self, params: Params, x: jax.Array) -> dict[str, jax.Array]:
        """The input's part of the encoder's first layer."""
        checks.kernels(params.get("encoder", {}).get("layer_0", {}))
        first = params["encoder"]["layer_0"]
        rows = {"z": first["kernel"]["z"][: -self._fed_back]}
        return linear_project({**first, "kernel": rows}, x, dtype=self.dtype)

    @nn.nowrap
    def step(self, params: Params, carry: RMAState, z_t: Slots) -> RMAState:
        checks.step(self, carry, z_t)
        dtype = inputs_dtype(z_t)
        code = self._encode(params["encoder"], carry, z_t)
        layers = self._layers(params, carry, code.astype(dtype))
        c, h = (jnp.concatenate(x, axis=-1) for x in zip(*(new for *_, new in layers), strict=True))
        keys, strengths = self._keys(params["reader"], h, dtype)
        past = jax.lax.stop_gradient(carry.memory)
        return RMAState(
            c=c,
            h=h,
            z=code.astype(carry.z.dtype),
            reads=_read(past, keys, strengths, self.top_k),
            memory=_write(past, carry.position, jax.lax.stop_gradient(code)),
            position=(carry.position + 1) % self.memory_slots,
        )

    @nn.nowrap
    def gates(self, params: Params, carry_tm1: RMAState, z: Slots) -> dict[str, jax.Array]:
        """The controller's, both layers side by side."""
        code = self._encode(params["encoder"], carry_tm1, z).astype(inputs_dtype(z))
        layers = self._layers(params, carry_tm1, code)
        gates = [
            self._controller.gates(layer_params, state, inputs)
            for layer_params, state, inputs, _ in layers
        ]
        return {
            name: jnp.concatenate([layer[name] for layer in gates], axis=-1) for name in gates[0]
        }

    @nn.nowrap
    def emit(self, params: Params, carry: RMAState, z: Slots) -> Any:
        dtype = inputs_dtype(z)
        outputs = (carry.z, carry.h, flat(carry.reads))
        if not self.emit_parts:
            return jnp.concatenate(outputs, axis=-1).astype(dtype)
        _, strengths = self._keys(params["reader"], carry.h, dtype)
        return RMAOutput(*(output.astype(dtype) for output in (*outputs, strengths)))

    @nn.nowrap
    def _encode(self, params: Params, carry: RMAState, z_t: Slots) -> jax.Array:
        """The code z of the input, the controller's states and what was read."""
        dtype = inputs_dtype(z_t)
        kernel = params["layer_0"]["kernel"]["z"][-self._fed_back :]
        feedback = jnp.concatenate([carry.h, flat(carry.reads)], axis=-1)
        product = matrix_product(feedback, kernel, dtype)
        first = jnp.tanh(product + z_t["z"].astype(product.dtype))
        return linear(params["layer_1"], first, dtype)

    @nn.nowrap
    def _layers(
        self, params: Params, carry: RMAState, code: jax.Array
    ) -> list[tuple[Params, LSTMState, Slots, LSTMState]]:
        """Of each layer of the controller: parameters, state, projected input, next state."""
        layers: list[tuple[Params, LSTMState, Slots, LSTMState]] = []
        cs, hs = (jnp.split(field, _LAYERS, axis=-1) for field in (carry.c, carry.h))
        x = code
        for index, (c, h) in enumerate(zip(cs, hs, strict=True)):
            layer_params, state = params[f"controller_{index}"], LSTMState(c, h)
            inputs = self._controller.project(layer_params, x)
            new = self._controller.step(layer_params, state, inputs)
            layers.append((layer_params, state, inputs, new))
            x = jnp.concatenate([code, new.h.astype(code.dtype)], axis=-1)
        return layers

    @nn.nowrap
    def _keys(self, params: Params, h: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Keys ``[..., R, Z]`` and strengths ``[..., R]`` of the read heads."""
        interface, width = linear(params, h, dtype), self.read_heads * self.word_size
        keys = interface[..., :width].reshape(
            *interface.shape[:-1], self.read_heads, self.word_size
        )
        return keys, jax.nn.softplus(interface[..., width:])


def _inverse_length(rows: jax.Array) -> jax.Array:
    squared = jnp.sum(jnp.square(rows), axis=-1)
    return jax.lax.rsqrt(jnp.maximum(squared, _EPSILON))


def _read(memory: jax.Array, keys: jax.Array, strengths: jax.Array, top_k: int) -> jax.Array:
    """What heads ``[..., R]`` read: softmax over their ``top_k`` rows by strength times cosine.

    The rows are chosen without a gradient; what they say of keys and strengths has one.
    """
    keys = keys * (strengths * _inverse_length(keys))[..., None]
    # Products before lengths: rows of length 1 would be a second memory.
    product = jnp.einsum("...rz,...nz->...rn", keys, memory)
    similarity = product * _inverse_length(memory)[..., None, :]
    scores = jax.lax.stop_gradient(similarity)
    heads, slots = similarity.shape[-2:]
    if slots <= heads * top_k:  # no more rows than the heads would copy: read them where they are
        similarity = jnp.where(mark_residuals(_among_top(scores, top_k)), similarity, -jnp.inf)
        return jnp.einsum("...rn,...nz->...rz", jax.nn.softmax(similarity, axis=-1), memory)
    rows = mark_residuals(jax.lax.top_k(scores, top_k)[1])
    top_rows = jnp.take_along_axis(memory[..., None, :, :], rows[..., None], axis=-2)
    product = jnp.einsum("...rz,...rkz->...rk", keys, top_rows)
    weights = jax.nn.softmax(product * _inverse_length(top_rows), axis=-1)
    return jnp.einsum("...rk,...rkz->...rz", weights, top_rows)


def _among_top(similarity: jax.Array, top_k: int) -> jax.Array:
    """Which of the slots ``[..., N]`` are among the ``top_k`` most similar: bool ``[..., N]``.

    Of equals the first, as ``jax.lax.top_k`` has it. Of few slots without its sort: before one of
    them come fewer than ``top_k``.
    """
    slots = similarity.shape[-1]
    if slots == top_k:
        return jnp.ones(similarity.shape, bool)
    if slots > _FEW_ROWS:
        heads = similarity.reshape(-1, slots)
        places = (jnp.arange(heads.shape[0])[:, None], jax.lax.top_k(heads, top_k)[1])
        no_flags = jnp.zeros(heads.shape, bool)
        flags = no_flags.at[places].set(True, unique_indices=True, mode="promise_in_bounds")
        return flags.reshape(similarity.shape)
    of_j, of_i = similarity[..., :, None], similarity[..., None, :]
    j, i = (jax.lax.broadcasted_iota(jnp.int32, (slots, slots), axis) for axis in (0, 1))
    order = (of_j > of_i) | ((of_j == of_i) & lead(j < i, of_j))
    return jnp.sum(order.astype(jnp.float32), axis=-2) < top_k


def _write(memory: jax.Array, position: jax.Array, code: jax.Array) -> jax.Array:
    """The memory with one row of each example replaced."""
    examples = memory.reshape(-1, *memory.shape[-2:])
    rows = (jnp.arange(examples.shape[0]), position.reshape(-1))
    new_examples = examples.at[rows].set(
        code.reshape(-1, code.shape[-1]), unique_indices=True, mode="promise_in_bounds"
    )
    return new_examples.reshape(memory.shape)
