"""Windows that the host reads ahead of the device, by number."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from experiments.training.task import Streamed

CHUNK = 8  # windows that go to the device together


class Feed:
    """Reads the windows of coming steps while the device works.

    Args:
      data: where they are read from.
      seeds: of each lane.
      rows: the rows that this process reads.
      steps: how many steps there are.
    """

    def __init__(self, data: Streamed, seeds: list[int], rows: np.ndarray, steps: int) -> None:
        self._data, self._seeds, self._rows, self._steps = data, seeds, rows, steps
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="feed")
        self._coming: dict[int, Future[Any]] = {}

    def take(self, start: int, stop: int) -> Any:
        """The windows of steps ``start`` to ``stop - 1``, stacked ``[lanes, CHUNK, ...]``; the
        last one is repeated where there are fewer.

        Raises:
          Exception: whatever reading them raised.
        """
        coming_steps = range(start, min(stop + CHUNK, self._steps))
        self._coming = {
            step: future for step, future in self._coming.items() if step in coming_steps
        }
        for step in coming_steps:
            if step not in self._coming:
                self._coming[step] = self._pool.submit(self._read, step)
        windows = [self._coming[step].result() for step in range(start, stop)]
        windows += windows[-1:] * (CHUNK - len(windows))
        return jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *windows)

    def close(self) -> None:
        """Ends the thread."""
        self._pool.shutdown(cancel_futures=True)

    def _read(self, step: int) -> Any:
        """The window of each lane, stacked."""
        windows_by_seed = {
            seed: self._data.read(seed, step, self._rows) for seed in dict.fromkeys(self._seeds)
        }
        windows = [windows_by_seed[seed] for seed in self._seeds]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *windows)
