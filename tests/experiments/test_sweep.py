"""Sweeps: what a file asks for, runs that are killed, the best rate, the report."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from experiments.command import tables
from experiments.settings.errors import UserError
from experiments.sweep import executors, plan, pool, report
from experiments.training import loop
from tests.experiments.support import ROOT, environment

TOML = """
binary = "copy"
[settings]
tokens = 3
length = 4
hidden_size = 6
held_out_sequences = 40
steps = 30
eval_every = 10
batch_size = 8
[grid]
cell = ["gru", "lstm"]
learning_rate = [1e-3, 1e-2]
seed = [0, 1]
"""


def sweep_file(directory, text=TOML):
    path = directory / "sweep.toml"
    path.write_text(text)
    return path


def test_the_guides_example_is_a_sweep(tmp_path):
    (text,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "CLUSTER.md").read_text(), re.S)
    runs = plan.read(sweep_file(tmp_path, text), tmp_path / "runs")
    assert len(runs) == 3 * 3 * 2
    assert {run.config.model.hidden_size for run in runs} == {128}


def test_a_grid_is_every_combination(tmp_path):
    runs = plan.read(sweep_file(tmp_path), tmp_path / "runs")
    asked = {(run.config.model.cell, *run.config.training.lanes[0]) for run in runs}
    assert asked == {(c, s, r) for c in ("gru", "lstm") for s in (0, 1) for r in (1e-3, 1e-2)}
    assert all(run.config.model.hidden_size == 6 for run in runs)
    assert len({run.row["cell"] for run in runs}) == 2 and "seed" not in runs[0].row
    pairs = TOML.replace("[grid]", "seeds = 2\n[grid]").replace("[0, 1]", "[0, 2]")
    lanes = [run.config.training.lanes for run in plan.read(sweep_file(tmp_path, pairs), tmp_path)]
    assert {seed for run_lanes in lanes for seed, _ in run_lanes} == {0, 1, 2, 3}
    more = TOML + '[[also]]\nhidden_size = 7\n[also.grid]\ncell = ["rnn"]\n'
    last = plan.read(sweep_file(tmp_path, more), tmp_path / "runs")[-1].config.model
    assert (last.cell, last.hidden_size) == ("rnn", 7)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("binary = ", "is not TOML"),
        ('binary = "forgetting"', 'binary = "..." must be one of'),
        ('binary = "copy"', "has no [grid]"),
        (TOML + "[other]", "there is no 'other'"),
        (TOML.replace('["gru", "lstm"]', '"gru"'), "cell in the grid must be a list"),
        (TOML.replace("[0, 1]", "[0, 0]"), "asks twice for the same run"),
        (
            TOML.replace("[grid]", "[grid]\nsteps = [20, 30]"),
            "runs that differ in steps alone share one directory",
        ),
        (
            TOML + '[[also]]\nbackend = "scan"\n[also.grid]\nsteps = [20]\ncell = ["gru"]\n'
            "learning_rate = [1e-3]\nseed = [0]\n",
            "runs that differ in steps and backend alone share one directory",
        ),
        (TOML.replace("[0, 1]", '[0, "0"]'), "asks twice for the same run"),
        (
            TOML.replace("[grid]", "seeds = 2\n[grid]"),
            "with seeds = 2 the seeds of the grid must be 2 apart, such as [0, 2].",
        ),
        (TOML.replace("lstm", "lstmm"), "There is no cell named 'lstmm'"),
        (
            TOML.replace("steps = 30", "stepz = 30"),
            "There is no flag --stepz; did you mean --steps",
        ),
        (
            TOML.replace("steps = 30", 'workdir = "x"'),
            "--workdir, --describe and --compile_for are not for",
        ),
        (TOML.replace("steps = 30", "process_id = 1"), "a run of a sweep is one process"),
        (TOML.replace('"copy"', '["copy"]'), 'binary = "..." must be one of'),
        ("also = 3\n" + TOML, "also must be tables, each under [[also]]"),
        (TOML + "[also]\ncell = 'rnn'\n", "also must be tables, each under [[also]]"),
    ],
)
def test_a_file_that_cannot_be_is_one_sentence(tmp_path, text, sentence):
    with pytest.raises(UserError) as refusal:
        plan.read(sweep_file(tmp_path, text), tmp_path / "runs")
    assert sentence in str(refusal.value)
    assert str(tmp_path / "sweep.toml") in str(refusal.value)


def test_an_empty_list_is_none(tmp_path):
    text = TOML.replace("[grid]", "decoder = []\n[grid]")
    (run, *_) = plan.read(sweep_file(tmp_path, text), tmp_path / "runs")
    assert run.config.model.decoder == () and "--decoder=none" in run.command
    text = TOML.replace("[grid]", "[grid]\ndecoder = [[], [4, 3]]").replace("[0, 1]", "[0]")
    runs = plan.read(sweep_file(tmp_path, text), tmp_path / "runs")
    assert {run.config.model.decoder for run in runs} == {(), (4, 3)}
    text = TOML.replace("learning_rate = [1e-3, 1e-2]", "learning_rates = [[]]")
    with pytest.raises(UserError, match="--learning_rates must name at least one value"):
        plan.read(sweep_file(tmp_path, text), tmp_path / "runs")


def test_steps_of_a_schedule_that_ends_make_directories(tmp_path):
    text = TOML.replace("[grid]", 'schedule = "cosine"\n[grid]\nsteps = [20, 30]')
    assert len(plan.read(sweep_file(tmp_path, text), tmp_path / "runs")) == 16


def finish(run, watched, value):
    """Leaves what a finished run does."""
    run.workdir.mkdir(parents=True)
    row = {"step": 30, "examples": 240, "validation": {"accuracy": [watched]}}
    (run.workdir / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    one = [{"value": value}]
    summary = {"steps": 30, "metrics": {"accuracy": {"per_run": one}}}
    (run.workdir / "summary.json").write_text(json.dumps(summary))


def test_a_report_on_other_runs_is_kept(tmp_path, monkeypatch):
    """Two files of one name, or a file that asks for something else now."""
    first = plan.read(sweep_file(tmp_path), tmp_path / "runs")
    for run in first:
        finish(run, 0.5, 0.5)
        for path in (run.workdir / "metrics.jsonl", run.workdir / "summary.json"):
            path.write_text(path.read_text().replace("accuracy", run.config.task.metrics[0].name))
    kept = report.write(first) + "\n"
    report.write(first)
    assert not list(first[0].workdir.parent.glob("sweep-*"))
    gru_runs = [run for run in first if run.config.model.cell == "gru"]
    report.write(gru_runs)
    folder = first[0].workdir.parent
    assert (folder / "sweep-1.md").read_text() == kept
    assert (folder / "sweep-1.json").exists()
    report.write(first)  # has all runs of the report before: it takes its place
    assert not list(folder.glob("sweep-2.*"))
    monkeypatch.chdir(tmp_path)
    same = plan.read(sweep_file(tmp_path), Path("runs"))  # by another name of the directory
    report.write(same)
    assert not list(folder.glob("sweep-2.*"))
    report.write(gru_runs)
    assert (folder / "sweep-2.md").read_text() == kept
    (tmp_path / "reports").mkdir()
    for path in folder.glob("sweep*"):
        path.rename(tmp_path / "reports" / path.name)
    tables.claim(tmp_path / "reports", (*report.NAMES, *report.SET_ASIDE))  # they are its own


def test_the_best_rate_is_that_of_the_watched_set(tmp_path):
    """The gru's larger rate is better on validation and worse on the result; one seed of the
    lstm's diverged there, and one is missing."""
    runs = plan.read(sweep_file(tmp_path), tmp_path / "runs")
    metric = runs[0].config.task.metrics[0]._replace(name="accuracy")
    for run in runs:
        cell, (seed, rate) = run.config.model.cell, run.config.training.lanes[0]
        if cell == "gru":
            finish(run, 0.8 if rate == 1e-2 else 0.7, 0.5 + seed / 10 if rate == 1e-2 else 0.9)
        elif rate == 1e-2:
            finish(run, None if seed else 0.9, 0.9)
        elif not seed:
            finish(run, 0.2, 0.25)
    gru, lstm = report.best_rows(runs, metric)
    assert (gru.label, gru.rate, gru.rates, gru.missing) == ("gru", 1e-2, 2, 0)
    assert gru.values == (0.5, 0.6)
    assert lstm.values == (0.25,) or lstm.rate == 1e-2  # both are infinitely bad
    assert (lstm.label, lstm.rates) == ("lstm", 2)


def test_the_best_rate_is_that_of_the_best_parameters_where_these_are_reported(tmp_path):
    """The larger rate was the best, and is not at the end."""
    text = TOML.replace("steps = 30", "steps = 30\nkeep_best = true")
    runs = plan.read(sweep_file(tmp_path, text), tmp_path / "runs")
    metric = runs[0].config.task.metrics[0]._replace(name="accuracy")
    for run in runs:
        large = run.config.training.lanes[0][1] == 1e-2
        finish(run, 0.1 if large else 0.6, 0.9 if large else 0.7)
    assert [row.rate for row in report.best_rows(runs, metric)] == [1e-2, 1e-2]


def test_a_run_whose_config_does_not_say_its_steps_is_trained(tmp_path):
    run = plan.read(sweep_file(tmp_path), tmp_path / "runs")[0]
    finish(run, 0.5, 0.5)
    for content, finished in (
        ({"config": {"training": {"steps": 30}}}, True),
        ({"config": {"training": {"steps": 20}}}, False),
        ({"config": {"training": {"steps": 40}}}, False),  # its binary refuses fewer steps
        ({"config": None}, False),
        ({}, False),
    ):
        (run.workdir / "config.json").write_text(json.dumps(content))
        assert pool._finished(run) == finished


def test_flags_in_another_order_and_spelling_are_one_row(tmp_path):
    text = TOML.replace("[1e-3, 1e-2]", "[1e-3]").replace("[0, 1]", "[0]") + (
        '[[also]]\nclip_norm = 1\nhidden_size = "6"\nsteps = 30\n'
        '[also.grid]\nlearning_rate = [1e-2]\ncell = ["gru", "lstm"]\n'
    )
    text = text.replace("[grid]", "[grid]\nclip_norm = [1.0]")
    runs = plan.read(sweep_file(tmp_path, text), tmp_path / "runs")
    rows = report.best_rows(runs, runs[0].config.task.metrics[0])
    assert [(row.label, row.rates) for row in rows] == [("gru", 2), ("lstm", 2)]


class Ended:
    """An executor whose jobs have ended with a code."""

    slots = 1

    def __init__(self, code):
        self.code = code

    def start(self, runs):
        return [mock.Mock(poll=lambda: self.code) for _ in runs]


def test_a_run_that_was_trained_for_longer_is_missing(tmp_path):
    runs = plan.read(sweep_file(tmp_path, TOML.replace("steps = 30", "steps = 20")), tmp_path)
    for run in runs:
        finish(run, 0.5, 0.5)
    for row in report.best_rows(runs, runs[0].config.task.metrics[0]):
        assert row.values == () and row.missing == 2


def test_a_run_that_ended_early_is_finished_under_more_steps_too(tmp_path, capsys):
    run = plan.read(sweep_file(tmp_path), tmp_path / "runs")[0]
    finish(run, 0.5, 0.5)
    (run.workdir / "config.json").write_text(json.dumps({"config": {"training": {"steps": 20}}}))
    assert pool.train([run], Ended(0)) == 0
    assert "run 1 of 1 is finished" in capsys.readouterr().out
    assert pool.train([run], Ended(2)) == 1


@pytest.mark.parametrize(
    "last_words", ["step 120/500: loss 0.1", "it is in use by another process."]
)
def test_a_run_that_another_job_begins_first_is_waited_for(
    tmp_path, capsys, monkeypatch, last_words
):
    """Both jobs write into one log: whose word is the last one says little."""
    run = plan.read(sweep_file(tmp_path), tmp_path / "runs")[0]
    begun = []

    class Late:
        slots = 1

        def start(self, runs):
            begun.append(runs)
            if len(begun) == 2:
                finish(run, 0.5, 0.5)
            code = {1: 2, 2: 0}[len(begun)]
            return [mock.Mock(poll=lambda: code)]

    executors.log(run).parent.mkdir(parents=True, exist_ok=True)
    executors.log(run).write_text(f"{last_words}\n")
    in_use = iter([False, last_words.startswith("step"), False])
    monkeypatch.setattr(pool.Workdir, "in_use", lambda _: next(in_use, False))
    assert pool.train([run], Late()) == 0
    assert len(begun) == 2 and "failed" not in capsys.readouterr().out


def test_a_run_joins_no_other_processes(tmp_path):
    """A cluster that started the sweep's workers together would have JAX join them."""
    run = plan.read(sweep_file(tmp_path), tmp_path / "runs")[0]
    assert run.command[-1] == "--distributed=off" and "distributed" not in run.line


@pytest.mark.long
def test_a_sweep_that_is_killed_goes_on(tmp_path):
    """Of twelve runs two are killed at random, then the sweep; the table is that of its runs,
    undisturbed."""
    path = sweep_file(tmp_path, TOML.replace("[0, 1]", "[0, 1, 2]"))

    whole = plan.read(path, tmp_path / "whole")
    for run in whole:
        loop.run(run.config, run.workdir)
    report.write(whole)

    def begin():
        command = [sys.executable, "-m", "experiments.sweep", str(path), "--processes=2"]
        return subprocess.Popen(
            [*command, f"--directory={tmp_path / 'killed'}"],
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def running(sweep):
        children = Path(f"/proc/{sweep.pid}/task/{sweep.pid}/children").read_text().split()
        commands = {int(n): Path(f"/proc/{n}/cmdline").read_bytes() for n in children}
        return [n for n, command in commands.items() if b"experiments.copy" in command]

    random = np.random.default_rng(0)
    first, victims = begin(), set()
    while len(victims) < 2:
        time.sleep(random.uniform(2, 6))
        if own := [n for n in running(first) if n not in victims]:
            victims.add(victim := int(random.choice(own)))
            os.kill(victim, signal.SIGKILL)
    time.sleep(random.uniform(1, 3))
    first.kill()
    first.wait()
    assert len(list((tmp_path / "killed").glob("*/summary.json"))) < 12
    assert begin().wait() == 0
    undisturbed, killed = (
        (tmp_path / name / "sweep.md").read_text() for name in ("whole", "killed")
    )
    assert killed == undisturbed
    assert "missing" not in killed
