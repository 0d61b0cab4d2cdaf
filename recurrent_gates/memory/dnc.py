"""The Differentiable Neural Computer: an LSTM that writes to a memory and reads from it.

Graves et al., 2016, "Hybrid computing using a neural network with dynamic external memory".
"""

from __future__ import annotations

import itertools
import math
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
from recurrent_gates.memory import addressing
from recurrent_gates.memory.core import MemoryCell, flat, linear


class DNCState(NamedTuple):
    """Carry of the DNC, all fields float32 at least. N slots of W units, R read, V write heads.

    Attributes:
      c: the controller's cell state ``[*batch, F]``.
      h: the controller's hidden state ``[*batch, F]``, which is emitted.
      reads: what the heads have read ``[*batch, R, W]``, which is emitted.
      memory: ``[*batch, N, W]``.
      read_weights: where they have read ``[*batch, R, N]``.
      write_weights: where was written ``[*batch, V, N]``.
      link: the order of writing ``[*batch, V, N, N]``.
      precedence: what was written last ``[*batch, V, N]``.
      usage: what is in use ``[*batch, N]``.
    """

    c: jax.Array
    h: jax.Array
    reads: jax.Array
    memory: jax.Array
    read_weights: jax.Array
    write_weights: jax.Array
    link: jax.Array
    precedence: jax.Array
    usage: jax.Array


export.register_namedtuple_serialization(DNCState, serialized_name="recurrent_gates.DNCState")


class DNC(MemoryCell):
    """Differentiable Neural Computer (Graves et al., 2016); its controller is an LSTM of any gate.

    The controller reads the input and what the heads read a step before; what it says, the
    interface, moves the heads. Emits h and the reads side by side, ``[..., F + R * W]``: a linear
    map of them is the paper's output.

    Attributes:
      features: F, the controller's hidden size.
      gate: how the controller's f and i are made.
      memory_slots: N.
      word_size: W, the units of a slot.
      read_heads: R.
      write_heads: V, 1 in the paper.
      clip: the controller's h and c are kept within this distance of 0; None: not at all.

    Raises:
      ValueError: for a size below 1, a gate that does not fit, or a clip that is not above 0.

    Note:
      Follows the authors' code where it and the paper differ: strengths are softplus(.), not
      1 + softplus(.), and usage passes no gradient on to where was written.
    """

    memory_slots: int = 16
    word_size: int = 16
    read_heads: int = 4
    write_heads: int = 1
    clip: float | None = 20.0

    @nn.nowrap
    def _check(self) -> None:
        self._check_sizes("memory_slots", "word_size", "read_heads", "write_heads")
        self.gate.check(self.features)
        if self.clip is not None:
            checks.numbers(self, "clip")
            if self.clip <= 0:
                raise ValueError(f"DNC clip must be above 0 or None, got {self.clip!r}.")

    @property
    def interface(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of what the controller says at each step, in the order of the kernel."""
        reads, writes, width = self.read_heads, self.write_heads, self.word_size
        return {
            "write_vectors": (writes, width),
            "erase_vectors": (writes, width),
            "write_keys": (writes, width),
            "read_keys": (reads, width),
            "read_modes": (reads, 2 * writes + 1),
            "write_strengths": (writes,),
            "read_strengths": (reads,),
            "free_gates": (reads,),
            "allocation_gates": (writes,),
            "write_gates": (writes,),
        }

    @property
    def emitted_features(self) -> int:
        return self.features + self._read_features

    @property
    def _controller(self) -> LSTM:
        return self.controller(self.features)

    @property
    def _read_features(self) -> int:
        return self.read_heads * self.word_size

    @nn.nowrap
    def init_params(self, key: jax.Array, in_features: int) -> dict[str, Any]:
        """``controller``, an LSTM's over [input, reads], and ``interface``, a linear map."""
        checks.key("key", key)
        width = checks.in_features(in_features) + self._read_features
        controller, interface = jax.random.split(key)
        interface_size = sum(map(math.prod, self.interface.values()))
        return {
            "controller": self._controller.init_params(controller, width),
            "interface": self.init_linear(interface, self.features, interface_size),
        }

    @nn.nowrap
    def initial(self, batch_shape: Sequence[int]) -> DNCState:
        slots, width = self.memory_slots, self.word_size
        reads, writes = self.read_heads, self.write_heads
        shapes = {
            "c": (self.features,),
            "h": (self.features,),
            "reads": (reads, width),
            "memory": (slots, width),
            "read_weights": (reads, slots),
            "write_weights": (writes, slots),
            "link": (writes, slots, slots),
            "precedence": (writes, slots),
            "usage": (slots,),
        }
        return DNCState(**{name: self.zeros(batch_shape, *s) for name, s in shapes.items()})

    @nn.nowrap
    def project(self, params: Params, x: jax.Array) -> dict[str, jax.Array]:
        """The input's part of the controller's pre-activations."""
        controller = params["controller"]
        checks.kernels(controller)
        rows = {s: kernel[: -self._read_features] for s, kernel in controller["kernel"].items()}
        input_params = {**controller, "kernel": rows}
        return linear_project(input_params, x, gate=self.gate, dtype=self.dtype)

    @nn.nowrap
    def step(self, params: Params, carry: DNCState, z_t: Slots) -> DNCState:
        checks.step(self, carry, z_t)
        z = self._with_reads(params["controller"], carry.reads, z_t)
        state = self._controller.step(params["controller"], LSTMState(carry.c, carry.h), z)
        if self.clip is not None:
            state = LSTMState(*(jnp.clip(x, -self.clip, self.clip) for x in state))
        interface = linear(params["interface"], state.h, inputs_dtype(z_t))
        return self._access(carry._replace(c=state.c, h=state.h), self._activated(interface))

    @nn.nowrap
    def gates(self, params: Params, carry_tm1: DNCState, z: Slots) -> dict[str, jax.Array]:
        """The controller's."""
        z = self._with_reads(params["controller"], carry_tm1.reads, z)
        state = LSTMState(carry_tm1.c, carry_tm1.h)
        return self._controller.gates(params["controller"], state, z)

    @nn.nowrap
    def emit(self, params: Params, carry: DNCState, z: Slots) -> jax.Array:
        del params
        return jnp.concatenate([carry.h, flat(carry.reads)], axis=-1).astype(inputs_dtype(z))

    @nn.nowrap
    def _with_reads(self, params: Params, reads: jax.Array, z: Slots) -> dict[str, jax.Array]:
        """Pre-activations with the part of what was read."""
        width, x = self._read_features, flat(reads)
        dtype = inputs_dtype(z)
        products = {s: matrix_product(x, k[-width:], dtype) for s, k in params["kernel"].items()}
        return {slot: z[slot] + product.astype(dtype) for slot, product in products.items()}

    @nn.nowrap
    def _activated(self, interface: jax.Array) -> dict[str, jax.Array]:
        """The interface by name, each in its range."""
        shapes = self.interface
        ends = list(itertools.accumulate(map(math.prod, shapes.values())))[:-1]
        pieces = dict(zip(shapes, jnp.split(interface, ends, axis=-1), strict=True))
        out = {name: x.reshape(*x.shape[:-1], *shapes[name]) for name, x in pieces.items()}
        for name in ("erase_vectors", "free_gates", "allocation_gates", "write_gates"):
            out[name] = jax.nn.sigmoid(out[name])
        for name in ("write_strengths", "read_strengths"):
            out[name] = jax.nn.softplus(out[name])
        out["read_modes"] = jax.nn.softmax(out["read_modes"], axis=-1)
        return out

    @nn.nowrap
    def _access(self, carry: DNCState, interface: Slots) -> DNCState:
        """Frees, writes, links and reads, in this order."""
        usage = addressing.next_usage(
            carry.usage, carry.write_weights, interface["free_gates"], carry.read_weights
        )
        content = addressing.content_weights(
            carry.memory, interface["write_keys"], interface["write_strengths"]
        )
        write_weights = addressing.write_weights(
            usage, content, interface["allocation_gates"], interface["write_gates"]
        )
        memory = addressing.next_memory(
            carry.memory, write_weights, interface["erase_vectors"], interface["write_vectors"]
        )
        link = addressing.next_link(carry.link, carry.precedence, write_weights)
        content = addressing.content_weights(
            memory, interface["read_keys"], interface["read_strengths"]
        )
        read_weights = addressing.read_weights(
            link, carry.read_weights, content, interface["read_modes"]
        )
        return carry._replace(
            reads=jnp.einsum("...rn,...nw->...rw", read_weights, memory),
            memory=memory,
            read_weights=read_weights,
            write_weights=write_weights,
            link=link,
            precedence=addressing.next_precedence(carry.precedence, write_weights),
            usage=usage,
        )
