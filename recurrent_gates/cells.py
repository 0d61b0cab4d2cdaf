"""The step equations, and the Flax cells over them.

Each section is one family: the equations as functions that need no Flax (``elman_step``,
``lstm_step``, ``gru_step``), then the cell with its settings. At the end are ``FlaxCell``, which
makes a cell of one of Flax, and ``count_parameters``. GATO, GRU-D, the sLSTM, the linear
recurrences and the cells with a memory have files of their own. Letters are those of ``base.py``;
u is h-detach's g.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import export

from recurrent_gates import checks, zoneout
from recurrent_gates.base import (
    Activation,
    Cell,
    HiddenState,
    SlotCell,
    dense,
)
from recurrent_gates.carry import CarryFn, Noise, Zoneout
from recurrent_gates.declared import Params, Product, Slots, is_inexact
from recurrent_gates.gates import GATES, Gate


class LSTMState(NamedTuple):
    """Carry of an LSTM, both fields ``[*batch, F]``, float32 at least.

    Attributes:
      c: the cell state, which is only read through its output gate.
      h: the hidden state, which is emitted.
    """

    c: jax.Array
    h: jax.Array


# So that jitted steps pass through jax.export.
export.register_namedtuple_serialization(LSTMState, serialized_name="recurrent_gates.LSTMState")


# ---------------------------------------------------------------------------------------
# Elman network (GATO eq. 1) and the exploding example (GATO eq. 2)
# ---------------------------------------------------------------------------------------


def _elman_update(carry: HiddenState, product: Product, activation: Activation) -> HiddenState:
    return HiddenState(activation(product("h", carry.h)))  # GATO eq. (1)


def elman_step(
    params: Params, carry: HiddenState, z_t: Slots, *, activation: Activation = jnp.tanh
) -> HiddenState:
    """h_t = activation(U h_tm1 + W x_t + b) (Elman, 1990; GATO, eq. 1).

    Args:
      params: ``Elman(F).init_params(key, D)``.
      carry: h ``[*batch, F]``.
      z_t: ``linear_project(params, x_t)``.
      activation: the non-linearity.

    Returns:
      The next h, float32 at least.

    Raises:
      ValueError: if ``params`` are another cell's, or ``z_t`` is no projection.
    """
    return _elman_update(carry, dense(params, z_t), activation)


class Elman(SlotCell):
    """The basic recurrent network (Elman, 1990; GATO, eq. 1). Emits h ``[..., F]``.

    Attributes:
      activation: the non-linearity.
    """

    activation: Activation = jnp.tanh

    def __post_init__(self) -> None:
        checks.function("Elman activation", self.activation, "jnp.tanh")
        super().__post_init__()

    @nn.nowrap
    def initial(self, batch_shape: Sequence[int]) -> HiddenState:
        return HiddenState(self.zeros(batch_shape))

    @property
    def slots(self) -> dict[str, int]:
        return {"h": self.features}

    @nn.nowrap
    def update(self, carry: HiddenState, inputs: Slots, product: Product) -> HiddenState:
        return _elman_update(carry, product, self.activation)


class Exploding(SlotCell):
    """GATO's example of a state that grows without bound (eq. 2): z is a tanh, not a gate.

    z = tanh(W1 x + U h); h = z * h + (1 - z) * tanh(W2 h). Emits h ``[..., F]``.
    """

    @nn.nowrap
    def initial(self, batch_shape: Sequence[int]) -> HiddenState:
        return HiddenState(self.zeros(batch_shape))

    @property
    def slots(self) -> dict[str, int]:
        return {"z": self.features, "u": self.features}

    @property
    def input_slots(self) -> dict[str, int]:
        return {"z": self.features}

    @nn.nowrap
    def gates(self, params: Params, carry_tm1: HiddenState, z: Slots) -> dict[str, jax.Array]:
        return {"z": jnp.tanh(dense(params, z)("z", carry_tm1.h))}

    @nn.nowrap
    def update(self, carry: HiddenState, inputs: Slots, product: Product) -> HiddenState:
        h = carry.h
        z = jnp.tanh(product("z", h))
        return HiddenState(z * h + (1 - z) * jnp.tanh(product("u", h)))  # GATO eq. (2)


# ---------------------------------------------------------------------------------------
# LSTM (UR-gates eq. 1-15, h-detach eq. 1-6, lecture)
# ---------------------------------------------------------------------------------------


def _lstm_gates(
    h_tm1: jax.Array, product: Product, gate: Gate, activation: Activation, forget_gate: bool
) -> dict[str, jax.Array]:
    if forget_gate:
        pre = {slot: product(slot, h_tm1) for slot in gate.slots(h_tm1.shape[-1])}
        f, i = gate.activate(pre)  # UR-gates eq. (2), (3) or (10)-(12), h-detach eq. (4), (5)
    else:
        i = jax.nn.sigmoid(product("i", h_tm1))
        f = jnp.ones_like(i)
    o = jax.nn.sigmoid(product("o", h_tm1))  # UR-gates eq. (6), (14), h-detach eq. (6)
    u = activation(product("u", h_tm1))  # UR-gates eq. (4), h-detach eq. (3)
    return {"f": f, "i": i, "o": o, "u": u}


def _lstm_update(
    carry: LSTMState, gates: Mapping[str, jax.Array], output_activation: Activation
) -> LSTMState:
    c = gates["f"] * carry.c + gates["i"] * gates["u"]  # h-detach eq. (1), UR-gates eq. (5), (13)
    h = gates["o"] * output_activation(c)  # h-detach eq. (2), UR-gates eq. (7), (15)
    return LSTMState(c, h)


def lstm_step(
    params: Params,
    carry: LSTMState,
    z_t: Slots,
    *,
    gate: Gate = GATES["standard"],
    activation: Activation = jnp.tanh,
    output_activation: Activation = jnp.tanh,
    forget_gate: bool = True,
) -> LSTMState:
    """One LSTM step: c_t = f * c_tm1 + i * u; h_t = o * output_activation(c_t).

    Args:
      params: ``LSTM(F).init_params(key, D)``.
      carry: c and h, each ``[*batch, F]``.
      z_t: ``linear_project(params, x_t, gate=gate)``.
      gate: how f and i come from their pre-activations.
      activation: of the candidate u (lecture: sigmoid).
      output_activation: of c (lecture: sigmoid).
      forget_gate: False for the lecture's s_t = s_tm1 + i * s~.

    Returns:
      The next c and h, float32 at least.

    Raises:
      ValueError: if ``params`` are another cell's, or ``z_t`` is no projection.

    Example:
      >>> lstm = rg.LSTM(4)
      >>> params, carry = lstm.init_params(jax.random.key(0), 3), lstm.initial((2,))
      >>> for x in jax.random.normal(jax.random.key(1), (6, 2, 3)):
      ...     z_t = rg.linear_project(params, x, gate=rg.GATES["standard"])
      ...     carry = rg.lstm_step(params, carry, z_t)
      >>> carry.h.shape
      (2, 4)
    """
    gates = _lstm_gates(carry.h, dense(params, z_t), gate, activation, forget_gate)
    return _lstm_update(carry, gates, output_activation)


class LSTM(SlotCell):
    """Long short-term memory with any gate mechanism. Emits h ``[..., F]``.

    Slots: the gate's (f and i, or f and r, ...), o (output gate) and u (candidate).

    Attributes:
      gate: how f and i are made; the default has a forget bias of 1 (UR-gates, Listing 1).
      activation: of the candidate.
      output_activation: of c on its way to h.
      forget_gate: False for the lecture's s_t = s_tm1 + i * s~; needs the standard gate.
      heads: N blocks on the diagonal of each recurrent kernel ``[N, F/N, width/N]``, so that a
        unit reads those of its own head; 1: the whole matrix ``[F, width]``.

    Raises:
      ValueError: for a size below 1, a gate that does not fit it, a number of bias vectors other
        than 1 and 2, ``forget_gate=False`` with another gate than the standard one, or heads that
        do not divide the size.
    """

    gate: Gate = GATES["standard"]
    activation: Activation = jnp.tanh
    output_activation: Activation = jnp.tanh
    forget_gate: bool = True
    heads: int = 1

    def __post_init__(self) -> None:
        name = type(self).__name__
        checks.instance(f"{name} gate", self.gate, Gate, "GATES['ur']")
        checks.function(f"{name} activation", self.activation, "jnp.tanh")
        checks.function(f"{name} output_activation", self.output_activation, "jnp.tanh")
        checks.flag(f"{name} forget_gate", self.forget_gate)
        if not self.forget_gate and self.gate != GATES["standard"]:
            raise ValueError("forget_gate=False leaves no f to shape: use the standard gate.")
        super().__post_init__()
        self.gate.check(self.features)
        checks.heads(self)

    @property
    def _gate(self) -> Gate | None:
        return self.gate if self.forget_gate else None

    @property
    def slots(self) -> dict[str, int]:
        gate = self.gate.slots(self.features) if self.forget_gate else {"i": self.features}
        return {**gate, "o": self.features, "u": self.features}

    @nn.nowrap
    def initial(self, batch_shape: Sequence[int]) -> LSTMState:
        return LSTMState(self.zeros(batch_shape), self.zeros(batch_shape))

    @nn.nowrap
    def gates(self, params: Params, carry_tm1: LSTMState, z: Slots) -> dict[str, jax.Array]:
        return self._gates(carry_tm1, dense(params, z))

    @nn.nowrap
    def _gates(self, carry: LSTMState, product: Product) -> dict[str, jax.Array]:
        return _lstm_gates(carry.h, product, self.gate, self.activation, self.forget_gate)

    @nn.nowrap
    def update(self, carry: LSTMState, inputs: Slots, product: Product) -> LSTMState:
        return _lstm_update(carry, self._gates(carry, product), self.output_activation)


# ---------------------------------------------------------------------------------------
# GRU (Cho et al., 2014; GATO App. E; lecture) and JANET (UR-gates B.4, footnote 4)
# ---------------------------------------------------------------------------------------

_GRU_GATE = Gate(forget_bias=0.0, tied=True)


def _gru_gates(
    h: jax.Array,
    z_u: jax.Array | None,
    product: Product,
    gate: Gate,
    reset: str | bool,
    activation: Activation,
) -> dict[str, jax.Array]:
    """The gates and the candidate u; z_u, its part of the input, with a reset after the product."""
    f, i = gate.activate({slot: product(slot, h) for slot in gate.slots(h.shape[-1])})
    gates = {"f": f, "i": i}
    if reset == "after":
        assert z_u is not None
        r = gates["reset"] = jax.nn.sigmoid(product("reset", h))
        u_h = product("u", h)
        u = activation(z_u.astype(u_h.dtype) + r * u_h)  # torch: W x + b + r * (U h + b')
    elif reset == "before":
        r = gates["reset"] = jax.nn.sigmoid(product("reset", h))
        u = activation(product("u", r * h))  # GATO App. E: W x + U (r * h)
    else:
        u = activation(product("u", h))
    return {**gates, "u": u}


def gru_step(
    params: Params,
    carry: HiddenState,
    z_t: Slots,
    *,
    gate: Gate = _GRU_GATE,
    reset: str | bool = "after",
    activation: Activation = jnp.tanh,
) -> HiddenState:
    """One GRU step: h_t = f * h_tm1 + i * u, with i = 1 - f unless there are master gates.

    Args:
      params: ``GRU(F).init_params(key, D)``.
      carry: h ``[*batch, F]``.
      z_t: ``linear_project(params, x_t, gate=gate.tie(), separate=("u",) if reset == "after"
        else ())``.
      gate: how f (torch's z) and i are made; it is tied as ``Gate.tie`` says.
      reset: ``"after"`` the recurrent product (torch), ``"before"`` it (Cho, the lecture, GATO's
        App. E) or False.
      activation: of the candidate u.

    Returns:
      The next h, float32 at least.

    Raises:
      ValueError: if ``params`` are another cell's, or ``z_t`` is no projection.

    Note:
      f multiplies the old state, as in torch and GATO's App. E. The lecture and other texts
      print the gate of the new content, 1 - f.
    """
    product = dense(params, z_t, _gru_separate(reset))
    gates = _gru_gates(carry.h, z_t["u"], product, gate.tie(), reset, activation)
    return HiddenState(gates["f"] * carry.h + gates["i"] * gates["u"])


def _gru_separate(reset: str | bool) -> tuple[str, ...]:
    return ("u",) if reset == "after" else ()


class GRU(SlotCell):
    """Gated recurrent unit with any gate mechanism. Emits h ``[..., F]``.

    Slots: the gate's (f is torch's z), reset and u (candidate). With ``reset="after"`` and
    one bias vector the candidate keeps a recurrent bias of its own, inside the reset.

    Attributes:
      gate: how f and i are made, tied as ``Gate.tie`` says; default: no forget bias (torch).
      reset: ``"after"``, ``"before"`` or False; see ``gru_step``.
      activation: of the candidate.
      heads: N blocks on the diagonal of each recurrent kernel, as in ``LSTM``.

    Raises:
      ValueError: for a size below 1, a gate that does not fit it, a number of bias vectors other
        than 1 and 2, another ``reset``, or heads that do not divide the size.
    """

    gate: Gate = _GRU_GATE
    reset: str | bool = "after"
    activation: Activation = jnp.tanh
    heads: int = 1

    def __post_init__(self) -> None:
        if self.reset not in ("after", "before", False):
            raise ValueError(f"GRU reset must be 'after', 'before' or False, got {self.reset!r}.")
        name = type(self).__name__
        checks.instance(f"{name} gate", self.gate, Gate, "GATES['ur']")
        checks.function(f"{name} activation", self.activation, "jnp.tanh")
        super().__post_init__()
        self.gate.check(self.features)
        checks.heads(self)

    @nn.nowrap
    def initial(self, batch_shape: Sequence[int]) -> HiddenState:
        return HiddenState(self.zeros(batch_shape))

    @property
    def _gate(self) -> Gate:
        return self.gate.tie()

    @property
    def separate(self) -> tuple[str, ...]:
        return _gru_separate(self.reset)

    @property
    def slots(self) -> dict[str, int]:
        reset = {"reset": self.features} if self.reset else {}
        return {**self._gate.slots(self.features), **reset, "u": self.features}

    @nn.nowrap
    def gates(self, params: Params, carry_tm1: HiddenState, z: Slots) -> dict[str, jax.Array]:
        return self._gates(carry_tm1, z["u"], dense(params, z, self.separate))

    @nn.nowrap
    def _gates(
        self, carry: HiddenState, z_u: jax.Array | None, product: Product
    ) -> dict[str, jax.Array]:
        return _gru_gates(carry.h, z_u, product, self._gate, self.reset, self.activation)

    @nn.nowrap
    def update(self, carry: HiddenState, inputs: Slots, product: Product) -> HiddenState:
        gates = self._gates(carry, inputs.get("u_input"), product)
        return HiddenState(gates["f"] * carry.h + gates["i"] * gates["u"])  # GATO App. E


class JANET(GRU):
    """The GRU without a reset gate, the simplest gated network (UR-gates B.4, footnote 4).

    h_t = f * h_tm1 + (1 - f) * tanh(L_u(x_t, h_tm1)). Emits h ``[..., F]``. Forget bias 1.

    Attributes:
      gate: how f is made, as in ``GRU``.
      reset: False, always.

    Raises:
      ValueError: as in ``GRU``, and for a reset gate.
    """

    gate: Gate = Gate(tied=True)
    reset: str | bool = False

    def __post_init__(self) -> None:
        if self.reset is not False:
            raise ValueError(f"JANET has no reset gate, got reset={self.reset!r}: use GRU.")
        super().__post_init__()


# ---------------------------------------------------------------------------------------
# Foreign cells
# ---------------------------------------------------------------------------------------


class FlaxCell(Cell):
    """Any Flax linen cell as one of ours: carry functions, masks and resets included.

    The carry is a plain tuple: the foreign carry's fields in order, then y. So
    ``Detach(p, field=1)`` detaches h of ``FlaxCell(nn.LSTMCell(8))``, whose carry is (c, h).
    Where y is a copy of a field, as in Flax's own cells, it is a copy of what zoneout kept of it;
    where it is not, ``Zoneout`` on another field than y is a ValueError.

    Attributes:
      module: the foreign cell, with features on the last axis only.

    Raises:
      ValueError: if ``module`` is not a cell of Flax linen.
    """

    module: nn.RNNCellBase

    def __post_init__(self) -> None:
        if not isinstance(self.module, nn.RNNCellBase):
            raise ValueError(
                "FlaxCell wraps a cell of Flax linen (an RNNCellBase) such as nn.LSTMCell(8), got "
                f"{checks.described(self.module)}."
            )
        super().__post_init__()

    @property
    def _has_one_draw(self) -> bool:
        return True  # one entry may be made of another

    @nn.nowrap
    def _inner(self) -> nn.RNNCellBase:
        return self.module.clone(parent=None)

    @nn.nowrap
    def _split(self, carry: tuple) -> Any:
        *fields, _ = carry
        like = jax.eval_shape(lambda: self._inner().initialize_carry(jax.random.key(0), (1,)))
        return jax.tree.unflatten(jax.tree.structure(like), fields)

    @nn.nowrap
    def init_params(self, key: jax.Array, in_features: int) -> dict[str, Any]:
        inner = self._inner()
        carry = inner.initialize_carry(key, (in_features,))
        variables = inner.init(key, carry, _zeros_beside(carry, (in_features,)))
        return dict(variables.get("params", {}))

    @nn.nowrap
    def initial(self, batch_shape: Sequence[int]) -> tuple:
        inner = self._inner()
        shape = (*batch_shape, 1)
        carry = inner.initialize_carry(jax.random.key(0), shape)
        (_, y), _ = jax.eval_shape(
            lambda key: inner.init_with_output(key, carry, _zeros_beside(carry, shape)),
            jax.random.key(0),
        )
        return (*jax.tree.leaves(carry), jnp.zeros(y.shape, y.dtype))

    @nn.nowrap
    def step(self, params: Params, carry: tuple, z_t: jax.Array) -> tuple:
        new, y = self._inner().apply({"params": params}, self._split(carry), z_t)
        return (*jax.tree.leaves(new), y)

    @nn.nowrap
    def emit(self, params: Params, carry: tuple, z: jax.Array) -> jax.Array:
        del params, z
        return carry[-1]

    @nn.nowrap
    def _around(self, carry_fns: Sequence[CarryFn], noise: Sequence[Noise]) -> zoneout.Around:
        if not any(isinstance(fn, Zoneout) for fn in carry_fns):
            return self, tuple(carry_fns), tuple(noise)
        copied, fields = _copied_field(self._inner())
        name = f"FlaxCell({type(self.module).__name__})"
        return self, *zoneout.copy_after_zoneout(copied, fields, name, carry_fns, noise)


def _zeros_beside(carry: Any, shape: tuple[int, ...]) -> jax.Array:
    """What a foreign cell may read, in the dtype of its carry: a wider one would widen that."""
    floats = (leaf.dtype for leaf in jax.tree.leaves(carry) if is_inexact(leaf))
    return jnp.zeros(shape, next(floats, None))


@functools.lru_cache
def _copied_field(module: nn.RNNCellBase) -> tuple[int | None, int]:
    """(which leaf of its carry a cell's y is, if any; how many leaves there are, y included)."""

    def step(key: jax.Array) -> list[jax.Array]:
        carry = module.initialize_carry(key, (1,))
        (carry, y), _ = module.init_with_output(key, carry, _zeros_beside(carry, (1,)))
        return [*jax.tree.leaves(carry), y]

    *fields, y = jax.make_jaxpr(step)(jax.random.key(0)).jaxpr.outvars
    return next((n for n, field in enumerate(fields) if field is y), None), len(fields) + 1


def count_parameters(params: Any) -> int:
    """The number of scalars in a tree of parameters.

    Args:
      params: arrays, or shapes as ``jax.eval_shape`` gives them.

    Returns:
      Their number.

    Raises:
      ValueError: if a leaf has no shape.

    Example:
      >>> rg.count_parameters(rg.LSTM(4).init_params(jax.random.key(0), 3))
      128
    """
    leaves = jax.tree.leaves(params)
    for leaf in leaves:
        if not hasattr(leaf, "shape"):
            text = checks.described(leaf)
            raise ValueError(f"params must be a tree of arrays or of shapes, got {text} in it.")
    return sum(math.prod(leaf.shape) for leaf in leaves)
