"""Processes that train together, of which one is killed again and again."""

import random
import signal
import time

import pytest

from experiments.records.workdir import read_rows
from tests.experiments import groups
from tests.experiments.support import assert_same_bits, leaves

pytestmark = pytest.mark.full

COUNT, DEVICES, KILLS = 2, 2, 20
EVERY, ROWS = 4, 120
FLAGS = ("--seeds=2", "--mesh=lanes:2,data:2", f"--steps={EVERY * ROWS}", f"--eval_every={EVERY}")


def count(workdir):
    """How many rows of metrics there are."""
    return len(list(read_rows(workdir / "metrics.jsonl")))


def wait_until(condition, processes):
    while not condition():
        assert all(process.poll() is None for process in processes)
        time.sleep(0.02)


def kill(workdir, met, draw):
    """Starts the processes, or goes on with them, and kills one at a random moment after they
    have met: two in five while they compile and restore, the others while they train.

    Returns:
      Which one, the rows by then, and the seconds until the last of the others had ended.
    """
    victim, before = draw.randrange(COUNT), count(workdir)
    met.write_text("")
    flags = (*FLAGS, f"--workdir={workdir}")
    with groups.started(COUNT, *flags, devices=DEVICES, MET=str(met)) as processes:
        wait_until(lambda: met.read_text().count("\n") == COUNT, processes)
        if draw.random() < 0.4:
            late = time.monotonic() + draw.uniform(0, 6)
            wait_until(lambda: time.monotonic() > late or count(workdir) >= before + 3, processes)
        else:
            wait_until(lambda: count(workdir) >= before + draw.randint(1, 3), processes)
            time.sleep(draw.uniform(0, 0.5))
        assert all(process.poll() is None for process in processes)
        rows, began = count(workdir), time.monotonic()
        processes[victim].kill()
        others = [process for process in processes if process is not processes[victim]]
        ended = groups.ends(others)
        seconds = time.monotonic() - began
        assert processes[victim].wait() == -signal.SIGKILL
    assert seconds < groups.SECONDS
    assert [(code, err) for code, _, err in ended] == [(1, groups.gone())] * len(others)
    return victim, rows, seconds


def test_a_process_is_killed_twenty_times_and_all_go_on(tmp_path):
    killed, whole, met = (tmp_path / name for name in ("killed", "whole", "met"))
    for code, _, err in groups.trained(COUNT, *FLAGS, f"--workdir={whole}", devices=DEVICES):
        assert (code, err) == (0, "")
    draw = random.Random(0)
    for number in range(KILLS):
        victim, rows, seconds = kill(killed, met, draw)
        print(f"kill {number + 1}: process {victim} at {rows} rows: {seconds:.1f} s", flush=True)
    assert not (killed / "summary.json").exists()
    for code, _, err in groups.trained(COUNT, *FLAGS, f"--workdir={killed}", devices=DEVICES):
        assert (code, err) == (0, "")
    assert_same_bits(leaves(killed, EVERY * ROWS), leaves(whole, EVERY * ROWS))
    rows = [(path / "metrics.jsonl").read_bytes() for path in (killed, whole)]
    assert rows[0] == rows[1]
