"""Copy runs evaluated at other delays, and the wishes that cannot be met."""

import contextlib
import dataclasses
import functools
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.adding.settings import ADDING
from experiments.command import flags, runs
from experiments.copy.settings import COPY
from experiments.records.checkpoints import Checkpoints
from experiments.records.workdir import Workdir, append_row
from experiments.settings.cells import build_cell
from experiments.settings.resolver import resolve
from experiments.training import loop
from experiments.training.learner import Learner
from experiments.transfer_copy import __main__ as binary
from experiments.transfer_copy import study
from experiments.transfer_copy.settings import TRANSFER_COPY
from recurrent_gates import unroll
from tests.experiments import support

TINY = {name: value for name, value in support.TINY.items() if name != "embedding"}
TINY |= {"layout": "delimiter", "loss_on": "all", "inputs": "one_hot"}


def tiny(**settings):
    return resolve(COPY, "hdetach", TINY | {"detach_prob": 0.0} | settings)


def start(*argv):
    def define(values):
        flags.define_experiment(TRANSFER_COPY, values)
        binary.define(values)

    binary.begin(flags.parse(["transfer_copy", *argv], define))


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """Two copy runs: one trained, and one with two seeds and two rates of which one failed."""
    directory = tmp_path_factory.mktemp("copy")
    for steps in (2, 4):
        loop.run(tiny(steps=steps), directory / "plain")
    config = tiny(detach_prob=0.25, seeds=2, learning_rates=(1e-2, 1e30))
    learner, work = Learner(config), Workdir(directory / "detached")
    learner.load()
    with contextlib.closing(work):
        work.claim(config)
        with contextlib.closing(Checkpoints(work.checkpoints)) as checkpoints:
            diverged = jnp.array([-1, -1, 2, 3])
            checkpoints.save(4, learner.initial()._replace(diverged_at=diverged))
        append_row(work.metrics, {"step": 4})
        lanes = [{"value": 0.5}, {"value": 0.5}, {"value": None}, {"value": None}]
        summary = {"steps": 4, "metrics": {"accuracy": {"per_run": lanes}}}
        work.write_json("summary.json", summary)
    return directory


@pytest.fixture(scope="module")
def finished(copies):
    """These runs, read."""
    return {path.name: runs.finished(path, [COPY]) for path in copies.iterdir()}


def by_hand(one, lane, delay):
    """Accuracy on the copied tokens, from the cell and the decoder's matrices."""
    task, params = one.config.task, one.lane(one.params, lane)
    tokens = np.asarray(study._at_delay(one.config, delay).task.load()["tokens"])
    n, size = tokens.shape
    inputs = np.zeros((2 * n + delay, size), int)
    inputs[:n], inputs[n + delay - 1] = tokens, task.symbols + 1
    xs = jnp.asarray(np.eye(task.vocabulary, dtype=np.float32)[inputs])
    cell = build_cell(one.config.model)
    _, ys = unroll(cell, params["recurrent"]["cell"], xs)
    x = np.asarray(ys)[-n:]
    for index in range(len(one.config.model.decoder) + 1):
        layer = params["decoder"][f"Dense_{index}"]
        kernel, bias = np.asarray(layer["kernel"]), np.asarray(layer["bias"])
        x = (np.maximum(x, 0) if index else x) @ kernel + bias
    return np.mean(np.argmax(x, axis=-1) == tokens)


@pytest.mark.long
def test_accuracies_are_those_of_a_longer_delay(finished):
    for name, lanes in (("plain", [0]), ("detached", [0, 1])):
        one = finished[name]
        for delay in (4, 9):
            measured = study.accuracies(one, delay)
            for lane in lanes:
                assert measured[lane] == pytest.approx(by_hand(one, lane, delay), abs=1e-6)
            assert measured[len(lanes) :] == [None] * (len(measured) - len(lanes))


@pytest.mark.long
def test_few_examples_at_a_time_have_the_same_score(finished, monkeypatch):
    monkeypatch.setattr("experiments.training.supervised._EVALUATION_STEPS", 100)  # of 15 each
    measured = study.accuracies(finished["plain"], 9)
    assert measured[0] == pytest.approx(by_hand(finished["plain"], 0, 9), abs=1e-6)


def test_fresh_sequences_are_scored_and_not_those_that_chose_the_parameters():
    """5,000 at every delay, uniform, the same for all runs; the published code draws as many."""
    plain, other = tiny(steps=4), tiny(detach_prob=0.25, seeds=2)
    held_out = np.asarray(plain.task.load()["tokens"])
    fresh = [
        np.asarray(study._at_delay(config, delay).task.load()["tokens"])
        for config, delay in ((plain, 4), (plain, 9), (other, 9))
    ]
    assert fresh[0].shape == (3, 5000)
    for tokens in fresh[1:]:
        np.testing.assert_array_equal(tokens, fresh[0])
    assert not np.array_equal(fresh[0][:, :40], held_out)
    counts = np.bincount(fresh[0].ravel(), minlength=11)
    np.testing.assert_allclose(counts, [0, *[1500] * 10], atol=5 * np.sqrt(1500))

    tall = dataclasses.replace(plain, task=dataclasses.replace(plain.task, tokens=8))
    of_both = {
        tuple(column)
        for config in (tall, study._at_delay(tall, 4))
        for column in np.asarray(config.task.load()["tokens"]).T
    }
    assert len(of_both) == 40 + 5000  # of 10^8: no sequence is in both


@pytest.mark.long
def test_finished_runs_become_one_table(copies, finished, tmp_path, drawn, capsys):
    start(
        f"--copy_workdir={copies / 'plain'},{copies / 'detached'}",
        *("--delays=9,6", f"--workdir={tmp_path}"),
    )
    printed = capsys.readouterr().out
    results = json.loads((tmp_path / "transfer.json").read_text())
    labels = ["gru", "gru detach 0.25 rate 0.01", "gru detach 0.25 rate 1e+30"]
    assert list(results) == labels
    one, two, bad = results.values()
    assert one["trained_at"] == two["trained_at"] == bad["trained_at"] == 4
    assert one["lanes"] == [[0, 1e-2]]
    assert one["run"]["identity"] == finished["plain"].config.identity()
    assert two["run"]["overrides"]["detach_prob"] == 0.25
    assert two["lanes"] == [[0, 1e-2], [1, 1e-2]]
    assert bad["lanes"] == [[0, 1e30], [1, 1e30]]
    rows = []
    for delay in ("4", "6", "9"):
        a, b = two["accuracy"][delay]
        assert [a, b, None, None] == study.accuracies(finished["detached"], int(delay))
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
    line = drawn[-1].axes[0].lines[0]
    np.testing.assert_array_equal(line.get_xdata(), [4, 6, 9])
    np.testing.assert_array_equal(line.get_ydata(), [v[0] for v in one["accuracy"].values()])
    means = np.array([values for values in two["accuracy"].values()]).mean(axis=1)
    np.testing.assert_allclose(drawn[-1].axes[0].lines[1].get_ydata(), means, rtol=1e-12)
    assert np.isnan(drawn[-1].axes[0].lines[2].get_ydata()).all()
    legend = [text.get_text() for text in drawn[-1].axes[0].get_legend().texts]
    assert legend == [*labels[:2], labels[2] + "**"]
    assert "chance (0.1)" in {text.get_text() for text in drawn[-1].axes[0].texts}


SMALL = (
    *("--cell=rnn", "--hidden_size=3", "--tokens=3", "--length=4", "--held_out_sequences=40"),
    *("--batch_size=8", "--steps=4", "--eval_every=2", "--seed=3", "--detach_per_example"),
)


@pytest.mark.long
def test_it_trains_by_itself(tmp_path, monkeypatch, capsys):
    evaluated = []  # the values are another test's matter
    monkeypatch.setattr(
        study, "accuracies", lambda finished, delay: evaluated.append(delay) or [0.5]
    )
    start(f"--workdir={tmp_path}", "--detach_probs=0,1", *SMALL)
    capsys.readouterr()
    results = json.loads((tmp_path / "transfer.json").read_text())
    assert list(results) == ["detach-0", "detach-1"]
    for label, result in results.items():
        assert list(result["accuracy"]) == ["4", "8", "16", "20", "40", "80", "200"]
        assert evaluated == 2 * [4, 8, 16, 20, 40, 80, 200]
        config = json.loads((tmp_path / label / "config.json").read_text())["config"]
        assert config["carry"]["detach_prob"] == float(label[-1])
        assert config["carry"]["detach_per_example"] is (label == "detach-1")
        assert config["training"]["seed"] == 3
    states = [support.leaves(tmp_path / label, 4) for label in results]
    assert any(not np.array_equal(states[0][name], states[1][name]) for name in states[0])

    start(f"--workdir={tmp_path}", "--detach_probs=0,1", *SMALL)
    assert "step 2/4" not in capsys.readouterr().out  # finished: nothing is trained again
    assert json.loads((tmp_path / "transfer.json").read_text()) == results
    assert not list(tmp_path.glob("transfer-*"))

    for number, delay in ((1, 9), (2, 7)):  # other delays leave the reports on the first ones
        before = {
            suffix: (tmp_path / f"transfer.{suffix}").read_text() for suffix in ("json", "md")
        }
        start(f"--workdir={tmp_path}", "--detach_probs=0,1", f"--delays={delay}", *SMALL)
        newest = json.loads((tmp_path / "transfer.json").read_text())
        assert list(newest["detach-0"]["accuracy"]) == sorted(["4", str(delay)])
        for suffix, text in before.items():
            assert (tmp_path / f"transfer-{number}.{suffix}").read_text() == text


@pytest.mark.parametrize(
    ("argv", "probs"),
    [
        ([], [0, 0.25]),
        (["--protocol=hdetach"], [0, 0.25, 0.5]),
        (["--detach_prob=0.4"], [0.4]),
        (["--protocol=hdetach", "--detach_probs=0.1234567,0.1234568"], [0.1234567, 0.1234568]),
    ],
)
def test_describe(capsys, argv, probs):
    start("--describe", *argv)
    described = json.loads(capsys.readouterr().out)
    assert list(described["runs"]) == [f"detach-{p}" for p in probs]
    assert [r["config"]["carry"]["detach_prob"] for r in described["runs"].values()] == probs
    task = described["config"]["task"]
    assert (task["name"], task["layout"], task["symbols"]) == ("copy", "delimiter", 8)
    assert described["config"]["training"]["keep_best"]  # h-detach's best_model
    if "--protocol=hdetach" in argv:
        assert (task["length"], task["tokens"], task["inputs"]) == (100, 10, "scalar")


@pytest.mark.parametrize(
    ("argv", "carry"),
    [
        (["--detach_per_example", "--detach_off_steps=9"], [(False, 0, "h"), (True, 9, "h")]),
        (["--detach_state=c"], [(False, 0, "h"), (False, 0, "c")]),
        (["--detach_state=c", "--damp_prob=0.5"], [(False, 0, "c"), (False, 0, "c")]),
    ],
)
def test_a_run_that_does_not_detach_does_without_the_flags_of_detaching(argv, carry, capsys):
    start("--describe", *argv)
    described = json.loads(capsys.readouterr().out)["runs"]
    settings = [run["config"]["carry"] for run in described.values()]
    names = ("detach_per_example", "detach_off_steps", "detach_state")
    assert [tuple(one[name] for name in names) for one in settings] == carry


@pytest.mark.long
def test_where_the_results_go(copies, monkeypatch, tmp_path):
    trained, evaluated = [], []
    monkeypatch.setattr(study, "run", lambda *arguments: trained.append(arguments))
    monkeypatch.setattr(study, "evaluate", lambda *arguments: evaluated.append(arguments))
    start("--delays=30,10")
    start("--protocol=hdetach", "--profile=3", f"--workdir={tmp_path}")
    start(f"--copy_workdir={copies / 'plain'}")
    start(f"--copy_workdir={copies / 'plain'}", f"--workdir={tmp_path}")
    assert str(trained[0][2]).startswith("runs/transfer_copy/small-")
    assert (trained[0][1], trained[0][3]) == ((30, 10), 0)
    assert trained[1][1:4] == ((), tmp_path, 3)
    assert str(evaluated[0][2]).startswith("runs/transfer_copy/finished-")
    assert evaluated[1][1:] == ((), tmp_path)


def test_only_the_last_checkpoint_will_do(copies, tmp_path):
    """An earlier one is not what the summary is of; nothing is removed."""
    shutil.copytree(copies / "plain", tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    kept = sorted(path.name for path in checkpoints.iterdir())
    assert kept == ["2", "4"]
    largest = max((checkpoints / "4").rglob("*"), key=lambda path: path.stat().st_size)
    data = largest.read_bytes()
    largest.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
    sentence = refused(f"--copy_workdir={tmp_path / 'run'}", f"--workdir={tmp_path / 'out'}")
    assert sentence.startswith(
        f"the checkpoint of step 4 in {tmp_path / 'run'} is missing, damaged"
    )
    assert sorted(path.name for path in checkpoints.iterdir()) == kept
    loop.run(tiny(), tmp_path / "run")  # as the sentence says
    support.assert_same_bits(
        support.leaves(tmp_path / "run", 4), support.leaves(copies / "plain", 4)
    )


refused = functools.partial(support.refusal, start)


BAD = {
    "--detach_prob=0.5 --detach_probs=0,0.5": "--detach_prob and --detach_probs exclude each other",
    "--detach_probs=0,0.5,0": "--detach_probs must name each value once.",
    "--detach_probs=none": "--detach_probs must name at least one value.",
    "--detach_probs=a": "it must be a number such as 0.004 or 4e-3, got 'a'",
    "--detach_probs=0,2": "is a probability in [0, 1], got 2",
    "--detach_prob=0 --detach_per_example": "--detach_per_example has no effect with",
    "--detach_probs=0 --detach_off_steps=3": "--detach_off_steps has no effect with",
    "--detach_prob=0 --detach_state=c": "--detach_state has no effect without --detach_prob",
    "--delays=30,40,30": "--delays must name each value once.",
    "--delays=none": "--delays must name at least one value.",
    "--delays=30,x": "it must be a whole number in plain digits, got 'x'",
    "--delays=0x10": "it must be a whole number in plain digits, got '0x10'",
    "--delays=3,0": "--delays must be at least 1 and below 2147483648, got 0.",
    "--delays=99999999999999": "--delays must be at least 1 and below 2147483648, got 9999",
    "--delays=2000000000": "--delays=2000000000: this run needs more than",
    "--length=100000000": "--delays must be at least 1 and below 2147483648, got 5000000000.",
    "--process_id=0": "There is no flag --process_id; see --help.",
}


@pytest.mark.parametrize("wish", BAD)
def test_bad_wishes_get_one_sentence_before_anything_is_trained(wish, monkeypatch):
    monkeypatch.setattr(study, "run", pytest.fail)
    assert BAD[wish] in refused(*wish.split())


def test_bad_wishes_beside_finished_runs(copies, tmp_path, monkeypatch):
    monkeypatch.setattr(study, "evaluate", pytest.fail)
    plain, none = copies / "plain", tmp_path / "none"
    workdir = f"--copy_workdir={plain}"
    assert refused(f"--copy_workdir={none}") == f"{none} is not a workdir: it has no config.json."
    training = (
        *("--cell=gru", "--steps=9", "--detach_probs=0,1", "--detach_prob=0", "--profile=0"),
        *("--learning_rate=1", "--lambda=0.5", "--describe", "--protocol=small"),
    )
    for flag in training:
        name = re.match(r"--\w+", flag)[0]
        assert refused(workdir, flag) == f"{name} is for training: --copy_workdir trains nothing."
    for delays in ("--delays=3,0", "--delays=99999999999999"):
        assert refused(workdir, delays) == refused(delays)
    assert "--delays=2000000000: this run needs more than" in refused(
        workdir, "--delays=2000000000"
    )
    twice = f"--copy_workdir={plain},{copies / 'detached' / '..' / 'plain'}"
    assert refused(twice) == "--copy_workdir must name each value once."

    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.json").write_text((plain / "config.json").read_text())
    assert "is not finished" in refused(f"--copy_workdir={tmp_path / 'begun'}")

    old = json.loads((plain / "config.json").read_text())
    del old["config"]["task"]["layout"]
    (tmp_path / "begun" / "config.json").write_text(json.dumps(old))
    assert "another version" in refused(f"--copy_workdir={tmp_path / 'begun'}")


def test_runs_of_other_tasks_are_refused(tmp_path):
    with contextlib.closing(Workdir(tmp_path)) as work:
        work.claim(resolve(ADDING, "small", {}))
    assert refused(f"--copy_workdir={tmp_path}") == (
        f"the run in {tmp_path} is one of adding, not of copy."
    )


def test_equal_labels_get_the_workdir(copies, tmp_path):
    shutil.copytree(copies / "plain", tmp_path / "plain")
    labels = list(study.finished_runs([copies / "plain", copies / "detached", tmp_path / "plain"]))
    assert labels == [
        *(f"gru ({copies / 'plain'})", "gru detach 0.25", f"gru ({tmp_path / 'plain'})")
    ]


def test_what_is_read_is_what_was_trained(copies, finished):
    one = finished["detached"]
    settings = {"detach_prob": 0.25, "seeds": 2, "learning_rates": (1e-2, 1e30)}
    assert one.config.resolved() == tiny(**settings).resolved()
    recorded = json.loads((copies / "detached" / "config.json").read_text())
    assert one.config.identity() == recorded["identity"]
    for name, leaf in support.leaves(copies / "detached", one.summary["steps"]).items():
        if name.startswith("params."):
            value = one.params
            for key in name.split(".")[1:]:
                value = value[key]
            np.testing.assert_array_equal(value, leaf)
    first = jax.tree.leaves(one.lane(one.params, 1))[0]
    np.testing.assert_array_equal(first, jax.tree.leaves(one.params)[0][1])
