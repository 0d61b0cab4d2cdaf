"""Pictures from files: COCO's and Flickr8k's folders, damage, kept features, ResNet's parts."""

import json
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from PIL import Image

from experiments.captioning import features, pictures, resnet, scoring
from experiments.captioning import task as captioning_task
from experiments.captioning.features import Cache
from experiments.captioning.model import END
from experiments.captioning.settings import CAPTIONING
from experiments.datasets import captions
from experiments.settings.errors import UserError
from experiments.settings.resolver import resolve
from experiments.training.learner import Learner
from tests.experiments.support import ROOT, environment, own_caches, run_source

PARTS = {"train": 12, "val": 4, "test": 4}  # 20 pictures


def picture(path, number):
    """A JPEG of one colour that its number decides."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new("RGB", (40 + number, 30), (12 * number, 255 - 12 * number, 60))
    image.save(path, quality=100, subsampling=0)


def spoken(number):
    """Two captions; the last word of the first is the picture's own."""
    return [f"A big Dog runs, no. {number}", "the dog isn't here!"]


def coco(folder):
    """COCO's layout: Karpathy's file and two folders."""
    images = []
    splits = [split for split, count in PARTS.items() for _ in range(count)]
    for number, split in enumerate(splits):
        split = "restval" if number in (10, 11) else split
        place = "train2014" if split == "train" else "val2014"
        name = f"COCO_{place}_{number:012d}.jpg"
        picture(folder / place / name, number)
        sentences = [{"raw": raw, "tokens": list(captions.words_of(raw))} for raw in spoken(number)]
        image = {"filepath": place, "filename": name, "split": split, "sentences": sentences}
        images.append(image)
    (folder / "dataset_coco.json").write_text(json.dumps({"images": images, "dataset": "coco"}))
    return folder


def flickr8k(folder):
    """Flickr8k's layout: a file of captions, three lists, a folder."""
    lines, number = [], 0
    for part, count in zip(("train", "dev", "test"), PARTS.values(), strict=True):
        names = [f"{number + at}_abc.jpg" for at in range(count)]
        for name in names:
            picture(folder / "Flicker8k_Dataset" / name, number)
            lines += [f"{name}#{at}\t{text}" for at, text in enumerate(spoken(number))]
            number += 1
        (folder / f"Flickr_8k.{part}Images.txt").write_text("\n".join(names) + "\n")
    lines.append("never_listed.jpg#0\tA caption of a picture that no list names .")
    (folder / "Flickr8k.token.txt").write_text("\n".join(lines))
    return folder


MAKERS = {"coco": coco, "flickr8k": flickr8k}


@pytest.fixture(autouse=True)
def no_prepared_sets(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "prepared"))
    own_caches(monkeypatch, tmp_path / "caches")
    pictures.corpus.cache_clear()
    captioning_task._TOKENISED.clear()


@pytest.mark.parametrize("name", MAKERS)
def test_twenty_pictures(name, tmp_path):
    MAKERS[name](tmp_path)
    parts = captions.read(name, str(tmp_path))
    assert [len(part) for part in parts] == list(PARTS.values())
    for number, one in enumerate([one for part in parts for one in part]):
        assert one.captions == tuple(spoken(number))
        assert one.words[0] == ("a", "big", "dog", "runs", "no", str(number))
        assert one.words[1] == ("the", "dog", "isn't", "here")
        pixels = captions.pixels(one, 32)
        assert pixels.shape == (32, 32, 3)
        colour = np.array([12 * number, 255 - 12 * number, 60])
        # JPEG rounds each pixel's luminance and chrominance, so that one is off by 1 at most.
        assert np.abs(pixels.astype(int) - colour).max() <= 1
    if name == "coco":
        assert len(captions.read(name, str(tmp_path), restval=False).train) == 10


def test_words_by_frequency(tmp_path):
    parts = captions.read("flickr8k", str(flickr8k(tmp_path)))
    words = captions.vocabulary(parts.train, 5)
    assert words == ["", "<unknown>", "dog", "a", "big", "here", "isn't", "no", "runs", "the"]
    numbers = {word: at for at, word in enumerate(words)}
    rows = captions.numbered(parts.test[0], numbers, 5)
    assert rows.tolist() == [[3, 4, 2, 8, 7, END], [9, 2, 6, 5, END, END]]  # the sixth is cut
    assert captions.numbered(parts.test[0], numbers, 7)[0, 5] == captions.UNKNOWN


def edited(change):
    def edit(folder):
        path = folder / "dataset_coco.json"
        content = json.loads(path.read_text())
        change(content["images"])
        path.write_text(json.dumps(content))

    return edit


def remove(name):
    return lambda folder: next(folder.rglob(name)).unlink()


def write(name, content):
    return lambda folder: next(folder.rglob(name)).write_bytes(content)


DAMAGE = [
    ("coco", write("dataset_coco.json", b'{"images": ['), r"dataset_coco.json is damaged at byte"),
    ("coco", write("dataset_coco.json", b"\xff"), r"dataset_coco.json is damaged at byte 0"),
    ("coco", write("dataset_coco.json", b"[]"), r"is not Karpathy's split"),
    ("coco", edited(lambda of: of[3].update(sentences=[])), r"0003.jpg has no captions"),
    ("coco", edited(lambda of: of[3].update(split="more")), r"0003.jpg has the split 'more'"),
    ("coco", edited(lambda of: of[3].update(filepath="..")), r"'\.\.' is no name of a file"),
    ("coco", edited(lambda of: of[3].pop("filename")), r"KeyError 'filename'"),
    ("coco", edited(lambda of: of.clear()), r"no pictures of the train part"),
    ("coco", remove("COCO_train2014_000000000004.jpg"), r"0004.jpg, and there is no such picture"),
    ("flickr8k", remove("4_abc.jpg"), r"names .*4_abc.jpg, and there is no such picture"),
    ("flickr8k", remove("Flickr_8k.devImages.txt"), r"Flickr_8k.devImages.txt is missing"),
    (
        "flickr8k",
        write("Flickr_8k.testImages.txt", b"16_abc.jpg other.jpg"),
        r"Flickr8k.token.txt has no captions of other.jpg, which is in Flickr_8k.testImages",
    ),
    ("flickr8k", write("Flickr8k.token.txt", b"1_abc.jpg#0 a\n"), r"Flickr8k.token.txt, line 1"),
]


@pytest.mark.parametrize(("name", "damage", "sentence"), DAMAGE)
def test_bad_folders_are_one_sentence(name, damage, sentence, tmp_path):
    damage(MAKERS[name](tmp_path))
    with pytest.raises(UserError, match=r"^[^\n]*$") as refusal:
        captions.read(name, str(tmp_path))
    assert refusal.match(sentence)


@pytest.mark.parametrize("content", [b"", b"no picture", None])
def test_damaged_pictures_are_one_sentence(content, tmp_path):
    one = captions.read("coco", str(coco(tmp_path))).train[2]
    one.source.write_bytes(one.source.read_bytes()[:300] if content is None else content)
    with pytest.raises(UserError, match=r"^[^\n]*0002\.jpg is damaged: [^\n]*\.$") as refusal:
        captions.pixels(one, 32)
    assert "0x" not in str(refusal.value)


def test_missing_sets_are_one_sentence(tmp_path):
    for name, word in (("coco", "dataset_coco.json"), ("flickr8k", "Flickr8k.token.txt")):
        for data_dir in (None, str(tmp_path)):
            with pytest.raises(UserError, match=rf"^[^\n]* is not [^\n]*{word}[^\n]*$"):
                captions.read(name, data_dir)
    with pytest.raises(UserError, match="is no directory"):
        captions.read("coco", str(tmp_path / "none"))


def test_a_prepared_coco(tmp_path, monkeypatch):
    """As tensorflow-datasets prepares it: the same pictures, each with its captions."""
    import tensorflow_datasets as tfds

    splits = {"train": range(3), "restval": range(3, 5), "val": range(5, 8), "test": range(8, 10)}

    class Coco(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.1.0")
        name = "2014"
        pkg_dir_path = code_path = None  # it has no package of its own

        def _info(self):
            features = {
                "image": tfds.features.Image(encoding_format="jpeg"),
                "captions": tfds.features.Sequence({"text": tfds.features.Text()}),
            }
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, _):
            return {split: self._generate_examples(own) for split, own in splits.items()}

        def _generate_examples(self, own):
            for number in own:
                path = tmp_path / f"{number}.jpg"
                picture(path, number)
                told = [{"text": text} for text in spoken(number)]
                yield number, {"image": str(path), "captions": told}

    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    Coco(
        data_dir=str(tmp_path / "coco_captions"), file_format="array_record"
    ).download_and_prepare()
    for restval, train in ((True, range(5)), (False, range(3))):
        parts = captions.read("coco", None, restval)
        for part, expected in zip(parts, (train, range(5, 8), range(8, 10)), strict=True):
            numbers = [int(one.words[0][-1]) for one in part]
            assert sorted(numbers) == list(expected)
            for one, number in zip(part, numbers, strict=True):
                assert one.captions == tuple(spoken(number))
                red = captions.pixels(one, 32)[..., 0].astype(int)
                assert np.abs(red - 12 * number).max() <= 1


# ResNet

SMALL = (1, 1, 1, 1)


def random_weights(path, blocks, size=32, seed=0, scale=1.0):
    """A safetensors file of random weights and statistics, with torch's names; of a network whose
    last stage has one block, the features are ``scale`` times as large."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(seed)
    weights = {}
    for place, of in resnet.parameter_shapes(size, blocks).items():
        module = place.replace(" ", ".")
        for leaf, shape in of.items():
            drawn = rng.normal(size=shape.shape) / np.sqrt(max(1, np.prod(shape.shape[1:])))
            if leaf == "running_var" or (leaf == "weight" and len(shape.shape) == 1):
                drawn = 0.5 + rng.uniform(size=shape.shape)
            if module in ("layer4.0.bn3", "layer4.0.downsample.1") and leaf in ("weight", "bias"):
                drawn = drawn * scale
            weights[f"{module}.{leaf}"] = drawn.astype(np.float32)
    weights["fc.weight"] = np.zeros((1000, resnet.FEATURES), np.float32)
    save_file(weights, path)
    return weights


def plain_resnet(weights, image, blocks):
    """He et al.'s network in NumPy, of one picture ``[S, S, 3]`` in [0, 255]."""

    def convolved(x, name, stride=1):
        kernel = weights[f"{name}.weight"]
        size, around = kernel.shape[2], kernel.shape[2] // 2
        x = np.pad(x, ((0, 0), (around, around), (around, around)))
        windows = np.lib.stride_tricks.sliding_window_view(x, (size, size), axis=(1, 2))
        return np.einsum("chwij,ocij->ohw", windows[:, ::stride, ::stride], kernel)

    def normalised(x, name):
        of = {leaf: weights[f"{name}.{leaf}"][:, None, None] for leaf in
              ("weight", "bias", "running_mean", "running_var")}  # fmt: skip
        x = (x - of["running_mean"]) / np.sqrt(of["running_var"] + 1e-5)
        return x * of["weight"] + of["bias"]

    mean, deviation = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    x = ((image / 255 - mean) / deviation).transpose(2, 0, 1)
    x = np.maximum(normalised(convolved(x, "conv1", 2), "bn1"), 0)
    x = np.pad(x, ((0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
    x = np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(1, 2))[:, ::2, ::2].max((3, 4))
    for stage, count in enumerate(blocks, start=1):
        for block in range(count):
            name, stride = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
            y = np.maximum(normalised(convolved(x, f"{name}.conv1"), f"{name}.bn1"), 0)
            y = np.maximum(normalised(convolved(y, f"{name}.conv2", stride), f"{name}.bn2"), 0)
            y = normalised(convolved(y, f"{name}.conv3"), f"{name}.bn3")
            if f"{name}.downsample.0.weight" in weights:
                x = normalised(convolved(x, f"{name}.downsample.0", stride), f"{name}.downsample.1")
            x = np.maximum(x + y, 0)
    return x.reshape(len(x), -1).T


@pytest.mark.long
def test_a_small_resnet_is_plain_numpy(tmp_path):
    blocks = (2, 1, 1, 1)
    weights = random_weights(tmp_path / "w.safetensors", blocks)
    params = resnet.read_weights(tmp_path / "w.safetensors", resnet.parameter_shapes(64, blocks))
    images = np.random.default_rng(1).integers(0, 256, (1, 64, 64, 3), dtype=np.uint8)
    seen = jax.jit(lambda images: resnet.ResNet(blocks).apply({"params": params}, images))(images)
    expected = plain_resnet(weights, images[0].astype(float), blocks)
    np.testing.assert_allclose(seen.regions[0], expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(seen.pooled[0], expected.mean(0), rtol=1e-4, atol=1e-4)
    assert (expected > 0).mean() > 0.2


def test_weights_of_another_network_are_one_sentence(tmp_path):
    path = tmp_path / "w.safetensors"
    random_weights(path, SMALL)
    with pytest.raises(UserError, match=r"^--weights=.*is not of ResNet-152: layer1\.1\S* \S.*$"):
        resnet.read_weights(path, resnet.parameter_shapes(32))
    for content in (b"", b"\xff" * 100):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"^--weights=[^\n]* cannot be read: [^\n]*\.$"):
            resnet.read_weights(path, resnet.parameter_shapes(32, SMALL))
    with pytest.raises(UserError, match=r"cannot be read"):
        resnet.read_weights(tmp_path / "none", resnet.parameter_shapes(32, SMALL))


@pytest.mark.extras
def test_resnet_152_is_torchvisions(tmp_path):
    """Random weights and statistics; needs torch and torchvision."""
    import torch
    from safetensors.torch import save_file
    from torchvision.models import resnet152

    torch.manual_seed(0)
    network = resnet152().eval()
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.normal_(module.running_mean, std=0.1)
            torch.nn.init.uniform_(module.running_var, 0.5, 1.5)
            torch.nn.init.uniform_(module.weight, 0.2, 0.7)
            torch.nn.init.normal_(module.bias, std=0.1)
    path = tmp_path / "w.safetensors"
    save_file({name: of.contiguous() for name, of in network.state_dict().items()}, path)
    images = np.random.default_rng(0).integers(0, 256, (2, 224, 224, 3), dtype=np.uint8)
    x = torch.from_numpy(images).permute(0, 3, 1, 2) / 255
    x = (x - torch.tensor(resnet._MEAN).view(1, 3, 1, 1)) / torch.tensor(
        resnet._DEVIATION
    ).view(1, 3, 1, 1)  # fmt: skip
    network.avgpool = network.fc = torch.nn.Identity()
    with torch.no_grad():
        expected = network(x).reshape(2, 2048, 49).permute(0, 2, 1).numpy()
    params = resnet.read_weights(path, resnet.parameter_shapes(224))
    seen = jax.jit(lambda x: resnet.ResNet().apply({"params": params}, x))(images)
    np.testing.assert_allclose(seen.regions, expected, atol=1e-4, rtol=0)


# Features


def made(numbers):
    pooled = np.array([[number, 2 * number] for number in numbers], float)
    return pooled, np.repeat(pooled[:, None], 3, axis=1) + np.arange(3)[:, None]


def test_features_are_made_once_and_read_by_number(tmp_path):
    cache, calls, said = Cache(tmp_path, 11, 3, 2, shard=4), [], []

    def counted(numbers):
        calls.append(list(numbers))
        return made(numbers)

    cache.fill(counted, said.append)
    cache.fill(counted, said.append)
    assert calls == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert said[-1] == "features: 3 of 3 files"
    read = cache.read([10, 0, 7, 7])
    pooled, regions = made([10, 0, 7, 7])
    np.testing.assert_array_equal(read["pooled"], pooled)
    np.testing.assert_array_equal(read["regions"], regions)
    (tmp_path / "00001.array_record").write_bytes(b"none")
    with pytest.raises(UserError, match=r"^the features in [^\n]* are damaged [^\n]*made again\.$"):
        Cache(tmp_path, 11, 3, 2, shard=4).read([5])


SHARE = """
import sys, time, pathlib, os
import numpy as np
from experiments.captioning.features import Cache
folder, name, pause = pathlib.Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
def make(numbers):
    with (folder / "made").open("a") as file:
        file.write(f"{name} {numbers[0]}\\n")
    time.sleep(pause)
    return np.array([[n, n] for n in numbers], float), None
print("ready", flush=True)
Cache(folder / "features", 40, 0, 2, shard=4).fill(make, lambda text: None)
"""


def sharing(folder, name, pause):
    return subprocess.Popen(
        [sys.executable, "-c", SHARE, str(folder), name, str(pause)],
        cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_a_killed_process_leaves_its_features_and_two_share_the_rest(tmp_path):
    first = sharing(tmp_path, "first", 0.1)
    cache = Cache(tmp_path / "features", 40, 0, 2, shard=4)
    while len(cache.missing()) > 7:
        time.sleep(0.02)
    first.kill()
    first.communicate()
    left = cache.missing()
    assert 0 < len(left) <= 7
    both = [sharing(tmp_path, name, 0.5) for name in ("second", "third")]
    assert [one.wait() for one in both] == [0, 0]
    for one in both:
        one.stdout.close()
    assert cache.missing() == []
    lines = [line.split() for line in (tmp_path / "made").read_text().splitlines()]
    again = [(name, int(number)) for name, number in lines if name != "first"]
    assert sorted(number // 4 for _, number in again) == left  # each once
    assert {name for name, _ in again} == {"second", "third"}
    np.testing.assert_array_equal(cache.read(range(40))["pooled"][:, 0], np.arange(40))


# Training


def settings(folder, **more):
    return {
        "captioner": "show_and_tell", "keep_best": False, "dataset": "coco",
        "data_dir": str(folder), "hidden_size": 6, "embedding": 4,
        "image_size": 32, "min_count": 2, "captions": 3, "batch_size": 4, "length": 6,
        "steps": 60, "eval_every": 30, "learning_rates": (0.03,), **more,
    }  # fmt: skip


@pytest.fixture
def small_network(monkeypatch):
    """A ResNet of a block a stage in the place of 152 layers."""
    whole = resnet.ResNet
    monkeypatch.setattr(resnet, "ResNet", lambda *_: whole(SMALL))


# An attending cell reads 2,048 features at every step, so that one update of Adam moves a gate by
# the rate times their sum: at a rate of 0.03 those of random weights, of 1.5 each, would shut it
# for good, and the loss would stay that of how often a word comes.
ATTENDING = {
    "captioner": "show_attend_tell",
    "attention_units": 4,
    "hidden_size": 24,
    "embedding": 8,
}


def test_held_out_windows_are_numbered_by_their_references(tmp_path):
    task = resolve(CAPTIONING, "small", settings(coco(tmp_path), train_encoder=True)).task
    files, references = pictures.PictureFiles(task), task.references
    for name, first in (("validation", 12), ("test", 16)):
        window = files.read_held_out(name, 0, np.arange(4))
        own = [int(references[number][0].split()[-1]) for number in window.numbers]
        assert own == list(range(first, first + 4))
        red = window.pictures[..., 0].astype(int)
        assert np.abs(red - 12 * np.array(own)[:, None, None]).max() <= 1


@pytest.mark.parametrize("evaluation", ["bleu", "coco"])
def test_captions_are_tokenised_as_their_references(tmp_path, monkeypatch, evaluation):
    """What is said word for word as it was written scores 1, with any tokeniser."""

    def split(texts, treebank):
        cut = " '" if treebank else " ' "
        return [[text.lower().replace("'", cut) for text in group] for group in texts]

    monkeypatch.setattr(scoring, "has_coco", lambda: True)
    monkeypatch.setattr(scoring, "tokenised", split)
    monkeypatch.setattr(scoring, "coco", scoring.bleu)
    names = settings(coco(tmp_path), train_encoder=True, evaluation=evaluation, min_count=0)
    task = resolve(CAPTIONING, "small", names).task
    monkeypatch.setattr(type(task), "text", lambda *_: "the dog isn't here!")
    rows = {"counts": np.ones(8), "numbers": np.arange(8), "words": np.zeros((8, 3), int)}
    scores = task.scores({"loss": (np.float64(1), np.float64(1))}, [rows])
    assert scores["bleu_4"] == pytest.approx(1)
    cut = {"bleu": "isn ' t", "coco": "isn 't"}[evaluation]
    assert all(cut in group[1] for group in task.references)


def test_a_run_knows_its_captions_and_weights(tmp_path):
    """Neither where they lie nor what the pictures' folder is called makes another run."""

    def identity(folder, weights=b"w"):
        (folder / "w").write_bytes(weights)
        names = settings(folder, weights=str(folder / "w"))
        return resolve(CAPTIONING, "small", names).identity()

    first = identity(coco(tmp_path / "a"))
    assert identity(coco(tmp_path / "b")) == first
    assert identity(tmp_path / "b", b"v") != first
    file = tmp_path / "a" / "dataset_coco.json"
    file.write_text(file.read_text().replace("A big Dog runs, no. 3", "A big Dog runs, no. 33"))
    pictures.corpus.cache_clear()
    assert identity(tmp_path / "a") != first


def test_features_of_a_prepared_set_are_of_its_captions():
    """The description of a source of tensorflow-datasets does not tell one set from another."""
    digests = set()
    for words in ("a dog", "a cat"):
        picture = captions.Picture(("the same description", 0), (words,), (tuple(words.split()),))
        digests.add(pictures.PictureFiles._digest(SimpleNamespace(_pictures=[picture])))
    assert len(digests) == 2


@pytest.mark.parametrize(("more", "scale", "most"), [({}, 1.0, 1.0), (ATTENDING, 0.01, 0.6)])
@pytest.mark.long
def test_training_on_kept_features(tmp_path, small_network, more, scale, most):
    weights = tmp_path / "w.safetensors"
    random_weights(weights, SMALL, scale=scale)
    folder = coco(tmp_path / "data")
    run = resolve(CAPTIONING, "small", settings(folder, weights=str(weights), **more))
    assert run.task.examples == 12
    learner = Learner(run)
    learner.prepare()
    state = learner.advance(learner.initial(), 0, 30)
    state, _ = learner.evaluate(state)
    state = learner.advance(state, 30, 60)
    assert float(state.loss_total) / float(state.loss_weight) < most
    final = learner.final_scores(state)
    assert final["bleu_1"] > 0.5
    one = learner._data.read(0, 3, np.arange(4))
    again = pictures.PictureFiles(run.task).batched(4).read(0, 3, np.arange(4))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    params = resnet.read_weights(weights, resnet.parameter_shapes(32, SMALL))
    seen = resnet.ResNet().apply({"params": params}, learner._data.pixels(one.numbers))
    # Kept in float16, which rounds by 2**-11; float32's sums differ by roundings of the largest.
    pooled = np.asarray(seen.pooled)
    atol = 2**-20 * np.abs(pooled).max()
    np.testing.assert_allclose(one.pictures["pooled"], pooled, rtol=2**-10, atol=atol)
    passes = [learner._data.read(0, step, np.arange(4)).numbers for step in range(3)]
    assert sorted(np.concatenate(passes)) == list(range(12))
    learner.close()
    assert len(list(features.directory("x").parent.iterdir())) == 1


TWO_DEVICES = """
import pathlib
from tests.experiments import test_captions as here
whole = here.resnet.ResNet
here.resnet.ResNet = lambda *_: whole(here.SMALL)
print(len(here.jax.devices()), here.first_loss(pathlib.Path(FOLDER)))
"""


def first_loss(folder):
    """Of a step from the folder's pictures and weights."""
    more = {"weights": str(folder / "w.safetensors"), "steps": 1, "eval_every": 1}
    learner = Learner(resolve(CAPTIONING, "small", settings(folder, **more)))
    learner.prepare()
    state = learner.advance(learner.initial(), 0, 1)
    learner.close()
    return float(state.loss_total) / float(state.loss_weight)


@pytest.mark.long
def test_two_devices_read_half_of_a_batch_each(tmp_path, small_network):
    random_weights(coco(tmp_path) / "w.safetensors", SMALL)
    loss = first_loss(tmp_path)
    done = run_source(TWO_DEVICES.replace("FOLDER", repr(str(tmp_path))), devices=2)
    assert done.returncode == 0, done.stderr
    devices, other = done.stdout.split()[-2:]
    assert int(devices) == 2
    np.testing.assert_allclose(float(other), loss, rtol=1e-5)


@pytest.mark.long
def test_an_encoder_that_is_trained_along(tmp_path, small_network):
    """Its weights move, the statistics of its normalisation stay; a bad picture is a sentence."""
    weights = tmp_path / "w.safetensors"
    random_weights(weights, SMALL)
    folder = coco(tmp_path / "data")
    more = {"train_encoder": True, "weights": str(weights), "steps": 2, "eval_every": 2}
    learner = Learner(resolve(CAPTIONING, "small", settings(folder, **more)))
    learner.prepare()
    before = jax.device_get(learner.initial().params["vision"])
    given = resnet.read_weights(weights, before)
    after = jax.device_get(learner.advance(learner.initial(), 0, 2).params["vision"])
    for module, of in before.items():
        for leaf, value in of.items():
            np.testing.assert_array_equal(value, given[module][leaf])
            moved = np.abs(after[module][leaf] - value).max()
            assert (moved == 0) == (leaf in resnet.STATISTICS), (module, leaf)
    learner.close()
    (folder / "val2014" / "COCO_val2014_000000000012.jpg").write_bytes(b"none")
    with pytest.raises(UserError, match=r"000012\.jpg is damaged"):
        learner.evaluate(learner.initial())


def test_what_cannot_be_is_one_sentence(tmp_path):
    folder = coco(tmp_path)
    for more, sentence in (
        ({}, r"^--encoder=resnet152 needs --weights=FILE"),
        ({"weights": "none", "image_size": 33}, r"^--image_size must be a multiple of 32"),
        ({"encoder": "cnn"}, r"^--encoder=cnn is for scenes"),
    ):
        with pytest.raises(UserError, match=sentence):
            resolve(CAPTIONING, "small", settings(folder, **more))
    run = resolve(CAPTIONING, "small", settings(folder, weights=str(tmp_path / "none")))
    with pytest.raises(UserError, match=r"^--weights=\S*none cannot be read"):
        Learner(run).check()
