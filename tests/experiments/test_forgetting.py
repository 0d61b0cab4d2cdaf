"""Saturated gates: where they start, what is reported of them after training."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.command import flags, runs
from experiments.forgetting import __main__ as binary
from experiments.forgetting import study
from experiments.forgetting.settings import FORGETTING
from experiments.forgetting.task import saturate
from experiments.settings.cells import build_cell
from experiments.settings.errors import UserError
from experiments.settings.resolver import resolve
from experiments.training.learner import Learner
from recurrent_gates import CELLS, analysis
from tests.experiments.support import refusal

TINY = {
    "hidden_size": 4,
    "length": 5,
    "held_out_sequences": 40,
    "batch_size": 8,
    "steps": 4,
    "eval_every": 2,
}


def tiny(**settings):
    return resolve(FORGETTING, "small", TINY | settings)


def start(*argv):
    def define(values):
        flags.define_experiment(FORGETTING, values)
        binary.define(values)

    binary.begin(flags.parse(["forgetting", *argv], define))


@pytest.mark.parametrize(
    ("name", "bias"),
    [
        *[("lstm", 6.0), ("r_lstm", 6.0), ("ur_lstm", 6.0), ("ur_lstm", 2.0)],
        *[("u_lstm", 6.0), ("c_lstm", 6.0)],
    ],
)
def test_every_unit_starts_saturated(name, bias):
    cell = saturate(CELLS[name](8), bias)
    params = cell.init_params(jax.random.key(0), 2)
    gates = cell.gates(params, cell.initial(()), cell.project(params, jnp.zeros(2)))
    expected = 1 / (1 + np.exp(-bias))
    np.testing.assert_allclose(gates["f"], np.full(8, expected), rtol=1e-6)
    i = 0.5 if name == "lstm" else 1 - expected
    np.testing.assert_allclose(gates["i"], np.full(8, i), rtol=1e-4)


@pytest.mark.parametrize("name", ["u_minlstm", "r_minlstm", "c_minlstm", "ur_minlstm", "mingru"])
def test_linear_recurrences_that_start_saturated(name):
    cell = saturate(CELLS[name](8), 6.0)
    params = cell.init_params(jax.random.key(0), 2)
    gates = cell.gates(params, cell.initial(()), cell.project(params, jnp.zeros(2)))
    np.testing.assert_allclose(gates["f"], np.full(8, 1 / (1 + np.exp(-6.0))), rtol=1e-6)


@pytest.mark.parametrize("name", ["minlstm", "rg_lru", "ur_rg_lru"])
def test_linear_recurrences_that_do_not(name):
    with pytest.raises(UserError, match="does not start at --gate_bias; take u_minlstm"):
        saturate(CELLS[name](8), 6.0)


@pytest.mark.parametrize("name", ["u_lstm", "ur_lstm"])
def test_the_bias_drawn_before_is_still_trained(name):
    params = saturate(CELLS[name](8), 6.0).init_params(jax.random.key(0), 2)
    np.testing.assert_array_equal(params["gate"]["b"], np.full(8, 6.0))


def test_a_saturated_ur_gate_is_r_with_a_second_bias():
    """The same function from the same start: all that differs is that two biases are trained."""
    pre = dict(zip("fr", jax.random.normal(jax.random.key(1), (2, 8)), strict=True))
    r, ur = (saturate(CELLS[name](8), 6.0) for name in ("r_lstm", "ur_lstm"))
    start = r.init_params(jax.random.key(0), 2)["bias"]["f"]
    np.testing.assert_array_equal(start, np.full(8, 6.0))
    own = ur.gate.init(jax.random.key(0), 8)
    for of_r, of_ur in zip(
        r.gate({}, {**pre, "f": pre["f"] + start}), ur.gate(own, pre), strict=True
    ):
        np.testing.assert_array_equal(of_r, of_ur)


def test_the_control_trains_f_up_and_i_down_without_a_refine_gate():
    cell = saturate(CELLS["u_lstm"](8), 6.0)
    params = cell.init_params(jax.random.key(0), 2)
    assert set(params["bias"]) == set(saturate(CELLS["lstm"](8), 6.0).gate.slots(8)) | {"u", "o"}
    f, i = cell.gate(params["gate"], dict.fromkeys("fi", jnp.zeros(8)))
    np.testing.assert_allclose((f, i), jax.nn.sigmoid(jnp.array([[6.0] * 8, [-6.0] * 8])))


@pytest.mark.parametrize("name", ["o_lstm", "om_lstm", "um_lstm", "rnn", "gato"])
def test_other_gates_are_refused(name):
    configs = {cell: tiny(cell=cell, hidden_size=16) for cell in ("lstm", name)}
    with pytest.raises(UserError, match="--cell must have a sigmoid forget gate"):
        study.check(configs)


def test_settings_are_the_papers():
    ur = resolve(FORGETTING, "ur", {"cell": "lstm"}).resolved()
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


def assert_periods(actual, expected):
    """Asserts that periods 1 / (1 - f) are right but for four roundings of f, in float32."""
    expected = np.array(expected)
    off_by = 1 / np.array(actual) - 1 / expected  # of f
    np.testing.assert_array_less(np.abs(off_by), 4 * 2.0**-24)


def test_periods_are_those_of_the_effective_gate():
    # Without weights a gate is its bias: D = 1 / (1 - sigmoid(b)) = 1 + exp(b); a refine gate
    # that starts at 1 / 2 changes nothing.
    config = tiny(cell="r_lstm")
    learner = Learner(config)
    learner.load()
    finished = runs.Finished(config, learner, None, {})
    biases = np.log([9.0, 1.0, 99.0, 4.0]).astype(np.float32)
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), learner.shapes().params)
    params["recurrent"]["cell"]["bias"]["f"] = jnp.array(biases)
    assert_periods(study.periods(finished, params), [2, 5, 10, 100])
    # A refine gate at 1 makes g = 1 - (1 - f)^2, so D is squared.
    params["recurrent"]["cell"]["bias"]["r"] = jnp.full(4, 40.0)
    assert_periods(study.periods(finished, params), [4, 25, 100, 10_000])
    # A gate that rounds to one forgets nothing.
    params["recurrent"]["cell"]["bias"]["f"] = jnp.full(4, 40.0)
    assert study.periods(finished, params) == [np.inf] * 4


def test_periods_of_slots_are_those_of_all_units():
    config = tiny(cell="rmc")
    learner = Learner(config)
    learner.load()
    finished = runs.Finished(config, learner, None, {})
    periods = study.periods(finished, learner.initial().params)
    assert periods == sorted(periods) and len(periods) == config.model.hidden_size


CONFIGS = {cell: tiny(cell=cell, learning_rates=(1e-3, 1e30)) for cell in ("lstm", "ur_lstm")}


@pytest.fixture(scope="module")
def studied(tmp_path_factory):
    """The directory of a study of two cells, each with a rate that diverges."""
    directory = tmp_path_factory.mktemp("study")
    study.run(CONFIGS, directory)
    return directory


@pytest.fixture(scope="module")
def trained(studied):
    """The runs of that study by cell."""
    finished = {cell: runs.finished(studied / cell, [FORGETTING]) for cell in CONFIGS}
    for one in finished.values():
        one.learner.load()
    return finished


@pytest.mark.parametrize("cell", CONFIGS)
@pytest.mark.long
def test_training_changes_every_parameter(cell, trained):
    before, after = trained[cell].learner.initial().params, trained[cell].params
    for path, leaf in jax.tree_util.tree_leaves_with_path(before):
        value = functools.reduce(lambda tree, key: tree[key.key], path, after)
        assert not np.array_equal(leaf[0], value[0]), jax.tree_util.keystr(path)


@pytest.mark.long
def test_the_timescales_before_are_those_of_analysis(trained):
    finished = trained["lstm"]
    cell = saturate(build_cell(finished.config.model), 6.0)
    params = finished.lane(finished.learner.initial().params, 0)
    inputs = finished.config.task.load().inputs
    f = analysis.gate_activations(cell, params["recurrent"]["cell"], inputs)["f"]
    expected = np.sort(1 / (1 - np.asarray(f, np.float64).mean(axis=(0, 1))))
    assert_periods(study.periods(finished, params), expected)


@pytest.mark.long
def test_a_study(studied, drawn, capsys):
    written = json.loads((studied / "forgetting.json").read_text())
    reports = study.run(CONFIGS, studied)
    printed = capsys.readouterr().out
    assert "step 2/4" not in printed  # finished: nothing is trained again
    assert reports == written

    good, bad = " rate 0.001", " rate 1e+30"
    assert list(reports) == ["lstm" + good, "lstm" + bad, "ur_lstm" + good, "ur_lstm" + bad]
    rows = []
    for cell in CONFIGS:
        report, diverged = reports[cell + good], reports[cell + bad]
        summary = json.loads((studied / cell / "summary.json").read_text())
        mse = summary["metrics"]["mse"]["per_run"][0]["value"]
        assert (report["mse"], diverged["mse"]) == ([mse], [None])
        assert len(report["before"][0]) == len(report["after"][0]) == 4
        assert report["before"] == diverged["before"] != report["after"]
        assert diverged["after"] == [[]]
        before, after = report["before"][0], report["after"][0]
        assert before == sorted(before)
        middle = [sum(lane[1:3]) / 2 for lane in (before, after)]
        early, late = (
            [f"{periods[0]:.1f}", f"{median:.1f}"]
            for periods, median in zip((before, after), middle, strict=True)
        )
        rows.append([cell + good, f"{mse:.4f}", *early, *late])
        rows.append([cell + bad, "∞*", *early, "-", "-"])
    table = (studied / "forgetting.md").read_text()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert cells[2:] == rows
    assert table in printed
    assert f"figure: {studied / 'figures' / 'forgetting.png'}\n" in printed
    assert (studied / "figures" / "forgetting.png").read_bytes().startswith(b"\x89PNG")

    curves, scales = drawn[-1].axes
    last = json.loads((studied / "lstm" / "metrics.jsonl").read_text().splitlines()[-1])
    assert curves.lines[0].get_ydata()[-1] == last["held_out"]["mse"][0]
    legend = [text.get_text() for text in drawn[-1].legends[0].texts]
    assert legend == [f"lstm{good}", f"lstm{bad}*", f"ur_lstm{good}", f"ur_lstm{bad}*"]
    errors = [line.get_ydata() for line in curves.lines[:4]]
    assert np.isnan(errors[1][1:]).all()
    assert np.isnan(errors[3][1:]).all()
    last = json.loads((studied / "ur_lstm" / "metrics.jsonl").read_text().splitlines()[-1])
    assert errors[2][-1] == last["held_out"]["mse"][0]
    assert len(scales.lines) == 6  # a rate that diverged has no timescales after training
    line = scales.lines[4]
    np.testing.assert_array_equal(line.get_xdata(), reports["ur_lstm" + good]["after"][0])
    np.testing.assert_array_equal(line.get_ydata(), [0.25, 0.5, 0.75, 1])


@pytest.mark.long
def test_infinite_timescales_are_drawn_and_written(studied, trained, tmp_path, monkeypatch, drawn):
    report = {"mse": [0.5, None], "before": [[np.inf] * 4] * 2, "after": [[np.inf] * 4, []]}
    monkeypatch.setattr(study, "report", lambda finished: report)
    monkeypatch.setattr(runs, "train_all", lambda *_: {"lstm": trained["lstm"]})
    (tmp_path / "lstm").symlink_to(studied / "lstm")
    study.run({"lstm": CONFIGS["lstm"]}, tmp_path)
    text = (tmp_path / "forgetting.json").read_text()
    written = json.loads(text, parse_constant=pytest.fail)
    assert written["lstm rate 0.001"]["after"] == [[None] * 4]
    table = (tmp_path / "forgetting.md").read_text()
    assert [line.count("∞") for line in table.splitlines()[2:]] == [4, 3]
    assert [len(line.get_xdata()) for line in drawn[-1].axes[1].lines] == [0, 0, 0]


def test_a_cell_of_the_users_own_has_a_directory_of_its_own(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(study, "run", lambda *arguments: calls.append(arguments))
    start("--cells=recurrent_gates:LSTM,lstm", f"--workdir={tmp_path}", "--profile=3")
    configs, directory, profile, _ = calls[0]
    assert list(configs) == ["recurrent_gates.LSTM", "lstm"]
    assert configs["recurrent_gates.LSTM"].model.cell == "recurrent_gates:LSTM"
    assert (directory, profile) == (tmp_path, 3)


@pytest.mark.parametrize(
    ("argv", "cells"),
    [
        ([], ["lstm", "u_lstm", "r_lstm", "ur_lstm"]),
        (["--cell=c_lstm"], ["c_lstm"]),
        (["--cells=lstm,cr_lstm"], ["lstm", "cr_lstm"]),
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
    monkeypatch.setattr(study, "run", lambda *arguments: calls.append(arguments))
    start("--steps=7")
    start("--steps=9", "--protocol=ur")
    assert str(calls[0][1]).startswith("runs/forgetting/small-")
    assert str(calls[1][1]).startswith("runs/forgetting/ur-")
    assert list(calls[0][0]) == ["lstm", "u_lstm", "r_lstm", "ur_lstm"]


BAD = {
    "--cell=lstm --cells=lstm,r_lstm": "--cell and --cells exclude each other: give one of them.",
    "--cells=lstm,r_lstm,lstm": "--cells must name each value once.",
    "--cells=none": "--cells must name at least one value.",
    "--cells=lstm,": "There is no cell named ''",
    "--cells=lstm,lstn": "There is no cell named 'lstn'; did you mean lstm",
    "--cells=lstm,gato": "--cell must have a sigmoid forget gate",
    "--layers=2": "the run has several",
    "--forget_bias=1": "--forget_bias is not for lstm",
    "--gate_bias=nan": "--gate_bias=nan",
    "--gate_bias=0x10": "--gate_bias=0x10",
    "--num_processes=2": "There is no flag --num_processes; see --help.",
}


@pytest.mark.parametrize("wish", BAD)
def test_bad_wishes_get_one_sentence_before_anything_is_trained(wish, monkeypatch):
    monkeypatch.setattr(study, "run", pytest.fail)
    assert BAD[wish] in refusal(start, *wish.split())
