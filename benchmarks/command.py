"""What both programs share: a command line, and results as Markdown, JSON and a figure."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from absl import flags
from absl.flags import FlagValues

from benchmarks.process import cores

_HELP = {"--help", "-help", "-h"}


def parse(
    name: str, define: Callable[[FlagValues], None], argv: Sequence[str], *, devices: bool = True
) -> dict[str, Any]:
    """The flags of a program by name. Ends it after ``--help`` (0) and on a wrong flag (2).

    Args:
      name: of the program.
      define: defines its own flags, beside ``--repeats``, ``--devices`` and ``--out``.
      argv: the command line, program first.
      devices: whether it has ``--devices``.
    """
    values = FlagValues()
    define(values)
    flags.DEFINE_integer("repeats", 10, "pairs of runs timed", 1, flag_values=values)
    if devices:
        flags.DEFINE_integer(
            "devices",
            cores(),
            "XLA devices on a CPU; the batch is split over them",
            1,
            flag_values=values,
        )
    flags.DEFINE_string("out", "runs/benchmarks", "directory of the results", flag_values=values)
    if _HELP & set(argv[1:]):
        print(f"usage: python -m benchmarks.{name} [--flag=value ...]\n")
        for flag in values:
            print(f"  --{flag} (default: {values[flag].default_as_str})\n      {values[flag].help}")
        sys.exit(0)
    try:
        extra_arguments = values(list(argv))[1:]
        if extra_arguments:
            raise flags.Error(f"There is no argument {extra_arguments[0]!r}.")
    except flags.Error as error:
        fail(name, str(error))
    return {flag: values[flag].value for flag in values}


def fail(name: str, sentence: str) -> NoReturn:
    """Ends a program with 2 and a sentence on standard error."""
    print(f"benchmarks.{name}: {sentence}", file=sys.stderr)
    sys.exit(2)


def say(line: str) -> None:
    """A line of progress on standard error; tables go to standard output."""
    print(line, file=sys.stderr, flush=True)


def markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def save(out: str, name: str, report: Any, table: str) -> Path:
    """Writes ``name.json`` and ``name.md``; returns the directory."""
    directory = Path(out)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.json").write_text(json.dumps(report, indent=2) + "\n")
    (directory / f"{name}.md").write_text(table + "\n")
    return directory


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"


def megabytes(size: float | None) -> str:
    return "-" if size is None else f"{size / 1e6:,.0f}"
