"""Binaries that are interrupted, run out of room or are told nonsense: a sentence, no traceback."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.experiments.support import ROOT, command, environment, run_binary, run_source

SMALL = ("--cell=gru", "--hidden_size=6", "--tokens=3", "--length=4", "--embedding=3")
SMALL += ("--held_out_sequences=40", "--batch_size=8", "--eval_every=20")

# An interrupt at the first import of a module, as if it came from the terminal just then.
INTERRUPTED = """
import os, runpy, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
sys.argv = ["experiments.copy", *{flags!r}]
runpy.run_module("experiments.copy", run_name="__main__")
"""

# Files of at most 4,000 bytes: metrics and settings are smaller.
LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
os.execv(sys.argv[1], sys.argv[1:])
"""


def interrupted_at(module, *flags):
    return run_source(INTERRUPTED.format(module=module, flags=flags))


@pytest.mark.parametrize("module", ["absl.app", "numpy", "orbax.checkpoint", "matplotlib.figure"])
@pytest.mark.long
def test_an_interrupt_before_and_after_training_is_one_sentence(module, tmp_path):
    """While the program starts, and while it draws its figure."""
    done = interrupted_at(module, *SMALL, "--steps=1", f"--workdir={tmp_path / 'run'}")
    assert (done.returncode, done.stderr) == (130, "experiments.copy: interrupted.\n")
    assert (tmp_path / "run" / "checkpoints" / "1").exists() == (module == "matplotlib.figure")


def test_an_interrupt_while_training_saves_what_was_learnt(tmp_path):
    flags = (*SMALL, f"--workdir={tmp_path}", "--steps=2000000")
    process = subprocess.Popen(
        command(*flags),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = tmp_path / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
    (step,) = os.listdir(tmp_path / "checkpoints")
    assert printed.endswith(f"stopped at step {step}; the same command goes on from there\n")


@pytest.mark.long
def test_a_file_size_limit_is_one_sentence_and_the_run_goes_on_without(tmp_path):
    """As a full disk; nor does the cache of compiled programs, on that disk too, say a word."""
    flags = (*SMALL, f"--workdir={tmp_path / 'run'}", "--steps=40")
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *command(*flags)],
        cwd=ROOT,
        env=environment() | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (
        1,
        f"experiments.copy: cannot write {tmp_path}/run/checkpoints/40: File too large; what was "
        "saved before is kept, and the same command goes on from there.\n",
    )
    assert os.listdir(tmp_path / "run" / "checkpoints") == []
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes().count(b"\n") == 3
    done = run_binary(*flags)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes().count(b"\n") == 3


def test_a_closed_output_is_one_sentence():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        command("--describe"),
        cwd=ROOT,
        env=environment(),
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    sentence = "experiments.copy: nobody reads the standard output.\n"
    assert (done.returncode, done.stderr) == (1, sentence)


def test_bytes_that_are_not_utf_8_are_one_sentence():
    done = run_binary(b"--cell=\xff")
    sentence = "experiments.copy: The command line has bytes that are not UTF-8.\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", sentence)
