"""What a run says of itself while it goes on: its pace, its profile, its stopping."""

import contextlib
import fcntl
import functools
import os
import re
import signal
import struct
import sys
import termios
import time

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from experiments.machine import memory
from experiments.machine.profiling import Profile
from experiments.machine.stopping import StoppedError, Stopping, stopping
from experiments.records.reporting import Progress
from experiments.records.workdir import read_rows
from experiments.settings.errors import StorageError, UserError
from experiments.training import loop
from experiments.training.learner import Learner
from tests.experiments.support import tiny

pytestmark = pytest.mark.usefixtures("learners")


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    """Runs draw no figure; where one is the point, ``monkeypatch.undo`` brings it back."""
    monkeypatch.setattr(loop.learning_curve, "draw", lambda *args: None)


@pytest.mark.long
def test_a_profile_is_written_and_the_rates_are_plausible(tmp_path):
    began = time.perf_counter()
    summary = loop.run(tiny(steps=40), tmp_path, profile=20)
    seconds = time.perf_counter() - began
    assert len(list((tmp_path / "profile").rglob("*.xplane.pb"))) == 1
    assert len(list((tmp_path / "profile").rglob("perfetto_trace.json.gz"))) == 1
    assert summary["steps_per_second"] > 40 / seconds
    assert 0 < summary["share_outside_programs"] < 1


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless it is told."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_the_time_left_leaves_out_the_first_evaluation(clock, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", sys.__stdout__)  # no terminal
    progress = Progress(tiny(steps=10), 0)
    row = {"step": 0, "train_loss": [None], "held_out": {"copied_token_probability": [0.5]}}
    clock[0] += 1000  # compiles
    progress.evaluated(row, "held_out")
    clock[0] += 2
    progress.advance(2)
    progress.evaluated(row | {"step": 2, "train_loss": [1.0]}, "held_out")
    assert capsys.readouterr().out.splitlines()[-1].endswith(", 8 s left")


@pytest.mark.parametrize("size", [(0, 0), (30, 100)])
def test_a_terminal_of_unknown_size_has_a_bar(size, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("LINES", raising=False)
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        progress = Progress(tiny(steps=10), 0)
        progress.advance(10)
        progress.close()
        os.set_blocking(master, False)
        shown = b""
        with contextlib.suppress(BlockingIOError):
            while True:
                shown += os.read(master, 10_000)
    os.close(master)
    assert "100%|████████████████████| 10/10 [" in shown.decode()


def test_processes_stop_together_and_do_what_the_first_one_says(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def agreed(*every):
        gather = functools.partial(np.array, every, np.int32)
        monkeypatch.setattr(multihost_utils, "process_allgather", lambda own: gather())
        return Stopping().agree(every[1][1])

    assert agreed((0, 5), (0, 7)) == 5
    for asked in ((0, 1), (1, 0), (1, 1)):
        with pytest.raises(StoppedError):
            agreed(*((one, 5) for one in asked))


def test_a_profile_leaves_out_the_first_dispatches(tmp_path, monkeypatch):
    """Of 20 steps that are wanted, with dispatches of 1, 4, 16, 16 and 8: no step more."""
    events = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda *a, **k: events.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: events.append("stop"))
    profile = Profile(tmp_path, 20)
    for count in (1, 4, 16, 16, 8):
        events.append(profile.begin(count))
        profile.end()
    assert events == [1, 4, "start", 16, 4, "stop", 8]
    assert not profile.unfinished


def test_a_profile_that_was_not_finished_is_said(tmp_path, capsys):
    loop.run(tiny(steps=2), tmp_path, profile=20)
    assert "--profile: the run ended before so many steps were traced" in capsys.readouterr().out


def test_a_finished_run_has_no_step_to_trace(tmp_path, capsys):
    loop.run(tiny(steps=2), tmp_path)
    loop.run(tiny(steps=2), tmp_path, profile=20)
    assert "the run was finished: no step is left to trace." in capsys.readouterr().out
    assert not (tmp_path / "profile").exists()


def test_examples_are_those_of_each_seed_and_rates_those_of_all(tmp_path, capsys):
    summary = loop.run(tiny(seeds=2), tmp_path)
    printed = capsys.readouterr().out
    assert "4 steps, 32 examples each, " in printed
    assert re.search(r"^\S+ steps a second, \S+ examples of all 2 together, ", printed, re.M)
    both = summary["examples_per_second"] / summary["steps_per_second"]
    np.testing.assert_allclose(both, 2 * 8, rtol=1e-6)


def test_devices_of_a_cpu_share_its_memory(monkeypatch):
    monkeypatch.setattr(memory, "_available", lambda platform: 100.0)
    memory.check({"the data": 40}, "cpu", 2, "--batch_size")
    memory.check({"the data": 60}, "gpu", 2, "--batch_size")
    with pytest.raises(
        UserError, match="for the data; lower --batch_size, or take one device, XLA"
    ):
        memory.check({"the data": 60}, "cpu", 2, "--batch_size")
    with pytest.raises(UserError, match=r"for the data; lower --batch_size\.$"):
        memory.check({"the data": 101}, "cpu", 2, "--batch_size")


def test_a_run_counts_the_devices_that_it_uses(monkeypatch):
    counts = []
    monkeypatch.setattr(memory, "check", lambda *arguments: counts.append(arguments[2]))
    learner = Learner(tiny())
    learner.check_memory()
    assert counts == [len(jax.devices())] == [learner.mesh.own_devices]
    monkeypatch.setattr(type(learner.mesh), "own_devices", 3)
    learner.check_memory()
    assert counts[1:] == [3]


def test_a_trace_on_a_full_disk_is_one_sentence(tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise RuntimeError(f"OUT_OF_RANGE: {tmp_path}/x.xplane.pb; File too large")

    monkeypatch.setattr(jax.profiler, "start_trace", full)
    with pytest.raises(StorageError, match=r"profile: File too large; what was saved before is"):
        loop.run(tiny(steps=40, eval_every=40), tmp_path, profile=5)


def test_rows_have_the_rates_of_the_schedule(tmp_path):
    loop.run(tiny(schedule="cosine", steps=4), tmp_path)
    rates = [row["learning_rate"][0] for row in read_rows(tmp_path / "metrics.jsonl")]
    np.testing.assert_allclose(rates, [0.01, 0.005, 0], rtol=1e-6, atol=1e-9)


def test_a_second_interrupt_ends_at_once(monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with stopping() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        assert not ended
        os.kill(os.getpid(), signal.SIGINT)
    assert ended == [130]
