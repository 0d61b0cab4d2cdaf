"""The copy task: layouts, scores, and what is held out."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.copy import task as copy
from experiments.settings.errors import UserError
from tests.experiments.support import tiny

A = jnp.array([[3, 7], [1, 2], [3, 5]])  # [n = 3, B = 2]

LAYOUTS = ("aba", "cue", "delimiter")


def task(layout="aba", **settings):
    return tiny(layout=layout, **settings).task


def test_aba_layout():
    batch = copy.aba(A, 2)
    np.testing.assert_array_equal(batch.inputs.T, [[3, 1, 3, 0, 0, 3, 1], [7, 2, 5, 0, 0, 7, 2]])
    np.testing.assert_array_equal(batch.targets.T, [[1, 3, 0, 0, 3, 1, 3], [2, 5, 0, 0, 7, 2, 5]])


def test_cue_layout():
    batch = copy.cue(A, 2, symbols=8)
    np.testing.assert_array_equal(
        batch.inputs.T, [[3, 1, 3, 0, 0, 9, 9, 9], [7, 2, 5, 0, 0, 9, 9, 9]]
    )
    np.testing.assert_array_equal(
        batch.targets.T, [[0, 0, 0, 0, 0, 3, 1, 3], [0, 0, 0, 0, 0, 7, 2, 5]]
    )


def test_delimiter_layout():
    batch = copy.delimiter(A, 2, symbols=8)
    np.testing.assert_array_equal(
        batch.inputs.T, [[3, 1, 3, 0, 9, 0, 0, 0], [7, 2, 5, 0, 9, 0, 0, 0]]
    )
    np.testing.assert_array_equal(
        batch.targets.T, [[0, 0, 0, 0, 0, 3, 1, 3], [0, 0, 0, 0, 0, 7, 2, 5]]
    )


def test_delimiter_with_the_shortest_delay():
    np.testing.assert_array_equal(copy.delimiter(A, 1, 8).inputs[:, 0], [3, 1, 3, 9, 0, 0, 0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_target_is_visible_before_its_step(layout):
    this = task(layout)
    whole = this.lay_out(A)
    for j in range(len(A)):
        other = this.lay_out(A.at[j].add(1))
        due = len(whole.targets) - len(A) + j
        assert not np.array_equal(whole.targets[due], other.targets[due])
        seen = np.flatnonzero((whole.inputs[: due + 1] != other.inputs[: due + 1]).any(axis=1))
        np.testing.assert_array_equal(seen, [j])  # in A itself, and nowhere else until it is due


@pytest.mark.parametrize("loss_on", ["copied", "all"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_oracle_scores_one(layout, loss_on):
    this = task(layout, loss_on=loss_on)
    batch = this.sets(this.load())["held_out"]
    targets = batch.targets[-this.tokens :] if loss_on == "copied" else batch.targets
    scores = this.score(1e4 * jax.nn.one_hot(targets, this.classes), batch)
    for name, value in (("accuracy", 1), ("copied_token_probability", 1), ("loss", 0)):
        np.testing.assert_array_equal(scores[name], np.full(40, value), err_msg=name)


@pytest.mark.parametrize("loss_on", ["copied", "all"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_constant_predictor_scores_the_baseline(layout, loss_on):
    this = task(layout, loss_on=loss_on)
    drawn = jnp.arange(1, 11)
    tokens = jnp.stack([drawn, jnp.roll(drawn, 3), drawn[::-1]])  # each symbol as often as others
    batch = this.lay_out(tokens)
    blank = (batch.targets == 0)[-3:] if loss_on == "copied" else batch.targets == 0
    symbols = jnp.arange(this.classes)
    uniform = jnp.where((symbols > 0) & (symbols <= 10), 0.0, -1e4)
    certain = jnp.where(symbols == 0, 0.0, -1e4)
    scores = this.score(jnp.where(blank[..., None], certain, uniform), batch)
    baselines = {metric.name: metric.baseline for metric in this.metrics}
    for name, value in baselines.items():
        np.testing.assert_allclose(scores[name].mean(), value, rtol=1e-6, err_msg=name)
    steps = {"aba": 9, "cue": 10, "delimiter": 10}[layout]
    drawn_at = 5 if layout == "aba" else 3  # in aba two tokens of the first A are targets too
    expected = math.log(10) * (1 if loss_on == "copied" else drawn_at / steps)
    assert baselines["loss"] == pytest.approx(expected, rel=1e-12)
    assert baselines["copied_token_probability"] == baselines["accuracy"] == 0.1


def test_metrics_read_the_copied_tokens_alone():
    this = task("cue", loss_on="all")
    batch = this.lay_out(A)
    right = 1e4 * jax.nn.one_hot(batch.targets, this.classes)
    wrong_blanks = right.at[:-3].set(1e4 * jax.nn.one_hot(batch.targets[:-3] + 1, this.classes))
    scores = this.score(wrong_blanks, batch)
    np.testing.assert_array_equal(scores["accuracy"], [1, 1])
    np.testing.assert_array_equal(scores["copied_token_probability"], [1, 1])
    assert (scores["loss"] > 1000).all()


def test_one_wrong_token_costs_its_share():
    this = task("cue")
    batch = this.lay_out(A)
    outputs = 1e4 * jax.nn.one_hot(batch.targets[-3:], this.classes)
    outputs = outputs.at[1, 0].set(jnp.zeros(this.classes))
    scores = this.score(outputs, batch)
    np.testing.assert_allclose(
        scores["copied_token_probability"], [(2 + 1 / this.classes) / 3, 1], rtol=1e-6
    )
    np.testing.assert_allclose(scores["loss"], [math.log(this.classes) / 3, 0], rtol=1e-6)


def tokens_of(batch, n):
    return [tuple(column) for column in np.asarray(batch.inputs[:n]).T]


def sampler(this, size):
    """(seed, step) -> batch."""
    data = this.load()
    draw = jax.jit(lambda seed, step: this.batch(data, jax.random.key(seed), step, size))
    return lambda seed, step: draw(jnp.int32(seed), jnp.int32(step))


@pytest.mark.parametrize("sequences", [0, 60])
def test_training_never_meets_a_held_out_sequence(sequences):
    # 16 sequences of 2 symbols, 4 of them held out: almost every batch would meet one.
    this = task(tokens=4, symbols=2, held_out_sequences=4, sequences=sequences)
    held_out = set(tokens_of(this.sets(this.load())["held_out"], 4))
    draw = sampler(this, 32)
    seen = {t for step in range(20) for t in tokens_of(draw(1, step), 4)}
    everything = {(a, b, c, d) for a in (1, 2) for b in (1, 2) for c in (1, 2) for d in (1, 2)}
    assert seen == everything - held_out


def test_held_out_set_is_the_same_for_all_seeds_and_cells():
    first = tiny(seed=0, cell="gru").task.load()["tokens"]
    second = tiny(seed=7, cell="ur_lstm", hidden_size=12).task.load()["tokens"]
    np.testing.assert_array_equal(first, second)


def test_fresh_sequences_differ_by_step_and_key():
    draw = sampler(task(), 8)
    batches = [draw(seed, step).inputs for seed in (0, 1) for step in (0, 1)]
    for i, a in enumerate(batches):
        for b in batches[:i]:
            assert not np.array_equal(a, b)
    np.testing.assert_array_equal(draw(0, 0).inputs, batches[0])


def test_fixed_set_is_drawn_from_with_replacement():
    draw = sampler(task(sequences=5), 16)

    def seen(seed, steps):
        return {t for step in steps for t in tokens_of(draw(seed, step), 3)}

    assert len(seen(0, range(20))) == 5
    assert seen(0, range(20)) == seen(0, range(20, 40)) != seen(1, range(20))


def test_tokens_are_uniform():
    this = task(tokens=8)
    batch = sampler(this, 5000)(0, 0)
    counts = np.bincount(np.asarray(batch.inputs[:8]).ravel(), minlength=11)
    assert counts[0] == 0
    expected = 8 * 5000 / 10
    chi_squared = ((counts[1:] - expected) ** 2 / expected).sum()
    assert chi_squared < 27.9  # the 0.1% point of 9 degrees of freedom


def test_too_few_sequences_to_hold_out_is_an_error():
    with pytest.raises(UserError, match="--tokens=2 of --symbols=10 are too few different"):
        task(tokens=2)
