"""What goes wrong while a run writes, in a sentence."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from experiments.settings.errors import StorageError

T = TypeVar("T")

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_WRITING = (*_FULL, errno.EFBIG, errno.EROFS, errno.EIO)
_WAIT_SECONDS = 5.0  # between looks whether there is room again
_IN_TENSORSTORE = re.compile(r"(?:OS error |os_error_code=')(\d+)")  # of a ValueError


class Storage(NamedTuple):
    """How a run keeps what it leaves behind; none of it changes a result.

    Attributes:
      keep_checkpoints: how many checkpoints stay, the newest ones.
      waits: whether a run whose disk is full waits for room, in the place of ending.
    """

    keep_checkpoints: int = 3
    waits: bool = False


DEFAULTS = Storage()


class Patience:
    """Writes what can be written again, and waits for room where the run is to.

    Args:
      waits: whether it does.
      say: is told when waiting begins and ends.
      stopped: whether the run was asked to stop: then nothing is waited for.
    """

    def __init__(
        self, waits: bool, say: Callable[[str], None], stopped: Callable[[], bool]
    ) -> None:
        self._waits, self._say, self._stopped = waits, say, stopped

    def __call__(self, write: Callable[[], T]) -> T:
        """What ``write`` returns.

        Raises:
          StorageError: if it cannot be written, for another reason than a full disk or where
            that is not waited for.
        """
        waiting = False
        while True:
            try:
                value = write()
            except StorageError as error:
                if not (self._waits and error.full) or self._stopped():
                    raise
                sentence, _, _ = str(error).partition(";")
            else:
                if waiting:
                    self._tell("there is room again; going on.")
                return value
            if not waiting:
                self._tell(f"warning: {sentence}; waiting for room, and SIGTERM ends the run.")
            waiting = True
            time.sleep(_WAIT_SECONDS)

    def _tell(self, text: str) -> None:
        with contextlib.suppress(StorageError):  # the output may be on the same disk
            self._say(text)


def reason(error: BaseException) -> str:
    """The system's words for an error."""
    number = _number(error)
    if number is not None:
        return os.strerror(number)
    return str(error).strip().partition("\n")[0] or type(error).__name__


def no_writing(error: BaseException) -> bool:
    """Whether an error says that nothing can be written there for now."""
    return _number(error) in _NO_WRITING


@contextlib.contextmanager
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


@contextlib.contextmanager
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
        "command goes on from there.",
        full=_number(error) in _FULL,
    )


def _number(error: BaseException) -> int | None:
    """The system's number of an error, also where a library has wrapped it."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    text = str(error)
    if match := _IN_TENSORSTORE.search(text):
        return int(match[1])
    if not isinstance(error, RuntimeError):  # XLA's errors are, and have the words alone
        return None
    return next((number for number in _NO_WRITING if os.strerror(number) in text), None)
