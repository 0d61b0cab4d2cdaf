"""Cross-entropy over large vocabularies, without all logits at once.

Letters: N rows (a hidden state each), F features, V words, R rows of a chunk.

With z = h W^T + b, p = softmax(z) and weights w, the sum of w (logsumexp(z) - z_target) has

    d z = w (p - onehot(target)),   d h = d z W,   d W = d z^T h,   d b = sum of d z.

All of that is known as soon as a chunk's logits are. So the forward pass forms the gradients,
too, chunk by chunk, and the backward pass only multiplies them by the cotangent of the sum: no
more than R x V logits exist at any time, and none is formed twice.

With e = exp(z - max z) and the share w / sum of e, w p is share times e: a factor of the row, which
scales the F columns of h and of e W and not the V of e; what the target takes away is a row of h
or of W. So e is written once, and only the two products read it.

Where devices share the words, each forms the logits of its own and keeps d W and d b of them; the
maximum, the sum of e, the target's logit and d h are brought together.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from experiments.machine.words import Words
from experiments.training.models import wide
from recurrent_gates.initializers import torch_linear_bias, torch_linear_kernel

_LOGITS = 2**24  # in a chunk, about
_LEAST_ROWS = 64  # of a chunk: each adds to the whole gradient of W


def chunk_rows(words: int) -> int:
    """R for so many words."""
    return max(_LEAST_ROWS, _LOGITS // words)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def cross_entropy(
    h: jax.Array,
    table: jax.Array,
    bias: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    rows: int,
    words: Words | None = None,
) -> jax.Array:
    """The sum over rows of weight times -log p(target).

    Args:
      h: ``[N, F]``, floating point.
      table: W, ``[V, F]``.
      bias: b, ``[V]``.
      targets: integers ``[N]``.
      weights: ``[N]``, constants; rows of weight 0 cost nothing where a whole chunk has it.
      rows: R.
      words: which of them table and bias hold, where devices share them; None: all.

    Returns:
      A scalar in h's dtype.
    """
    words = words or Words(len(table))
    loss, _ = _over_chunks(h, (table, bias), targets, weights, rows, words, gradients=False)
    return loss


def _forward(
    h: jax.Array,
    table: jax.Array,
    bias: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    rows: int,
    words: Words | None,
) -> tuple[jax.Array, Any]:
    words = words or Words(len(table))
    return _over_chunks(h, (table, bias), targets, weights, rows, words, gradients=True)


def _backward(rows: int, words: Words | None, gradients: Any, d_loss: jax.Array) -> tuple[Any, ...]:
    del rows, words
    d_h, d_table, d_bias = jax.tree.map(lambda d: d_loss * d, gradients)
    return d_h, d_table, d_bias, None, None


cross_entropy.defvjp(_forward, _backward)


def _over_chunks(
    h: jax.Array,
    parameters: tuple[jax.Array, jax.Array],
    targets: jax.Array,
    weights: jax.Array,
    rows: int,
    words: Words,
    *,
    gradients: bool,
) -> tuple[jax.Array, Any]:
    """The loss, and if asked for (d h, d W, d b) of it, from W and b."""
    table, bias = parameters
    count = len(h)
    rows = min(rows, max(1, count))
    padding = -count % rows
    chunks = jax.tree.map(
        lambda leaf: jnp.pad(leaf, [(0, padding)] + [(0, 0)] * (leaf.ndim - 1)).reshape(
            -1, rows, *leaf.shape[1:]
        ),
        (h, targets, weights.astype(h.dtype)),
    )

    def work(sums: Any, h: jax.Array, targets: jax.Array, weights: jax.Array) -> Any:
        loss, d_weights = sums
        product, shift = h @ table.T, words.without_filling(bias[None])
        targets, ownership = words.place(targets)
        target_logits = (
            jnp.take_along_axis(product, targets[:, None], axis=-1)[:, 0] + bias[targets]
        )
        top = words.max((product + shift).max(axis=-1))
        e = jnp.exp(product + (shift - top[:, None]))  # two sums: XLA would write the logits down
        total, target_logits = words.sum((e.sum(axis=-1), words.owned(target_logits, ownership)))
        loss = loss + (weights * (jnp.log(total) + top - target_logits)).sum()
        if not gradients:
            return (loss, d_weights), None
        d_table, d_bias = d_weights
        share, deduction = weights / total, words.owned(weights, ownership)
        d_table = (d_table + e.T @ (share[:, None] * h)).at[targets].add(-deduction[:, None] * h)
        d_bias = (d_bias + share @ e).at[targets].add(-deduction)
        d_h = words.sum(share[:, None] * (e @ table) - deduction[:, None] * table[targets])
        return (loss, (d_table, d_bias)), d_h

    def skip(sums: Any, h: jax.Array, targets: jax.Array, weights: jax.Array) -> Any:
        del targets, weights
        return sums, jnp.zeros_like(h) if gradients else None

    def body(sums: Any, chunk: Any) -> Any:
        return jax.lax.cond(jnp.any(chunk[2] != 0), work, skip, sums, *chunk)

    zeros = (jnp.zeros_like(table), jnp.zeros_like(bias)) if gradients else None
    start = (jnp.zeros((), h.dtype), zeros)
    if count == rows:  # no sums that a loop would have to keep
        (loss, sums), d_h = work(start, *jax.tree.map(lambda leaf: leaf[0], chunks))
    else:
        (loss, sums), d_h = jax.lax.scan(body, start, chunks)
    if sums is None:
        return loss, None
    return loss, (d_h.reshape(-1, h.shape[1])[:count], *sums)


class FullSoftmax(nn.Module):
    """p(word) = softmax(W h + b), with W of its own or that of the embedding.

    Attributes:
      words: V.
      features: F.
      tied: W is the embedding's table; where an entry of it is not F wide, h is first taken
        there by a linear map.
      width: of an entry of the embedding.
      parts: how many devices share the words; each has equally many rows of W and b.
    """

    words: int
    features: int
    tied: bool = False
    width: int = 0
    parts: int = 1

    def setup(self) -> None:
        rows = Words(self.words, self.parts).count
        if not self.tied:
            self.table = self.param(
                "table", _transposed(torch_linear_kernel), (rows, self.features)
            )
        elif self.width != self.features:
            self.projection = self.param(
                "projection", torch_linear_kernel, (self.features, self.width)
            )
        fan_in = self.width if self.tied else self.features
        self.bias = self.param("bias", torch_linear_bias(fan_in), (rows,))

    def losses(
        self, h: jax.Array, targets: jax.Array, weights: jax.Array, embedding: jax.Array | None
    ) -> jax.Array:
        """The sum of weighted losses of h ``[..., F]``, targets and weights ``[...]``."""
        h, table = self._weights(h, embedding)
        flat = h.reshape(-1, h.shape[-1])
        words = Words(self.words, self.parts)
        rows = chunk_rows(words.count)
        return cross_entropy(flat, table, self.bias, targets.ravel(), weights.ravel(), rows, words)

    def __call__(self, h: jax.Array, embedding: jax.Array | None) -> jax.Array:
        """log p ``[..., V]`` of h ``[..., F]``, where one device has all words."""
        h, table = self._weights(h, embedding)
        bias = jnp.expand_dims(self.bias, range(h.ndim - 1))
        return jax.nn.log_softmax(h @ table.T + bias)

    def _weights(self, h: jax.Array, embedding: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        h = wide(h)
        if not self.tied:
            return h, self.table
        assert embedding is not None
        return (h @ self.projection if self.width != self.features else h), embedding


class AdaptiveSoftmax(nn.Module):
    """Frequent words at once, rare ones by cluster (Grave et al., 2017).

    log p(word) is that of the head for the first words; for one of cluster k it is that of the
    cluster in the head plus that of the word in the cluster, whose features are a linear map of h
    to F / 4^k, k from 1, without a bias (as the paper's code and torch's have it).

    Words are numbered by frequency. Rows of a cluster are brought together, so that the chunks
    of other rows cost nothing.

    Attributes:
      words: V.
      features: F.
      cutoffs: where each cluster begins, rising, each below V.
      parts: how many devices share the words; each has equally many rows of each table.
    """

    words: int
    features: int
    cutoffs: Sequence[int]
    parts: int = 1

    def setup(self) -> None:
        ends = [*self.cutoffs, self.words]
        head = Words(ends[0] + len(self.cutoffs), self.parts)
        self.head = self.param(
            "head", _transposed(torch_linear_kernel), (head.count, self.features)
        )
        tails = []
        for k, (low, high) in enumerate(itertools.pairwise(ends), 1):
            width = max(1, self.features // 4**k)
            rows = Words(high - low, self.parts).count
            tails.append(
                (
                    self.param(f"projection_{k}", torch_linear_kernel, (self.features, width)),
                    self.param(f"tail_{k}", _transposed(torch_linear_kernel), (rows, width)),
                )
            )
        self.tails = tails

    def losses(
        self, h: jax.Array, targets: jax.Array, weights: jax.Array, embedding: jax.Array | None
    ) -> jax.Array:
        """The sum of weighted losses of h ``[..., F]``, targets and weights ``[...]``."""
        del embedding
        h, targets, weights = wide(h).reshape(-1, self.features), targets.ravel(), weights.ravel()
        first = self.cutoffs[0]
        head_targets = targets
        for k, low in enumerate(self.cutoffs):
            head_targets = jnp.where(targets >= low, first + k, head_targets)
        words = Words(first + len(self.cutoffs), self.parts)
        loss = _unbiased(h, self.head, head_targets, weights, words)
        for (low, high), (projection, tail) in zip(self._ranges(), self.tails, strict=True):
            members = (targets >= low) & (targets < high)
            order = jnp.argsort(~members)  # its rows first
            places = jnp.where(members, targets - low, 0)[order]
            words = Words(high - low, self.parts)
            loss += _unbiased(
                h[order] @ projection, tail, places, (weights * members)[order], words
            )
        return loss

    def __call__(self, h: jax.Array, embedding: jax.Array | None) -> jax.Array:
        """log p ``[..., V]`` of h ``[..., F]``, where one device has all words."""
        del embedding
        h = wide(h)
        head = jax.nn.log_softmax(h @ self.head.T)
        first = self.cutoffs[0]
        log_p = [head[..., :first]]
        for k, (projection, tail) in enumerate(self.tails):
            cluster_log_p = jax.nn.log_softmax(h @ projection @ tail.T)
            log_p.append(head[..., first + k, None] + cluster_log_p)
        return jnp.concatenate(log_p, axis=-1)

    def _ranges(self) -> list[tuple[int, int]]:
        return list(zip(self.cutoffs, [*self.cutoffs[1:], self.words], strict=True))


def _unbiased(
    h: jax.Array, table: jax.Array, targets: jax.Array, weights: jax.Array, words: Words
) -> jax.Array:
    zero_bias = jnp.zeros(len(table), h.dtype)
    return cross_entropy(h, table, zero_bias, targets, weights, chunk_rows(len(table)), words)


@functools.cache
def _transposed(kernel_init: Any) -> Any:
    """An initializer for ``[out, in]`` from one for ``[in, out]``."""

    def init(key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
        return kernel_init(key, shape[::-1], dtype).T

    return init
