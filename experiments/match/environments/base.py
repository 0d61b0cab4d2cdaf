"""What an environment offers: pure functions of one copy, which ``jax.vmap`` makes a batch."""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_COLOURS = np.array(
    [[30, 30, 30], [230, 60, 50], [60, 120, 230], [240, 190, 40], [70, 170, 90], [160, 90, 190]],
    np.uint8,
)


class Turn(NamedTuple):
    """What follows an action.

    Attributes:
      observation: the next one; after the last step of an episode that of its end.
      state: the environment's.
      reward: float32 scalar.
      done: bool scalar: the episode is over, and the next step must be a ``reset``.
      info: ``"last_phase"``, a bool scalar: whether the reward is one of the last phase.
    """

    observation: jax.Array
    state: Any
    reward: jax.Array
    done: jax.Array
    info: dict[str, jax.Array]


class Environment(abc.ABC):
    """An environment without a state of its own; subclasses are frozen dataclasses.

    An observation is an image, uint8 ``[rows, columns, 3]``, or symbols, int32 ``[n]``.
    """

    @property
    @abc.abstractmethod
    def actions(self) -> int:
        """How many actions there are."""

    @property
    @abc.abstractmethod
    def steps(self) -> int:
        """The steps of the longest episode."""

    @property
    @abc.abstractmethod
    def best(self) -> float:
        """The largest mean reward of the last phase that a player can have."""

    @property
    @abc.abstractmethod
    def chance(self) -> float:
        """That of a player who knows the rules and answers at random."""

    @property
    def symbols(self) -> tuple[int, ...]:
        """How many values each symbol of an observation has; none: it is an image."""
        return ()

    @abc.abstractmethod
    def reset(self, key: jax.Array) -> tuple[jax.Array, Any]:
        """The first observation of an episode and the state."""

    @abc.abstractmethod
    def step(self, key: jax.Array, state: Any, action: jax.Array) -> Turn:
        """What follows an action, int32 scalar."""

    def encode(self, observations: jax.Array) -> jax.Array:
        """Observations ``[..., *shape]`` as numbers in [0, 1], float32 ``[..., P]``: the pixels of
        an image, or each symbol one-hot."""
        if not self.symbols:
            return observations.reshape(*observations.shape[:-3], -1).astype(jnp.float32) / 255
        parts = [
            jax.nn.one_hot(observations[..., index], count, dtype=jnp.float32)
            for index, count in enumerate(self.symbols)
        ]
        return jnp.concatenate(parts, axis=-1)

    def picture(self, state: Any, observation: np.ndarray) -> np.ndarray:
        """What a spectator sees, uint8 ``[rows, columns, 3]``; here a cell for each symbol."""
        del state
        return _COLOURS[np.asarray(observation) % len(_COLOURS)][None]


def restarted(
    environment: Environment, keys: jax.Array, done: jax.Array, observations: Any, states: Any
) -> tuple[Any, Any]:
    """Observations and states of a batch, those that are done at the start of a new episode.

    Episodes of equal length end together, so that few steps draw new ones.

    Args:
      environment: of all copies.
      keys: one for each.
      done: bool ``[B]``.
      observations, states: leaves ``[B, ...]``.
    """

    def restart(observations: Any, states: Any) -> tuple[Any, Any]:
        starts = jax.vmap(environment.reset)(keys)

        def choose(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(done.reshape(-1, *(1,) * (old.ndim - 1)), new, old)

        return jax.tree.map(choose, starts, (observations, states))

    return jax.lax.cond(done.any(), restart, lambda *operands: operands, observations, states)
