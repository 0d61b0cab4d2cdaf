"""Linear recurrences: gates that read the input alone, so that a step is h_t = a_t * h_tm1 + b_t.

``MinGRU`` and ``MinLSTM`` are of Feng et al., 2024, "Were RNNs all we needed?"; ``RGLRU`` is the
recurrence of De et al., 2024, "Griffin: mixing gated linear recurrences with local attention for
efficient language models"; ``LRU`` is of Orvieto et al., 2023, "Resurrecting recurrent neural
networks for long sequences". They declare ``linear``, so that the parallel backend solves all
steps at once. That other gates than each paper's own drive the first three is ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import export

from recurrent_gates import checks
from recurrent_gates.base import Activation, Cell, HiddenState, add_offsets, linear_project
from recurrent_gates.declared import Params, Slots, redefined, state_dtype
from recurrent_gates.gates import Gate
from recurrent_gates.initializers import Initializer
from recurrent_gates.shapes import lead

_LECUN = nn.initializers.lecun_normal()
_ZEROS = nn.initializers.zeros

# Torch's and the papers' plain linear maps: no constant is added to a forget gate's bias.
_UNBIASED = Gate(forget_bias=0.0)


def identity(x: jax.Array) -> jax.Array:
    """x."""
    return x


class _InputGated(Cell):
    """Base of cells with h_t = f * h_tm1 + i * u, whose f, i and u read the input alone.

    A subclass defines ``_gates``. Parameters: ``{"kernel": {slot: [D, width]}, "bias": {slot:
    [width]}}``, plus ``"gate"`` where the gate owns parameters. Slots: the gate's, and u.
    """

    features: int
    gate: Gate = _UNBIASED
    kernel_init: Initializer = _LECUN
    bias_init: Initializer = _ZEROS
    dtype: Any = None
    param_dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        name = type(self).__name__
        checks.input_gated_settings(self)
        checks.instance(f"{name} gate", self.gate, Gate, "GATES['ur']")
        super().__post_init__()
        self._gate.check(self.features)

    @property
    def linear(self) -> bool:
        return redefined(self, "gates", "linear") is None  # gates of one's own may read the carry

    @property
    def _gate(self) -> Gate:
        return self.gate

    @nn.nowrap
    def _gates(self, params: Params, pre: Slots) -> dict[str, jax.Array]:
        """f, i and u from pre-activations by slot, float32 at least."""
        raise TypeError(f"{type(self).__name__} must define _gates(params, pre).")

    @nn.nowrap
    def init_params(self, key: jax.Array, in_features: int) -> dict[str, Any]:
        checks.key("key", key)
        in_features, dtype = checks.in_features(in_features), self.param_dtype
        slots = {**self._gate.slots(self.features), "u": self.features}
        keys = iter(jax.random.split(key, 2 * len(slots) + 2))
        params: dict[str, Any] = {
            "kernel": {
                s: self.kernel_init(next(keys), (in_features, w), dtype) for s, w in slots.items()
            },
            "bias": {s: self.bias_init(next(keys), (w,), dtype) for s, w in slots.items()},
        }
        offsets = self._gate.slot_bias(next(keys), self.features, dtype)
        params["bias"] = add_offsets(params["bias"], offsets)
        gate_params = self._gate.init(next(keys), self.features, dtype)
        return {**params, "gate": gate_params} if gate_params else params

    @nn.nowrap
    def initial(self, batch_shape: Sequence[int]) -> HiddenState:
        shape = (*checks.shape("batch_shape", batch_shape), self.features)
        return HiddenState(jnp.zeros(shape, state_dtype(self.param_dtype)))

    @nn.nowrap
    def project(self, params: Params, x: jax.Array) -> dict[str, jax.Array]:
        return linear_project(params, x, gate=self._gate, dtype=self.dtype)

    @nn.nowrap
    def gates(
        self, params: Params, carry_tm1: HiddenState, z: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        del carry_tm1
        checks.projections(z)
        return self._gates(params, {s: p.astype(state_dtype(p.dtype)) for s, p in z.items()})

    @nn.nowrap
    def step(self, params: Params, carry: HiddenState, z_t: Slots) -> HiddenState:
        checks.step(self, carry, z_t)
        checks.one_time(carry, z_t)
        gates = self.gates(params, carry, z_t)
        return HiddenState(gates["f"] * carry.h + gates["i"] * gates["u"])

    @nn.nowrap
    def emit(self, params: Params, carry: HiddenState, z: Slots) -> jax.Array:
        del params
        return carry.h.astype(z["u"].dtype)


class MinGRU(_InputGated):
    """minGRU: h_t = f * h_tm1 + (1 - f) * u, f and u from x alone (Feng et al., 2024, 3.1).

    Emits h ``[..., F]``. Slots: the gate's (f is the paper's 1 - z) and u (candidate).

    Attributes:
      features: F, the hidden size.
      gate: how f and i are made, tied as ``Gate.tie`` says; default: no forget bias.
      kernel_init: start of the kernels.
      bias_init: start of the biases, before the gate's own constant is added.
      dtype: dtype of projections; None: that of inputs and parameters.
      param_dtype: dtype of the parameters. h is float32 at least, whatever it is.
      activation: of the candidate; the paper's equations have none. Its code in log-space, which
        needs a positive candidate, takes x + 0.5 above 0 and sigmoid(x) below.

    Raises:
      ValueError: for a size below 1, or a gate that does not fit it.
    """

    activation: Activation = identity

    def __post_init__(self) -> None:
        checks.function(f"{type(self).__name__} activation", self.activation, "jnp.tanh")
        super().__post_init__()

    @property
    def _gate(self) -> Gate:
        return self.gate.tie()

    @nn.nowrap
    def _gates(self, params: Params, pre: Slots) -> dict[str, jax.Array]:
        del params
        f, i = self._gate.activate(pre)  # Feng et al., 3.1.1
        return {"f": f, "i": i, "u": self.activation(pre["u"])}  # 3.1.2


class MinLSTM(_InputGated):
    """minLSTM: h_t = f' * h_tm1 + i' * u, f' = f / (f + i), i' = i / (f + i) (Feng et al., 3.2).

    Emits h ``[..., F]``. Slots: the gate's (f and i, or f and r, ...) and u (candidate). A gate
    that ties i = 1 - f leaves nothing to divide by: with R, UR, CR and OR it is the minGRU.

    Attributes:
      features: F, the hidden size.
      gate: how f and i are made; default: no forget bias.
      kernel_init: start of the kernels.
      bias_init: start of the biases, before the gate's own constant is added.
      dtype: dtype of projections; None: that of inputs and parameters.
      param_dtype: dtype of the parameters. h is float32 at least, whatever it is.
      activation: of the candidate, as in ``MinGRU``.

    Raises:
      ValueError: for a size below 1, or a gate that does not fit it.
    """

    activation: Activation = identity

    def __post_init__(self) -> None:
        checks.function(f"{type(self).__name__} activation", self.activation, "jnp.tanh")
        super().__post_init__()

    @nn.nowrap
    def _gates(self, params: Params, pre: Slots) -> dict[str, jax.Array]:
        del params
        if self.gate.tied:  # f + i = 1
            f, i = self.gate.activate(pre)
        else:
            log_ratio = self._log_of_ratio(pre)
            f, i = jax.nn.sigmoid(log_ratio), jax.nn.sigmoid(-log_ratio)  # Feng et al., 3.2.3
        return {"f": f, "i": i, "u": self.activation(pre["u"])}

    @nn.nowrap
    def _log_of_ratio(self, pre: Slots) -> jax.Array:
        """log(f / i), whose sigmoid is f / (f + i) (Feng et al., B.2).

        Of sigmoids it is exact also where f and i are too small to be added. A cumax, or a gate
        with equations of its own, counts as the root of the smallest number at least.
        """
        if self.gate.activation == "sigmoid" and not self.gate.has_own_equations:
            return self.gate.log_ratio(pre)
        f, i = self.gate.activate(pre)  # 3.2.1
        floor = math.sqrt(jnp.finfo(f.dtype).tiny)  # below it 1 / f times a cotangent may overflow
        return jnp.log(jnp.maximum(f, floor)) - jnp.log(jnp.maximum(i, floor))


class RGLRU(_InputGated):
    """Real-gated linear recurrent unit (De et al., 2024, eq. 1-4). Emits h ``[..., F]``.

    h_t = a_t * h_tm1 + sqrt(1 - a_t^2) * (i * u), a_t = sigmoid(decay)^(c (1 - f)).

    The paper's recurrence gate is 1 - f, so that an open forget gate keeps everything; a gate that
    ties i makes it the recurrence gate itself (both ours). Slots: the gate's, and u, the input. In
    Griffin a linear layer and a convolution come before, and the gates read what they make; here
    the linear layer is the slot u, and the gates read x: a linear map of u is one of x (ours).
    Beside them there is ``"decay" [F]``, the paper's Lambda.

    Attributes:
      features: F, the hidden size.
      gate: how f and i are made; default: no forget bias.
      kernel_init: start of the kernels.
      bias_init: start of the biases, before the gate's own constant is added.
      dtype: dtype of projections; None: that of inputs and parameters.
      param_dtype: dtype of the parameters. h is float32 at least, whatever it is.
      rate: c.
      slowest, fastest: a^c starts uniform between these.

    Raises:
      ValueError: for a size below 1, a gate that does not fit it, a rate that is not positive, or
        decays that are not 0 < fastest < slowest < 1.

    Note:
      Appendix A prints log a_t = -c softplus(Lambda) r_t; with a = sigmoid(Lambda) it is
      -c softplus(-Lambda) r_t. The authors' code leaves out the root of eq. 4 at the first step and
      after resets; here, as in the equation, it is at every step.
    """

    rate: float = 8.0  # De et al., 2.4
    slowest: float = 0.999  # De et al., 2.4
    fastest: float = 0.9

    def __post_init__(self) -> None:
        checks.numbers(self, "rate", "slowest", "fastest")
        if self.rate <= 0:
            raise ValueError(f"RGLRU rate must be above 0, got {self.rate!r}.")
        if not 0 < self.fastest < self.slowest < 1:
            raise ValueError(
                "RGLRU needs 0 < fastest < slowest < 1, "
                f"got fastest = {self.fastest!r} and slowest = {self.slowest!r}."
            )
        super().__post_init__()

    @nn.nowrap
    def init_params(self, key: jax.Array, in_features: int) -> dict[str, Any]:
        checks.key("key", key)
        key, decay_key = jax.random.split(key)
        params = super().init_params(key, in_features)
        dtype = state_dtype(self.param_dtype)
        powers = jax.random.uniform(decay_key, (self.features,), dtype, self.fastest, self.slowest)
        powers = jnp.minimum(powers, 1 - jnp.finfo(dtype).epsneg)  # rounded it may be 1
        log_a = jnp.log(powers) / self.rate
        decay = log_a - jnp.log(-jnp.expm1(log_a))  # logit(a)
        return {**params, "decay": decay.astype(self.param_dtype)}

    @nn.nowrap
    def _gates(self, params: Params, pre: Slots) -> dict[str, jax.Array]:
        f, i = self.gate.activate(pre)  # Eq. (1), (2)
        decay = jax.nn.log_sigmoid(params["decay"].astype(f.dtype))
        log_a = self.rate * lead(decay, f) * (1 - f)  # Eq. (3)
        share = jnp.maximum(-jnp.expm1(2 * log_a), jnp.finfo(f.dtype).tiny)  # the root has a slope
        return {"f": jnp.exp(log_a), "i": jnp.sqrt(share) * i, "u": pre["u"]}  # Eq. (4)


class LRUState(NamedTuple):
    """Carry of the LRU, a complex state in two fields ``[*batch, F]``, float32 at least.

    Attributes:
      real: its real part.
      imag: its imaginary part.
    """

    real: jax.Array
    imag: jax.Array


export.register_namedtuple_serialization(LRUState, serialized_name="recurrent_gates.LRUState")


class LRU(Cell):
    """Linear recurrent unit: F complex numbers that turn and decay (Orvieto et al., 2023, 3).

    s_t = lambda * s_tm1 + gamma * (B x_t); emits Re(C s_t) + D x_t ``[..., F]``. It has no gates:
    lambda = exp(-exp(nu) + i exp(theta)) is the same at every step.

    Parameters: ``"nu"``, ``"theta"``, ``"gamma"`` (the paper's logarithms) ``[F]``, ``"kernel"``
    (B) ``{"real", "imag": [D, F]}``, ``"out_kernel"`` (C) ``{"real", "imag": [F, F]}`` and
    ``"skip"`` (D) ``[D, F]``.

    Attributes:
      features: F, the number of complex units, and of outputs.
      r_min, r_max: ``|lambda|`` starts on this ring, uniform by area.
      max_phase: the phase of lambda starts uniform below it.
      dtype: dtype of projections and outputs; None: that of inputs and parameters.
      param_dtype: dtype of the parameters. The state is float32 at least, whatever it is.

    Raises:
      ValueError: for a size below 1, a ring that is not 0 <= r_min < r_max <= 1, or a max_phase
        that is not above 0.

    Note:
      As many units as outputs, and D starting like a kernel where inputs and outputs differ in
      number, are ours. A complex state is two real fields, since carries are floats everywhere.
    """

    features: int
    r_min: float = 0.0
    r_max: float = 1.0
    max_phase: float = 2 * math.pi
    dtype: Any = None
    param_dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        checks.features_and_dtypes(self)
        checks.numbers(self, "r_min", "r_max", "max_phase")
        if self.max_phase <= 0:
            raise ValueError(f"LRU max_phase must be above 0, got {self.max_phase!r}.")
        if not 0 <= self.r_min < self.r_max <= 1:
            raise ValueError(
                "LRU needs 0 <= r_min < r_max <= 1, "
                f"got r_min = {self.r_min!r} and r_max = {self.r_max!r}."
            )
        super().__post_init__()

    @property
    def linear(self) -> bool:
        return True

    @property
    def _has_one_draw(self) -> bool:
        return True  # gamma is made of nu

    @nn.nowrap
    def init_params(self, key: jax.Array, in_features: int) -> dict[str, Any]:
        checks.key("key", key)
        inputs, units = checks.in_features(in_features), self.features
        dtype = state_dtype(self.param_dtype)
        ring, phase, *keys = jax.random.split(key, 7)
        open_interval = jnp.finfo(dtype).eps, 1 - jnp.finfo(dtype).eps  # 0 and 1 have no logarithm
        area = jax.random.uniform(ring, (units,), dtype, *open_interval)
        turn = jax.random.uniform(phase, (units,), dtype, *open_interval)
        # Orvieto et al., Lemma 3.2: u (r_max^2 - r_min^2) + r_min^2 is |lambda|^2.
        squared = area * (self.r_max**2 - self.r_min**2) + self.r_min**2
        limits = jnp.finfo(dtype).tiny, 1 - jnp.finfo(dtype).epsneg
        squared = jnp.clip(squared, *limits)  # rounded it may be 0 or 1
        draws = [
            scale * jax.random.normal(k, shape, dtype)
            for k, shape, scale in zip(
                keys,
                ((inputs, units),) * 2 + ((units, units),) * 2 + ((inputs, units),),
                ((2 * inputs) ** -0.5,) * 2 + (units**-0.5,) * 2 + (inputs**-0.5,),
                strict=True,
            )
        ]
        params = {
            "nu": jnp.log(-0.5 * jnp.log(squared)),
            "theta": jnp.log(self.max_phase * turn),
            "gamma": 0.5 * jnp.log1p(-squared),  # 3.4: sqrt(1 - |lambda|^2)
            "kernel": {"real": draws[0], "imag": draws[1]},
            "out_kernel": {"real": draws[2], "imag": draws[3]},
            "skip": draws[4],
        }
        return jax.tree.map(lambda leaf: leaf.astype(self.param_dtype), params)

    @nn.nowrap
    def initial(self, batch_shape: Sequence[int]) -> LRUState:
        shape = (*checks.shape("batch_shape", batch_shape), self.features)
        dtype = state_dtype(self.param_dtype)
        return LRUState(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    @nn.nowrap
    def project(self, params: Params, x: jax.Array) -> dict[str, jax.Array]:
        checks.kernels(params)
        x = checks.inputs(x, len(params["skip"]))
        dtype = self.dtype or jnp.result_type(x, params["skip"])
        x, gamma = x.astype(dtype), jnp.exp(params["gamma"])
        projections = {
            name: x @ (kernel * lead(gamma, kernel)).astype(dtype)
            for name, kernel in params["kernel"].items()
        }
        return {**projections, "skip": x @ params["skip"].astype(dtype)}

    @nn.nowrap
    def step(self, params: Params, carry: LRUState, z_t: Slots) -> LRUState:
        checks.step(self, carry, z_t)
        real, imag = carry
        size, turn = (params[name].astype(real.dtype) for name in ("nu", "theta"))
        size, turn = jnp.exp(-jnp.exp(size)), jnp.exp(turn)  # 3.3
        a, b = lead(size * jnp.cos(turn), real), lead(size * jnp.sin(turn), real)
        return LRUState(
            a * real - b * imag + z_t["real"].astype(real.dtype),  # 3.4
            b * real + a * imag + z_t["imag"].astype(real.dtype),
        )

    @nn.nowrap
    def emit(self, params: Params, carry: LRUState, z: Slots) -> jax.Array:
        dtype, out = z["skip"].dtype, params["out_kernel"]
        real = carry.real.astype(dtype) @ out["real"].astype(dtype)
        return real - carry.imag.astype(dtype) @ out["imag"].astype(dtype) + z["skip"]
