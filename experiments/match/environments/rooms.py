"""Passive and Active Match in rooms of cells (Hung et al., 2018), on the grid of the public code.

Three phases: a colour is seen, or must be found; apples may be collected; doors of several colours
stand open, and the one of the colour seen is the right one. The player sees the 5 x 5 cells around
it. Two sets of rules:

- ``pycolab``, the public two-dimensional version: three doors, of which the right one gives 10 and
  the others nothing; an episode goes on to its last step.
- ``dmlab``, the three-dimensional original: four doors of four out of sixteen colours, the right
  one gives 10 and the others 1; an episode ends 0.2 seconds after a door is touched.

Ours are: the corridor of Passive Match, which the public version lacks, and the place of the fourth
door. The public version shuffles the doors' colours once for each of its copies, which keeps them;
here they are shuffled for every episode, as in the original, or the same for all copies.
"""

from __future__ import annotations

import colorsys
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.match.environments.base import Environment, Turn

_PASSIVE = (
    "           ",
    "    #p#    ",
    "    # #    ",
    "    #+#    ",
    "    ###    ",
    "           ",
    "           ",
)
_ACTIVE = (
    "  ppppppp  ",
    "  p     p  ",
    "  p     p  ",
    "  pp   pp  ",
    "  p+++++p  ",
    "  p+++++p  ",
    "  ppppppp  ",
)
_APPLES = (
    "###########",
    "#a a a a a#",
    "# a a a a #",
    "#a a a a a#",
    "# a a a a #",
    "#a a + a a#",
    "###########",
)
_DOORS = {
    "pycolab": (
        "###########",
        "# d  d  d #",
        "#         #",
        "#         #",
        "####   ####",
        "   # + #   ",
        "   #####   ",
    ),
    "dmlab": (
        "###########",
        "# d d d d #",
        "#         #",
        "#         #",
        "####   ####",
        "   # + #   ",
        "   #####   ",
    ),
}
_MOVES = np.array([(-1, 0), (1, 0), (0, -1), (0, 1)], np.int32)  # north, south, west, east
_SIGHT = 2  # cells on each side of the player
_RESPAWN = 20  # frames until an apple is there again
_AFTER_TOUCH = 3  # steps: 0.2 s, at 15 steps a second
_CORRECT, _INCORRECT = 10.0, {"pycolab": 0.0, "dmlab": 1.0}
_HUES = np.array([colorsys.hsv_to_rgb(i / 3, 1, 1) for i in range(3)])
_BITS = np.indices((2, 2, 2, 2)).reshape(4, -1)  # intensity, red, green, blue
_EGA = (170 * _BITS[1:] + 85 * _BITS[0]).T
_EGA[6] = 170, 85, 0  # brown has half its green
_COLOURS = {"pycolab": (_HUES * 255).astype(np.uint8), "dmlab": _EGA.astype(np.uint8)}
# Background, wall, apple, player: the public version's, per mille.
_FIXED = np.array([(800, 800, 800), (100, 100, 100), (550, 700, 0), (898, 584, 430)]) * 255 // 1000
_BACKGROUND, _WALL, _APPLE, _PLAYER, _COLOURED = range(5)
_NEVER = -(2**20)
MOST_APPLES = sum(line.count("a") for line in _APPLES)


class Rooms(NamedTuple):
    """The state of an episode.

    Attributes:
      clock: actions taken so far.
      place: row and column of the player, ``[2]``.
      target: which of the colours is the right one.
      colours: of the doors from left to right, uint8 ``[doors, 3]``.
      cue: which of the walls shows the right colour in the first phase.
      apples: which places have any, bool ``[places]``.
      picked: the frame of the second phase in which each was picked last, ``[places]``.
      apple_reward: of each apple of the episode.
      touched: the clock when a door was touched, or -1.
    """

    clock: jax.Array
    place: jax.Array
    target: jax.Array
    colours: jax.Array
    cue: jax.Array
    apples: jax.Array
    picked: jax.Array
    apple_reward: jax.Array
    touched: jax.Array


def _cells(grid: tuple[str, ...], symbol: str) -> np.ndarray:
    """Rows and columns of a symbol, ``[n, 2]``."""
    return np.argwhere(np.array([list(line) for line in grid]) == symbol).astype(np.int32)


def _numbered(cells: np.ndarray) -> np.ndarray:
    """A map of the number of each cell, and how many there are elsewhere; int32 ``[7, 11]``."""
    numbers = np.full((7, 11), len(cells), np.int32)
    numbers[tuple(cells.T)] = np.arange(len(cells))
    return numbers


@dataclasses.dataclass(frozen=True)
class Match(Environment):
    """Passive or Active Match.

    Actions are north, south, west and east; one into a wall leaves the player where it is.

    Attributes:
      active: the colour must be found.
      rules: ``"pycolab"`` or ``"dmlab"``.
      phases: steps of each of the three.
      apples: how many there are in the second phase.
      apple_rewards: one of them, drawn for each episode, is what its apples give.
      shuffled: the doors' colours are shuffled for every episode; else they never change.
    """

    active: bool = False
    rules: str = "pycolab"
    phases: tuple[int, int, int] = (15, 90, 15)
    apples: int = 10
    apple_rewards: tuple[float, ...] = (1.0, 10.0)
    shuffled: bool = True

    @property
    def actions(self) -> int:
        return len(_MOVES)

    @property
    def steps(self) -> int:
        return sum(self.phases)

    @property
    def best(self) -> float:
        return _CORRECT

    @property
    def chance(self) -> float:
        doors = len(self._doors)
        return (_CORRECT + (doors - 1) * _INCORRECT[self.rules]) / doors

    def reset(self, key: jax.Array) -> tuple[jax.Array, Rooms]:
        keys = jax.random.split(key, 6)
        doors, all_colours = len(self._doors), jnp.asarray(_COLOURS[self.rules])
        starts = _cells(self._explore, "+")
        order = jax.random.permutation(keys[0], len(all_colours))
        cue = jax.random.randint(keys[2], (), 0, len(_cells(self._explore, "p")), jnp.int32)
        apples = jax.random.permutation(keys[4], MOST_APPLES) < self.apples
        rewards = jnp.asarray(self.apple_rewards or (0.0,), jnp.float32)
        state = Rooms(
            clock=jnp.int32(0),
            place=jnp.asarray(starts)[jax.random.randint(keys[3], (), 0, len(starts))],
            target=jax.random.randint(keys[1], (), 0, doors, jnp.int32),
            colours=all_colours[order[:doors]] if self.shuffled else all_colours[-doors:],
            cue=cue,
            apples=apples,
            picked=jnp.full(MOST_APPLES, _NEVER, jnp.int32),
            apple_reward=jax.random.choice(keys[5], rewards),
            touched=jnp.int32(-1),
        )
        return self._observation(state), state

    def step(self, key: jax.Array, state: Rooms, action: jax.Array) -> Turn:
        del key
        phase, frame = self._phase(state.clock)
        walls = jnp.asarray(self._walls)[phase]
        symbols = self._symbols(state, phase, frame)
        place = state.place + jnp.asarray(_MOVES)[action]
        place = jnp.where(walls[place[0], place[1]], state.place, place)
        symbol = symbols[place[0], place[1]]

        on_apple = symbol == _APPLE
        number = jnp.asarray(_numbered(_cells(_APPLES, "a")))[place[0], place[1]]
        place_mask = jnp.arange(MOST_APPLES, dtype=jnp.int32) == number
        touch = (phase == 2) & (symbol >= _COLOURED)
        correct = symbol - _COLOURED == state.target
        door_reward = jnp.where(correct, _CORRECT, _INCORRECT[self.rules])
        reward = jnp.where(touch, door_reward, jnp.where(on_apple, state.apple_reward, 0))

        clock = state.clock + 1
        touched = jnp.where(touch, clock, state.touched)
        next_phase, _ = self._phase(clock)
        state = state._replace(
            clock=clock,
            place=jnp.where(next_phase > phase, jnp.asarray(self._starts)[next_phase], place),
            picked=jnp.where(on_apple & place_mask, frame + 1, state.picked),
            touched=touched,
        )
        done = clock >= self.steps
        if self.rules == "dmlab":
            done = done | ((touched >= 0) & (clock >= touched + _AFTER_TOUCH))
        info = {"last_phase": phase == 2}
        return Turn(self._observation(state), state, reward.astype(jnp.float32), done, info)

    def picture(self, state: Rooms, observation: np.ndarray) -> np.ndarray:
        """The whole room, what the player does not see darker."""
        del observation
        phase, frame = self._phase(state.clock)
        symbols = np.asarray(self._symbols(state, phase, frame)).copy()
        row, column = np.asarray(state.place)
        symbols[row, column] = _PLAYER
        colours = np.asarray(self._palette(state))[symbols].astype(int)
        rows, columns = np.indices(symbols.shape)
        hidden = (abs(rows - row) > _SIGHT) | (abs(columns - column) > _SIGHT)
        return np.where(hidden[..., None], colours // 2, colours).astype(np.uint8)

    # The maps.

    @property
    def _explore(self) -> tuple[str, ...]:
        return _ACTIVE if self.active else _PASSIVE

    @property
    def _doors(self) -> np.ndarray:
        return _cells(_DOORS[self.rules], "d")

    @property
    def _grids(self) -> tuple[tuple[str, ...], ...]:
        return (self._explore, _APPLES, _DOORS[self.rules])

    @property
    def _walls(self) -> np.ndarray:
        """Bool ``[phases, 7, 11]``."""
        return np.array([[[x in "#p" for x in line] for line in grid] for grid in self._grids])

    @property
    def _starts(self) -> np.ndarray:
        """Where the player is put at the beginning of a phase, ``[phases, 2]``."""
        return np.array([_cells(grid, "+")[0] for grid in self._grids])

    def _phase(self, clock: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The phase of a clock, and its frame in it."""
        ends = jnp.asarray(np.cumsum(self.phases[:2]), jnp.int32)
        phase = (clock >= ends).sum(dtype=jnp.int32)
        starts = jnp.asarray(np.cumsum([0, *self.phases[:2]]), jnp.int32)
        return phase, clock - starts[phase]

    def _symbols(self, state: Rooms, phase: jax.Array, frame: jax.Array) -> jax.Array:
        """What stands in each cell without the player, int32 ``[7, 11]``."""
        walls = jnp.asarray(self._walls)[phase].astype(jnp.int32)  # _WALL or _BACKGROUND
        cue = jnp.asarray(_numbered(_cells(self._explore, "p"))) == state.cue
        explore = jnp.where(cue, _COLOURED + state.target, walls)
        visible = jnp.append(state.apples & (frame > state.picked + _RESPAWN), jnp.bool_(False))
        apple = visible[jnp.asarray(_numbered(_cells(_APPLES, "a")))]
        distractor = jnp.where(apple, _APPLE, walls)
        number = jnp.asarray(_numbered(self._doors))
        door = (number < len(self._doors)) & (state.touched < 0)
        doors = jnp.where(door, _COLOURED + number, walls)
        return jnp.where(phase == 0, explore, jnp.where(phase == 1, distractor, doors))

    def _palette(self, state: Rooms) -> jax.Array:
        return jnp.concatenate([jnp.asarray(_FIXED, jnp.uint8), state.colours])

    def _observation(self, state: Rooms) -> jax.Array:
        """The cells around the player, uint8 ``[5, 5, 3]``."""
        symbols = self._symbols(state, *self._phase(state.clock))
        symbols = jnp.pad(symbols, _SIGHT, constant_values=_BACKGROUND)
        size = 2 * _SIGHT + 1
        view = jax.lax.dynamic_slice(symbols, (state.place[0], state.place[1]), (size, size))
        view = view.at[_SIGHT, _SIGHT].set(_PLAYER)
        return self._palette(state)[view]
