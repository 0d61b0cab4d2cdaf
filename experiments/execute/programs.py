"""Programs by number, in three parts that share none, and windows of them.

Letters: T steps, S characters of the longest answer, B rows, K levels of a curriculum.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

import numpy as np

from experiments.execute.grammars import Grammar, Program

BLANK = 0
"""Stands for no character; a character's number is its place among the grammar's, plus 1."""
_BLANK = "\0"
PARTS = ("train", "validation", "test")
CLIMBING = ("combine", "naive")
"""The curricula that have levels."""

_TENTHS = 10  # of all programs are for validation, for the test, and the others to train on
_ROWS = 2**32  # that a step may have: each has a number of its own
_EVALUATION_ROWS = 256  # most programs of a held-out window: bounds the memory


class Window(NamedTuple):
    """Programs with their answers; as read from the host all but ``size`` end with an axis K.

    Attributes:
      tokens: what the model reads: a program and, right behind it, what the grammar lets it read
        while it answers, uint8 ``[T, B]``.
      answers: uint8 ``[S, B]``.
      first: the step whose output tells the answer's first character, int32 ``[B]``.
      size: how many characters the answer has, int32 ``[B]``; 0: there is no program.
    """

    tokens: Any
    answers: Any
    first: Any
    size: Any


AXES = Window(1, 1, 0, 0)
"""The axis of the batch."""


def part_of(text: str) -> str:
    """The part that a program belongs to, by its hash."""
    place = zlib.crc32(text.encode()) % _TENTHS
    return ("validation", "test")[place] if place < 2 else "train"


def share(count: int) -> int:
    """About so many of ``count`` programs are in the validation part, and in the test part."""
    return count // _TENTHS


@dataclasses.dataclass(frozen=True)
class Source:
    """Programs by number: each is a function of its part, a seed and its number alone.

    Attributes:
      grammar: of the programs.
      curriculum: of those to train on, ``"mix"``, ``"combine"``, ``"naive"`` or ``"baseline"``;
        held-out ones have the full length and nesting.
    """

    grammar: Grammar
    curriculum: str

    def levels(self, part: str) -> Sequence[tuple[int, int]]:
        """The lengths and nestings that the programs of a number are made for, one program for
        each: the device takes that of its level."""
        levels = self.grammar.levels()
        return levels if part == "train" and self.curriculum in CLIMBING else levels[-1:]

    def program(self, part: str, seed: int, number: int, level: tuple[int, int]) -> Program:
        """The program of a number: the first one drawn that belongs to the part.

        Args:
          part: in ``PARTS``.
          seed: from 0.
          number: from 0.
          level: a length and a nesting.
        """
        draw = Random((PARTS.index(part) << 128) + (seed << 96) + number)
        curriculum = self.curriculum if part == "train" else "baseline"

        def hardness() -> tuple[int, int]:
            if curriculum == "mix":
                return self.grammar.mixed(draw)
            if curriculum == "combine":
                return self.grammar.combined(draw, level)
            return level

        while True:
            program = self.grammar.compose(draw, hardness)
            if part_of(program.text) == part:
                return program


class Programs:
    """Windows of programs, made on the host when they are read.

    Args:
      source: of the programs.
      program_steps: characters of a program that there is room for.
      held_out: how many programs a held-out set has.
    """

    def __init__(self, source: Source, program_steps: int, held_out: int) -> None:
        self._source, self._program_steps, self._held_out = source, program_steps, held_out
        characters = source.grammar.characters.encode()
        numbers = bytes(range(BLANK + 1, BLANK + 1 + len(characters)))
        self._numbers = bytes.maketrans(_BLANK.encode() + characters, bytes([BLANK]) + numbers)
        self._windows: dict[tuple[str, int, bytes], Window] = {}

    def read(self, seed: int, step: int, rows: np.ndarray) -> Window:
        """The programs of a step, with those of every level; see ``Streamed``."""
        numbers = [step * _ROWS + row for row in rows.tolist()]
        return self._window("train", seed, numbers)

    def read_held_out(self, name: str, index: int, rows: np.ndarray) -> Window:
        """The programs of a held-out window; they are made once."""
        key = name, index, rows.tobytes()
        if key not in self._windows:
            first = index * held_out_rows(self._held_out)
            numbers = [first + row for row in rows.tolist()]
            self._windows[key] = self._window(name, 0, numbers)
        return self._windows[key]

    def _window(self, part: str, seed: int, numbers: Sequence[int]) -> Window:
        """The programs of some numbers; those beyond a held-out set leave their rows empty."""
        source, levels = self._source, self._source.levels(part)
        forced = source.grammar.forced
        programs = [
            source.program(part, seed, number, level)
            if part == "train" or number < self._held_out
            else Program("", "")
            for number in numbers
            for level in levels
        ]
        inputs = [text + answer[:-1] if forced else text for text, answer in programs]
        answers = [answer for _, answer in programs]
        shape = len(numbers), len(levels)
        steps, characters = window_steps(source.grammar, self._program_steps)
        first = [max(0, len(text) - 1) if forced else len(text) for text, _ in programs]
        return Window(
            self._numbered(inputs, steps, shape),
            self._numbered(answers, characters, shape),
            np.array(first, np.int32).reshape(shape),
            np.array([len(answer) for answer in answers], np.int32).reshape(shape),
        )

    def _numbered(self, texts: Sequence[str], steps: int, shape: tuple[int, int]) -> np.ndarray:
        """Texts as numbers of characters, with blanks behind them, uint8 ``[steps, *shape]``."""
        joined_text = "".join(text.ljust(steps, _BLANK) for text in texts)
        numbers = np.frombuffer(joined_text.encode().translate(self._numbers), np.uint8)
        return np.moveaxis(numbers.reshape(*shape, steps), -1, 0)


def held_out_rows(count: int) -> int:
    """How many rows the windows of a held-out set have; those beyond ``count`` stay empty."""
    return min(_EVALUATION_ROWS, count)


def window_steps(grammar: Grammar, program_steps: int) -> tuple[int, int]:
    """T and S of windows with room for programs of so many characters."""
    answer = grammar.answer_characters
    return program_steps + answer - (1 if grammar.forced else 0), answer


def at_level(window: Window, level: Any) -> Window:
    """The window of a level, of one that the host has read."""
    tokens, answers, first, size = window
    return Window(tokens[..., level], answers[..., level], first[..., level], size[..., level])
