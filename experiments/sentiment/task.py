"""The verdict of a review that is read word by word (the lecture's example of a sequence).

Letters: N reviews, T steps, B batch.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from experiments.datasets import reviews
from experiments.sentiment import grammar
from experiments.sentiment.settings import SentimentSettings
from experiments.settings.errors import UserError
from experiments.settings.metrics import Metric
from experiments.settings.model import ModelSettings
from experiments.training.models import Decoder, SequenceModel, TokenEncoder
from experiments.training.permutation import batch_of_epoch
from experiments.training.state import threefry_key
from experiments.training.supervised import Batch, SupervisedTask
from recurrent_gates import RNN, Stack

_EXAMPLES = 6400  # of the grammar, fresh ones each time, are called a pass
_KEYS = {"validation": 0x5E17, "test": 0x5E18}  # of the grammar's held-out sets
_VALIDATION_SEED = 42


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentimentTask(SentimentSettings, SupervisedTask):
    """In favour or not.

    Reviews have padding in front, which no state sees, so that all end at the last step. The
    grammar's are fresh at every step, those of IMDB come in an order of its own for each pass.
    """

    name = "sentiment"

    @property
    def metrics(self) -> tuple[Metric, ...]:
        accuracy, loss, baseline_name = 0.5, math.log(2), "chance"
        if self.dataset == "grammar":
            (accuracy, loss), baseline_name = grammar.by_counts(), "counts of words"
        return (
            Metric("accuracy", True, accuracy, baseline_name),
            Metric("loss", False, loss, baseline_name),
        )

    @property
    def words(self) -> int:
        """How many numbers words have, with those of the padding and of unknown words."""
        return len(grammar.WORDS) if self.dataset == "grammar" else self.vocabulary + 2

    @property
    def examples(self) -> int:
        """How many reviews there are in a pass."""
        return _EXAMPLES if self.dataset == "grammar" else reviews.COUNT - self.validation

    @property
    def validation(self) -> int:
        """How many of IMDB's training reviews are for validation."""
        return round(reviews.COUNT * self.validation_share)

    def check(self) -> None:
        if self.dataset == "imdb" and not 0 < self.validation < reviews.COUNT:
            raise UserError(
                "--validation_share: a share of the reviews, and not all, must be for validation."
            )

    def module(self, recurrent: RNN | Stack, model: ModelSettings) -> nn.Module:
        return SequenceModel(
            encoder=TokenEncoder(self.inputs, self.words, model.embedding),
            recurrent=recurrent,
            decoder=Decoder((*model.decoder, 1)),
            outputs=1,
        )

    def masks(self, batch: Batch) -> dict[str, jax.Array]:
        """The padding changes no state."""
        return {"valid": batch.inputs != reviews.PADDING}

    def load(self) -> dict[str, Batch]:
        """The held-out sets of the grammar; of IMDB's reviews the shapes of what ``read`` gives."""
        if self.dataset == "grammar":
            return {
                name: self._sample_batch(threefry_key(key), self.held_out_reviews)
                for name, key in _KEYS.items()
            }

        def empty(count: int) -> Batch:
            words = jnp.zeros((self.length, count), jnp.int32)
            return Batch(words, jnp.zeros((1, count), jnp.bool_))

        validation, test = empty(self.validation), empty(reviews.COUNT)
        train = Batch(
            jnp.zeros((self.examples, self.length), jnp.int32),
            jnp.zeros(self.examples, jnp.bool_),
        )
        return {"train": train, "validation": validation, "test": test}

    def data(self) -> Any:
        """The grammar's held-out sets are drawn on the device, IMDB's reviews read from files."""
        if self.dataset == "grammar":
            return super().data()
        return self.resident(self._read())

    def _read(self) -> dict[str, Batch]:
        train, test = reviews.read(self.data_dir, self.length, self.vocabulary, reviews.COUNT)
        order = np.random.RandomState(_VALIDATION_SEED).permutation(len(train.words))
        train_numbers, validation_numbers = np.split(order, [self.examples])

        def columns(words: np.ndarray, verdicts: np.ndarray) -> Batch:
            inputs: Any = np.ascontiguousarray(words.T)
            targets: Any = verdicts[None]
            return Batch(inputs, targets)

        words: Any = train.words[train_numbers]
        verdicts: Any = train.verdicts[train_numbers]
        return {
            "train": Batch(words, verdicts),
            "validation": columns(
                train.words[validation_numbers], train.verdicts[validation_numbers]
            ),
            "test": columns(test.words, test.verdicts),
        }

    def sets(self, loaded: dict[str, Batch]) -> dict[str, Batch]:
        return {"validation": loaded["validation"], "test": loaded["test"]}

    def batch(self, loaded: dict[str, Batch], key: jax.Array, step: jax.Array, size: int) -> Batch:
        if self.dataset == "grammar":
            return self._sample_batch(jax.random.fold_in(key, step), size)
        words, verdicts, _ = loaded["train"]
        indices = batch_of_epoch(key, step, size, len(words))
        return Batch(jnp.swapaxes(words[indices], 0, 1), verdicts[indices][None])

    def score(self, outputs: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        logit, verdict = outputs[-1, :, 0], batch.targets[0]
        loss = jax.nn.softplus(jnp.where(verdict, -logit, logit))
        return {"loss": loss, "accuracy": ((logit > 0) == verdict).astype(jnp.float32)}

    def _sample_batch(self, key: jax.Array, count: int) -> Batch:
        words, verdicts = grammar.reviews(key, self.length, count)
        return Batch(words, verdicts[None])
