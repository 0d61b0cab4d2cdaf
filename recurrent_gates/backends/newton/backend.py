"""Recurrences with a diagonal Jacobian in O(log T) depth, for cells that declare one.

Units that do not interact are scalar recurrences, and all steps of them are solved at once (see
``shooting``): GATO's r by Newton's method, GATO's s, which only adds, by sums of blocks.
Convergence is checked, never assumed: blocks of time that did not converge are run again in
sequence, and a warning says so; ``analysis.newton_report`` has the numbers.

The backward pass is that of an implicit function, as in DEER (Lim et al., 2023): at the solution
the cotangents obey c'_{t-1} = J_t (y'_t + c'_t), which is linear and diagonal too and is solved in
the same way, whatever the forward pass took. One pullback over all steps gives the rest.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp

from recurrent_gates.backends.newton.blocks import if_so
from recurrent_gates.backends.newton.shooting import Report, add_up, solve
from recurrent_gates.backends.shared.accumulation import (
    SumCell,
    feeding,
    increment_inputs,
    joined,
    summing,
    unnamed_field,
)
from recurrent_gates.backends.shared.refusal import nonlinear_gradient, refuse_derivative
from recurrent_gates.base import Cell, feed_back
from recurrent_gates.carry import get_field
from recurrent_gates.declared import Carry, Params, Slots, outdated, summed_fields
from recurrent_gates.scan import (
    Loop,
    Segment,
    Settings,
    Stream,
    mark_residuals,
    with_zeros,
)
from recurrent_gates.shapes import shifted

_LOGGER = logging.getLogger("recurrent_gates")

CARRY_SIZE = 1 << 28
"""The most numbers of a carry over a chunk of time, where the driver is not told otherwise."""

INCREMENT_SIZE = 1 << 24
"""The most numbers of a projection that increments are computed from at once."""


def unsupported(loop: Loop) -> str | None:
    """Why this backend does not serve a loop, in one sentence; None if it does."""
    cell = loop.settings.cell
    if not cell.diagonal:
        return f"{type(cell).__name__} does not say that its recurrent Jacobian is diagonal."
    updates = cell.sums is not None and cell.sums.recur is None
    reason = outdated(cell, "diagonal", "sums", *(("products",) if updates else ()))
    if reason is not None:
        return reason
    if loop.symbolic:
        return "it cuts time into blocks by sizes, and these are symbolic."
    if not all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(loop.carry)):
        return f"a carry of {type(cell).__name__} has other numbers than floating-point ones."
    for fn, noise in zip(loop.carry_fns, loop.stream.noise, strict=True):
        get_field(loop.carry, fn.field)  # an unknown field is an error under any backend
        if not fn.elementwise:
            return f"{type(fn).__name__} may mix the units of a carry."
        keeps_sums = not fn.changes_values or (fn.chooses and noise is not None)
        if fn.field in summed_fields(cell) and not keeps_sums:
            name = type(fn).__name__
            subject = f"the mean of {name.lower()}" if fn.chooses else name
            return f"{subject} on a field that accumulates is no sum."
    return unnamed_field(loop) or nonlinear_gradient(loop)


def chunk(loop: Loop) -> int | None:
    """The steps per rematerialised chunk that this backend wants, or None for no chunks."""
    size = sum(leaf.size for leaf in jax.tree.leaves(loop.carry))
    limit = max(1, CARRY_SIZE // max(1, size))
    return limit if loop.steps > limit else None


def segment(loop: Loop) -> Segment:
    """A stretch of time; same contract as ``scan_segment``."""
    settings, cell = loop.settings, loop.settings.cell
    if cell.sums is None:
        last, carries = _recurrence(loop)
    else:
        looped_last, looped = _recurrence(feeding(loop))
        increments = _increments(
            cell, loop.params, loop.xs, increment_inputs(feeding(loop), looped)
        )
        sums_last, sums = _recurrence(summing(loop, increments))
        last, carries = joined(cell, looped_last, sums_last), joined(cell, looped, sums)
    z = cell.project(loop.params, loop.xs)
    ys = with_zeros(loop.stream.valid, cell.emit(loop.params, carries, z))
    return Segment(last, ys, carries if settings.keep_carries else None)


def report(loop: Loop) -> Report:
    """How the recurrence of a loop converges.

    Raises:
      ValueError: if the cell does not say that its recurrent Jacobian is diagonal.
    """
    reason = unsupported(loop)
    if reason is not None:
        raise ValueError(f"There is nothing to report: {reason}")
    return jax.jit(_solved)(loop if loop.settings.cell.sums is None else feeding(loop))[2]


# One recurrence: of the fields that feed back, or of sums, whose inputs are increments.


def _one_step(loop: Loop, carry: Carry, z_t: Any, stream_t: Stream) -> Carry:
    cell = loop.settings.cell
    return loop.advance(lambda c: feed_back(cell, loop.params, c, z_t), carry, stream_t)


def _solved(loop: Loop) -> tuple[Carry, Carry, Report | None]:
    """The last carry, those of all steps, and how they were found."""
    settings, cell = loop.settings, loop.settings.cell
    # What changes no value would only change the slopes, and not to those of the values.
    pairs = [
        (fn, noise)
        for fn, noise in zip(loop.carry_fns, loop.stream.noise, strict=True)
        if fn.changes_values
    ]
    stream = loop.stream._replace(noise=tuple(noise for _, noise in pairs))
    active_loop = loop.replace(carry_fns=tuple(fn for fn, _ in pairs), stream=stream)

    def step(c: Carry, inputs: Any) -> Carry:
        return _one_step(active_loop, c, *inputs)

    inputs = (cell.project(loop.params, loop.xs), stream)
    options: Any = dict(reverse=settings.reverse, unroll=settings.unroll)
    if not isinstance(cell, SumCell):
        return solve(step, loop.carry, inputs, **options)
    sums = cell.source.sums
    assert sums is not None
    return *add_up(step, sums.bounded, loop.carry, inputs, **options), None


# The derivatives of what was solved for are not those of the passes that led to it.
_NO_SECOND_DERIVATIVES = (
    "The newton backend serves first derivatives in reverse mode alone. Use backend='scan'."
)


@jax.custom_vjp
def _recurrence(loop: Loop) -> tuple[Carry, Carry]:
    """The last carry, and those of all steps."""
    return _forward(loop)[0]


def _forward(loop: Loop) -> tuple[tuple[Carry, Carry], Any]:
    last, carries, outcome = _solved(loop)
    _warn(loop.settings, "forward", outcome)
    last, carries = refuse_derivative(_NO_SECOND_DERIVATIVES, (last, mark_residuals(carries)))
    return (last, carries), (loop, carries)


def _backward(residuals: tuple[Loop, Carry], cotangents: tuple[Carry, Carry]) -> tuple[Loop]:
    loop, carries = residuals
    d_last, d_carries = cotangents
    settings, reverse = loop.settings, loop.settings.reverse
    previous = shifted(loop.carry, carries, reverse)

    def steps(params: Params, xs: Any, reset_carry: Carry, previous: Carry) -> Carry:
        step_loop = loop.replace(params=params, reset_carry=reset_carry)
        z = settings.cell.project(params, xs)
        return jax.vmap(functools.partial(_one_step, step_loop))(previous, z, loop.stream)

    _, pullback = jax.vjp(
        functools.partial(steps, loop.params, loop.xs, loop.reset_carry), previous
    )
    (slopes,) = pullback(jax.tree.map(jnp.ones_like, carries))

    inputs = (slopes, d_carries)
    options: Any = dict(reverse=not reverse, unroll=settings.unroll)
    if isinstance(settings.cell, SumCell):
        d_carry, d_before = add_up(_adjoint_step, lambda d: d, d_last, inputs, **options)
    else:
        d_carry, d_before, outcome = solve(_adjoint_step, d_last, inputs, linear=True, **options)
        _warn(settings, "backward", outcome)
    d_carry, d_before = refuse_derivative(_NO_SECOND_DERIVATIVES, (d_carry, d_before))

    d_new = jax.tree.map(jnp.add, d_carries, shifted(d_last, d_before, not reverse))
    _, pullback = jax.vjp(
        lambda params, xs, reset_carry: steps(params, xs, reset_carry, previous),
        loop.params,
        loop.xs,
        loop.reset_carry,
    )
    d_params, d_xs, d_reset = pullback(d_new)
    d_loop = loop.replace(params=d_params, xs=d_xs, carry=d_carry, reset_carry=d_reset)
    return (d_loop.replace(carry_fns=None, stream=None),)


def _adjoint_step(d_after: Carry, inputs: tuple[Carry, Carry]) -> Carry:
    """c'_{t-1} = J_t (y'_t + c'_t)."""
    slopes_t, d_here = inputs

    def leaf(j: jax.Array, d: jax.Array, c: jax.Array) -> jax.Array:
        # A slope of 0, a reset, stops NaN too.
        return jnp.where(j == 0, jnp.zeros_like(d), j * (d + c))

    return jax.tree.map(leaf, slopes_t, d_here, d_after)


_recurrence.defvjp(_forward, _backward)


def _warn(settings: Settings, direction: str, outcome: Report | None) -> None:
    """Warns, when the program runs, of blocks that did not converge; else costs a comparison,
    under vmap too."""
    if outcome is None or not outcome.fell_back.size:
        return

    def log(fell_back: Any) -> None:
        if fell_back.any():  # under vmap the other lanes come along
            _LOGGER.warning(
                "%s: backend newton ran %d of %d blocks of time in sequence (%s), where Newton's "
                "method did not converge: see recurrent_gates.analysis.newton_report.",
                type(settings.cell).__name__,
                fell_back.sum(),
                fell_back.size,
                direction,
            )

    fell_back = outcome.fell_back
    if_so(jnp.any(fell_back), lambda _: jax.debug.callback(log, fell_back), None)


def _increments(cell: Cell, params: Params, xs: Any, previous: Carry) -> Slots:
    """What the summed fields grow by at all steps, ``[T, ...]``.

    Where the projections are large (GATO's two-layer g has k * J units) time is taken in chunks,
    whose activations are computed again in the backward pass.
    """

    sums = cell.sums
    assert sums is not None

    def increment(piece: Any) -> Slots:
        previous, xs = piece
        return sums.increment(params, previous, cell.project(params, xs))

    steps = jax.tree.leaves(xs)[0].shape[0]
    z = jax.eval_shape(cell.project, params, xs)
    size = sum(leaf.size for leaf in jax.tree.leaves(z))
    count = min(steps, -(-size // INCREMENT_SIZE))
    if count <= 1:
        return increment((previous, xs))
    length = steps // count
    covered_steps = count * length
    pieces = jax.tree.map(lambda x: x[:covered_steps], (previous, xs))
    pieces = jax.tree.map(lambda x: x.reshape(count, length, *x.shape[1:]), pieces)
    remat = jax.checkpoint(increment, prevent_cse=False)
    values = jax.lax.map(remat, pieces)
    values = jax.tree.map(lambda x: x.reshape(covered_steps, *x.shape[2:]), values)
    if covered_steps == steps:
        return values
    remainder = jax.checkpoint(increment)(jax.tree.map(lambda x: x[covered_steps:], (previous, xs)))
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), values, remainder)
