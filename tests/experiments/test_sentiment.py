"""Reviews: the grammar's verdicts, the padding, IMDB's files."""

import collections
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression

from experiments.datasets import reviews
from experiments.sentiment import grammar
from experiments.sentiment.settings import SENTIMENT
from experiments.settings.errors import UserError
from experiments.settings.resolver import resolve
from experiments.training.learner import Learner
from experiments.training.supervised import Batch
from tests.experiments.support import assert_drawn
from tests.support import fuzzed

LENGTH, COUNT = 60, 6000


@pytest.fixture(scope="module")
def drawn():
    """Reviews as lists of words, and their verdicts."""
    words, verdicts = jax.jit(grammar.reviews, static_argnums=(1, 2))(
        jax.random.key(0), LENGTH, COUNT
    )
    texts = [[grammar.WORDS[word] for word in column] for column in np.asarray(words).T]
    return texts, np.asarray(verdicts)


def verdict(words):
    """That of a review, read as a person reads it."""
    (film,) = [at for at, word in enumerate(words) if word in grammar.FILMS]
    was, adverb, adjective = words[film + 1 : film + 4]
    assert was == "was"
    assert adverb in ("not", *grammar.ADVERBS)
    good = adjective in grammar.GOOD
    assert good or adjective in grammar.BAD
    return good ^ (adverb == "not") ^ ("hardly" in words)


def test_the_verdict_is_what_the_words_say(drawn):
    texts, verdicts = drawn
    assert [verdict(words) for words in texts] == verdicts.tolist()
    assert len(set(grammar.WORDS)) == len(grammar.WORDS)


def test_reviews_are_ragged_with_padding_in_front(drawn):
    texts, verdicts = drawn
    sizes = [sum(word != "" for word in words) for words in texts]
    assert all("" not in words[LENGTH - size :] for words, size in zip(texts, sizes, strict=True))
    assert set(sizes) == set(range(24, LENGTH + 1))
    assert_drawn(verdicts.sum(), 1 / 2, COUNT)
    assert all(sum(word in grammar.OTHERS for word in words) == 2 for words in texts)


def test_counts_of_words_tell_two_verdicts_of_three(drawn):
    texts, verdicts = drawn
    counts = np.array([[words.count(word) for word in grammar.WORDS] for words in texts])
    bag = LogisticRegression(max_iter=1000).fit(counts[:4000], verdicts[:4000])
    assert bag.score(counts[4000:], verdicts[4000:]) < 0.75
    # The best that counts can do is what the majority of reviews of the same counts has.
    groups = collections.defaultdict(list)
    for words, is_positive in zip(texts, verdicts.tolist(), strict=True):
        good = sum(words.count(word) for word in grammar.GOOD)
        groups[good, words.count("not"), "hardly" in words].append(is_positive)
    right = sum(max(sum(group), len(group) - sum(group)) for group in groups.values())
    assert_drawn(right, 21 / 32, COUNT)


def test_what_counts_tell_is_that_of_all_reviews():
    """Each choice of adjectives, adverbs, the film's place and "hardly", by its probability."""
    shares = collections.defaultdict(lambda: [0.0, 0.0])
    for good in itertools.product((0, 1), repeat=3):
        for negated in itertools.product((0, 1), repeat=3):
            for film, hardly in itertools.product(range(3), (0, 1)):
                share = math.prod((0.75, 0.25)[one] for one in negated) * (0.7, 0.3)[hardly] / 24
                is_positive = good[film] ^ negated[film] ^ hardly
                shares[sum(good), sum(negated), hardly][is_positive] += share
    both = np.array(list(shares.values()))
    loss = -scipy.special.xlogy(both, both / both.sum(axis=1, keepdims=True)).sum()
    np.testing.assert_allclose(grammar.by_counts(), (both.max(axis=1).sum(), loss), rtol=1e-12)


def test_the_baseline_is_that_of_the_data():
    made_up = resolve(SENTIMENT, "small", {}).task
    imdb = resolve(SENTIMENT, "small", {"dataset": "imdb", "data_dir": "none"}).task
    assert [metric.baseline for metric in made_up.metrics] == [*grammar.by_counts()]
    assert [metric.baseline for metric in imdb.metrics] == [0.5, math.log(2)]


def test_steps_and_seeds_have_reviews_of_other_keys(monkeypatch):
    def key_of_reviews(key, length, count):
        return jax.random.key_data(key), jnp.zeros(count, bool)

    monkeypatch.setattr(grammar, "reviews", key_of_reviews)
    task = resolve(SENTIMENT, "small", {}).task
    batches = [
        task.batch({}, jax.random.key(seed), step, 4) for seed, step in ((0, 0), (0, 1), (1, 0))
    ]
    assert len({tuple(batch.inputs.tolist()) for batch in batches}) == 3


@pytest.mark.long
def test_padding_changes_nothing():
    """One more step in front gives the same loss and gradients."""
    run = resolve(SENTIMENT, "small", {"hidden_size": 8, "embedding": 4, "batch_size": 6})
    learner = Learner(run)
    params = learner.initial().params if learner.load() is None else None
    task = run.task
    draw = jax.jit(lambda key, step: task.batch({}, key, step, 6))
    batch = draw(jax.random.key(1), jnp.int32(0))
    longer = batch._replace(inputs=jnp.pad(batch.inputs, ((3, 0), (0, 0))))

    @jax.jit
    @jax.value_and_grad
    def loss(params, batch):
        outputs = learner.apply(params, batch.inputs, **task.masks(batch))
        return task.score(outputs, batch)["loss"].sum()

    plain, padded = (loss(params, one) for one in (batch, longer))
    for a, b in zip(jax.tree.leaves(padded), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    assert np.abs(plain[1]["recurrent"]["cell"]["kernel"]["u"]).max() > 0


def test_loss_and_accuracy_by_hand():
    task = resolve(SENTIMENT, "small", {}).task
    logits = jnp.array([-2.0, 3.0, 0.5, -1.0])[None, :, None]
    verdicts = jnp.array([[False, True, False, True]])
    scores = task.score(logits, Batch(jnp.zeros((1, 4), jnp.int32), verdicts))
    p = 1 / (1 + np.exp(-np.array([-2.0, 3.0, 0.5, -1.0])))
    np.testing.assert_allclose(scores["loss"], -np.log(np.where(verdicts[0], p, 1 - p)), rtol=1e-6)
    assert scores["accuracy"].tolist() == [1, 1, 0, 0]


# IMDB

TEXTS = {
    "train": {
        "neg": ["A dull, dull film.<br /><br />I didn't like it!", "bad bad bad"],
        "pos": ["A great film", "great great great fun. Great!"],
    },
    "test": {
        "neg": ["dull and unheard", "no fun."],
        "pos": ["great fun", "A great, great film!"],
    },
}


def sorted_rows(words, verdicts):
    """Reviews, each with its verdict, whatever their order."""
    return sorted((*row, verdict) for row, verdict in zip(words.tolist(), verdicts, strict=True))


def raw(folder, texts=TEXTS):
    for part, of_part in texts.items():
        for label, contents in of_part.items():
            (folder / part / label).mkdir(parents=True)
            for at, content in enumerate(contents):
                (folder / part / label / f"{at}_{at}.txt").write_text(content)
    return folder


@pytest.fixture
def no_prepared_sets(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "prepared"))


def test_raw_reviews(tmp_path, no_prepared_sets):
    few = {verdict: texts[:1] for verdict, texts in TEXTS["test"].items()}
    raw(tmp_path / "other" / "aclImdb", {**TEXTS, "test": few})
    with pytest.raises(UserError, match="the test part has 2, 1 of them in favour"):
        reviews.read(str(tmp_path / "other"), 5, 6, 4)
    raw(tmp_path / "more" / "aclImdb")
    train, test = reviews.read(str(tmp_path / "more"), 5, 6, 4)
    words = ["great", "bad", "!", ".", "a", "dull"]  # 5, 3, 2, 2, 2, 2 times; film is next
    number = {word: at + 2 for at, word in enumerate(words)}
    expected = [
        *(["like", "it", "!"], ["bad", "bad", "bad"]),
        *(["a", "great", "film"], ["great", "fun", ".", "great", "!"]),
        *(["dull", "and", "unheard"], ["no", "fun", "."]),
        *(["great", "fun"], ["great", ",", "great", "film", "!"]),
    ]
    for row, end in zip([*train.words, *test.words], expected, strict=True):
        assert row[-len(end) :].tolist() == [number.get(word, reviews.UNKNOWN) for word in end]
    assert train.words[1, :2].tolist() == [reviews.PADDING] * 2
    assert train.verdicts.tolist() == test.verdicts.tolist() == [False, False, True, True]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("train/neg/0_0.txt", b"ab\xff", "0_0.txt is damaged at byte 2"),
        ("train/pos/1_1.txt", b" \n", "1_1.txt is damaged at byte 0"),
        ("train/neg/1_1.txt", None, "has 3, 2 of them in favour"),
        ("test/neg", None, "neg is missing"),
    ],
)
def test_bad_folders_are_one_sentence(tmp_path, no_prepared_sets, name, content, sentence):
    path = raw(tmp_path / "aclImdb") / name
    if content is None:
        path.rename(tmp_path / "gone")
    else:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"^[^\n]*$") as refusal:
        reviews.read(str(tmp_path), 5, 6, 4)
    assert sentence in str(refusal.value)


def test_missing_reviews_are_one_sentence(tmp_path, no_prepared_sets):
    for data_dir in (None, str(tmp_path)):
        with pytest.raises(UserError, match=r"IMDB's reviews are not .*put the folder aclImdb"):
            reviews.read(data_dir, 5, 6)
    with pytest.raises(UserError, match="is no directory"):
        reviews.read(str(tmp_path / "none"), 5, 6)


@fuzzed
@given(st.binary(max_size=30), st.integers(0, 60), st.integers(0, 60))
def test_mutated_reviews_give_a_sentence_or_numbers(tmp_path_factory, planted, at, width):
    folder = raw(tmp_path_factory.mktemp("imdb") / "aclImdb")
    path = folder / "train" / "neg" / "0_0.txt"
    old = path.read_bytes()
    path.write_bytes(old[:at] + planted + old[at + width :])
    try:
        train, _ = reviews.read(str(folder), 5, 6, 4)
    except UserError as refusal:
        assert str(path) in str(refusal)
        assert len(str(refusal).splitlines()) == 1
    else:
        assert train.words.min() >= 0
        assert train.words.max() < 6 + 2


def test_prepared_reviews(tmp_path, monkeypatch):
    """As tensorflow-datasets prepares them: the same numbers as from the raw files."""
    import tensorflow_datasets as tfds

    class PlainText(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")
        name = "plain_text"
        pkg_dir_path = code_path = None  # it has no package of its own

        def _info(self):
            features = {
                "text": tfds.features.Text(),
                "label": tfds.features.ClassLabel(names=["neg", "pos"]),
            }
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, _):
            return {part: self._generate_examples(of) for part, of in TEXTS.items()}

        def _generate_examples(self, of):
            for verdict, texts in of.items():
                for text in texts:
                    yield text, {"text": text, "label": verdict}

    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    PlainText(
        data_dir=str(tmp_path / "imdb_reviews"), file_format="array_record"
    ).download_and_prepare()
    parts = reviews.read(None, 5, 6, 4)
    expected = reviews.read(str(raw(tmp_path / "raw" / "aclImdb")), 5, 6, 4)
    for one, other in zip(parts, expected, strict=True):
        assert sorted_rows(*one) == sorted_rows(*other)


@pytest.fixture
def imdb(tmp_path, no_prepared_sets, monkeypatch):
    """Settings of IMDB with eight reviews."""
    raw(tmp_path / "aclImdb")
    monkeypatch.setattr(reviews, "COUNT", 4)
    return {
        "dataset": "imdb",
        "data_dir": str(tmp_path),
        "validation_share": 0.25,
        "batch_size": 3,
        "vocabulary": 6,
        "length": 24,
    }


def test_validation_reviews_are_left_out_of_training(imdb):
    data = resolve(SENTIMENT, "small", imdb).task.data().arrays
    train, test = reviews.read(imdb["data_dir"], 24, 6, 4)
    np.testing.assert_array_equal(data["sets"]["test"].inputs, test.words.T)
    np.testing.assert_array_equal(data["sets"]["test"].targets[0], test.verdicts)
    known, held_out = data["loaded"]["train"], data["sets"]["validation"]
    words = np.concatenate([known.inputs, held_out.inputs.T])
    verdicts = np.concatenate([known.targets, held_out.targets[0]])
    assert sorted_rows(words, verdicts) == sorted_rows(*train)


def test_imdb_trains_for_a_few_steps(imdb):
    settings = {
        **imdb,
        "hidden_size": 4,
        "embedding": 3,
        "epochs": 40,
        "learning_rates": (0.03,),
    }
    learner = Learner(resolve(SENTIMENT, "small", settings))
    learner.prepare()
    state = learner.advance(learner.initial(), 0, 30)
    state, _ = learner.evaluate(state)
    state = learner.advance(state, 30, 40)
    assert float(state.loss_total) / float(state.loss_weight) < 0.2  # it knows these by heart
    assert np.isfinite(learner.final_scores(state)["loss"])
