"""Every probe: trained with three seeds, and stopped; some are killed, and on eight devices."""

import functools
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import traverse_util
from sklearn.metrics import roc_auc_score

from experiments.records.workdir import read_rows
from experiments.settings.cells import build_cell
from experiments.training.models import recurrent_layers
from tests.experiments.probes import eight, support
from tests.experiments.probes.pretrained import WEIGHTS
from tests.experiments.support import ROOT, assert_same_bits, environment, leaves
from tests.support import thinned

pytestmark = pytest.mark.long

# Without a full run: rows that could be cut along another axis, a stream that all devices share,
# rows from the host, and episodes, held-out ones in a number that devices cannot share.
ON_EIGHT = "text", "curriculum", "host_fed", "match"


@pytest.fixture(scope="module", autouse=True)
def on_eight(tmp_path_factory, request):
    """A function that waits for the process with eight devices and gives its directory."""
    directory = tmp_path_factory.mktemp("eight")
    names = support.PROBES if request.config.getoption("full") else ON_EIGHT
    command = [sys.executable, "-m", eight.__name__, str(directory), *names]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, env=environment(8), **pipes)

    @functools.cache
    def wait():
        _, errors = process.communicate()
        assert process.returncode == -signal.SIGKILL, errors
        return directory

    yield wait
    process.kill()
    process.communicate()


@pytest.fixture(scope="module")
def on_one(tmp_path_factory):
    """A function that trains a probe on one device: summary, the workdir of an undisturbed run
    and that of one that was stopped twice."""

    @functools.cache
    def trained(name):
        config, directory = support.PROBES[name], tmp_path_factory.mktemp(name)
        learner, stopped = support.KeptLearner(config), directory / "stopped"
        summary = support.run(config, directory / "whole", learner=learner)
        assert support.run(config, stopped, support.StopAfter(1), learner) is None
        assert support.run(config, stopped, support.StopAfter(4), learner) is None
        assert support.run(config, stopped, learner=learner)["metrics"] == summary["metrics"]
        return summary, directory / "whole", stopped

    return trained


def assert_same_run(actual, expected, step):
    """Two workdirs hold the same bits and the same rows of metrics."""
    assert_same_bits(leaves(actual, step), leaves(expected, step))
    rows = [(workdir / "metrics.jsonl").read_bytes() for workdir in (actual, expected)]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("name", support.PROBES)
def test_a_run_that_was_stopped_ends_with_the_same_bits(name, on_one):
    _, whole, stopped = on_one(name)
    assert_same_run(stopped, whole, support.PROBES[name].training.steps)


def test_every_seed_learns_from_what_its_policy_did(on_one):
    runs = on_one("bandit")[0]["metrics"]["reward"]["per_run"]
    assert len(runs) == 3
    assert min(run["value"] for run in runs) > 0.8  # chance is a third


def test_the_level_of_the_curriculum_follows_the_losses(on_one):
    config, (_, workdir, _) = support.PROBES["curriculum"], on_one("curriculum")
    losses = [row["train_loss"] for row in read_rows(workdir / "metrics.jsonl")][1:]
    levels = []
    for of_seed in np.transpose(losses):
        level, recent = 1, []
        for loss in of_seed:
            recent.append(loss)
            if len(recent) >= 2 and np.mean(recent[-2:]) < config.task.threshold:
                level, recent = level + 1, []
        levels.append(level)
    assert max(levels) > 2 and min(levels) < max(levels)  # each seed has its own
    state = leaves(workdir, config.training.steps)
    assert state["stream.number"].tolist() == levels


def test_a_frozen_encoder_stays(on_one):
    _, workdir, stopped = on_one("pretrained")
    first, last = leaves(stopped, 1), leaves(workdir, 8)
    for name, given in WEIGHTS.items():
        for weights in last[f"params.encoder.{name}"]:
            assert weights.tobytes() == given.tobytes()
    moved = {name for name in last if np.any(first[name] != last[name])}
    params = {name for name in last if name.startswith("params.")}
    assert params - moved == {f"params.encoder.{name}" for name in WEIGHTS}
    moments = {name for name in last if ".mu." in name or ".nu." in name}
    assert len(moments) == 2 * (len(params) - len(WEIGHTS))
    assert not any("encoder" in name for name in moments)


def test_the_host_finishes_a_score(on_one):
    config, (summary, workdir, _) = support.PROBES["pretrained"], on_one("pretrained")
    runs = summary["metrics"]["auroc"]["per_run"]
    held_out = config.task.load()["held_out"]
    labels = np.asarray(held_out.targets[0])
    layers = recurrent_layers(build_cell(config.model), config.model)
    model = config.task.module(layers, config.model)
    last = leaves(workdir, 8)
    params = traverse_util.unflatten_dict(
        {
            tuple(name.split("."))[1:]: value
            for name, value in last.items()
            if name.startswith("params.")
        }
    )
    apply = jax.jit(jax.vmap(lambda params: model.apply({"params": params}, held_out.inputs)))
    for logits, run in zip(apply(params)[:, 0, :, 0], runs, strict=True):
        np.testing.assert_allclose(run["value"], roc_auc_score(labels, logits), rtol=1e-6)


@pytest.mark.parametrize(
    "name", thinned([(name,) for name in support.PROBES], lambda name: name in ON_EIGHT)
)
def test_eight_devices_differ_by_roundings_alone(name, on_one, on_eight):
    _, _, one = on_one(name)
    of_eight, steps = on_eight() / name, support.PROBES[name].training.steps
    # Adam's first moments after one step are a tenth of the gradient.
    gradient = {key: value for key, value in leaves(one, 1).items() if ".mu." in key}
    assert gradient
    actual = leaves(of_eight, 1)
    assert_close({key: actual[key] for key in gradient}, gradient, 1e-5)
    assert_close(leaves(of_eight, steps), leaves(one, steps), 1e-4)
    rows = [list(read_rows(workdir / "metrics.jsonl")) for workdir in (of_eight, one)]
    for actual, expected in zip(*rows, strict=True):
        assert actual["step"] == expected["step"]
        for score, values in expected["held_out"].items():
            np.testing.assert_allclose(actual["held_out"][score], values, rtol=1e-4)


def test_a_task_that_does_not_cut_its_rows_is_refused(on_eight):
    sentence = (on_eight() / "careless").read_text()
    assert sentence == (
        "the axes of ragged say that axis 1 is the batch of 1 rows, but a leaf has the shape "
        "(5, 8, 2)."
    )


def assert_close(actual, expected, tolerance):
    """max|a - b| <= tolerance * max|b| for each of the arrays by name."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        largest = np.abs(value[np.isfinite(value)]).max(initial=0)
        np.testing.assert_allclose(
            actual[name], value, rtol=0, atol=tolerance * largest, err_msg=name
        )


def test_a_run_that_was_killed_ends_with_the_same_bits(on_one, on_eight):
    config = support.PROBES[eight.KILLED]
    summary, whole, _ = on_one(eight.KILLED)
    killed = on_eight() / "killed"
    assert sorted(path.name for path in (killed / "checkpoints").iterdir()) == ["0", "4"]
    assert support.run(config, killed)["metrics"] == summary["metrics"]
    assert_same_run(killed, whole, config.training.steps)


def test_a_model_whose_words_devices_share_is_that_of_one(on_eight):
    """A tied softmax over seven words on 3 x 2 devices, on two and on one; what they keep after
    three steps goes on on each of them alike."""
    with np.load(on_eight() / "words.npz") as file:
        arrays = dict(file)
    meshes = ("vocab:3,data:2", "vocab:2", "data:1")
    rows = [arrays.pop(f"{mesh}/rows").tolist() for mesh in meshes]
    assert rows == [[3], [4], [7]]  # of seven, filled up
    compared = set()
    for name, value in arrays.items():
        origin, mesh, leaf = name.split("/")
        expected = arrays[f"data:1/data:1/{leaf}"]
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6, err_msg=name)
        compared.add((origin, mesh, leaf))
    assert ("vocab:3,data:2", "data:1", "optimizer.1.mu.softmax.bias") in compared
    assert ("vocab:3,data:2", "vocab:2", "best.params.encoder.Embed_0.embedding") in compared
