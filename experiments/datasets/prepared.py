"""Sets that tensorflow-datasets has prepared, read without TensorFlow."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from experiments.settings.errors import UserError

_Taken = TypeVar("_Taken")

_DEFAULT = Path("~", "tensorflow_datasets")


def find(name: str, data_dir: str | None) -> Path | None:
    """The newest prepared version of a set, in ``data_dir`` or in the default directory."""
    default = Path(os.environ.get("TFDS_DATA_DIR", _DEFAULT)).expanduser()
    for root in [*([Path(data_dir)] if data_dir else []), default]:
        versions = {
            tuple(map(int, path.parent.name.split("."))): path.parent
            for path in root.glob(f"{name}/*/dataset_info.json")
            if path.parent.name.replace(".", "").isdecimal()
        }
        if versions:
            return versions[max(versions)]
    return None


def read(path: Path, split: str, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of one split.

    Args:
      path: the directory of one version of the set.
      split: ``"train"`` or ``"test"``.
      shape: of an image.

    Returns:
      uint8 ``[N, *shape]`` and uint8 ``[N]``, in the order of the prepared files, which
      tensorflow-datasets has shuffled once and for all.

    Raises:
      UserError: if tensorflow-datasets is missing or cannot read the files.
    """

    def convert(source: Any) -> tuple[np.ndarray, np.ndarray]:
        images = np.empty((len(source), *shape), np.uint8)
        labels = np.empty(len(source), np.uint8)
        for index, example in enumerate(_examples(source)):
            images[index], labels[index] = example["image"], example["label"]
        return images, labels

    return _load(path, split, convert)


def read_texts(path: Path, split: str) -> tuple[list[str], list[int]]:
    """Texts and labels of one split; for the rest see ``read``."""

    def convert(source: Any) -> tuple[list[str], list[int]]:
        examples = list(_examples(source))
        return [example["text"].decode() for example in examples], [
            int(example["label"]) for example in examples
        ]

    return _load(path, split, convert)


def read_captions(path: Path, split: str) -> tuple[Any, list[list[str]]]:
    """The pictures of one split, as a sequence of examples whose ``"image"`` is the bytes of a
    file, and the captions of each; for the rest see ``read``."""

    def convert(source: Any) -> tuple[Any, list[list[str]]]:
        captions = [
            [text.decode() for text in example["captions"]["text"]] for example in _examples(source)
        ]
        return source, captions

    return _load(path, split, convert, undecoded=("image",))


def _load(
    path: Path, split: str, convert: Callable[[Any], _Taken], undecoded: tuple[str, ...] = ()
) -> _Taken:
    try:
        import tensorflow_datasets as tfds
    except ImportError:
        raise UserError(
            f"{path} needs tensorflow-datasets: pip install tensorflow-datasets array_record."
        ) from None
    try:
        decoders = {name: tfds.decode.SkipDecoding() for name in undecoded}
        builder = tfds.builder_from_directory(str(path))
        return convert(builder.as_data_source(split=split, decoders=decoders or None))
    except Exception as error:  # whatever it makes of a damaged or a foreign file
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"tensorflow-datasets cannot read {path} without TensorFlow ({reason.rstrip('.')}); "
            "sets prepared with --file_format=array_record it can."
        ) from None


def _examples(source: Any) -> Iterator[dict[str, Any]]:
    for start in range(0, len(source), 1000):
        yield from source.__getitems__(range(start, min(start + 1000, len(source))))
