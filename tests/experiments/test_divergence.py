"""Losses and gradients that are not finite: named, marked, left out, or the end of the run."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.copy.task import CopyTask
from experiments.settings.errors import DivergedError
from experiments.training import loop
from experiments.training.learner import Learner
from experiments.training.state import Lane, Purpose, key_of
from tests.experiments.support import leaves, tiny

pytestmark = pytest.mark.usefixtures("learners")

STEP = 3
LEAF = "recurrent.cell.recurrent_kernel.reset"
BAD = {1: "the loss diverged", 2: f"the gradient of {LEAF} is not finite"}  # by seed


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoisonedTask(CopyTask):
    """One step of seed 1 has a loss that is not finite, and of seed 2 a gradient."""

    stream_axes = None

    def start(self, fresh, data, key, rows):
        del fresh, data, key, rows
        return jnp.int32(0)

    def draw(self, act, data, stream, key, step, rows):
        """The stream is the seed, if it is a bad one at its bad step."""
        stream = jnp.int32(0)
        for seed in BAD:
            lane = Lane(jnp.int32(seed), jnp.float32(0))
            same = jax.random.key_data(key) == jax.random.key_data(key_of(lane, Purpose.DATA))
            stream = jnp.where(same.all() & (step == STEP), seed, stream)
        return super().draw(act, data, (), key, step, rows)[0], stream

    def loss(self, apply, params, window, stream, train):
        outcome = super().loss(apply, params, window, (), train)
        total, weight = outcome.loss
        total = jnp.where(stream == 1, jnp.nan, total)
        nothing = 0 * params["recurrent"]["cell"]["recurrent_kernel"]["reset"].sum()
        total += jnp.sqrt(nothing + jnp.where(stream == 2, 0.0, 1.0))  # its derivative is 0 / 0
        return outcome._replace(loss=(total, weight), stream=jnp.int32(0))

    def held_out(self, data, devices):
        return {name: _Plain(one) for name, one in super().held_out(data, devices).items()}


class _Plain:
    """A held-out set whose windows are never poisoned."""

    def __init__(self, parts):
        self._parts, self.windows, self.rows = parts, parts.windows, parts.rows

    def start(self, fresh, data, rows):
        del fresh, data, rows
        return jnp.int32(0)

    def draw(self, act, data, stream, index, rows):
        return self._parts.draw(act, data, (), index, rows)[0], stream


def poisoned(on_divergence, **settings):
    """Six steps with an evaluation every two."""
    config = tiny(**{"steps": 6, "on_divergence": on_divergence} | settings)
    task = PoisonedTask(**dataclasses.asdict(config.task))
    return dataclasses.replace(config, task=task)


def named(seed):
    return f"seed {seed}, learning rate 0.01: {BAD[seed]} at step 3"


@pytest.mark.long
def test_an_update_that_is_skipped_is_as_if_its_step_were_not(tmp_path, capsys):
    summary = loop.run(poisoned("skip", seeds=3), tmp_path)
    said = capsys.readouterr().out
    assert said.count("warning") == 2
    for seed in BAD:
        assert f"warning: {named(seed)}; updates left out since the last evaluation: 1." in said
    assert summary["skipped"] == [0, 1, 1]
    rows = [json.loads(row) for row in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["skipped"] for row in rows] == [[0, 0, 0], [0, 0, 0], [0, 1, 1], [0, 1, 1]]
    assert not any(run["diverged"] for run in summary["metrics"]["loss"]["per_run"])

    learner = Learner(tiny(seeds=3, steps=6))
    learner.prepare()
    before = learner.advance(learner.initial(), 0, STEP)
    whole = learner.advance(jax.tree.map(jnp.copy, before), STEP, 6)
    without = learner.advance(before, STEP + 1, 6)
    saved = leaves(tmp_path, 6)
    for part in ("params", "optimizer"):
        expected = (getattr(state, part) for state in (whole, without))
        for (path, undisturbed), skipped in zip(
            jax.tree_util.tree_leaves_with_path(next(expected)),
            jax.tree.leaves(next(expected)),
            strict=True,
        ):
            name = f"{part}.{jax.tree_util.keystr(path, simple=True, separator='.')}"
            for seed, leaf in enumerate((undisturbed, skipped, skipped)):
                np.testing.assert_allclose(
                    saved[name][seed], leaf[seed], rtol=1e-5, atol=1e-8, err_msg=name
                )


def test_a_run_that_is_to_stop_ends_with_a_sentence_and_keeps_what_was_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "_CHECKPOINT_SECONDS", -1.0)
    for _ in range(2):  # again from the checkpoint
        with pytest.raises(DivergedError) as error:
            loop.run(poisoned("stop", seed=2), tmp_path)
        assert str(error.value) == (
            f"{named(2)}; --on_divergence=skip leaves such updates out, and mark goes on with the "
            "other seeds."
        )
        names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
        assert names == ["0", "2"]
    saved = leaves(tmp_path, 2)
    assert all(np.isfinite(leaf).all() for name, leaf in saved.items() if name.startswith("params"))


def test_a_run_whose_seeds_have_all_diverged_says_why_it_ends(tmp_path, capsys):
    assert loop.run(tiny(learning_rates=(1e30,), steps=8), tmp_path)["steps"] < 8
    assert "ended at step 2: every seed has diverged.\n" in capsys.readouterr().out


@pytest.mark.long
def test_a_seed_that_is_marked_is_named_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loop, "_CHECKPOINT_SECONDS", -1.0)
    for steps in (2, 4):
        loop.run(tiny(learning_rates=(1e-2, 1e30), steps=steps), tmp_path)
    said = capsys.readouterr().out
    assert said.count("warning") == 1
    assert (
        "warning: seed 0, learning rate 1e+30: the loss diverged at step 1; the first parameter "
        "that is not finite is decoder.Dense_0."
    ) in said


@pytest.mark.long
def test_a_binary_whose_run_is_to_stop_exits_with_one(program, tmp_path):
    flags = ["--cell=gru", "--hidden_size=6", "--tokens=3", "--length=4", "--embedding=3"]
    flags += ["--batch_size=8", "--held_out_sequences=40", "--steps=4", "--learning_rate=1e30"]
    code, _, said = program(
        "experiments.copy", *flags, "--on_divergence=stop", f"--workdir={tmp_path / 'run'}"
    )
    assert code == 1
    assert said.startswith("experiments.copy: seed 0, learning rate 1e+30: the loss diverged at")
    assert said.count("\n") == 1
