"""GATO: Gates Are Not the Only Option. A state split into r, which feeds back, and s.

J = F/2 pairs (r, s); s is only added to, so ds_T/ds_t is the identity (GATO, eq. 3). The
two functions of the model are values of their own: f makes r_{t+1}, g is added to s.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import export

from recurrent_gates import checks, pointwise
from recurrent_gates.base import Activation, Cell, add_offsets, linear_project
from recurrent_gates.declared import (
    Params,
    Product,
    Products,
    Slots,
    Sums,
    Weights,
    is_inexact,
    pre_activations,
    product_of,
    redefined,
    state_dtype,
)
from recurrent_gates.gates import Gate
from recurrent_gates.initializers import Initializer, symmetric_uniform
from recurrent_gates.shapes import lead


class GATOState(NamedTuple):
    """Carry of GATO, both fields ``[*batch, J]``, float32 at least.

    Attributes:
      r: what feeds back.
      s: what only accumulates.
    """

    r: jax.Array
    s: jax.Array


export.register_namedtuple_serialization(GATOState, serialized_name="recurrent_gates.GATOState")


class GATOMap:
    """Base of GATO's two functions: f(r, x) makes r_{t+1}, g(r, x) is added to s (GATO 4.1).

    A map of your own is a hashable object (a frozen dataclass, say) that defines
    ``__call__`` and, if it has parameters, ``init``.
    """

    @property
    def diagonal(self) -> bool:
        """Whether unit j of the value depends, of all units of r, on unit j alone."""
        return False

    def init(self, key: jax.Array, in_features: int, cell: GATO) -> dict[str, Any]:
        """The map's parameters; ``cell`` has ``units`` (J), ``param_dtype`` and initializers."""
        del key, in_features, cell
        return {}

    def project(self, params: Params, x: jax.Array, dtype: Any) -> Any:
        """Everything that needs only the input: ``[..., D]`` -> z."""
        del params, dtype
        return x

    def __call__(self, params: Params, r: jax.Array, z: Any) -> jax.Array:
        """r ``[..., J]`` and z -> ``[..., J]``."""
        raise TypeError(f"{type(self).__name__} must define __call__(params, r, z).")


class SlotMap(GATOMap):
    """A map whose pre-activations are A x + a * r + bias by slot, units not interacting.

    Parameters: ``{"kernel": {slot: [D, width]}, "recurrent_kernel": {slot: [width]}, "bias":
    {slot: [width]}}``, plus ``"recurrent_bias"`` with two bias vectors; widths are multiples
    of J, and r is repeated to fit.
    """

    @property
    def diagonal(self) -> bool:
        return True

    @property
    def reads_parameters(self) -> bool:
        """Whether ``combine`` reads its parameters; if not, f is served by the fused backend."""
        return True

    def slots(self, units: int) -> dict[str, int]:
        """Names and widths of the pre-activations."""
        raise TypeError(f"{type(self).__name__} must define slots(units).")

    def combine(self, params: Params, r: jax.Array, product: Product) -> jax.Array:
        """The map's value from its pre-activations ``product(slot, r)``."""
        raise TypeError(f"{type(self).__name__} must define combine(params, r, product).")

    def init(self, key: jax.Array, in_features: int, cell: GATO) -> dict[str, Any]:
        slots, dtype = self.slots(cell.units), cell.param_dtype
        keys = iter(jax.random.split(key, 4 * len(slots)))
        roles = ["bias", "recurrent_bias"][: cell.bias_vectors]
        return {
            "kernel": {
                s: cell.kernel_init(next(keys), (in_features, w), dtype) for s, w in slots.items()
            },
            "recurrent_kernel": {
                s: cell.recurrent_kernel_init(next(keys), (w,), dtype) for s, w in slots.items()
            },
            **{
                role: {s: cell.bias_init(next(keys), (w,), dtype) for s, w in slots.items()}
                for role in roles
            },
        }

    def project(self, params: Params, x: jax.Array, dtype: Any) -> dict[str, jax.Array]:
        return linear_project(params, x, dtype=dtype)

    def __call__(self, params: Params, r: jax.Array, z: Slots) -> jax.Array:
        checks.kernels(params, "recurrent_kernel")
        checks.projections(z)
        return self.combine(params, r, pre_activations(_unit_products(params), z))


def _unit_products(params: Params) -> Callable[[str, jax.Array, Any], jax.Array]:
    """(slot, r, dtype) -> a * r; r and s are never less than float32, whatever the dtype."""
    return functools.partial(product_of, Weights({}, params["recurrent_kernel"], {}))


@dataclasses.dataclass(frozen=True)
class GatedDecay(SlotMap):
    """f of both printed models: lambda * sigmoid(.) * r + tanh(.) (GATO, eq. 5 and 6).

    With a ``gate`` its forget gate takes the place of the sigmoid (ours): lambda * f * r + tanh(.).
    Lambda stays, since f alone may be 1 and would let r grow. The candidate has no gate, as in the
    paper, so an input gate is left out. The gate's own parameters are ``"gate"`` of the map.

    Slots ``gate`` and ``candidate`` hold B, b and C, c of eq. 5, A, a and B, b of eq. 6.

    Attributes:
      rate: lambda; below 1 it bounds ``|r|`` by 1 / (1 - lambda) (criterion 5).
      gate: a gate over the J units; None: the paper's sigmoid.

    Raises:
      ValueError: if a gate shares master gates between units, which r is not laid out for.
    """

    rate: float = 0.7  # GATO 5.1
    gate: Gate | None = None

    reads_parameters = False

    def __post_init__(self) -> None:
        checks.numbers(self, "rate")
        if self.gate is not None:
            checks.instance("GatedDecay gate", self.gate, Gate, "GATES['ur']")
            if self.gate.downsize > 1:
                raise ValueError(
                    "GATO's units have a master gate each: use downsize=1, "
                    f"got {self.gate.downsize}."
                )
            object.__setattr__(self, "gate", self.gate.tie())

    @property
    def diagonal(self) -> bool:
        gate = self.gate
        return gate is None or not (gate.activation == "cumax" or gate.has_own_equations)

    def slots(self, units: int) -> dict[str, int]:
        gate = {"gate": units} if self.gate is None else self.gate.slots(units)
        return {**{s: w for s, w in gate.items() if s != "i"}, "candidate": units}

    def init(self, key: jax.Array, in_features: int, cell: GATO) -> dict[str, Any]:
        if self.gate is None:
            return super().init(key, in_features, cell)
        key, start_key, own_key = jax.random.split(key, 3)
        params, dtype = super().init(key, in_features, cell), cell.param_dtype
        offsets = self.gate.slot_bias(start_key, cell.units, dtype)
        params["bias"] = add_offsets(params["bias"], offsets)
        gate_params = self.gate.init(own_key, cell.units, dtype)
        return {**params, "gate": gate_params} if gate_params else params

    def project(self, params: Params, x: jax.Array, dtype: Any) -> dict[str, jax.Array]:
        return linear_project(params, x, gate=self.gate, dtype=dtype)

    def combine(self, params: Params, r: jax.Array, product: Product) -> jax.Array:
        del params
        decay = self.rate * self.open(r, product)
        return decay * r + jnp.tanh(product("candidate", r))  # GATO eq. (5), (6)

    def open(self, r: jax.Array, product: Product) -> jax.Array:
        """The gate, before lambda, from its pre-activations."""
        if self.gate is None:
            return jax.nn.sigmoid(product("gate", r))
        slots = [s for s in self.slots(r.shape[-1]) if s != "candidate"]
        pre = {s: product(s, r) for s in slots}
        return self.gate.activate({"i": pre["f"], **pre})[0]  # its i is not read


@dataclasses.dataclass(frozen=True)
class OneLayer(SlotMap):
    """g of the one-layer model: softplus(A x + a * r) (GATO, eq. 5).

    Slot ``s`` holds A and a.
    """

    reads_parameters = False

    def slots(self, units: int) -> dict[str, int]:
        return {"s": units}

    def combine(self, params: Params, r: jax.Array, product: Product) -> jax.Array:
        del params
        return pointwise.softplus(product("s", r))  # GATO eq. (5)


@dataclasses.dataclass(frozen=True)
class TwoLayer(SlotMap):
    """g of the two-layer model: softplus(F(x, r)), F_j one ReLU layer on x and r_j (GATO, eq. 6).

    The first layer's ``hidden * J`` units are stored hidden-major; beside the slot's
    parameters there are ``"out_kernel" [hidden, J]`` and ``"out_bias" [J]``.

    Attributes:
      hidden: k; 32 is the width that gives the paper's parameter counts.

    Raises:
      ValueError: if ``hidden`` is below 1.
    """

    hidden: int = 32

    def __post_init__(self) -> None:
        checks.whole_number("TwoLayer needs a whole number of hidden units", self.hidden)

    def slots(self, units: int) -> dict[str, int]:
        return {"s": self.hidden * units}

    def init(self, key: jax.Array, in_features: int, cell: GATO) -> dict[str, Any]:
        first, kernel, bias = jax.random.split(key, 3)
        out = (self.hidden, cell.units)
        return {
            **super().init(first, in_features, cell),
            "out_kernel": cell.recurrent_kernel_init(kernel, out, cell.param_dtype),
            "out_bias": cell.bias_init(bias, out[1:], cell.param_dtype),
        }

    def combine(self, params: Params, r: jax.Array, product: Product) -> jax.Array:
        first = jax.nn.relu(product("s", r))
        first = first.reshape(*r.shape[:-1], self.hidden, r.shape[-1])
        out = params["out_kernel"].astype(first.dtype)
        total = jnp.sum(first * lead(out, first), axis=-2)
        total = total + lead(params["out_bias"].astype(first.dtype), total)
        return pointwise.softplus(total)  # GATO eq. (6)


def gato_step(
    params: Params,
    carry: GATOState,
    z_t: Mapping[str, Any],
    *,
    f: GATOMap = GatedDecay(),
    g: GATOMap = TwoLayer(),
    period: float | None = 2 * math.pi,
) -> GATOState:
    """One GATO step: r_t = f(r_tm1, x_t); s_t = s_tm1 + g(r_tm1, x_t) (GATO 4.1, eq. 4-6).

    Args:
      params: ``{"f": ..., "g": ...}`` from ``GATO(2 * J).init_params(key, D)``.
      carry: r and s, each ``[*batch, J]``.
      z_t: ``GATO(2 * J, f=f, g=g).project(params, x_t)``.
      f: the recurrent map.
      g: the accumulated map.
      period: s is kept in [0, period); None keeps the sum itself.

    Returns:
      The next r and s, float32 at least.

    Raises:
      ValueError: if ``params`` are another cell's, or ``z_t`` is no projection.
    """
    checks.projections(z_t)
    s = carry.s + g(params.get("g", {}), carry.r, z_t["g"])  # GATO eq. (4)
    return GATOState(f(params.get("f", {}), carry.r, z_t["f"]), pointwise.wrap(s, period))


class GATO(Cell):
    """GATO: a state split into r, which feeds back, and s, which only accumulates.

    ds_T/ds_t is the identity (GATO, eq. 3). Emits [gamma(s), r] ``[..., 2J]``.

    Attributes:
      features: 2J, the paper's hidden size, even.
      f: makes r; any ``GATOMap``.
      g: is added to s; any ``GATOMap``. ``OneLayer()`` is eq. 5, ``TwoLayer()`` eq. 6.
      gamma: how s is read.
      wrap: s is kept within this period, derivative 1, so that cos(s) stays exact over long
        sequences; None for never; ``"auto"``: 2 pi where gamma is jnp.cos, else None.
      s_update: ``"accumulate"``; the ablations of App. A are ``"zero"`` (s stays 0) and
        ``"replace"`` (s_t = g).
      emit_s_only: emit gamma(s) ``[..., J]`` alone.
      bias_vectors: 1, or 2 (the paper's Penn Treebank count).
      kernel_init: start of the input kernels.
      recurrent_kernel_init: start of the weights on r and of TwoLayer's second layer.
      bias_init: start of the biases.
      dtype: dtype of projections; None: that of inputs and parameters.
      param_dtype: dtype of the parameters. r and s are float32 at least, whatever it is.

    Raises:
      ValueError: if ``features`` is odd or below 1, or for other values of ``wrap``, ``s_update``
        and ``bias_vectors`` than those above.

    Note:
      The paper prints no biases; its parameter counts have one with every linear map. Nor
      does it say what its decoder reads: emitting r too gives the constant decoder's width.
    """

    features: int
    f: GATOMap = GatedDecay()
    g: GATOMap = TwoLayer()
    gamma: Activation = jnp.cos
    wrap: float | str | None = "auto"
    s_update: str = "accumulate"
    emit_s_only: bool = False
    bias_vectors: int = 1
    kernel_init: Initializer = symmetric_uniform(0.1)  # GATO B.2
    recurrent_kernel_init: Initializer = symmetric_uniform(0.1)
    bias_init: Initializer = symmetric_uniform(0.1)
    dtype: Any = None
    param_dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        checks.cell_settings(self)
        checks.instance("GATO f", self.f, GATOMap, "GatedDecay()")
        checks.instance("GATO g", self.g, GATOMap, "OneLayer() or TwoLayer()")
        checks.function("GATO gamma", self.gamma, "jnp.cos")
        checks.flag("GATO emit_s_only", self.emit_s_only)
        if self.features % 2:
            raise ValueError(
                "GATO's hidden size is 2J, pairs of r and s, and must be even; "
                f"got {self.features}."
            )
        if self.s_update not in ("accumulate", "zero", "replace"):
            raise ValueError(
                f"GATO s_update must be accumulate, zero or replace, got {self.s_update!r}."
            )
        self.wrap = checks.period("GATO wrap", self.wrap)
        gate = getattr(self.f, "gate", None)
        if gate is not None and gate.bias == "uniform" and self.features < 6:
            raise ValueError(
                "A uniform gate needs at least 3 pairs of r and s, a hidden size of 6; "
                f"got {self.features}."
            )
        super().__post_init__()

    @property
    def units(self) -> int:
        """J, the number of (r, s) pairs."""
        return self.features // 2

    @property
    def period(self) -> float | None:
        """The period that s is kept in, or None."""
        if isinstance(self.wrap, str):
            return 2 * math.pi if self.gamma is jnp.cos else None
        return self.wrap

    @property
    def products(self) -> Products | None:
        if not isinstance(self.f, SlotMap) or self.f.reads_parameters:
            return None
        if redefined(self.f, "__call__", "combine"):  # f is not made of its pre-activations alone
            return None
        return Products(_weights_on_r, self._update, inputs=_inputs_of_f)

    @property
    def sums(self) -> Sums:
        rule = "add" if self.s_update == "accumulate" else self.s_update
        return Sums(("s",), self._increment, self._recur, rule, self._bound)

    @property
    def diagonal(self) -> bool:
        return self.f.diagonal and not redefined(self.f, "__call__", "diagonal")

    @nn.nowrap
    def init_params(self, key: jax.Array, in_features: int) -> dict[str, Any]:
        checks.key("key", key)
        in_features = checks.in_features(in_features)
        f_key, g_key = jax.random.split(key)
        params = {
            "f": self.f.init(f_key, in_features, self),
            "g": self.g.init(g_key, in_features, self),
        }
        return {name: tree for name, tree in params.items() if tree}  # Flax keeps no empty dicts

    @nn.nowrap
    def initial(self, batch_shape: Sequence[int]) -> GATOState:
        shape = (*checks.shape("batch_shape", batch_shape), self.units)
        dtype = state_dtype(self.param_dtype)
        return GATOState(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    @nn.nowrap
    def project(self, params: Params, x: jax.Array) -> dict[str, Any]:
        for name in ("f", "g"):
            if isinstance(getattr(self, name), SlotMap):
                checks.kernels(params.get(name))
        zero = self.s_update == "zero"  # g is not read
        return {
            "f": self.f.project(params.get("f", {}), x, self.dtype),
            "g": None if zero else self.g.project(params.get("g", {}), x, self.dtype),
        }

    @nn.nowrap
    def step(self, params: Params, carry: GATOState, z_t: Any) -> GATOState:
        checks.step(self, carry, z_t)
        return super().step(params, carry, z_t)

    @nn.nowrap
    def _update(self, carry: GATOState, inputs: Slots, product: Product) -> GATOState:
        assert isinstance(self.f, SlotMap)
        return carry._replace(r=self.f.combine({}, carry.r, product))

    @nn.nowrap
    def _recur(self, params: Params, carry: GATOState, z_t: Any) -> GATOState:
        return carry._replace(r=self.f(params.get("f", {}), carry.r, z_t["f"]))  # GATO eq. (4)

    @nn.nowrap
    def _increment(self, params: Params, carry_tm1: GATOState, z: Any) -> dict[str, jax.Array]:
        if self.s_update == "zero":
            return {"s": jnp.zeros_like(carry_tm1.r)}
        return {"s": self.g(params.get("g", {}), carry_tm1.r, z["g"])}  # GATO eq. (4), added

    @nn.nowrap
    def _bound(self, field: str, total: jax.Array) -> jax.Array:
        del field
        return pointwise.wrap(total, self.period)

    @nn.nowrap
    def gates(self, params: Params, carry_tm1: GATOState, z: Any) -> dict[str, jax.Array]:
        if not isinstance(self.f, GatedDecay):
            return {}
        product = pre_activations(_unit_products(params["f"]), z["f"])
        return {"f": self.f.rate * self.f.open(carry_tm1.r, product)}

    @nn.nowrap
    def emit(self, params: Params, carry: GATOState, z: Any) -> jax.Array:
        del params
        floats = (leaf.dtype for leaf in jax.tree.leaves(z) if is_inexact(leaf))
        dtype = next(floats, carry.s.dtype)
        # s is kept within a period, where a cosine costs less than for any s.
        bounded_cos = self.gamma is jnp.cos and (self.period or math.inf) <= 2 * math.pi
        y = (pointwise.cos if bounded_cos else self.gamma)(carry.s)
        if not self.emit_s_only:
            y = jnp.concatenate([y, carry.r], axis=-1)
        return y.astype(dtype)


def _weights_on_r(params: Params) -> Slots:
    return params["f"]["recurrent_kernel"]


def _inputs_of_f(z: Any) -> Slots:
    return z["f"]
