"""Markdown tables, and files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from experiments.records.workdir import holds_run
from experiments.settings.errors import UserError

_PARTIAL = re.compile(r"(\.\d+)?\.partial$")


def write(path: Path, content: str) -> None:
    """Writes a file whole or not at all.

    Raises:
      UserError: if it cannot be written.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")  # another's is not touched
    make(path.parent)
    try:
        partial.write_text(content)
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise UserError(f"cannot write {path}: {error.strerror}.") from None


def set_aside(reports: Sequence[Path]) -> None:
    """Renames reports on something else, ``sweep.md`` to ``sweep-1.md`` or the first number that is
    free, so that new ones take no one's place.

    Raises:
      UserError: if they cannot be renamed.
    """

    def numbered(path: Path, number: int) -> Path:
        return path.with_name(f"{path.stem}-{number}{path.suffix}")

    def is_free(number: int) -> bool:
        return not any(numbered(path, number).exists() for path in reports)

    number = next(filter(is_free, itertools.count(1)))
    for path in filter(Path.exists, reports):
        try:
            os.replace(path, numbered(path, number))
        except OSError as error:
            raise UserError(f"cannot rename {path}: {error.strerror}.") from None


def read(path: Path) -> Any:
    """The content of a report in JSON; None if there is none, or it is damaged."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def claim(directory: Path, reports: Collection[str]) -> None:
    """Makes a directory for runs and their reports, or takes one that holds nothing else.

    Args:
      directory: it may hold workdirs, one in each folder, and reports.
      reports: the names of these; ``*`` stands for anything.

    Raises:
      UserError: if it holds something else, or cannot be made.
    """
    try:
        entries = list(directory.iterdir()) if directory.exists() else []
    except OSError as error:
        raise UserError(f"{directory} cannot be read: {error.strerror}.") from None
    for entry in entries:
        name = _PARTIAL.sub("", entry.name)  # a kill can leave a report half-written
        if not holds_run(entry) and not any(Path(name).match(report) for report in reports):
            raise UserError(
                f"{directory} holds {entry.name}, which is no run of this kind; choose an empty "
                "folder, or one that is not there yet."
            )
    make(directory)


def make(directory: Path) -> None:
    """Makes a directory, if need be.

    Raises:
      UserError: if it cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the directory {directory}: {error.strerror}.") from None


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is aligned left, the others right."""
    cells = [list(head), *map(list, rows)]
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(head))]

    def line(row: Sequence[str]) -> str:
        first, *rest = zip(row, widths, strict=True)
        texts = [first[0].ljust(first[1]), *(text.rjust(width) for text, width in rest)]
        return f"| {' | '.join(texts)} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(cells[0]), f"| {' | '.join(rule)} |", *map(line, cells[1:])])


def of_prose(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table of sentences, whose columns are not brought to one width."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
