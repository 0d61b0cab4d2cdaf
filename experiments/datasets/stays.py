"""Hospital stays: vital signs of the first 48 hours at irregular times. Nothing is downloaded.

What is made of the published files is kept in one file of the user's cache folder, with arrays
alone: nothing in it is run. No value and no identifier of a patient goes anywhere else, but for
the name of a file, which a message about its damage has to give.

Letters: N stays, E times of measurement of all stays, V = 12 variables.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.datasets import cinc, mimic
from experiments.datasets.damage import unreadable
from experiments.datasets.measured import HOURS, VARIABLES, Stays
from experiments.settings.errors import UserError

_LAYOUT = 1  # of the cache; another number makes it anew
_SPLIT_SEED = 42
_PUBLISHED = (43_000, 5_106, 5_105)  # the parts of GATO 5.4


@dataclasses.dataclass(frozen=True)
class Source:
    """A published set of stays.

    Attributes:
      title: its name as people know it.
      folders: where its files may lie in a data directory, besides there themselves.
      needs: its files, in words.
      published: where these are published.
      published_count: how many hospital stays there are.
      published_long: how many of them are long ones.
      files: of a folder, those that the stays are made of; none if it has not got them.
      read: of a folder and the kind of stay.
    """

    title: str
    folders: tuple[str, ...]
    needs: str
    published: str
    published_count: int
    published_long: int
    files: Callable[[Path], list[Path]]
    read: Callable[[Path, str], Stays]


SOURCES = {
    "cinc2012": Source(
        title="the PhysioNet/CinC Challenge 2012",
        folders=("cinc2012",),
        needs="the folder set-a and Outcomes-a.txt",
        published="physionet.org/content/challenge-2012",
        published_count=3_940,
        published_long=2_572,
        files=cinc.files,
        read=lambda folder, _: cinc.read(folder),
    ),
    "mimic3": Source(
        title="MIMIC-III",
        folders=("mimic3", "mimiciii", "mimic-iii-clinical-database-1.4"),
        needs="ADMISSIONS, ICUSTAYS, CHARTEVENTS and OUTPUTEVENTS (.csv or .csv.gz)",
        published="physionet.org/content/mimiciii",
        published_count=53_211,
        published_long=27_088,
        files=mimic.files,
        read=mimic.read,
    ),
}


def load(name: str, data_dir: str | None, stay: str, say: Callable[[str], None]) -> Stays:
    """The stays of a set, from the cache if the files are those that it was made of.

    Args:
      name: a key of ``SOURCES``.
      data_dir: where its files are.
      stay: ``"hospital"`` or ``"icu"``.
      say: is told how much was read, in numbers of values alone.

    Raises:
      UserError: if the files are not there or damaged, or have too few stays.
    """
    source = SOURCES[name]
    folder, files = _find(source, data_dir)
    path = _cache() / f"{name}-{stay}-{_digest(files)}.npz"
    stays = _cached(path)
    if stays is None:
        stays = source.read(folder, stay)
        _check(source, folder, stays)
        _keep(path, stays)
        value_count = int(np.isfinite(stays.values).sum())
        say(
            f"{source.title}: {len(stays.long_stay):,} stays, {int(stays.long_stay.sum()):,} of "
            f"them long, {value_count:,} values at {len(stays.hours):,} times; "
            f"{int(stays.clipped.sum()):,} values lay out of range and are clipped."
        )
    return stays


def _find(source: Source, data_dir: str | None) -> tuple[Path, list[Path]]:
    instruction = f"put {source.needs} of {source.published} into a directory DIR: --data_dir=DIR."
    if data_dir is None:
        raise UserError(f"{source.title} is not here: {instruction}")
    root = Path(data_dir)
    if not root.is_dir():
        raise UserError(f"--data_dir={data_dir} is no directory.")
    for folder in (*(root / name for name in source.folders), root):
        if folder.is_dir() and (files := source.files(folder)):
            return folder, files
    raise UserError(f"{source.title} is not in {data_dir}: {instruction}")


def _check(source: Source, folder: Path, stays: Stays) -> None:
    if min(sizes(len(stays.long_stay))) < 1:
        raise UserError(
            f"{source.title} in {folder} has {len(stays.long_stay)} stays, too few for three parts."
        )


def sizes(count: int) -> tuple[int, int, int]:
    """How many of so many stays are for training, validation and test, as in GATO 5.4."""
    total = sum(_PUBLISHED)
    validation, test = (round(count * part / total) for part in _PUBLISHED[1:])
    return count - validation - test, validation, test


def split(stays: Stays) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The numbers of the stays of each part.

    Patients are put in a random order, the same for all seeds and cells, and all stays of a
    patient beside each other: at most two patients have stays in two parts.
    """
    rank = np.random.RandomState(_SPLIT_SEED).permutation(int(stays.patients.max()) + 1)
    order = np.argsort(rank[stays.patients], kind="stable")
    train, validation, _ = sizes(len(order))
    parts = np.split(order, [train, train + validation])
    return parts[0], parts[1], parts[2]


class Scale(NamedTuple):
    """Mean and standard deviation of each variable, float32 ``[V]``."""

    mean: np.ndarray
    deviation: np.ndarray

    @classmethod
    def of(cls, stays: Stays, part: np.ndarray) -> Scale:
        """Those of all values that were measured in the stays of a part."""
        mask = np.zeros(len(stays.long_stay), bool)
        mask[part] = True
        values = stays.values[np.repeat(mask, np.diff(stays.starts))].astype(np.float64)
        count = np.maximum(np.isfinite(values).sum(axis=0), 1)
        mean = np.nansum(values, axis=0) / count
        deviation = np.sqrt(np.nansum((values - mean) ** 2, axis=0) / count)
        # A variable that was never measured, or always the same, tells nothing.
        deviation = np.where(deviation > 1e-6, deviation, 1)
        return cls(mean.astype(np.float32), deviation.astype(np.float32))


def dense(stays: Stays, part: np.ndarray, longest: int, scale: Scale) -> np.ndarray:
    """The stays of a part as sequences of equal length, the padding at their beginning.

    Args:
      stays: all.
      part: the numbers of the stays that are wanted, ``[n]``.
      longest: T; of a stay with more times the first ones are taken.
      scale: what values are measured in.

    Returns:
      float32 ``[n, T, V + 1]``: values in standard deviations, NaN where there is none, and last
      the time in 48 hours, NaN in the padding.
    """
    inputs = np.full((len(part), longest, len(VARIABLES) + 1), np.nan, np.float32)
    for row, number in enumerate(part):
        begin = int(stays.starts[number])
        end = min(int(stays.starts[number + 1]), begin + longest)
        sequence = inputs[row, longest - (end - begin) :]
        sequence[:, :-1] = (stays.values[begin:end] - scale.mean) / scale.deviation
        sequence[:, -1] = stays.hours[begin:end] / np.float32(HOURS)
    return inputs


# The cache.


def _cache() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(caches) / "recurrent_gates" / "stays"


def _digest(files: Sequence[Path]) -> str:
    """What tells files from others without reading all of them: names, sizes, times of change."""
    digest = hashlib.sha256(f"{_LAYOUT} {VARIABLES}".encode())
    for path in files:
        try:
            stat = path.stat()
        except OSError as error:
            raise unreadable(path, error) from None
        digest.update(f"\n{path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


def _cached(path: Path) -> Stays | None:
    """The stays in a file of the cache; none if it is not there or damaged."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            stays = Stays(*(arrays[name] for name in Stays._fields))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
    count, times = len(stays.long_stay), len(stays.hours)
    shapes = ((count + 1,), (times,), (times, len(VARIABLES)), (count,), (count,))
    complete = all(array.shape == shape for array, shape in zip(stays, shapes, strict=False))
    return stays if complete and stays.starts[-1] == times else None


def _keep(path: Path, stays: Stays) -> None:
    """Writes a file of the cache, whole or not at all, which its owner alone can read."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, partial = tempfile.mkstemp(dir=path.parent, suffix=".partial")  # mode 0600
        try:
            with os.fdopen(descriptor, "wb") as file:
                np.savez(file, allow_pickle=False, **stays._asdict())
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.remove(partial)
            raise
    except OSError as error:
        raise UserError(
            f"the stays cannot be kept in {path.parent}: {error.strerror or error}; "
            "XDG_CACHE_HOME names another folder."
        ) from None
