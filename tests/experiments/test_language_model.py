"""Language models: windows of a text, the state between them, samples, the papers' counts."""

import contextlib
import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from experiments.datasets import text
from experiments.language_model import task as task_module
from experiments.language_model.sample import sampled_tokens
from experiments.language_model.settings import LANGUAGE_MODEL, Sampling
from experiments.language_model.task import LanguageModelTask, Stream
from experiments.machine.mesh import Rows
from experiments.records.workdir import Workdir
from experiments.settings import resolver
from experiments.settings.errors import UserError
from experiments.settings.resolver import resolve
from experiments.training import loop
from experiments.training.learner import Learner
from tests.experiments.probes.support import StopAfter
from tests.experiments.support import assert_drawn, assert_same_bits, leaves

WORDS = 7
TINY = {
    "dataset": "own",
    "data_dir": "nowhere",
    "cell": "gru",
    "hidden_size": 6,
    "embedding": 4,
    "window": 5,
    "batch_size": 4,
    "reading_window": 6,
    "validation_readers": 3,
    "learning_rates": (1e-2,),
    "steps": 12,
    "eval_every": 6,
}


def part(count, articles, seed):
    tokens = np.random.default_rng(seed).integers(0, WORDS, count).astype(np.int32)
    starts = np.zeros(count, bool)
    starts[[0, *articles]] = True
    return text.Part(tokens, starts)


CORPUS = text.Corpus(
    tuple("abcdefg"), part(90, (23, 40), 0), part(31, (11,), 1), part(29, (4, 20), 2)
)


@pytest.fixture(autouse=True)
def corpus(monkeypatch):
    """A text of seven words, and what is planted into it."""

    def plant(corpus):
        monkeypatch.setattr(task_module, "_read", lambda *_: corpus)

    plant(CORPUS)
    return plant


def config(**settings):
    return resolve(LANGUAGE_MODEL, "small", TINY | settings)


def scores(learner, state):
    return {name: float(value) for name, value in learner.final_scores(state).items()}


def started(**settings):
    """A learner that can score, and its first state."""
    learner = Learner(config(**settings))
    learner.load()
    return learner, learner.initial()


def long_unroll(learner, params, tokens, resets):
    """The losses of a stretch that is read in one go, in float64."""
    _, log_p = jax.jit(functools.partial(learner.apply, params))(
        tokens[:-1, None], resets=resets[:-1, None]
    )
    log_p = np.asarray(log_p[:, 0], np.float64)
    return -log_p[np.arange(len(tokens) - 1), tokens[1:]]


@pytest.mark.parametrize(
    ("readers", "window", "backend"),
    [  # every pair of two of them
        (readers, window, ("scan", "fused")[(a + b) % 2])
        for a, readers in enumerate([1, 3, 7])
        for b, window in enumerate([1, 6, 40])
    ],
)
@pytest.mark.long
def test_a_part_in_windows_is_one_long_unroll(readers, window, backend):
    learner, state = started(
        test_readers=readers, reading_window=window, backend=backend, reset_at_articles=True
    )
    tokens, starts = CORPUS.test
    size = -(-len(tokens) // readers)
    losses = []
    for row in range(readers):
        own = slice(row * size, (row + 1) * size)
        losses += long_unroll(learner, state.params, tokens[own], starts[own]).tolist()
    found = scores(learner, state)
    np.testing.assert_allclose(found["loss"], np.mean(losses), rtol=1e-6)
    np.testing.assert_allclose(found["perplexity"], np.exp(np.mean(losses)), rtol=2e-6)


def test_nothing_leaks_past_the_end_of_an_article(corpus):
    """A planted word changes the predictions of its own article after it, and no others."""
    place, end = 7, 20  # the article has the words 4 to 19
    learner, state = started(reading_window=3, layers=2)

    @jax.jit
    def read(window, carry):
        masks = {"valid": window.valid, "resets": window.fresh}
        return learner.apply(state.params, window.inputs, carry=carry, **masks)

    def losses(corpus_, resetting):
        corpus(corpus_)
        task = dataclasses.replace(learner.task, reset_at_articles=resetting)
        parts = {"validation": corpus_.validation, "test": corpus_.test}
        reading = task.held_out(parts, 1)["test"]
        data = {"test": jax.tree.map(jnp.asarray, corpus_.test)}
        stream = reading.start(learner.fresh, data, Rows(0, 1, 1))
        all_ = []
        for index in range(reading.windows):
            window, stream = reading.draw(None, data, stream, index, Rows(0, 1, 1))
            carry, log_p = read(window, stream.carry)
            stream = stream._replace(carry=carry)
            of_targets = jnp.take_along_axis(log_p, window.targets[..., None], axis=-1)[..., 0]
            all_ += of_targets[window.valid].tolist()
        return np.array(all_)

    tokens = CORPUS.test.tokens.copy()
    tokens[place] = (tokens[place] + 1) % WORDS
    planted = CORPUS._replace(test=text.Part(tokens, CORPUS.test.starts))
    changed = losses(planted, True) != losses(CORPUS, True)
    assert not changed[: place - 1].any()
    assert changed[place - 1 : end].all()
    assert not changed[end:].any()
    carried = losses(planted, False) != losses(CORPUS, False)
    assert carried[place - 1 : end + 3].all()


def windows(task, steps, rows=4, seed=0):
    """The windows of a run, and where each begins."""
    data = {"train": jax.tree.map(jnp.asarray, CORPUS.train)}
    stream = Stream(jnp.zeros(rows, jnp.int32), ())
    key, rows = jax.random.key(seed), Rows(0, rows, rows)
    draw = jax.jit(lambda stream, step: task.draw(None, data, stream, key, step, rows))
    for step in range(steps):
        window, after = draw(stream, step)
        yield int(stream.place[0]), jax.device_get(window)
        stream = after


@pytest.mark.parametrize("resetting", [True, False])
def test_every_row_reads_its_stretch_to_the_end_and_begins_anew(resetting):
    task = config(window_deviation=3.0, reset_at_articles=resetting).task
    stretch = 90 // 4
    seen, lengths, first = [], set(), True
    for place, window in windows(task, 30):
        steps = window.valid.sum(axis=0)
        assert len(set(steps.tolist())) == 1
        lengths.add(int(steps[0]))
        at = (np.arange(4) * stretch + place)[None] + np.arange(steps[0])[:, None]
        np.testing.assert_array_equal(window.inputs[: steps[0]], CORPUS.train.tokens[at])
        np.testing.assert_array_equal(window.targets[: steps[0]], CORPUS.train.tokens[at + 1])
        fresh = at % stretch == 0
        if resetting:
            fresh |= CORPUS.train.starts[at]
        np.testing.assert_array_equal(window.fresh[: steps[0]], fresh)
        assert not window.fresh[steps[0] :].any()  # padding starts no article
        if place == 0 and not first:
            assert seen == list(range(stretch - 1))  # each once
            seen = []
        seen += range(place, place + steps[0])
        first = False
    assert len(lengths) > 3
    assert max(lengths) <= task.longest == 5 + 9


def test_window_lengths_have_the_papers_law():
    """N(70, 5) or, of 5 %, N(35, 5), rounded and cut to 5 and to three deviations above 70: by a
    chi-squared test of how often each length is drawn."""
    own = LANGUAGE_MODEL.values("gato")
    law = {name: own[name].value for name in ("window", "window_deviation", "short_window_prob")}
    task = dataclasses.replace(config().task, **law)
    draw = jax.jit(jax.vmap(task._steps))
    count = 40_000
    steps = np.asarray(draw(jax.random.split(jax.random.key(0), count)))
    lengths = np.arange(5, 86)
    above = np.r_[-np.inf, lengths[:-1] + 0.5, np.inf]
    probability = sum(
        share * np.diff(stats.norm.cdf(above, mean, 5)) for mean, share in ((70, 0.95), (35, 0.05))
    )
    assert steps.min() >= 5 and steps.max() == task.longest == 85
    drawn, expected = np.bincount(steps, minlength=86)[5:], count * probability
    rare = expected < 5
    drawn, expected = (np.r_[n[~rare], n[rare].sum()] for n in (drawn, expected))
    assert stats.chisquare(drawn, expected).pvalue > 1e-3


def test_the_state_goes_on_and_its_gradient_does_not(corpus):
    """Two windows are one of both lengths, with the state between them held fixed."""
    learner, state = started(steps=2, window=5)
    task, key = learner.task, jax.random.key(0)
    data, rows = {"train": CORPUS.train}, Rows(0, 4, 4)
    apply = Learner.apply.__get__(learner)
    stream = jax.tree.map(jnp.asarray, state.stream)

    def loss(params, stream):
        window, stream = task.draw(None, data, stream, key, 0, rows)
        outcome = task.loss(apply, params, window, stream, True)
        return outcome.loss[0], outcome

    (first, outcome), _ = jax.value_and_grad(loss, has_aux=True)(state.params, stream)
    (second, after), gradient = jax.value_and_grad(loss, has_aux=True)(state.params, outcome.stream)
    longer = dataclasses.replace(task, window=10)
    window, _ = longer.draw(None, data, stream, key, 0, rows)
    both = longer.loss(apply, state.params, window, stream, True)
    np.testing.assert_allclose(first + second, both.loss[0], rtol=1e-6)
    np.testing.assert_allclose(after.stream.carry.h, both.stream.carry.h, rtol=1e-5, atol=1e-7)
    held = outcome.stream._replace(carry=jax.tree.map(jax.lax.stop_gradient, outcome.stream.carry))
    same = jax.grad(lambda params: loss(params, held)[0])(state.params)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), gradient, same)


def test_the_rate_follows_the_window_if_asked_for():
    task = config(window_deviation=3.0, rescale_rate=True).task
    for _, window in windows(task, 5):
        np.testing.assert_allclose(task.rate_factor(window), window.valid[:, 0].sum() / 5)
    plain = config(window_deviation=3.0).task
    assert plain.rate_factor(window) == 1


def test_a_rescaled_rate_moves_parameters_by_so_much(corpus):
    """A window of 3 steps where the mean is 4: sgd goes three quarters as far, but for rounding."""
    moved = []
    for rescale in (False, True):
        run = config(
            window=4, optimizer="sgd", clip_norm=0.0, rescale_rate=rescale, learning_rates=(1024.0,)
        )
        with mock.patch.object(LanguageModelTask, "_steps", lambda *_: jnp.int32(3)):
            learner = Learner(run)
            learner.prepare()
        state = learner.initial()
        before = jax.tree.map(np.float64, jax.device_get(state.params))
        after = jax.device_get(learner.advance(state, 0, 1).params)
        moved.append(jax.tree.map(np.subtract, after, before))
    for start, plain, rescaled in zip(*map(jax.tree.leaves, (before, *moved)), strict=True):
        rounding = 2**-23 * (np.abs(start) + np.abs(plain))
        assert (np.abs(rescaled - 0.75 * plain) <= rounding).all()
        assert np.abs(plain).max() > 1e3 * rounding.max()  # so that it is seen


def test_a_batch_of_more_rows_than_the_text_has_tokens_for_is_refused():
    run = config(batch_size=46)
    with pytest.raises(UserError, match="--batch_size=46 leaves 1 of the 90 tokens to each row"):
        Learner(run).prepare()


def test_another_text_is_another_run(corpus, tmp_path):
    """Its settings are the same, and the place does not matter."""
    with contextlib.closing(Workdir(tmp_path)) as work:
        work.claim(config())
    name = config().hash()
    assert config(data_dir="elsewhere").hash() == name
    corpus(CORPUS._replace(words=tuple("abcdefh")))
    assert config().hash() != name
    corpus(CORPUS._replace(train=part(90, (23, 40), 7)))
    assert config().hash() != name
    sentence = r"another configuration \(content is \w+ there and"
    with contextlib.closing(Workdir(tmp_path)) as work, pytest.raises(UserError, match=sentence):
        work.claim(config())


@pytest.mark.long
def test_a_run_that_was_stopped_ends_with_the_same_bits(learners, tmp_path):
    run = config(window_deviation=2.0, short_window_prob=0.3, embedding_dropout=0.2)
    loop.run(run, tmp_path / "whole")
    with mock.patch.object(loop, "stopping", lambda: _Context(StopAfter(5))):
        assert loop.run(run, tmp_path / "stopped") is None
    loop.run(run, tmp_path / "stopped")
    assert_same_bits(leaves(tmp_path / "stopped", 12), leaves(tmp_path / "whole", 12))
    whole, stopped = (tmp_path / name / "metrics.jsonl" for name in ("whole", "stopped"))
    assert stopped.read_bytes() == whole.read_bytes()


class _Context:
    def __init__(self, value):
        self._value = value

    def __enter__(self):
        return self._value

    def __exit__(self, *_):
        return False


def test_bits_are_of_a_character(monkeypatch):
    """Its loss over log 2; what it is compared with is the uniform law or the longest counts."""
    task = config(level="character").task
    scores = task.scores({"loss": (np.float64(6), np.float64(4))}, [])
    assert scores == pytest.approx(
        {"loss": 1.5, "perplexity": np.exp(1.5), "bits": 1.5 / np.log(2)}, rel=1e-12
    )
    assert "bits" not in config().task.scores({"loss": (np.float64(6), np.float64(4))}, [])
    monkeypatch.setattr(task_module, "_perplexities", lambda *_: [9.0, 8.0])
    topics = config(dataset="topics", data_dir=None, level="character").task
    for one, perplexity in ((task, 7), (topics, 8)):
        baselines = {metric.name: metric.baseline for metric in one.metrics}
        of_log = {"bits": np.log2(perplexity), "loss": np.log(perplexity)}
        assert baselines == pytest.approx({"perplexity": perplexity} | of_log, rel=1e-12)


def test_samples_are_drawn_from_the_model():
    """The likeliest tokens are those of a loop by hand; frequencies are the probabilities."""
    learner, state = started(cell="lstm")
    params = jax.tree.map(lambda leaf: 3 * leaf, state.params)
    step = jax.jit(functools.partial(learner.apply, params))
    carry, token, expected = learner.fresh(1), 2, []
    for _ in range(12):
        carry, log_p = step(jnp.full((1, 1), token, jnp.int32), carry=carry)
        token = int(jnp.argmax(log_p[0, 0]))
        expected.append(token)
    key = jax.random.key(0)
    for sampling in (
        Sampling(sample=12, temperature=0.0, top_k=0),
        Sampling(sample=12, temperature=0.7, top_k=1),
    ):
        tokens = sampled_tokens(learner, params, 2, sampling, key)
        assert tokens.tolist() == expected
    _, log_p = step(jnp.full((1, 1), 2, jnp.int32), carry=learner.fresh(1))
    p = np.exp(2 * np.asarray(log_p[0, 0], np.float64))  # a temperature of a half squares them
    p[np.argsort(p)[:-4]] = 0
    sampling = Sampling(sample=1, temperature=0.5, top_k=4)
    draw = jax.vmap(lambda key: _first_drawn(log_p[0, 0], sampling, key))
    drawn = np.bincount(draw(jax.random.split(key, 20_000)), minlength=WORDS)
    assert not drawn[p == 0].any()
    assert_drawn(drawn[p > 0], p[p > 0] / p.sum(), 20_000)


def _first_drawn(log_p, sampling, key):
    from experiments.language_model import sample

    return sample._choice(log_p, sampling, key)


PAPERS_COUNTS = {"lstm": 10_150_400, "gru": 7_612_800, "gato": 1_273_350}  # GATO, Table 2


@pytest.mark.parametrize("cell", PAPERS_COUNTS)
def test_the_papers_parameter_counts(cell):
    """The files are not needed for it."""
    with mock.patch.object(task_module, "_read", side_effect=AssertionError):
        learner = Learner(resolve(LANGUAGE_MODEL, "gato", {"cell": cell}))
        counts = learner.parameter_counts()
    assert counts["recurrent_parameters"] == PAPERS_COUNTS[cell]
    constant = 10_000 * 650 + 10_000 * (1300 + 1)
    assert counts["total_parameters"] - counts["recurrent_parameters"] == constant


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"inputs": "one_hot", "embedding": 0, "tied": True}, "--tied"),
        ({"softmax": "adaptive", "cutoffs": (2, 7)}, "below the 7 words"),
        ({"softmax": "adaptive", "cutoffs": (3, 2)}, "--cutoffs must rise"),
        ({"softmax": "adaptive", "cutoffs": (3,), "tied": True}, "tables of its own"),
        ({"cutoffs": (3,)}, "--cutoffs"),
        ({"decoder": (4,)}, "--decoder is not for language_model"),
        ({"dataset": "topics", "data_dir": None, "level": "word"}, "--level=word is not for"),
    ],
)
def test_what_cannot_be_is_one_sentence(settings, sentence):
    with pytest.raises(UserError, match=r"^[^\n]*$") as refusal:
        Learner(config(**settings))
    assert sentence in str(refusal.value)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--sample=3", "--temperature=0", "--top_k=2"], "--top_k has no effect with --temp"),
        (["--dataset=ptb", "--reset_at_articles"], "--reset_at_articles has no effect with --data"),
    ],
)
def test_flags_without_effect_are_one_sentence(flags, sentence, program, tmp_path, monkeypatch):
    monkeypatch.setattr(LanguageModelTask, "check", lambda _: None)
    monkeypatch.setattr(resolver, "in_steps", lambda _, settings, __: settings)
    code, _, error = program(
        "experiments.language_model", f"--workdir={tmp_path}/run", "--steps=1", *flags
    )
    assert code == 2
    assert sentence in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("tied", "variance"), [(True, 0.1**2 / 3), (False, 1.0)])
def test_a_tied_table_starts_small(tied, variance):
    """U[-.1, .1], as AWD-LSTM's code; N(0, 1), as torch, where the rows give no logits."""
    learner = Learner(config(tied=tied, embedding=2048))
    learner.prepare()
    table = learner.initial().params["encoder"]["Embed_0"]["embedding"]
    scale = 4 * variance * np.sqrt(2 / table.size)  # four standard errors of a normal variance
    np.testing.assert_allclose(np.mean(np.square(table)), variance, rtol=0, atol=scale)
    assert not tied or np.abs(table).max() <= 0.1


@pytest.mark.parametrize("settings", [{"tied": True}, {"softmax": "adaptive", "cutoffs": (2, 4)}])
@pytest.mark.long
def test_every_softmax_learns(settings):
    """The training text by heart: its windows are few."""
    run = config(**settings, steps=300, hidden_size=32, embedding=16, keep_best=False)
    learner = Learner(run)
    learner.prepare()
    state = learner.advance(learner.initial(), 0, 200)
    state, _ = learner.evaluate(state)
    state = learner.advance(state, 200, 300)
    assert float(state.loss_total) / float(state.loss_weight) < 0.5 < np.log(WORDS)
