"""A corridor of length L that forks at its end (Bakker, 2002)."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.match.environments.base import Environment, Turn

_MOVES = np.array([(1, 0), (0, 1), (-1, 0), (0, -1)], np.int32)  # east, north, west, south
_CORRIDOR, _GOAL_SOUTH, _GOAL_NORTH, _FORK, _NORTH, _SOUTH = range(6)
_SHADES = np.array([(40, 40, 40), (230, 230, 230), (229, 149, 110), (70, 170, 90)], np.uint8)


class Corridor(NamedTuple):
    """Actions taken, how far east, how far north, and where the goal is: -1 or 1 north."""

    clock: jax.Array
    x: jax.Array
    y: jax.Array
    goal: jax.Array


@dataclasses.dataclass(frozen=True)
class TMaze(Environment):
    """A T-maze that asks for memory: there are L + 1 steps, as many as the way has.

    Where the goal is, north or south of the fork, is seen in the first observation alone. The last
    step gives 1 at the goal. The corridor is walked whatever one does, so that nothing but memory
    counts, as in bsuite's memory_len (Osband et al., 2020); or one walks it oneself, and a step
    that ends west of where the shortest way would be costs 1 / L, as in the passive T-maze of Ni
    et al. (2023, "When do transformers shine in RL?", 4.1).

    Attributes:
      length: L, the steps to the fork.
      walking: the corridor is walked by the player.
    """

    length: int = 10
    walking: bool = False

    @property
    def actions(self) -> int:
        return len(_MOVES)

    @property
    def steps(self) -> int:
        return self.length + 1

    @property
    def best(self) -> float:
        return 1.0

    @property
    def chance(self) -> float:
        return 0.5

    @property
    def symbols(self) -> tuple[int, ...]:
        return (6,)

    def reset(self, key: jax.Array) -> tuple[jax.Array, Corridor]:
        goal = 2 * jax.random.bernoulli(key).astype(jnp.int32) - 1
        state = Corridor(jnp.int32(0), jnp.int32(0), jnp.int32(0), goal)
        return self._observation(state), state

    def step(self, key: jax.Array, state: Corridor, action: jax.Array) -> Turn:
        del key
        if not self.walking:
            action = jnp.where(state.x < self.length, 0, action)
        move = jnp.asarray(_MOVES)[action]
        x, y = state.x + move[0], state.y + move[1]
        inside = (x >= 0) & (x <= self.length) & (jnp.abs(y) <= 1) & ((y == 0) | (x == self.length))
        x, y = jnp.where(inside, x, state.x), jnp.where(inside, y, state.y)
        state = state._replace(clock=state.clock + 1, x=x, y=y)
        done = state.clock >= self.steps
        delay_cost = jnp.where(x < state.clock, jnp.float32(-1 / self.length), 0)
        reward = jnp.where(done, (y == state.goal).astype(jnp.float32), delay_cost)
        return Turn(self._observation(state), state, reward, done, {"last_phase": done})

    def _observation(self, state: Corridor) -> jax.Array:
        goal = jnp.where(state.goal > 0, _GOAL_NORTH, _GOAL_SOUTH)
        arms = jnp.where(state.y > 0, _NORTH, jnp.where(state.y < 0, _SOUTH, _FORK))
        place = jnp.where(state.x == self.length, arms, _CORRIDOR)
        return jnp.where(state.clock == 0, goal, place).astype(jnp.int32)[None]

    def picture(self, state: Corridor, observation: np.ndarray) -> np.ndarray:
        """The maze from above, with the player, and the goal while it is seen."""
        del observation
        cells = np.zeros((3, self.length + 1), int)
        cells[1], cells[:, -1] = 1, 1
        if state.clock == 0:
            cells[1 - int(state.goal), -1] = 3
        cells[1 - int(state.y), int(state.x)] = 2
        return _SHADES[cells]
