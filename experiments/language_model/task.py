"""Language modelling: a text in windows, with a state that goes on from each to the next.

Letters: T steps of a window, B batch, N tokens of a part of the text, V words.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from experiments.datasets import text
from experiments.language_model.model import LanguageModel
from experiments.language_model.settings import LanguageModelSettings
from experiments.language_model.softmax import AdaptiveSoftmax, FullSoftmax
from experiments.machine.mesh import Rows
from experiments.settings.errors import UserError
from experiments.settings.metrics import Metric
from experiments.settings.model import ModelSettings
from experiments.training.models import TokenEncoder, width_of
from experiments.training.task import Apply, BaseTask, Fresh, HeldOut, Outcome, Resident
from recurrent_gates import RNN, Stack
from recurrent_gates.initializers import symmetric_uniform, torch_embedding

_SHORTEST = 5  # steps of a window of random length (AWD-LSTM's code)
_DEVIATIONS = 3  # above the mean, at which a random length is cut: all windows are compiled as one
_CONTEXTS = 3  # the longest of the counts that a model of characters is compared with


class Window(NamedTuple):
    """Tokens int32 and masks bool, all ``[T, B]``; ``fresh``: the step starts anew."""

    inputs: jax.Array
    targets: jax.Array
    valid: jax.Array
    fresh: jax.Array


class Stream(NamedTuple):
    """Where each row reads next in its own stretch, int32 ``[B]``, and the recurrent carry."""

    place: jax.Array
    carry: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModelTask(LanguageModelSettings, BaseTask):
    """The next token.

    The training part is cut into B stretches of equal length, what is over being left out, and
    row b reads stretch b from window to window (AWD-LSTM's code). At the end of the stretches
    all begin anew with a fresh state. All rows of a window have as many steps, drawn from a
    normal law (GATO B.7) that is cut at three deviations.

    A held-out part is cut likewise, nothing being left out, and read in windows of equal length:
    each token but the first of a stretch is predicted from all tokens of the stretch before it.
    """

    name = "language_model"
    axes = 1
    stream_axes = 0
    unit = "tokens"

    @property
    def metrics(self) -> tuple[Metric, ...]:
        baseline, baseline_name = float(self.words), "uniform"
        if self.dataset == "topics":
            baseline, baseline_name = self.counted[-1], f"counts of {_CONTEXTS} characters"
        metrics = [Metric("perplexity", False, baseline, baseline_name)]
        if self.level == "character":
            metrics.append(Metric("bits", False, math.log2(baseline), baseline_name))
        return (*metrics, Metric("loss", False, math.log(baseline), baseline_name))

    @property
    def counted(self) -> list[float]:
        """The test part's perplexity under counts of one, two, ... tokens."""
        return _perplexities(self.dataset, self.data_dir, self.level)

    @functools.cached_property
    def content(self) -> str | None:
        """A digest of a text that no setting tells, the user's own or Python's, which differs
        from version to version; None of a published one."""
        if self.dataset not in ("own", "topics"):
            return None
        words, *parts = self.corpus
        digest = hashlib.sha256("\n".join(words).encode())
        for part in parts:
            digest.update(np.asarray(part.tokens).tobytes())
        return digest.hexdigest()[:16]

    @property
    def longest(self) -> int:
        """T, the steps that every training window is compiled to."""
        return self.window + math.ceil(_DEVIATIONS * self.window_deviation)

    @property
    def units_per_row(self) -> float:
        short_prob = self.short_window_prob
        return (1 - short_prob) * self.window + short_prob * (self.window // 2)

    @property
    def examples(self) -> int:
        """How many rows of windows there are in a pass."""
        return max(1, round(self.tokens[0] / self.units_per_row))

    @property
    def tokens(self) -> tuple[int, int, int]:
        """How many tokens each part has."""
        published_tokens = text.TEXTS[self.dataset].tokens if self.dataset in text.TEXTS else None
        if published_tokens is not None and self.level == "word":
            return published_tokens
        train, validation, test = (len(part.tokens) for part in self.corpus[1:])
        return train, validation, test

    @property
    def words(self) -> int:
        """V."""
        published_words = text.TEXTS[self.dataset].words if self.dataset in text.TEXTS else 0
        return (
            published_words if published_words and self.level == "word" else len(self.corpus.words)
        )

    @property
    def corpus(self) -> text.Corpus:
        """The text, read once.

        Raises:
          UserError: if files are missing or damaged.
        """
        return _read(self.dataset, self.data_dir, self.level)

    def check(self) -> None:
        if self.dataset == "topics" and self.level == "word":
            raise UserError("--level=word is not for --dataset=topics, which is read by character.")
        if self.tied and self.inputs != "embed":
            raise UserError("--tied needs --inputs=embed: there is no table to share.")
        if self.softmax == "adaptive":
            if self.tied:
                raise UserError("--softmax=adaptive has tables of its own: give --tied=false.")
            if list(self.cutoffs) != sorted(set(self.cutoffs)) or not self.cutoffs:
                raise UserError("--cutoffs must rise, and there must be one.")
            if self.cutoffs[-1] >= self.words:
                raise UserError(f"--cutoffs must stay below the {self.words} words of the text.")

    def module(self, recurrent: RNN | Stack, model: ModelSettings) -> nn.Module:
        if model.decoder:
            raise UserError("--decoder is not for language_model: its decoder is the softmax.")
        last_cell = recurrent.cells[-1] if isinstance(recurrent, Stack) else recurrent.cell
        features = width_of(last_cell)
        # Rows of N(0, 1) would give a tied softmax logits of deviation sqrt(F) to start with;
        # AWD-LSTM's code has U[-.1, .1].
        embedding_init = symmetric_uniform(0.1) if self.tied else torch_embedding
        encoder = TokenEncoder(self.inputs, self.words, model.embedding, embedding_init)
        softmax: nn.Module
        if self.softmax == "adaptive":
            softmax = AdaptiveSoftmax(self.words, features, self.cutoffs)
        else:
            softmax = FullSoftmax(self.words, features, self.tied, model.embedding)
        return LanguageModel(encoder, recurrent, softmax, self.tied)

    def word_axes(self, params: Any) -> Any:
        """See ``Task``: the tables of the softmax, and the embedding's where it is one of them."""

        def axis(path: Any, leaf: Any) -> int | None:
            del leaf
            room, name = path[0].key, path[-1].key
            word_table = room == "softmax" and not name.startswith("projection")
            return 0 if word_table or (self.tied and room == "encoder") else None

        return jax.tree_util.tree_map_with_path(axis, params)

    def split_words(self, module: nn.Module, parts: int) -> nn.Module:
        """See ``Task``."""
        assert isinstance(module, LanguageModel)
        encoder = module.encoder.clone(parts=parts if self.tied else 1)
        return module.clone(encoder=encoder, softmax=module.softmax.clone(parts=parts))

    def example(self) -> tuple[jax.Array]:
        return (jnp.zeros((1, 1), jnp.int32),)

    def data(self) -> Resident:
        _, *parts = self.corpus
        return Resident(dict(zip(text.PARTS, parts, strict=True)))

    def shapes(self, rows: int) -> dict[str, text.Part]:
        del rows

        def part(count: int) -> text.Part:
            tokens: Any = jax.ShapeDtypeStruct((count,), jnp.int32)
            starts: Any = jax.ShapeDtypeStruct((count,), jnp.bool_)
            return text.Part(tokens, starts)

        return dict(zip(text.PARTS, map(part, self.tokens), strict=True))

    def start(self, fresh: Fresh, data: Any, key: jax.Array, rows: Rows) -> Stream:
        del data, key
        return Stream(jnp.zeros_like(rows.numbers), fresh(rows.count))

    def draw(
        self, act: Apply, data: Any, stream: Stream, key: jax.Array, step: jax.Array, rows: Rows
    ) -> tuple[Window, Stream]:
        del act
        part = data["train"]
        stretch = len(part.tokens) // rows.total
        if stretch < 2:
            raise UserError(
                f"--batch_size={rows.total} leaves {stretch} of the {len(part.tokens)} tokens to "
                "each row, and it needs two."
            )
        steps = self._steps(jax.random.fold_in(key, step))
        steps = jnp.minimum(steps, stretch - 1 - stream.place)
        first = rows.numbers * stretch
        window = self.read(part, first, stream.place, steps, self.longest)
        place = stream.place + steps
        return window, stream._replace(place=jnp.where(place < stretch - 1, place, 0))

    def _steps(self, key: jax.Array) -> jax.Array:
        """How many steps a window has, int32."""
        if not self.window_deviation and not self.short_window_prob:
            return jnp.int32(self.window)
        short_key, key = jax.random.split(key)
        short = jax.random.bernoulli(short_key, self.short_window_prob)
        mean = jnp.where(short, jnp.float32(self.window // 2), jnp.float32(self.window))
        length = mean + jnp.float32(self.window_deviation) * jax.random.normal(key, (), jnp.float32)
        shortest = min(_SHORTEST, self.window)
        return jnp.clip(jnp.rint(length).astype(jnp.int32), shortest, self.longest)

    def read(
        self, part: text.Part, first: jax.Array, place: jax.Array, steps: jax.Array, longest: int
    ) -> Window:
        """The window of the next tokens.

        Args:
          part: of the text.
          first: where each row's stretch begins in it, int32 ``[B]``.
          place: where each row reads on in its stretch, int32 ``[B]``.
          steps: how many tokens of each row, int32 ``[B]``.
          longest: T.
        """
        time = jnp.arange(longest, dtype=jnp.int32)[:, None]
        places = jnp.minimum((first + place)[None] + time, len(part.tokens) - 2)
        valid = time < steps[None]
        fresh = (place[None] + time) == 0
        if self.reset_at_articles:
            fresh = fresh | part.starts[places]
        # A reset acts on the carry at an invalid step, too; what is padding here is read later.
        return Window(part.tokens[places], part.tokens[places + 1], valid, fresh & valid)

    def loss(
        self, apply: Apply, params: Any, window: Window, stream: Stream, train: bool
    ) -> Outcome:
        del train
        carry, loss = apply(
            params,
            window.inputs,
            window.targets,
            window.valid,
            carry=jax.lax.stop_gradient(stream.carry),
            valid=window.valid,
            resets=window.fresh,
        )
        total = (loss, window.valid.sum(dtype=jnp.float32))
        return Outcome(total, {"loss": total}, stream._replace(carry=carry))

    def rate_factor(self, window: Window) -> jax.Array:
        """The factor on the learning rate: the window's steps over the mean, if asked for."""
        if not self.rescale_rate:
            return jnp.float32(1)
        return window.valid[:, 0].sum(dtype=jnp.float32) / self.window

    def held_out(self, data: Any, devices: int) -> dict[str, HeldOut]:
        del devices
        readers = {"validation": self.validation_readers, "test": self.test_readers}
        return {
            name: _Reading(self, name, len(data[name].tokens), rows)
            for name, rows in readers.items()
        }

    def scores(
        self, sums: Mapping[str, tuple[np.ndarray, np.ndarray]], outputs: list[Any]
    ) -> dict[str, Any]:
        del outputs
        total, weight = sums["loss"]
        loss = total / weight
        scores = {"loss": loss, "perplexity": np.exp(loss)}
        if self.level == "character":
            scores["bits"] = loss / np.log(2)
        return scores


class _Reading:
    """A part in stretches, one after the other if there is one row."""

    def __init__(self, task: LanguageModelTask, name: str, tokens: int, rows: int) -> None:
        self._task, self._name, self._tokens = task, name, tokens
        self.rows = min(rows, tokens // 2)
        self._stretch = -(-tokens // self.rows)
        self.windows = -(-(self._stretch - 1) // task.reading_window)

    def start(self, fresh: Fresh, data: Any, rows: Rows) -> Stream:
        del data
        return Stream(jnp.zeros_like(rows.numbers), fresh(rows.count))

    def draw(
        self, act: Apply, data: Any, stream: Stream, index: jax.Array, rows: Rows
    ) -> tuple[Window, Stream]:
        del act, index
        longest = self._task.reading_window
        first = rows.numbers * self._stretch
        remainder = jnp.minimum(self._stretch, self._tokens - first) - 1 - stream.place
        steps = jnp.clip(remainder, 0, longest)
        window = self._task.read(data[self._name], first, stream.place, steps, longest)
        return window, stream._replace(place=stream.place + steps)


@functools.lru_cache(maxsize=4)
def _read(dataset: str, data_dir: str | None, level: str) -> text.Corpus:
    if dataset == "topics":
        return text.topics()
    return text.read(dataset, data_dir, level)


@functools.lru_cache(maxsize=4)
def _perplexities(dataset: str, data_dir: str | None, level: str) -> list[float]:
    corpus = _read(dataset, data_dir, level)
    return text.ngram_perplexities(corpus, corpus.test, _CONTEXTS)
