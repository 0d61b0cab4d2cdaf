"""Gradients through time, and gates, of any cell with any parameters. Computes, draws nothing.

One step's Jacobian is d carry_t / d carry_{t-1} over all floating fields of the carry side by
side; products of them are d carry_T / d carry_t. A path is blocked as training would block it:
by ``Detach(p=1)`` on a field at every step, so with h blocked an LSTM's step is h-detach's A_t
and with c blocked its B_t (h-detach, Theorem 1).

Letters are those of ``base.py``; N is the width of the whole carry. Inputs are one sequence
``[T, D]`` or a batch ``[T, *batch, D]``; examples of a batch must not interact. Norms over long
gaps leave the range of any float, so they are returned as log10; -inf is a norm of zero.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from recurrent_gates import checks
from recurrent_gates.backends import newton
from recurrent_gates.base import Activation, Carry, Cell, Params, dense
from recurrent_gates.carry import CarryFn, Detach, Noise, get_field, set_field
from recurrent_gates.cells import LSTM, Elman
from recurrent_gates.scan import (
    Loop,
    Settings,
    Stream,
    advance,
    sequence_shape,
    unroll,
    with_zeros,
)

__all__ = [
    "ALL",
    "Field",
    "Jacobian",
    "LecturePaths",
    "SingularBounds",
    "Trajectory",
    "alignment",
    "carry_dtype",
    "field_names",
    "gap_norms",
    "gate_activations",
    "gate_means",
    "gradient_paths",
    "histogram",
    "initial_timescales",
    "largest_state",
    "lecture_paths",
    "newton_report",
    "singular_bounds",
    "state_jacobians",
    "step_jacobians",
    "timescales",
    "trajectory",
]

Field = str | int | None
"""A field of a carry as carry functions name it: by name, by index, or None for a bare array."""

ALL = "all fields"
"""All fields side by side, where a field is asked for."""


# ---------------------------------------------------------------------------------------
# Carries over time
# ---------------------------------------------------------------------------------------


class Trajectory(NamedTuple):
    """A run, every leaf with leading axis T.

    Attributes:
      before: the carry that step t reads, carry_{t-1}.
      after: the carry that it makes, carry_t.
      z: what ``cell.project`` made of the inputs.
    """

    before: Carry
    after: Carry
    z: Any


def field_names(carry: Carry) -> tuple[Field, ...]:
    """The floating fields of a carry, in order.

    Args:
      carry: a NamedTuple, a tuple or an array, of arrays or shapes.

    Returns:
      Their names; indices of a plain tuple; ``(None,)`` of a bare array.

    Raises:
      ValueError: if the carry is none of NamedTuple, tuple and array, or a field is no array.
    """
    names: Sequence[Field]
    if hasattr(carry, "shape"):
        names = (None,)
    elif isinstance(carry, tuple):
        names = getattr(carry, "_fields", range(len(carry)))
    else:
        raise ValueError(
            f"A carry must be a NamedTuple, a tuple or an array, got {type(carry).__name__}."
        )
    values = [get_field(carry, name) for name in names]
    if not all(hasattr(value, "dtype") for value in values):
        raise ValueError(f"The fields of a carry must be arrays, got {carry!r}.")
    floating = [jnp.issubdtype(value.dtype, jnp.floating) for value in values]
    return tuple(name for name, keep in zip(names, floating, strict=True) if keep)


def carry_dtype(carry: Carry) -> Any:
    """The dtype of a carry's floating fields together.

    Args:
      carry: as ``field_names`` takes it.

    Returns:
      The dtype to which they all promote.
    """
    return jnp.result_type(*(get_field(carry, name).dtype for name in field_names(carry)))


@functools.partial(jax.jit, static_argnames="cell")
def trajectory(
    cell: Cell,
    params: Params,
    xs: jax.Array,
    carry: Carry | None = None,
    *,
    carry_fns: Sequence[CarryFn] = (),
    noise: Sequence[Noise] | None = None,
) -> Trajectory:
    """Runs a cell and keeps every carry.

    Args:
      cell: an unbound cell.
      params: its parameters.
      xs: inputs ``[T, *batch, D]``.
      carry: the carry before the first step; default ``cell.initial(batch)``.
      carry_fns: what happens to the carry around each step.
      noise: their draws, as ``unroll`` takes them; None draws nothing.

    Returns:
      Carries before and after each step and projections, leaves ``[T, *batch, ...]``.
    """
    initial = cell.initial(xs.shape[1:-1])
    start = initial if carry is None else carry
    start = jax.tree.unflatten(jax.tree.structure(initial), jax.tree.leaves(start))
    start = jax.tree.map(lambda a, b: jnp.asarray(a, b.dtype), start, initial)
    after, _ = unroll(
        cell,
        params,
        xs,
        start,
        carry_fns=carry_fns,
        noise=noise,
        deterministic=noise is None,
        return_carries="all",
        backend="scan",
    )
    before = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b[:-1]]), start, after)
    return Trajectory(before, after, cell.project(params, xs))


def largest_state(
    cell: Cell, params: Params, xs: jax.Array, carry: Carry | None = None
) -> dict[Field, jax.Array]:
    """How far the state goes: max over units of each field's magnitude, before and after steps.

    GATO's eq. 2 (``exploding`` in ``CELLS``) may grow without bound once it is above 1, and may
    come back; a GRU that starts within [-1, 1] stays there (GATO, 2.2 and App. E).

    Args:
      cell: an unbound cell.
      params: its parameters.
      xs: inputs ``[T, *batch, D]``.
      carry: the carry before the first step; default ``cell.initial(batch)``.

    Returns:
      ``{field: [T + 1, *batch]}``; entry t is after t steps.
    """
    run = trajectory(cell, params, xs, carry)
    return {
        name: jnp.concatenate(
            [
                jnp.max(jnp.abs(get_field(run.before, name)[:1]), axis=-1),
                jnp.max(jnp.abs(get_field(run.after, name)), axis=-1),
            ]
        )
        for name in field_names(run.after)
    }


# ---------------------------------------------------------------------------------------
# Jacobians
# ---------------------------------------------------------------------------------------


@struct.dataclass
class Jacobian:
    """Derivatives of one carry by another: rows are the later carry, columns the earlier.

    Attributes:
      matrix: ``[..., N, N]``.
      widths: fields and their widths, in the order in which they lie in the matrix.
    """

    matrix: jax.Array
    widths: tuple[tuple[Field, int], ...] = struct.field(pytree_node=False)

    def where(self, field: Field) -> slice:
        """Where a field, or ``ALL``, lies in the matrix."""
        if field == ALL:
            return slice(None)
        start = 0
        for name, width in self.widths:
            if name == field:
                return slice(start, start + width)
            start += width
        raise ValueError(f"There is no field {field!r}; there are {self.fields}.")

    @property
    def fields(self) -> tuple[Field, ...]:
        """The names of the carry's floating fields, in order."""
        return tuple(name for name, _ in self.widths)

    def block(self, of: Field, wrt: Field) -> jax.Array:
        """d of / d wrt, ``[..., width of one, width of the other]``; either may be ``ALL``."""
        return self.matrix[..., self.where(of), self.where(wrt)]

    def without(self, field: Field) -> Jacobian:
        """The same with no gradient through a field of the earlier carry: its columns are zero.

        Of single steps this is what ``Detach(1.0, field)`` leaves.
        """
        return Jacobian(self.matrix.at[..., self.where(field)].set(0), self.widths)


def _flatten(carry: Carry, names: Sequence[Field]) -> jax.Array:
    values = [get_field(carry, name) for name in names]
    dtype = carry_dtype(carry)
    return jnp.concatenate([value.astype(dtype) for value in values], axis=-1)


def _insert(carry: Carry, flat: jax.Array, widths: Sequence[tuple[Field, int]]) -> Carry:
    start = 0
    for name, width in widths:
        value = flat[..., start : start + width].astype(get_field(carry, name).dtype)
        carry = set_field(carry, name, value)
        start += width
    return carry


@functools.partial(jax.jit, static_argnames=("cell", "blocked"))
def step_jacobians(
    cell: Cell,
    params: Params,
    xs: jax.Array,
    carry: Carry | None = None,
    *,
    blocked: tuple[Field, ...] = (),
    carry_fns: Sequence[CarryFn] = (),
    noise: Sequence[Noise] | None = None,
) -> Jacobian:
    """d carry_t / d carry_{t-1} at every step of a run.

    Args:
      cell: an unbound cell.
      params: its parameters.
      xs: inputs ``[T, *batch, D]``.
      carry: the carry before the first step; default ``cell.initial(batch)``.
      blocked: fields through which the step passes no gradient: ``("h",)`` leaves an LSTM
        h-detach's A_t, ``("c",)`` its B_t (Theorem 1).
      carry_fns: what else happens to the carry around each step.
      noise: their draws; None draws nothing.

    Returns:
      Matrices ``[T, *batch, N, N]`` in the carry's dtype.
    """
    carry_fns = tuple(carry_fns)
    noise = (None,) * len(carry_fns) if noise is None else tuple(noise)
    run = trajectory(cell, params, xs, carry, carry_fns=carry_fns, noise=noise)
    cell, carry_fns, noise = cell._around(carry_fns, noise)
    steps = xs.shape[0]
    carry_fns += tuple(Detach(1.0, field) for field in blocked)
    noise += (jnp.ones((steps,), bool),) * len(blocked)
    names = field_names(run.after)
    widths = tuple((name, get_field(run.after, name).shape[-1]) for name in names)

    def one_step(at: tuple[Carry, Any, Any]) -> jax.Array:
        before, z_t, noise_t = at

        def later(flat: jax.Array) -> jax.Array:
            earlier = _insert(before, flat, widths)
            new = advance(
                lambda c: cell.step(params, c, z_t),
                earlier,
                earlier,
                carry_fns,
                Stream(None, None, noise_t),
            )
            return _flatten(new, names)

        flat = _flatten(before, names)

        def column(unit: jax.Array) -> jax.Array:  # one unit of every example at once
            return jax.jvp(later, (flat,), (jnp.broadcast_to(unit, flat.shape),))[1]

        basis = jnp.eye(flat.shape[-1], dtype=flat.dtype)
        basis = basis.reshape(-1, *(1,) * (flat.ndim - 1), flat.shape[-1])
        return jax.vmap(column, out_axes=-1)(basis)

    return Jacobian(jax.lax.map(one_step, (run.before, run.z, noise)), widths)


class _Scaled(NamedTuple):
    """A block of a matrix, ``matrix * 2**exponent``: its largest entry is in [1/2, 1), or 0.

    Attributes:
      matrix: ``[..., rows, columns]``.
      exponent: int ``[...]``.
    """

    matrix: jax.Array
    exponent: jax.Array


_ZERO = -(2**24)  # the exponent of a block of zeros, below that of any other
_Blocks = tuple[tuple[_Scaled, ...], ...]  # by field of the rows and field of the columns


def _scaled(matrix: jax.Array, exponent: jax.Array) -> _Scaled:
    largest = jnp.max(jnp.abs(matrix), axis=(-2, -1))
    _, shift = jnp.frexp(largest)
    exponent = jnp.where(largest == 0, _ZERO, exponent + shift)
    return _Scaled(jnp.ldexp(matrix, -shift[..., None, None]), exponent)


def _aligned(blocks: Sequence[_Scaled]) -> tuple[list[jax.Array], jax.Array]:
    """The matrices of blocks on their largest exponent, and that exponent."""
    exponent = functools.reduce(jnp.maximum, [block.exponent for block in blocks])
    least = -2 * jnp.finfo(blocks[0].matrix.dtype).maxexp  # nothing is left of what is lower

    def aligned(block: _Scaled) -> jax.Array:
        shift = jnp.maximum(block.exponent - exponent, least)
        return jnp.ldexp(block.matrix, shift[..., None, None])

    return [aligned(block) for block in blocks], exponent


def _products(factors: jax.Array, widths: Sequence[int]) -> _Blocks:
    """Products of the last g factors, g = 0 ... T, by blocks of these widths, ``[T + 1, ...]``.

    Powers of two are taken out of each block by itself, so that nothing overflows, a block is not
    lost beside a larger one, and nothing is rounded by it.
    """
    edges = [0, *itertools.accumulate(widths)]
    spans = [slice(*pair) for pair in itertools.pairwise(edges)]

    def blocks(matrix: jax.Array) -> _Blocks:
        none = jnp.zeros(matrix.shape[:-2], jnp.int32)
        return tuple(tuple(_scaled(matrix[..., i, j], none) for j in spans) for i in spans)

    one = jnp.broadcast_to(jnp.eye(factors.shape[-1], dtype=factors.dtype), factors.shape[1:])
    start = blocks(one)

    def product(row: Sequence[_Scaled], column: Sequence[_Scaled]) -> _Scaled:
        terms = [
            _scaled(jnp.matmul(a.matrix, b.matrix, precision="highest"), a.exponent + b.exponent)
            for a, b in zip(row, column, strict=True)
        ]
        matrices, exponent = _aligned(terms)
        return _scaled(functools.reduce(jnp.add, matrices), exponent)

    def body(state: _Blocks, factor: jax.Array) -> Any:
        columns = list(zip(*blocks(factor), strict=True))
        state = tuple(tuple(product(row, column) for column in columns) for row in state)
        return state, state

    _, rest = jax.lax.scan(body, start, factors, reverse=True)
    return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b[::-1]]), start, rest)


def _joined(blocks: Sequence[Sequence[_Scaled]]) -> _Scaled:
    """Blocks as one matrix."""
    matrices, exponent = _aligned([block for row in blocks for block in row])
    count = len(blocks[0])
    rows = [
        jnp.concatenate(matrices[start : start + count], axis=-1)
        for start in range(0, len(matrices), count)
    ]
    return _Scaled(jnp.concatenate(rows, axis=-2), exponent)


@jax.jit
def state_jacobians(steps: Jacobian) -> Jacobian:
    """d carry_T / d carry_{T-g} for every gap g from the end of the run (GATO, eq. 3).

    Args:
      steps: Jacobians of single steps, ``[T, ..., N, N]``.

    Returns:
      Products ``[T + 1, ..., N, N]``; entry g is over the last g steps, entry 0 the identity.
    """
    products = _products(steps.matrix, [width for _, width in steps.widths])
    rows = [
        jnp.concatenate(
            [jnp.ldexp(block.matrix, block.exponent[..., None, None]) for block in row], axis=-1
        )
        for row in products
    ]
    return Jacobian(jnp.concatenate(rows, axis=-2), steps.widths)


def _log10_norm(block: _Scaled) -> jax.Array:
    """log10 of the spectral norm of a block."""
    largest = jnp.linalg.svd(block.matrix, compute_uv=False)[..., 0]
    return jnp.log10(largest) + block.exponent.astype(largest.dtype) * jnp.log10(2.0).astype(
        largest.dtype
    )


def _places(steps: Jacobian, field: Field) -> range:
    """Which of the fields a field, or ``ALL``, is."""
    if field == ALL:
        return range(len(steps.widths))
    steps.where(field)  # an unknown field is an error
    place = steps.fields.index(field)
    return range(place, place + 1)


@functools.partial(jax.jit, static_argnames=("of", "wrt"))
def gap_norms(steps: Jacobian, *, of: Field = ALL, wrt: Field = ALL) -> jax.Array:
    """log10 of the spectral norm of d of_T / d wrt_{T-g}, against the gap g.

    Args:
      steps: Jacobians of single steps, ``[T, ..., N, N]``.
      of: a field of the later carry.
      wrt: a field of the earlier carry.

    Returns:
      ``[T + 1, ...]``; entry g is over the last g steps. However small a block is beside the
      others, its norm is to the dtype's precision.

    Example:
      >>> gru, xs = rg.GRU(4), jnp.ones((10, 3))
      >>> params = gru.init_params(jax.random.key(0), 3)
      >>> steps = rg.analysis.step_jacobians(gru, params, xs)
      >>> norms = rg.analysis.gap_norms(steps)
      >>> norms.shape, float(norms[0])
      ((11,), 0.0)
    """
    products = _products(steps.matrix, [width for _, width in steps.widths])
    rows, columns = _places(steps, of), _places(steps, wrt)
    return _log10_norm(_joined([[products[i][j] for j in columns] for i in rows]))


def gradient_paths(
    cell: Cell,
    params: Params,
    xs: jax.Array,
    carry: Carry | None = None,
    *,
    of: Field = ALL,
    wrt: Field = ALL,
) -> dict[tuple[Field, ...], jax.Array]:
    """Norms of d carry_T / d carry_{T-g} against the gap g, with all paths and without each.

    For an LSTM the entry without h is the norm of h-detach's product of A_t, the path through
    the cell state; the one without c is that of the B_t.

    Args:
      cell: an unbound cell.
      params: its parameters.
      xs: inputs ``[T, *batch, D]``.
      carry: the carry before the first step; default ``cell.initial(batch)``.
      of: a field of the later carry.
      wrt: a field of the earlier carry.

    Returns:
      ``{blocked fields: log10 norms [T + 1, *batch]}``; the key ``()`` is all paths.
    """
    names = field_names(jax.eval_shape(lambda: cell.initial(xs.shape[1:-1])))
    return {
        blocked: gap_norms(step_jacobians(cell, params, xs, carry, blocked=blocked), of=of, wrt=wrt)
        for blocked in ((), *((name,) for name in names))
    }


# ---------------------------------------------------------------------------------------
# The lecture's two paths, and the singular-value bounds of a plain network
# ---------------------------------------------------------------------------------------


def _slope(activation: Activation, x: jax.Array) -> jax.Array:
    """The derivative of an elementwise function."""
    return jax.jvp(activation, (x,), (jnp.ones_like(x),))[1]


class LecturePaths(NamedTuple):
    """Two of an LSTM's paths back in time, as log10 of norms, all ``[T, *batch]``.

    Attributes:
      forget: t_0, h_T back to s_{T-g} through cell states alone, g = 0 ... T - 1: the largest
        entry of o_T * tanh'(s_T) * f_T * ... * f_{T-g+1}. It vanishes only as far as the
        forget gates close.
      output: t_1, h_T back to h_{T-n} through output gates alone, n = 1 ... T: the spectral
        norm of the product of n factors D(tanh(s_j) * o'_j) W_o.
      bound: the lecture's bound on t_1, ``(K |W_o|)^n``, with K the largest entry of the D.
    """

    forget: jax.Array
    output: jax.Array
    bound: jax.Array


@functools.partial(jax.jit, static_argnames="cell")
def lecture_paths(
    cell: LSTM, params: Params, xs: jax.Array, carry: Carry | None = None
) -> LecturePaths:
    """The path that keeps an LSTM's gradient and the path that can explode (the lecture).

    The loss's own factor L'(h_T), which both share, is left out.

    Args:
      cell: an LSTM with any gate; its effective f is what the path multiplies.
      params: its parameters.
      xs: inputs ``[T, *batch, D]``.
      carry: the carry before the first step; default ``cell.initial(batch)``.

    Returns:
      The two paths and the bound, as log10 of norms.
    """
    run = trajectory(cell, params, xs, carry)
    gates = cell.gates(params, run.before, run.z)
    c, o, f = run.after.c, gates["o"], gates["f"]
    reading = jnp.log10(o[-1] * jnp.abs(_slope(cell.output_activation, c[-1])))
    later = jnp.cumsum(jnp.log10(f)[:0:-1], axis=0)  # f_T, f_T f_{T-1}, ...
    kept = jnp.concatenate([jnp.zeros_like(f[:1]), later])
    scale = cell.output_activation(c) * o * (1 - o)
    weight = jnp.swapaxes(params["recurrent_kernel"]["o"], -1, -2).astype(scale.dtype)
    factors = scale[..., :, None] * weight.reshape((1,) * (scale.ndim - 1) + weight.shape)
    ((products,),) = _products(factors, [factors.shape[-1]])
    largest = jnp.max(jnp.abs(scale), axis=(0, -1))  # K
    one = jnp.log10(largest * jnp.linalg.norm(weight, ord=2))
    steps = jnp.arange(1, len(c) + 1, dtype=one.dtype).reshape(-1, *(1,) * one.ndim)
    return LecturePaths(
        jnp.max(reading[None] + kept, axis=-1),
        _log10_norm(_Scaled(products.matrix[1:], products.exponent[1:])),
        steps * one[None],
    )


class SingularBounds(NamedTuple):
    """What U's singular values say of an Elman network's gradients (GATO, 2.2 and App. C).

    Attributes:
      smallest: U's smallest singular value, a scalar.
      largest: U's largest.
      slope_min: the least derivative of the activation over the run, ``[*batch]``.
      slope_max: the greatest.
      lower: log10 of (smallest * slope_min)^g, ``[T + 1, *batch]``: every singular value of
        dh_T/dh_{T-g} is at least that. Above 0 gradients explode.
      upper: log10 of (largest * slope_max)^g: none is above that. Below 0 gradients vanish.
    """

    smallest: jax.Array
    largest: jax.Array
    slope_min: jax.Array
    slope_max: jax.Array
    lower: jax.Array
    upper: jax.Array


@functools.partial(jax.jit, static_argnames="cell")
def singular_bounds(
    cell: Elman, params: Params, xs: jax.Array, carry: Carry | None = None
) -> SingularBounds:
    """Bounds on the growth and the decay of dh_T/dh_t of h_t = activation(U h_tm1 + W x_t + b).

    Args:
      cell: an Elman network.
      params: its parameters.
      xs: inputs ``[T, *batch, D]``.
      carry: the carry before the first step; default ``cell.initial(batch)``.

    Returns:
      What U's singular values and the activation's slopes allow, per gap.
    """
    run = trajectory(cell, params, xs, carry)
    slope = jnp.abs(_slope(cell.activation, dense(params, run.z)("h", run.before.h)))
    values = jnp.linalg.svd(params["recurrent_kernel"]["h"], compute_uv=False)
    values = values.astype(slope.dtype)
    low, high = jnp.min(slope, axis=(0, -1)), jnp.max(slope, axis=(0, -1))
    gaps = jnp.arange(len(slope) + 1, dtype=slope.dtype).reshape(-1, *(1,) * low.ndim)

    def power(base: jax.Array) -> jax.Array:
        return jnp.where(gaps > 0, gaps * jnp.log10(base)[None], 0)  # 0^0 is 1

    return SingularBounds(
        values[-1], values[0], low, high, power(values[-1] * low), power(values[0] * high)
    )


def alignment(a: Any, b: Any) -> jax.Array:
    """The cosine of the angle between two gradients, trees of the same structure.

    Clipping by norm keeps it at 1 (the lecture); clipping by value does not.

    Args:
      a: a tree of arrays.
      b: another.

    Returns:
      A scalar in [-1, 1].
    """

    def dot(a: Any, b: Any) -> jax.Array:
        products = jax.tree.map(lambda x, y: jnp.sum(x * y), a, b)
        return functools.reduce(jnp.add, jax.tree.leaves(products))

    return dot(a, b) / jnp.sqrt(dot(a, a) * dot(b, b))


# ---------------------------------------------------------------------------------------
# Gates and timescales
# ---------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="cell")
def gate_activations(
    cell: Cell, params: Params, xs: jax.Array, carry: Carry | None = None
) -> dict[str, jax.Array]:
    """Every gate over time and batch.

    Args:
      cell: an unbound cell.
      params: its parameters.
      xs: inputs ``[T, *batch, D]``.
      carry: the carry before the first step; default ``cell.initial(batch)``.

    Returns:
      ``{gate: [T, *batch, F]}``, empty for a cell that names no gates.
    """
    run = trajectory(cell, params, xs, carry)
    return cell.gates(params, run.before, run.z)


def gate_means(gates: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Activations averaged over time and batch, one number for each unit (UR-gates, Fig. 4, D.1).

    Args:
      gates: ``{gate: [T, *batch, F]}``.

    Returns:
      ``{gate: [F]}``.
    """
    return {name: jnp.mean(gate, axis=range(gate.ndim - 1)) for name, gate in gates.items()}


def histogram(
    values: jax.Array, bins: int = 50, limits: tuple[float, float] = (0.0, 1.0)
) -> tuple[jax.Array, jax.Array]:
    """Counts of values, for Fig. 4 of UR-gates those of ``gate_means``.

    Args:
      values: any shape.
      bins: number of bins of equal width; the last includes its upper edge.
      limits: lower and upper edge.

    Returns:
      (counts ``[bins]``, edges ``[bins + 1]``). Values outside the limits are not counted.
    """
    return jnp.histogram(values, bins, limits)


def timescales(f: jax.Array) -> jax.Array:
    """The decay period D = 1 / (1 - f) of a forget activation, in steps (UR-gates, B.3).

    Args:
      f: forget activations in [0, 1], any shape.

    Returns:
      D, the same shape; infinite where f is 1.
    """
    return 1 / (1 - f)


@functools.partial(jax.jit, static_argnames=("cell", "gate", "in_features", "draws"))
def initial_timescales(
    cell: Cell, key: jax.Array, *, gate: str = "f", in_features: int = 1, draws: int = 1
) -> jax.Array:
    """Timescales of fresh parameters at a zero state and input: what the biases alone say.

    Args:
      cell: an unbound cell that names the gate.
      key: PRNG key of the draws.
      gate: which gate forgets.
      in_features: D, the width of the inputs.
      draws: how many parameters are drawn.

    Returns:
      D ``[draws, F]``; infinite where the gate rounds to 1.

    Raises:
      ValueError: if the cell names no such gate.
    """

    def one(key: jax.Array) -> jax.Array:
        params = cell.init_params(key, in_features)
        zeros = jax.tree.map(jnp.zeros_like, cell.initial(()))
        x = jnp.zeros((in_features,), carry_dtype(zeros))
        gates = cell.gates(params, zeros, cell.project(params, x))
        if gate not in gates:
            named = ", ".join(gates) or "none"
            raise ValueError(f"{type(cell).__name__} names no gate {gate!r}; it has {named}.")
        return timescales(gates[gate])

    # Not vmap: XLA's CPU runtime can wait for ever on a batch of QR factorisations, which
    # orthogonal initialisation needs.
    return jax.lax.map(one, jax.random.split(key, draws))


def newton_report(
    cell: Cell,
    params: Params,
    xs: Any,
    carry: Carry | None = None,
    *,
    valid: jax.Array | None = None,
    resets: jax.Array | None = None,
    reverse: bool = False,
) -> newton.Report:
    """How the newton backend solves the recurrence of a cell.

    Args:
      cell: an unbound cell.
      params: its parameters.
      xs: inputs ``[T, *batch, D]``, or a tree of them.
      carry: the carry before the first step; default ``cell.initial(batch)``.
      valid: bool ``[T, *batch]``, as in ``unroll``.
      resets: bool ``[T, *batch]``, as in ``unroll``.
      reverse: run t from T - 1 to 0.

    Returns:
      ``passes`` over the blocks of time, and by block (in the order of the recurrence) the
      ``gaps`` that were left, whether it was ``damped``, and whether it ``fell_back``.

    Raises:
      ValueError: if shapes do not fit, or if the cell does not say that its recurrent Jacobian is
        diagonal.
    """
    checks.cell("newton_report", cell, Cell)
    checks.sequence(xs)
    shape = sequence_shape(cell, params, xs, carry)
    initial = cell.initial(shape[1:])
    carry = initial if carry is None else checks.carry("carry", carry, initial)
    valid = checks.mask("valid", valid, shape[0], shape[1:])
    resets = checks.mask("resets", resets, shape[0], shape[1:])
    settings = Settings(cell, len(shape) - 1, reverse, keep=True)
    stream = Stream(valid, resets)
    loop = Loop(settings, params, with_zeros(valid, xs), carry, initial, stream=stream)
    return newton.report(loop)
