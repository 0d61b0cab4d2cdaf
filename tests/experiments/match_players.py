"""Players of Passive and Active Match, and the rules once more in plain NumPy, frame by frame.

A player is ``(memory, observation, state, key, phases) -> (memory, action)`` of one copy. Players
know where they stand; what colour they look for they know from what they have seen.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

NORTH, SOUTH, WEST, EAST = range(4)
MOVES = np.array([(-1, 0), (1, 0), (0, -1), (0, 1)])
BACKGROUND, WALL, APPLE, PLAYER = (
    np.array(colour) * 255 // 1000
    for colour in ((800,) * 3, (100,) * 3, (550, 700, 0), (898, 584, 430))
)
DOORS = {"pycolab": (2, 5, 8), "dmlab": (2, 4, 6, 8)}  # columns of row 1
ROUTE = np.array([(4, 4), (4, 6), (2, 6), (2, 4)])  # from there all walls have been in sight


class Memory(NamedTuple):
    """The colour looked for, the next place of the route, the column to go to."""

    colour: jax.Array
    place: jax.Array
    column: jax.Array


def blank(column=-1):
    """Before the first step; ``column`` is that of the door to go to, if it is settled."""
    return Memory(jnp.full(3, -1), jnp.int32(0), jnp.int32(column))


def _strange(observation):
    """Cells of another colour than those that are always there, bool ``[5, 5]``."""
    known = jnp.asarray(np.stack([BACKGROUND, WALL, APPLE, PLAYER]))
    same = (observation[:, :, None] == known[None, None]).all(axis=-1).any(axis=-1)
    return ~same


def _towards(here, there):
    """The first move of a way: rows first."""
    vertical = jnp.where(there[0] < here[0], NORTH, SOUTH)
    horizontal = jnp.where(there[1] < here[1], WEST, EAST)
    return jnp.where(there[0] != here[0], vertical, horizontal)


def walk(memory, observation, state, key, phases):
    """A random walk."""
    del observation, state, phases
    return memory, jax.random.randint(key, (), 0, 4, jnp.int32)


def best(memory, observation, state, key, phases):
    """Looks for the colour, then for its door."""
    del key
    exploring = state.clock < phases[0]
    here, strange = state.place, _strange(observation)
    cell = jnp.argmax(strange)
    colour = observation[cell // 5, cell % 5].astype(memory.colour.dtype)
    sees = exploring & strange.any()
    colour = jnp.where(sees, colour, memory.colour)
    route = jnp.asarray(ROUTE)
    place = jnp.where((here == route[memory.place % 4]).all(), memory.place + 1, memory.place)
    looked_for = (observation.astype(colour.dtype) == colour[None, None]).all(axis=-1)
    opening = state.clock >= phases[0] + phases[1]
    column = here[1] + jnp.argmax(looked_for.any(axis=0)) - 2
    column = jnp.where(opening & looked_for.any(), column, memory.column)
    memory = Memory(colour, place, column.astype(jnp.int32))
    looking = jnp.where(place % 2 == 0, WEST, EAST)  # wherever: the room is small
    at_door = _to_column(here, column)
    # In the third row all doors come into sight between its columns 4 and 6.
    unseen = jnp.where(state.clock - phases[0] - phases[1] < 4, WEST, EAST)
    in_room = jnp.where(here[0] > 3, NORTH, jnp.where(column < 0, unseen, at_door))
    exploring_move = jnp.where(place < 4, _towards(here, route[place % 4]), looking)
    return memory, jnp.where(opening, in_room, exploring_move).astype(jnp.int32)


def _to_column(here, column):
    sideways = jnp.where(column < here[1], WEST, EAST)
    return jnp.where(here[1] == column, NORTH, sideways)


def straight(memory, observation, state, key, phases):
    """Goes to a settled door, whatever it sees."""
    del observation, key, phases
    return memory, jnp.where(
        state.place[0] > 3, NORTH, _to_column(state.place, memory.column)
    ).astype(jnp.int32)


class Simulation:
    """One episode in NumPy from how it was laid out, frame by frame as the public code has it."""

    def __init__(self, match, state):
        grids = match._grids
        self.match, self.phase, self.frame, self.clock = match, 0, 0, 0
        self.state = jax.tree.map(np.asarray, state)
        self.grids = [np.array([list(line) for line in grid]) for grid in grids]
        self.place = tuple(self.state.place)
        self.cue = tuple(np.argwhere(self.grids[0] == "p")[self.state.cue])
        self.curtain = np.zeros((7, 11), bool)
        for cell in np.argwhere(self.grids[1] == "a")[self.state.apples]:
            self.curtain[tuple(cell)] = True
        self.last_pickup = np.where(self.curtain, np.inf, -1.0)
        self.doors = {(1, column): i for i, column in enumerate(DOORS[match.rules])}
        self.ends_at = sum(match.phases)

    def observation(self):
        canvas = np.empty((11, 15, 3), int)
        canvas[:] = BACKGROUND
        inside = canvas[2:-2, 2:-2]
        inside[np.isin(self.grids[self.phase], ["#", "p"])] = WALL
        if self.phase == 0:
            inside[self.cue] = self.state.colours[self.state.target]
        elif self.phase == 1:
            inside[self.curtain] = APPLE
        else:
            for cell, door in self.doors.items():
                inside[cell] = self.state.colours[door]
        inside[self.place] = PLAYER
        row, column = self.place
        return canvas[row : row + 5, column : column + 5]

    def step(self, action):
        """Reward and whether the episode is over."""
        there = tuple(np.array(self.place) + MOVES[action])
        if self.grids[self.phase][there] not in "#p":
            self.place = there
        self.frame, self.clock, reward = self.frame + 1, self.clock + 1, 0.0
        if self.phase == 1:
            if self.curtain[self.place]:
                self.last_pickup[self.place], self.curtain[self.place] = self.frame, False
                reward = float(self.state.apple_reward)
            again = (self.frame > self.last_pickup + 20) & (self.last_pickup >= 0)
            self.curtain[again] = True
        if self.phase == 2 and self.place in self.doors:
            right = self.doors[self.place] == self.state.target
            reward = 10.0 if right else {"pycolab": 0.0, "dmlab": 1.0}[self.match.rules]
            self.doors = {}
            if self.match.rules == "dmlab":
                self.ends_at = min(self.ends_at, self.clock + 3)
        while self.phase < 2 and self.frame >= self.match.phases[self.phase]:
            self.phase, self.frame = self.phase + 1, 0
            self.place = tuple(np.argwhere(self.grids[self.phase] == "+")[0])
        return reward, self.clock >= self.ends_at
