"""Features of pictures, made once and kept: array_record files that several processes can fill.

Pictures are taken in shards, each a file of its own. Whoever makes a shard holds the lock of its
number, which the system drops when a process dies; the file takes its name when it is whole. So a
process that is killed leaves at most one shard to be made again, and processes that are started
beside each other share the shards.

Letters: N pictures, L regions, D features.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.settings.errors import StorageError, UserError

SHARD = 256  # pictures of a file
_DTYPE = np.dtype("<f2")

Make = Callable[[Sequence[int]], tuple[np.ndarray, np.ndarray | None]]
"""``make(numbers) -> (pooled [n, D], regions [n, L, D] or None)`` of these pictures."""


def directory(*parts: str) -> Path:
    """Where features are kept that are decided by all these texts."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return Path(caches, "recurrent_gates", "captioning", digest)


class Cache:
    """The features of N pictures.

    Args:
      path: of the directory.
      count: N.
      regions: L, or 0: they are not kept.
      width: D.
      shard: pictures of a file.
    """

    def __init__(
        self, path: Path, count: int, regions: int, width: int, shard: int = SHARD
    ) -> None:
        self.path, self.count = path, count
        self._regions, self._width, self._shard = regions, width, shard
        self._source: Any = None

    @property
    def _files(self) -> list[Path]:
        shards = range(-(-self.count // self._shard))
        return [self.path / f"{shard:05d}.array_record" for shard in shards]

    def missing(self) -> list[int]:
        """The numbers of the shards that are not made yet."""
        return [shard for shard, file in enumerate(self._files) if not file.is_file()]

    def fill(self, make: Make, say: Callable[[str], None]) -> None:
        """Makes the features that are missing; returns when all are there.

        Args:
          make: makes those of some pictures.
          say: told how far it is.

        Raises:
          UserError: what ``make`` raises, or if array_record is not installed.
          StorageError: if the features cannot be written.
        """
        _array_record()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for blocking in (False, True):  # then for what others are making
                for shard in self.missing():
                    self._fill(shard, make, say, blocking)
        except OSError as error:
            raise StorageError(
                f"features cannot be kept in {self.path}: {error.strerror or error}."
            ) from None

    def _fill(self, shard: int, make: Make, say: Callable[[str], None], blocking: bool) -> None:
        with _lock(self.path / f"{shard:05d}.lock", blocking) as locked:
            file = self._files[shard]
            if not locked or file.is_file():
                return
            first = shard * self._shard
            numbers = range(first, min(first + self._shard, self.count))
            pooled, regions = make(numbers)
            columns = [pooled.reshape(len(numbers), -1)]
            if self._regions:
                assert regions is not None
                columns.append(regions.reshape(len(numbers), -1))
            self._write(file, np.concatenate(columns, axis=1).astype(_DTYPE))
            say(f"features: {len(self._files) - len(self.missing())} of {len(self._files)} files")

    def _write(self, file: Path, rows: np.ndarray) -> None:
        temporary_path = file.with_suffix(".part")
        writer = _array_record().ArrayRecordWriter(str(temporary_path), "group_size:1")
        for row in rows:
            writer.write(row.tobytes())
        writer.close()
        with temporary_path.open("rb") as handle:
            os.fsync(handle.fileno())
        temporary_path.rename(file)

    def read(self, numbers: Sequence[int]) -> dict[str, np.ndarray]:
        """``{"pooled": [n, D]}``, and ``"regions": [n, L, D]`` if they are kept; float16.

        Raises:
          UserError: if a file is damaged.
        """
        from array_record.python.array_record_data_source import ArrayRecordDataSource

        try:
            if self._source is None:
                self._source = ArrayRecordDataSource([str(file) for file in self._files])
            records = self._source.__getitems__([int(number) for number in numbers])
            rows = np.stack([np.frombuffer(record, _DTYPE) for record in records])
            rows = rows.reshape(len(rows), 1 + self._regions, self._width)
        except Exception as error:  # whatever array_record makes of a damaged file
            reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            raise UserError(
                f"the features in {self.path} are damaged ({reason}); remove that directory, and "
                "they are made again."
            ) from None
        features = {"pooled": rows[:, 0]}
        return features | ({"regions": rows[:, 1:]} if self._regions else {})


@contextlib.contextmanager
def _lock(path: Path, blocking: bool) -> Iterator[bool]:
    """Whether this process has a lock, while it has it."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def _array_record() -> Any:
    try:
        from array_record.python import array_record_module
    except ImportError:
        raise UserError("features are kept by array_record: pip install array_record.") from None
    return array_record_module
