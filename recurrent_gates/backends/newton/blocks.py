"""Blocks of time, and a pass over all of them at once: [T, ...] is [N, L, ...] and a rest.

The rest is what a recurrence comes to last: at the end, or at the start where time runs backwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any
Step = Callable[[Tree, Tree], Tree]

BLOCK = 64
"""L, the steps of a block, while blocks are few; the least depth of a pass."""

LANES = 1 << 18
"""Values that a pass works on at once, about: longer blocks, not more of them, above it."""


def split(start: Tree, inputs: Tree, reverse: bool) -> tuple[Tree, Tree]:
    """(inputs of the blocks ``[N, L, ...]``, those of the rest); N is 0 where 2 do not fit."""
    steps = jax.tree.leaves(inputs)[0].shape[0]
    width = sum(leaf.size for leaf in jax.tree.leaves(start))
    min_length = max(BLOCK, -(-steps * width // LANES))
    # Of lengths about as good, the one that leaves the shortest rest to run in sequence.
    length = min(
        range(min_length, min_length + min_length // 4 + 1), key=lambda length: steps % length
    )
    count = steps // length
    if count < 2:
        count = 0
    covered_steps = count * length
    head, tail = slice(covered_steps), slice(covered_steps, None)
    if reverse:
        head, tail = slice(steps - covered_steps, None), slice(steps - covered_steps)
    blocks = jax.tree.map(lambda x: x[head].reshape(count, length, *x.shape[1:]), inputs)
    return blocks, jax.tree.map(lambda x: x[tail], inputs)


def join(
    step: Step, ends: Tree, states: Tree, remainder: Tree, reverse: bool, unroll: int
) -> tuple[Tree, Tree]:
    """(last value, all values) from those of the blocks, and the rest run in sequence."""
    last = jax.tree.map(lambda x: x[-1], ends)
    states = jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), states)
    if not jax.tree.leaves(remainder)[0].shape[0]:
        return last, states
    last, tail_states = in_sequence(step, last, remainder, reverse, unroll)
    first, second = (tail_states, states) if reverse else (states, tail_states)
    return last, jax.tree.map(lambda a, b: jnp.concatenate([a, b]), first, second)


def in_sequence(
    step: Step, start: Tree, inputs: Tree, reverse: bool, unroll: int
) -> tuple[Tree, Tree]:
    """(last value, all values) by the plain loop."""

    def body(c: Tree, x: Tree) -> tuple[Tree, Tree]:
        c = step(c, x)
        return c, c

    return jax.lax.scan(body, start, inputs, reverse=reverse, unroll=unroll)


def shoot_all(
    step: Step, starts: Tree, slopes: Tree | None, blocks: Tree, *, reverse: bool, unroll: int
) -> tuple[Tree, Tree | None, Tree]:
    """One pass: the ends of all blocks, the slopes if there are some to go on from, all values.

    Starts, ends and slopes ``[N, ...]`` are in the order of the recurrence; blocks and values
    ``[N, L, ...]`` in that of time, and indexed where they lie instead of moving axes.
    """
    count, length = jax.tree.leaves(blocks)[0].shape[:2]
    wide = jax.vmap(step)

    def flip(tree: Tree) -> Tree:
        return jax.tree.map(lambda x: x[::-1], tree) if reverse else tree

    def body(i: jax.Array, state: Any) -> Any:
        c, d, states = state
        index = length - 1 - i if reverse else i
        x = jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, index, axis=1, keepdims=False), blocks
        )
        if d is None:
            c = wide(c, x)
        else:
            c, d = jax.jvp(lambda c: wide(c, x), (c,), (d,))
        states = jax.tree.map(
            lambda a, b: jax.lax.dynamic_update_index_in_dim(a, b, index, axis=1), states, c
        )
        return c, d, states

    states = jax.tree.map(lambda x: jnp.zeros_like(x, shape=(count, length, *x.shape[1:])), starts)
    state = (flip(starts), flip(slopes), states)
    ends, slopes, states = jax.lax.fori_loop(0, length, body, state, unroll=unroll)
    return flip(ends), flip(slopes), states


def if_so(flag: jax.Array, fn: Callable[[Tree], Tree], value: Tree) -> Tree:
    """fn(value) if the flag is set, else value.

    A loop, and not a cond, which vmap turns into running both sides always.
    """
    start = (jnp.asarray(flag), value)
    return jax.lax.while_loop(
        lambda state: state[0], lambda state: (jnp.zeros_like(state[0]), fn(state[1])), start
    )[1]
