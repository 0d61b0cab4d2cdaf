"""Count the cards of a kind, as POPGym (Morad et al., 2023) defines it.

One action is ours: POPGym has as many actions as a kind has cards, from 0 on, so that the full
count cannot be said. Here it can.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from experiments.match.environments.base import Environment, Turn
from experiments.match.environments.repeat_previous import DECK, shuffled

KINDS = {"colors": 2, "suits": 4, "ranks": 13}


class Questions(NamedTuple):
    """Shuffled cards and questions, int32 ``[cards]``, and how many of each have been dealt."""

    cards: jax.Array
    asked: jax.Array
    dealt: jax.Array


@dataclasses.dataclass(frozen=True)
class CountRecall(Environment):
    """Say how many cards of the kind that is asked for have been dealt, that of now included.

    A right answer gives 1 / (n - 1), a wrong one costs as much, n cards being in the decks.

    Attributes:
      decks: of 52 cards, and as many of questions.
      kind: what is counted: ``"colors"``, ``"suits"`` or ``"ranks"``.
    """

    decks: int = 1
    kind: str = "colors"

    @property
    def actions(self) -> int:
        return DECK * self.decks // KINDS[self.kind] + 1

    @property
    def steps(self) -> int:
        return DECK * self.decks - 1

    @property
    def best(self) -> float:
        return 1.0

    @property
    def chance(self) -> float:
        return 2 / self.actions - 1

    @property
    def symbols(self) -> tuple[int, ...]:
        return (KINDS[self.kind],) * 2

    def reset(self, key: jax.Array) -> tuple[jax.Array, Questions]:
        keys = jax.random.split(key)
        cards, questions = (shuffled(deck_key, self.decks, KINDS[self.kind]) for deck_key in keys)
        state = Questions(cards, questions, jnp.int32(1))
        return self._observation(state), state

    def step(self, key: jax.Array, state: Questions, action: jax.Array) -> Turn:
        del key
        dealt_mask = jnp.arange(len(state.cards), dtype=jnp.int32) < state.dealt
        kind = state.asked[state.dealt - 1]
        count = (dealt_mask & (state.cards == kind)).sum(dtype=jnp.int32)
        worth = jnp.float32(1 / self.steps)
        reward = jnp.where(action == count, worth, -worth)
        state = state._replace(dealt=state.dealt + 1)
        done = state.dealt >= DECK * self.decks
        return Turn(self._observation(state), state, reward, done, {"last_phase": jnp.bool_(True)})

    def _observation(self, state: Questions) -> jax.Array:
        return jnp.stack([state.cards[state.dealt - 1], state.asked[state.dealt - 1]])
