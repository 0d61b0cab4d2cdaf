"""Recurrences whose units do not interact, solved for all blocks of time at once.

With a diagonal Jacobian each unit is a scalar recurrence c_t = f_t(c_{t-1}). Time is cut into N
blocks of L steps; F_n is what block n makes of the value u_n that it starts from. The starts are
the unknowns of u_{n+1} = F_n(u_n), and a Newton iteration solves them together:

    u'_{n+1} = F_n(u_n) + D_n (u'_n - u_n),    D_n = dF_n / du_n,

a linear recurrence over blocks, solved by an associative scan. With L = 1 this is DEER (Lim et
al., 2023, "Parallelizing non-linear sequential models over the sequence length"); with blocks it
is multiple shooting. The depth is L + log N. A pass over the blocks reads each input once and
writes each value once, where a scan over all T steps makes a dozen passes; the values inside a
block are those of the plain loop, so a solution is one to the last roundings; and D_n is a product
of L slopes, which is next to 0 wherever the recurrence forgets, so one pass is often enough.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from recurrent_gates.backends.newton.blocks import (
    Step,
    Tree,
    if_so,
    in_sequence,
    join,
    shoot_all,
    split,
)
from recurrent_gates.shapes import shifted

WARM_UP = 32
"""Steps before a block that give the first guess of its start."""

PASSES = 12
"""The most passes over the blocks before what is left is run in sequence."""

PLAIN = 4
"""Passes after which slopes are clipped to [-1, 1]."""

ROUNDINGS = 16
"""How far a block may start from where the block before ends, in roundings of the dtype, relative
to the largest end of the unit so far: errors travel forwards, so later values excuse nothing. A
block that grows all along makes about 12 of its own."""


class Report(NamedTuple):
    """How a recurrence of N blocks was solved; blocks are in the order of the recurrence.

    Attributes:
      passes: int, passes over the blocks after the first guess; more than ``PLAIN`` where plain
        Newton was not enough and starts were searched for.
      gaps: float ``[N]``, by how much each block's start missed the end of the block before it
        after the last pass, relative to the unit's largest end so far.
      damped: bool ``[N]``, blocks in which a slope was clipped.
      fell_back: bool ``[N]``, blocks that were run again in sequence.
    """

    passes: jax.Array
    gaps: jax.Array
    damped: jax.Array
    fell_back: jax.Array


def solve(
    step: Step,
    start: Tree,
    inputs: Tree,
    *,
    linear: bool = False,
    reverse: bool = False,
    unroll: int = 1,
) -> tuple[Tree, Tree, Report]:
    """All values of c_t = step(c_{t-1}, inputs_t), by Newton's method on the blocks' starts.

    Where plain iterations are not enough, starts are searched for from both sides (``_search``),
    and slopes are clipped to [-1, 1] from then on, as ELK damps its own (Gonzalez et al., 2024,
    "Towards scalable and stable parallelization of nonlinear RNNs"); the solution is the same.
    Blocks that still do not fit the block before them are run again in sequence, so the result
    is always that of the loop.

    Args:
      step: the recurrence; entry j of each leaf of its result depends on entry j of that leaf
        of c alone. A slope that is wrong costs passes, not correctness.
      start: c before the first step, a tree of floats.
      inputs: a tree with leading axis T.
      linear: whether step is affine in c, for which plain iterations are enough.
      reverse: from the last step to the first.
      unroll: steps per iteration of the loops.

    Returns:
      (last value, all values ``[T, ...]``, ``Report``).
    """
    blocks, remainder = split(start, inputs, reverse)
    if jax.tree.leaves(blocks)[0].shape[0] == 0:
        return _unsolved(start, *in_sequence(step, start, remainder, reverse, unroll))
    problem = _Problem(step, blocks, reverse, unroll)
    shot = problem.first_shot(start)
    shot = jax.lax.while_loop(
        lambda shot: (shot.passes < PASSES) & jnp.any(_misses(shot)),
        functools.partial(problem.corrected, linear=linear),
        shot,
    )
    shot = jax.lax.while_loop(lambda shot: jnp.any(_misses(shot)), problem.run_again, shot)
    last, values = join(step, shot.ends, shot.values, remainder, reverse, unroll)
    return last, values, Report(shot.passes, shot.gaps, shot.damped, shot.fell_back)


def _unsolved(start: Tree, last: Tree, values: Tree) -> tuple[Tree, Tree, Report]:
    """The result of a run in sequence, where there are no blocks to report of."""
    no_flags = jnp.zeros((0,), bool)
    gaps = jnp.zeros((0,), jax.tree.leaves(start)[0].dtype)
    return last, values, Report(jnp.asarray(0), gaps, no_flags, no_flags)


class _Shot(NamedTuple):
    """All blocks, run from their starts. Starts, ends and slopes ``[N, ...]``, and all that is by
    block alone, are in the order of the recurrence; values ``[N, L, ...]`` in that of time."""

    passes: jax.Array
    gaps: jax.Array
    damped: jax.Array
    fell_back: jax.Array
    starts: Tree
    ends: Tree
    slopes: Tree
    values: Tree


def _misses(shot: _Shot) -> jax.Array:
    """Which blocks do not start where the one before them ends, ``[N]``."""
    return shot.gaps > ROUNDINGS * jnp.finfo(shot.gaps.dtype).eps


class _Problem(NamedTuple):
    """A recurrence over blocks of time, whose starts are the unknowns."""

    step: Step
    blocks: Tree
    reverse: bool
    unroll: int

    def shoot(self, starts: Tree, slopes: Tree | None, blocks: Tree) -> Any:
        """One pass over blocks, or parts of them: (ends, slopes, values)."""
        return shoot_all(
            self.step, starts, slopes, blocks, reverse=self.reverse, unroll=self.unroll
        )

    def first_shot(self, start: Tree) -> _Shot:
        """The pass from the first guess: where ``WARM_UP`` steps before a block lead to."""
        count, length = jax.tree.leaves(self.blocks)[0].shape[:2]
        warm_up = min(WARM_UP, length)
        before_end = slice(None, warm_up) if self.reverse else slice(length - warm_up, None)
        guess = jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), start)
        warm_up_inputs = jax.tree.map(lambda x: x[:, before_end], self.blocks)
        starts = shifted(start, self.shoot(guess, None, warm_up_inputs)[0])
        # The first correction takes every slope as 0, so that the first pass need not have them.
        slopes = jax.tree.map(jnp.zeros_like, starts)
        ends, _, values = self.shoot(starts, None, self.blocks)
        gaps = _gaps(starts, ends)
        no_flags = jnp.zeros_like(gaps, bool)
        passes = jnp.ones_like(gaps, int, shape=())
        return _Shot(passes, gaps, no_flags, no_flags, starts, ends, slopes, values)

    def corrected(self, shot: _Shot, *, linear: bool) -> _Shot:
        """The pass from better starts: Newton's, or those of a search, once, where it fails."""
        starts, ends, damped = shot.starts, shot.ends, shot.damped
        if linear:
            starts = _newton(starts, ends, shot.slopes)
        else:
            damp = shot.passes > PLAIN
            slopes = jax.tree.map(lambda d: jnp.where(damp, jnp.clip(d, -1, 1), d), shot.slopes)
            damped = damped | _any_differs(slopes, shot.slopes)
            new = _newton(starts, ends, slopes)
            search = functools.partial(_search, self.shoot, starts, ends, self.blocks)
            starts = if_so(shot.passes == PLAIN, lambda _: search(), new)
        ones = jax.tree.map(jnp.ones_like, starts)
        ends, slopes, values = self.shoot(starts, ones, self.blocks)
        gaps = _gaps(starts, ends)
        return _Shot(shot.passes + 1, gaps, damped, shot.fell_back, starts, ends, slopes, values)

    def run_again(self, shot: _Shot) -> _Shot:
        """The first block that misses, run in sequence from where the one before it ends."""
        n = jnp.argmax(_misses(shot))  # never 0: the first block's start is given
        index = len(shot.gaps) - 1 - n if self.reverse else n
        first = jax.tree.map(lambda x: x[n - 1], shot.ends)
        block = jax.tree.map(lambda x: x[index], self.blocks)
        end, inside = in_sequence(self.step, first, block, self.reverse, self.unroll)
        starts, ends = (
            jax.tree.map(lambda a, b: a.at[n].set(b), values, value)
            for values, value in ((shot.starts, first), (shot.ends, end))
        )
        return shot._replace(
            gaps=_gaps(starts, ends),
            fell_back=shot.fell_back.at[n].set(True),
            starts=starts,
            ends=ends,
            values=jax.tree.map(lambda a, b: a.at[index].set(b), shot.values, inside),
        )


def add_up(
    step: Step,
    bounded: Callable[[Tree], Tree],
    start: Tree,
    inputs: Tree,
    *,
    reverse: bool = False,
    unroll: int = 1,
) -> tuple[Tree, Tree]:
    """All values of a recurrence with step(c, x) = bounded(a(x) c + b(x)), in two passes.

    The first gives each block's sum, the second starts from the sums of the blocks before.

    Args:
      step: the recurrence.
      bounded: takes values back into their range, or the identity; bounded(bounded(p) + q) =
        bounded(p + q).
      start, inputs, reverse, unroll: as in ``solve``.

    Returns:
      (last value, all values ``[T, ...]``).
    """
    blocks, remainder = split(start, inputs, reverse)
    count = jax.tree.leaves(blocks)[0].shape[0]
    if count == 0:
        return in_sequence(step, start, remainder, reverse, unroll)
    shoot = functools.partial(shoot_all, step, reverse=reverse, unroll=unroll)
    zeros = jax.tree.map(lambda x: jnp.zeros_like(x, shape=(count, *x.shape)), start)
    sums, slopes, _ = shoot(shifted(start, zeros), jax.tree.map(jnp.ones_like, zeros), blocks)

    def combine(early: Any, late: Any) -> Any:
        (a1, b1), (a2, b2) = early, late
        # A slope of 0, a reset, stops NaN too.
        total = jax.tree.map(lambda b1, a2, b2: jnp.where(a2 == 0, b2, a2 * b1 + b2), b1, a2, b2)
        return jax.tree.map(jnp.multiply, a1, a2), bounded(total)

    _, ends = jax.lax.associative_scan(combine, (slopes, sums))
    ends, _, states = shoot(shifted(start, ends), None, blocks)
    return join(step, ends, states, remainder, reverse, unroll)


# Newton's method on the starts of the blocks.


def _newton(starts: Tree, ends: Tree, slopes: Tree) -> Tree:
    """The starts that fit the blocks' linear models, u'_{n+1} = F_n + D_n (u'_n - u_n)."""

    def solve(start: jax.Array, end: jax.Array, slope: jax.Array) -> jax.Array:
        def combine(early: Any, late: Any) -> Any:
            (a1, b1), (a2, b2) = early, late
            return a1 * a2, a2 * b1 + b2

        # In v = u' - u, which is small: v_{n+1} = D_n v_n + (F_n - u_{n+1}), v_0 = 0.
        gap = end[:-1] - start[1:]
        _, next_moves = jax.lax.associative_scan(combine, (slope[:-1], gap))
        moves = jnp.concatenate([jnp.zeros_like(next_moves[:1]), next_moves])[:-1]
        new = end[:-1] + slope[:-1] * moves
        # A product of slopes may overflow: then without them, as in the first pass.
        new = jnp.where(jnp.isfinite(new), new, end[:-1])
        return jnp.concatenate([start[:1], new])

    return jax.tree.map(solve, starts, ends, slopes)


def _search(shoot: Any, starts: Tree, ends: Tree, blocks: Tree) -> Tree:
    """Starts for units that hold one of two states, and that Newton's method has in the wrong one.

    Such a unit forgets where in a basin a block started, but not in which. So the blocks are run
    from both sides; where two runs of block n end, block n + 1 has two candidates for its start,
    and each candidate's end lies next to a candidate of the block after. These maps of two
    candidates to two are composed by an associative scan from the given first start.
    """
    first = jax.tree.map(lambda x: x[0], starts)
    count = jax.tree.leaves(starts)[0].shape[0]
    sides = jax.tree.map(
        lambda s: jnp.broadcast_to(jnp.stack([-s, s])[:, None], (2, count, *s.shape)), _scale(ends)
    )
    run = jax.vmap(lambda starts: shifted(first, shoot(starts, None, blocks)[0]))
    _, runs = jax.lax.scan(lambda starts, _: (run(starts),) * 2, sides, length=2)
    candidates = jax.tree.map(lambda x: x[0], runs)
    arrivals = jax.tree.map(lambda x: x[1], runs)

    def choose(start: jax.Array, end: jax.Array, candidate: jax.Array, arrival: jax.Array) -> Any:
        gaps = jnp.abs(arrival[:, None, 1:] - candidate[None, :, 1:])  # [from, to, N - 1, ...]
        upper = gaps[:, 1] < gaps[:, 0]

        def combine(early: Any, late: Any) -> Any:
            return tuple(jnp.where(side, late[1], late[0]) for side in early)

        is_upper, _ = jax.lax.associative_scan(combine, (upper[0], upper[1]))
        solution = jnp.where(is_upper, candidate[1, 1:], candidate[0, 1:])
        return jnp.concatenate([start[:1], solution])

    return jax.tree.map(choose, starts, ends, candidates, arrivals)


def _scale(ends: Tree) -> Tree:
    """The largest finite |end| of each unit."""

    def scale(end: jax.Array) -> jax.Array:
        size = jnp.max(jnp.where(jnp.isfinite(end), jnp.abs(end), 0), axis=0)
        return jnp.maximum(size, jnp.finfo(end.dtype).tiny)

    return jax.tree.map(scale, ends)


def _gaps(starts: Tree, ends: Tree) -> jax.Array:
    """The largest |end of the block before - start| of each block, ``[N]``, relative to the
    unit's largest finite end up to there."""

    def gap(start: jax.Array, end: jax.Array) -> jax.Array:
        target, arrival = start[1:], end[:-1]
        size = jnp.abs(jnp.concatenate([start[:1], arrival]))
        largest = jax.lax.cummax(jnp.where(jnp.isfinite(size), size, 0))[1:]
        miss = jnp.abs(arrival - target) / jnp.maximum(largest, jnp.finfo(end.dtype).tiny)
        miss = jnp.where(jnp.isnan(miss), jnp.inf, miss)
        # A run that has diverged is solved too: NaN follows NaN.
        matches = (arrival == target) | (jnp.isnan(arrival) & jnp.isnan(target))
        miss = jnp.where(matches, 0, miss)
        return jnp.max(miss, axis=range(1, miss.ndim), initial=0)

    worst = functools.reduce(jnp.maximum, jax.tree.leaves(jax.tree.map(gap, starts, ends)))
    return jnp.concatenate([jnp.zeros_like(worst[:1]), worst])


def _any_differs(a: Tree, b: Tree) -> jax.Array:
    """Whether any unit of a block differs, ``[N]``; NaN is no difference."""
    differences = jax.tree.map(lambda a, b: jnp.any((a < b) | (a > b), axis=range(1, a.ndim)), a, b)
    return functools.reduce(jnp.logical_or, jax.tree.leaves(differences))
