"""Runs on real data and real file systems that are killed a hundred times, run out of room or may
no longer write."""

import contextlib
import random
import signal
import subprocess
import sys
import time

import pytest

from experiments.command import runs
from experiments.pixels.settings import PIXELS
from experiments.records.checkpoints import Checkpoints
from experiments.records.workdir import read_rows
from experiments.training.learner import Learner
from tests.experiments.support import ROOT, assert_same_bits, environment, leaves

pytestmark = pytest.mark.full

# Every evaluation is checkpointed, as after ten seconds.
SOURCE = """
import runpy, sys
from experiments.training import loop
loop._CHECKPOINT_SECONDS = 0.0
sys.argv = ["experiments.pixels", *sys.argv[1:]]
runpy.run_module("experiments.pixels", run_name="__main__")
"""
EVERY, ROWS, KILLS = 4, 300, 100
FLAGS = ("--cell=gru", "--hidden_size=8", "--seeds=3", "--batch_size=16")
FLAGS += (f"--steps={EVERY * ROWS}", f"--eval_every={EVERY}")


def begun(workdir, *flags):
    """A process that trains on scikit-learn's digits."""
    return subprocess.Popen(
        [sys.executable, "-c", SOURCE, *FLAGS, *flags, f"--workdir={workdir}"],
        cwd=ROOT,
        env=environment(2),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def count(workdir):
    """How many rows of metrics there are."""
    return len(list(read_rows(workdir / "metrics.jsonl")))


def wait_for_rows(process, workdir, rows):
    while count(workdir) < rows:
        if process.poll() is not None:
            raise AssertionError(process.communicate())
        time.sleep(0.01)


def kill(workdir, draw):
    """Starts a run, or goes on with it, and kills it at a random moment; returns how long that
    took: a quarter while it starts, the others while it trains."""
    began, before = time.monotonic(), count(workdir)
    process = begun(workdir)
    if draw.random() < 0.25:
        time.sleep(draw.uniform(0, 5))
    else:
        # Rows after the last checkpoint are made again, so that there are fewer at first.
        time.sleep(0.5)
        wait_for_rows(process, workdir, before + draw.randint(1, 3))
        time.sleep(draw.uniform(0, 0.2))
    process.kill()
    assert process.communicate() is not None
    assert process.returncode == -signal.SIGKILL
    return time.monotonic() - began


def assert_nothing_is_lost(workdir):
    """All checkpoints are good; the newest one is of the last row's step or the one before."""
    if not (workdir / "checkpoints").is_dir():
        return
    shapes = Learner(runs.recorded_config(workdir, [PIXELS])).shapes()
    with contextlib.closing(Checkpoints(workdir / "checkpoints")) as checkpoints:
        steps = checkpoints.steps
        assert all(checkpoints.read(step, shapes) is not None for step in steps)
    rows = [row["step"] for row in read_rows(workdir / "metrics.jsonl")]
    if steps:
        assert rows[-1] - EVERY <= steps[-1] <= rows[-1]
    else:
        assert len(rows) <= 1


def test_a_run_that_is_killed_a_hundred_times_ends_with_the_same_bits(tmp_path):
    """Three seeds on real digits."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    killed.mkdir()
    draw, seconds = random.Random(0), []
    for _ in range(KILLS):
        seconds.append(kill(killed, draw))
        assert_nothing_is_lost(killed)
    reached = count(killed)
    for workdir in (killed, whole):
        process = begun(workdir)
        printed, errors = process.communicate()
        assert (process.returncode, errors) == (0, ""), printed
        assert "warning" not in printed
    assert_same_bits(leaves(killed, EVERY * ROWS), leaves(whole, EVERY * ROWS))
    assert (killed / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert count(killed) == ROWS + 1
    print(f"{KILLS} kills in {sum(seconds):.0f} s, the last one at row {reached} of {ROWS + 1}")


@pytest.fixture
def disk(tmp_path):
    """A small file system of its own, for as long as a test; this needs the right to mount."""
    path = tmp_path / "disk"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", path], check=True)
    yield path
    subprocess.run(["umount", path], check=True)


def fill(disk):
    """Takes all of the room that is left."""
    with (disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def finished(workdir):
    process = begun(workdir)
    printed, errors = process.communicate()
    assert (process.returncode, errors) == (0, ""), printed


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run that nothing happens to."""
    workdir = tmp_path_factory.mktemp("undisturbed") / "run"
    finished(workdir)
    return workdir


def assert_same(workdir, undisturbed):
    metrics = (run / "metrics.jsonl" for run in (workdir, undisturbed))
    assert next(metrics).read_bytes() == next(metrics).read_bytes()
    assert_same_bits(*(leaves(run, EVERY * ROWS) for run in (workdir, undisturbed)))


def test_a_full_disk_ends_a_run_with_one_sentence_and_loses_nothing(disk, undisturbed):
    process = begun(disk / "run")
    wait_for_rows(process, disk / "run", 5)
    fill(disk)
    printed, errors = process.communicate()
    assert process.returncode == 1, printed
    assert errors.startswith(f"experiments.pixels: cannot write {disk}/run/")
    assert errors.endswith(
        "No space left on device; what was saved before is kept, and the same command goes on "
        "from there.\n"
    )
    assert errors.count("\n") == 1
    (disk / "filler").unlink()
    assert_nothing_is_lost(disk / "run")
    finished(disk / "run")
    assert_same(disk / "run", undisturbed)


def test_a_full_disk_that_is_waited_for_is_gone_on_with(disk, undisturbed):
    process = begun(disk / "run", "--on_full_disk=wait")
    wait_for_rows(process, disk / "run", 5)
    fill(disk)
    time.sleep(12)
    assert process.poll() is None
    rows = count(disk / "run")
    (disk / "filler").unlink()
    printed, errors = process.communicate()
    assert (process.returncode, errors) == (0, ""), printed
    assert rows < ROWS
    assert "No space left on device; waiting for room, and SIGTERM ends the run." in printed
    assert "there is room again; going on." in printed
    assert_same(disk / "run", undisturbed)


def test_a_disk_that_becomes_read_only_ends_a_run_with_one_sentence(disk, undisturbed):
    process = begun(disk / "run")
    wait_for_rows(process, disk / "run", 5)
    # A file system with a file that is open for writing stays writable, but not each way to it.
    run = str(disk / "run")
    for way in (["--bind", run, run], ["-o", "remount,bind,ro", run]):
        subprocess.run(["mount", *way], check=True)
    printed, errors = process.communicate()
    subprocess.run(["umount", run], check=True)
    assert process.returncode == 1, printed
    assert errors.count("\n") == 1
    assert "Read-only file system; what was saved before is kept" in errors
    assert_nothing_is_lost(disk / "run")
    finished(disk / "run")
    assert_same(disk / "run", undisturbed)
