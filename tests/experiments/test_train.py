"""The loop: what a run leaves behind, lanes, divergence, the best parameters."""

import dataclasses
import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from matplotlib.figure import Figure

from experiments import copy, figures, flags, reporting, studies, train
from experiments.learner import Learner
from experiments.tasks import Batch, Metric
from experiments.workdir import Workdir, append_row
from tests.experiments.support import assert_same_bits, binary, leaves, tiny


def rows(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@functools.cache
def prepared(**settings):
    """A compiled learner of a tiny config."""
    learner = Learner(tiny(**settings))
    learner.prepare()
    return learner


def after(steps, **settings):
    """The state of a tiny config after some steps, without a workdir."""
    learner = prepared(**settings)
    return learner.advance(learner.initial(), 0, steps)


def assert_near(actual, expected, tolerance):
    """Every leaf agrees, relative to its largest entry."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max()


@pytest.mark.parametrize("cell", ["gato", "gru", "ur_lstm"])
def test_training_changes_every_parameter(cell):
    before = prepared(cell=cell).initial().params
    params = after(3, cell=cell).params
    for path, leaf in jax.tree_util.tree_leaves_with_path(before):
        trained = params
        for entry in path:
            trained = trained[entry.key]
        assert not np.array_equal(leaf, trained), jax.tree_util.keystr(path)


@pytest.fixture
def shown(monkeypatch):
    """The figures that are saved."""
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k))
    )
    return figures


def test_what_a_run_leaves_behind(tmp_path, shown, capsys):
    config = tiny(seed=3, seeds=2)
    summary = train.run(config, tmp_path)
    printed = capsys.readouterr().out

    recorded = json.loads((tmp_path / "config.json").read_text())
    assert recorded["config"] == config.resolved()
    assert recorded["protocol"] == "small"
    assert recorded["overrides"]["hidden_size"] == 6
    assert recorded["device"] == f"cpu x {jax.device_count()}"
    assert recorded["versions"]["jax"] == jax.__version__
    assert "commit" in recorded

    found = rows(tmp_path)
    assert [(row["step"], row["examples"]) for row in found] == [(0, 0), (2, 16), (4, 32)]
    keys = {"step", "examples", "learning_rate", "train_loss", "diverged", "held_out"}
    assert all(set(row) == keys for row in found)
    assert found[0]["train_loss"] == [None, None]
    assert found[-1]["learning_rate"] == [0.01, 0.01]
    assert found[-1]["diverged"] == [False, False]

    last = found[-1]["held_out"]
    assert last.keys() == {"loss", "accuracy", "copied_token_probability"} == set(last)
    for name, values in last.items():
        metric = summary["metrics"][name]
        assert [run["value"] for run in metric["per_run"]] == values
        assert [run["seed"] for run in metric["per_run"]] == [3, 4]
        assert (metric["min"], metric["max"]) == (min(values), max(values))
        assert metric["mean"] == sum(values) / 2
    assert summary["scored_on"] == "held_out"
    assert "validation" not in summary
    assert (summary["steps"], summary["examples"]) == (4, 32)
    assert summary["recurrent_parameters"] == 3 * 6 * (3 + 6 + 2)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    timing = [json.loads(line) for line in (tmp_path / "timing.jsonl").read_text().splitlines()]
    assert [row["step"] for row in timing] == [0, 2, 4]
    assert summary["seconds"] == sum(row["seconds"] for row in timing)

    events = next((tmp_path / "tensorboard").iterdir()).read_bytes()
    for tag in (b"train/loss/seed_3_rate_0.01", b"held_out/accuracy/seed_4_rate_0.01"):
        assert tag in events

    path = tmp_path / "figures" / "learning_curve.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    above, below = shown[0].axes
    probability = np.array([row["held_out"]["copied_token_probability"] for row in found])
    np.testing.assert_array_equal(below.lines[0].get_xdata(), [0, 16, 32])
    np.testing.assert_allclose(below.lines[0].get_ydata(), probability.mean(axis=1), rtol=1e-12)
    np.testing.assert_array_equal(below.lines[1].get_ydata(), [0.1, 0.1])
    loss = np.array([row["train_loss"] for row in found[1:]])
    np.testing.assert_allclose(above.lines[0].get_ydata()[1:], loss.mean(axis=1), rtol=1e-12)

    value = f"held-out copied_token_probability: {last['copied_token_probability'][0]:.4f}"
    assert f"{value} (chance 0.1; seed 3, learning rate 0.01)" in printed
    assert f"figure: {path}" in printed
    assert "step 2/4: loss " in printed


def test_training_loss_is_the_mean_since_the_last_evaluation(tmp_path):
    every = tmp_path / "every"
    train.run(tiny(eval_every=1), every)
    train.run(tiny(), tmp_path / "second")
    losses = [row["train_loss"][0] for row in rows(every)[1:]]
    means = [row["train_loss"][0] for row in rows(tmp_path / "second")[1:]]
    np.testing.assert_allclose(means, np.reshape(losses, (2, 2)).mean(axis=1), rtol=1e-6)


@pytest.mark.parametrize("one_by_one", [(), ("cpu",)], ids=["vmap", "loop"])
def test_lanes_equal_single_runs(one_by_one, monkeypatch):
    monkeypatch.setattr("experiments.learner._LANE_AFTER_LANE", one_by_one)
    prepared.cache_clear()
    lanes = after(3, seeds=2, learning_rates=(1e-2, 3e-3))
    prepared.cache_clear()
    for lane, seed, rate in ((0, 0, 1e-2), (3, 1, 3e-3)):
        single = after(3, seed=seed, learning_rates=(rate,))
        assert_near(jax.tree.map(lambda leaf, lane=lane: leaf[lane], lanes), single, 1e-5)


def test_a_lane_alone_starts_with_the_same_bits():
    lanes = Learner(tiny(cell="lstm", seeds=2)).initial().params
    single = Learner(tiny(cell="lstm", seed=1)).initial().params
    jax.tree.map(lambda many, one: np.testing.assert_array_equal(many[1], one), lanes, single)


@pytest.mark.parametrize("one_by_one", [(), ("cpu",)], ids=["vmap", "loop"])
def test_a_diverged_lane_stops_no_other(one_by_one, tmp_path, shown, capsys, monkeypatch):
    monkeypatch.setattr("experiments.learner._LANE_AFTER_LANE", one_by_one)
    bad, good = tmp_path / "bad", tmp_path / "good"
    summary = train.run(tiny(learning_rates=(1e-3, 1e30), steps=6), bad)
    train.run(tiny(learning_rates=(1e-3, 2e-3), steps=6), good)

    assert rows(bad)[-1]["diverged"] == [False, True]
    assert rows(bad)[-1]["held_out"]["accuracy"][1] is None
    first = {name: leaf[0] for name, leaf in leaves(bad, 6).items()}
    assert_same_bits(first, {name: leaf[0] for name, leaf in leaves(good, 6).items()})

    accuracy, loss = summary["metrics"]["accuracy"], summary["metrics"]["loss"]
    assert [run["diverged"] for run in accuracy["per_run"]] == [False, True]
    alive = accuracy["per_run"][0]["value"]
    assert (accuracy["mean"], accuracy["min"], accuracy["max"]) == (None, None, alive)
    assert (loss["mean"], loss["max"]) == (None, None)
    assert loss["min"] == loss["per_run"][0]["value"] > 0
    assert "diverged * (chance 0.1; seed 0, learning rate 1e+30)" in capsys.readouterr().out

    legends = [[text.get_text() for text in f.axes[0].get_legend().texts] for f in shown]
    assert legends == [["0.001", "1e+30*"], ["0.001", "0.002"]]


def test_a_mean_over_a_diverged_seed_is_not_drawn(tmp_path, shown):
    config, work = tiny(seeds=2), Workdir(tmp_path)
    for step, loss, probability, bad in (
        (0, [3, 2], [0.1, 0.2], False),
        (2, [1, None], [0.5, None], True),
    ):
        append_row(
            work.metrics,
            {
                "step": step,
                "examples": 8 * step,
                "train_loss": loss,
                "held_out": {"copied_token_probability": probability},
                "diverged": [False, bad],
            },
        )
    figures.learning_curve(config, work, pytest.fail)
    above, below = shown[0].axes
    np.testing.assert_allclose(above.lines[0].get_ydata(), [2.5, np.nan])
    np.testing.assert_allclose(below.lines[0].get_ydata(), [0.15, np.nan])


def test_rates_have_their_own_lanes_and_labels():
    config = tiny(seeds=2, learning_rates=(1e-3, 1.0000001e-3))  # equal in six digits
    diverged = [False, True, True, True]
    assert figures._labels(config, diverged) == ["0.001*", "0.0010000001**"]
    found = studies.by_rate("gru", config)
    assert found == {"gru rate 0.001": slice(0, 2), "gru rate 0.0010000001": slice(2, 4)}
    assert studies.by_rate("gru", tiny(seeds=2)) == {"gru": slice(0, 2)}


def test_a_loss_beyond_return_has_diverged():
    """A bounded state that is read by a linear map: the loss stays finite at any rate."""
    settings = {"decoder": (), "learning_rates": (1e-3, 1e18)}
    state = after(3, **settings)
    assert np.isfinite(state.loss_sum).all()
    np.testing.assert_array_equal(state.diverged_at, [-1, 1])


def test_a_run_that_diverged_altogether_stops(tmp_path):
    summary = train.run(tiny(learning_rates=(1e30,), steps=100), tmp_path)
    assert summary["steps"] < 20
    assert summary["metrics"]["accuracy"]["max"] is None


def test_detaching_can_end_before_training_does():
    ending = {"cell": "gru", "detach_prob": 1.0, "detach_off_steps": 2}
    always, never = {"cell": "gru", "detach_prob": 1.0}, {"cell": "gru"}
    assert_near(after(2, **ending), after(2, **always), 1e-6)
    two = jax.device_get(after(2, **ending))

    def go_on(settings):
        learner = prepared(**settings)
        return learner.advance(learner.place(two), 2, 4)

    assert_near(go_on(ending), go_on(never), 1e-6)
    with pytest.raises(AssertionError):
        assert_near(go_on(ending), go_on(always), 1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"cell": "lstm", "detach_prob": 0.5, "zoneout_c": 0.2, "zoneout_h": 0.1},
        {"cell": "gato", "detach_prob": 0.5, "detach_per_example": True, "damp_prob": 0.3},
        {"cell": "gru", "dtype": "bfloat16"},
        {"cell": "gru", "layout": "delimiter", "sequences": 50, "loss_on": "all"},
    ],
    ids=str,
)
def test_settings_change_the_training_and_stay_finite(settings):
    state = after(2, **settings)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {"float32"}
    plain = after(2, cell=settings["cell"])
    changed, default = state.params["recurrent"], plain.params["recurrent"]
    for a, b in zip(jax.tree.leaves(changed), jax.tree.leaves(default), strict=True):
        assert not np.array_equal(a, b)


def test_missing_packages_are_said_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    summary = train.run(tiny(), tmp_path)
    printed = capsys.readouterr().out
    assert printed.count("tensorboardX is not installed") == 1
    assert printed.count("matplotlib is not installed") == 1
    assert "figure:" not in printed
    assert summary["steps"] == 4


def gradients(workdir):
    """Adam's first moments after one step: a tenth of the gradient."""
    found = {name: leaf for name, leaf in leaves(workdir, 1).items() if ".mu." in name}
    assert found
    return found


def test_masks_and_scores_are_the_same_on_1_and_7_devices(tmp_path):
    """Of each example; the 1000 to score are no multiple of 7."""
    argv = ["--cell=gru", "--hidden_size=8", "--length=3", "--batch_size=7", "--steps=1"]
    together = [*argv, "--detach_prob=0.5"]
    apart = [*together, "--detach_per_example"]
    done = binary(*apart, f"--workdir={tmp_path / 'seven'}", devices=7)
    assert done.returncode == 0, done.stderr
    assert "on cpu x 7" in done.stdout
    for name, flags_given in (("one", apart), ("other", together)):
        given = [*flags_given, f"--workdir={tmp_path / name}"]
        flags.start("copy", flags.parse(["copy", *given], copy.define))
    one, seven, other = (gradients(tmp_path / name) for name in ("one", "seven", "other"))
    assert_near(seven, one, 1e-5)
    with pytest.raises(AssertionError):  # other masks would show
        assert_near(other, one, 1e-2)
    begun, shared = (rows(tmp_path / name)[0]["held_out"] for name in ("one", "seven"))
    for name, value in begun.items():
        assert shared[name] == pytest.approx(value, rel=1e-5), name


# A model that passes the best point of its validation set on the way to its training set's.


class Drift(nn.Module):
    recurrent: nn.Module

    @nn.compact
    def __call__(self, inputs, carry_fns=(), noise=None):
        ys = self.recurrent(inputs, carry_fns=carry_fns, deterministic=noise is None)
        position = self.param("position", nn.initializers.zeros, ())
        return position + 0 * ys.sum(axis=-1)


@dataclasses.dataclass(frozen=True)
class DriftTask:
    """Training pulls the position to 1; validation is best at 0.3, the test set at 0.25."""

    name = "drift"
    metrics = (Metric("mse", False, 1.0, "baseline"),)

    def check(self):
        pass

    def module(self, recurrent, embedding, decoder):
        return Drift(recurrent)

    def load(self):
        return ()

    def held_out(self, data):
        return {"validation": self.batch_at(0.3), "test": self.batch_at(0.25)}

    def batch(self, data, key, step, size):
        return self.batch_at(1.0)

    def batch_at(self, value):
        return Batch(jnp.zeros((2, 8, 1)), jnp.full((1, 8), value))

    def score(self, outputs, batch):
        error = jnp.square(outputs[-1] - batch.targets[-1])
        return {"loss": error, "mse": error}


def drift(**settings):
    config = tiny(eval_every=1, learning_rates=(0.1,), steps=9)
    training = dataclasses.replace(config.training, **settings)
    return dataclasses.replace(config, task=DriftTask(), training=training)


def test_the_best_on_validation_is_tested(tmp_path, capsys):
    summary = train.run(drift(keep_best=True), tmp_path)
    validation = [row["validation"]["mse"][0] for row in rows(tmp_path)]
    assert (len(validation), int(np.argmin(validation))) == (10, 3)  # Adam's first steps are 0.1
    best = 0.3 - np.sqrt(validation[3])  # it stops short of 0.3
    np.testing.assert_allclose(summary["metrics"]["mse"]["mean"], np.square(best - 0.25), rtol=1e-2)
    assert summary["metrics"]["mse"]["mean"] < 0.01 < validation[-1]
    assert summary["scored_on"] == "test"
    assert summary["validation"]["mse"]["mean"] == pytest.approx(validation[3], rel=1e-6)
    assert "test mse: " in capsys.readouterr().out


@pytest.mark.parametrize(("examples", "most"), [(40, 40), (40, 7), (13, 6), (1, 4)])
def test_every_example_counts_once(examples, most, monkeypatch):
    """Whatever the parts are that fit into memory."""
    monkeypatch.setattr("experiments.learner._EVALUATION_ROWS", most)
    learner = Learner(tiny(held_out_sequences=examples, seeds=2))
    learner.load()
    state = learner.initial()
    sizes = []
    score = learner._score_jit

    def counted(*arguments):
        sizes.append(learner._part_size(arguments[1]))
        return score(*arguments)

    monkeypatch.setattr(learner, "_score_jit", counted)
    scores = learner.final_scores(state)
    assert max(sizes) <= most
    whole = Learner(tiny(held_out_sequences=examples, seeds=2))
    whole.load()
    batch = whole._sets["held_out"]
    for lane in range(2):
        params = jax.tree.map(lambda leaf, lane=lane: leaf[lane], state.params)
        outputs = whole._module.apply({"params": params}, batch.inputs)
        expected = jax.tree.map(jnp.mean, whole._task.score(outputs, batch))
        for name, value in scores.items():
            np.testing.assert_allclose(value[lane], expected[name], rtol=1e-6)


def test_early_stop(tmp_path):
    summary = train.run(drift(patience=2), tmp_path)
    assert summary["steps"] == rows(tmp_path)[-1]["step"] == 5
    assert train.run(drift(patience=2), tmp_path) == summary


def test_a_lane_that_stopped_early_keeps_its_result(tmp_path):
    # The slow lane trains on; the fast one's result is that of its own run.
    both = train.run(drift(patience=2, learning_rates=(0.1, 0.04)), tmp_path / "both")
    fast = train.run(drift(patience=2), tmp_path / "fast")
    assert both["steps"] > fast["steps"]
    kept = both["metrics"]["mse"]["per_run"][0]["value"]
    assert kept == pytest.approx(fast["metrics"]["mse"]["mean"], rel=1e-6)


def test_halved_rates_are_reported_and_used(tmp_path):
    # Training losses rise when the rate is far too large: 0, 1 -> overshoots.
    train.run(drift(halve_every=8, learning_rates=(1.5,)), tmp_path)
    found = rows(tmp_path)
    losses = [row["train_loss"][0] for row in found[1:]]
    rate = 1.5
    for step in range(1, len(losses)):
        rate = rate / 2 if losses[step] > losses[step - 1] else rate
        assert found[step + 1]["learning_rate"] == [pytest.approx(rate, rel=1e-6)]
    assert rate < 1.5


def test_small_numbers_are_not_printed_as_zeros():
    shown = [reporting.number(x) for x in (0.0, 0.9934, 0.00123, 0.000999, -4.31e-5, 12.0)]
    assert shown == ["0.0000", "0.9934", "0.0012", "1.0e-03", "-4.3e-05", "12.0000"]
