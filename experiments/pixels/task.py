"""Images as sequences of pixels, one step each, with the class due after the last one.

Letters: N images, T pixels of an image, B batch, C channels.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from experiments import datasets
from experiments.pixels.settings import PixelsSettings
from experiments.settings.errors import UserError
from experiments.settings.metrics import Metric
from experiments.settings.model import ModelSettings
from experiments.training.models import Decoder, SequenceModel, wide
from experiments.training.permutation import batch_of_epoch
from experiments.training.supervised import Batch, SupervisedTask
from recurrent_gates import RNN, Stack

_SOURCES = {
    "digits": "digits",
    "smnist": "mnist",
    "pmnist": "mnist",
    "fashion": "fashion_mnist",
    "scifar10": "cifar10",
}
_VALIDATION_SEED = 42


def bit_reversal(count: int) -> np.ndarray:
    """The permutation of ``count`` indices by their reversed binary digits (UR-gates, App. D.5).

    For counts that are no power of two: that of the next one, without what is too large.

    Returns:
      int64 ``[count]``.
    """
    bits = max(1, (count - 1).bit_length())
    indices = np.arange(1 << bits)
    reversal = np.zeros_like(indices)
    for bit in range(bits):
        reversal |= (indices >> bit & 1) << (bits - 1 - bit)
    return reversal[reversal < count]


class PixelEncoder(nn.Module):
    """Pixels uint8 ``[T, B, C]`` -> float32 in [0, 1].

    Attributes:
      maximum: the largest value of a pixel.
    """

    maximum: int

    def __call__(self, pixels: jax.Array) -> jax.Array:
        return pixels.astype(jnp.float32) / jnp.float32(self.maximum)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PixelsTask(PixelsSettings, SupervisedTask):
    """The class of an image, read pixel by pixel, all channels of a pixel at once.

    An epoch is a pass over the training images in an order of its own, decided by the seed; a
    last batch that would not be full is left out. The class is read from the last output: in
    UR-gates the head acts on every output by itself, and which of them count is not said (ours:
    the last one alone). Pixels are divided by their maximum, 255 (ours; h-detach's code does so).
    """

    name = "pixels"

    @property
    def source(self) -> datasets.Source:
        """The published set."""
        return datasets.SOURCES[_SOURCES[self.dataset]]

    @property
    def validation(self) -> int:
        """How many images are for validation."""
        return round(sum(self.source.train) * self.validation_share)

    @property
    def examples(self) -> int:
        """How many images there are to train on."""
        return sum(self.source.train) - self.validation

    @property
    def steps(self) -> int:
        """T."""
        return math.prod(self.source.shape[:2])

    @property
    def metrics(self) -> tuple[Metric, ...]:
        classes = len(self.source.train)
        return (
            Metric("accuracy", True, 1 / classes, "chance"),
            Metric("loss", False, math.log(classes), "chance"),
        )

    def check(self) -> None:
        if not 0 < self.validation < sum(self.source.train):
            raise UserError(
                "--validation_share: a share of the images, and not all, must be for validation."
            )

    def module(self, recurrent: RNN | Stack, model: ModelSettings) -> nn.Module:
        return SequenceModel(
            encoder=PixelEncoder(self.source.maximum),
            recurrent=recurrent,
            decoder=Decoder((*model.decoder, len(self.source.train))),
            outputs=1,
        )

    def order(self) -> np.ndarray:
        """Which pixel is read at each step, ``[T]``."""
        if self.permutation == "bit_reversal":
            return bit_reversal(self.steps)
        if self.permutation == "random":
            return np.random.RandomState(self.permutation_seed).permutation(self.steps)
        return np.arange(self.steps)

    def split(self) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of the training and of the validation images."""
        numbers = np.arange(sum(self.source.train))
        if not self.validation_last:
            numbers = np.random.RandomState(_VALIDATION_SEED).permutation(numbers)
        train, validation = np.split(numbers, [self.examples])
        return train, validation

    def read(self) -> dict[str, Batch]:
        """All images from files.

        Returns:
          ``"train"``: uint8 ``[N, T, C]`` and int32 ``[N]``; ``"validation"`` and ``"test"``:
          uint8 ``[T, N, C]`` and int32 ``[1, N]``.
        """
        images = datasets.load(_SOURCES[self.dataset], self.data_dir)
        order = self.order()

        def sequences(pictures: np.ndarray, labels: np.ndarray) -> Batch:
            pixels: Any = pictures.reshape(len(pictures), self.steps, -1)[:, order]
            numbers: Any = labels.astype(np.int32)
            return Batch(pixels, numbers)

        def held_out(batch: Batch) -> Batch:
            inputs: Any = np.ascontiguousarray(np.swapaxes(batch.inputs, 0, 1))
            return Batch(inputs, batch.targets[None])

        train, validation = self.split()
        train_images, labels = images.train_images, images.train_labels
        return {
            "train": sequences(train_images[train], labels[train]),
            "validation": held_out(sequences(train_images[validation], labels[validation])),
            "test": held_out(sequences(images.test_images, images.test_labels)),
        }

    def load(self) -> dict[str, Batch]:
        """The shapes of what ``read`` returns."""
        channels = self.source.shape[2]

        def held_out(count: int) -> Batch:
            inputs = jnp.zeros((self.steps, count, channels), jnp.uint8)
            return Batch(inputs, jnp.zeros((1, count), jnp.int32))

        images = jnp.zeros((self.examples, self.steps, channels), jnp.uint8)
        return {
            "train": Batch(images, jnp.zeros(self.examples, jnp.int32)),
            "validation": held_out(self.validation),
            "test": held_out(sum(self.source.test)),
        }

    def sets(self, loaded: dict[str, Batch]) -> dict[str, Batch]:
        return {"validation": loaded["validation"], "test": loaded["test"]}

    def batch(self, loaded: dict[str, Batch], key: jax.Array, step: jax.Array, size: int) -> Batch:
        images, labels, _ = loaded["train"]
        indices = batch_of_epoch(key, step, size, len(images))
        return Batch(jnp.swapaxes(images[indices], 0, 1), labels[indices][None])

    def score(self, outputs: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        logits, label = wide(outputs[-1]), batch.targets[-1]
        log_p = jax.nn.log_softmax(logits)
        loss = -jnp.take_along_axis(log_p, label[:, None], axis=-1)[:, 0]
        hits = jnp.argmax(logits, axis=-1) == label
        return {"loss": loss, "accuracy": hits.astype(jnp.float32)}
