"""Recurrences with a diagonal Jacobian in O(log T) depth, for cells that declare one.

Units that do not interact are scalar recurrences, and all steps of them are solved at once (see
``shooting``): GATO's r by Newton's method, GATO's s, which only adds, by sums of blocks.
Convergence is checked, never assumed: blocks of time that did not converge are run again in
sequence, and a warning says so; ``report`` has the numbers.

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

from recurrent_gates import checks
from recurrent_gates.backends.accumulation import (
    CarryFns,
    joined,
    only,
    part,
    read_by_increments,
    shifted,
    sum_step,
    without,
)
from recurrent_gates.backends.blocks import if_so
from recurrent_gates.backends.shooting import Report, add_up, solve
from recurrent_gates.base import Carry, Cell, Params
from recurrent_gates.carry import Damp, Detach, Zoneout, get_field
from recurrent_gates.scan import (
    Request,
    Segment,
    Settings,
    Stream,
    advance,
    kept,
    masked_output,
)
from recurrent_gates.shapes import expand, is_symbolic

_LOGGER = logging.getLogger("recurrent_gates")

CARRY_SIZE = 1 << 28
"""The most numbers of a carry over a chunk of time, where the driver is not told otherwise."""

INCREMENT_SIZE = 1 << 24
"""The most numbers of a projection that increments are computed from at once."""


def unsupported(request: Request) -> str | None:
    """Why this backend does not serve a request, in one sentence; None if it does."""
    cell = request.settings.cell
    if not cell.diagonal:
        return f"{type(cell).__name__} does not say that its recurrent Jacobian is diagonal."
    if is_symbolic(request.xs):
        return "it cuts time into blocks by sizes, and these are symbolic."
    for fn, noise in zip(request.carry_fns, request.stream.noise, strict=True):
        get_field(request.carry, fn.field)  # an unknown field is an error under any backend
        if type(fn) not in (Detach, Damp, Zoneout):
            return f"{type(fn).__name__} may mix the units of a carry."
        if cell.accumulated and not isinstance(fn.field, str):
            return "a carry function must name its field where fields accumulate."
        if type(fn) is Zoneout and noise is None and fn.field in cell.accumulated:
            return "the mean of zoneout on a field that accumulates is no sum."
    return None


def chunk(request: Request) -> int | None:
    """The steps per rematerialised chunk that this backend wants, or None for no chunks."""
    steps = jax.tree.leaves(request.xs)[0].shape[0]
    size = sum(leaf.size for leaf in jax.tree.leaves(request.carry))
    most = max(1, CARRY_SIZE // max(1, size))
    return most if steps > most else None


def segment(
    settings: Settings,
    params: Params,
    xs: Any,
    carry: Carry,
    fresh: Carry,
    carry_fns: CarryFns,
    stream: Stream,
    keep_carries: bool,
) -> Segment:
    """A stretch of time; same contract as ``scan_segment``."""
    cell = settings.cell
    if not cell.accumulated:
        start = (carry, fresh, carry_fns, stream)
        last, carries = _recurrence(settings, False, params, xs, *start)
    else:
        loop_fns, loop_stream = part(cell, carry_fns, stream, accumulated=False)
        start = (without(cell, carry), without(cell, fresh), loop_fns, loop_stream)
        looped_last, looped = _recurrence(settings, False, params, xs, *start)
        before = read_by_increments(
            cell, carry, fresh, loop_fns, loop_stream, looped, settings.reverse
        )
        added = _increments(cell, params, xs, before)
        sum_fns, sum_stream = part(cell, carry_fns, stream, accumulated=True)
        start = (only(cell, carry), only(cell, fresh), sum_fns, sum_stream)
        sums_last, sums = _recurrence(settings, True, {}, added, *start)
        last, carries = joined(cell, looped_last, sums_last), joined(cell, looped, sums)
    ys = masked_output(stream.valid, cell.emit(params, carries, cell.project(params, xs)))
    return Segment(last, ys, carries if keep_carries else None)


def report(
    cell: Cell,
    params: Params,
    xs: Any,
    carry: Carry | None = None,
    *,
    valid: jax.Array | None = None,
    resets: jax.Array | None = None,
    reverse: bool = False,
) -> Report:
    """How the recurrence of a cell converges on a sequence; arguments as in ``unroll``.

    Raises:
      ValueError: if shapes do not fit, or if the cell does not say that its recurrent Jacobian is
        diagonal.
    """
    checks.cell("report", cell, Cell)
    checks.sequence(xs)
    steps, *batch = jax.tree.leaves(xs)[0].shape[:-1]
    fresh = cell.initial(tuple(batch))
    carry = fresh if carry is None else checks.carry("carry", carry, fresh)
    valid = checks.mask("valid", valid, steps, tuple(batch))
    resets = checks.mask("resets", resets, steps, tuple(batch))
    if valid is not None:
        xs = jax.tree.map(lambda x: jnp.where(expand(valid, x), x, jnp.zeros_like(x)), xs)
    settings, stream = Settings(cell, reverse, 1, keep=True), Stream(valid, resets, ())
    reason = unsupported(Request(settings, params, xs, carry, (), stream))
    if reason is not None:
        raise ValueError(f"There is nothing to report: {reason}")
    if cell.accumulated:
        carry, fresh = without(cell, carry), without(cell, fresh)
    solved = jax.jit(_solved, static_argnums=(0, 1))
    return solved(settings, False, params, xs, carry, fresh, (), stream)[2]


# The fields that feed back, and (``sums``) those that accumulate, whose inputs are increments.


def _one_step(
    settings: Settings,
    sums: bool,
    params: Params,
    carry: Carry,
    z_t: Any,
    fresh: Carry,
    carry_fns: CarryFns,
    stream_t: Stream,
) -> Carry:
    cell = settings.cell

    def step(c: Carry) -> Carry:
        if sums:
            return sum_step(cell, c, z_t)
        return cell.recur(params, c, z_t) if cell.accumulated else cell.step(params, c, z_t)

    return advance(step, carry, fresh, carry_fns, stream_t)


def _projected(settings: Settings, sums: bool, params: Params, xs: Any) -> Any:
    return xs if sums else settings.cell.project(params, xs)


def _solved(
    settings: Settings,
    sums: bool,
    params: Params,
    xs: Any,
    carry: Carry,
    fresh: Carry,
    carry_fns: CarryFns,
    stream: Stream,
) -> tuple[Carry, Carry, Report | None]:
    """The last carry, those of all steps, and how they were found."""
    cell = settings.cell
    # Detach and Damp change no value, and their slopes are not those of the values.
    pairs = [
        (fn, noise)
        for fn, noise in zip(carry_fns, stream.noise, strict=True)
        if isinstance(fn, Zoneout)
    ]
    carry_fns, noise = (tuple(fn for fn, _ in pairs), tuple(noise for _, noise in pairs))
    inputs = (_projected(settings, sums, params, xs), stream._replace(noise=noise))

    def step(c: Carry, inputs: Any) -> Carry:
        z_t, stream_t = inputs
        return _one_step(settings, sums, params, c, z_t, fresh, carry_fns, stream_t)

    how: Any = dict(reverse=settings.reverse, unroll=settings.unroll)
    if not sums:
        return solve(step, carry, inputs, **how)

    def bounded(total: Carry) -> Carry:
        fields = {f: cell.bounded(f, getattr(total, f)) for f in cell.accumulated}
        return total._replace(**fields)

    return *add_up(step, bounded, carry, inputs, **how), None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _recurrence(
    settings: Settings,
    sums: bool,
    params: Params,
    xs: Any,
    carry: Carry,
    fresh: Carry,
    carry_fns: CarryFns,
    stream: Stream,
) -> tuple[Carry, Carry]:
    """The last carry, and those of all steps."""
    return _forward(settings, sums, params, xs, carry, fresh, carry_fns, stream)[0]


def _forward(settings: Settings, sums: bool, *operands: Any) -> tuple[tuple[Carry, Carry], Any]:
    last, carries, found = _solved(settings, sums, *operands)
    _warn(settings, "forward", found)
    carries = kept(carries)
    return (last, carries), (operands, carries)


def _backward(
    settings: Settings, sums: bool, residuals: Any, cotangents: tuple[Carry, Carry]
) -> tuple:
    (params, xs, carry, fresh, carry_fns, stream), carries = residuals
    d_last, d_carries = cotangents
    reverse = settings.reverse
    before = shifted(carry, carries, reverse)

    def steps(params: Params, xs: Any, fresh: Carry, before: Carry) -> Carry:
        def one(before: Carry, z_t: Any, stream_t: Stream) -> Carry:
            return _one_step(settings, sums, params, before, z_t, fresh, carry_fns, stream_t)

        return jax.vmap(one)(before, _projected(settings, sums, params, xs), stream)

    _, pullback = jax.vjp(functools.partial(steps, params, xs, fresh), before)
    (slopes,) = pullback(jax.tree.map(jnp.ones_like, carries))

    def step(d_after: Carry, inputs: tuple[Carry, Carry]) -> Carry:
        slopes_t, d_here = inputs

        def leaf(j: jax.Array, d: jax.Array, c: jax.Array) -> jax.Array:
            # c'_{t-1} = J_t (y'_t + c'_t); a slope of 0, a reset, stops NaN too.
            return jnp.where(j == 0, jnp.zeros_like(d), j * (d + c))

        return jax.tree.map(leaf, slopes_t, d_here, d_after)

    inputs = (slopes, d_carries)
    how: Any = dict(reverse=not reverse, unroll=settings.unroll)
    if sums:
        d_carry, d_before = add_up(step, lambda d: d, d_last, inputs, **how)
    else:
        d_carry, d_before, found = solve(step, d_last, inputs, linear=True, **how)
        _warn(settings, "backward", found)

    d_new = jax.tree.map(jnp.add, d_carries, shifted(d_last, d_before, not reverse))
    _, pullback = jax.vjp(
        lambda params, xs, fresh: steps(params, xs, fresh, before), params, xs, fresh
    )
    d_params, d_xs, d_fresh = pullback(d_new)
    return d_params, d_xs, d_carry, d_fresh, None, None


_recurrence.defvjp(_forward, _backward)


def _warn(settings: Settings, direction: str, found: Report | None) -> None:
    """Warns, when the program runs, of blocks that did not converge; else costs a comparison,
    under vmap too."""
    if found is None or not found.fell_back.size:
        return

    def log(fell_back: Any) -> None:
        if fell_back.any():  # under vmap the other lanes come along
            _LOGGER.warning(
                "%s: backend newton ran %d of %d blocks of time in sequence (%s), where Newton's "
                "method did not converge: see recurrent_gates.backends.newton.report.",
                type(settings.cell).__name__,
                fell_back.sum(),
                fell_back.size,
                direction,
            )

    fell_back = found.fell_back
    if_so(jnp.any(fell_back), lambda _: jax.debug.callback(log, fell_back), None)


def _increments(cell: Cell, params: Params, xs: Any, before: Carry) -> dict[str, jax.Array]:
    """What the accumulated fields grow by at all steps, ``[T, ...]``.

    Where the projections are large (GATO's two-layer g has k * J units) time is taken in chunks,
    whose activations are computed again in the backward pass.
    """

    def added(piece: Any) -> dict[str, jax.Array]:
        before, xs = piece
        return cell.increment(params, before, cell.project(params, xs))

    steps = jax.tree.leaves(xs)[0].shape[0]
    z = jax.eval_shape(cell.project, params, xs)
    size = sum(leaf.size for leaf in jax.tree.leaves(z))
    count = min(steps, -(-size // INCREMENT_SIZE))
    if count <= 1:
        return added((before, xs))
    length = steps // count
    whole = count * length
    pieces, rest = jax.tree.map(lambda x: x[:whole], (before, xs)), None
    pieces = jax.tree.map(lambda x: x.reshape(count, length, *x.shape[1:]), pieces)
    remat = jax.checkpoint(added, prevent_cse=False)
    sums = jax.lax.map(remat, pieces)
    sums = jax.tree.map(lambda x: x.reshape(whole, *x.shape[2:]), sums)
    if whole == steps:
        return sums
    rest = jax.checkpoint(added)(jax.tree.map(lambda x: x[whole:], (before, xs)))
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), sums, rest)
