"""A sweep here, on Ray and through submitit: runs and the sweep itself are killed, and the tables
are equal."""

import contextlib
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from experiments.settings.errors import StorageError, UserError
from experiments.sweep import executors, plan, process
from experiments.sweep.executors import Options
from tests.experiments.support import ROOT, environment

TOML = """
binary = "copy"
[settings]
tokens = 3
length = 4
hidden_size = 6
held_out_sequences = 40
steps = 100
eval_every = 20
batch_size = 8
[grid]
cell = ["gru", "lstm", "rnn"]
learning_rate = [1e-3, 1e-2]
seed = [0, 1]
"""
RUNS = 12
EXECUTORS = {
    "local": ["--executor=local"],
    "ray": ["--executor=ray"],
    "slurm": ["--executor=slurm", "--cluster=local"],
}


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--partition=big"], "--partition has no effect with --executor=local"),
        (["--executor=ray", "--minutes=3"], "--minutes has no effect with --executor=ray"),
        (["--gpus_per_run=1"], "--gpus_per_run has no effect with --executor=local"),
        (
            ["--executor=slurm", "--cluster=local", "--sbatch=qos=high"],
            "--sbatch has no effect with --cluster=local",
        ),
        (["--executor=slurm", "--sbatch=qos"], "--sbatch must be NAME=VALUE,..., got qos"),
        (["--processes=0"], "--processes must be at least 1 and at most 1024, got 0"),
        (["--executor=dask"], "it must be one of local, ray, slurm"),
    ],
)
def test_flags_of_an_executor_that_cannot_be_are_one_sentence(program, tmp_path, flags, sentence):
    path = tmp_path / "sweep.toml"
    path.write_text(TOML)
    code, printed, said = program("experiments.sweep", str(path), "--describe", *flags)
    assert (code, printed, said.count("\n")) == (2, "", 1)
    assert sentence in said


@pytest.mark.parametrize(("name", "module"), [("ray", "ray"), ("slurm", "submitit")])
def test_an_executor_whose_library_is_missing_is_one_sentence(name, module, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"^--executor={name} needs {module}, which is not") as no:
        executors.build(name, Options(), tmp_path)
    assert "\n" not in str(no.value)


def test_a_place_that_takes_no_words_is_one_sentence(tmp_path):
    path = tmp_path / "sweep.toml"
    path.write_text(TOML)
    run = plan.read(path, tmp_path / "runs")[0]
    executors.log(run).mkdir(parents=True)
    local = executors.Local(Options(processes=1))
    with pytest.raises(StorageError, match=r"^cannot write .*\.log: Is a directory; what was"):
        local.start([run])


@pytest.mark.parametrize(
    ("processes", "cores"),
    [(None, [2, 5, 7]), (3, [2, 5, 7]), (2, [None, None]), (4, [2, 5, 7, 2])],
)
def test_runs_have_cores_of_their_own_where_the_sweep_takes_all(
    processes, cores, tmp_path, monkeypatch
):
    """A sweep of fewer leaves them free to move: another one may run beside it."""
    path = tmp_path / "sweep.toml"
    path.write_text(TOML)
    started = []
    monkeypatch.setattr(executors.os, "sched_getaffinity", lambda _: {7, 2, 5})
    monkeypatch.setattr(process, "start", lambda command, log, core: started.append(core))
    local = executors.Local(Options(processes=processes))
    local.start(plan.read(path, tmp_path / "runs")[: local.slots])
    assert started == cores


def test_where_cores_have_no_names_runs_are_free_to_move(tmp_path, monkeypatch):
    path = tmp_path / "sweep.toml"
    path.write_text(TOML)
    cores = []
    monkeypatch.delattr(executors.os, "sched_getaffinity")  # as on macOS
    monkeypatch.setattr(executors.os, "cpu_count", lambda: 3)
    monkeypatch.setattr(process, "start", lambda command, log, core: cores.append(core))
    local = executors.Local(Options())
    local.start(plan.read(path, tmp_path / "runs")[: local.slots])
    assert cores == [None, None, None]


def test_what_sbatch_refuses_is_one_sentence(tmp_path, monkeypatch, capsys):
    """Through a submitit that is not there: its errors are RuntimeErrors, and it prints them."""

    class Executor:
        folder = tmp_path

        def update_parameters(self, **_):
            pass

        @contextlib.contextmanager
        def batch(self):
            yield
            print("sbatch: error: invalid partition", file=sys.stderr)
            raise RuntimeError("sbatch: error: invalid partition\nsbatch: error: failed")

    submitit = mock.Mock(AutoExecutor=lambda folder, cluster: Executor())
    monkeypatch.setitem(sys.modules, "submitit", submitit)
    executor = executors.build("slurm", Options(partition="none"), tmp_path)
    with pytest.raises(UserError, match=r"^--executor=slurm: sbatch: error: invalid partition\.$"):
        executor.start([])
    assert capsys.readouterr().err == ""


def test_a_run_ends_with_its_worker(tmp_path):
    """It is told to save, has one CPU device, and is of a group that no terminal interrupts."""
    source = (
        "import os, signal, sys, time\n"
        "def say(number, frame): print('told', number, flush=True); sys.exit()\n"
        "signal.signal(signal.SIGTERM, say)\n"
        "print(os.getpgrp() == os.getpid(), os.environ['XLA_FLAGS'][-2:],\n"
        "      flush=True)\n"
        "time.sleep(60)\n"
    )
    path = tmp_path / "run.log"
    worker = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from experiments.sweep import process\n"
            "process.call([sys.executable, '-c', sys.argv[1]], sys.argv[2], '.')",
            source,
            str(path),
        ],
        cwd=ROOT,
    )
    wait_until(lambda: path.exists() and path.read_text())
    worker.kill()
    worker.wait()
    wait_until(lambda: "told" in path.read_text())
    assert path.read_text() == f"True =1\ntold {int(signal.SIGTERM)}\n"


def test_a_worker_knows_how_its_run_ended(tmp_path):
    program = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    assert process.call(program, str(tmp_path / "log"), str(ROOT)) == -9
    program[-1] = "print('a word'); raise SystemExit(3)"
    assert process.call(program, str(tmp_path / "log"), str(ROOT)) == 3
    assert (tmp_path / "log").read_text() == "a word\n"


def wait_until(true):
    while not true():
        time.sleep(0.02)


def processes_of(directory):
    """The processes that train in a directory, by number."""
    numbers = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode().split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        trains = "-m" in words and "experiments.copy" in words and "-I" not in words
        if trains and any(word.startswith(f"--workdir={directory}/") for word in words):
            numbers.append(int(path.parent.name))
    return numbers


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """The report of each executor that was measured already."""
    return {}


@pytest.mark.extras
@pytest.mark.parametrize("name", EXECUTORS)
def test_a_sweep_that_is_killed_is_completed(name, tables, tmp_path):
    """Twelve runs, two of them killed at random, and the sweep itself once."""
    path, directory = tmp_path / "sweep.toml", tmp_path / "runs"
    path.write_text(TOML)

    def begin():
        command = [sys.executable, "-m", "experiments.sweep", str(path), *EXECUTORS[name]]
        with (tmp_path / "said").open("ab") as said:
            return subprocess.Popen(
                [*command, "--processes=2", f"--directory={directory}"],
                cwd=ROOT,
                env=environment() | {"RAY_worker_niceness": "0"},
                stdout=said,
                stderr=subprocess.STDOUT,
            )

    draw, sweep, began = random.Random(name), begin(), time.monotonic()
    killed = set()
    while len(killed) < 2:
        wait_until(lambda: set(processes_of(directory)) - killed)
        time.sleep(draw.uniform(0, 6))
        if there := sorted(set(processes_of(directory)) - killed):
            victim = draw.choice(there)
            subprocess.run(["kill", "-KILL", str(victim)], check=False)
            killed.add(victim)
    # It is seen, unless the sweep is killed before.
    wait_until(lambda: "killed by signal 9 and goes on" in (tmp_path / "said").read_text())
    time.sleep(draw.uniform(0, 3))
    sweep.kill()
    sweep.wait()
    assert not (directory / "sweep.md").exists()
    assert begin().wait() == 0, (tmp_path / "said").read_text()
    said = (tmp_path / "said").read_text()
    print(f"{name}: {time.monotonic() - began:.0f} s\n{said}")
    assert "killed by signal 9 and goes on" in said
    assert len(list(directory.glob("*/summary.json"))) == RUNS
    tables[name] = (directory / "sweep.md").read_text()
    assert "missing" not in tables[name]
    assert len(set(tables.values())) == 1, tables
    assert len(plan.read(path, directory)) == RUNS


@pytest.mark.extras
def test_a_time_limit_of_slurm_lets_a_run_save_and_go_on(tmp_path):
    """Through submitit's own signal, which its local jobs know, too."""
    import submitit

    (run,) = plan.read(sweep_of_one(tmp_path), tmp_path / "runs")
    executor = executors.build("slurm", Options(processes=1, cluster="local"), tmp_path / "runs")
    (job,) = executor.start([run])
    metrics = run.workdir / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > 1)
    assert isinstance(job._job, submitit.LocalJob)
    subprocess.run(["pkill", "-USR2", "-P", str(job._job.job_id)], check=True)
    wait_until(lambda: job.poll() is not None)
    assert job.poll() == 0
    said = executors.log(run).read_text()
    assert "the same command goes on from there" in said
    assert "going on from step" in said
    assert (run.workdir / "summary.json").exists()


def sweep_of_one(directory):
    path = directory / "sweep.toml"
    one = TOML.replace('"gru", "lstm", "rnn"', '"gru"').replace("1e-3, 1e-2", "1e-2")
    path.write_text(one.replace("[0, 1]", "[0]").replace("steps = 400", "steps = 4000"))
    return path
