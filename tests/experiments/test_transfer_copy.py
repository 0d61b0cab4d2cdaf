"""Copy runs evaluated at other delays, and the wishes that cannot be met."""

import contextlib
import json
import re

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pytest

from experiments import flags, protocols, studies, train, transfer_copy, transfer_study
from experiments.checkpoints import Checkpoints
from experiments.config import UserError, build_cell
from experiments.learner import Learner
from experiments.workdir import Workdir, append_row
from recurrent_gates import unroll
from tests.experiments import support

TINY = support.TINY | {"layout": "delimiter", "loss_on": "all", "inputs": "one_hot", "embedding": 0}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two copy runs: one trained, and one with two seeds and two rates of which one failed."""
    directory = tmp_path_factory.mktemp("copy")
    train.run(tiny(), directory / "plain")
    config = tiny(detach_prob=0.25, seeds=2, learning_rates=(1e-2, 1e30))
    learner, work = Learner(config), Workdir(directory / "detached")
    with contextlib.closing(work), contextlib.closing(Checkpoints(work.path / "checkpoints")) as at:
        work.claim(config)
        at.save(4, learner.initial()._replace(diverged_at=jnp.array([-1, -1, 2, 3])))
        append_row(work.metrics, {"step": 4})
        work.write_json("summary.json", {"steps": 4})
    return directory


def tiny(**settings):
    return protocols.resolve("copy", "hdetach", TINY | {"detach_prob": 0.0} | settings)


def by_hand(found, lane, delay):
    """Accuracy on the copied tokens, from the cell and the decoder's matrices."""
    task, params = found.config.task, found.lane(found.params, lane)
    tokens = np.asarray(task.load()["tokens"])
    n, size = tokens.shape
    inputs = np.zeros((2 * n + delay, size), int)
    inputs[:n], inputs[n + delay - 1] = tokens, task.symbols + 1
    xs = jnp.asarray(np.eye(task.vocabulary, dtype=np.float32)[inputs])
    cell = build_cell(found.config.model)
    _, ys = unroll(cell, params["recurrent"]["cell"], xs)
    x = np.asarray(ys)[-n:]
    for index in range(len(found.config.model.decoder) + 1):
        layer = params["decoder"][f"Dense_{index}"]
        kernel, bias = np.asarray(layer["kernel"]), np.asarray(layer["bias"])
        x = (np.maximum(x, 0) if index else x) @ kernel + bias
    return np.mean(np.argmax(x, axis=-1) == tokens)


def test_accuracies_are_those_of_a_longer_delay(runs):
    for name, lanes in (("plain", [0]), ("detached", [0, 1])):
        found = studies.finished(runs / name)
        for delay in (4, 9):
            measured = transfer_study.accuracies(found, delay)
            for lane in lanes:
                assert measured[lane] == pytest.approx(by_hand(found, lane, delay), abs=1e-6)
            assert measured[len(lanes) :] == [None] * (len(measured) - len(lanes))


def test_the_delay_of_training_gives_the_result_of_training(runs):
    found = studies.finished(runs / "plain")
    result = [run["value"] for run in found.summary["metrics"]["accuracy"]["per_run"]]
    assert transfer_study.accuracies(found, 4) == pytest.approx(result, abs=1e-6)


def start(*argv):
    transfer_copy.begin(
        "transfer_copy", flags.parse(["transfer_copy", *argv], transfer_copy.define)
    )


def test_finished_runs_become_one_table(runs, tmp_path, monkeypatch, capsys):
    shown = []
    monkeypatch.setattr(plt, "close", shown.append)
    start(
        f"--copy_workdir={runs / 'plain'},{runs / 'detached'}",
        *("--delays=9,6", f"--workdir={tmp_path}"),
    )
    printed = capsys.readouterr().out
    results = json.loads((tmp_path / "transfer.json").read_text())
    labels = ["gru", "gru detach 0.25 rate 0.01", "gru detach 0.25 rate 1e+30"]
    assert list(results) == labels
    one, two, bad = results.values()
    assert one["trained_at"] == two["trained_at"] == bad["trained_at"] == 4
    assert one["lanes"] == [[0, 1e-2]]
    assert two["lanes"] == [[0, 1e-2], [1, 1e-2]]
    assert bad["lanes"] == [[0, 1e30], [1, 1e30]]
    whole = studies.finished(runs / "detached")

    rows = []
    for delay in ("4", "6", "9"):
        a, b = two["accuracy"][delay]
        assert [a, b, None, None] == transfer_study.accuracies(whole, int(delay))
        assert bad["accuracy"][delay] == [None, None]
        alone = f"{100 * one['accuracy'][delay][0]:.2f}"
        mean, *ends = (f"{100 * value:.2f}" for value in ((a + b) / 2, min(a, b), max(a, b)))
        rows.append([delay, alone, f"{mean} [{ends[0]}, {ends[1]}]", "- [-, -]**"])
    table = (tmp_path / "transfer.md").read_text()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert cells[0] == ["delay", *labels]
    assert cells[2:] == rows
    assert table in printed

    assert (tmp_path / "figures" / "transfer.png").read_bytes().startswith(b"\x89PNG")
    line = shown[-1].axes[0].lines[0]
    np.testing.assert_array_equal(line.get_xdata(), [4, 6, 9])
    np.testing.assert_array_equal(line.get_ydata(), [v[0] for v in one["accuracy"].values()])
    means = np.array([values for values in two["accuracy"].values()]).mean(axis=1)
    np.testing.assert_allclose(shown[-1].axes[0].lines[1].get_ydata(), means, rtol=1e-12)
    assert np.isnan(shown[-1].axes[0].lines[2].get_ydata()).all()
    legend = [text.get_text() for text in shown[-1].axes[0].get_legend().texts]
    assert legend == [*labels[:2], labels[2] + "**"]
    assert "chance (0.1)" in {text.get_text() for text in shown[-1].axes[0].texts}


def test_it_trains_by_itself(tmp_path, monkeypatch, capsys):
    small = protocols.TASKS["transfer_copy"].protocols["small"]
    settings = TINY | {"cell": "rnn", "hidden_size": 3}
    shrunk = {name: protocols.Sourced(value, "a test") for name, value in settings.items()}
    shrunk = small._replace(settings={**small.settings, **shrunk})
    monkeypatch.setitem(protocols.TASKS["transfer_copy"].protocols, "small", shrunk)
    evaluated = []  # how is another test's matter
    monkeypatch.setattr(
        transfer_study, "accuracies", lambda found, delay: evaluated.append(delay) or [0.5]
    )
    start(f"--workdir={tmp_path}", "--detach_probs=0,1", "--seed=3")
    capsys.readouterr()
    results = json.loads((tmp_path / "transfer.json").read_text())
    assert list(results) == ["detach-0", "detach-1"]
    for label, result in results.items():
        assert list(result["accuracy"]) == ["4", "8", "16", "20", "40", "80", "200"]
        assert evaluated == 2 * [4, 8, 16, 20, 40, 80, 200]
        config = json.loads((tmp_path / label / "config.json").read_text())["config"]
        assert config["carry"]["detach_prob"] == float(label[-1])
        assert config["training"]["seed"] == 3
    states = [support.leaves(tmp_path / label, 4) for label in results]
    assert any(not np.array_equal(states[0][name], states[1][name]) for name in states[0])

    start(f"--workdir={tmp_path}", "--detach_probs=0,1", "--seed=3")
    assert "step 2/4" not in capsys.readouterr().out  # finished: nothing is trained again
    assert json.loads((tmp_path / "transfer.json").read_text()) == results


@pytest.mark.parametrize(
    ("argv", "probs"),
    [
        ([], [0, 0.25]),
        (["--protocol=hdetach"], [0, 0.25, 0.5]),
        (["--detach_prob=0.4"], [0.4]),
        (["--protocol=hdetach", "--detach_probs=0.1,0"], [0.1, 0]),
    ],
)
def test_describe(capsys, argv, probs):
    start("--describe", *argv)
    described = json.loads(capsys.readouterr().out)
    assert list(described["runs"]) == [f"detach-{p:g}" for p in probs]
    assert [r["config"]["carry"]["detach_prob"] for r in described["runs"].values()] == probs
    task = described["config"]["task"]
    assert (task["name"], task["layout"], task["symbols"]) == ("copy", "delimiter", 8)
    assert described["config"]["training"]["keep_best"]  # h-detach's best_model
    if "--protocol=hdetach" in argv:
        assert (task["length"], task["tokens"], task["inputs"]) == (100, 10, "scalar")


def test_few_examples_at_a_time_have_the_same_score(runs, monkeypatch):
    monkeypatch.setattr("experiments.learner._EVALUATION_STEPS", 100)  # at most 6 of 15 steps
    found = studies.finished(runs / "plain")
    measured = transfer_study.accuracies(found, 9)
    assert measured[0] == pytest.approx(by_hand(found, 0, 9), abs=1e-6)


def test_only_the_last_checkpoint_will_do(tmp_path):
    """An earlier one is not what the summary is of; nothing is removed."""
    train.run(tiny(), tmp_path / "run")
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    largest = max(
        (tmp_path / "run" / "checkpoints" / "4").rglob("*"), key=lambda p: p.stat().st_size
    )
    data = largest.read_bytes()
    largest.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
    sentence = refused(f"--copy_workdir={tmp_path / 'run'}", f"--workdir={tmp_path / 'out'}")
    assert sentence.startswith(
        f"the checkpoint of step 4 in {tmp_path / 'run'} is missing, damaged"
    )
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == kept
    train.run(tiny(), tmp_path / "run")  # as the sentence says
    assert studies.finished(tmp_path / "run").summary["steps"] == 4


def refused(*argv):
    with pytest.raises(UserError) as error:
        start(*argv)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_bad_wishes(runs, tmp_path):
    plain, none = runs / "plain", tmp_path / "none"
    assert refused(f"--copy_workdir={none}") == f"{none} is not a workdir: it has no config.json."
    given = f"--copy_workdir={plain}"
    for flag in ("--cell=gru", "--steps=9", "--detach_probs=0,1", "--describe"):
        name = re.match(r"--\w+", flag)[0]
        assert refused(given, flag) == f"{name} is for training: --copy_workdir trains nothing."
    assert refused("--delays=3,0") == refused(given, "--delays=3,0")
    assert refused(given, "--delays=3,0") == "--delays must be at least 1, got 0."
    assert refused(given, "--delays=3,x") == "--delays is a list of numbers, got '3,x'."
    assert refused("--detach_probs=a") == "--detach_probs is a list of numbers, got 'a'."
    assert "is a probability in [0, 1], got 2" in refused("--detach_probs=0,2")

    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.json").write_text((plain / "config.json").read_text())
    assert "is not finished" in refused(f"--copy_workdir={tmp_path / 'begun'}")

    old = json.loads((plain / "config.json").read_text())
    del old["config"]["task"]["layout"]
    (tmp_path / "begun" / "config.json").write_text(json.dumps(old))
    assert "another version" in refused(f"--copy_workdir={tmp_path / 'begun'}")


def test_runs_of_other_tasks_are_refused(tmp_path):
    settings = {"cell": "rnn", "hidden_size": 2, "length": 2, "held_out_sequences": 4}
    config = protocols.resolve("adding", "small", settings | {"batch_size": 2, "steps": 1})
    train.run(config, tmp_path)
    assert refused(f"--copy_workdir={tmp_path}") == (
        f"the run in {tmp_path} is one of adding, not of copy."
    )


def test_what_is_read_is_what_was_trained(runs):
    found = studies.finished(runs / "detached")
    assert (
        found.config.resolved()
        == tiny(detach_prob=0.25, seeds=2, learning_rates=(1e-2, 1e30)).resolved()
    )
    recorded = json.loads((runs / "detached" / "config.json").read_text())
    assert found.config.identity() == recorded["identity"]
    for name, leaf in support.leaves(runs / "detached", found.summary["steps"]).items():
        if name.startswith("params."):
            value = found.params
            for key in name.split(".")[1:]:
                value = value[key]
            np.testing.assert_array_equal(value, leaf)
    first = jax.tree.leaves(found.lane(found.params, 1))[0]
    np.testing.assert_array_equal(first, jax.tree.leaves(found.params)[0][1])
