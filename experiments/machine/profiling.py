"""Where the time goes: a clock inside and outside of compiled programs, and a trace."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

_WARM_DISPATCHES = 2  # before a trace


class Clock:
    """The time of training, and how much of it is inside of compiled programs.

    Attributes:
      last: seconds of the last stretch inside.
      since_save: seconds since the last checkpoint.
      save_seconds: what that took; 0 before the first.
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Everything begins now."""
        self._lap = self._save = time.perf_counter()
        self._inside = self.last = self.save_seconds = 0.0
        self._steps = 0

    @contextmanager
    def inside(self, steps: int = 0) -> Iterator[None]:
        """A stretch inside of compiled programs, of so many training steps."""
        start = time.perf_counter()
        yield
        self.last = time.perf_counter() - start
        self._inside += self.last
        self._steps += steps

    @property
    def since_save(self) -> float:
        return time.perf_counter() - self._save

    def saved(self, seconds: float) -> None:
        """A checkpoint was written, in so many seconds."""
        self._save, self.save_seconds = time.perf_counter(), seconds

    def lap(self) -> dict[str, float]:
        """Seconds since the last lap, those of them inside of programs, and the steps."""
        now = time.perf_counter()
        lap = {"seconds": now - self._lap, "inside": self._inside, "steps": self._steps}
        self._lap, self._inside, self._steps = now, 0.0, 0
        return lap


class Profile:
    """A trace of some steps, for TensorBoard's profiler and Perfetto.

    The first steps are left out: they are dispatched one by one.

    Args:
      directory: where it goes.
      steps: how many are traced; 0: none.
    """

    def __init__(self, directory: Path, steps: int) -> None:
        self.directory, self._remaining = directory, steps
        self._wait, self._tracing = _WARM_DISPATCHES, False

    @property
    def unfinished(self) -> bool:
        """Whether steps are still to be traced."""
        return self._remaining > 0

    def begin(self, count: int) -> int:
        """Begins where it is time to; of so many steps that come next, how many come together."""
        if not self.unfinished:
            return count
        if self._wait:
            self._wait -= 1
            return count
        if not self._tracing:
            jax.profiler.start_trace(str(self.directory), create_perfetto_trace=True)
            self._tracing = True
        count = min(count, self._remaining)
        self._remaining -= count
        return count

    def end(self) -> None:
        """Ends and writes the trace, if all of its steps are done."""
        if self._tracing and not self.unfinished:
            self.close()

    def close(self) -> None:
        """Ends and writes the trace."""
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()
