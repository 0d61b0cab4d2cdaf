"""Recall: both layouts by hand, what is held out, scores, settings, the binary and its figure."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.recall import task as recall
from experiments.recall.settings import RECALL
from experiments.settings.errors import UserError
from experiments.settings.resolver import resolve

TINY = {
    "cell": "dnc",
    "hidden_size": 5,
    "bits": 2,
    "min_length": 1,
    "max_length": 3,
    "max_repeats": 2,
    "held_out_sequences": 40,
    "batch_size": 4,
    "steps": 4,
    "eval_every": 2,
}
A, B, C = (1, 0), (1, 1), (0, 1)  # the vectors of a pattern


def task(layout="repeat_copy", **settings):
    lengths = {"min_length": 2} if layout == "associative" else {}
    settings = TINY | lengths | settings
    if layout == "associative":
        del settings["max_repeats"]
        settings |= {"layout": layout, "item_steps": settings.get("item_steps", 2)}
    return resolve(RECALL, "small", settings).task


def pattern(*vectors, length, asked, rows):
    bits = np.zeros((rows, 2), np.float32)
    bits[: len(vectors)] = vectors
    return recall.Pattern(jnp.asarray(bits), jnp.int32(length), jnp.int32(asked))


def channels(array):
    """Its columns as strings, a digit a step."""
    return ["".join(f"{value:g}" for value in column) for column in np.asarray(array).T]


def test_repeat_copy_layout():
    """A, C twice: a start mark, A, C, the number 2, then A C A C and the end mark."""
    shown = pattern(A, C, length=2, asked=2, rows=3)
    inputs, targets = recall.repeat_copy(shown, 11)
    assert channels(inputs[:, :3]) == ["01000000000", "00100000000", "10000000000"]
    np.testing.assert_allclose(inputs[:, 3], 0.2 * (np.arange(11) == 3), rtol=1e-6)
    assert channels(targets) == ["00001010000", "00000101000", "00000000100", "00001111100"]


def test_associative_layout():
    """The items A B, B C and C A, each behind a mark; B C is shown, and C A is due."""
    shown = pattern(A, B, B, C, C, A, length=3, asked=1, rows=8)
    inputs, targets = recall.associative(shown, 17, 2)
    marks = ["10010010000000000", "00000000010010000"]
    bits = ["01101000100000000", "00101101000000000"]
    assert channels(inputs[:, 2:]) == marks
    rows = [list(text) for text in bits]
    for step, vector in ((10, B), (11, C)):
        for channel in (0, 1):
            rows[channel][step] = str(vector[channel])
    assert channels(inputs[:, :2]) == ["".join(row) for row in rows]
    assert channels(targets) == ["00000000000000100", "00000000000001000", "00000000000001100"]


@pytest.mark.parametrize("layout", ["repeat_copy", "associative"])
@pytest.mark.long
def test_the_longest_example_just_fits(layout):
    repeats = {"min_repeats": 2} if layout == "repeat_copy" else {}
    this = task(layout, min_length=3, **repeats)
    batch = this.load()
    assert batch.inputs.shape == (this.steps, 40, 4)
    due = np.asarray(batch.targets[..., -1])
    assert due[-1].all() and not due[0].any()
    assert not np.asarray(batch.inputs)[due > 0].any()


def patterns_of(this, batch):
    """What is shown of each example, before anything is due, as a text."""
    due = np.cumsum(np.asarray(batch.targets[..., -1]), axis=0)
    shown = np.where(due[..., None] > 0, 0, np.asarray(batch.inputs))[..., : this.bits]
    return {column.tobytes() for column in np.moveaxis(shown, 1, 0)}


@pytest.mark.parametrize("layout", ["repeat_copy", "associative"])
@pytest.mark.long
def test_training_never_meets_a_held_out_pattern(layout):
    this = task(layout, bits=4, min_length=2, max_length=2, held_out_sequences=60)
    held_out = patterns_of(this, this.load())
    draw = jax.jit(lambda step: this.batch(None, jax.random.key(1), step, 32))
    seen = set().union(*(patterns_of(this, draw(jnp.int32(step))) for step in range(20)))
    assert len(held_out) > 1 and len(seen) > 8 and not seen & held_out


@pytest.mark.parametrize("steps", [2, 3, 5])
def test_an_eighth_of_the_patterns_of_every_length_is_held_out(steps):
    every = np.stack(np.meshgrid(*[[0.0, 1.0]] * (2 * steps)), axis=-1).reshape(-1, steps, 2)
    held_out = jax.vmap(recall.is_held_out)(jnp.asarray(every))
    assert abs(held_out.mean() - 1 / 8) <= 0.02
    assert not held_out[0]  # zeros alone


def test_short_patterns_are_all_trained_on_and_all_held_out():
    """Of the 16 patterns of one step an eighth would be two, met again and again."""
    this = task(bits=4, max_length=1, held_out_sequences=500)
    assert len(patterns_of(this, this.load())) == 16
    assert len(patterns_of(this, this.batch(None, jax.random.key(0), jnp.int32(0), 500))) == 16


def test_lengths_and_repeats_are_uniform():
    this = task(bits=4, max_length=4, max_repeats=3)
    batch = jax.jit(lambda: this.batch(None, jax.random.key(0), jnp.int32(0), 3000))()
    number = np.asarray(batch.inputs[..., -1]).max(axis=0) * 10
    said = np.asarray(batch.targets[..., -1]).sum(axis=0) - 1
    lengths = said / np.rint(number)
    for drawn, expected in ((np.rint(number), range(1, 4)), (lengths, range(1, 5))):
        counts = np.array([(drawn == value).sum() for value in expected])
        assert counts.sum() == 3000
        assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 17  # the 0.1% point


def test_batches_differ_by_step_and_seed_and_the_held_out_set_does_not():
    this, other = task(), task(hidden_size=7)
    np.testing.assert_array_equal(this.load().inputs, other.load().inputs)
    draw = jax.jit(lambda seed, step: this.batch(None, jax.random.key(seed), step, 8).inputs)
    batches = [draw(jnp.int32(seed), jnp.int32(step)) for seed in (0, 1) for step in (0, 1)]
    for i, a in enumerate(batches):
        assert not any(np.array_equal(a, b) for b in batches[:i])
    np.testing.assert_array_equal(draw(jnp.int32(0), jnp.int32(0)), batches[0])


@pytest.mark.parametrize("layout", ["repeat_copy", "associative"])
def test_the_oracle_scores_one_and_no_answer_the_baseline(layout):
    this = task(layout, bits=6, min_length=3)
    batch = this.load()
    logits = 1e3 * (2 * batch.targets[..., :-1] - 1)
    wrong = jnp.where(batch.targets[..., -1:] > 0, logits, -logits)  # where nothing is due
    for outputs in (logits, wrong):
        scores = this.score(outputs, batch)
        for name, value in (("bit_accuracy", 1), ("sequence_accuracy", 1), ("loss", 0)):
            np.testing.assert_array_equal(scores[name], np.full(40, value), err_msg=name)
    scores = this.score(jnp.zeros_like(logits), batch)
    baselines = {metric.name: metric.baseline for metric in this.metrics}
    np.testing.assert_allclose(scores["loss"], math.log(2), rtol=1e-6)
    assert baselines == {"bit_accuracy": 0.5, "sequence_accuracy": 0.0, "loss": math.log(2)}
    assert abs(scores["bit_accuracy"].mean() - 0.5) < 0.05 and not scores["sequence_accuracy"].any()


def test_one_wrong_bit_costs_its_share_and_the_end_mark_is_none():
    this = task()
    _, targets = recall.repeat_copy(pattern(A, C, length=2, asked=2, rows=3), this.steps)
    batch = recall.Batch(jnp.zeros((this.steps, 1, 4)), targets[:, None])
    right = 1e3 * (2 * batch.targets[..., :-1] - 1)
    scores = this.score(right.at[5, 0, 1].multiply(-1.0), batch)
    assert float(scores["bit_accuracy"][0]) == 7 / 8 and not scores["sequence_accuracy"][0]
    assert float(scores["loss"][0]) == pytest.approx(1e3 / (5 * 3))
    scores = this.score(right.at[8, 0, 2].multiply(-1.0), batch)
    assert float(scores["bit_accuracy"][0]) == 1 and not scores["sequence_accuracy"][0]


def test_settings_are_those_of_the_published_code():
    config = resolve(RECALL, "dnc", {})
    model, training, this = config.model, config.training, config.task
    assert (model.cell, model.hidden_size, model.decoder) == ("dnc", 64, ())
    assert (this.bits, this.min_length, this.max_length) == (4, 1, 2)
    assert (this.min_repeats, this.max_repeats, this.layout) == (1, 2, "repeat_copy")
    assert (training.batch_size, training.steps, training.clip_norm) == (16, 100_000, 50.0)
    assert (training.optimizer, training.learning_rates) == ("rmsprop", (1e-4,))
    this = resolve(RECALL, "ntm", {}).task
    assert (this.layout, this.bits, this.item_steps) == ("associative", 6, 3)
    assert (this.min_length, this.max_length) == (2, 6)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(min_length=4), "--min_length must be at most --max_length, got 4 and 3"),
        (dict(min_repeats=3), "--min_repeats must be at most --max_repeats, got 3 and 2"),
        (dict(layout="associative", min_length=1), "at least 2 in associative recall"),
    ],
)
def test_settings_that_cannot_be(settings, words):
    with pytest.raises(UserError, match=words) as error:
        task(**settings)
    assert "\n" not in str(error.value)


@pytest.mark.long
def test_the_binary_draws_where_a_dnc_wrote_and_read(program, drawn, tmp_path):
    flags = [f"--{name}={value}" for name, value in TINY.items()]
    code, out, err = program("experiments.recall", *flags, f"--workdir={tmp_path}")
    assert code == 0, err
    assert "bit_accuracy" in out and (tmp_path / "figures" / "recall.png").exists()
    labels = [axes.get_ylabel() for axes in drawn[-1].axes[:-1]]
    assert labels == ["input", "answer", "model", "written", "read", "in use"]
    shown = {axes.get_ylabel(): axes.images[0].get_array() for axes in drawn[-1].axes[:-1]}
    written = np.asarray(shown["written"])
    assert written.shape == (16, 12) and 0 < written.sum(axis=0).max() <= 1 + 1e-6
    answer, model = (np.ma.masked_invalid(shown[name]) for name in ("answer", "model"))
    np.testing.assert_array_equal(answer.mask, model.mask)
    assert model.min() > 0 and model.max() < 1
