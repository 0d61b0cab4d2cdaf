"""Length of stay: the best answer of drawn stays, raggedness, scores, the paper's counts, runs."""

import itertools
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.adding.settings import ADDING
from experiments.datasets import stays
from experiments.settings.errors import UserError
from experiments.settings.resolver import resolve as resolved
from experiments.stay import generated
from experiments.stay import task as stay_task
from experiments.stay.settings import STAY
from experiments.stay.task import FEATURES, features, ranking
from experiments.training import loop
from experiments.training.learner import Learner
from experiments.training.supervised import Batch
from recurrent_gates.gru_d import gru_d_inputs
from tests.experiments import stay_files
from tests.experiments.support import assert_drawn, own_caches
from tests.support import thinned

TINY = {
    "cell": "gru",
    "hidden_size": 6,
    "decoder": (5,),
    "batch_size": 8,
    "learning_rates": (1e-2,),
    "epochs": 2,
}


def resolve(protocol="small", **settings):
    return resolved(STAY, protocol, settings)


@pytest.fixture
def cinc(monkeypatch, tmp_path):
    """A data directory with 60 stays in the form of CinC 2012."""
    own_caches(monkeypatch, tmp_path / "caches")
    return stay_files.write_cinc(tmp_path / "data", 60)


# Drawn stays.


@pytest.fixture(scope="module")
def drawn_stays():
    inputs, long_stay = jax.jit(generated.draw, static_argnums=1)(jax.random.key(3), 20_000)
    return np.asarray(inputs), np.asarray(long_stay)


@pytest.mark.long
def test_log_odds_are_those_of_two_gaussians(drawn_stays):
    """By the densities, with the whole covariance of what was measured."""
    inputs = drawn_stays[0][:, :40]
    expected = np.zeros(inputs.shape[1])
    for stay in range(inputs.shape[1]):
        for sign, trend in enumerate(np.asarray(generated.trends(), np.float64)):
            x = inputs[:, stay, sign].astype(np.float64)
            measured = ~np.isnan(x)
            x, t = x[measured], inputs[measured, stay, -1].astype(np.float64)
            covariance = generated.NOISE**2 * np.eye(len(x)) + generated.LEVEL**2
            for y in (1, -1):
                rest = x - y * trend * t
                expected[stay] -= y * rest @ np.linalg.solve(covariance, rest) / 2
    np.testing.assert_allclose(generated.log_odds(inputs), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_the_best_rule_is_right_as_often_as_it_says(drawn_stays):
    inputs, long_stay = drawn_stays
    odds = np.asarray(generated.log_odds(inputs), np.float64)
    best = np.mean((odds > 0) == (long_stay == 1))
    sure = 1 / (1 + np.exp(-np.abs(odds)))
    assert abs(best - sure.mean()) < 4 * np.sqrt(np.mean(sure * (1 - sure)) / len(odds))
    assert 0.9 < best < 0.95
    last = np.nansum(inputs[-1, :, :-1] * np.sign(generated.trends()), axis=-1)
    assert np.mean((last > 0) == (long_stay == 1)) < 0.8  # the last time alone does not tell


def test_drawn_stays_are_ragged_and_irregular(drawn_stays):
    inputs, long_stay = drawn_stays
    time = inputs[..., -1]
    lengths = (~np.isnan(time)).sum(axis=0)
    assert (lengths.min(), lengths.max()) == (generated.FEWEST, generated.TIMES)
    for stay in range(50):  # the padding is before the times, which rise
        own = time[-lengths[stay] :, stay]
        assert np.isnan(time[: -lengths[stay], stay]).all()
        assert (np.diff(own) >= 0).all()
        assert own.min() >= 0
        assert own.max() < 1
    assert np.isnan(inputs[..., :-1][np.isnan(time)]).all()
    measured = (~np.isnan(inputs[..., :-1])).sum(axis=(0, 1))
    assert_drawn(measured, np.linspace(0.9, 0.1, 12), lengths.sum())
    assert_drawn(long_stay.sum(), 1 / 2, long_stay.size)


def test_steps_draw_other_stays_and_held_out_ones_are_of_no_seed():
    task = resolve().task
    loaded = task.read()
    batches = [
        task.batch(loaded, jax.random.key(seed), step, 4) for seed, step in ((0, 0), (0, 1), (1, 0))
    ]
    values = {np.asarray(batch.inputs).tobytes() for batch in batches}
    assert len(values) == 3
    assert loaded["validation"].inputs.shape == (32, 2000, 13)
    assert loaded["test"].inputs.shape == (32, 4000, 13)


# The model.


def test_25_features():
    inputs = jnp.array([0.5, *[jnp.nan] * 10, -2.0, 0.25])
    expected = [0.5, *[0] * 10, -2, 0, *[1] * 10, 0, 0.25]
    np.testing.assert_array_equal(features(inputs), expected)
    assert len(expected) == FEATURES == 25
    padding = features(jnp.full(13, jnp.nan))
    np.testing.assert_array_equal(padding, [*[0] * 12, *[1] * 12, 0])


@pytest.mark.parametrize(
    ("cell", "count"), [("lstm", 1_103_872), ("gru", 827_904), ("gato", 20_736)]
)
def test_parameter_counts_are_those_of_gatos_table_1(cell, count):
    described = loop.describe(resolve("gato", cell=cell))
    assert described["recurrent_parameters"] == count
    assert described["total_parameters"] == count + (25 + 1) * 25 + (512 + 1) * 1024 + 1024 + 1


def test_parameter_count_of_gru_d():
    """Its gates read 12 values and 12 indicators, its decays 12 times; there is no embedding."""
    described = loop.describe(resolve("gato", cell="gru_d"))
    count = 3 * 512 * (24 + 512 + 2) + (12 + 12) + (12 + 1) * 512
    assert described["recurrent_parameters"] == count
    assert described["total_parameters"] == count + (512 + 1) * 1024 + 1024 + 1


def test_settings_are_the_papers():
    config = resolve("gato")
    assert (config.model.cell, config.model.init, config.model.bias_vectors) == (
        "gato1",
        "torch_inputs",
        1,
    )
    training = config.training
    assert training.learning_rates == (4e-3, 1e-4)
    assert (training.batch_size, training.weight_decay, training.optimizer) == (256, 1.2e-6, "adam")
    assert (training.clip_norm, training.keep_best) == (0, True)
    assert config.task.sizes == (43_000, 5_106, 5_105)
    assert training.eval_every == 43_000 // 256
    accuracy = config.task.metrics[0]
    assert (accuracy.name, accuracy.baseline_name) == ("accuracy", "majority")
    assert accuracy.baseline == pytest.approx(27_088 / 53_211)
    judged = [metric.name for metric in resolve("gato", dataset="cinc2012").task.metrics]
    assert judged == ["auroc", "auprc", "accuracy", "loss"]
    assert resolve("gato", cell="lstm").model.init == "torch"


def ragged(lengths, steps, seed=0):
    """A batch of stays that have so many times, and what their padding holds."""
    inputs = np.random.default_rng(seed).normal(size=(steps, len(lengths), 13)).astype(np.float32)
    inputs[np.random.default_rng(seed + 1).random(inputs.shape) < 0.3] = np.nan
    for stay, length in enumerate(lengths):
        inputs[steps - length :, stay, -1] = np.linspace(0, 1, length)
        inputs[: steps - length, stay] = np.nan
    labels = np.arange(len(lengths), dtype=np.int32) % 2
    return Batch(jnp.asarray(inputs), jnp.asarray(labels[None]))


@pytest.mark.parametrize(
    ("cell", "backend"),
    thinned(
        itertools.product(["gato", "gru_d"], ["scan", "fused"]),
        lambda cell, backend: (cell == "gato") == (backend == "fused"),
    ),
)
@pytest.mark.long
def test_padding_changes_nothing(cell, backend):
    learner = Learner(resolve(**TINY | {"cell": cell, "backend": backend}))
    task, lengths = learner.task, [7, 1, 4, 0]
    learner.load()
    params = learner.initial().params
    batch = ragged(lengths, 7)

    @jax.jit
    def loss(params, batch):
        outcome = task.loss(learner.apply, params, batch, (), train=True)
        return outcome.loss[0] / outcome.loss[1]

    longer = Batch(jnp.concatenate([jnp.full((5, 4, 13), jnp.nan), batch.inputs]), batch.targets)
    grad = jax.jit(jax.value_and_grad(loss))
    value, gradient = grad(params, batch)
    longer_value, longer_gradient = grad(params, longer)
    np.testing.assert_allclose(value, longer_value, rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
        gradient,
        longer_gradient,
    )
    alone = []  # every stay weighs the same, however long it is
    for stay, length in enumerate(lengths):
        own = batch.inputs[7 - length :, stay : stay + 1] if length else batch.inputs[:, 3:]
        alone.append(float(loss(params, Batch(own, batch.targets[:, stay : stay + 1]))))
    np.testing.assert_allclose(value, np.mean(alone), rtol=1e-6)
    assert max(alone) > min(alone)


@pytest.mark.long
def test_diagnose_sees_what_gru_d_reads():
    """The features of a run are what its cell reads: three of each of the 12 variables."""
    learner = Learner(resolve(**TINY | {"cell": "gru_d"}))
    learner.load()
    params = learner.initial().params
    inputs = ragged([5, 3], 5).inputs
    read = learner.encoded(params, inputs)
    np.testing.assert_array_equal(read, gru_d_inputs(inputs[..., :12], inputs[..., 12]))


# Scores.


def test_scores():
    task = resolve().task
    batch = Batch(jnp.zeros((1, 4, 13)), jnp.array([[1, 0, 1, 0]]))
    logits = jnp.array([2.0, 3.0, -1.0, -0.5])[None, :, None]
    scores = task.score(logits, batch)
    np.testing.assert_array_equal(scores["accuracy"], [1, 0, 0, 1])
    p = 1 / (1 + np.exp(-np.array([2.0, 3.0, -1.0, -0.5])))
    expected = -np.log([p[0], 1 - p[1], p[2], 1 - p[3]])
    np.testing.assert_allclose(scores["loss"], expected, rtol=1e-6)


def test_areas_are_those_of_their_definitions():
    generator = np.random.default_rng(0)
    logit, long_stay = generator.normal(size=60).round(1), generator.random(60) < 0.3
    pairs = logit[long_stay][:, None] - logit[~long_stay][None]
    found = ranking(logit, long_stay)
    assert found["auroc"] == pytest.approx(np.mean((pairs > 0) + (pairs == 0) / 2))
    precision = recall_before = 0.0
    for threshold in sorted(set(logit), reverse=True):
        taken = logit >= threshold
        recall = long_stay[taken].sum() / long_stay.sum()
        precision += long_stay[taken].mean() * (recall - recall_before)
        recall_before = recall
    assert found["auprc"] == pytest.approx(precision)
    for logit_, labels in ((logit, np.ones(60, bool)), (logit * np.nan, long_stay)):
        assert all(np.isnan(value) for value in ranking(logit_, labels).values())


def test_rows_that_count_elsewhere_are_scored_once():
    task = resolve().task
    logit = np.array([3.0, -1.0, 2.0, -2.0])
    long_stay = np.array([1, 0, 0, 1])
    rows = {
        "logit": logit,
        "long_stay": long_stay,
        "counts": np.ones(4, bool),
        "best": np.array([1.0, -1.0, -1.0, 1.0]),
    }
    again = {**rows, "counts": np.array([False, False, True, True])}
    sums = {"accuracy": (np.float32(3), np.float32(4)), "loss": (np.float32(3), np.float32(4))}
    whole = task.scores(sums, [rows])
    parts = [{name: column[:2] for name, column in rows.items()}, again]
    assert task.scores(sums, parts) == whole
    assert whole["auroc"] == ranking(logit, long_stay == 1)["auroc"] == 0.5
    assert whole["share_of_best"] == (0.75 - 0.5) / (1 - 0.5)


# Runs.


@pytest.mark.long
def test_a_run_on_files(cinc, tmp_path, capsys):
    config = resolve(**TINY, dataset="cinc2012", data_dir=str(cinc), longest=9, seeds=2)
    summary = loop.run(config, tmp_path / "run")
    assert summary["scored_on"] == "test"
    for name in ("accuracy", "auroc", "auprc", "loss"):
        assert all(run["value"] is not None for run in summary["metrics"][name]["per_run"]), name
    task = config.task
    shapes = jax.eval_shape(task.load)
    for shape, array in zip(jax.tree.leaves(shapes), jax.tree.leaves(task.read()), strict=True):
        assert (shape.shape, shape.dtype) == (array.shape, array.dtype)
    test = task.read()["test"].targets[0]
    share = float(np.mean(test))
    assert summary["baselines"]["accuracy"] == pytest.approx(max(share, 1 - share))
    said = capsys.readouterr().out
    assert "test auroc: " in said
    for record in cinc.glob("set-a/*.txt"):  # no identifier is printed or recorded
        assert record.stem not in said
        for path in (tmp_path / "run").glob("*.json*"):
            assert record.stem not in re.split(r"[^0-9]+", path.read_text())


@pytest.mark.long
def test_a_run_knows_its_stays(cinc, tmp_path):
    """Other stays are another configuration, wherever they lie."""
    names = {**TINY, "dataset": "cinc2012", "longest": 9}
    config = resolve(**names, data_dir=str(cinc))
    here = tmp_path / "here"
    loop.run(config, here)
    shutil.copytree(cinc, tmp_path / "copy")
    loop.run(resolve(**names, data_dir=str(tmp_path / "copy")), here)
    record = min((tmp_path / "copy" / "set-a").glob("*.txt"))
    record.write_text(re.sub(r"HR,(\d+)", "HR,171", record.read_text()))
    stay_task._read.cache_clear()
    changed = resolve(**names, data_dir=str(tmp_path / "copy"))
    with pytest.raises(UserError, match=r"belongs to another configuration \(content is "):
        loop.run(changed, here)
    assert "task.content" not in config.identity_without_data()


def expected_parts(task):
    """Inputs and labels of each part, in the scale of the training stays."""
    every = task._stays
    parts = stays.split(every)
    scale = stays.Scale.of(every, parts[0])
    for name, part in zip(("train", "validation", "test"), parts, strict=True):
        yield name, stays.dense(every, part, task.longest, scale), every.long_stay[part]


def test_held_out_stays_are_scaled_as_those_to_train_on(cinc):
    task = resolve(**TINY, dataset="cinc2012", data_dir=str(cinc), longest=9).task
    data = task.read()
    for name, inputs, labels in list(expected_parts(task))[1:]:
        np.testing.assert_array_equal(data[name].inputs, inputs.swapaxes(0, 1))
        np.testing.assert_array_equal(data[name].targets[0], labels)


def test_each_held_out_set_has_its_name():
    loaded = {"train": object(), "validation": object(), "test": object()}
    sets = resolve("gato").task.sets(loaded)
    assert sets == {name: loaded[name] for name in ("validation", "test")}


def test_an_epoch_meets_each_stay_once(cinc):
    task = resolve(**TINY, dataset="cinc2012", data_dir=str(cinc)).task
    data = task.read()
    _, inputs, labels = next(expected_parts(task))
    stays_of_files = {(row.tobytes(), label) for row, label in zip(inputs, labels, strict=True)}
    assert len(stays_of_files) == task.examples == 48
    seen = []
    for step in range(48 // 8):
        batch = task.batch(data, jax.random.key(0), jnp.int32(step), 8)
        rows = np.asarray(batch.inputs).swapaxes(0, 1)
        seen += zip((row.tobytes() for row in rows), batch.targets[0].tolist(), strict=True)
    assert len(seen) == 48
    assert set(seen) == stays_of_files


@pytest.mark.long
def test_the_binary_draws_the_roc_and_says_all_scores(program, drawn, tmp_path):
    flags = ["--hidden_size=6", "--decoder=5", "--steps=2", "--batch_size=8", "--eval_every=2"]
    code, said, err = program("experiments.stay", *flags, f"--workdir={tmp_path}")
    assert code == 0, err
    assert re.search(r"^test accuracy: 0\.\d+ \(chance 0\.5;", said, re.MULTILINE)
    line = (
        r"^test share_of_best \S+, auroc \S+, auprc (\S+), loss \S+ \(seed 0, learning rate 0.004"
    )
    assert re.search(line, said, re.MULTILINE)
    auroc = re.search(r"auroc (\S+),", said)[1]
    assert (tmp_path / "figures" / "roc.png").is_file()
    lines = drawn[-1].axes[0].lines
    labels = [line.get_label() for line in lines]
    areas = [float(label.rpartition(" ")[2]) for label in labels]
    assert abs(areas[0] - float(auroc)) < 6e-4
    assert [label.partition(":")[0] for label in labels[1:]] == ["best possible", "chance"]
    assert areas[1] > 0.95
    for line, area in zip(lines, areas, strict=True):
        x, y = line.get_xdata(), line.get_ydata()
        assert abs(np.trapezoid(y, x) - area) < 6e-4


def test_settings_that_cannot_be():
    sentence = r"^--cell=gru_d needs values that are missing at times, .* adding has none"
    with pytest.raises(UserError, match=sentence):
        resolved(ADDING, "small", {"cell": "gru_d"})
    with pytest.raises(UserError, match=r"--layers must be 1\.$"):
        resolve(cell="gru_d", layers=2)
    with pytest.raises(UserError, match=r"^--stay has no effect with --dataset=generated"):
        resolve(stay="icu")
    with pytest.raises(UserError, match=r"^--longest has no effect with --dataset=generated"):
        resolve(longest=5)
    with pytest.raises(UserError, match=r"^--data_dir=nowhere is no directory\.$"):
        resolve("gato", data_dir="nowhere")
    with pytest.raises(UserError, match="MIMIC-III is not here: put ADMISSIONS"):
        resolve("gato").task.data()


def test_stays_of_one_kind_cannot_be_ranked(monkeypatch, tmp_path):
    """Ten stays: one of them is all that a held-out part has."""
    own_caches(monkeypatch, tmp_path / "caches")
    folder = stay_files.write_cinc(tmp_path / "data", 10)
    task = resolve(dataset="cinc2012", data_dir=str(folder), batch_size=2).task
    sentence = r"has too few stays: those of the validation part .* but it has 1 of one kind\.$"
    with pytest.raises(UserError, match=sentence):
        task.read()
