"""Pictures with captions: COCO 2014 in Karpathy's split, and Flickr8k, from their published files.

What is read here are captions, and where each picture is; pictures are read when they are needed.
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.datasets import prepared
from experiments.datasets.damage import damaged, unreadable
from experiments.settings.errors import UserError

END, UNKNOWN = 0, 1  # numbers that no word has

_PARTS = ("train", "validation", "test")
_COCO_FILE = "dataset_coco.json"
_COCO_SPLITS = {"train": "train", "restval": "train", "val": "validation", "test": "test"}
_COCO_PREPARED = "coco_captions/2014"
_FLICKR_TOKENS = "Flickr8k.token.txt"
_FLICKR_LISTS = {
    "train": "Flickr_8k.trainImages.txt",
    "validation": "Flickr_8k.devImages.txt",
    "test": "Flickr_8k.testImages.txt",
}
_FLICKR_IMAGES = ("Flicker8k_Dataset", "Flickr8k_Dataset", "Images")
_FOLDERS = {"coco": ("coco", "."), "flickr8k": ("flickr8k", "Flickr8k", ".")}
_WORD = re.compile(r"[a-z0-9]+(?:'[a-z]+)?")


class Picture(NamedTuple):
    """A picture and what is said of it.

    Attributes:
      source: its file, or ``(prepared part, number)``.
      captions: as they were written.
      words: of each caption, in small letters, without punctuation.
    """

    source: Path | tuple[Any, int]
    captions: tuple[str, ...]
    words: tuple[tuple[str, ...], ...]

    @property
    def name(self) -> str:
        """What errors call it."""
        if isinstance(self.source, Path):
            return str(self.source)
        return f"picture {self.source[1]} of the prepared set"


class Captions(NamedTuple):
    """The pictures of each part, in the order of their names or of the published file."""

    train: list[Picture]
    validation: list[Picture]
    test: list[Picture]


def read(name: str, data_dir: str | None, restval: bool = True) -> Captions:
    """The captions of a published set.

    Args:
      name: ``"coco"`` or ``"flickr8k"``.
      data_dir: where to look; None: only where tensorflow-datasets prepares its sets.
      restval: whether COCO's validation pictures of no held-out part are for training.

    Raises:
      UserError: if the set is not there, is not complete or is damaged.
    """
    if data_dir is not None and not Path(data_dir).is_dir():
        raise UserError(f"--data_dir={data_dir} is no directory.")
    folders = [Path(data_dir) / subfolder for subfolder in _FOLDERS[name]] if data_dir else []
    marker = _COCO_FILE if name == "coco" else _FLICKR_TOKENS
    folder = next((candidate for candidate in folders if (candidate / marker).is_file()), None)
    if folder is not None:
        captions = _coco(folder, restval) if name == "coco" else _flickr8k(folder)
    elif name == "coco" and (path := prepared.find(_COCO_PREPARED, data_dir)):
        captions = _prepared_coco(path, restval)
    else:
        raise _missing(name, data_dir)
    for part, pictures in zip(_PARTS, captions, strict=True):
        if not pictures:
            raise UserError(f"{folder or data_dir} has no pictures of the {part} part.")
    return captions


def _missing(name: str, data_dir: str | None) -> UserError:
    place = f"in {data_dir}" if data_dir else "here"
    if name == "coco":
        return UserError(
            f"COCO 2014 is not {place}: put dataset_coco.json (Karpathy's split, in "
            "cs.stanford.edu/people/karpathy/deepimagesent/caption_datasets.zip) and the folders "
            "train2014 and val2014 of cocodataset.org into a directory DIR and give "
            "--data_dir=DIR, or, where TensorFlow is, run "
            "`tfds build coco_captions --file_format=array_record` once."
        )
    files = ", ".join([_FLICKR_TOKENS, *_FLICKR_LISTS.values()])
    return UserError(
        f"Flickr8k is not {place}: put {files} and the folder Flicker8k_Dataset, which the "
        "University of Illinois publishes (Hodosh et al., 2013), into a directory DIR and give "
        "--data_dir=DIR."
    )


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise unreadable(path, error) from None
    except UnicodeDecodeError as error:
        raise damaged(path, error.start, "that is not UTF-8") from None


def words_of(caption: str) -> tuple[str, ...]:
    """The words of a caption in small letters, without punctuation."""
    return tuple(_WORD.findall(caption.lower()))


def _files(folder: Path) -> set[str]:
    """The names of what is in a folder; none, if there is no folder."""
    try:
        return {path.name for path in folder.iterdir()}
    except OSError:
        return set()


def _coco(folder: Path, restval: bool) -> Captions:
    path = folder / _COCO_FILE
    try:
        images = json.loads(_text(path))["images"]
        entries = [_coco_entry(image) for image in images]
    except json.JSONDecodeError as error:
        raise damaged(path, error.pos, "that is not JSON") from None
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is not Karpathy's split: {type(error).__name__} {error}."
        ) from None
    parts: dict[str, list[Picture]] = {part: [] for part in _PARTS}
    listings = {place: _files(folder / place) for place in {entry[0] for entry in entries}}
    for place, name, split, captions, words in entries:
        file = folder / place / name
        if split == "restval" and not restval:
            continue
        if split not in _COCO_SPLITS:
            raise UserError(f"{path}: {name} has the split {split!r}, which Karpathy's has not.")
        if not captions:
            raise UserError(f"{path}: {name} has no captions.")
        if name not in listings[place]:
            raise UserError(f"{path} has captions of {file}, and there is no such picture.")
        parts[_COCO_SPLITS[split]].append(Picture(file, captions, words))
    return Captions(**parts)


def _coco_entry(image: Any) -> tuple[str, str, str, tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Folder, file, split, captions and their words, each held to its type."""
    sentences = image["sentences"]
    captions = tuple(_typed(sentence["raw"], str) for sentence in sentences)
    words = tuple(
        tuple(_typed(word, str) for word in _typed(sentence["tokens"], list))
        for sentence in sentences
    )
    names = (_typed(image[key], str) for key in ("filepath", "filename", "split"))
    place, name, split = names
    for component in (place, name):  # a name leads to no other folder
        if not component or component in (".", "..") or "/" in component or "\0" in component:
            raise ValueError(f"{component!r} is no name of a file")
    return place, name, split, captions, words


def _typed(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{str(value)[:40]!r} is no {kind.__name__}")
    return value


def _flickr8k(folder: Path) -> Captions:
    path = folder / _FLICKR_TOKENS
    captions: dict[str, list[str]] = {}
    for number, line in enumerate(_text(path).splitlines(), start=1):
        name, tab, caption = line.partition("\t")
        name, mark, _ = name.partition("#")
        if not (tab and mark and name and caption.strip()):
            raise UserError(f"{path}, line {number}: it must be NAME#NUMBER, a tab and a caption.")
        captions.setdefault(name, []).append(caption.strip())
    images = next((folder / name for name in _FLICKR_IMAGES if (folder / name).is_dir()), None)
    if images is None:
        raise UserError(f"Flickr8k in {folder} is not complete: Flicker8k_Dataset is missing.")
    image_names = _files(images)
    parts: dict[str, list[Picture]] = {}
    for part, list_name in _FLICKR_LISTS.items():
        if not (folder / list_name).is_file():
            raise UserError(f"Flickr8k in {folder} is not complete: {list_name} is missing.")
        parts[part] = []
        for name in _text(folder / list_name).split():
            if name not in captions:
                raise UserError(f"{path} has no captions of {name}, which is in {list_name}.")
            if name not in image_names:
                raise UserError(
                    f"{folder / list_name} names {images / name}, and there is no such picture."
                )
            texts = tuple(captions[name])
            parts[part].append(Picture(images / name, texts, tuple(map(words_of, texts))))
    return Captions(**parts)


def _prepared_coco(path: Path, restval: bool) -> Captions:
    parts: dict[str, list[Picture]] = {part: [] for part in _PARTS}
    for split, part in _COCO_SPLITS.items():
        if split == "restval" and not restval:
            continue
        source, captions = prepared.read_captions(path, split)
        for number, texts in enumerate(captions):
            if not texts:
                raise UserError(f"{path}: picture {number} of {split} has no captions.")
            words = tuple(map(words_of, texts))
            parts[part].append(Picture((source, number), tuple(texts), words))
    return Captions(**parts)


def vocabulary(pictures: Iterable[Picture], min_count: int) -> list[str]:
    """The words that captions have more often than ``min_count`` times, the most frequent ones
    first; before them the end and the unknown word."""
    counts = Counter(word for picture in pictures for words in picture.words for word in words)
    frequent_words = [word for word, count in counts.items() if count > min_count]
    return ["", "<unknown>", *sorted(frequent_words, key=lambda word: (-counts[word], word))]


def numbered(picture: Picture, numbers: dict[str, int], length: int) -> np.ndarray:
    """A picture's captions as numbers, int32 ``[captions, length + 1]``, ``END`` from their ends
    on; longer ones are cut."""
    rows = np.full((len(picture.words), length + 1), END, np.int32)
    for row, words in zip(rows, picture.words, strict=True):
        prefix = words[:length]
        row[: len(prefix)] = [numbers.get(word, UNKNOWN) for word in prefix]
    return rows


def pixels(picture: Picture, size: int) -> np.ndarray:
    """A picture squeezed to a square, uint8 ``[size, size, 3]``.

    Args:
      picture: the picture.
      size: pixels of a side.

    Raises:
      UserError: if Pillow is not installed, or the picture cannot be read or is damaged.
    """
    try:
        from PIL import Image
    except ImportError:
        raise UserError("pictures need Pillow: pip install pillow.") from None
    try:
        if isinstance(picture.source, Path):
            content = picture.source.read_bytes()
        else:
            source, number = picture.source
            content = source[number]["image"]
    except OSError as error:
        raise unreadable(Path(picture.name), error) from None
    try:
        with Image.open(io.BytesIO(content)) as image:
            image.draft("RGB", (size, size))  # a JPEG in an eighth of the work, if it is large
            square = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
    except Exception as error:  # whatever Pillow makes of bytes that are no picture
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise UserError(f"{picture.name} is damaged: {_without_object(reason)}.") from None
    return np.asarray(square)


def _without_object(reason: str) -> str:
    return re.sub(r" <[^>]*>", "", reason)


def flat(captions: Sequence[Picture]) -> list[list[str]]:
    """The captions of each picture as they were written."""
    return [list(picture.captions) for picture in captions]
