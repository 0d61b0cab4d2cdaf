"""What goes wrong while a run writes, in a sentence."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from experiments.settings.errors import StorageError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_WRITING = (*NO_ROOM, errno.EROFS, errno.EIO)
_IN_TENSORSTORE = re.compile(r"(?:OS error |os_error_code=')(\d+)")  # of a ValueError


def reason(error: BaseException) -> str:
    """The system's words for an error."""
    number = _number(error)
    if number is not None:
        return os.strerror(number)
    return str(error).strip().partition("\n")[0] or type(error).__name__


def no_writing(error: BaseException) -> bool:
    """Whether an error says that nothing can be written there for now."""
    return _number(error) in _NO_WRITING


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Writes what a run cannot do without.

    Args:
      path: what is written.

    Raises:
      StorageError: in the place of the system's error.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and _number(error) is None:
            raise
        raise cannot_write(path, error) from None


@contextmanager
def tolerated(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Writes what a run can do without: it goes on, unless there is no room for the rest either.

    Args:
      path: what is written.
      say: is told of an error.

    Raises:
      StorageError: on a full disk, or one that has become read-only.
    """
    try:
        yield
    except StorageError:
        raise
    except Exception as error:  # whatever a library makes of it
        if no_writing(error):
            raise cannot_write(path, error) from None
        say(f"warning: cannot write {path}: {reason(error)}; the run goes on without.")


def cannot_write(path: Path, error: BaseException) -> StorageError:
    """The sentence."""
    return StorageError(
        f"cannot write {path}: {reason(error)}; what was saved before is kept, and the same "
        "command goes on from there."
    )


def _number(error: BaseException) -> int | None:
    """The system's number of an error, also where a library has wrapped it."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    text = str(error)
    if wrapped := _IN_TENSORSTORE.search(text):
        return int(wrapped[1])
    if not isinstance(error, RuntimeError):  # XLA's errors are, and have the words alone
        return None
    return next((number for number in _NO_WRITING if os.strerror(number) in text), None)
