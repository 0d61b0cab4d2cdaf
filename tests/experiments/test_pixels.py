"""Images pixel by pixel: orders, splits, epochs, protocols, and runs on tiny files."""

import collections
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from experiments import datasets
from experiments.command import flags, main
from experiments.pixels.settings import PIXELS
from experiments.pixels.task import PixelsTask, bit_reversal
from experiments.settings import resolver
from experiments.settings.errors import UserError
from experiments.training import loop
from experiments.training.learner import Learner
from experiments.training.models import Decoder, SequenceModel, dropout_masks
from experiments.training.supervised import Batch
from recurrent_gates import CELLS, RNN
from tests.experiments import image_files
from tests.experiments.support import assert_same_bits, leaves

TINY = {
    "dataset": "smnist",
    "cell": "gru",
    "hidden_size": 6,
    "decoder": (5,),
    "batch_size": 6,
    "epochs": 2,
}


def tiny(**settings):
    """A config on tiny files, see ``mnist``."""
    return resolve("small", **TINY | settings)


def resolve(protocol, **settings):
    return resolver.resolve(PIXELS, protocol, settings)


@pytest.fixture
def mnist(monkeypatch, tmp_path):
    """A data directory with 24 + 11 images of 4 x 3 pixels."""
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "nothing prepared"))
    source = image_files.tiny_source("mnist", 24, 11, shape=(4, 3, 1))
    monkeypatch.setitem(datasets.SOURCES, "mnist", source)
    folder = tmp_path / "data"
    folder.mkdir()
    image_files.write_idx_set(folder, source)
    return str(folder)


@functools.cache
def digits():
    """The default task and its arrays."""
    task = resolve("small").task
    return task, task.read()


def test_bit_reversal():
    np.testing.assert_array_equal(bit_reversal(8), [0, 4, 2, 6, 1, 5, 3, 7])
    np.testing.assert_array_equal(bit_reversal(6), [0, 4, 2, 1, 5, 3])
    expected = [0, 512, 256, 768, 128, 640, 384, 64, 576, 320, 192, 704]
    np.testing.assert_array_equal(bit_reversal(784)[:12], expected)
    for count in (1, 2, 64, 784, 1024):
        np.testing.assert_array_equal(np.sort(bit_reversal(count)), np.arange(count))


def test_bit_reversal_is_the_papers_listing():
    order = np.arange(1024).reshape(1024, 1)
    for _ in range(10):
        half = len(order) // 2
        order = np.hstack((order[:half], order[half:]))
    np.testing.assert_array_equal(bit_reversal(784), order[0][order[0] < 784])


@pytest.mark.parametrize(
    ("protocol", "dataset", "permutation"),
    [
        *(("ur", name, "scanline") for name in ("digits", "smnist", "fashion", "scifar10")),
        *(("hdetach", name, "scanline") for name in ("smnist", "fashion")),
        *(("ur", "pmnist", "bit_reversal"), ("small", "pmnist", "bit_reversal")),
        ("hdetach", "pmnist", "random"),
    ],
)
def test_order_of_a_protocol(protocol, dataset, permutation):
    assert resolve(protocol, dataset=dataset).task.permutation == permutation
    other = resolve(protocol, dataset=dataset, permutation="random", permutation_seed=3).task
    np.testing.assert_array_equal(other.order(), np.random.RandomState(3).permutation(other.steps))


def test_random_order_is_that_of_the_runs_seed():
    order = resolve("hdetach", dataset="pmnist", seed=150).task.order()
    np.testing.assert_array_equal(order[:5], [176, 32, 363, 605, 548])
    fixed = resolve("hdetach", dataset="pmnist", seed=1, permutation_seed=150).task.order()
    np.testing.assert_array_equal(order, fixed)


def test_seeds_with_orders_of_their_own_do_not_train_together():
    sentence = "--seeds=2: each has a permutation_seed of its own, so train them one by one"
    with pytest.raises(UserError, match=sentence):
        resolve("hdetach", dataset="pmnist", seeds=2)
    with pytest.raises(UserError, match=sentence):
        resolve("ur", permutation="random", seeds=2)
    assert resolve("hdetach", dataset="pmnist", seeds=2, permutation_seed=9).training.seeds == 2
    for dataset in ("smnist", "fashion"):
        assert resolve("hdetach", dataset=dataset, seed=4, seeds=2).task.permutation_seed == 0


SPLITS = {
    ("ur", "smnist"): (54_000, 6_000),
    ("ur", "scifar10"): (45_000, 5_000),
    ("ur", "digits"): (1293, 144),
    ("hdetach", "smnist"): (50_000, 10_000),
}


@pytest.mark.parametrize(("protocol", "dataset"), SPLITS)
def test_split(protocol, dataset):
    task = resolve(protocol, dataset=dataset).task
    train_numbers, validation = task.split()
    assert (len(train_numbers), len(validation)) == SPLITS[protocol, dataset]
    assert (task.examples, task.validation) == SPLITS[protocol, dataset]
    everything = np.sort(np.concatenate([train_numbers, validation]))
    np.testing.assert_array_equal(everything, np.arange(sum(task.source.train)))
    if protocol == "hdetach":
        np.testing.assert_array_equal(validation, np.arange(50_000, 60_000))
    else:
        drawn = np.random.RandomState(42).permutation(sum(task.source.train))
        np.testing.assert_array_equal(validation, drawn[len(train_numbers) :])


def test_read_has_the_shapes_of_load():
    task, data = digits()
    shapes = jax.eval_shape(task.load)
    assert jax.tree.structure(shapes) == jax.tree.structure(data)
    for shape, array in zip(jax.tree.leaves(shapes), jax.tree.leaves(data), strict=True):
        assert (shape.shape, shape.dtype) == (array.shape, array.dtype)


@pytest.mark.parametrize("permutation", ["scanline", "bit_reversal", "random"])
def test_pixels_are_read_in_order(permutation):
    images = datasets.load("digits", None)
    task = resolve("small", permutation=permutation).task
    data = task.read()
    first, label = task.split()[0][7], data["train"].targets[7]
    pixels_of = images.train_images[first].reshape(64, 1)[task.order()]
    np.testing.assert_array_equal(data["train"].inputs[7], pixels_of)
    assert label == images.train_labels[first]
    test = images.test_images.reshape(360, 64, 1)[:, task.order()]
    np.testing.assert_array_equal(data["test"].inputs, test.swapaxes(0, 1))
    np.testing.assert_array_equal(data["test"].targets[0], images.test_labels)
    held_out = task.split()[1]
    validation = images.train_images[held_out].reshape(144, 64, 1)[:, task.order()]
    np.testing.assert_array_equal(data["validation"].inputs, validation.swapaxes(0, 1))
    np.testing.assert_array_equal(data["validation"].targets[0], images.train_labels[held_out])


def test_each_held_out_set_has_its_name():
    loaded = {"train": object(), "validation": object(), "test": object()}
    sets = resolve("small").task.sets(loaded)
    assert sets == {name: loaded[name] for name in ("validation", "test")}


def test_channels_go_in_together(monkeypatch, tmp_path):
    source = image_files.tiny_source("cifar10", 20, 10)
    monkeypatch.setitem(datasets.SOURCES, "cifar10", source)
    held = image_files.write_cifar_set(tmp_path, source)
    task = resolve("ur", dataset="scifar10", data_dir=str(tmp_path), batch_size=2).task
    data = task.read()
    assert data["test"].inputs.shape == (1024, 10, 3)
    np.testing.assert_array_equal(data["test"].inputs[33, 4], held[2][4, 1, 1])


def drawn(task, data, size):
    """(seed, step) -> batch."""
    draw = jax.jit(lambda data, seed, step: task.batch(data, jax.random.key(seed), step, size))
    return lambda seed, step: draw(data, jnp.int32(seed), jnp.int32(step))


@pytest.mark.parametrize("size", [100, 50, 431])
def test_an_epoch_meets_each_image_once(size):
    task, data = digits()
    known = collections.Counter(image.tobytes() for image in data["train"].inputs)
    label_of = dict(
        zip((i.tobytes() for i in data["train"].inputs), data["train"].targets, strict=True)
    )
    draw = drawn(task, data, size)
    steps = 1293 // size
    orders = []
    for seed, epoch in ((0, 0), (0, 1), (5, 0)):
        seen = []
        for step in range(epoch * steps, (epoch + 1) * steps):
            batch = draw(seed, step)
            assert batch.inputs.shape == (64, size, 1)
            assert batch.inputs.dtype == jnp.uint8
            rows = np.asarray(batch.inputs).swapaxes(0, 1)
            seen += [row.tobytes() for row in rows]
            assert [label_of[row.tobytes()] for row in rows] == batch.targets[0].tolist()
        assert len(seen) == steps * size
        assert not collections.Counter(seen) - known  # none more often than it is there
        orders.append(seen)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    again = np.asarray(draw(0, 0).inputs).swapaxes(0, 1)
    assert [row.tobytes() for row in again] == orders[0][:size]


def test_scores():
    task, _ = digits()
    labels = jnp.array([[3, 9, 0, 3]])
    batch = Batch(jnp.zeros((64, 4, 1), jnp.uint8), labels)
    oracle = task.score(1e4 * jax.nn.one_hot(labels, 10), batch)
    np.testing.assert_array_equal(oracle["accuracy"], [1, 1, 1, 1])
    np.testing.assert_array_equal(oracle["loss"], [0, 0, 0, 0])
    constant = task.score(1e4 * jax.nn.one_hot(jnp.full((1, 4), 3), 10), batch)
    np.testing.assert_array_equal(constant["accuracy"], [1, 0, 0, 1])
    blind = task.score(jnp.zeros((1, 4, 10)), batch)
    accuracy, loss = task.metrics
    np.testing.assert_allclose(blind["loss"], np.full(4, loss.baseline), rtol=1e-6)
    assert (accuracy.name, accuracy.baseline, loss.baseline) == ("accuracy", 0.1, math.log(10))


def test_head_on_the_last_output_is_the_last_of_the_head_on_every_output():
    task, data = digits()
    batch = Batch(data["test"].inputs[28:36, :5], data["test"].targets[:, :5])
    layer = RNN(CELLS["ur_lstm"](7), time_major=True)
    model = task.module(layer, resolve("small", decoder=(4,)).model)
    every = SequenceModel(model.encoder, layer, Decoder((4, 10)), outputs=8)
    params = model.init(jax.random.key(0), batch.inputs)

    def loss(params, model):
        outputs = model.apply(params, batch.inputs)
        return task.score(outputs, batch)["loss"].mean(), outputs[-1]

    grad = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
    (value, last), gradient = grad(params, model)
    (value_, last_), gradient_ = grad(params, every)
    np.testing.assert_allclose(value, value_, rtol=1e-6)
    np.testing.assert_allclose(last, last_, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), gradient, gradient_)


def test_pixels_become_numbers_from_0_to_1():
    task, data = digits()

    class Through(nn.Module):
        @nn.compact
        def __call__(self, x, **_):
            return x

    model = task.module(Through(), resolve("small").model)
    encoded = model.encoder.apply({}, data["test"].inputs)
    np.testing.assert_array_equal(encoded, data["test"].inputs.astype(np.float32) / 16)


EXPECTED = {
    ("ur", "smnist"): {"steps": 162_000, "eval_every": 1080, "batch_size": 50, "clip_norm": 1},
    ("ur", "scifar10"): {"steps": 90_000, "eval_every": 900},
    ("hdetach", "smnist"): {"steps": 100_000, "eval_every": 500, "batch_size": 100}
    | {"learning_rates": (1e-3, 5e-4, 1e-4), "clip_norm": 1, "keep_best": True},
    ("small", "digits"): {"batch_size": 50, "keep_best": True},
}


@pytest.mark.parametrize(("protocol", "dataset"), EXPECTED)
def test_settings_are_the_papers(protocol, dataset):
    training = resolve(protocol, dataset=dataset).training
    expected = EXPECTED[protocol, dataset]
    assert {name: getattr(training, name) for name in expected} == expected


def test_settings_that_depend_on_others():
    assert resolve("ur").training.learning_rates == (2e-4, 5e-4, 1e-3, 2e-3)
    assert resolve("ur", cell="ur_gru").training.learning_rates == (2e-4, 5e-4)
    carry = resolve("hdetach").carry
    assert (carry.detach_prob, carry.detach_off_steps) == (0.25, 19_500)
    own = {"ur_lstm": (0.5, 0.05), "gru": (0.0, 0.1), "ur_gru": (0.0, 0.1)}
    for cell, zoneout in (own | dict.fromkeys(("ur_minlstm", "slstm", "mingru"), (0, 0))).items():
        config = resolve("ur_zoneout", cell=cell)
        assert (config.carry.zoneout_c, config.carry.zoneout_h) == zoneout
        assert config.model.dropout == 0.5
    assert resolve("ur").model.dropout == 0
    wide = {("lstm", "pmnist"): 512, ("lstm", "scifar10"): 1024}
    wide |= {("ur_gru", "smnist"): 1024, ("ur_lstm", "scifar10"): 2048}
    for (cell, dataset), width in wide.items():
        assert resolve("ur_zoneout", cell=cell, dataset=dataset).model.hidden_size == width
        assert resolve("ur", cell=cell, dataset=dataset).model.hidden_size == 512


@pytest.mark.parametrize(
    ("protocol", "cell", "count"),
    [
        ("ur", "ur_lstm", 4 * 512 * (1 + 512 + 1) + 512),
        ("ur", "lstm", 4 * 512 * (1 + 512 + 1)),
        ("hdetach", "lstm", 4 * 100 * (1 + 100 + 2)),
        ("ur", "gru", 3 * 512 * (1 + 512 + 1)),
    ],
)
def test_parameter_counts_need_no_data(protocol, cell, count):
    described = loop.describe(resolve(protocol, cell=cell, data_dir="nowhere"))
    head = (512 + 1) * 256 + (256 + 1) * 10 if protocol == "ur" else (100 + 1) * 10
    assert described["recurrent_parameters"] == count
    assert described["total_parameters"] == count + head


def test_epochs_and_steps():
    assert resolve("ur", epochs=2).training.steps == 2160
    assert resolve("ur", epochs=2, batch_size=100).training.steps == 1080
    assert resolve("ur", steps=7).training.steps == 7
    assert resolve("ur", epochs=2).hash() == resolve("ur", epochs=3).hash()
    with pytest.raises(UserError, match="exclude each other"):
        resolve("ur", epochs=2, steps=7)
    with pytest.raises(UserError, match="--epochs must be at least 1 and below 2147483648, got 0"):
        resolve("ur", epochs=0)


def test_an_epoch_has_as_many_steps_as_full_batches():
    """1293 images: 13 batches of 100 would not all be full."""
    training = resolve("small", batch_size=100, epochs=3).training
    assert (training.steps, training.eval_every) == (3 * 12, 12)
    assert resolve("small", batch_size=1293, epochs=2).training.steps == 2
    detached = resolve("hdetach", dataset="digits", batch_size=100, epochs=50).carry
    assert detached.detach_off_steps == 39 * 11  # of 1198 images


def test_where_the_data_are_is_not_part_of_the_identity():
    assert resolve("ur", data_dir="a").hash() == resolve("ur", data_dir="b").hash()
    assert resolve("ur", dataset="pmnist").hash() != resolve("ur").hash()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"dataset": "mnist"}, "--dataset is one of digits, smnist"),
        ({"permutation": "none"}, "--permutation is one of scanline"),
        (
            {"permutation": "random", "permutation_seed": -1},
            "--permutation_seed must be at least 0",
        ),
        ({"permutation_seed": 3}, "--permutation_seed has no effect with --permutation=scanline"),
        ({"permutation_seed": 0}, "--permutation_seed has no effect with --permutation=scanline"),
        ({"validation_share": 1.0}, "--validation_share must be above 0 and below 1, got 1"),
        ({"validation_share": 0.0}, "--validation_share must be above 0 and below 1, got 0"),
        ({"validation_share": 1e-9}, "--validation_share: a share of the images, and not all"),
        ({"batch_size": 2000}, "--batch_size=2000 is more than the 1293 training examples"),
        ({"dropout": 1.0}, "--dropout must be at least 0 and below 1, got 1"),
        ({"decoder": (), "dropout": 0.5}, "--dropout has no effect with --decoder=none"),
        ({"decoder": ()}, "--dropout acts on the decoder's hidden layers"),
        ({"length": 3}, "--length is not for pixels"),
    ],
)
def test_bad_settings_are_refused(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        resolve("small", **settings)


def test_a_batch_of_more_than_all_images_is_refused_before_a_step():
    config = resolve("small", batch_size=2000, steps=2, eval_every=1)
    with pytest.raises(
        UserError, match="--batch_size=2000 is more than the 1293 training examples"
    ):
        Learner(config).prepare()


def test_dropout_masks():
    (mask,) = dropout_masks(jax.random.key(0), 0.25, (500,), 40)
    assert mask.shape == (1, 40, 500)
    assert set(np.unique(mask).tolist()) == {0.0, np.float32(4 / 3)}
    assert abs((np.asarray(mask) == 0).mean() - 0.25) < 0.02
    assert dropout_masks(jax.random.key(0), 0.0, (500,), 40) == ()
    x, ones = jnp.ones((1, 40, 3)), jnp.ones((1, 40, 500))
    decoder = Decoder((500, 2))
    params = decoder.init(jax.random.key(1), x)
    np.testing.assert_array_equal(decoder.apply(params, x), decoder.apply(params, x, ones))
    first, last = (params["params"][f"Dense_{layer}"] for layer in (0, 1))
    hidden = np.maximum(x @ first["kernel"] + first["bias"][None, None], 0) * mask
    by_hand = hidden @ last["kernel"] + last["bias"][None, None]
    np.testing.assert_allclose(decoder.apply(params, x, mask), by_hand, rtol=1e-4, atol=1e-6)


def rows(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_a_run_goes_on_bit_for_bit(tmp_path, mnist, monkeypatch):
    monkeypatch.setattr(loop, "_CHECKPOINT_SECONDS", 0.0)
    settings = {**TINY, "data_dir": mnist, "dropout": 0.5, "eval_every": 2}
    del settings["epochs"]  # they have 3 steps

    def run(steps, workdir):
        config = resolve("small", **settings | {"steps": steps})
        return loop.run(config, tmp_path / workdir)

    summary = run(8, "whole")
    run(4, "parts")
    (tmp_path / "elsewhere").symlink_to(mnist)
    settings["data_dir"] = str(tmp_path / "elsewhere")
    run(8, "parts")
    assert_same_bits(leaves(tmp_path / "parts", 8), leaves(tmp_path / "whole", 8))
    found = rows(tmp_path / "whole")
    assert rows(tmp_path / "parts") == found
    assert [row["step"] for row in found] == [0, 2, 4, 6, 8]
    assert set(found[-1]["validation"]) == {"accuracy", "loss"}
    right = summary["metrics"]["accuracy"]["mean"] * 11  # of the test images; 2 are for validation
    assert right == pytest.approx(round(right))
    assert 0 < right < 11


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_bad_files_are_refused_before_the_workdir(tmp_path, mnist, damage):
    path = tmp_path / "data" / "train-images-idx3-ubyte.gz"
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match="train-images-idx3-ubyte"):
        loop.run(tiny(data_dir=mnist), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_flags_reach_the_config(monkeypatch):
    calls = []
    monkeypatch.setattr("experiments.training.loop.run", lambda *given: calls.append(given))
    argv = ["pixels", "--dataset=pmnist", "--permutation=random", "--permutation_seed=9"]
    argv += ["--epochs=2", "--dropout=0.5", "--data_dir=here", "--protocol=ur"]
    define = functools.partial(flags.define_experiment, PIXELS)
    main.train_one(PIXELS, flags.parse(argv, define))
    config = calls[0][0]
    assert config.task == PixelsTask(
        dataset="pmnist",
        permutation="random",
        permutation_seed=9,
        validation_share=0.1,
        validation_last=False,
        data_dir="here",
    )
    assert (config.training.steps, config.model.dropout) == (2160, 0.5)
