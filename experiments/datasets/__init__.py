"""Image sets: published files -> uint8 arrays. Nothing is downloaded.

A set is looked for in this order: its raw published files in ``data_dir``; a version that
tensorflow-datasets has prepared, in ``data_dir`` or in its own directory;
for the digits alone, what comes with scikit-learn.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.datasets import cifar, prepared
from experiments.datasets.damage import damaged
from experiments.datasets.idx import read_idx
from experiments.settings.errors import UserError

__all__ = ["SOURCES", "Images", "Source", "load"]


class Images(NamedTuple):
    """Images uint8 ``[N, height, width, channels]`` and labels uint8 ``[N]``, of both parts."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


@dataclasses.dataclass(frozen=True)
class Source:
    """A published set.

    Attributes:
      title: its name as people know it.
      prepared: its name in tensorflow-datasets; none: ``""``.
      folders: where its files may lie in a data directory, besides there themselves.
      files: its raw files: images and labels to train on, then those to test on (idx), or the
        batches, the last one to test on.
      published: where these are published.
      shape: of an image: height, width, channels.
      maximum: the largest value of a pixel.
      train: how many images of each class there are to train on.
      test: how many there are to test on.
    """

    title: str
    prepared: str
    folders: tuple[str, ...]
    files: tuple[str, ...]
    published: str
    shape: tuple[int, int, int]
    maximum: int
    train: tuple[int, ...]
    test: tuple[int, ...]


_IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)

SOURCES = {
    "digits": Source(
        title="the digits of scikit-learn",
        prepared="",
        folders=(),
        files=(),
        published="",
        shape=(8, 8, 1),
        maximum=16,
        train=(134, 144, 143, 147, 140, 149, 150, 149, 135, 146),
        test=(44, 38, 34, 36, 41, 33, 31, 30, 39, 34),
    ),
    "mnist": Source(
        title="MNIST",
        prepared="mnist",
        folders=("mnist", "MNIST/raw"),
        files=_IDX_FILES,
        published="yann.lecun.com/exdb/mnist",
        shape=(28, 28, 1),
        maximum=255,
        train=(5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949),
        test=(980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009),
    ),
    "fashion_mnist": Source(
        title="Fashion-MNIST",
        prepared="fashion_mnist",
        folders=("fashion_mnist", "FashionMNIST/raw"),
        files=_IDX_FILES,
        published="github.com/zalandoresearch/fashion-mnist",
        shape=(28, 28, 1),
        maximum=255,
        train=(6000,) * 10,
        test=(1000,) * 10,
    ),
    "cifar10": Source(
        title="CIFAR-10",
        prepared="cifar10",
        folders=("cifar10", "cifar-10-batches-py"),
        files=(*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"),
        published="www.cs.toronto.edu/~kriz/cifar.html",
        shape=cifar.SHAPE,
        maximum=255,
        train=(5000,) * 10,
        test=(1000,) * 10,
    ),
}


def load(name: str, data_dir: str | None) -> Images:
    """The images of a set.

    Args:
      name: a key of ``SOURCES``.
      data_dir: where to look; None: only where tensorflow-datasets prepares its sets.

    Raises:
      UserError: if the set is not there, is damaged, or is another one.
    """
    source = SOURCES[name]
    if not source.files:
        if data_dir:
            raise UserError(f"--data_dir is not for {source.title}: they come with it.")
        images = _digits(source)
    elif raw_paths := _raw(source, data_dir):
        images = _read_raw(source, raw_paths)
    elif path := prepared.find(source.prepared, data_dir):
        train = prepared.read(path, "train", source.shape)
        images = Images(*train, *prepared.read(path, "test", source.shape))
    else:
        raise _missing(source, data_dir)
    for part, labels, classes in (
        ("train", images.train_labels, source.train),
        ("test", images.test_labels, source.test),
    ):
        counts = tuple(np.bincount(labels, minlength=len(classes)).tolist())
        if counts != classes:
            raise UserError(
                f"this is not {source.title}: the labels of its {part} part count "
                f"{_count_text(counts)} by class, the published ones {_count_text(classes)}."
            )
    return images


def _count_text(counts: tuple[int, ...]) -> str:
    return " ".join(map(str, counts))


def _raw(source: Source, data_dir: str | None) -> list[Path]:
    """The raw files of a set, in a folder of its own or in ``data_dir`` itself; or none.

    Raises:
      UserError: if some of them are missing.
    """
    if data_dir is None:
        return []
    root = Path(data_dir)
    if not root.is_dir():
        raise UserError(f"--data_dir={data_dir} is no directory.")
    for folder in (*(root / name for name in source.folders), root):
        candidates = [(folder / name, folder / f"{name}.gz") for name in source.files]
        present = [next((path for path in pair if path.is_file()), None) for pair in candidates]
        paths = [path for path in present if path is not None]
        if len(paths) == len(source.files):
            return paths
        if paths:
            missing = [source.files[i] for i, path in enumerate(present) if path is None]
            raise UserError(
                f"{source.title} in {folder} is not complete: {', '.join(missing)} of "
                f"{source.published} is missing."
            )
    return []


def _read_raw(source: Source, paths: list[Path]) -> Images:
    train, test = sum(source.train), sum(source.test)
    if source.files != _IDX_FILES:
        batches = [cifar.read_batch(path, train // (len(paths) - 1)) for path in paths[:-1]]
        images, labels = (np.concatenate(pieces) for pieces in zip(*batches, strict=True))
        return Images(images, labels, *cifar.read_batch(paths[-1], test))
    height, width, _ = source.shape
    arrays = []
    for (images_path, labels_path), count in ((paths[:2], train), (paths[2:], test)):
        labels = read_idx(labels_path, (count,))
        if labels.max() >= len(source.train):
            raise damaged(labels_path, 8 + int(labels.argmax()), "there is no such class")
        arrays += [read_idx(images_path, (count, height, width))[..., None], labels]
    return Images(*arrays)


def _digits(source: Source) -> Images:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError(f"{source.title} need it: pip install scikit-learn.") from None
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, *source.shape).astype(np.uint8)
    # The set has no test part of its own, and its writers take turns: it is split by chance.
    order = np.random.RandomState(42).permutation(len(images))
    train, test = np.split(order, [sum(source.train)])
    labels = labels.astype(np.uint8)
    return Images(images[train], labels[train], images[test], labels[test])


def _missing(source: Source, data_dir: str | None) -> UserError:
    suffix = ".gz" if source.files == _IDX_FILES else ""
    files = ", ".join(name + suffix for name in source.files)
    place = f"in {data_dir}" if data_dir else "here"
    return UserError(
        f"{source.title} is not {place}: put {files} from {source.published} into a directory DIR "
        f"and give --data_dir=DIR, or, where TensorFlow is, run "
        f"`tfds build {source.prepared} --file_format=array_record` once."
    )
