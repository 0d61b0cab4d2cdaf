"""Patterns of random bits that are asked for again: repeat copy and associative recall.

Letters: T steps, B batch, L steps of a pattern or items of a list, R repeats, m steps of an item.

============  ==============================================  =================================
layout        inputs                                          answer
============  ==============================================  =================================
repeat_copy   a start mark, L vectors, R as a number          the vectors R times, an end mark
associative   L items, each behind a mark, then an item of    the item after it
              them between two marks of another kind
============  ==============================================  =================================

Inputs are the bits and two channels of marks; the answer begins right after the last of them, and
the input is zero from there.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from experiments.recall.settings import RecallSettings
from experiments.settings.errors import UserError
from experiments.settings.metrics import Metric
from experiments.settings.model import ModelSettings
from experiments.training.models import Decoder, SequenceModel
from experiments.training.state import threefry_key
from experiments.training.supervised import Batch, SupervisedTask
from recurrent_gates import RNN, Stack

_HELD_OUT_KEY = 0xDEC  # of the held-out sequences: the same for all seeds and cells
_REPEATS_UNIT = 10  # DNC code: the number of repeats is shown as a tenth of itself
_ONE_IN = 8  # of all patterns one in so many is held out
_FEWEST_BITS = 8  # of a pattern that may be held out: of smaller ones there are too few


class Pattern(NamedTuple):
    """What an example is made of.

    Attributes:
      bits: float32 ``[steps, bits]``, zero after those that it has.
      length: L, int32.
      asked: R, or which item is shown again, int32.
    """

    bits: jax.Array
    length: jax.Array
    asked: jax.Array


def repeat_copy(pattern: Pattern, steps: int) -> tuple[jax.Array, jax.Array]:
    """The inputs and targets of repeat copy, as the DNC's authors' code lays it out.

    Args:
      pattern: L vectors, to be said R times.
      steps: T, L (R + 1) + 3 or more.

    Returns:
      Inputs ``[T, bits + 2]``; targets ``[T, bits + 2]``: bits, end mark, whether it is due.
    """
    bits, length, repeats = pattern
    time = jnp.arange(steps)
    input_step, answer_step = time - 1, time - (length + 2)
    input_bits = _pattern_rows(bits, input_step, (input_step >= 0) & (input_step < length))
    number = jnp.where(time == length + 1, repeats / _REPEATS_UNIT, 0)
    inputs = [input_bits, (time == 0)[:, None], number[:, None]]
    end = answer_step == length * repeats
    answer_bits = _pattern_rows(
        bits, answer_step % length, (answer_step >= 0) & (answer_step < length * repeats)
    )
    due = (answer_step >= 0) & (answer_step <= length * repeats)
    targets = [answer_bits, end[:, None], due[:, None]]
    return _joined(inputs), _joined(targets)


def associative(pattern: Pattern, steps: int, item_steps: int) -> tuple[jax.Array, jax.Array]:
    """The inputs and targets of associative recall (NTM, 4.3).

    Args:
      pattern: L items of m vectors; ``asked``, below L - 1, is the one that is shown again.
      steps: T, (L + 2) (m + 1) or more.
      item_steps: m.

    Returns:
      Inputs ``[T, bits + 2]``; targets ``[T, bits + 1]``: bits, whether they are due.
    """
    bits, length, cue = pattern
    time = jnp.arange(steps)
    item, step = time // (item_steps + 1), time % (item_steps + 1) - 1
    in_list, is_cue = item < length, item == length
    index = jnp.where(in_list, item, cue) * item_steps + step
    input_bits = _pattern_rows(bits, index, (in_list | is_cue) & (step >= 0))
    query = (step < 0) & (is_cue | (item == length + 1))
    inputs = [input_bits, ((step < 0) & in_list)[:, None], query[:, None]]
    place = time - ((length + 1) * (item_steps + 1) + 1)
    due = (place >= 0) & (place < item_steps)
    answer_bits = _pattern_rows(bits, (cue + 1) * item_steps + place, due)
    return _joined(inputs), _joined([answer_bits, due[:, None]])


def _pattern_rows(bits: jax.Array, index: jax.Array, mask: jax.Array) -> jax.Array:
    """Rows of a pattern by number, zeros elsewhere, ``[T, bits]``."""
    rows = bits[jnp.clip(index, 0, len(bits) - 1)]
    return jnp.where(mask[:, None], rows, 0)


def _joined(channels: list[jax.Array]) -> jax.Array:
    return jnp.concatenate([channel.astype(jnp.float32) for channel in channels], axis=-1)


def is_held_out(bits: jax.Array) -> jax.Array:
    """Whether a pattern ``[steps, bits]`` is one of those that are never trained on.

    A weighted sum of its bits decides, so that there are some of both kinds however short a
    pattern is. Zeros alone, which are like no other pattern, are not held out.
    """
    weights = jnp.arange(bits.size, dtype=jnp.int32) % (_ONE_IN - 1) + 1
    return jnp.sum(bits.reshape(-1).astype(jnp.int32) * weights) % _ONE_IN == 1


class Raw(nn.Module):
    """Inputs are features already."""

    def __call__(self, inputs: jax.Array) -> jax.Array:
        return inputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecallTask(RecallSettings, SupervisedTask):
    """Recall of patterns of random bits.

    The held-out set's patterns are never trained on: one in eight is held out.
    """

    name = "recall"

    @property
    def repeats(self) -> bool:
        """Whether this is repeat copy."""
        return self.layout == "repeat_copy"

    @property
    def steps(self) -> int:
        """T, of the longest sequence."""
        if self.repeats:
            return self.max_length * (self.max_repeats + 1) + 3
        return (self.max_length + 2) * (self.item_steps + 1)

    @property
    def channels(self) -> int:
        """The width of an answer: the bits and, in repeat copy, the end mark."""
        return self.bits + self.repeats

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (
            Metric("bit_accuracy", True, 0.5, "chance"),
            Metric("sequence_accuracy", True, 0.0, "chance"),
            Metric("loss", False, math.log(2), "baseline"),
        )

    def check(self) -> None:
        for minimum, maximum in (("min_length", "max_length"), ("min_repeats", "max_repeats")):
            if getattr(self, minimum) > getattr(self, maximum):
                raise UserError(
                    f"--{minimum} must be at most --{maximum}, got {getattr(self, minimum)} and "
                    f"{getattr(self, maximum)}."
                )
        if not self.repeats and self.min_length < 2:
            raise UserError(
                "--min_length must be at least 2 in associative recall: an item comes after the "
                f"one that is shown, got {self.min_length}."
            )

    def module(self, recurrent: RNN | Stack, model: ModelSettings) -> nn.Module:
        return SequenceModel(
            encoder=Raw(), recurrent=recurrent, decoder=Decoder((*model.decoder, self.channels))
        )

    def load(self) -> Batch:
        """The held-out set."""
        keys = jax.random.split(threefry_key(_HELD_OUT_KEY), self.held_out_sequences)
        return self._sample_batch(keys, held_out=True)

    def sets(self, loaded: Batch) -> dict[str, Batch]:
        return {"held_out": loaded}

    def batch(self, loaded: Batch, key: jax.Array, step: jax.Array, size: int) -> Batch:
        del loaded
        return self._sample_batch(
            jax.random.split(jax.random.fold_in(key, step), size), held_out=False
        )

    def score(self, outputs: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        """Scores of logits ``[T, B, channels]``: the loss is each sequence's mean over all that is
        due; the DNC's authors' cost is its sum."""
        answer, due = batch.targets[..., :-1], batch.targets[..., -1] > 0
        p = jax.nn.log_sigmoid(outputs) * answer + jax.nn.log_sigmoid(-outputs) * (1 - answer)
        losses = jnp.where(due[..., None], -p, 0).sum(axis=(0, 2))
        correct = ((outputs > 0) == (answer > 0)) | ~due[..., None]
        bits = due & (answer[..., -1] == 0) if self.repeats else due  # the end mark is none
        hits = jnp.where(bits[..., None], correct[..., : self.bits], False)
        return {
            "loss": losses / (due.sum(axis=0) * self.channels),
            "bit_accuracy": hits.sum(axis=(0, 2)) / (bits.sum(axis=0) * self.bits),
            "sequence_accuracy": correct.all(axis=(0, 2)).astype(jnp.float32),
        }

    def _sample_batch(self, keys: jax.Array, *, held_out: bool) -> Batch:
        def sequence(key: jax.Array) -> tuple[jax.Array, jax.Array]:
            pattern = self._pattern(key, held_out)
            if self.repeats:
                return repeat_copy(pattern, self.steps)
            return associative(pattern, self.steps, self.item_steps)

        return Batch(*jax.vmap(sequence, out_axes=1)(keys))

    def _pattern(self, key: jax.Array, held_out: bool) -> Pattern:
        """A pattern of the wanted kind: its bits are drawn again until they are. One of fewer than
        ``_FEWEST_BITS`` bits may be of either kind."""
        length_key, request_key, bits_key = jax.random.split(key, 3)
        length = jax.random.randint(length_key, (), self.min_length, self.max_length + 1)
        minimum, maximum = (self.min_repeats, self.max_repeats) if self.repeats else (0, length - 2)
        request = jax.random.randint(request_key, (), minimum, maximum + 1)
        rows_per_item = 1 if self.repeats else self.item_steps
        shape = (self.max_length * rows_per_item, self.bits)
        mask = (jnp.arange(shape[0]) < length * rows_per_item)[:, None]

        def draw(attempt: jax.Array) -> jax.Array:
            sample = jax.random.bernoulli(jax.random.fold_in(bits_key, attempt), 0.5, shape)
            return jnp.where(mask, sample, False)

        def is_wrong_kind(state: tuple[jax.Array, jax.Array]) -> jax.Array:
            large = length * rows_per_item * self.bits >= _FEWEST_BITS
            return large & (is_held_out(state[1]) != held_out)

        def next_attempt(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return state[0] + 1, draw(state[0] + 1)

        start = (jnp.int32(0), draw(jnp.int32(0)))
        bits = jax.lax.while_loop(is_wrong_kind, next_attempt, start)[1]
        return Pattern(bits.astype(jnp.float32), length, request)
