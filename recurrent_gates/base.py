"""The contract of a cell, and cells whose pre-activations are linear by slot.

Letters: T time, B batch, D input, F features. The last axis of every array is features; all
others are batch. ``x_tm1`` is x at t - 1. Order is always ``(carry, x) -> (carry, y)``; x, y
and the carry may be any trees of arrays.

A cell's mathematics are pure methods that take the parameters explicitly and know nothing of
time: ``project`` is everything that needs only the input, ``step`` everything that is truly
sequential, ``emit`` what is read from the carry that was kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import export

from recurrent_gates import checks, pickling, zoneout
from recurrent_gates.carry import CarryFn, Noise
from recurrent_gates.declared import (
    Carry,
    Params,
    Product,
    Products,
    Slots,
    Sums,
    Weights,
    inputs_dtype,
    pre_activations,
    product_of,
    recurrent_weights,
    state_dtype,
)
from recurrent_gates.gates import Gate
from recurrent_gates.initializers import Initializer, orthogonal
from recurrent_gates.shapes import in_features, lead

Activation = Callable[[jax.Array], jax.Array]

_LECUN = nn.initializers.lecun_normal()
_ZEROS = nn.initializers.zeros


class HiddenState(NamedTuple):
    """Carry of cells with one state: GRU, GRU-D, JANET, the Elman network, minGRU, ...

    Attributes:
      h: the hidden state ``[*batch, F]``, float32 at least.
    """

    h: jax.Array


# So that jitted steps pass through jax.export.
export.register_namedtuple_serialization(HiddenState, serialized_name="recurrent_gates.HiddenState")


# ---------------------------------------------------------------------------------------
# The contract
# ---------------------------------------------------------------------------------------


class Cell(nn.RNNCellBase):
    """Base of all cells: pure methods over explicit parameters, and the Flax cell on top.

    The names that a cell may define, and no others:

    ===================================  ====================  ==================================
    name and signature                   when                  why
    ===================================  ====================  ==================================
    init_params(key, in_features)        always                its parameters
    initial(batch_shape)                 always                the carry before the first step
    step(params, carry, z_t)             unless it declares    all that is truly sequential; it
                                         products or sums      is made of these where they are
    project(params, x)                   part of a step needs  one large product over all steps
                                         the input alone       instead of many small ones
    emit(params, carry, z)               y is not h, nor the   what leaves the cell, any tree
                                         only field
    gates(params, carry_tm1, z)          it has gates          analysis shows them
    products, a ``Products``             steps multiply what   the fused and pallas backends:
                                         feeds back by         gradients of weights outside the
                                         weights               loop
    sums, a ``Sums``                     a field never feeds   that field leaves the loop
                                         back
    diagonal, a bool                     units do not          the newton backend: all steps at
                                         interact              once
    linear, a bool                       the step is a * h     the parallel backend: all steps at
                                         + b, with a and b     once, without iterations
                                         from the input alone
    ===================================  ====================  ==================================

    The last four are properties. What is declared for speed changes no number:
    ``testing.check_cell`` holds it to the step. It describes the step of the class that declares
    it: a subclass with a step of its own declares it anew, or runs under ``"scan"``. Every cell
    runs under ``unroll``, ``RNN`` and ``nn.RNN``, with every mask and carry function. Fields must
    be hashable settings, never arrays.
    """

    @nn.nowrap
    def init_params(self, key: jax.Array, in_features: Any) -> dict[str, Any]:
        """Fresh parameters, a dict, for inputs of this width (a tree of widths for a tree)."""
        raise TypeError(f"{type(self).__name__} must define init_params(key, in_features).")

    @nn.nowrap
    def initial(self, batch_shape: Sequence[int]) -> Carry:
        """The carry before the first step, leaves ``[*batch_shape, ...]``."""
        raise TypeError(f"{type(self).__name__} must define initial(batch_shape).")

    @nn.nowrap
    def step(self, params: Params, carry: Carry, z_t: Any) -> Carry:
        """One step: the next carry. Default: made of what the cell declares."""
        sums = self.sums
        if sums is None and self.products is None:
            raise TypeError(f"{type(self).__name__} must define step(params, carry, z_t).")
        if sums is None:
            return _update(self, params, carry, z_t)
        new = feed_back(self, params, carry, z_t)
        return sums.add(new, sums.increment(params, carry, z_t))

    @nn.nowrap
    def project(self, params: Params, x: Any) -> Any:
        """Everything that needs only the input: x ``[..., D]`` -> z, any leading dims."""
        del params
        return x

    @nn.nowrap
    def emit(self, params: Params, carry: Carry, z: Any) -> Any:
        """The output y, an array or a tree, pointwise in time, from the carry that was kept.

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
    def gates(self, params: Params, carry_tm1: Carry, z: Any) -> dict[str, jax.Array]:
        """The gate activations of a step by name, for analysis; pointwise in time."""
        del params, carry_tm1, z
        return {}

    @property
    def products(self) -> Products | None:
        """The step's recurrent products and the update made of them, or None."""
        return None

    @property
    def sums(self) -> Sums | None:
        """Fields that never feed back, and what is added to them, or None."""
        return None

    @property
    def diagonal(self) -> bool:
        """Whether the units that feed back do not interact, so that their Jacobian is diagonal.

        A cell that returns True promises that entry j of a field of the next carry depends, of
        all entries, on entry j of that field alone; summed fields aside.
        """
        return False

    @property
    def linear(self) -> bool:
        """Whether a step is a_t * carry + b_t unit by unit, with a_t and b_t from the input alone.

        A cell that returns True promises that entry j of every field of the next carry is affine
        in the entries j of the fields before, by coefficients that no carry enters; its fields
        have one shape.
        """
        return False

    @property
    def _has_one_draw(self) -> bool:
        """Whether one draw is in several entries of the parameters, which then share a key."""
        return False

    @property
    def _remats_steps(self) -> bool:
        """Whether a CPU forms a step again for the backward pass, rather than keep all of it."""
        return False

    @nn.nowrap
    def _around(self, carry_fns: Sequence[CarryFn], noise: Sequence[Noise]) -> zoneout.Around:
        """The cell, carry functions and noise that run where these are asked for.

        They differ where zoneout mixes the two values of a field that is kept within a period.
        """
        return zoneout.bound_after_zoneout(self, carry_fns, noise)

    # Flax.

    @nn.compact
    def weights(self, in_features: Any) -> dict[str, Any]:
        """This module's parameters, created on first use; ``in_features`` as in ``init_params``.

        Each top-level entry of this library's cells is drawn with its own key, folded by Flax; but
        entries of one draw, and all of a cell of one's own, have one key.
        """
        init, has_one_key = self.init_params, self._has_one_draw or not checks.ours(self)
        if not self.is_initializing():
            present = nn.unbox(self.variables.get("params", {}))
            checks.params(self, present, in_features)
            if present and checks.ours(self):
                return {**present}  # Flax would draw them all again, for their shapes
        shapes = jax.eval_shape(lambda key: init(key, in_features), jax.random.key(0))
        if not isinstance(shapes, dict):
            raise TypeError(
                f"{type(self).__name__}.init_params must return a dict of parameters, "
                f"got {type(shapes).__name__}."
            )
        is_missing = any(not self.has_variable("params", name) for name in shapes)
        is_drawn = is_missing and self.is_mutable_collection("params")
        shared_key = self.make_rng("params") if has_one_key and is_drawn else None

        def entry(key: jax.Array, name: str) -> Any:
            return init(key if shared_key is None else shared_key, in_features)[name]

        return {name: self.param(name, entry, name) for name in shapes}

    def __call__(self, carry: Carry, inputs: Any) -> tuple[Carry, Any]:
        """(carry, x) -> (carry, y) for one step."""
        checks.call(self, carry, inputs)
        params = self.weights(in_features(inputs))
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


def feed_back(cell: Cell, params: Params, carry: Carry, z_t: Any) -> Carry:
    """The fields that feed back, one step on; summed fields stay as they are."""
    sums = cell.sums
    if sums is None:
        return cell.step(params, carry, z_t)
    if sums.recur is not None:
        return sums.recur(params, carry, z_t)
    if cell.products is None:
        raise TypeError(f"The sums of {type(cell).__name__} must define recur(params, carry, z_t).")
    return _update(cell, params, carry, z_t)


def _update(cell: Cell, params: Params, carry: Carry, z_t: Any) -> Carry:
    """The declared update, from the declared products."""
    products = cell.products
    assert products is not None
    inputs = products.inputs(z_t)
    product = functools.partial(product_of, recurrent_weights(products, params))
    return products.update(carry, inputs, pre_activations(product, inputs))


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
    first = next(iter(params["kernel"].values()))
    x = checks.inputs(x, first.shape[0])
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


def dense(params: Params, z_t: Slots, separate: Sequence[str] = ()) -> Product:
    """(slot, x) -> U x + z_t[slot]; for separate slots U x and their recurrent bias."""
    checks.kernels(params, "recurrent_kernel")
    checks.projections(z_t)
    biases = params.get("recurrent_bias", {})
    separate_biases = {slot: biases[slot] for slot in separate if slot in biases}
    weights = Weights(params["recurrent_kernel"], {}, separate_biases)
    return pre_activations(functools.partial(product_of, weights), z_t, separate)


class SlotCell(Cell):
    """Base of cells whose pre-activations are linear in x and in a hidden vector, by slot.

    A slot is a named pre-activation, such as f, i or o. A subclass defines ``initial``, ``slots``
    and ``update(carry, inputs, product)``, and where it must ``input_slots`` and ``separate``;
    ``init_params``, ``project``, ``step``, ``emit`` (h) and ``products`` are made of them.

    Parameters: ``{"kernel": {slot: [D, width]}, "recurrent_kernel": {slot: [F, width]},
    "bias": {slot: [width]}}``, plus ``"recurrent_bias"`` with ``bias_vectors=2`` and
    ``"gate"`` where the gate owns parameters. Where a cell has N > 1 heads, its recurrent kernels
    are block-diagonal, ``[N, F/N, width/N]``.

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
    def separate(self) -> tuple[str, ...]:
        """Slots whose input ``update`` reads by itself, as ``inputs[slot + "_input"]``."""
        return ()

    @nn.nowrap
    def update(self, carry: Carry, inputs: Slots, product: Product) -> Carry:
        """The next carry from pre-activations by slot; see ``Products``."""
        raise TypeError(f"{type(self).__name__} must define update(carry, inputs, product).")

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
                s: self._recurrent_kernel(next(keys), w) for s, w in slots.items()
            },
            "bias": {
                s: self.bias_init(next(keys), (w,), dtype) for s, w in self.input_slots.items()
            },
        }
        bias_slots = self.input_slots if self.bias_vectors == 2 else self.separate
        if bias_slots:
            params["recurrent_bias"] = {
                s: self.bias_init(next(keys), (slots[s],), dtype) for s in bias_slots
            }
        if gate is not None:
            offsets = gate.slot_bias(next(keys), self.features, dtype)
            params["bias"] = add_offsets(params["bias"], offsets)
            gate_params = gate.init(next(keys), self.features, dtype)
            if gate_params:
                params["gate"] = gate_params
        return params

    @nn.nowrap
    def _recurrent_kernel(self, key: jax.Array, width: int) -> jax.Array:
        """``[F, width]``; with heads each block is a draw of its own."""
        init, dtype = self.recurrent_kernel_init, self.param_dtype
        heads = getattr(self, "heads", 1)
        if heads == 1:
            return init(key, (self.features, width), dtype)
        block = self.features // heads, width // heads
        blocks = [init(k, block, dtype) for k in jax.random.split(key, heads)]
        stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *blocks)
        return nn.meta.add_axis(stacked, 0, {nn.PARTITION_NAME: None})  # of boxes, if they are any

    @nn.nowrap
    def project(self, params: Params, x: jax.Array) -> dict[str, jax.Array]:
        return linear_project(params, x, gate=self._gate, separate=self.separate, dtype=self.dtype)

    @nn.nowrap
    def step(self, params: Params, carry: Carry, z_t: Slots) -> Carry:
        checks.kernels(params, "recurrent_kernel")
        checks.step(self, carry, z_t)
        checks.one_time(carry, z_t)
        return super().step(params, carry, z_t)

    @nn.nowrap
    def emit(self, params: Params, carry: Carry, z: Slots) -> Any:
        del params
        return carry.h.astype(inputs_dtype(z))

    @property
    def products(self) -> Products:
        return Products(_kernels, self.update, self._inputs, self._biases)

    @nn.nowrap
    def _inputs(self, z: Slots) -> dict[str, jax.Array]:
        return {f"{s}_input" if s in self.separate else s: value for s, value in z.items()}

    @nn.nowrap
    def _biases(self, params: Params) -> dict[str, jax.Array]:
        biases = params.get("recurrent_bias", {})
        return {slot: biases[slot] for slot in self.separate if slot in biases}


def _kernels(params: Params) -> Slots:
    return params["recurrent_kernel"]


def add_offsets(biases: Mapping[str, Any], offsets: Mapping[str, jax.Array]) -> dict[str, Any]:
    """Biases by slot, each with its offset if it has one; a Flax box (Partitioned) stays a box."""
    return {
        slot: jax.tree.map(functools.partial(jnp.add, offsets[slot]), bias)
        if slot in offsets
        else bias
        for slot, bias in biases.items()
    }
