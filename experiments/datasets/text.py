"""Texts as numbers: a vocabulary made from the training part, and three parts of tokens.

A text is looked for in its raw published files in ``data_dir``; the documentation of Python's
language comes with Python. Nothing is downloaded. Letters: N tokens of a part, V words.
"""

from __future__ import annotations

import array
import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.datasets.damage import damaged, unreadable
from experiments.settings.errors import UserError

END = "<eos>"  # stands at the end of every line of words, as in AWD-LSTM's reader
PARTS = ("train", "validation", "test")

# Of an article of WikiText, if blank lines stand around it; a section's has more signs.
_HEADING = re.compile(r" = [^=].* = \n")
_HELD_OUT_TOPICS = 0.1  # of the characters, in each held-out part, up to the end of a topic
_TOPICS_SEED = 42
_PASSAGE = 150  # characters of a paragraph that two topics do not share by chance


class Part(NamedTuple):
    """Tokens of a part, int32 ``[N]``, and which of them begin an article, bool ``[N]``."""

    tokens: np.ndarray
    starts: np.ndarray


class Corpus(NamedTuple):
    """A text.

    Attributes:
      words: the vocabulary, most frequent first; characters, if the text is read so.
      train, validation, test: its parts.
    """

    words: tuple[str, ...]
    train: Part
    validation: Part
    test: Part


@dataclasses.dataclass(frozen=True)
class Text:
    """A published text.

    Attributes:
      title: its name as people know it.
      folders: where its files may lie in a data directory, besides there themselves.
      files: names of its files, of the three parts; any of these sets of names.
      published: where these are published.
      tokens: how many each part has, with an end mark for each line; none: it is the user's own.
      words: V, with the end mark; 0: as many as there are.
    """

    title: str
    folders: tuple[str, ...]
    files: tuple[tuple[str, str, str], ...]
    published: str
    tokens: tuple[int, int, int] | None
    words: int


_OWN_FILES = ("train.txt", "valid.txt", "test.txt")
_WIKI_FILES = ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens")

TEXTS = {
    "ptb": Text(
        title="Penn Treebank",
        folders=("ptb", "penn", "simple-examples/data"),
        files=(("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"), _OWN_FILES),
        published="www.fit.vutbr.cz/~imikolov/rnnlm",
        tokens=(929_589, 73_760, 82_430),
        words=10_000,
    ),
    "wikitext2": Text(
        title="WikiText-2",
        folders=("wikitext-2",),
        files=(_WIKI_FILES, _OWN_FILES),
        published="the WikiText long term dependency language modeling dataset",
        tokens=(2_088_628, 217_646, 245_569),
        words=33_278,
    ),
    "wikitext103": Text(
        title="WikiText-103",
        folders=("wikitext-103",),
        files=(_WIKI_FILES, _OWN_FILES),
        published="the WikiText long term dependency language modeling dataset",
        tokens=(103_227_021, 217_646, 245_569),
        words=267_735,
    ),
    "own": Text(
        title="a text of your own",
        folders=(),
        files=(_OWN_FILES,),
        published="yours",
        tokens=None,
        words=0,
    ),
}


@functools.cache
def topics() -> Corpus:
    """The documentation of Python's language, by character; each topic is an article.

    It differs a little from one version of Python to the next. Its characters are known to all
    parts. Topics that repeat others are left out, so that no part has the text of another.
    """
    from pydoc_data import topics as documentation

    texts = _without_repetition(documentation.topics)
    order = np.random.RandomState(_TOPICS_SEED).permutation(sorted(texts))
    ends = np.cumsum([len(texts[name]) for name in order])
    share = _HELD_OUT_TOPICS * ends[-1]
    split = np.split(order, np.searchsorted(ends, [share, 2 * share]) + 1)
    full_text = "".join(texts[name] for name in sorted(texts))
    numbers = {char: number for number, char in enumerate(_by_frequency(full_text))}

    def part(names: Iterable[str]) -> Part:
        topic_texts = [texts[name] for name in names]
        tokens = np.array([numbers[char] for text in topic_texts for char in text], np.int32)
        starts = np.zeros(len(tokens), bool)
        starts[np.cumsum([0, *map(len, topic_texts[:-1])])] = True
        return Part(tokens, starts)

    validation, test, train = split
    return Corpus(tuple(numbers), part(train), part(validation), part(test))


def _without_repetition(texts: Mapping[str, str]) -> dict[str, str]:
    """The texts, longest first, but for those that stand in a longer one or share a passage with
    it: the topic "if" is a section of "compound"."""
    selection: dict[str, str] = {}
    passages: set[str] = set()
    everything = ""
    for name in sorted(texts, key=lambda name: (-len(texts[name]), name)):
        paragraphs = [" ".join(paragraph.split()) for paragraph in texts[name].split("\n\n")]
        own_passages = {paragraph for paragraph in paragraphs if len(paragraph) >= _PASSAGE}
        body = "\n".join(paragraphs[1:])  # a section has another line under its title
        if own_passages & passages or body in everything:
            continue
        selection[name] = texts[name]
        passages |= own_passages
        everything += "\n".join([*paragraphs, ""])
    return selection


def _by_frequency(text: Sequence[str]) -> list[str]:
    counts: dict[str, int] = {}
    for char in text:
        counts[char] = counts.get(char, 0) + 1
    return sorted(counts, key=lambda char: (-counts[char], char))


def read(name: str, data_dir: str | None, level: str) -> Corpus:
    """A text from its raw files.

    Args:
      name: a key of ``TEXTS``.
      data_dir: where to look.
      level: ``"word"``: what stands between white space, and an end mark for each line; or
        ``"character"``.

    Raises:
      UserError: if files are missing or damaged, hold words that are not in the training part,
        or have not the published counts.
    """
    text = TEXTS[name]
    paths = _find(text, data_dir)
    numbers: dict[str, int] = {}
    parts = [_part(path, numbers, level, learn=not index) for index, path in enumerate(paths)]
    if text.tokens is not None and level == "word":
        for path, part, count in zip(paths, parts, text.tokens, strict=True):
            if len(part.tokens) != count:
                raise UserError(
                    f"{path} is not that of {text.title}: it has {len(part.tokens):,} tokens with "
                    f"the end marks, the published one {count:,}."
                )
        if len(numbers) != text.words:
            raise UserError(
                f"{paths[0]} is not that of {text.title}: it has {len(numbers):,} different "
                f"words, the published one {text.words:,}."
            )
    # The most frequent first; of equally frequent ones, the one that came first.
    order = np.argsort(-np.bincount(parts[0].tokens, minlength=len(numbers)), kind="stable")
    rank = np.empty(len(order), np.int32)
    rank[order] = np.arange(len(order), dtype=np.int32)
    words = tuple(numbers)
    return Corpus(
        tuple(words[number] for number in order),
        *(Part(rank[part.tokens], part.starts) for part in parts),
    )


def _find(text: Text, data_dir: str | None) -> list[Path]:
    needs = " or ".join(", ".join(names) for names in text.files)
    instruction = f"put {needs} from {text.published} into a directory DIR and give --data_dir=DIR."
    if data_dir is None:
        raise UserError(f"{text.title} is not here: {instruction}")
    root = Path(data_dir)
    if not root.is_dir():
        raise UserError(f"--data_dir={data_dir} is no directory.")
    for folder in (*(root / name for name in text.folders), root):
        for names in text.files:
            paths = [folder / name for name in names]
            if all(path.is_file() for path in paths):
                return paths
    raise UserError(f"{text.title} is not in {data_dir}: {instruction}")


def _part(path: Path, numbers: dict[str, int], level: str, learn: bool) -> Part:
    """A part in the numbers of its words, which the first one teaches."""
    tokens, starts = array.array("i"), array.array("q")
    is_after_blank, heading = True, None
    for row, line in enumerate(_lines(path), 1):
        is_blank = not line.strip()
        if is_blank and heading is not None:
            starts.append(heading)
        heading = len(tokens) if is_after_blank and _HEADING.fullmatch(line) else None
        is_after_blank = is_blank
        for word in [*line.split(), END] if level == "word" else line:
            number = numbers.get(word)
            if number is None:
                if not learn:
                    raise UserError(
                        f"{path}, line {row}: {word!r} is not in the training part, so that there "
                        "is no number for it."
                    )
                number = numbers[word] = len(numbers)
            tokens.append(number)
    if len(tokens) < 2:
        raise UserError(f"{path} is damaged: it has {len(tokens)} tokens, a text at least 2.")
    start_mask = np.zeros(len(tokens), bool)
    start_mask[np.array([0, *starts])] = True
    return Part(np.array(tokens, np.int32), start_mask)


def _lines(path: Path) -> Iterator[str]:
    """The lines of a file, each with its end; only ``\\n`` ends one."""
    offset = 0
    try:
        with path.open("rb") as file:
            for line in file:
                try:
                    yield line.decode()
                except UnicodeDecodeError as error:
                    raise damaged(path, offset + error.start, "that is not UTF-8") from None
                offset += len(line)
    except OSError as error:
        raise unreadable(path, error) from None


def ngram_perplexities(corpus: Corpus, part: Part, longest: int) -> list[float]:
    """The perplexity of a part under counts of one, two, ... tokens of the training part.

    Counts are smoothed as Witten and Bell (1991, method C) have it: what follows a context
    shares its probability with as many new kinds as were seen after it, which are as the shorter
    context has them.

    Returns:
      One number for each length.
    """
    size = len(corpus.words)
    words = part.tokens.astype(np.int64)
    p = np.full(len(words), 1 / size)
    perplexities = []
    for length in range(1, longest + 1):
        train_contexts = _contexts(corpus.train.tokens, length - 1, size)
        part_contexts = _contexts(part.tokens, length - 1, size)
        pairs, pair_counts = np.unique(
            train_contexts * size + corpus.train.tokens[length - 1 :], return_counts=True
        )
        contexts, kinds = np.unique(pairs // size, return_counts=True)
        totals = np.bincount(
            np.searchsorted(contexts, pairs // size), pair_counts, minlength=len(contexts)
        )
        places = np.clip(np.searchsorted(contexts, part_contexts), 0, len(contexts) - 1)
        matches = contexts[places] == part_contexts
        part_pairs = part_contexts * size + words[length - 1 :]
        pair = np.clip(np.searchsorted(pairs, part_pairs), 0, len(pairs) - 1)
        count = np.where(pairs[pair] == part_pairs, pair_counts[pair], 0)
        lower = p[length - 1 :]
        estimate = (count + kinds[places] * lower) / (totals[places] + kinds[places])
        p = np.concatenate([p[: length - 1], np.where(matches, estimate, lower)])
        perplexities.append(float(np.exp(-np.log(p).mean())))
    return perplexities


def _contexts(tokens: np.ndarray, length: int, size: int) -> np.ndarray:
    """The ``length`` tokens before each token that has so many, as one number, int64."""
    count = len(tokens) - length
    numbers = np.zeros(count, np.int64)
    for back in range(length, 0, -1):
        numbers = numbers * size + tokens[length - back : length - back + count]
    return numbers
