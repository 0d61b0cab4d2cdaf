"""Windows of pictures from files, as pixels or as features, with their captions.

Letters: B pictures of a batch, R captions of a picture, T words of a caption and its end, L
regions of a picture.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.captioning import features, resnet
from experiments.captioning.settings import CaptioningSettings
from experiments.datasets import captions
from experiments.records.reporting import say
from experiments.settings.errors import UserError

HELD_OUT_ROWS = 64  # pictures of a window at evaluation
_TOGETHER = 16  # pictures whose features are made together
_STRIDE = 32  # pixels of a region's side
_ORDER = (0, 1)  # ends the entropy of orders: captions are drawn by (seed, step, row)


class Window(NamedTuple):
    """Pictures and their captions.

    Attributes:
      pictures: what the encoder takes, ``[B, ...]``.
      captions: int32 ``[B, R, T]``, the end from their ends on.
      numbers: of the pictures in both held-out sets together, int32 ``[B]``.
      counts: which pictures count, bool ``[B]``.
    """

    pictures: Any
    captions: Any
    numbers: Any
    counts: Any


class Corpus(NamedTuple):
    """A published set, its words, and the captions of each part as numbers."""

    parts: captions.Captions
    words: list[str]
    caption_numbers: dict[str, list[np.ndarray]]


@functools.lru_cache(maxsize=2)
def corpus(
    dataset: str, data_dir: str | None, restval: bool, min_count: int, length: int
) -> Corpus:
    """A published set, read once; for the arguments and errors see ``captions.read``."""
    parts = captions.read(dataset, data_dir, restval)
    words = captions.vocabulary(parts.train, min_count)
    numbers = {word: number for number, word in enumerate(words)}
    caption_numbers = {
        name: [captions.numbered(picture, numbers, length) for picture in pictures]
        for name, pictures in parts._asdict().items()
    }
    return Corpus(parts, words, caption_numbers)


def regions_of(size: int) -> int:
    """L, of a picture of so many pixels a side."""
    return (size // _STRIDE) ** 2


def held_out_first(index: int, pictures: int) -> tuple[Any, int]:
    """The first picture of a window of a held-out set, and how many it has; the last window
    begins early, with pictures that count elsewhere."""
    rows = min(HELD_OUT_ROWS, pictures)
    return np.minimum(index * rows, pictures - rows), rows


@dataclasses.dataclass
class PictureFiles:
    """The windows of a run, by number.

    Attributes:
      settings: the task's.
      batch_size: B.
    """

    settings: CaptioningSettings
    batch_size: int = 0

    def __post_init__(self) -> None:
        settings = self.settings
        self._corpus = corpus(
            settings.dataset,
            settings.data_dir,
            settings.restval,
            settings.min_count,
            settings.length,
        )
        self._pictures = [picture for part in self._corpus.parts for picture in part]
        parts = self._corpus.parts
        sizes = np.cumsum([0, len(parts.train), len(parts.validation)])
        self._first = dict(zip(parts._fields, sizes.tolist(), strict=True))
        self._threads = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="pictures")
        self._order: dict[tuple[int, int], np.ndarray] = {}
        self._cache = None if settings.train_encoder else self._feature_cache()

    def batched(self, batch_size: int) -> PictureFiles:
        """The windows of batches of so many pictures.

        Raises:
          UserError: if there are fewer.
        """
        if batch_size > (count := len(self._corpus.parts.train)):
            raise UserError(
                f"--batch_size={batch_size} is more than the {count} training examples."
            )
        self.batch_size = batch_size
        return self

    def read(self, seed: int, step: int, rows: np.ndarray) -> Window:
        """Pictures of a pass in an order of its own, a last batch that is not full left out, and
        of each some of its captions, drawn."""
        count = len(self._corpus.parts.train)
        per_epoch = count // self.batch_size
        order = self._order_of(seed, step // per_epoch)
        numbers = order[step % per_epoch * self.batch_size + rows]
        caption_rows = [
            self._caption_sample(
                self._corpus.caption_numbers["train"][number], (seed, step, int(row))
            )
            for number, row in zip(numbers, rows, strict=True)
        ]
        return self._window(numbers, caption_rows, np.ones(len(rows), bool), numbers)

    def read_held_out(self, name: str, index: int, rows: np.ndarray) -> Window:
        """The same of a held-out set, in its order, with the first captions of each."""
        picture_rows, first = self._corpus.caption_numbers[name], self._first[name]
        start, size = held_out_first(index, len(picture_rows))
        numbers = start + rows
        places = np.arange(self.settings.captions)
        caption_rows = [
            picture_rows[number][places % len(picture_rows[number])] for number in numbers
        ]
        counts = numbers >= index * size
        return self._window(
            first + numbers, caption_rows, counts, first - self._first["validation"] + numbers
        )

    def _window(
        self, places: Any, caption_rows: list[np.ndarray], counts: np.ndarray, numbers: np.ndarray
    ) -> Window:
        if self._cache is not None:
            pictures: Any = self._cache.read(places)
        else:
            pictures = self.pixels(places)
        return Window(pictures, np.stack(caption_rows), numbers.astype(np.int32), counts)

    def pixels(self, places: Sequence[int]) -> np.ndarray:
        """Pictures by their place in all parts together, uint8 ``[n, size, size, 3]``.

        Raises:
          UserError: if one is damaged.
        """
        size = self.settings.image_size
        futures = [
            self._threads.submit(captions.pixels, self._pictures[place], size) for place in places
        ]
        return np.stack([future.result() for future in futures])

    def _order_of(self, seed: int, epoch: int) -> np.ndarray:
        if (seed, epoch) not in self._order:
            self._order = {key: order for key, order in self._order.items() if key[1] >= epoch - 1}
            count = len(self._corpus.parts.train)
            generator = np.random.default_rng((seed, epoch, *_ORDER))
            self._order[seed, epoch] = generator.permutation(count)
        return self._order[seed, epoch]

    def _caption_sample(self, rows: np.ndarray, key: tuple[int, int, int]) -> np.ndarray:
        """Some captions of a picture ``[R, T]``; where it has too few, some come twice."""
        count = self.settings.captions
        return rows[np.random.default_rng(key).choice(len(rows), count, replace=len(rows) < count)]

    def _feature_cache(self) -> features.Cache:
        """The features of all pictures, made where they are missing."""
        settings = self.settings
        assert settings.weights is not None
        keeps_regions = settings.captioner == "show_attend_tell"
        regions = regions_of(settings.image_size) if keeps_regions else 0
        path = features.directory(
            digest_of_file(settings.weights),
            self._digest(),
            str(settings.image_size),
            str(regions),
        )
        cache = features.Cache(path, len(self._pictures), regions, resnet.FEATURES)
        if cache.missing():
            params = resnet.read_weights(
                settings.weights, resnet.parameter_shapes(settings.image_size)
            )
            cache.fill(functools.partial(self._make, _encoder(), params), say)
        return cache

    def _make(
        self, encode: Any, params: Any, numbers: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        pooled, regions = [], []
        for start in range(0, len(numbers), _TOGETHER):
            places = list(numbers[start : start + _TOGETHER])
            padded_places = places + places[-1:] * (_TOGETHER - len(places))  # one compilation
            batch = jax.device_get(encode(params, self.pixels(padded_places)))
            pooled.append(batch.pooled[: len(places)])
            regions.append(batch.regions[: len(places)])
        return np.concatenate(pooled), np.concatenate(regions)

    def _digest(self) -> str:
        """Of the pictures: another file of the same name is another picture, and so is one of the
        same number in another prepared set, which its captions tell."""
        digest = hashlib.sha256()
        for picture in self._pictures:
            line = f"{picture.name} {picture.captions}"
            if isinstance(picture.source, Path):
                stat = picture.source.stat()
                line = f"{picture.source.name} {stat.st_size} {stat.st_mtime_ns}"
            digest.update(f"{line}\n".encode())
        return digest.hexdigest()


def _encoder() -> Any:
    encoder = resnet.ResNet()
    return jax.jit(lambda params, pictures: encoder.apply({"params": params}, pictures))


def digest_of_file(path: str) -> str:
    """SHA-256 of a file of weights.

    Raises:
      UserError: if it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"--weights={path} cannot be read: {error.strerror}.") from None
