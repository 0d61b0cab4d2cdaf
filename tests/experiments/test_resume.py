"""Stopping, killing, damaging and extending a run."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.command import runs
from experiments.copy.settings import COPY
from experiments.machine import stopping
from experiments.records import checkpoints as checkpoints_module
from experiments.records.checkpoints import Checkpoints
from experiments.records.workdir import Workdir, read_rows
from experiments.settings.errors import UserError
from experiments.training import loop, supervised
from experiments.training.learner import Learner
from tests.experiments import support
from tests.experiments.support import ROOT, assert_same_bits, environment, leaves, tiny

pytestmark = pytest.mark.usefixtures("learners")


@pytest.fixture(autouse=True, scope="module")
def every_evaluation_is_checkpointed():
    """As after ten seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_CHECKPOINT_SECONDS", 0.0)
        yield


@pytest.fixture(scope="module")
def finished(learners, tmp_path_factory):
    """A finished run of four steps."""
    path = tmp_path_factory.mktemp("finished")
    loop.run(tiny(), path)
    return path


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of it to break."""
    path = tmp_path / "run"
    subprocess.run(["cp", "-r", finished, path], check=True)
    return path


def files(path):
    return [file for file in path.rglob("*") if file.is_file()]


def largest(path):
    """The file that holds the arrays."""
    return max(files(path), key=lambda file: file.stat().st_size)


def truncate(checkpoint):
    file = largest(checkpoint)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip_a_bit(checkpoint):
    file = largest(checkpoint)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def empty(checkpoint):
    for file in files(checkpoint):
        file.write_bytes(b"")


@pytest.mark.long
def test_a_finished_run_prints_its_summary(copied, monkeypatch, capsys):
    monkeypatch.setattr("experiments.training.learner.Learner.prepare", None)  # nothing is compiled
    before = {file: file.read_bytes() for file in files(copied) if file.suffix == ".jsonl"}
    summary = loop.run(tiny(), copied)
    assert summary == json.loads((copied / "summary.json").read_text())
    assert "held-out copied_token_probability" in capsys.readouterr().out
    assert {file: file.read_bytes() for file in before} == before


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, empty])
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(finished, copied, damage, capsys):
    damage(copied / "checkpoints" / "4")
    loop.run(tiny(), copied)
    printed = capsys.readouterr().out
    assert printed.count("warning") == 1
    assert f"warning: the checkpoint {copied}/checkpoints/4 is damaged" in printed
    assert "going on from step 2" in printed
    assert_same_bits(leaves(copied, 4), leaves(finished, 4))
    assert (copied / "metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()


def test_a_state_that_is_not_what_was_written_is_damaged(copied, monkeypatch):
    """Whole files and other digests: what the file system cannot notice."""
    shapes = Learner(tiny()).shapes()
    with contextlib.closing(Checkpoints(copied / "checkpoints")) as checkpoints:
        state = checkpoints.read(4, shapes)
        for step, digests in ((6, checkpoints_module._digests), (8, lambda directory: {})):
            with monkeypatch.context() as patch:
                patch.setattr(checkpoints_module, "_digests", digests)
                checkpoints.save(step, state)
        assert checkpoints.read(6, shapes) is not None
        assert checkpoints.read(8, shapes) is None


def test_a_finished_run_has_its_summary_without_a_good_checkpoint(copied, capsys):
    for step in (0, 2, 4):
        flip_a_bit(copied / "checkpoints" / str(step))
    assert loop.run(tiny(), copied) == json.loads((copied / "summary.json").read_text())
    assert "warning: every checkpoint of this run, which is finished" in capsys.readouterr().out


def test_a_run_that_saved_nothing_starts_again(copied, finished, tmp_path, capsys):
    """And may be shorter than what was lost."""
    (copied / "summary.json").unlink()
    subprocess.run(["rm", "-r", copied / "checkpoints"], check=True)
    assert loop.run(tiny(steps=2), copied)["steps"] == 2
    assert f"there is no checkpoint in {copied}: starting again" in capsys.readouterr().out
    loop.run(tiny(), copied)
    loop.run(tiny(steps=2), tmp_path / "first")
    assert "starting again" not in capsys.readouterr().out
    assert (copied / "metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()


def test_no_good_checkpoint_is_an_error(copied):
    (copied / "summary.json").unlink()
    for step in (0, 2, 4):
        flip_a_bit(copied / "checkpoints" / str(step))
    with pytest.raises(UserError, match=r"every checkpoint in .* is damaged") as error:
        loop.run(tiny(), copied)
    assert "\n" not in str(error.value)
    assert sorted(path.name for path in (copied / "checkpoints").iterdir()) == ["0", "2", "4"]


def test_raising_the_steps_goes_on(copied, tmp_path):
    summary = loop.run(tiny(steps=6), copied)
    assert summary["steps"] == 6
    loop.run(tiny(steps=6), tmp_path / "whole")
    assert_same_bits(leaves(copied, 6), leaves(tmp_path / "whole", 6))
    whole = (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    assert (copied / "metrics.jsonl").read_bytes() == whole
    assert json.loads((copied / "config.json").read_text())["config"]["training"]["steps"] == 6
    assert json.loads((copied / "summary-4.json").read_text())["steps"] == 4


def test_another_backend_is_said_and_kept(copied, capsys):
    loop.run(tiny(steps=6, backend="scan"), copied)
    change = (
        "trained with --backend=auto and goes on with --backend=scan: its last bits will differ"
    )
    assert change in capsys.readouterr().out
    document = json.loads((copied / "config.json").read_text())
    assert (document["backend"], document["continued"][0]["backend"]) == ("auto", "scan")


def test_origins_of_an_earlier_version_have_no_backend(copied, capsys):
    """A run that went on elsewhere, before backends were recorded."""
    path = copied / "config.json"
    document = json.loads(path.read_text())
    origin = {name: document[name] for name in ("commit", "versions", "device")}
    del document["backend"]
    path.write_text(json.dumps({**document, "continued": [{**origin, "commit": "0123abc"}]}))
    loop.run(tiny(steps=6), copied)
    assert "its last bits will differ" not in capsys.readouterr().out
    document = json.loads(path.read_text())
    assert [entry["backend"] for entry in document["continued"]] == ["auto", "auto"]


def test_a_finished_run_that_goes_on_is_not_finished(copied, monkeypatch):
    monkeypatch.setattr(loop, "stopping", stopping_at(0))
    assert loop.run(tiny(steps=6), copied) is None
    with pytest.raises(UserError, match=r"is not finished; its command with --steps=6 goes on\."):
        runs.finished(copied, [COPY])
    summary = json.loads((copied / "summary-4.json").read_text())
    monkeypatch.setattr(loop, "stopping", stopping.stopping)
    assert loop.run(tiny(), copied)["metrics"] == summary["metrics"]  # it was not trained


def test_a_row_that_was_cut_short_is_dropped(finished, copied):
    for step in (2, 4):
        subprocess.run(["rm", "-r", copied / "checkpoints" / str(step)], check=True)
    content = (copied / "metrics.jsonl").read_bytes()
    (copied / "metrics.jsonl").write_bytes(content[:-20])
    loop.run(tiny(), copied)
    assert (copied / "metrics.jsonl").read_bytes() == content
    assert_same_bits(leaves(copied, 4), leaves(finished, 4))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"cell": "lstm"}, r"\(cell is gru there and lstm here\)"),
        ({"seed": 1}, r"\(seed is 0 there and 1 here\)"),
        ({"learning_rates": (1.0,)}, r"learning_rates is \[0.01\] there and \[1.0\] here"),
        ({"steps": 3}, "has been trained for 4 steps; --steps can only be raised"),
    ],
)
def test_another_configuration_is_refused(copied, settings, sentence):
    before = (copied / "config.json").read_bytes()
    with pytest.raises(UserError, match=sentence):
        loop.run(tiny(**settings), copied)
    assert (copied / "config.json").read_bytes() == before


def test_a_schedule_that_needs_its_length_cannot_be_extended(tmp_path):
    schedule = {"detach_prob": 0.5, "detach_off_steps": 1}
    loop.run(tiny(**schedule, steps=2), tmp_path)
    with pytest.raises(UserError, match="is made for 2 steps and cannot get another length"):
        loop.run(tiny(**schedule, steps=4), tmp_path)


def test_another_mesh_is_said(copied, capsys):
    loop.run(tiny(steps=6, mesh="data:1"), copied)
    said = "this run was trained with --mesh=auto and goes on with --mesh=data:1: its last bits"
    assert said in capsys.readouterr().out
    loop.run(tiny(steps=8, mesh="data:1"), copied)
    assert "was trained" not in capsys.readouterr().out


def test_a_run_of_many_devices_is_read_on_one(copied):
    expected = runs.finished(copied, [COPY])
    recorded = json.loads((copied / "config.json").read_text())
    recorded["config"]["training"]["mesh"] = "data:8"
    (copied / "config.json").write_text(json.dumps(recorded))
    read = runs.finished(copied, [COPY])
    assert_same_bits(_by_name(read.params), _by_name(expected.params))
    features = read.features(read.params, 3)  # its model runs here
    np.testing.assert_array_equal(features, expected.features(expected.params, 3))


def _by_name(tree):
    return {str(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}


def test_other_devices_are_said(copied, capsys):
    config = json.loads((copied / "config.json").read_text())
    elsewhere = json.dumps(config | {"device": "TPU v5e x 4"})
    (copied / "config.json").write_text(elsewhere)
    loop.run(tiny(), copied)  # it is finished
    assert "goes on" not in capsys.readouterr().out
    assert (copied / "config.json").read_text() == elsewhere
    loop.run(tiny(steps=6), copied)
    assert "was trained on TPU v5e x 4 and goes on on cpu x" in capsys.readouterr().out
    recorded = json.loads((copied / "config.json").read_text())
    assert recorded["device"] == "TPU v5e x 4"
    assert [later["device"] for later in recorded["continued"]] == [config["device"]]


def test_a_damaged_config_is_an_error(copied):
    (copied / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json is damaged: it is not a JSON object\.$"):
        loop.run(tiny(), copied)
    (copied / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"config\.json was made by another version of these"):
        loop.run(tiny(), copied)


def test_two_processes_cannot_share_a_workdir(copied):
    first = Workdir(copied)
    first.claim(tiny())
    with pytest.raises(UserError, match="in use by another process"):
        loop.run(tiny(), copied)
    first.close()
    loop.run(tiny(), copied)


def stopping_at(calls):
    """In place of ``stopping``: SIGTERM comes before the pause of that number."""
    left = itertools.count(calls, -1)

    class Stops(stopping.Stopping):
        def pause(self):
            if next(left) == 0:
                raise stopping.StoppedError

        def agree(self, together):
            self.pause()
            return together

    return lambda: contextlib.nullcontext(Stops())


@pytest.mark.long
def test_a_run_can_be_stopped_in_an_evaluation(tmp_path, monkeypatch, capsys):
    """In the first and the last one, in the test at the end, and between steps."""
    monkeypatch.setattr(supervised, "_EVALUATION_ROWS", 20)  # two parts
    monkeypatch.setattr(loop, "_DISPATCH_SECONDS", 0.0)  # one step at a time
    settings = {"keep_best": True, "steps": 2}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    loop.run(tiny(**settings), whole)
    # Pauses: two parts, step, step, two parts, and two parts more at the end.
    for calls, step, rows in ((1, 0, 0), (3, 1, 1), (2, 2, 1), (1, 2, 1), (3, 2, 2)):
        monkeypatch.setattr(loop, "stopping", stopping_at(calls))
        assert loop.run(tiny(**settings), parts) is None
        assert f"stopped at step {step}; the same" in capsys.readouterr().out
        assert len(list(read_rows(parts / "metrics.jsonl"))) == rows
    assert not (parts / "summary.json").exists()
    monkeypatch.setattr(loop, "stopping", stopping_at(2))
    assert loop.run(tiny(**settings), parts) is not None
    assert_same_bits(leaves(parts, 2), leaves(whole, 2))
    assert (parts / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_an_evaluation_that_was_not_finished_leaves_no_row(copied, finished):
    """Killed after the row of an evaluation and before its state, which replaces one without."""
    with contextlib.closing(Checkpoints(copied / "checkpoints")) as checkpoints:
        step, state = checkpoints.restore(Learner(tiny()).shapes(), print)
        checkpoints.save(step, state._replace(loss_total=np.float32(1), loss_weight=np.float32(1)))
    loop.run(tiny(), copied)
    assert_same_bits(leaves(copied, 4), leaves(finished, 4))
    rows = [json.loads(row) for row in (copied / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 2, 4]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_what_was_learnt(number, tmp_path, finished, monkeypatch, capsys):
    """Between two evaluations that are not checkpointed."""
    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)]
    add = Workdir.add

    def add_and_stop(work, row):
        add(work, row)
        if row["step"] == 2:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(Workdir, "add", add_and_stop)
        patch.setattr(loop, "_CHECKPOINT_SECONDS", 1e9)
        assert loop.run(tiny(), tmp_path) is None
    assert "stopped at step 2; the same command goes on from there" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["2"]
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)] == before
    loop.run(tiny(), tmp_path)
    assert_same_bits(leaves(tmp_path, 4), leaves(finished, 4))


def test_a_second_interrupt_ends_at_once(monkeypatch):
    ended = []
    monkeypatch.setattr(stopping, "exit_at_once", lambda: ended.append(True))
    with stopping.stopping() as stop:
        for number, ends in ((signal.SIGINT, []), (signal.SIGTERM, []), (signal.SIGINT, [True])):
            os.kill(os.getpid(), number)
            assert (stop.requested, ended) == (True, ends)


def test_evaluations_are_checkpointed_every_ten_seconds(tmp_path, monkeypatch):
    """And at the end."""
    monkeypatch.setattr(loop, "_CHECKPOINT_SECONDS", 10.0)
    times = iter([9.0, 11.0, 1.0])  # at the evaluations of steps 0, 2 and 4
    monkeypatch.setattr(loop.Clock, "since_save", property(lambda self: next(times)))
    loop.run(tiny(), tmp_path)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2", "4"]


FLAGS = ("--cell=gru", "--hidden_size=8", "--length=3", "--batch_size=8", "--held_out_sequences=40")
FLAGS += ("--steps=600", "--eval_every=50")
SOURCE = """
import runpy, sys
from experiments.training import loop
loop._CHECKPOINT_SECONDS = 0.0
sys.argv = ["experiments.copy", *sys.argv[1:]]
runpy.run_module("experiments.copy", run_name="__main__")
"""


def trained(workdir, signal_number=None, at_least=0):
    """Runs until some rows of metrics are there, then sends a signal; returns the process."""
    process = subprocess.Popen(
        [sys.executable, "-c", SOURCE, *FLAGS, f"--workdir={workdir}"],
        cwd=ROOT,
        env=environment(2),
        stdout=subprocess.PIPE,
        text=True,
    )
    metrics = workdir / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < at_least:
        assert process.poll() is None, "ended before it was interrupted"
        time.sleep(0.005)
    if signal_number is not None:
        process.send_signal(signal_number)
    process.output, _ = process.communicate()
    return process


@pytest.mark.long
def test_killed_runs_end_with_the_same_bits(tmp_path):
    """As processes, whose programs are compiled by the first one and kept."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    assert trained(killed, signal.SIGKILL, 3).returncode == -signal.SIGKILL
    kept = {path.name for path in Path(support.COMPILED).glob("*-cache")}
    assert any("_advance" in name or "steps" in name for name in kept), kept
    asked = trained(killed, signal.SIGINT, 6)
    assert asked.returncode == 0
    assert "the same command goes on from there" in asked.output
    for workdir in (killed, whole):
        assert trained(workdir).returncode == 0
    assert_same_bits(leaves(killed, 600), leaves(whole, 600))
    assert (killed / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    steps = [row["step"] for row in read_rows(whole / "metrics.jsonl")]
    np.testing.assert_array_equal(steps, np.arange(0, 601, 50))
