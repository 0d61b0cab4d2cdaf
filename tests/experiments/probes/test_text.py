"""Text: a state that goes on from window to window, and starts anew where it must."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.machine.mesh import Rows
from experiments.settings.cells import build_cell
from experiments.settings.fields import TINY
from experiments.training.learner import Learner
from experiments.training.models import recurrent_layers
from tests.experiments.probes import support
from tests.experiments.probes.text import ALPHABET, END, TEXT, Stream, TextTask

pytestmark = pytest.mark.long

TASK = TextTask()
CONFIG = support.config(TASK, seeds=1, learning_rates=(TINY,))
TOKENS = np.array([ALPHABET.index(char) for char in TEXT], np.int32)
RESETS = np.roll(np.isin(TOKENS, ALPHABET.index(END)), 1)


@pytest.fixture(scope="module")
def trained():
    """A learner whose parameters stay, its first state and the one after five steps."""
    with support.ready(CONFIG) as learner:
        first = jax.device_get(learner.initial())
        yield learner, first, jax.device_get(learner.advance(learner.place(first), 0, 5))


@pytest.fixture(scope="module")
def unrolled(trained):
    """A function that reads tokens ``[T]`` in one go: carry and logits ``[T, characters]``."""
    _, first, _ = trained
    model = TASK.module(recurrent_layers(build_cell(CONFIG.model), CONFIG.model), CONFIG.model)

    @jax.jit
    def read(tokens, resets):
        masks = {"resets": resets[:, None], "return_carry": True}
        carry, logits = model.apply({"params": first.params}, tokens[:, None], **masks)
        return carry, logits[:, 0]

    return read


def scores(task, state):
    """Scores of a state on a task's held-out set."""
    learner = Learner(dataclasses.replace(CONFIG, task=task))
    learner.load()
    return learner.final_scores(learner.place(state))


@pytest.mark.parametrize(("reading", "readers"), [(7, 8), (1, 1), (90, 3)])
def test_the_loss_in_windows_is_that_of_one_long_unroll(reading, readers, trained, unrolled):
    _, first, _ = trained
    in_windows = scores(TextTask(reading=reading, readers=readers), first)
    targets = np.roll(TOKENS, -1)

    def loss(resets):
        log_p = np.asarray(jax.nn.log_softmax(unrolled(TOKENS, resets)[1]), np.float64)
        return -np.take_along_axis(log_p, targets[:, None], axis=1).mean()

    np.testing.assert_allclose(in_windows["loss"], loss(RESETS), rtol=1e-6)
    np.testing.assert_allclose(in_windows["perplexity"], np.exp(loss(RESETS)), rtol=3e-6)
    assert abs(loss(np.zeros_like(RESETS)) - loss(RESETS)) > 1e-4  # an article matters to the next


def test_the_state_is_kept_within_an_article_and_not_beyond(trained, monkeypatch):
    _, first, _ = trained
    windows = []

    def record(self, sums, outputs):
        windows.append(outputs)
        return {"perplexity": 0.0, "loss": 0.0}

    def losses(text):
        monkeypatch.setattr(TextTask, "scores", record)
        scores(TextTask(text=text, reading=4, readers=1), first)
        outputs = windows.pop()
        valid = np.concatenate([window["valid"] for window in outputs])
        return np.concatenate([window["losses"] for window in outputs])[valid]

    plain = losses(TEXT)
    assert len(plain) == len(TEXT)
    begin = TEXT.index(END) + 1
    end = TEXT.index(END, begin)  # of the second article
    for place in (begin + 2, end - 1):
        assert TEXT[place] != "q"
        changed = losses(TEXT[:place] + "q" + TEXT[place + 1 :]) != plain
        assert not changed[: place - 1].any()
        assert changed[place - 1 : end + 1].all()  # across several windows
        assert not changed[end + 1 :].any()


def test_training_reads_every_row_on_and_keeps_its_state(trained, unrolled):
    _, first, after = trained
    jax.tree.map(np.testing.assert_array_equal, after.params, first.params)
    key = jax.random.key(0)
    rows = Rows(0, 8, 8)
    stream, read = first.stream, np.zeros(8, int)
    for step in range(5):
        window, stream = TASK.draw(None, jnp.asarray(TOKENS), stream, key, step, rows)
        lengths = np.asarray(window.valid.sum(axis=0))
        assert len(set(lengths.tolist())) > 1
        assert set(lengths.tolist()) <= set(range(1, TASK.longest + 1))
    for row, start in enumerate(first.stream.place):
        count = (after.stream.place[row] - start) % len(TEXT)
        assert 5 <= count <= 5 * TASK.longest
        at = np.arange(start, start + count) % len(TEXT)
        carry, _ = unrolled(TOKENS[at], RESETS[at])
        np.testing.assert_allclose(after.stream.carry.h[row], carry.h[0], atol=1e-6)
        read[row] = count
    assert after.loss_weight == np.float32(read.sum() / 8)


def test_some_rows_draw_what_all_of_them_draw():
    key = jax.random.key(3)
    every = TASK.draw(None, TOKENS, _stream(8), key, 2, Rows(0, 8, 8))
    some = TASK.draw(
        None, TOKENS, jax.tree.map(lambda x: x[4:6], _stream(8)), key, 2, Rows(4, 2, 8)
    )
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[..., 4:6]), some[0], every[0])


def _stream(rows):
    return Stream(jnp.arange(rows, dtype=jnp.int32) * 20, ())
