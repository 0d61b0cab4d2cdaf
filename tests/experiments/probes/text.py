"""A character model that reads a text in windows of random length and keeps its state.

Letters: T steps of a window, B batch, N characters of the text.
"""

import dataclasses
import math
import string
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.settings.metrics import Metric
from experiments.training.models import Decoder, SequenceModel, TokenEncoder
from experiments.training.task import BaseTask, Outcome, Resident

END = "."  # of an article
ALPHABET = string.ascii_lowercase + " " + END
TEXT = (
    "the moon pulls at the sea. tides rise. a cell keeps what it must and drops the rest. "
    "no. rivers run down to the plain and slow there. seeds wait. snow falls all night. "
    "one more short piece of text ends here."
)


class Window(NamedTuple):
    """Characters as int32 and masks as bool, all ``[T, B]``."""

    inputs: jax.Array
    targets: jax.Array
    valid: jax.Array
    resets: jax.Array


class Stream(NamedTuple):
    """Where each row reads next, int32 ``[B]``, and the carry, leaves ``[B, F]``."""

    place: jax.Array
    carry: object


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextTask(BaseTask):
    """Each row reads on from its own place; a state never crosses the end of an article.

    The held-out set is the whole text: each of its readers has some of the articles.

    Attributes:
      text: over ``ALPHABET``, with ``END`` last.
      longest: steps of the longest training window.
      reading: steps of a held-out window.
      readers: rows of the held-out set.
    """

    text: str = TEXT
    longest: int = 6
    reading: int = 7
    readers: int = 8

    name = "text"
    axes = 1
    stream_axes = 0
    output_axes = 1
    unit = "tokens"

    @property
    def metrics(self):
        return (
            Metric("perplexity", False, float(len(ALPHABET)), "uniform"),
            Metric("loss", False, math.log(len(ALPHABET)), "uniform"),
        )

    @property
    def units_per_row(self):
        return (1 + self.longest) / 2

    def module(self, recurrent, model):
        del model
        size = len(ALPHABET)
        return SequenceModel(TokenEncoder("one_hot", size, 0), recurrent, Decoder((size,)))

    def example(self):
        return (jnp.zeros((1, 1), jnp.int32),)

    def data(self):
        return Resident(np.array([ALPHABET.index(char) for char in self.text], np.int32))

    def shapes(self, rows):
        del rows
        return jax.ShapeDtypeStruct((len(self.text),), jnp.int32)

    def start(self, fresh, data, key, rows):
        del key
        return Stream(rows.numbers * (len(data) // rows.total), fresh(rows.count))

    def draw(self, act, data, stream, key, step, rows):
        del act
        key = jax.random.fold_in(key, step)

        def length(row):
            return jax.random.randint(jax.random.fold_in(key, row), (), 1, self.longest + 1)

        lengths = jax.vmap(length)(rows.numbers)
        return self.read(data, stream, lengths, self.longest)

    def read(self, text, stream, lengths, steps):
        """The window of the next characters, so many ``[B]`` of each row, and the stream after."""
        time = jnp.arange(steps, dtype=jnp.int32)[:, None]
        at = (stream.place[None] + time) % len(text)
        window = Window(
            inputs=text[at],
            targets=text[(at + 1) % len(text)],
            valid=time < lengths[None],
            resets=text[at - 1] == ALPHABET.index(END),
        )
        return window, stream._replace(place=(stream.place + lengths) % len(text))

    def loss(self, apply, params, window, stream, train):
        carry, logits = apply(
            params,
            window.inputs,
            carry=stream.carry,
            return_carry=True,
            valid=window.valid,
            resets=window.resets,
        )
        log_p = jax.nn.log_softmax(logits)
        of_target = jnp.take_along_axis(log_p, window.targets[..., None], axis=-1)[..., 0]
        losses = jnp.where(window.valid, -of_target, 0)
        total = (losses.sum(), window.valid.sum(dtype=jnp.float32))
        sums = {"loss": total, "perplexity": total}
        outputs = () if train else {"losses": losses, "valid": window.valid}
        return Outcome(total, sums, stream._replace(carry=carry), outputs)

    def held_out(self, data, devices):
        del data, devices
        return {"held_out": Reading(self)}

    def scores(self, sums, outputs):
        del outputs
        means = {name: total / weight for name, (total, weight) in sums.items()}
        return means | {"perplexity": np.exp(means["perplexity"])}


class Reading:
    """The whole text in windows, each reader's articles one after the other."""

    def __init__(self, task):
        self._task, self.rows = task, task.readers
        ends = np.flatnonzero([char == END for char in task.text]) + 1
        starts = np.array([0, *ends[:-1]])
        own = np.array_split(np.arange(len(ends)), task.readers)
        self._first = np.array([starts[articles[0]] for articles in own], np.int32)
        self._last = np.array([ends[articles[-1]] for articles in own], np.int32)
        self.windows = -(-int((self._last - self._first).max()) // task.reading)

    def start(self, fresh, data, rows):
        del data
        return Stream(rows.of(jnp.asarray(self._first), 0), fresh(rows.count))

    def draw(self, act, data, stream, index, rows):
        del act, index
        left = rows.of(jnp.asarray(self._last), 0) - stream.place
        lengths = jnp.clip(left, 0, self._task.reading)
        # Not back to the start of the text: there would be more to read.
        window, _ = self._task.read(data, stream, lengths, self._task.reading)
        return window, stream._replace(place=stream.place + lengths)
