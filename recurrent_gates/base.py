"""The contract of a cell, and cells whose pre-activations are linear by slot.

Letters: T time, B batch, D input, F features. The last axis of every array is features; all
others are batch. ``x_tm1`` is x at t - 1. Order is always ``(carry, x) -> (carry, y)``.

A cell's mathematics are pure methods that take the parameters explicitly and know nothing of
time: ``project`` is everything that needs only the input, ``step`` everything that is truly
sequential, ``emit`` what is read from the carry that was kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from recurrent_gates import checks, mixing, pickling
from recurrent_gates.carry import CarryFn, Noise
from recurrent_gates.gates import Gate
from recurrent_gates.initializers import Initializer, orthogonal
from recurrent_gates.shapes import lead

Params = Mapping[str, Any]
Carry = Any
Slots = Mapping[str, jax.Array]
Activation = Callable[[jax.Array], jax.Array]
Product = Callable[[str, jax.Array], jax.Array]

_LECUN = nn.initializers.lecun_normal()
_ZEROS = nn.initializers.zeros


# ---------------------------------------------------------------------------------------
# The contract
# ---------------------------------------------------------------------------------------


class Cell(nn.RNNCellBase):
    """Base of all cells: pure methods over explicit parameters, and the Flax cell on top.

    A cell of your own defines ``init_params``, ``initial`` and ``step``; the rest has
    defaults. It then runs under ``unroll``, ``RNN``, ``nn.RNN`` and with every carry function.
    Fields must be hashable settings, never arrays.

    Cells whose state has a part that never feeds back name it in ``accumulated`` and define
    ``recur`` and ``increment`` instead of ``step``.
    """

    @property
    def accumulated(self) -> tuple[str, ...]:
        """Fields of the carry that never feed back; ``accumulate`` takes them a step on."""
        return ()

    @property
    def diagonal(self) -> bool:
        """Whether the units that feed back do not interact, so that their Jacobian is diagonal.

        A cell that returns True promises that entry j of a field of the next carry depends, of
        all entries, on entry j of that field alone; accumulated fields aside, of which it
        promises that ``bounded(bounded(a) + b)`` is ``bounded(a + b)``, as for a period, and
        that ``accumulate`` is ``bounded`` of the increment, with the value added or without.
        """
        return False

    @property
    def separate(self) -> tuple[str, ...]:
        """Slots whose recurrent product ``update`` wants apart from the input's projection."""
        return ()

    @nn.nowrap
    def init_params(self, key: jax.Array, in_features: int) -> dict[str, Any]:
        """Fresh parameters for inputs ``[..., in_features]``, a dict."""
        raise TypeError(f"{type(self).__name__} must define init_params(key, in_features).")

    @nn.nowrap
    def initial(self, batch_shape: Sequence[int]) -> Carry:
        """The carry before the first step, leaves ``[*batch_shape, ...]``."""
        raise TypeError(f"{type(self).__name__} must define initial(batch_shape).")

    @nn.nowrap
    def project(self, params: Params, x: jax.Array) -> Any:
        """Everything that needs only the input: x ``[..., D]`` -> z, any leading dims."""
        del params
        return x

    @nn.nowrap
    def gates(self, params: Params, carry_tm1: Carry, z: Any) -> dict[str, jax.Array]:
        """The gate activations of a step by name, for analysis; pointwise in time."""
        del params, carry_tm1, z
        return {}

    @nn.nowrap
    def step(self, params: Params, carry: Carry, z_t: Any) -> Carry:
        """One step: the next carry."""
        if not self.accumulated:
            raise TypeError(f"{type(self).__name__} must define step(params, carry, z_t).")
        new = self.recur(params, carry, z_t)
        added = self.increment(params, carry, z_t)
        return new._replace(
            **{
                name: self.accumulate(name, getattr(carry, name), added[name])
                for name in self.accumulated
            }
        )

    @nn.nowrap
    def emit(self, params: Params, carry: Carry, z: Any) -> jax.Array:
        """The output y, pointwise in time, from the carry that was kept.

        Default: the field h, or the only field.
        """
        del params, z
        if hasattr(carry, "h"):
            return carry.h
        leaves = jax.tree.leaves(carry)
        if len(leaves) != 1:
            raise TypeError(
                f"{type(self).__name__} must define emit(params, carry, z): its carry has "
                f"{len(leaves)} fields and none is named h."
            )
        return leaves[0]

    @nn.nowrap
    def recur(self, params: Params, carry: Carry, z_t: Any) -> Carry:
        """The fields that feed back, one step on; accumulated fields stay as they are."""
        raise TypeError(f"{type(self).__name__} names accumulated fields and must define recur.")

    @nn.nowrap
    def increment(self, params: Params, carry_tm1: Carry, z: Any) -> dict[str, jax.Array]:
        """What ``accumulate`` adds to each accumulated field; reads no accumulated field."""
        raise TypeError(
            f"{type(self).__name__} names accumulated fields and must define increment."
        )

    @nn.nowrap
    def accumulate(self, name: str, value: jax.Array, added: jax.Array) -> jax.Array:
        """An accumulated field one step on: ``bounded(name, value + added)`` by default."""
        return self.bounded(name, value + added)

    @nn.nowrap
    def bounded(self, name: str, total: jax.Array) -> jax.Array:
        """An accumulated field brought back into its range; the identity by default."""
        del name
        return total

    @nn.nowrap
    def _around(self, carry_fns: Sequence[CarryFn], noise: Sequence[Noise]) -> mixing.Around:
        """The cell, carry functions and noise that run where these are asked for.

        They differ where zoneout mixes the two values of a field that is kept within a period.
        """
        return mixing.bounds_last(self, carry_fns, noise)

    # What the fused backend needs: the recurrent products by name, so that their inputs and
    # cotangents can be collected and the weights' gradients formed outside the loop.

    @nn.nowrap
    def recurrent_weights(self, params: Params) -> Params | None:
        """The parameters of the recurrent products, or None if the cell has none to offer."""
        del params
        return None

    @nn.nowrap
    def product(self, weights: Params, slot: str, x: jax.Array, dtype: Any) -> jax.Array:
        """The recurrent product of one slot, without the input's projection."""
        raise TypeError(f"{type(self).__name__} offers no recurrent products.")

    @nn.nowrap
    def update(self, carry: Carry, z_t: Slots, product: Product) -> Carry:
        """``step`` (``recur`` where fields accumulate) from pre-activations by name."""
        raise TypeError(f"{type(self).__name__} offers no recurrent products.")

    @nn.nowrap
    def loop_input(self, z: Any) -> Slots:
        """The part of z that ``update`` uses: ``{slot: array}``."""
        return z

    # Flax.

    @nn.compact
    def weights(self, in_features: int) -> dict[str, Any]:
        """This module's parameters, created on first use.

        Each top-level entry is drawn with its own key, folded by Flax.
        """
        init = self.init_params

        def entry(key: jax.Array, name: str) -> Any:
            return init(key, in_features)[name]

        shapes = jax.eval_shape(lambda key: init(key, in_features), jax.random.key(0))
        if not isinstance(shapes, dict):
            raise TypeError(
                f"{type(self).__name__}.init_params must return a dict of parameters, "
                f"got {type(shapes).__name__}."
            )
        if not self.is_initializing():
            checks.params(self, self.variables.get("params", {}), in_features)
        return {name: self.param(name, entry, name) for name in shapes}

    def __call__(self, carry: Carry, inputs: jax.Array) -> tuple[Carry, jax.Array]:
        """(carry, x) -> (carry, y) for one step."""
        checks.call(self, carry, inputs)
        params = self.weights(jnp.shape(inputs)[-1])
        z = self.project(params, inputs)
        carry = self.step(params, carry, z)
        return carry, self.emit(params, carry, z)

    @nn.nowrap
    def initialize_carry(self, rng: jax.Array, input_shape: tuple[int, ...]) -> Carry:
        """Flax's name for ``initial``: ``input_shape`` is ``(*batch, D)``."""
        if isinstance(rng, tuple):  # NNX gives the shape first
            raise TypeError(
                f"{type(self).__name__} is a linen cell: for nnx.RNN wrap it in "
                "recurrent_gates.nnx.Cell(cell, in_features, rngs=rngs)."
            )
        return self.initial(input_shape[:-1])

    @property
    def num_feature_axes(self) -> int:
        """Flax's name for the number of axes of features, 1."""
        return 1

    def __reduce__(self) -> tuple[Any, ...]:
        return pickling.reduced(self)


# ---------------------------------------------------------------------------------------
# Linear maps by slot
# ---------------------------------------------------------------------------------------


def linear_project(
    params: Params,
    x: jax.Array,
    *,
    gate: Gate | None = None,
    separate: Sequence[str] = (),
    dtype: Any = None,
) -> dict[str, jax.Array]:
    """The input's part of every pre-activation: W x and the biases.

    Args:
      params: ``{"kernel": {slot: [D, width]}, "bias": {slot: [width]}, ...}``.
      x: inputs ``[..., D]``, floating point.
      gate: the gate whose own parameters, ``params["gate"]``, are added.
      separate: slots whose recurrent bias stays with the recurrent product.
      dtype: dtype of the computation; default: that of x and the kernel together.

    Returns:
      ``{slot: [..., width]}``.

    Raises:
      ValueError: if x is not floating point or D differs from the kernel's.
    """
    checks.kernels(params)
    checks.one_array(x)
    x = jnp.asarray(x)
    first = next(iter(params["kernel"].values()))
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"Inputs must be floating point, got {x.dtype}; embed or cast them.")
    if x.ndim < 1 or x.shape[-1] != first.shape[0]:
        raise ValueError(
            f"Inputs of shape {x.shape} do not fit a kernel for {first.shape[0]} input features."
        )
    dtype = dtype or jnp.result_type(x, first)
    offsets = gate.offsets(params.get("gate", {})) if gate else {}
    recurrent_bias = params.get("recurrent_bias", {})
    z = {}
    for slot, kernel in params["kernel"].items():
        bias = params["bias"][slot]
        if slot in recurrent_bias and slot not in separate:
            bias = bias + recurrent_bias[slot]
        if slot in offsets:
            bias = bias + offsets[slot]
        out = x.astype(dtype) @ kernel.astype(dtype)
        z[slot] = out + lead(bias.astype(dtype), out)
    return z


def state_dtype(dtype: Any) -> Any:
    """The dtype of carries beside parameters or products of ``dtype``: float32 at least."""
    return jnp.dtype(dtype) if jnp.dtype(dtype).itemsize > 4 else jnp.dtype(jnp.float32)


def dense_product(
    weights: Params, slot: str, x: jax.Array, dtype: Any, separate: Sequence[str]
) -> jax.Array:
    """U x, plus the slot's recurrent bias where it is kept apart; float32 at least."""
    out = matrix_product(x, weights["recurrent_kernel"][slot], dtype)
    return with_recurrent_bias(weights, slot, out, separate)


def matrix_product(x: jax.Array, kernel: jax.Array, dtype: Any) -> jax.Array:
    """x times a kernel in ``dtype``, summed in float32 at least."""
    return jnp.matmul(
        x.astype(dtype), kernel.astype(dtype), preferred_element_type=state_dtype(dtype)
    )


def with_recurrent_bias(
    weights: Params, slot: str, out: jax.Array, separate: Sequence[str]
) -> jax.Array:
    """A recurrent product with the slot's recurrent bias, where that is kept apart."""
    if slot in separate and slot in weights.get("recurrent_bias", {}):
        out = out + lead(weights["recurrent_bias"][slot].astype(out.dtype), out)
    return out


def pre_activations(
    product: Callable[[str, jax.Array, Any], jax.Array],
    z_t: Slots,
    separate: Sequence[str] = (),
) -> Product:
    """Joins recurrent products and projections: (slot, x) -> z_t[slot] + product(slot, x)."""
    dtype = next(iter(z_t.values())).dtype

    def joined(slot: str, x: jax.Array) -> jax.Array:
        out = product(slot, x, dtype)
        if slot in z_t and slot not in separate:
            out = out + z_t[slot].astype(out.dtype)
        return out

    return joined


def dense(params: Params, z_t: Slots, separate: Sequence[str] = ()) -> Product:
    checks.kernels(params, "recurrent_kernel")
    checks.projections(z_t)
    return pre_activations(
        lambda slot, x, dtype: dense_product(params, slot, x, dtype, separate), z_t, separate
    )


class SlotCell(Cell):
    """Base of cells whose pre-activations are linear in x and in a hidden vector, by slot.

    Parameters: ``{"kernel": {slot: [D, width]}, "recurrent_kernel": {slot: [F, width]},
    "bias": {slot: [width]}}``, plus ``"recurrent_bias"`` with ``bias_vectors=2`` and
    ``"gate"`` where the gate owns parameters.

    Attributes:
      features: F, the hidden size.
      bias_vectors: 1, or 2 as torch has them (one with each linear map).
      kernel_init: start of the input kernels.
      recurrent_kernel_init: start of the recurrent kernels.
      bias_init: start of the biases, before the gate's own constant is added.
      dtype: dtype of projections and products; None: that of inputs and parameters.
      param_dtype: dtype of the parameters. Carries are float32 at least, whatever it is.
    """

    features: int
    bias_vectors: int = 1
    kernel_init: Initializer = _LECUN
    recurrent_kernel_init: Initializer = orthogonal
    bias_init: Initializer = _ZEROS
    dtype: Any = None
    param_dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        checks.cell_settings(self)
        super().__post_init__()

    @property
    def slots(self) -> dict[str, int]:
        """Names and widths of the pre-activations."""
        raise TypeError(f"{type(self).__name__} must define slots.")

    @property
    def input_slots(self) -> dict[str, int]:
        """The slots that read the input."""
        return self.slots

    @property
    def _gate(self) -> Gate | None:
        return None

    @nn.nowrap
    def zeros(self, batch_shape: Sequence[int]) -> jax.Array:
        """A field of the initial carry, ``[*batch_shape, F]``, float32 at least."""
        shape = (*checks.shape("batch_shape", batch_shape), self.features)
        return jnp.zeros(shape, state_dtype(self.param_dtype))

    @nn.nowrap
    def init_params(self, key: jax.Array, in_features: int) -> dict[str, Any]:
        checks.key("key", key)
        in_features = checks.in_features(in_features)
        gate, dtype, slots = self._gate, self.param_dtype, self.slots
        keys = iter(jax.random.split(key, 4 * len(slots) + 2))
        params: dict[str, Any] = {
            "kernel": {
                s: self.kernel_init(next(keys), (in_features, w), dtype)
                for s, w in self.input_slots.items()
            },
            "recurrent_kernel": {
                s: self.recurrent_kernel_init(next(keys), (self.features, w), dtype)
                for s, w in slots.items()
            },
            "bias": {
                s: self.bias_init(next(keys), (w,), dtype) for s, w in self.input_slots.items()
            },
        }
        second = self.input_slots if self.bias_vectors == 2 else self.separate
        if second:
            params["recurrent_bias"] = {
                s: self.bias_init(next(keys), (slots[s],), dtype) for s in second
            }
        if gate is not None:
            for s, start in gate.slot_bias(next(keys), self.features, dtype).items():
                params["bias"][s] = params["bias"][s] + start
            own = gate.init(next(keys), self.features, dtype)
            if own:
                params["gate"] = own
        return params

    @nn.nowrap
    def project(self, params: Params, x: jax.Array) -> dict[str, jax.Array]:
        return linear_project(params, x, gate=self._gate, separate=self.separate, dtype=self.dtype)

    @nn.nowrap
    def step(self, params: Params, carry: Carry, z_t: Slots) -> Carry:
        checks.step(self, carry, z_t)
        checks.one_time(carry, z_t)
        return self.update(carry, z_t, dense(params, z_t, self.separate))

    @nn.nowrap
    def emit(self, params: Params, carry: Carry, z: Slots) -> jax.Array:
        del params
        return carry.h.astype(next(iter(z.values())).dtype)

    @nn.nowrap
    def recurrent_weights(self, params: Params) -> Params:
        return {k: params[k] for k in ("recurrent_kernel", "recurrent_bias") if k in params}

    @nn.nowrap
    def product(self, weights: Params, slot: str, x: jax.Array, dtype: Any) -> jax.Array:
        return dense_product(weights, slot, x, dtype, self.separate)
