"""The loop: what a run leaves behind, divergence, the best parameters, early stopping."""

import dataclasses
import json
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from matplotlib.figure import Figure

from experiments.command import runs
from experiments.copy.settings import COPY
from experiments.figures import learning_curve
from experiments.records import reporting
from experiments.records.workdir import Workdir, append_row
from experiments.settings.metrics import Metric
from experiments.training import loop
from experiments.training.learner import Learner
from experiments.training.models import EVALUATION
from experiments.training.supervised import Batch, SupervisedTask
from tests.experiments.support import assert_same_bits, leaves, tiny


@pytest.fixture(autouse=True)
def every_evaluation_is_checkpointed(monkeypatch):
    """As after ten seconds."""
    monkeypatch.setattr(loop, "_CHECKPOINT_SECONDS", 0.0)


def rows(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def shown(monkeypatch):
    """The figures that are saved."""
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k))
    )
    return figures


@pytest.mark.long
def test_what_a_run_leaves_behind(tmp_path, shown, capsys):
    config = tiny(seed=3, seeds=2)
    summary = loop.run(config, tmp_path)
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
    assert [row["steps"] for row in timing] == [0, 2, 2]
    assert all(0 < row["inside"] <= row["seconds"] for row in timing)
    assert summary["steps_per_second"] == 4 / summary["seconds"]
    assert summary["examples_per_second"] == 4 * 8 * 2 / summary["seconds"]
    outside = 1 - sum(row["inside"] for row in timing) / summary["seconds"]
    assert summary["share_outside_programs"] == pytest.approx(outside, rel=1e-9)
    assert summary["compile_seconds"] == timing[0]["compile_seconds"] > 0
    assert f"{outside:.1%} of the time outside of compiled programs" in printed

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
    loop.run(tiny(eval_every=1), every)
    loop.run(tiny(), tmp_path / "second")
    losses = [row["train_loss"][0] for row in rows(every)[1:]]
    means = [row["train_loss"][0] for row in rows(tmp_path / "second")[1:]]
    np.testing.assert_allclose(means, np.reshape(losses, (2, 2)).mean(axis=1), rtol=1e-6)


@pytest.mark.long
def test_a_diverged_lane_stops_no_other(tmp_path, shown, capsys):
    bad, good = tmp_path / "bad", tmp_path / "good"
    summary = loop.run(tiny(learning_rates=(1e-3, 1e30), steps=6), bad)
    loop.run(tiny(learning_rates=(1e-3, 2e-3), steps=6), good)

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
    learning_curve.draw(config, work, pytest.fail)
    above, below = shown[0].axes
    np.testing.assert_allclose(above.lines[0].get_ydata(), [2.5, np.nan])
    np.testing.assert_allclose(below.lines[0].get_ydata(), [0.15, np.nan])
    assert below.get_ylim() == (0, 1.03)


@pytest.mark.parametrize(
    ("scores", "limits"),
    [([0.2, 7.5], (0, 1.03 * 7.5)), ([-0.5, 0.3], (-0.5, 1.03)), ([None, None], (0, 1.03))],
)
def test_scores_that_are_no_probabilities_have_room(scores, limits, tmp_path, shown):
    work = Workdir(tmp_path)
    for step, score in enumerate(scores):
        row = {"step": step, "examples": 8 * step, "train_loss": [1.0], "diverged": [False]}
        append_row(work.metrics, row | {"held_out": {"copied_token_probability": [score]}})
    learning_curve.draw(tiny(), work, pytest.fail)
    assert shown[0].axes[1].get_ylim() == pytest.approx(limits)


def test_rates_have_their_own_lanes_and_labels():
    config = tiny(seeds=2, learning_rates=(1e-3, 1.0000001e-3))  # equal in six digits
    diverged = [False, True, True, True]
    assert learning_curve._labels(config, diverged) == ["0.001*", "0.0010000001**"]
    found = runs.by_rate("gru", config)
    assert found == {"gru rate 0.001": slice(0, 2), "gru rate 0.0010000001": slice(2, 4)}
    assert runs.by_rate("gru", tiny(seeds=2)) == {"gru": slice(0, 2)}


@pytest.mark.parametrize("eval_every", [2, 50])
def test_a_run_that_diverged_altogether_stops(eval_every, tmp_path, capsys):
    config = tiny(learning_rates=(1e30,), steps=100, eval_every=eval_every)
    summary = loop.run(config, tmp_path)
    assert summary["steps"] < max(20, eval_every + 1)
    assert summary["metrics"]["accuracy"]["max"] is None
    finished = runs.finished(tmp_path, [COPY])
    assert finished.diverged == [True]
    before = rows(tmp_path)
    assert (before[-1]["step"], before[-1]["diverged"]) == (summary["steps"], [True])
    capsys.readouterr()
    assert loop.run(config, tmp_path) == summary
    assert "diverged *" in capsys.readouterr().out  # printed again, and nothing is trained
    assert rows(tmp_path) == before


def test_missing_packages_are_said_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    summary = loop.run(tiny(), tmp_path)
    printed = capsys.readouterr().out
    assert printed.count("tensorboardX is not installed") == 1
    assert printed.count("matplotlib is not installed") == 1
    assert "figure:" not in printed
    assert summary["steps"] == 4


# A model that passes the best point of its validation set on the way to its training set's.


class Drift(nn.Module):
    recurrent: nn.Module

    @nn.compact
    def __call__(self, inputs, *, during=EVALUATION):
        ys = self.recurrent(inputs, deterministic=True)
        position = self.param("position", nn.initializers.zeros, ())
        return position + 0 * ys.sum(axis=-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DriftTask(SupervisedTask):
    """Training pulls the position to 1; validation is best at 0.3, the test set at 0.25."""

    name = "drift"
    metrics = (Metric("mse", False, 1.0, "baseline"),)

    def module(self, recurrent, model):
        return Drift(recurrent)

    def load(self):
        return ()

    def sets(self, loaded):
        return {"validation": self.batch_at(0.3), "test": self.batch_at(0.25)}

    def batch(self, loaded, key, step, size):
        return self.batch_at(1.0)

    def batch_at(self, value):
        return Batch(jnp.zeros((2, 8, 1)), jnp.full((1, 8), value))

    def score(self, outputs, batch):
        error = jnp.square(outputs[-1] - batch.targets[-1])
        return {"loss": error, "mse": error}


def drift(task=DriftTask(), **settings):
    config = tiny(eval_every=1, learning_rates=(0.1,), steps=9)
    training = dataclasses.replace(config.training, **settings)
    return dataclasses.replace(config, task=task, training=training)


def test_the_best_on_validation_is_tested(tmp_path, capsys):
    summary = loop.run(drift(keep_best=True), tmp_path)
    validation = [row["validation"]["mse"][0] for row in rows(tmp_path)]
    assert (len(validation), int(np.argmin(validation))) == (10, 3)  # Adam's first steps are 0.1
    best = 0.3 - np.sqrt(validation[3])  # it stops short of 0.3
    np.testing.assert_allclose(summary["metrics"]["mse"]["mean"], np.square(best - 0.25), rtol=1e-5)
    assert summary["metrics"]["mse"]["mean"] < 0.01 < validation[-1]
    assert summary["scored_on"] == "test"
    assert summary["validation"]["mse"]["mean"] == pytest.approx(validation[3], rel=1e-6)
    assert "test mse: " in capsys.readouterr().out


def test_early_stop(tmp_path):
    summary = loop.run(drift(patience=2), tmp_path)
    assert summary["steps"] == rows(tmp_path)[-1]["step"] == 5
    assert loop.run(drift(patience=2), tmp_path) == summary


@pytest.mark.long
def test_a_lane_that_stopped_early_keeps_its_result(tmp_path):
    # The slow lane trains on; the fast one's result is that of its own run.
    both = loop.run(drift(patience=2, learning_rates=(0.1, 0.04)), tmp_path / "both")
    fast = loop.run(drift(patience=2), tmp_path / "fast")
    assert both["steps"] > fast["steps"]
    kept = both["metrics"]["mse"]["per_run"][0]["value"]
    assert kept == pytest.approx(fast["metrics"]["mse"]["mean"], rel=1e-6)


@pytest.mark.parametrize(
    "on_divergence",
    ["mark", *(pytest.param(other, marks=pytest.mark.long) for other in ("stop", "skip"))],
)
def test_a_lane_that_stopped_early_diverges_no_more(tmp_path, on_divergence):
    """The first is at its best at step 0, stops at step 2, and overflows beside the other."""
    config = drift(
        patience=2,
        learning_rates=(1.1, 0.0005),
        optimizer="sgd",
        steps=80,
        on_divergence=on_divergence,
    )
    summary = loop.run(config, tmp_path)
    first, second = summary["metrics"]["mse"]["per_run"]
    assert first["value"] == pytest.approx(0.0625) and not first["diverged"]
    assert summary["steps"] == 80 and not second["diverged"]
    assert summary.get("skipped") == (None if on_divergence == "mark" else [0, 0])


def test_a_run_killed_before_its_first_checkpoint_starts_with_its_first_evaluation(tmp_path):
    """Which is the best one here: without it the run would stop later, with a worse result."""
    config = drift(patience=1, learning_rates=(1.1,), optimizer="sgd")
    whole = loop.run(config, tmp_path)
    expected = (tmp_path / "metrics.jsonl").read_text()
    first, *others = expected.splitlines(keepends=True)
    assert others
    (tmp_path / "metrics.jsonl").write_text(first)
    (tmp_path / "summary.json").unlink()
    shutil.rmtree(tmp_path / "checkpoints")
    again = loop.run(config, tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == expected
    assert again["metrics"] == whole["metrics"] and again["steps"] == whole["steps"]


def test_halved_rates_are_reported_and_used(tmp_path):
    """A step multiplies the loss by (1 - 2 rate)^2: it rises while the rate is above 1."""
    loop.run(drift(halve_every=8, learning_rates=(1.5,), optimizer="sgd"), tmp_path)
    found = rows(tmp_path)
    losses = [row["train_loss"][0] for row in found[1:]]
    rate = 1.5
    for step in range(1, len(losses)):
        rate = rate / 2 if losses[step] > losses[step - 1] else rate
        assert found[step + 1]["learning_rate"] == [pytest.approx(rate, rel=1e-6)]
    assert rate < 1.5
    used = np.array([row["learning_rate"][0] for row in found[:-2]])
    np.testing.assert_allclose(losses, np.cumprod([1, *np.square(1 - 2 * used)]), rtol=1e-5)


def test_small_numbers_are_not_printed_as_zeros():
    shown = [reporting.number(x) for x in (0.0, 0.9934, 0.00123, 0.000999, -4.31e-5, 12.0)]
    assert shown == ["0.0000", "0.9934", "0.0012", "1.0e-03", "-4.3e-05", "12.0000"]


class LevelTask(DriftTask):
    """Every position is as good as another."""

    def score(self, outputs, batch):
        error = super().score(outputs, batch)["mse"]
        return {"loss": error, "mse": jnp.zeros_like(error)}


@pytest.mark.parametrize("ties", ["first", "last"])
def test_of_equal_scores_the_first_or_the_last_is_the_best(ties):
    """Neither is news: patience ends alike."""
    learner = Learner(drift(LevelTask(), patience=3, ties=ties))
    learner.prepare()
    state, _ = learner.evaluate(learner.initial())
    for step in range(3):
        state = learner.advance(state, step, step + 1)
        state, _ = learner.evaluate(state)
        position = float(state.params["position"])
        assert position > 0
        assert float(state.best.params["position"]) == (0 if ties == "first" else position)
        assert int(state.best.stale) == step + 1
        np.testing.assert_array_equal(learner.stopped(state), [step == 2])


@pytest.mark.parametrize("name", ["warmup", "cosine"])
def test_a_schedule_is_a_factor_on_the_rate(name):
    """The loss is (1 - p)^2: a step of gradient descent moves p by 2 rate (1 - p)."""
    settings = {"optimizer": "sgd", "schedule": name, "warmup_steps": 2, "steps": 5}
    learner = Learner(drift(**settings))
    learner.prepare()
    half = (1 + np.cos(np.pi * np.arange(3) / 3)) / 2
    factors = {"warmup": [0.5, 1, 1, 1, 1], "cosine": [0.5, 0.75, *half]}[name]
    state, position = learner.initial(), 0.0
    for step, factor in enumerate(factors):
        state = learner.advance(state, step, step + 1)
        position += 2 * 0.1 * factor * (1 - position)
        assert float(state.params["position"]) == pytest.approx(position, rel=1e-5), step


@pytest.mark.parametrize(
    ("positions", "best", "stale"),
    [((0.2, 0.9, 0.3), 0.3, 0), ((0.2, 0.9, 0.9, 0.3), 0.2, 3)],
)
def test_a_lane_that_stopped_is_not_taken_up_again(positions, best, stale):
    """Other lanes may train on, and it with them: a better score comes too late."""
    learner = Learner(drift(patience=2))
    learner.load()
    state = learner.initial()
    for position in positions:
        params = {**state.params, "position": jnp.float32(position)}
        state, _ = learner.evaluate(state._replace(params=params))
    assert float(state.best.params["position"]) == np.float32(best)
    assert int(state.best.stale) == stale
