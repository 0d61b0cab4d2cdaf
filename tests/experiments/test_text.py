"""Texts: tokens, vocabularies, counts, and what is said of files that are not as they should be."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.datasets import text
from experiments.settings.errors import UserError
from tests.support import fuzzed

TRAIN = (
    b" = Cats = \n the cat saw the dog \n\n = = Food = = \n the cat eats \n = Dogs = \n the dog\n"
)
VALID, TEST = b"the dog saw\n", b" = Cats = \n eats the cat\n"


def written(directory, train=TRAIN, valid=VALID, test=TEST):
    directory.mkdir(exist_ok=True)
    for name, content in (("train.txt", train), ("valid.txt", valid), ("test.txt", test)):
        (directory / name).write_bytes(content)
    return directory


def words_of(corpus, part):
    return [corpus.words[token] for token in part.tokens]


def test_words_with_an_end_mark_for_every_line(tmp_path):
    corpus = text.read("own", str(written(tmp_path)), "word")
    lines = ["= Cats =", "the cat saw the dog", "", "= = Food = =", "the cat eats", "= Dogs ="]
    expected = " <eos> ".join([*lines, "the dog <eos>"]).split()
    assert words_of(corpus, corpus.train) == expected
    assert words_of(corpus, corpus.validation) == ["the", "dog", "saw", "<eos>"]
    assert corpus.words[0] == "="  # 8 times
    counts = [expected.count(word) for word in corpus.words]
    assert counts == sorted(counts, reverse=True)
    assert [corpus.words.index(word) for word in ("cat", "dog")] == [3, 4]  # alike: the first first


def test_an_article_begins_at_its_heading(tmp_path):
    """WikiText has blank lines around it, and formulas in the text that look like one."""
    lines = [
        "",
        "= Cats =",
        "",
        "the cat :",
        "= 2 a =",
        "= = Food = =",
        "",
        "",
        "= Dogs =",
        "",
        "saw",
    ]
    train = "".join(f" {line} \n" if line else " \n" for line in lines).encode()
    corpus = text.read("own", str(written(tmp_path, train, b"the cat\n", b"saw\n")), "word")
    starts = np.flatnonzero(corpus.train.starts)
    assert [corpus.words[corpus.train.tokens[start + 1]] for start in starts] == [
        "=",
        "Cats",
        "Dogs",
    ]
    assert np.flatnonzero(corpus.validation.starts).tolist() == [0]


def test_characters(tmp_path):
    corpus = text.read("own", str(written(tmp_path, b"aab\nb a\n", b"ab", b"b\na")), "character")
    assert "".join(words_of(corpus, corpus.train)) == "aab\nb a\n"
    assert corpus.words == ("a", "b", "\n", " ")


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"train": b""}, "train.txt is damaged: it has 0 tokens, a text at least 2"),
        ({"valid": b"the d\xffg\n"}, "valid.txt is damaged at byte 5: that is not UTF-8"),
        ({"train": TRAIN + b"\xc3"}, f"train.txt is damaged at byte {len(TRAIN)}: that is not"),
        ({"test": b"the\nbird sings\n"}, "test.txt, line 2: 'bird' is not in the training part"),
    ],
)
def test_bad_files_are_one_sentence(tmp_path, files, sentence):
    with pytest.raises(UserError, match=r"^[^\n]*$") as refusal:
        text.read("own", str(written(tmp_path, **files)), "word")
    assert sentence in str(refusal.value)


def test_missing_files_are_one_sentence(tmp_path):
    with pytest.raises(UserError, match=r"Penn Treebank is not here: put ptb\.train\.txt, "):
        text.read("ptb", None, "word")
    with pytest.raises(UserError, match="is no directory"):
        text.read("ptb", str(tmp_path / "none"), "word")
    with pytest.raises(UserError, match="WikiText-2 is not in"):
        text.read("wikitext2", str(tmp_path), "word")


def test_another_text_is_not_taken_for_a_published_one(tmp_path):
    written(tmp_path / "ptb")
    with pytest.raises(UserError, match=r"it has 28 tokens .* the published one 929,589"):
        text.read("ptb", str(tmp_path), "word")


def test_a_text_of_a_published_form_is_found_by_its_names(tmp_path, monkeypatch):
    """In a folder of its own; WikiText-103 has the form of the smaller one."""
    small = text.TEXTS["wikitext103"]
    monkeypatch.setitem(
        text.TEXTS, "wikitext103", text.dataclasses.replace(small, tokens=(28, 4, 8), words=10)
    )
    folder = tmp_path / "wikitext-103"
    folder.mkdir()
    for name, content in zip(small.files[0], (TRAIN, VALID, TEST), strict=True):
        (folder / name).write_bytes(content)
    corpus = text.read("wikitext103", str(tmp_path), "word")
    assert [len(part.tokens) for part in corpus[1:]] == [28, 4, 8]


@fuzzed
@given(st.binary(max_size=60), st.integers(0, 2), st.integers(0, 100), st.integers(0, 100))
def test_mutated_files_give_a_sentence_or_a_text(tmp_path_factory, planted, which, at, width):
    contents = [TRAIN, VALID, TEST]
    old = contents[which]
    contents[which] = old[:at] + planted + old[at + width :]
    folder = written(tmp_path_factory.mktemp("text"), *contents)
    for level in ("word", "character"):
        try:
            corpus = text.read("own", str(folder), level)
        except UserError as refusal:
            assert str(folder) in str(refusal)
            assert len(str(refusal).splitlines()) == 1
        else:
            for part, content in zip(corpus[1:], contents, strict=True):
                if level == "character":
                    assert "".join(words_of(corpus, part)).encode() == content


def runs_of_words(articles, count):
    """All that stands in so many words, line breaks aside."""
    words = [article.split() for article in articles]
    return {tuple(ws[at : at + count]) for ws in words for at in range(len(ws) - count + 1)}


def test_no_topic_repeats_another():
    """No 25 words of a part stand in another; each topic that is left out stands in others."""
    from pydoc_data.topics import topics

    corpus = text.topics()
    articles = {}
    for name in text.PARTS:
        pieces = getattr(corpus, name)
        chars = "".join(words_of(corpus, pieces))
        begins = np.flatnonzero(pieces.starts)
        ends = [*begins[1:], len(chars)]
        articles[name] = [chars[a:b] for a, b in zip(begins, ends, strict=True)]
    runs = [runs_of_words(part, 25) for part in articles.values()]
    assert not any(a & b for a, b in itertools.combinations(runs, 2))
    selection = [article for part in articles.values() for article in part]
    assert len(set(selection)) == len(selection) > 50
    for topic in set(topics.values()) - set(selection):
        body = topic.split("\n\n", 1)[1].split()
        here, there = runs_of_words([" ".join(body)], 10), runs_of_words(selection, 10)
        assert len(here & there) > 0.7 * len(here)
    assert set(selection) < set(topics.values())
    total = sum(map(len, selection))
    for name in ("validation", "test"):
        assert 0.09 < len(getattr(corpus, name).tokens) / total < 0.15


def test_counts_by_hand():
    """aab aab, then ab: the kinds and counts are those of Witten and Bell's formula."""
    part = text.Part(np.array([0, 0, 1, 0, 0, 1], np.int32), np.zeros(6, bool))
    asked = text.Part(np.array([0, 1, 2], np.int32), np.zeros(3, bool))
    corpus = text.Corpus(("a", "b", "c"), part, part, asked)
    p = {0: (4 + 2 / 3) / 8, 1: (2 + 2 / 3) / 8, 2: (2 / 3) / 8}  # 6 tokens of 2 kinds
    # After a: a twice, b twice, 2 kinds. After b: a once, 1 kind.
    pairs = [p[0], (2 + 2 * p[1]) / 6, (0 + 1 * p[2]) / 2]
    expected = [
        math.prod(p.values()) ** (-1 / 3),
        math.prod(pairs) ** (-1 / 3),
    ]
    np.testing.assert_allclose(text.ngram_perplexities(corpus, asked, 2), expected, rtol=1e-12)
