"""Rows that the host reads: each is a function of seed, step and number.

Letters: T steps, B batch.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from experiments.settings.metrics import Metric
from experiments.training.models import Decoder, SequenceModel
from experiments.training.task import BaseTask, Outcome

STEPS = 4  # T


class Rows:
    """Sequences whose label is whether their sum is positive.

    Attributes:
      reads: (seed, step, rows) of every training window that was read.
    """

    def __init__(self):
        self.reads = []

    def read(self, seed, step, rows):
        self.reads.append((seed, step, tuple(rows.tolist())))
        return self._of([(0, seed, step, row) for row in rows])

    def read_held_out(self, name, index, rows):
        assert name == "held_out"
        return self._of([(1, index, row) for row in rows])

    def _of(self, numbers):
        drawn = [np.random.default_rng(entry).normal(size=(STEPS, 1)) for entry in numbers]
        inputs = np.stack(drawn, axis=1).astype(np.float32)
        return {"inputs": inputs, "labels": (inputs.sum(axis=(0, 2)) > 0).astype(np.int32)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostFedTask(BaseTask):
    """The sign of a sum."""

    name = "host_fed"
    axes: ClassVar = {"inputs": 1, "labels": 0}

    @property
    def metrics(self):
        return (Metric("accuracy", True, 0.5, "chance"), Metric("loss", False, np.log(2), "chance"))

    def module(self, recurrent, model):
        del model
        return SequenceModel(nn.Dense(3), recurrent, Decoder((2,)), outputs=1)

    def example(self):
        return (jnp.zeros((1, 1, 1)),)

    def data(self):
        return Rows()

    def shapes(self, rows):
        return {
            "inputs": jax.ShapeDtypeStruct((STEPS, rows, 1), jnp.float32),
            "labels": jax.ShapeDtypeStruct((rows,), jnp.int32),
        }

    def draw(self, act, data, stream, key, step, rows):
        del act, key, step, rows
        return data, stream

    def loss(self, apply, params, window, stream, train):
        del train
        logits, labels = apply(params, window["inputs"])[0], window["labels"]
        log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1)
        hits = (jnp.argmax(logits, axis=-1) == labels).sum(dtype=jnp.float32)
        total = (-log_p.sum(), len(labels))
        return Outcome(total, {"loss": total, "accuracy": (hits, len(labels))}, stream)

    def held_out(self, data, devices):
        del data, devices
        return {"held_out": Windows()}


class Windows:
    """Three windows, which the host reads too."""

    windows = 3
    rows = 16

    def start(self, fresh, data, rows):
        del fresh, data, rows
        return ()

    def draw(self, act, data, stream, index, rows):
        del act, index, rows
        return data, stream
