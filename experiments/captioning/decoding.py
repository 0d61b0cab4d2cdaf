"""Captions from a model: the likeliest word at each step, or a beam of sentences.

Letters: N rows, K width of the beam, V words, T words at most, with the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Follow = Callable[[Any, jax.Array], tuple[Any, jax.Array]]
"""``follow(carry, words [N]) -> (carry, log_p [N, V])``: one word further."""


def greedy(follow: Follow, carry: Any, rows: int, steps: int, end: int) -> jax.Array:
    """The likeliest word at each step.

    Args:
      follow: the model.
      carry: before the first step.
      rows: N.
      steps: T.
      end: the word that ends a sentence, and is read before its first.

    Returns:
      int32 ``[N, T]``, ``end`` from the end of each sentence on.
    """

    def step(state: Any, _: None) -> tuple[Any, jax.Array]:
        carry, word, ended = state
        carry, log_p = follow(carry, word)
        word = jnp.where(ended, end, jnp.argmax(log_p, axis=-1).astype(jnp.int32))
        return (carry, word, ended | (word == end)), word

    start = (carry, jnp.full(rows, end, jnp.int32), jnp.zeros(rows, bool))
    _, words = jax.lax.scan(step, start, length=steps)
    return words.T


def beam_search(
    follow: Follow,
    carry: Any,
    *,
    rows: int,
    width: int,
    steps: int,
    end: int,
    length_power: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """The best of the sentences that a beam meets.

    A sentence of n words, its end included, scores its log-probability over n ** length_power. One
    that has no end after T words is cut there, and is a sentence too. Beside the best K
    beginnings, the best sentence that has ended so far is kept, so with a beam as wide as there
    are beginnings the result is the best sentence of all.

    Args:
      follow: the model; its rows are K for each row, neighbours.
      carry: before the first step, leaves ``[N * K, ...]``, equal for the K of a row.
      rows: N.
      width: K.
      steps: T.
      end: the word that ends a sentence, and is read before its first.
      length_power: 0: no normalisation.

    Returns:
      int32 ``[N, T]``, ``end`` from the end of each sentence on; scores ``[N]``.
    """
    minus_infinity = jnp.float32(-jnp.inf)

    def step(state: Any, t: jax.Array) -> tuple[Any, None]:
        carry, last_words, totals, beginnings, best_sentences, best_scores = state
        carry, log_p = follow(carry, last_words.reshape(-1))
        words = log_p.shape[-1]
        totals = totals[..., None] + log_p.reshape(rows, width, words)  # [N, K, V]
        scale = (t + 1).astype(jnp.float32) ** jnp.float32(length_power)

        # Sentences that end here, and in the last step all others.
        is_end = (jnp.arange(words) == end)[None, None]
        end_scores = (
            jnp.where(is_end | (t == steps - 1), totals, minus_infinity).reshape(rows, -1) / scale
        )
        places = jnp.argmax(end_scores, axis=-1)
        scores = jnp.take_along_axis(end_scores, places[:, None], axis=-1)[:, 0]
        sentences = jnp.take_along_axis(beginnings, (places // words)[:, None, None], axis=1)[:, 0]
        sentences = sentences.at[:, t].set((places % words).astype(jnp.int32))
        better = scores > best_scores
        best_sentences = jnp.where(better[:, None], sentences, best_sentences)
        best_scores = jnp.where(better, scores, best_scores)

        # The beginnings that go on.
        open_totals = jnp.where(is_end, minus_infinity, totals).reshape(rows, -1)
        totals, places = jax.lax.top_k(open_totals, width)  # [N, K]
        parents, last_words = places // words, (places % words).astype(jnp.int32)
        beginnings = (
            jnp.take_along_axis(beginnings, parents[..., None], axis=1).at[:, :, t].set(last_words)
        )
        parent_rows = (jnp.arange(rows, dtype=parents.dtype)[:, None] * width + parents).reshape(-1)
        carry = jax.tree.map(lambda leaf: leaf[parent_rows], carry)
        return (carry, last_words, totals, beginnings, best_sentences, best_scores), None

    # All K beginnings of a row are one and the same: only the first counts.
    totals = jnp.full((rows, width), minus_infinity).at[:, 0].set(0)
    first_words = jnp.full((rows, width), end, jnp.int32)
    beginnings = jnp.full((rows, width, steps), end, jnp.int32)
    start = (
        carry,
        first_words,
        totals,
        beginnings,
        beginnings[:, 0],
        jnp.full(rows, minus_infinity),
    )
    state, _ = jax.lax.scan(step, start, jnp.arange(steps, dtype=jnp.int32))
    return state[4], state[5]
