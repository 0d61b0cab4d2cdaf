"""Tables in comma-separated files, gzipped or not, row by row: bad ones are one sentence."""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from experiments.datasets.damage import unreadable
from experiments.settings.errors import UserError


def bad_row(path: Path, row: int, reason: str) -> UserError:
    """A row that is not what was published. What stands in it is not told: it is a patient's."""
    return UserError(f"{path}, row {row}: {reason}.")


def table(
    path: Path, columns: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[tuple[int, list[str]]]:
    """The rows of a table, one after the other, in little memory.

    Args:
      path: of the file; one that ends in ``.gz`` is unzipped.
      columns: those that are wanted, in any case of letters.
      optional: others, which may be missing and are then empty.

    Yields:
      ``(row, values)``: the number of the row's line from 1, the title's, and a text for each
      column.

    Raises:
      UserError: if the file cannot be read, ends too early, or is no such table.
    """
    row = 0
    try:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8", newline="") as file:
            reader = csv.reader(file, strict=True)
            title = [name.strip().upper() for name in next(reader, [])]
            row = reader.line_num
            missing = [name for name in columns if name not in title]
            if missing:
                raise bad_row(path, 1, f"there is no column {' and no column '.join(missing)}")
            width = len(title)
            places = [
                title.index(name) if name in title else width for name in (*columns, *optional)
            ]
            for values in reader:
                row = reader.line_num
                if len(values) != width:
                    raise bad_row(path, row, f"it has {len(values)} entries, the title {width}")
                values.append("")
                yield row, [values[place] for place in places]
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise bad_row(path, row + 1, "the gzipped file is cut short or damaged") from None
    except UnicodeDecodeError:
        raise bad_row(path, row + 1, "here or soon after it is not UTF-8") from None
    except csv.Error:
        raise bad_row(path, row + 1, "here or soon after a quotation does not end") from None
    except OSError as error:
        raise unreadable(path, error) from None


def number(path: Path, row: int, name: str, text: str) -> float:
    """A finite number of a row."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise bad_row(path, row, f"its {name} is no number")
    return value


def moment(path: Path, row: int, name: str, text: str) -> datetime:
    """A time of a row, such as 2164-10-23 21:09:00."""
    try:
        value = datetime.fromisoformat(text)
    except ValueError:
        raise bad_row(path, row, f"its {name} is no time such as 2164-10-23 21:09:00") from None
    return value.replace(tzinfo=None)
