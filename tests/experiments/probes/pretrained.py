"""A frozen encoder with given weights, and a score that the host finishes.

Letters: T steps, B batch.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from sklearn.metrics import roc_auc_score

from experiments.settings.metrics import Metric
from experiments.training.models import Decoder, SequenceModel
from experiments.training.supervised import Batch, SupervisedTask

_KEY = 0x94E
WEIGHTS = {
    "kernel": np.array([[1.0, -1.0, 0.5], [0.5, 0.25, -2.0]], np.float32),
    "bias": np.array([0.0, 0.125, -0.25], np.float32),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainedTask(SupervisedTask):
    """Whether the sum of a noisy sequence is positive."""

    steps: int = 4
    held_out_examples: int = 29

    name = "pretrained"
    output_axes = 0

    @property
    def metrics(self):
        return (Metric("auroc", True, 0.5, "chance"), Metric("loss", False, np.log(2), "chance"))

    def module(self, recurrent, model):
        del model
        return SequenceModel(nn.Dense(3), recurrent, Decoder((1,)), outputs=1)

    def initial(self, params):
        return params | {"encoder": jax.tree.map(jnp.asarray, WEIGHTS)}

    def trainable(self, params):
        return {
            name: jax.tree.map(lambda _, trained=name != "encoder": trained, branch)
            for name, branch in params.items()
        }

    def load(self):
        return {"held_out": self._draw(jax.random.key(_KEY), self.held_out_examples)}

    def _draw(self, key, size):
        of_inputs, of_noise = jax.random.split(key)
        inputs = jax.random.normal(of_inputs, (self.steps, size, 2))
        sums = inputs.sum(axis=(0, 2)) + jax.random.normal(of_noise, (size,))
        return Batch(inputs, (sums > 0)[None].astype(jnp.float32))

    def sets(self, loaded):
        return loaded

    def batch(self, loaded, key, step, size):
        return self._draw(jax.random.fold_in(key, step), size)

    def score(self, outputs, batch):
        logits = outputs[0, :, 0]
        return {"loss": jax.nn.softplus(logits) - batch.targets[0] * logits}

    def loss(self, apply, params, window, stream, train):
        outcome = super().loss(apply, params, window, stream, train)
        if train:
            return outcome
        rows = {
            "logits": apply(params, window.inputs)[0, :, 0],
            "labels": window.targets[0],
            "counts": window.counts[0],
        }
        return outcome._replace(outputs=rows)

    def scores(self, sums, outputs):
        rows = {name: np.concatenate([of[name] for of in outputs]) for name in outputs[0]}
        counts = rows["counts"]
        auroc = roc_auc_score(rows["labels"][counts], rows["logits"][counts])
        return super().scores(sums, outputs) | {"auroc": auroc}
