"""Readers of image files: the published formats, and what damage makes of them."""

import gzip
import pickle
import struct
import sys
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import datasets
from experiments.datasets import cifar, prepared
from experiments.datasets.idx import read_idx
from experiments.settings.errors import UserError
from tests.experiments import image_files

PIXELS = image_files.images(3, 5, 4, 3)
CONTENT = image_files.idx(PIXELS)
IMAGES = image_files.images(4, 2, 32, 32, 3)
BATCH = image_files.batch(IMAGES, [7, 2])


def complaint(function, *arguments):
    """The sentence of the error."""
    with pytest.raises(UserError) as caught:
        function(*arguments)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert sentence.endswith(".")
    return sentence


def write(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("zipped", [False, True])
def test_idx(tmp_path, zipped):
    name, content = ("a.gz", gzip.compress(CONTENT)) if zipped else ("a", CONTENT)
    array = read_idx(write(tmp_path, name, content), (5, 4, 3))
    np.testing.assert_array_equal(array, PIXELS)
    assert array.dtype == np.uint8


ZIPPED = gzip.compress(CONTENT, mtime=0)
DAMAGED_IDX = {
    "nothing": ("a", b"", 0, "ends 16 bytes too early"),
    "header cut": ("a", CONTENT[:9], 9, "ends 7 bytes too early"),
    "body cut": ("a", CONTENT[:-3], 73, "ends 3 bytes too early"),
    "too long": ("a", CONTENT + b"x", 76, "there is more"),
    "magic": ("a", b"\0\0\x0d\x03" + CONTENT[4:], 0, "magic number is 00000d03, not 00000803"),
    "labels": ("a", image_files.idx(PIXELS[:, 0, 0]) * 4, 0, "magic number is 00000801"),
    "count": ("a", CONTENT[:7] + b"\6" + CONTENT[8:], 4, "dimension 0 is 6"),
    "width": ("a", CONTENT[:12] + b"\xff" * 4 + CONTENT[16:], 12, "dimension 2 is 4294967295"),
    "gz nothing": ("a.gz", b"", 0, "ends 16 bytes too early"),
    "gz cut": ("a.gz", ZIPPED[:-12], None, "cut short"),
    "gz end cut": ("a.gz", ZIPPED[:-3], 76, "cut short"),
    "gz is none": ("a.gz", CONTENT, 0, "Not a gzipped file"),
    "gz sum": ("a.gz", ZIPPED[:-8] + b"\0" * 8, 76, "CRC check failed"),
    "gz rubbish": ("a.gz", ZIPPED + b"rubbish", 76, "Not a gzipped file"),
    "gz too long": ("a.gz", gzip.compress(CONTENT + b"x"), 76, "there is more"),
    "gz count": ("a.gz", gzip.compress(CONTENT[:-3]), 73, "ends 3 bytes too early"),
}


@pytest.mark.parametrize("case", DAMAGED_IDX)
def test_damaged_idx(tmp_path, case):
    name, content, offset, reason = DAMAGED_IDX[case]
    path = write(tmp_path, name, content)
    sentence = complaint(read_idx, path, (5, 4, 3))
    assert sentence.startswith(f"{path} is damaged at byte {'' if offset is None else offset}")
    assert reason in sentence


def test_a_large_count_costs_no_memory(tmp_path):
    content = bytes([0, 0, 8, 3]) + struct.pack(">3I", 2**32 - 1, 2**32 - 1, 2**32 - 1)
    bomb = zlib.compressobj(wbits=31)
    zeros = bomb.compress(CONTENT) + bomb.compress(bytes(2**26)) + bomb.flush()
    tracemalloc.start()
    complaint(read_idx, write(tmp_path, "a", content), (5, 4, 3))
    complaint(read_idx, write(tmp_path, "b.gz", zeros), (5, 4, 3))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**22


def test_cifar_batch(tmp_path):
    pixels, labels = cifar.read_batch(write(tmp_path, "a", BATCH), 2)
    np.testing.assert_array_equal(pixels, IMAGES)
    np.testing.assert_array_equal(labels, [7, 2])
    assert (pixels.dtype, labels.dtype) == (np.uint8, np.uint8)


def test_the_batches_of_these_tests_are_pickles():
    batch = pickle.loads(BATCH, encoding="bytes")
    planes = batch[b"data"].reshape(2, 3, 32, 32)
    np.testing.assert_array_equal(planes.transpose(0, 2, 3, 1), IMAGES)
    assert batch[b"labels"] == [7, 2]
    assert batch[b"filenames"][1] == b"image_001.png"


def executes():
    class Attack:
        def __reduce__(self):
            return sys.exit, (3,)

    return pickle.dumps(Attack(), 2)


DAMAGED_BATCH = {
    "nothing": (b"", 0, "cut short"),
    "cut": (BATCH[:4000], 4000, "cut short"),
    "end cut": (BATCH[:-1], len(BATCH) - 1, "cut short"),
    "too long": (BATCH + b"x", len(BATCH) - 1, "ends before the file does"),
    "no pickle": (b"tar\0" * 99, 0, "finds the wrong things"),
    "protocol 4": (pickle.dumps({}, 4), 0, "no pickle of protocol 2"),
    "executes": (executes(), 2, "an object that no batch needs"),
    "no data": (b"\x80\x02}q\0.", 6, "no array 'data'"),
    "label": (BATCH.replace(b"K\x07", b"K\x0b"), len(BATCH), "label 0 is no number"),
    "a label less": (BATCH.replace(b"K\x07", b""), len(BATCH) - 2, "1 labels for 2 images"),
    "shape": (BATCH.replace(b"M\x00\x0c\x86", b"M\x01\x0c\x86"), None, "in the shape (2, 3073)"),
    "count": (BATCH.replace(b"M\x02\x00", b"M\x03\x00"), None, "in the shape (3, 3072)"),
    "floats": (BATCH.replace(b"u1K", b"f8K"), None, "not of bytes"),
    "memo": (b"\x80\x02}r\xff\xff\xff\xff.", 3, "memo number 4294967295 is too large"),
    "huge": (BATCH + bytes(1 << 21), None, "too long for 2 images"),
}


@pytest.mark.parametrize("case", DAMAGED_BATCH)
def test_damaged_batch(tmp_path, case):
    content, offset, reason = DAMAGED_BATCH[case]
    path = write(tmp_path, "data_batch_1", content)
    sentence = complaint(cifar.read_batch, path, 2)
    assert sentence.startswith(f"{path} is damaged at byte {'' if offset is None else offset}")
    assert reason in sentence


KINDS = {"a": CONTENT, "a.gz": ZIPPED, "batch": BATCH}


@st.composite
def mutated(draw):
    """(kind, content): a file with a few bytes changed, lost, put in, or cut off."""
    kind = draw(st.sampled_from(sorted(KINDS)))
    content = bytearray(KINDS[kind])
    for _ in range(draw(st.integers(1, 3))):
        near = draw(st.sampled_from([20, 120, 300, len(content)]))
        at = draw(st.integers(0, max(0, min(near, len(content)) - 1)))
        if draw(st.booleans()):  # near the end as often as near the beginning
            at = max(0, len(content) - 1 - at)
        some = draw(st.binary(min_size=1, max_size=5))
        how = draw(st.sampled_from(["change", "lose", "put in", "cut"]))
        if how == "cut":
            del content[at:]
        else:
            content[at : at + (0 if how == "put in" else len(some))] = (
                b"" if how == "lose" else some
            )
    return kind, bytes(content)


@settings(max_examples=2000, deadline=None, database=None)
@given(file=mutated())
@pytest.mark.long
def test_mutated_files_give_a_sentence_or_what_they_hold(tmp_path_factory, file):
    kind, content = file
    path = tmp_path_factory.getbasetemp() / f"mutated_{kind}"
    path.write_bytes(content)
    try:
        if kind == "batch":
            pixels, labels = cifar.read_batch(path, 2)
        else:
            array = read_idx(path, (5, 4, 3))
    except UserError as error:
        assert str(error).startswith(f"{path} is damaged at byte ")
        assert "\n" not in str(error)
        return
    if kind == "batch":  # it is harmless, so Python's own reader may say what it holds
        batch = pickle.loads(content, encoding="bytes")
        planes = np.asarray(batch[b"data"]).reshape(2, 3, 32, 32)
        np.testing.assert_array_equal(pixels, planes.transpose(0, 2, 3, 1))
        assert labels.tolist() == batch[b"labels"]
    else:
        whole = gzip.decompress(content) if kind == "a.gz" else content
        assert image_files.idx(array) == whole


@pytest.fixture
def tiny_sets(monkeypatch, tmp_path):
    """Few images in every set, and no prepared sets; the default directory of the latter."""
    for name in ("mnist", "fashion_mnist"):
        monkeypatch.setitem(datasets.SOURCES, name, image_files.tiny_source(name, 20, 10))
    monkeypatch.setitem(datasets.SOURCES, "cifar10", image_files.tiny_source("cifar10", 10, 10))
    default = tmp_path / "prepared"
    default.mkdir()
    monkeypatch.setenv("TFDS_DATA_DIR", str(default))
    return default


def assert_holds(images, expected):
    for array, right in zip(images, expected, strict=True):
        np.testing.assert_array_equal(array, right)
        assert array.dtype == np.uint8


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("folder", ["", "mnist", "MNIST/raw"])
def test_raw_files(tmp_path, tiny_sets, folder, zipped):
    where = tmp_path / "data" / folder
    where.mkdir(parents=True)
    expected = image_files.write_idx_set(where, datasets.SOURCES["mnist"], zipped)
    assert_holds(datasets.load("mnist", str(tmp_path / "data")), expected)


def test_cifar_files(tmp_path, tiny_sets):
    expected = image_files.write_cifar_set(tmp_path, datasets.SOURCES["cifar10"])
    assert_holds(datasets.load("cifar10", str(tmp_path)), expected)


def test_sets_with_the_same_file_names_lie_side_by_side(tmp_path, tiny_sets):
    for seed, name in ((0, "mnist"), (5, "fashion_mnist")):
        (tmp_path / name).mkdir()
        image_files.write_idx_set(tmp_path / name, datasets.SOURCES[name], seed=seed)
    mnist, fashion = (datasets.load(name, str(tmp_path)) for name in ("mnist", "fashion_mnist"))
    assert not np.array_equal(mnist.train_images, fashion.train_images)


def test_another_set_is_noticed(tmp_path, tiny_sets, monkeypatch):
    image_files.write_idx_set(tmp_path, datasets.SOURCES["mnist"])
    counts = (1, 3, *[2] * 8)
    source = image_files.tiny_source("fashion_mnist", 20, 10)
    fashion = source.__class__(**{**vars(source), "train": counts})
    monkeypatch.setitem(datasets.SOURCES, "fashion_mnist", fashion)
    sentence = complaint(datasets.load, "fashion_mnist", str(tmp_path))
    assert "this is not Fashion-MNIST: the labels of its train part count 2 2 2" in sentence


def test_a_label_out_of_range_has_an_offset(tmp_path, tiny_sets):
    image_files.write_idx_set(tmp_path, datasets.SOURCES["mnist"], zipped=False)
    path = tmp_path / "t10k-labels-idx1-ubyte"
    content = bytearray(path.read_bytes())
    content[8 + 6] = 10
    path.write_bytes(content)
    assert f"{path} is damaged at byte 14" in complaint(datasets.load, "mnist", str(tmp_path))


def test_missing_sets_are_named(tmp_path, tiny_sets):
    sentence = complaint(datasets.load, "mnist", str(tmp_path))
    for part in (str(tmp_path), "t10k-labels-idx1-ubyte.gz", "yann.lecun.com", "--data_dir=DIR"):
        assert part in sentence
    sentence = complaint(datasets.load, "cifar10", None)
    for part in ("data_batch_5, test_batch", "cs.toronto.edu", "tfds build cifar10"):
        assert part in sentence
    assert "zalandoresearch" in complaint(datasets.load, "fashion_mnist", None)


def test_incomplete_and_wrong_directories_are_named(tmp_path, tiny_sets):
    image_files.write_idx_set(tmp_path, datasets.SOURCES["mnist"])
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    sentence = complaint(datasets.load, "mnist", str(tmp_path))
    assert f"MNIST in {tmp_path} is not complete: t10k-labels-idx1-ubyte of yann" in sentence
    assert "no directory" in complaint(datasets.load, "mnist", str(tmp_path / "nowhere"))
    assert "come with it" in complaint(datasets.load, "digits", str(tmp_path))


def test_digits():
    images = datasets.load("digits", None)
    assert images.train_images.shape == (1437, 8, 8, 1)
    assert images.test_images.shape == (360, 8, 8, 1)
    assert images.train_images.max() == 16
    everything = np.concatenate([images.train_images, images.test_images]).reshape(1797, 64)
    assert len({image.tobytes() for image in everything}) == 1797


@pytest.mark.filterwarnings("ignore")  # what tensorflow-datasets and its parts deprecate
def test_prepared_sets(tmp_path, tiny_sets):
    source = datasets.SOURCES["mnist"]
    raw = tmp_path / "raw"
    raw.mkdir()
    held = image_files.write_idx_set(raw, source)
    parts = {"train": held[:2], "test": held[2:]}
    image_files.prepare(tiny_sets, "mnist", parts, source.shape)
    assert "tensorflow" not in sys.modules

    for data_dir in (None, str(tmp_path), str(tiny_sets)):
        images = datasets.load("mnist", data_dir)
        assert "tensorflow" not in sys.modules
        for found, labels, (pixels, right) in (
            (images.train_images, images.train_labels, parts["train"]),
            (images.test_images, images.test_labels, parts["test"]),
        ):
            expected = {image.tobytes(): label for image, label in zip(pixels, right, strict=True)}
            actual = {image.tobytes(): label for image, label in zip(found, labels, strict=True)}
            assert actual == expected
            assert found.shape == pixels.shape
    assert_holds(datasets.load("mnist", str(raw)), held)  # raw files come first

    path = prepared.find("mnist", None)
    (path / "features.json").write_text("{")
    sentence = complaint(datasets.load, "mnist", None)
    assert f"cannot read {path} without TensorFlow" in sentence


def test_the_newest_prepared_version_is_found(tmp_path, tiny_sets):
    for version in ("3.0.1", "10.0.0", "9.0.0", "downloads", "10.0.0.incomplete1"):
        (tmp_path / "mnist" / version).mkdir(parents=True)
        (tmp_path / "mnist" / version / "dataset_info.json").touch()
    assert prepared.find("mnist", str(tmp_path)) == tmp_path / "mnist" / "10.0.0"
    assert prepared.find("cifar10", str(tmp_path)) is None
