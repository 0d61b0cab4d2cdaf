"""What a grammar of programs says of itself."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from random import Random
from typing import ClassVar, NamedTuple

Hardness = Callable[[], tuple[int, int]]
"""Gives a length of literals and a number of nested operations, each time it is asked."""


class Program(NamedTuple):
    """A program and what it evaluates to, both as the model sees them."""

    text: str
    answer: str


@dataclasses.dataclass(frozen=True)
class Grammar(abc.ABC):
    """Programs of at most a length and a nesting.

    Attributes:
      length: L, the most digits of a literal.
      nesting: N, the most operations of a program.
    """

    length: int
    nesting: int

    characters: ClassVar[str]
    """The characters of programs and answers, each once."""
    forced: ClassVar[bool]
    """Whether the model reads an answer's characters so far while it tells the next one, from the
    program's last character on; else it reads nothing."""

    @abc.abstractmethod
    def compose(self, draw: Random, hardness: Hardness) -> Program:
        """A program at random."""

    @property
    @abc.abstractmethod
    def program_characters(self) -> int:
        """No program is longer, and some program is as long."""

    @property
    @abc.abstractmethod
    def answer_characters(self) -> int:
        """No answer is longer."""

    @property
    @abc.abstractmethod
    def count(self) -> int:
        """At least so many programs have the full length and nesting."""

    @abc.abstractmethod
    def levels(self) -> list[tuple[int, int]]:
        """Lengths and nestings from the easiest to the full ones, as a curriculum climbs them."""

    @abc.abstractmethod
    def combined(self, draw: Random, level: tuple[int, int]) -> tuple[int, int]:
        """A length and a nesting of the Combine curriculum on a level."""

    def mixed(self, draw: Random) -> tuple[int, int]:
        """A length and a nesting of the Mix curriculum: each uniform, from 1 to the full one."""
        return draw.randint(1, self.length), draw.randint(1, self.nesting)
