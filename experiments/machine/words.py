"""The rows of a table of words that one device has, and what the devices find together."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from experiments.settings.axes import VOCAB


@dataclasses.dataclass(frozen=True)
class Words:
    """All words, or inside of a function that all devices run, one of several equal parts.

    The last parts are filled up with rows that are no words.

    Attributes:
      total: V, how many words there are.
      parts: how many devices along the axis ``vocab`` have a part each.
    """

    total: int
    parts: int = 1

    @property
    def count(self) -> int:
        """How many rows each part has."""
        return -(-self.total // self.parts)

    def place(self, words: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Which row of this part each word has, and whether it has one; else the row is 0.

        Args:
          words: integers.
        """
        if self.parts == 1:
            return words, jnp.ones(words.shape, bool)
        row = words - self._first(words.dtype)
        own = (row >= 0) & (row < self.count)
        return jnp.where(own, row, jnp.zeros_like(row)), own

    def without_filling(self, logits: jax.Array) -> jax.Array:
        """Logits ``[..., count]`` of this part, minus infinity for the rows that are no words."""
        if self.parts == 1:
            return logits
        numbers = self._first(jnp.int32) + jnp.arange(self.count, dtype=jnp.int32)
        numbers = jnp.expand_dims(numbers, range(logits.ndim - 1))
        return jnp.where(numbers < self.total, logits, -jnp.inf)

    def owned(self, x: jax.Array, own: jax.Array) -> jax.Array:
        """x where a word has a row in this part, else 0."""
        return x if self.parts == 1 else jnp.where(own, x, jnp.zeros_like(x))

    def max(self, x: jax.Array) -> jax.Array:
        """The largest over parts."""
        return x if self.parts == 1 else jax.lax.pmax(x, VOCAB)

    def sum(self, tree: Any) -> Any:
        """The sum over parts; not to be differentiated."""
        return tree if self.parts == 1 else jax.lax.psum(tree, VOCAB)

    def _first(self, dtype: Any) -> jax.Array:
        return jax.lax.axis_index(VOCAB).astype(dtype) * jnp.asarray(self.count, dtype)


@jax.custom_vjp
def total_over_parts(x: jax.Array) -> jax.Array:
    """The sum over parts of what each has, from which all of them go on alike.

    Each part has the whole cotangent already: a sum of cotangents would count it several times.
    """
    return jax.lax.psum(x, VOCAB)


total_over_parts.defvjp(lambda x: (total_over_parts(x), None), lambda _, d_total: (d_total,))
