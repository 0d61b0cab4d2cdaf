"""The words that a captioner says, greedily or by beam search."""

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.captioning.decoding import beam_search, greedy
from experiments.captioning.model import END
from experiments.captioning.task import CaptioningTask

WORDS, STEPS = 4, 5


def toy(seed):
    """A model of four words whose carry is all that came before: random tables by step."""
    tables = np.random.default_rng(seed).normal(size=(2, STEPS, WORDS**STEPS, WORDS)) * 2
    log_p = jax.nn.log_softmax(jnp.asarray(tables, jnp.float32))

    def follow(carry, words):
        row, time, before = carry
        before = jnp.where(time == 0, 0, before * WORDS + words)
        return (row, time + 1, before), log_p[row, time, before]

    def start(each):
        row = jnp.repeat(jnp.arange(2), each)
        return row, jnp.zeros_like(row), jnp.zeros_like(row)

    return follow, start, np.asarray(log_p, np.float64)


def sentences():
    """Every sentence: it ends with word 0, or has five words."""
    for size in range(1, STEPS + 1):
        for words in itertools.product(range(WORDS), repeat=size):
            if END not in words[:-1] and (words[-1] == END or size == STEPS):
                yield words


def log_probability(log_p, row, words):
    before, total = 0, 0.0
    for time, word in enumerate(words):
        total += log_p[row, time, before, word]
        before = before * WORDS + word
    return total


@pytest.mark.parametrize("power", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_wide_beam_is_brute_force(seed, power):
    follow, start, log_p = toy(seed)
    width = 3**4  # as many beginnings as there can be
    words, scores = jax.jit(
        lambda: beam_search(
            follow, start(width), rows=2, width=width, steps=STEPS, end=END, length_power=power
        )
    )()
    for row in range(2):
        by_score = {
            one: log_probability(log_p, row, one) / len(one) ** power for one in sentences()
        }
        best = max(by_score, key=by_score.get)
        np.testing.assert_allclose(scores[row], by_score[best], rtol=1e-5)
        assert tuple(words[row].tolist()) == best + (END,) * (STEPS - len(best))


@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_narrow_beam_by_hand(width):
    """Lists and sorting: K beginnings go on, the best that has ended is kept."""
    follow, start, log_p = toy(7)
    words, scores = beam_search(follow, start(width), rows=2, width=width, steps=STEPS, end=END)
    for row in range(2):
        open_, ended = [()], []
        for time in range(STEPS):
            longer = [(*one, word) for one in open_ for word in range(WORDS)]
            longer.sort(key=lambda one, row=row: -log_probability(log_p, row, one))
            ended += [one for one in longer if one[-1] == END or time == STEPS - 1]
            open_ = [one for one in longer if one[-1] != END][:width]
        best = max(ended, key=lambda one, row=row: log_probability(log_p, row, one))
        np.testing.assert_allclose(scores[row], log_probability(log_p, row, best), rtol=1e-5)
        assert tuple(words[row].tolist()) == best + (END,) * (STEPS - len(best))


def test_greedy_takes_the_likeliest_word():
    follow, start, log_p = toy(5)
    words = greedy(follow, start(1), 2, STEPS, END)
    for row in range(2):
        said = []
        while len(said) < STEPS and END not in said:
            before = 0
            for word in said:
                before = before * WORDS + word
            said.append(int(log_p[row, len(said), before].argmax()))
        assert words[row].tolist() == said + [END] * (STEPS - len(said))


@pytest.mark.parametrize("beam", [1, 2])
def test_a_caption_that_does_not_end_has_no_word_too_many(beam):
    """T is a word more: the end, which is then understood."""
    follow, start, _ = toy(3)

    def endless(carry, words):
        carry, log_p = follow(carry, words)
        return carry, log_p.at[:, END].set(-1e9)

    def apply(params, *args, method):
        del params
        return (None, start(args[1])) if method == "start" else endless(args[2], args[1])

    task = SimpleNamespace(beam=beam, steps=STEPS, length_power=0.0)
    words = CaptioningTask.say(task, apply, None, None, 2)
    assert words.shape == (2, STEPS - 1)
    assert (words != END).all()
