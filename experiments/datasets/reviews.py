"""IMDB's reviews of films (Maas et al., 2011): published files -> words as numbers.

Letters: N reviews, T words of a review that are kept.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.datasets import prepared
from experiments.datasets.damage import damaged, unreadable
from experiments.settings.errors import UserError

COUNT = 25_000  # published reviews of each part, half of them in favour
PADDING, UNKNOWN = 0, 1  # numbers that no word has

_WORD = re.compile(r"[a-z0-9]+(?:'[a-z]+)?|[.,!?]")
_FOLDERS = ("aclImdb", "imdb/aclImdb", ".")
_PREPARED = "imdb_reviews/plain_text"
_VERDICTS = ("neg", "pos")


class Reviews(NamedTuple):
    """Words int32 ``[N, T]``, with padding in front; verdicts bool ``[N]``: in favour or not."""

    words: np.ndarray
    verdicts: np.ndarray


def read(
    data_dir: str | None, length: int, vocabulary: int, count: int = COUNT
) -> tuple[Reviews, Reviews]:
    """The reviews to train on and those to test on.

    Args:
      data_dir: where to look; None: only where tensorflow-datasets prepares its sets.
      length: T; of longer reviews the last words are kept.
      vocabulary: so many of the most frequent words of the training part have numbers, from 2 on.
      count: N.

    Raises:
      UserError: if the set is not there, is damaged, or is another one.
    """
    if data_dir is not None and not Path(data_dir).is_dir():
        raise UserError(f"--data_dir={data_dir} is no directory.")
    folders = [Path(data_dir) / name for name in _FOLDERS] if data_dir else []
    raw_folder = next((folder for folder in folders if (folder / "train" / "pos").is_dir()), None)
    if raw_folder:
        parts = [_read_raw(raw_folder / part) for part in ("train", "test")]
    elif path := prepared.find(_PREPARED, data_dir):
        parts = [prepared.read_texts(path, part) for part in ("train", "test")]
    else:
        place = f"in {data_dir}" if data_dir else "here"
        raise UserError(
            f"IMDB's reviews are not {place}: put the folder aclImdb of ai.stanford.edu/~amaas/"
            "data/sentiment into a directory DIR and give --data_dir=DIR, or, where TensorFlow is, "
            "run `tfds build imdb_reviews --file_format=array_record` once."
        )
    for name, (texts, labels) in zip(("train", "test"), parts, strict=True):
        if (len(texts), sum(labels)) != (count, count // 2):
            raise UserError(
                f"these are not IMDB's reviews: the {name} part has {len(texts):,}, "
                f"{sum(labels):,} of them in favour, "
                f"the published one {count:,} and {count // 2:,}."
            )
    words = [[_WORD.findall(_plain(text)) for text in texts] for texts, _ in parts]
    numbers = _numbers(words[0], vocabulary)
    train, test = (
        Reviews(_padded(part_words, numbers, length), np.array(labels, bool))
        for part_words, (_, labels) in zip(words, parts, strict=True)
    )
    return train, test


def _plain(text: str) -> str:
    return text.lower().replace("<br />", " ")


def _read_raw(folder: Path) -> tuple[list[str], list[int]]:
    """Texts and verdicts, the reviews against a film first, in the order of their names."""
    texts, labels = [], []
    for label, verdict in enumerate(_VERDICTS):
        if not (folder / verdict).is_dir():
            raise UserError(f"IMDB's reviews are not complete: {folder / verdict} is missing.")
        for path in sorted((folder / verdict).glob("*.txt")):
            try:
                content = path.read_bytes()
                texts.append(content.decode())
            except OSError as error:
                raise unreadable(path, error) from None
            except UnicodeDecodeError as error:
                raise damaged(path, error.start, "that is not UTF-8") from None
            if not texts[-1].strip():
                raise damaged(path, 0, "there are no words")
            labels.append(label)
    return texts, labels


def _numbers(reviews: Sequence[Sequence[str]], vocabulary: int) -> dict[str, int]:
    counts: dict[str, int] = {}
    for review in reviews:
        for word in review:
            counts[word] = counts.get(word, 0) + 1
    ranking = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: rank + 2 for rank, word in enumerate(ranking[:vocabulary])}


def _padded(reviews: Sequence[Sequence[str]], numbers: dict[str, int], length: int) -> np.ndarray:
    words = np.full((len(reviews), length), PADDING, np.int32)
    for row, review in enumerate(reviews):
        tail = [numbers.get(word, UNKNOWN) for word in review[-length:]]
        if tail:
            words[row, -len(tail) :] = tail
    return words
