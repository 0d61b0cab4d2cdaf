"""Name the suit of a card some steps before, as POPGym (Morad et al., 2023) defines it."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from experiments.match.environments.base import Environment, Turn

DECK = 52
_SUITS = 4


def shuffled(key: jax.Array, decks: int, kinds: int) -> jax.Array:
    """The kind of each card of shuffled decks, int32 ``[52 decks]``."""
    return jax.random.permutation(key, jnp.arange(DECK * decks, dtype=jnp.int32) % kinds)


class Hand(NamedTuple):
    """Shuffled cards, int32 ``[cards]``, and how many have been dealt, int32 ``[]``."""

    cards: jax.Array
    dealt: jax.Array


@dataclasses.dataclass(frozen=True)
class RepeatPrevious(Environment):
    """Name the suit of the k-th last card, that of now being the first, as in POPGym's code.

    Once k cards have been dealt, each answer gives 1 / (n - k) if it is right, and costs as much if
    not, n cards being in the decks.

    Attributes:
      decks: of 52 cards.
      lag: k.
    """

    decks: int = 1
    lag: int = 4

    @property
    def actions(self) -> int:
        return _SUITS

    @property
    def steps(self) -> int:
        return DECK * self.decks - 1

    @property
    def best(self) -> float:
        return 1.0

    @property
    def chance(self) -> float:
        return 2 / _SUITS - 1

    @property
    def symbols(self) -> tuple[int, ...]:
        return (_SUITS,)

    def reset(self, key: jax.Array) -> tuple[jax.Array, Hand]:
        state = Hand(shuffled(key, self.decks, _SUITS), jnp.int32(1))
        return state.cards[:1], state

    def step(self, key: jax.Array, state: Hand, action: jax.Array) -> Turn:
        del key
        worth = jnp.float32(1 / (DECK * self.decks - self.lag))
        reward = jnp.where(action == state.cards[state.dealt - self.lag], worth, -worth)
        reward = jnp.where(state.dealt >= self.lag, reward, 0)
        observation = state.cards[state.dealt][None]
        state = state._replace(dealt=state.dealt + 1)
        done = state.dealt >= DECK * self.decks
        return Turn(observation, state, reward, done, {"last_phase": jnp.bool_(True)})
