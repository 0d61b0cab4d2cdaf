"""Saturated gates: where they start, what is reported of them after training."""

import functools
import json

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pytest

from experiments import flags, forgetting, protocols, studies, timescale_study
from experiments.config import UserError, build_cell
from experiments.learner import Learner
from experiments.tasks.forgetting import saturate
from recurrent_gates import CELLS, analysis

TINY = {
    "hidden_size": 4,
    "length": 5,
    "held_out_sequences": 40,
    "batch_size": 8,
    "steps": 4,
    "eval_every": 2,
}


def tiny(**settings):
    return protocols.resolve("forgetting", "small", TINY | settings)


@pytest.mark.parametrize(
    ("name", "bias"),
    [("lstm", 6.0), ("r_lstm", 6.0), ("ur_lstm", 6.0), ("ur_lstm", 2.0), ("c_lstm", 6.0)],
)
def test_every_unit_starts_saturated(name, bias):
    cell = saturate(CELLS[name](8), bias)
    params = cell.init_params(jax.random.key(0), 2)
    gates = cell.gates(params, cell.initial(()), cell.project(params, jnp.zeros(2)))
    expected = 1 / (1 + np.exp(-bias))
    np.testing.assert_allclose(gates["f"], np.full(8, expected), rtol=1e-6)
    i = 0.5 if name == "lstm" else 1 - expected
    np.testing.assert_allclose(gates["i"], np.full(8, i), rtol=1e-4)


def test_the_bias_drawn_before_is_still_trained():
    params = saturate(CELLS["ur_lstm"](8), 6.0).init_params(jax.random.key(0), 2)
    np.testing.assert_array_equal(params["gate"]["b"], np.full(8, 6.0))


@pytest.mark.parametrize("name", ["o_lstm", "om_lstm", "um_lstm", "rnn", "gato"])
def test_other_gates_are_refused(name, tmp_path):
    runs = {cell: tiny(cell=cell, hidden_size=16) for cell in ("lstm", name)}
    with pytest.raises(UserError, match="--cell must have a sigmoid forget gate"):
        studies.train_all(runs, tmp_path)
    assert not list(tmp_path.iterdir())  # nothing was trained before


def test_a_bias_that_is_no_number():
    with pytest.raises(UserError, match="--gate_bias must be a finite number, got nan"):
        tiny(gate_bias=float("nan")).check()


def test_settings_are_the_papers():
    ur = protocols.resolve("forgetting", "ur", {"cell": "lstm"}).resolved()
    assert ur["task"] == {
        "name": "forgetting",
        "length": 500,
        "held_out_sequences": 1000,
        "gate_bias": 6.0,
    }
    assert ur["model"]["hidden_size"] == 64
    assert ur["model"]["forget_bias"] is None  # it is the task's
    assert ur["training"]["learning_rates"] == [1e-4]
    assert ur["training"]["steps"] == 10_000


@pytest.mark.parametrize("cell", ["lstm", "ur_lstm"])
def test_training_changes_every_parameter(cell):
    learner = Learner(tiny(cell=cell))
    learner.prepare()
    before = jax.device_get(learner.initial().params)
    after = learner.advance(learner.initial(), 0, 3).params
    for path, leaf in jax.tree_util.tree_leaves_with_path(before):
        trained = functools.reduce(lambda tree, key: tree[key.key], path, after)
        assert not np.array_equal(leaf, trained), jax.tree_util.keystr(path)


def test_periods_are_those_of_the_effective_gate():
    # Without weights a gate is its bias: D = 1 / (1 - sigmoid(b)) = 1 + exp(b); a refine gate
    # that starts at 1 / 2 changes nothing.
    config = tiny(cell="r_lstm")
    learner = Learner(config)
    learner.load()
    found = studies.Finished(config, learner, None, {})
    biases = np.log([9.0, 1.0, 99.0, 4.0]).astype(np.float32)
    params = jax.tree.map(jnp.zeros_like, learner.initial().params)
    params["recurrent"]["cell"]["bias"]["f"] = jnp.array(biases)
    periods = timescale_study.periods(found, params)
    np.testing.assert_allclose(periods, [2, 5, 10, 100], rtol=1e-4)
    # A refine gate at 1 makes g = 1 - (1 - f)^2, so D is squared.
    params["recurrent"]["cell"]["bias"]["r"] = jnp.full(4, 40.0)
    np.testing.assert_allclose(
        timescale_study.periods(found, params), [4, 25, 100, 10_000], rtol=1e-2
    )


def test_a_gate_that_rounds_to_one_has_an_infinite_timescale(tmp_path, capsys):
    runs = {"lstm": tiny(cell="lstm", gate_bias=40.0)}
    found = timescale_study.run(runs, tmp_path)["lstm"]
    assert found["before"] == found["after"] == [[np.inf] * 4]
    text = (tmp_path / "forgetting.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["lstm"]["after"] == [[None] * 4]
    table = (tmp_path / "forgetting.md").read_text()
    assert table.splitlines()[2].count("∞") == 4
    assert "figure: " in capsys.readouterr().out


def test_a_study(tmp_path, monkeypatch, capsys):
    shown = []
    monkeypatch.setattr(plt, "close", shown.append)
    rates = {"learning_rates": (1e-3, 1e30)}
    runs = {cell: tiny(cell=cell, **rates) for cell in ("lstm", "ur_lstm")}
    timescale_study.run(runs, tmp_path)
    printed = capsys.readouterr().out

    reports = json.loads((tmp_path / "forgetting.json").read_text())
    good, bad = " rate 0.001", " rate 1e+30"
    assert list(reports) == ["lstm" + good, "lstm" + bad, "ur_lstm" + good, "ur_lstm" + bad]
    rows = []
    for cell in runs:
        assert build_cell(runs[cell].model).features == 4
        found, diverged = reports[cell + good], reports[cell + bad]
        summary = json.loads((tmp_path / cell / "summary.json").read_text())
        mse = summary["metrics"]["mse"]["per_run"][0]["value"]
        assert (found["mse"], diverged["mse"]) == ([mse], [None])
        assert len(found["before"][0]) == len(found["after"][0]) == 4
        assert found["before"] == diverged["before"] != found["after"]
        assert diverged["after"] == [[]]
        before, after = found["before"][0], found["after"][0]
        assert before == sorted(before)
        middle = [sum(lane[1:3]) / 2 for lane in (before, after)]
        early, late = (
            [f"{periods[0]:.1f}", f"{median:.1f}"]
            for periods, median in zip((before, after), middle, strict=True)
        )
        rows.append([cell + good, f"{mse:.4f}", *early, *late])
        rows.append([cell + bad, "∞*", *early, "-", "-"])
    table = (tmp_path / "forgetting.md").read_text()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert cells[2:] == rows
    assert table in printed
    assert (tmp_path / "figures" / "forgetting.png").read_bytes().startswith(b"\x89PNG")

    curves, scales = shown[-1].axes
    last = json.loads((tmp_path / "lstm" / "metrics.jsonl").read_text().splitlines()[-1])
    assert curves.lines[0].get_ydata()[-1] == last["held_out"]["mse"][0]
    legend = [text.get_text() for text in shown[-1].legends[0].texts]
    assert legend == [f"lstm{good}", f"lstm{bad}*", f"ur_lstm{good}", f"ur_lstm{bad}*"]
    errors = [line.get_ydata() for line in curves.lines[:4]]
    assert np.isnan(errors[1][1:]).all()
    assert np.isnan(errors[3][1:]).all()
    last = json.loads((tmp_path / "ur_lstm" / "metrics.jsonl").read_text().splitlines()[-1])
    assert errors[2][-1] == last["held_out"]["mse"][0]
    assert len(scales.lines) == 6  # a rate that diverged has no timescales after training
    line = scales.lines[4]
    np.testing.assert_array_equal(line.get_xdata(), reports["ur_lstm" + good]["after"][0])
    np.testing.assert_array_equal(line.get_ydata(), [0.25, 0.5, 0.75, 1])

    timescale_study.run(runs, tmp_path)  # finished: nothing is trained again
    assert "step 2/4" not in capsys.readouterr().out
    assert json.loads((tmp_path / "forgetting.json").read_text()) == reports


def test_the_timescales_before_are_those_of_analysis():
    learner = Learner(tiny(cell="lstm"))
    learner.load()
    found = studies.Finished(tiny(cell="lstm"), learner, learner.initial(), {})
    cell = saturate(build_cell(found.config.model), 6.0)
    params = found.state.params["recurrent"]["cell"]
    inputs = found.config.task.load().inputs
    f = analysis.gate_activations(cell, params, inputs)["f"]
    expected = np.sort(1 / (1 - np.asarray(f, np.float64).mean(axis=(0, 1))))
    np.testing.assert_allclose(timescale_study.periods(found, found.params), expected, rtol=1e-3)


def start(*argv):
    forgetting.begin("forgetting", flags.parse(["forgetting", *argv], forgetting.define))


@pytest.mark.parametrize(
    ("argv", "cells"),
    [
        ([], ["lstm", "r_lstm", "ur_lstm"]),
        (["--cell=c_lstm"], ["c_lstm"]),
        (["--cells=lstm,cr_lstm", "--cell=r_lstm"], ["lstm", "cr_lstm"]),
    ],
)
def test_describe(capsys, argv, cells):
    start("--describe", "--gate_bias=5", *argv)
    described = json.loads(capsys.readouterr().out)
    assert list(described["runs"]) == cells
    assert described["config"]["model"]["cell"] == cells[0]
    assert described["config"]["task"]["gate_bias"] == 5
    assert described["recurrent_parameters"] == 4 * 64 * (64 + 2 + 1) + 64 * (cells[0][0] == "c")


def test_where_a_study_goes(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(timescale_study, "run", lambda *arguments: calls.append(arguments))
    start("--steps=7")
    start("--steps=9", "--protocol=ur")
    start("--seed=1", f"--workdir={tmp_path}")
    assert str(calls[0][1]).startswith("runs/forgetting/small-")
    assert str(calls[1][1]).startswith("runs/forgetting/ur-")
    assert calls[2][1] == tmp_path
    assert list(calls[0][0]) == ["lstm", "r_lstm", "ur_lstm"]
