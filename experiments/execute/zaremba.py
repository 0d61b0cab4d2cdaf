"""The programs of Zaremba and Sutskever (2014), as their published generator makes them.

A program is Python, with ``#`` for the end of a line and ``@`` for the end of the program; its
answer is what it prints, and ends with a dot:

    h=7432;#for x in range(6):h-=281#print((h+90))@   5836.

A literal is a whole number from 1 to 10^L. Each operation takes what the one before gave as one of
its operands, any of them, and new literals as the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from experiments.execute.grammars import Grammar, Hardness, Program

OPERATIONS = ("pair", "smallmul", "equality", "vars", "small_loop", "ifstat")
NAMES = "abcdefghij"  # of variables, each taken once

_MIXED = 0.2  # of Combine's draws; the others are on the level


class _Term(NamedTuple):
    """What stands for a value in the program, and the value."""

    text: str
    value: int


@dataclasses.dataclass(frozen=True)
class Zaremba(Grammar):
    """Programs of assignments, loops, conditionals and sums."""

    characters = "0123456789.-()+*<>=;:#@ abcdefghijlnoprstx"
    forced = True

    def compose(self, draw: Random, hardness: Hardness) -> Program:
        """A program; every literal is of a length of its own, as the hardness is asked anew."""
        _, nesting = hardness()
        names = draw.sample(NAMES, nesting)
        lines = ""
        previous_terms: list[_Term] = []

        def operands(count: int) -> list[_Term]:
            literals = [
                draw.randint(1, 10 ** hardness()[0]) for _ in range(count - len(previous_terms))
            ]
            terms = previous_terms + [_Term(str(literal), literal) for literal in literals]
            draw.shuffle(terms)
            return terms

        def small() -> int:
            return draw.randint(1, 4 * hardness()[0])

        for name in names:
            line, term = _applied(draw.choice(OPERATIONS), name, operands, small, draw)
            lines, previous_terms = lines + line, [term]
        (term,) = previous_terms
        return Program(f"{lines}print({term.text})@", f"{term.value}.")

    @property
    def program_characters(self) -> int:
        literal, small = self.length + 1, len(str(4 * self.length))
        longest = max(
            len("(+)") + literal,
            len("(*)") + small,
            len("a=;#(a+)") + literal,
            len("a=#for x in range():a+=#a") + small + literal,
            len("( if < else )") + 3 * literal,
        )
        return literal + self.nesting * longest + len("print()@")

    @property
    def answer_characters(self) -> int:
        largest = literal = 10**self.length
        for _ in range(self.nesting):
            small = 4 * self.length
            largest = max(largest + small * literal, literal + small * largest)
        return len(f"-{largest}.")

    @property
    def count(self) -> int:
        return 2 * 10 ** (4 * self.length)  # those whose first operation is ifstat

    def levels(self) -> list[tuple[int, int]]:
        """The length rises and begins anew with each nesting."""
        nestings, lengths = range(1, self.nesting + 1), range(1, self.length + 1)
        return [(length, nesting) for nesting in nestings for length in lengths]

    def combined(self, draw: Random, level: tuple[int, int]) -> tuple[int, int]:
        """One time in five Mix's, else the level's."""
        return self.mixed(draw) if draw.random() < _MIXED else level


def _applied(
    operation: str,
    name: str,
    operands: Callable[[int], list[_Term]],
    small: Callable[[], int],
    draw: Random,
) -> tuple[str, _Term]:
    """The lines of an operation, and what is put in the place of its result."""
    if operation in ("smallmul", "equality"):
        (a,) = operands(1)
        if operation == "equality":
            return "", a
        times = small()
        text = f"({a.text}*{times})" if draw.random() < 0.5 else f"({times}*{a.text})"
        return "", _Term(text, a.value * times)
    if operation == "ifstat":
        a, b, c, d = operands(4)
        less = draw.random() < 0.5
        result = c if (a.value < b.value if less else a.value > b.value) else d
        text = f"({c.text} if {a.text}{'<' if less else '>'}{b.text} else {d.text})"
        return "", _Term(text, result.value)
    a, b = operands(2)
    sign, factor = ("+", 1) if draw.random() < 0.5 else ("-", -1)
    if operation == "small_loop":
        times = small()
        lines = f"{name}={a.text}#for x in range({times}):{name}{sign}={b.text}#"
        return lines, _Term(name, a.value + factor * times * b.value)
    value = a.value + factor * b.value
    if operation == "vars":
        return f"{name}={a.text};#", _Term(f"({name}{sign}{b.text})", value)
    return "", _Term(f"({a.text}{sign}{b.text})", value)
