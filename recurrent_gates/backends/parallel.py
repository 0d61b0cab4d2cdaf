"""Linear recurrences, h_t = a_t h_tm1 + b_t with a and b from the inputs alone: all steps at once.

Time is cut into N blocks of L steps, which run side by side. A first pass composes the L maps of
each block to one, an associative scan over the N maps gives what each block starts from, and a
second pass writes the values. So the depth is L + log N and the work twice that of the plain loop,
where an associative scan over all steps would read and write everything log T times. Where a step
is wide enough to keep the machine busy, and on a CPU always, there is one block, which is the plain
loop over nothing but a multiplication and an addition.

Masks, resets and carry functions leave a step linear: they enter a and b. The backward pass is a
linear recurrence in reverse, c_{t-1} = a_t^T (c_t + y_t), solved in the same way.

A unit may have several fields (the LRU has a real and an imaginary part): then a is a small matrix
for each unit, and everything here is a tuple over fields, or a tuple of such tuples.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from recurrent_gates import target
from recurrent_gates.backends.shared.refusal import (
    nonlinear_gate,
    nonlinear_gradient,
    refuse_derivative,
)
from recurrent_gates.backends.shared.rows import projected
from recurrent_gates.carry import CarryFn, Detach, Zoneout, get_field
from recurrent_gates.declared import Carry, is_inexact, outdated, redefined
from recurrent_gates.scan import Loop, Segment, Stream, mark_residuals, with_zeros
from recurrent_gates.shapes import byte_count, expand, shifted

Vector = tuple[jax.Array, ...]
"""A value for each field."""

Matrix = tuple[Vector, ...]
"""What each field of the next step takes of each field of this one."""

_CHUNK_BYTES = 2**20  # of projections or of coefficients in a chunk, on a CPU
_PARAM_CHUNKS = 8  # times the bytes of the parameters, at least
_LANES = 2**18  # numbers that keep a GPU or a TPU busy while a step of a loop is begun
_LEAST = 16  # steps in a block: fewer gain nothing over the scan that joins the blocks


def unsupported(loop: Loop) -> str | None:
    """Why this backend does not serve a loop, in one sentence; None if it does."""
    name = type(loop.settings.cell).__name__
    if not loop.settings.cell.linear:
        own_gates = redefined(loop.settings.cell, "gates", "linear")
        addition = ", of which its own gates may read" if own_gates else ""
        return f"{name} does not say that its step is linear in the carry{addition}."
    reason = outdated(loop.settings.cell, "linear")
    if reason is not None:
        return reason
    if loop.symbolic:
        return "it cuts time into blocks by sizes, and these are symbolic."
    if len({leaf.shape for leaf in jax.tree.leaves(loop.carry)}) > 1:
        return f"the fields of {name} do not have one shape."
    if not all(map(is_inexact, jax.tree.leaves(loop.carry))):
        return f"a carry of {name} has other numbers than floating-point ones."
    for fn, noise in zip(loop.carry_fns, loop.stream.noise, strict=True):
        get_field(loop.carry, fn.field)  # an unknown field is an error under any backend
        chooses = fn.chooses and (noise is not None or type(fn) is Zoneout)
        if not fn.elementwise or (fn.changes_values and not chooses):
            return f"{type(fn).__name__} may not be linear in the carry, unit by unit."
    return nonlinear_gradient(loop) or nonlinear_gate(loop)


def chunk(loop: Loop) -> int | None:
    """The steps per rematerialised chunk that this backend wants, or None for no chunks.

    On a CPU a chunk is to stay in a core's cache, and to be large beside the parameters, whose
    gradient is added to once a chunk.
    """
    if target.platform() != "cpu" or not loop.steps:
        return None
    z = jax.eval_shape(loop.settings.cell.project, loop.params, loop.xs)
    coefficients = loop.steps * (1 + len(jax.tree.leaves(loop.carry))) * byte_count(loop.carry)
    budget = max(_CHUNK_BYTES, _PARAM_CHUNKS * byte_count(loop.params))
    limit = max(_LEAST, loop.steps * budget // max(byte_count(z), coefficients, 1))
    if limit >= loop.steps:
        return None
    # Without a rest, if that costs little: a rest is a second program to compile.
    return next((n for n in range(limit, limit // 2, -1) if loop.steps % n == 0), limit)


def segment(loop: Loop) -> Segment:
    """A stretch of time; same contract as ``scan_segment``."""
    settings, cell = loop.settings, loop.settings.cell
    z = projected(loop)
    # What changes no value changes the slopes that the gradient takes, and a reset carry's.
    gradient_slopes, offsets = _coefficients(loop, z)
    slopes = gradient_slopes if _acting(loop) is loop else _coefficients(_acting(loop), z)[0]
    leaves, structure = jax.tree.flatten(loop.carry)
    traversal = _Traversal(settings.reverse, settings.unroll, once=slopes is not gradient_slopes)
    run = _Run(slopes, gradient_slopes, offsets, tuple(leaves), loop.stream.resets)
    last, values = _recurrence(traversal, run)
    carries = jax.tree.unflatten(structure, values)
    ys = with_zeros(loop.stream.valid, cell.emit(loop.params, carries, z))
    return Segment(
        jax.tree.unflatten(structure, last), ys, carries if settings.keep_carries else None
    )


def _acting(loop: Loop) -> Loop:
    """The loop without those carry functions that act on gradients alone."""
    pairs = zip(loop.carry_fns, loop.stream.noise, strict=True)
    active_pairs = [(fn, noise) for fn, noise in pairs if fn.changes_values or _is_idle(fn, noise)]
    if len(active_pairs) == len(loop.carry_fns):
        return loop
    stream = loop.stream._replace(noise=tuple(noise for _, noise in active_pairs))
    return loop.replace(carry_fns=tuple(fn for fn, _ in active_pairs), stream=stream)


def _is_idle(fn: CarryFn, noise: Any) -> bool:
    return type(fn) is Detach and noise is None  # in evaluation


def _coefficients(loop: Loop, z: Any) -> tuple[Matrix, Vector]:
    """(a, b) of all steps of the driver, ``[T, ...]``: the slopes of a step, and its value at 0."""
    zeros = jax.tree.map(jnp.zeros_like, loop.carry)
    leaves, structure = jax.tree.flatten(zeros)

    def step(z_t: Any, stream_t: Stream) -> tuple[Matrix, Vector]:
        def advance(carry: Carry) -> Vector:
            cell = loop.settings.cell
            new = loop.advance(lambda c: cell.step(loop.params, c, z_t), carry, stream_t)
            return tuple(jax.tree.leaves(new))

        _, push = jax.linearize(advance, zeros)
        columns = []
        for n in range(len(leaves)):
            unit = [jnp.ones_like(x) if m == n else x for m, x in enumerate(leaves)]
            columns.append(push(jax.tree.unflatten(structure, unit)))
        # Not linearize's value: a gradient through that would not meet what detach says of it.
        return _transposed(tuple(columns)), advance(zeros)

    return jax.vmap(step)(z, loop.stream)


# The recurrence, forward and backward.


class _Traversal(NamedTuple):
    """The static side: whether time runs backwards, the steps per iteration of a loop, and whether
    a gradient can be taken but once."""

    reverse: bool
    unroll: int
    once: bool


class _Run(NamedTuple):
    """A recurrence; leaves ``[T, ...]``, but the start.

    Attributes:
      slopes: a.
      gradient_slopes: a as the gradient takes it; it differs where a carry function acts on
        gradients. No value depends on it: its cotangent is None.
      offsets: b.
      start: h before the first step.
      resets: the steps whose a is 0 because nothing is read, or None.
    """

    slopes: Matrix
    gradient_slopes: Matrix | None
    offsets: Vector
    start: Vector
    resets: jax.Array | None


_NO_SECOND_DERIVATIVES = (
    "The parallel backend serves first derivatives alone where a carry function acts on "
    "gradients. Use backend='scan'."
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recurrence(traversal: _Traversal, run: _Run) -> tuple[Vector, Vector]:
    """The last value and all values of h_t = a_t h_tm1 + b_t."""
    return _solve(_forward_step, traversal, run.slopes, run.offsets, run.start)


def _forward(traversal: _Traversal, run: _Run) -> tuple[tuple[Vector, Vector], Any]:
    last, values = _recurrence(traversal, run)
    values = mark_residuals(values)
    if traversal.once:
        # What a step read is not kept as it read it.
        last, values = refuse_derivative(_NO_SECOND_DERIVATIVES, (last, values))
    return (last, values), (run.gradient_slopes, values, run.start, run.resets)


def _backward(
    traversal: _Traversal, residuals: Any, cotangents: tuple[Vector, Vector]
) -> tuple[_Run]:
    gradient_slopes, values, start, resets = residuals
    d_last, d_values = cotangents
    backward_traversal = traversal._replace(reverse=not traversal.reverse)
    d_start, d_new = _solve(
        _backward_step, backward_traversal, _transposed(gradient_slopes), d_values, d_last
    )
    previous = shifted(start, values, traversal.reverse)
    if resets is not None:  # what a reset does not read may be NaN
        previous = tuple(jnp.where(expand(resets, h), jnp.zeros_like(h), h) for h in previous)
    if traversal.once:
        d_new, d_start = refuse_derivative(_NO_SECOND_DERIVATIVES, (d_new, d_start))
    d_slopes = tuple(tuple(d * h for h in previous) for d in d_new)
    return (_Run(d_slopes, None, d_new, d_start, None),)


_recurrence.defvjp(_forward, _backward)


# A step is (slopes, inputs, value before) -> (value after, what is written down).

Step = Callable[[Matrix, Vector, Vector], tuple[Vector, Vector]]


def _forward_step(slopes: Matrix, offset: Vector, h: Vector) -> tuple[Vector, Vector]:
    """h_t = a_t h_tm1 + b_t."""
    h = _sum(_times(slopes, h), offset)
    return h, h


def _backward_step(slopes: Matrix, d_here: Vector, d: Vector) -> tuple[Vector, Vector]:
    """c_{t-1} = a_t^T (c_t + y_t); what is written down is the sum, the cotangent of h_t."""
    d = _sum(d, d_here)
    return _times(slopes, d), d


def _times(matrix: Matrix, vector: Vector) -> Vector:
    return tuple(functools.reduce(jnp.add, map(_product, row, vector)) for row in matrix)


@jax.custom_jvp
def _product(a: jax.Array, x: jax.Array) -> jax.Array:
    """a * x, but a slope of 0, a reset, stops NaN too."""
    return jnp.where(a == 0, jnp.zeros_like(x), a * x)


@_product.defjvp
def _product_tangent(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """A slope of 0 has the derivative x where x is finite: ``where`` alone would say 0."""
    (a, x), (d_a, d_x) = primals, tangents
    zeros = jnp.zeros_like(x)
    by_a = d_a * jnp.where((a == 0) & ~jnp.isfinite(x), zeros, x)
    return _product(a, x), by_a + jnp.where(a == 0, zeros, a * d_x)


def _sum(a: Vector, b: Vector) -> Vector:
    return tuple(map(jnp.add, a, b))


def _transposed(matrix: Matrix) -> Matrix:
    return tuple(zip(*matrix, strict=True))


# Blocks of time.


def _solve(
    step: Step, traversal: _Traversal, slopes: Matrix, inputs: Vector, start: Vector
) -> tuple[Vector, Vector]:
    """(last value, all that is written down ``[T, ...]``) of a linear step."""
    steps, width = inputs[0].shape[0], inputs[0][0].size
    count = -(-steps // _block_steps(steps, width))
    if count < 3:  # two passes over two blocks are as long as one over both
        return _in_sequence(step, traversal, slopes, inputs, start)
    length = -(-steps // count)
    slopes, inputs = _blocks((slopes, inputs), (count, length), traversal.reverse)
    maps, ends = _composed(step, traversal, slopes, inputs, start)
    _, ends = jax.lax.associative_scan(
        lambda early, late: (
            _transposed(tuple(_times(late[0], column) for column in _transposed(early[0]))),
            _sum(_times(late[0], early[1]), late[1]),
        ),
        (maps, ends),
        reverse=traversal.reverse,
    )
    starts = shifted(start, ends, traversal.reverse)
    outputs = _second_pass(step, traversal, slopes, inputs, starts)
    last = tuple(end[0 if traversal.reverse else -1] for end in ends)
    flat_outputs = tuple(x.reshape(count * length, *x.shape[2:]) for x in outputs)
    extra = count * length - steps
    return last, tuple(x[extra:] if traversal.reverse else x[:steps] for x in flat_outputs)


def _block_steps(steps: int, width: int) -> int:
    """L, for steps of so many numbers."""
    if target.platform() == "cpu":  # where a loop of small steps is one compiled function
        return steps
    return max(_LEAST, -(-steps * width // _LANES))


def _in_sequence(
    step: Step, traversal: _Traversal, slopes: Matrix, inputs: Vector, start: Vector
) -> tuple[Vector, Vector]:
    return jax.lax.scan(
        lambda value, x: step(*x, value),
        start,
        (slopes, inputs),
        reverse=traversal.reverse,
        unroll=traversal.unroll,
    )


def _blocks(tree: Any, shape: tuple[int, int], reverse: bool) -> Any:
    """``[T, ...]`` as ``[N, L, ...]``: steps that do nothing are put where the recurrence ends."""
    slopes, inputs = tree
    extra = shape[0] * shape[1] - inputs[0].shape[0]

    def cut(x: jax.Array, fill: float) -> jax.Array:
        if extra:
            widths = [(extra, 0) if reverse else (0, extra), *[(0, 0)] * (x.ndim - 1)]
            x = jnp.pad(x, widths, constant_values=fill)
        return x.reshape(*shape, *x.shape[1:])

    slopes = tuple(
        tuple(cut(a, float(row == column)) for column, a in enumerate(line))
        for row, line in enumerate(slopes)
    )
    return slopes, tuple(cut(x, 0.0) for x in inputs)


def _step_inputs(tree: Any, i: jax.Array, length: int, reverse: bool) -> Any:
    """Step i of all blocks, from where it lies."""
    index = length - 1 - i if reverse else i
    return jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, index, axis=1, keepdims=False), tree
    )


def _composed(
    step: Step, traversal: _Traversal, slopes: Matrix, inputs: Vector, start: Vector
) -> tuple[Matrix, Vector]:
    """The map of each block, (a, b) ``[N, ...]``; b of the first is what it makes of the start."""
    count, length = inputs[0].shape[:2]
    first = count - 1 if traversal.reverse else 0
    zeros = tuple(jnp.zeros_like(x[:, 0]) for x in inputs)  # cut along a mesh as these are
    value = tuple(zero.at[first].set(x) for zero, x in zip(zeros, start, strict=True))
    columns = tuple(
        tuple(jnp.ones_like(zero) if m == n else zero for m, zero in enumerate(zeros))
        for n in range(len(zeros))
    )

    def body(i: jax.Array, state: Any) -> Any:
        value, columns = state
        slopes_t, inputs_t = _step_inputs((slopes, inputs), i, length, traversal.reverse)
        return step(slopes_t, inputs_t, value)[0], tuple(_times(slopes_t, c) for c in columns)

    value, columns = jax.lax.fori_loop(0, length, body, (value, columns), unroll=traversal.unroll)
    return _transposed(columns), value


def _second_pass(
    step: Step, traversal: _Traversal, slopes: Matrix, inputs: Vector, starts: Vector
) -> Vector:
    """What is written down by all blocks from their starts, ``[N, L, ...]``."""
    length = inputs[0].shape[1]

    def body(i: jax.Array, state: Any) -> Any:
        value, outputs = state
        slopes_t, inputs_t = _step_inputs((slopes, inputs), i, length, traversal.reverse)
        value, new = step(slopes_t, inputs_t, value)
        index = length - 1 - i if traversal.reverse else i
        return value, tuple(
            jax.lax.dynamic_update_index_in_dim(sequence, entry, index, axis=1)
            for sequence, entry in zip(outputs, new, strict=True)
        )

    empty = tuple(map(jnp.zeros_like, inputs))
    return jax.lax.fori_loop(0, length, body, (starts, empty), unroll=traversal.unroll)[1]
