"""Tiny image files in the published formats, and the sets that they make."""

import dataclasses
import gzip
import io
import struct

import numpy as np

from experiments import datasets


def idx(array):
    """An idx file's content."""
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


def batch(images, labels, name=b"testing batch 1 of 1"):
    """A CIFAR-10 batch's content, instruction by instruction as Python 2 pickled it."""
    memo = iter(range(1, 256))

    def put():
        return b"q" + bytes([next(memo)])

    def text(string):
        return b"U" + bytes([len(string)]) + string + put()

    def listed(parts):
        return b"]" + put() + b"(" + b"".join(parts) + b"e"

    pixels = np.ascontiguousarray(images.transpose(0, 3, 1, 2)).tobytes()
    files = [text(b"image_%03d.png" % i) for i in range(len(images))]
    memo = iter(range(1, 256))
    return b"".join(
        [
            *(b"\x80\x02}", put(), b"(", text(b"batch_label"), text(name)),
            *(text(b"labels"), listed([b"K" + bytes([label]) for label in labels])),
            *(text(b"data"), b"cnumpy.core.multiarray\n_reconstruct\n", put()),
            *(b"cnumpy\nndarray\n", put(), b"K\x00\x85U\x01b\x87R", put()),
            *(b"(K\x01M", struct.pack("<H", len(images)), b"M\x00\x0c\x86"),
            *(b"cnumpy\ndtype\n", put(), b"U\x02u1K\x00K\x01\x87R", put()),
            b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89",
            *(b"T", struct.pack("<I", len(pixels)), pixels, b"tb"),
            *(text(b"filenames"), listed(files), b"u."),
        ]
    )


def images(seed, *shape):
    """Random images."""
    return np.random.RandomState(seed).randint(0, 256, shape).astype(np.uint8)


def tiny_source(name, train=10, test=4, classes=10, shape=None):
    """A published set's description with few images: class i % classes for image i."""
    source = datasets.SOURCES[name]

    def counts(size):
        return tuple(np.bincount(np.arange(size) % classes, minlength=classes).tolist())

    return dataclasses.replace(
        source, shape=shape or source.shape, train=counts(train), test=counts(test)
    )


def write_idx_set(folder, source, zipped=True, seed=0):
    """Writes the four files of a set; returns what they hold."""
    height, width, _ = source.shape
    found = []
    for part, files in (("train", source.files[:2]), ("test", source.files[2:])):
        classes = getattr(source, part)
        labels = (np.arange(sum(classes)) % len(classes)).astype(np.uint8)
        pixels = images(seed, len(labels), height, width)
        for name, array in zip(files, (pixels, labels), strict=True):
            content = idx(array)
            path = folder / (name + ".gz" if zipped else name)
            path.write_bytes(gzip.compress(content) if zipped else content)
        found += [pixels[..., None], labels]
        seed += 1
    return found


def write_cifar_set(folder, source):
    """Writes the six batches of a set; returns what they hold."""
    train = images(0, sum(source.train), *source.shape)
    test = images(1, sum(source.test), *source.shape)
    train_labels = (np.arange(len(train)) % 10).astype(np.uint8)
    test_labels = (np.arange(len(test)) % 10).astype(np.uint8)
    parts = [*zip(np.split(train, 5), np.split(train_labels, 5), strict=True)]
    for name, part in zip(source.files, [*parts, (test, test_labels)], strict=True):
        (folder / name).write_bytes(batch(*part))
    return [train, train_labels, test, test_labels]


def prepare(root, name, parts, shape):
    """Lets tensorflow-datasets prepare a set as array_record files, without TensorFlow.

    Args:
      root: a data directory.
      name: of the set.
      parts: split -> (images, labels).
      shape: of an image.
    """
    import tensorflow_datasets as tfds
    from PIL import Image

    def png(image):
        file = io.BytesIO()
        Image.fromarray(image[..., 0] if shape[-1] == 1 else image).save(file, "PNG")
        file.seek(0)
        return file

    class Prepared(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("3.0.1")
        pkg_dir_path = code_path = None  # it has no package of its own

        def _info(self):
            label = tfds.features.ClassLabel(num_classes=10)
            features = {"image": tfds.features.Image(shape=shape), "label": label}
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, _):
            return {split: self._generate_examples(*part) for split, part in parts.items()}

        def _generate_examples(self, part, labels):
            for number, (image, label) in enumerate(zip(part, labels, strict=True)):
                yield number, {"image": png(image), "label": int(label)}

    Prepared.name = name
    Prepared(data_dir=str(root), file_format="array_record").download_and_prepare()
