"""When a run stops before its end: signals, which several processes agree on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


class StoppedError(Exception):
    """The run was asked to stop."""


class Stopping:
    """Whether SIGTERM or SIGINT has come; a second SIGINT ends the process at once.

    Nothing is raised in the handler: an exception there can be swallowed wherever Python happens
    to be.
    """

    def __init__(self) -> None:
        self._event = threading.Event()

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self._event.is_set()

    def pause(self) -> None:
        """Goes on, unless one of the processes was asked to stop; all of them call this.

        Raises:
          StoppedError: if one was.
        """
        self.agree(0)

    def agree(self, step_count: int) -> int:
        """How many steps all processes do next: what the first one says.

        Raises:
          StoppedError: if one of them was asked to stop.
        """
        proposal = np.array([self.requested, step_count], np.int32)
        proposals = (
            multihost_utils.process_allgather(proposal)
            if jax.process_count() > 1
            else proposal[None]
        )
        if proposals[:, 0].any():
            raise StoppedError
        return int(proposals[0, 1])

    def _ask(self, number: int, frame: Any) -> None:
        del frame
        if number == signal.SIGINT and self.requested:
            exit_at_once()
        self._event.set()


def exit_at_once() -> None:
    """Ends the process without another word, as a second SIGINT asks.

    Nothing is flushed: the output may be in use just now, and each line was flushed when told.
    """
    os._exit(128 + signal.SIGINT)


@contextmanager
def stopping() -> Iterator[Stopping]:
    """Catches the signals. They come to the main thread alone; in others it does nothing."""
    stop = Stopping()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    signals = (signal.SIGTERM, signal.SIGINT)
    handlers = [signal.signal(number, stop._ask) for number in signals]
    try:
        yield stop
    finally:
        for number, handler in zip(signals, handlers, strict=True):
            signal.signal(number, handler)
