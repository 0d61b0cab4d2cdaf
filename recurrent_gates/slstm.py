"""sLSTM, the recurrent cell of Beck et al., 2024, "xLSTM: extended long short-term memory" (2.2).

The input gate, and optionally the forget gate, is exponential, so that a later input may
outweigh all before it; a normaliser n keeps the sum of the weights, and a stabiliser m their
largest logarithm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import export

from recurrent_gates import checks, zoneout
from recurrent_gates.base import SlotCell, add_offsets, dense
from recurrent_gates.carry import CarryFn, Damp, Detach, Noise, Zoneout
from recurrent_gates.declared import Params, Product, Slots

_NOTHING = -1e30  # log of no weight at all, but finite: masks and means of carries stay so

_FORGET = ("sigmoid", "exp")


class SLSTMState(NamedTuple):
    """Carry of an sLSTM, all fields ``[*batch, F]``, float32 at least.

    What is remembered is c / n; c and n are kept in units of exp(m).

    Attributes:
      c: the cell state, the sum of candidates by their weights.
      n: the normaliser, the sum of the weights; from the first step on at least 1.
      h: the hidden state, which is emitted.
      m: the stabiliser, the largest logarithm of a weight.
    """

    c: jax.Array
    n: jax.Array
    h: jax.Array
    m: jax.Array


# So that jitted steps pass through jax.export.
export.register_namedtuple_serialization(SLSTMState, serialized_name="recurrent_gates.SLSTMState")


def slstm_step(
    params: Params, carry: SLSTMState, z_t: Slots, *, forget: str = "sigmoid"
) -> SLSTMState:
    """One sLSTM step: c_t = f * c_tm1 + i * z; n_t = f * n_tm1 + i; h_t = o * c_t / n_t.

    Args:
      params: ``SLSTM(F).init_params(key, D)``.
      carry: c, n, h and m, each ``[*batch, F]``.
      z_t: ``linear_project(params, x_t)``.
      forget: ``"sigmoid"`` or ``"exp"``, what f is of its pre-activation.

    Returns:
      The next c, n, h and m, float32 at least.

    Raises:
      ValueError: if ``params`` are another cell's, or ``z_t`` is no projection.
    """
    return _update(carry, _gates(carry, dense(params, z_t), forget))


def _gates(carry: SLSTMState, product: Product, forget: str) -> dict[str, jax.Array]:
    log_f, log_i = product("f", carry.h), product("i", carry.h)  # Beck et al., eq. (12)
    if forget == "sigmoid":
        log_f = jax.nn.log_sigmoid(log_f)  # Eq. (13)
    m = jnp.maximum(log_f + carry.m, log_i)  # Eq. (15)
    return {
        "i": jnp.exp(log_i - m),  # Eq. (16)
        "f": jnp.exp(log_f + carry.m - m),  # Eq. (17)
        "o": jax.nn.sigmoid(product("o", carry.h)),  # Eq. (14)
        "z": jnp.tanh(product("z", carry.h)),  # Eq. (11)
        "m": m,
    }


def _update(carry: SLSTMState, gates: dict[str, jax.Array]) -> SLSTMState:
    f, i = gates["f"], gates["i"]
    c = f * carry.c + i * gates["z"]  # Eq. (8)
    n = f * carry.n + i  # Eq. (9)
    return SLSTMState(c, n, gates["o"] * c / n, gates["m"])  # Eq. (10)


class SLSTM(SlotCell):
    """sLSTM: an LSTM with exponential gates and a normaliser (Beck et al., 2024). Emits h.

    Slots: i and f (input and forget gate), o (output gate) and z (candidate). ``gates`` shows f and
    i as they are with the stabiliser, at most 1.

    Attributes:
      forget: what f is of its pre-activation, ``"sigmoid"`` or ``"exp"``; the paper has both.
      forget_bias: where the bias of f starts.
      heads: N blocks on the diagonal of each recurrent kernel ``[N, F/N, F/N]``: the paper's
        heads, between which there is no memory mixing.

    Raises:
      ValueError: for a size below 1, a number of bias vectors other than 1 and 2, heads that do not
        divide the size, another ``forget``, or zoneout, detaching or damping of c, n or m.

    Note:
      A forget bias of 1, as the other LSTMs here have it, is ours; the authors' code spreads it
      over the units, by the depth of a block. m starts at -1e30 in the place of minus infinity:
      before the first step no weight was given, and so n is never 0 where it divides.
    """

    forget: str = "sigmoid"
    forget_bias: float = 1.0
    heads: int = 1

    def __post_init__(self) -> None:
        if self.forget not in _FORGET:
            raise ValueError(f"SLSTM forget must be 'sigmoid' or 'exp', got {self.forget!r}.")
        checks.numbers(self, "forget_bias")
        super().__post_init__()
        checks.heads(self)

    @property
    def slots(self) -> dict[str, int]:
        return dict.fromkeys(("i", "f", "o", "z"), self.features)

    @nn.nowrap
    def init_params(self, key: jax.Array, in_features: int) -> dict[str, Any]:
        params = super().init_params(key, in_features)
        offsets = {"f": jnp.asarray(self.forget_bias, self.param_dtype)}
        return {**params, "bias": add_offsets(params["bias"], offsets)}

    @nn.nowrap
    def initial(self, batch_shape: Sequence[int]) -> SLSTMState:
        c, n, h = (self.zeros(batch_shape) for _ in range(3))  # apart, so that each can be donated
        return SLSTMState(c, n, h, jnp.full_like(h, _NOTHING))

    @nn.nowrap
    def gates(self, params: Params, carry_tm1: SLSTMState, z: Slots) -> dict[str, jax.Array]:
        gates = _gates(carry_tm1, dense(params, z), self.forget)
        return {name: gate for name, gate in gates.items() if name != "m"}

    @nn.nowrap
    def update(self, carry: SLSTMState, inputs: Slots, product: Product) -> SLSTMState:
        return _update(carry, _gates(carry, product, self.forget))

    @nn.nowrap
    def _around(self, carry_fns: Sequence[CarryFn], noise: Sequence[Noise]) -> zoneout.Around:
        for fn in carry_fns:
            field = fn.field
            if isinstance(field, int) and field in range(-4, 4):
                field = SLSTMState._fields[field]
            if isinstance(fn, Zoneout | Detach | Damp) and field in ("c", "n", "m"):
                raise ValueError(
                    f"{type(fn).__name__} of {field} alone would depend on the stabiliser: c and n "
                    "of an SLSTM are in units of exp(m); take h."
                )
        return super()._around(carry_fns, noise)
