"""Serving: one step of a cell at a time, compiled before the first input arrives."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from recurrent_gates import checks, target
from recurrent_gates.backends import native
from recurrent_gates.base import Cell, SlotCell, linear_project
from recurrent_gates.declared import (
    Carry,
    Params,
    Slots,
    inputs_dtype,
    matrix_product,
    product_of,
    recurrent_weights,
)
from recurrent_gates.scan import check_width, unroll
from recurrent_gates.shapes import lead

_WIDTHS = 6, 12  # of inputs, as good as any other two; GRU-D takes multiples of 3
_PATIENCE = 5e-4  # seconds; beside a longer step 40 us do not count

_Step = Callable[[Any, Carry, jax.Array], tuple[Carry, Any]]


class Stepper:
    """A compiled step, ``carry, y = stepper(carry, x)``; see ``stepper``.

    The carry that is handed in is used up: its memory becomes that of the next. On a CPU of several
    cores a call waits for its result, if that takes less than half a millisecond; elsewhere it
    returns at once, as JAX does.

    Attributes:
      cell: the cell.
      batch_shape: the batch dims of carry and x.
      in_features: D, the width of x.
    """

    cell: Cell
    batch_shape: tuple[int, ...]
    in_features: int

    def __init__(
        self, cell: Cell, params: Params, batch_shape: tuple[int, ...], in_features: int
    ) -> None:
        self.cell, self.batch_shape, self.in_features = cell, batch_shape, in_features
        params = jax.tree.map(jnp.array, params)  # a copy: what becomes of the caller's is its own
        floats = [a for a in jax.tree.leaves(params) if jnp.issubdtype(a.dtype, jnp.floating)]
        dtype = inputs_dtype({str(index): leaf for index, leaf in enumerate(floats)})
        self._x = x = jax.ShapeDtypeStruct((*batch_shape, in_features), dtype)
        carry = jax.eval_shape(self.initial)
        check_width(cell, params, jax.ShapeDtypeStruct((1, *x.shape), x.dtype), carry)
        self._weights: Any
        if native.is_for_step(cell, params, math.prod(batch_shape)):
            step, self._weights = _in_kernels(cell, params)
        else:
            step, self._weights = _joined(cell, params, x) or (_plain(cell), params)
        self._compiled = jax.jit(step, donate_argnums=1).lower(self._weights, carry, x).compile()
        is_watched = target.platform() == "cpu" and target.cores() > 1
        self._patience = _PATIENCE if is_watched else 0.0

    def initial(self) -> Carry:
        """A carry before the first step."""
        # Leaf by leaf: two fields that share their memory cannot both be given away.
        return jax.tree.map(jnp.copy, self.cell.initial(self.batch_shape))

    def __call__(self, carry: Carry, x: jax.Array) -> tuple[Carry, Any]:
        """(carry, x ``[*batch, D]``) -> (the next carry, y).

        Raises:
          ValueError: if the carry was used up by another call, if one of the two has another
            structure, shape or dtype than the step was compiled for, or if two fields of the carry,
            or a field and x, share their memory.
        """
        try:
            carry, y = self._compiled(self._weights, carry, x)
        except (TypeError, ValueError, RuntimeError) as error:
            self._check(carry, x)
            if "donate" in str(error):  # JAX refuses before it takes anything: the carry is whole
                raise ValueError(
                    "Two fields of the carry, or a field and x, share their memory, which the call "
                    "uses up: hand in a copy of one, jnp.copy(field)."
                ) from None
            raise
        if self._patience:
            _watch(y, self._patience)
        return carry, y

    def _check(self, carry: Any, x: Any) -> None:
        """Why a call failed, where that is the caller's doing."""
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((carry, x))):
            return  # JAX says that a compiled program is not to be transformed
        shape, dtype = self._x.shape, self._x.dtype
        if not checks.is_array(x) or (x.shape, _dtype(x)) != (shape, dtype):
            raise ValueError(
                f"x must be {dtype}{list(shape)}, got {checks.described(x)}."
            ) from None
        leaves = jax.tree.leaves(carry)
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
            raise ValueError(
                "This carry was used up by the call that took it before: hand in the carry that "
                "the last call returned."
            ) from None
        template = jax.eval_shape(self.initial)
        try:
            checks.carry("carry", carry, template)
        except ValueError as error:
            raise error from None
        structure: Any = jax.tree.structure(template)
        if jax.tree.structure(carry) != structure:
            expected, kind = checks.described(template), checks.described(carry)
            if expected == kind:  # they differ further down
                expected, kind = str(structure), str(jax.tree.structure(carry))
            raise ValueError(f"carry must be {expected}, got {kind}.") from None
        for leaf, like in zip(leaves, jax.tree.leaves(template), strict=True):
            if _dtype(leaf) != like.dtype:
                raise ValueError(f"carry must hold {like.dtype}, got {leaf.dtype} in it.") from None


def stepper(
    cell: Cell,
    params: Params,
    batch: int | Sequence[int] = (),
    *,
    in_features: int | None = None,
) -> Stepper:
    """Compiles one step of a cell for serving.

    The products that read the input and the state are one, where the cell is a ``SlotCell`` without
    heads whose step is the declared one (LSTM, GRU, JANET, Elman, sLSTM). On a CPU of several cores
    a step of up to twelve rows and 2^19 multiplications or more is a loop of one step of the
    backend ``native``, where that serves the cell: reading the weights is then most of it.

    Args:
      cell: an unbound cell.
      params: its parameters; they stay as they are now.
      batch: the batch dims, a sequence, or one number; none for one example.
      in_features: D; default: that with which ``cell.init_params`` has such shapes.

    Returns:
      A ``Stepper``: (carry, x) -> (carry, y), whose carry is used up by the call.

    Raises:
      TypeError: if ``cell`` is not a ``Cell``.
      ValueError: if the parameters are another cell's, or tell no width of inputs, or ``batch``
        holds no sizes.

    Example:
      >>> cell = rg.LSTM(4)
      >>> step = rg.stepper(cell, cell.init_params(jax.random.key(0), 3), batch=2)
      >>> carry = step.initial()
      >>> for x in jnp.ones((5, 2, 3)):
      ...     carry, y = step(carry, x)
      >>> y.shape
      (2, 4)
    """
    checks.cell("stepper", cell, Cell)
    checks.params(cell, params, None)
    width = _width(cell, params) if in_features is None else checks.in_features(in_features)
    if width is None:
        hint = checks.nested(params) or ": give in_features"
        raise ValueError(
            f"The parameters do not tell the width of the inputs of {type(cell).__name__}, got "
            f"{checks.described(params)}{hint}."
        )
    checks.params(cell, params, width)
    sizes = batch if isinstance(batch, Sequence | np.ndarray) and np.ndim(batch) else [batch]
    shape = tuple(checks.whole_number("batch holds sizes", size, 0) for size in sizes)
    return Stepper(cell, params, shape, width)


def _dtype(array: Any) -> Any:
    """What JAX makes of an array's dtype: float32 of NumPy's float64, without x64."""
    return jax.dtypes.canonicalize_dtype(array.dtype, allow_extended_dtype=True)


def _watch(y: Any, patience: float) -> None:
    """Waits for a result, awake, and for no longer than so many seconds.

    XLA's CPU client hands a step to another thread, and a thread that sleeps until it is done takes
    some 40 us to wake.
    """
    if not (leaves := jax.tree.leaves(y)):
        return
    first = leaves[0]
    end = time.perf_counter() + patience
    while not first.is_ready() and time.perf_counter() < end:
        pass


def _width(cell: Cell, params: Any) -> int | None:
    """D, from a shape of the parameters that grows with it; None if there is no such shape."""

    def sizes(tree: Any) -> dict[Any, int]:
        """By leaf and axis."""
        return {
            (jax.tree_util.keystr(path), axis): size
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
            for axis, size in enumerate(jnp.shape(leaf))
        }

    param_sizes = sizes(params)
    try:
        narrow_sizes, wide_sizes = (
            sizes(jax.eval_shape(functools.partial(cell.init_params, jax.random.key(0), width)))
            for width in _WIDTHS
        )
    except (TypeError, ValueError):  # a cell of the user's own that takes other widths
        return None
    narrow, wide = _WIDTHS
    for place, size in narrow_sizes.items():
        growth = wide_sizes.get(place, size) - size
        if growth and place in param_sizes:
            width, remainder = divmod((param_sizes[place] - size) * (wide - narrow), growth)
            return None if remainder or narrow + width < 1 else narrow + width
    return None


def _in_kernels(cell: Cell, params: Params) -> tuple[_Step, Params]:
    """A loop of one step, and the parameters that it reads: of two bias vectors their sum.

    An addition in front of the kernels would be one more operation: 40 us a step.
    """
    assert isinstance(cell, SlotCell)
    single_bias_cell = cell.clone(bias_vectors=1)
    if cell.bias_vectors == 2 and "recurrent_bias" in params:
        separate_biases = {slot: params["recurrent_bias"][slot] for slot in cell.separate}
        offsets = {**params["recurrent_bias"], **jax.tree.map(jnp.zeros_like, separate_biases)}
        params = {**params, "bias": jax.tree.map(jnp.add, dict(params["bias"]), offsets)}
        params["recurrent_bias"] = separate_biases
        if not separate_biases:
            del params["recurrent_bias"]

    def step(params: Params, carry: Carry, x: jax.Array) -> tuple[Carry, Any]:
        carry, ys = unroll(single_bias_cell, params, x[None], carry)
        return carry, ys[0]

    return step, params


def _plain(cell: Cell) -> _Step:
    def step(params: Params, carry: Carry, x: jax.Array) -> tuple[Carry, Any]:
        z = cell.project(params, x)
        carry = cell.step(params, carry, z)
        return carry, cell.emit(params, carry, z)

    return step


def _joined(cell: Cell, params: Params, x: jax.ShapeDtypeStruct) -> tuple[_Step, Any] | None:
    """The step with one product of [x, h], and its weights; None where the cell is not made so."""
    members = ("project", "step", "emit", "products")
    if not isinstance(cell, SlotCell) or any(
        getattr(type(cell), name) is not getattr(SlotCell, name) for name in members
    ):
        return None
    dtype = cell.dtype or jnp.result_type(x.dtype, *jax.tree.leaves(params["kernel"]))
    weights = recurrent_weights(cell.products, params)
    if weights.vectors or any(matrix.ndim > 2 for matrix in weights.matrices.values()):
        return None  # [x, h] is multiplied by whole matrices
    bias = linear_project(
        params, jnp.zeros(x.shape[-1:], x.dtype), gate=cell._gate, separate=cell.separate
    )
    direct = _reading_state(cell, weights, x, dtype)
    # One vector times a matrix takes 1.2 to 1.3 times as long as the transpose times the vector.
    is_row = math.prod(x.shape[:-1]) == 1 and target.platform() == "cpu"
    widths, columns, biases = {}, [], []

    def add(name: str, kernel: Any, recurrent: Any, b: Any) -> None:
        above = jnp.zeros((x.shape[-1], b.size), b.dtype) if kernel is None else kernel
        below = jnp.zeros((cell.features, b.size), b.dtype) if recurrent is None else recurrent
        widths[name] = b.size
        columns.append(jnp.concatenate([above, below]).astype(dtype))
        biases.append(b)

    for slot, kernel in params["kernel"].items():
        is_separate = slot in cell.separate or slot not in direct
        name = f"{slot}_input" if slot in cell.separate else slot
        add(name, kernel, None if is_separate else weights.matrices[slot], bias[slot])
    for slot in direct:
        if slot not in widths:
            recurrent = weights.matrices[slot]
            add(slot, None, recurrent, weights.biases.get(slot, jnp.zeros_like(recurrent[0])))
    other_weights = weights._replace(
        matrices={s: m for s, m in weights.matrices.items() if s not in direct}
    )

    def step(step_weights: Any, carry: Carry, x: jax.Array) -> tuple[Carry, Any]:
        kernel, offsets, other_weights = step_weights
        xh = jnp.concatenate([x.astype(dtype), carry.h.astype(dtype)], axis=-1)
        if is_row:
            out = matrix_product(kernel, xh.reshape(-1, 1), dtype).reshape(*xh.shape[:-1], -1)
        else:
            out = matrix_product(xh, kernel, dtype)
        out = out + lead(offsets.astype(out.dtype), out)
        ends = list(itertools.accumulate(widths.values()))[:-1]
        pre = dict(zip(widths, jnp.split(out, ends, axis=-1), strict=True))

        def product(slot: str, vector: jax.Array) -> jax.Array:
            if slot in direct:
                return pre[slot]
            recurrent_product = product_of(other_weights, slot, vector, dtype)
            return recurrent_product + pre[slot] if slot in pre else recurrent_product

        carry = cell.update(carry, pre, product)
        return carry, carry.h.astype(dtype)

    kernel = jnp.concatenate(columns, axis=1)
    return step, (kernel.T if is_row else kernel, jnp.concatenate(biases), other_weights)


def _reading_state(
    cell: SlotCell, weights: Any, x: jax.ShapeDtypeStruct, dtype: Any
) -> tuple[str, ...]:
    """The slots whose product reads the state h itself, and not what the step makes of it."""
    slots: list[str] = []

    def update(carry: Carry, inputs: Slots) -> Carry:
        def product(slot: str, vector: jax.Array) -> jax.Array:
            if vector is carry.h:
                slots.append(slot)
            return product_of(weights, slot, vector, dtype)

        return cell.update(carry, inputs, product)

    inputs = {
        f"{s}_input" if s in cell.separate else s: jax.ShapeDtypeStruct((*x.shape[:-1], w), dtype)
        for s, w in cell.input_slots.items()
    }
    jax.eval_shape(update, jax.eval_shape(lambda: cell.initial(x.shape[:-1])), inputs)
    return tuple(slots)
