"""The programs of Santoro et al. (2018), as their published generator makes them.

A program is one expression without spaces, such as ``(52+81)if13>40else77``. Every literal has
exactly L digits, and the operation before is always an operation's first operand:

    a+b   a-b   a*b   aifb<celsed   aifb>celsed   x=afor[k]x+=b

The last one adds b to a, k times. The answer is the value modulo 10^(L+1), as Python has it: it
is never negative. Intermediate values are whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from random import Random

from experiments.execute.grammars import Grammar, Hardness, Program

OPERATIONS = {
    "addition": ("+",),
    "control": ("if", "for"),
    "program": ("+", "-", "*", "if", "for"),
}
"""The operations of each category (UR E.3)."""

_MOST_TIMES = 9  # a loop is taken 1 to so many times
_CHARACTERS = {"+": 1, "-": 1, "*": 1, "if": len("if<else"), "for": len("x=for[k]x+=")}
_LITERALS = {"+": 1, "-": 1, "*": 1, "if": 3, "for": 1}  # beside the first operand
_FORMS = {"+": 1, "-": 1, "*": 1, "if": 2, "for": _MOST_TIMES}  # with the same literals


@dataclasses.dataclass(frozen=True)
class Santoro(Grammar):
    """Expressions of some operations.

    Attributes:
      category: a name in ``OPERATIONS``.
    """

    category: str

    characters = "0123456789()+-*<>=[]efilorsx"
    forced = False

    def compose(self, draw: Random, hardness: Hardness) -> Program:
        length, nesting = hardness()

        def literal() -> int:
            return draw.randrange(10 ** (length - 1), 10**length)

        value = literal()
        text = str(value)
        for index in range(nesting):
            text = f"({text})" if index else text
            operation = draw.choice(OPERATIONS[self.category])
            value, text = _applied(operation, value, text, literal, draw)
        return Program(text, str(value % 10 ** (length + 1)))

    @property
    def program_characters(self) -> int:
        parentheses = 2 * (self.nesting - 1)
        longest = max(
            _CHARACTERS[operation] + _LITERALS[operation] * self.length
            for operation in OPERATIONS[self.category]
        )
        return self.length + self.nesting * longest + parentheses

    @property
    def answer_characters(self) -> int:
        return self.length + 1

    @property
    def count(self) -> int:
        literals = 9 * 10 ** (self.length - 1)
        ways = sum(
            _FORMS[operation] * literals ** _LITERALS[operation]
            for operation in OPERATIONS[self.category]
        )
        return literals * ways**self.nesting

    def levels(self) -> list[tuple[int, int]]:
        """The length rises first, then the nesting."""
        levels = [(length, 1) for length in range(1, self.length + 1)]
        return levels + [(self.length, nesting) for nesting in range(2, self.nesting + 1)]

    def combined(self, draw: Random, level: tuple[int, int]) -> tuple[int, int]:
        """Each uniform, from 1 to the level's."""
        length, nesting = level
        return draw.randint(1, length), draw.randint(1, nesting)


def _applied(
    operation: str, value: int, text: str, literal: Callable[[], int], draw: Random
) -> tuple[int, str]:
    """The value and the text of an operation on a first operand."""
    b = literal()
    if operation == "+":
        return value + b, f"{text}+{b}"
    if operation == "-":
        return value - b, f"{text}-{b}"
    if operation == "*":
        return value * b, f"{text}*{b}"
    if operation == "for":
        times = draw.randint(1, _MOST_TIMES)
        return value + times * b, f"x={text}for[{times}]x+={b}"
    c, d = literal(), literal()
    less = draw.random() < 0.5
    result = value if (b < c if less else b > c) else d
    return result, f"{text}if{b}{'<' if less else '>'}{c}else{d}"
