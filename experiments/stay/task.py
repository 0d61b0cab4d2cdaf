"""Whether a stay is longer than a week, from what was measured in its first 48 hours.

Letters: N stays, T times of measurement, B batch, V = 12 variables.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from experiments.datasets import measured, stays
from experiments.records.reporting import note
from experiments.settings.errors import UserError
from experiments.settings.metrics import Metric
from experiments.settings.model import ModelSettings
from experiments.stay import generated
from experiments.stay.settings import StaySettings
from experiments.training.models import Decoder, SequenceModel, wide
from experiments.training.permutation import batch_of_epoch
from experiments.training.state import threefry_key
from experiments.training.supervised import Batch, SupervisedTask
from recurrent_gates import GRUD, RNN, Stack, gru_d_inputs
from recurrent_gates.initializers import torch_linear_bias, torch_linear_kernel

VARIABLES = len(measured.VARIABLES)
FEATURES = 2 * VARIABLES + 1
_GENERATED_KEY = 0x57A4  # of the held-out stays: the same for all seeds and cells
_GENERATED_PASS = 12_800  # stays to train on that are called a pass; each is drawn once
_GENERATED_VALIDATION, _GENERATED_TEST = 2_000, 4_000


def features(inputs: jax.Array) -> jax.Array:
    """The 25 features of a time (GATO B.1): values, which of them are missing, the time.

    Args:
      inputs: ``[..., 13]``: values, NaN where there is none, and the time, NaN in the padding.

    Returns:
      ``[..., 25]``, without NaN.
    """
    missing = jnp.isnan(inputs)
    numbers = jnp.where(missing, 0, inputs)
    indicators = missing[..., :-1].astype(inputs.dtype)
    return jnp.concatenate([numbers[..., :-1], indicators, numbers[..., -1:]], axis=-1)


class VitalsEncoder(nn.Module):
    """``[..., 13]`` -> ``[..., 25]``: a learned linear map of the features, and tanh (GATO B.1)."""

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        dense = nn.Dense(
            FEATURES,
            kernel_init=torch_linear_kernel,
            bias_init=torch_linear_bias(FEATURES),
        )
        return jnp.tanh(dense(features(inputs)))


class Unchanged(nn.Module):
    """Inputs as they are."""

    def __call__(self, inputs: jax.Array) -> jax.Array:
        return inputs


class DecayModel(SequenceModel):
    """A model whose cell is a ``GRUD``: that reads values, and not an embedding that mixes them.

    Inputs are those of ``VitalsEncoder``, ``[T, B, 13]``.
    """

    def __call__(self, inputs: jax.Array, **options: Any) -> Any:
        """As of ``SequenceModel``."""
        return super().__call__(self._read(inputs), **options)

    def encoded(self, inputs: jax.Array) -> jax.Array:
        """As of ``SequenceModel``."""
        return super().encoded(self._read(inputs))

    def _read(self, inputs: jax.Array) -> jax.Array:
        return gru_d_inputs(inputs[..., :-1], inputs[..., -1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class StayTask(StaySettings, SupervisedTask):
    """Whether a stay is a long one.

    Stays differ in how many times of measurement they have. They end at the last step of a batch;
    the padding before them is masked, so that it changes nothing, and the model answers once,
    after the last time. Every stay weighs the same. An epoch is a pass over the training stays
    in an order of its own, decided by the seed; a last batch that would not be full is left out.
    """

    name = "stay"
    has_missing_values = True

    @property
    def metrics(self) -> tuple[Metric, ...]:
        share = self._long_share
        name = "chance" if self.generated else "majority"
        entropy = -sum(p * math.log(p) for p in (share, 1 - share) if p)
        best_metrics = [Metric("share_of_best", True, 0.0, "chance")] if self.generated else []
        accuracy = [Metric("accuracy", True, max(share, 1 - share), name), *best_metrics]
        ranking = [Metric("auroc", True, 0.5, "chance"), Metric("auprc", True, share, "chance")]
        # Two of three stays of CinC 2012 are long, so that accuracy tells little: ours.
        first, second = (ranking, accuracy) if self.dataset == "cinc2012" else (accuracy, ranking)
        return *first, *second, Metric("loss", False, entropy, "chance")

    @property
    def generated(self) -> bool:
        """Whether the stays are drawn, and the best answer is known."""
        return self.dataset == "generated"

    @functools.cached_property
    def content(self) -> str | None:
        """A digest of the stays in files, which no setting tells."""
        if self.generated or self.data_dir is None:
            return None
        digest = hashlib.sha256()
        for array in self._stays:
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()[:16]

    @property
    def examples(self) -> int:
        """How many stays there are in a pass."""
        return _GENERATED_PASS if self.generated else self.sizes[0]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """How many stays each part has; without files, as they were published."""
        if self.generated:
            return _GENERATED_PASS, _GENERATED_VALIDATION, _GENERATED_TEST
        if self.data_dir is None:
            return stays.sizes(stays.SOURCES[self.dataset].published_count)
        return stays.sizes(len(self._stays.long_stay))

    @property
    def _stays(self) -> measured.Stays:
        return _read(self.dataset, self.data_dir, self.stay)

    @property
    def _long_share(self) -> float:
        """How many of the test stays are long, of one."""
        if self.generated:
            return 0.5
        if self.data_dir is None:
            source = stays.SOURCES[self.dataset]
            return source.published_long / source.published_count
        return float(self._stays.long_stay[stays.split(self._stays)[2]].mean())

    def module(self, recurrent: RNN | Stack, model: ModelSettings) -> nn.Module:
        decays = isinstance(recurrent, RNN) and isinstance(recurrent.cell, GRUD)
        kind, encoder = (DecayModel, Unchanged) if decays else (SequenceModel, VitalsEncoder)
        return kind(
            encoder=encoder(), recurrent=recurrent, decoder=Decoder((*model.decoder, 1)), outputs=1
        )

    def read(self) -> dict[str, Batch]:
        """All stays.

        Returns:
          ``"train"``, of stays from files: float32 ``[N, T, 13]`` and int32 ``[N]``;
          ``"validation"`` and ``"test"``: float32 ``[T, N, 13]`` and int32 ``[1, N]``.

        Raises:
          UserError: if files are missing or damaged, or the stays of a held-out part are all
            long or all short.
        """
        if self.generated:
            return jax.jit(self.load)()
        parts = stays.split(self._stays)
        scale = stays.Scale.of(self._stays, parts[0])

        def batch(numbers: np.ndarray) -> Batch:
            inputs: Any = stays.dense(self._stays, numbers, self.longest, scale)
            labels: Any = self._stays.long_stay[numbers].astype(np.int32)
            return Batch(inputs, labels)

        def held_out(name: str, numbers: np.ndarray) -> Batch:
            inputs, labels, _ = batch(numbers)
            if len(np.unique(labels)) < 2:
                raise UserError(
                    f"--data_dir={self.data_dir} has too few stays: those of the {name} part must "
                    f"be some long and some short, but it has {len(labels)} of one kind."
                )
            sequences: Any = np.ascontiguousarray(np.swapaxes(inputs, 0, 1))
            return Batch(sequences, labels[None])

        train, validation, test = parts
        return {
            "train": batch(train),
            "validation": held_out("validation", validation),
            "test": held_out("test", test),
        }

    def load(self) -> dict[str, Batch]:
        """What ``read`` returns: drawn, or the shapes of what is in files."""
        if self.generated:
            keys = jax.random.split(threefry_key(_GENERATED_KEY))
            return {
                "validation": _sample_batch(keys[0], _GENERATED_VALIDATION),
                "test": _sample_batch(keys[1], _GENERATED_TEST),
            }
        train, validation, test = self.sizes

        def held_out(count: int) -> Batch:
            inputs = jnp.zeros((self.longest, count, VARIABLES + 1), jnp.float32)
            return Batch(inputs, jnp.zeros((1, count), jnp.int32))

        inputs = jnp.zeros((train, self.longest, VARIABLES + 1), jnp.float32)
        return {
            "train": Batch(inputs, jnp.zeros(train, jnp.int32)),
            "validation": held_out(validation),
            "test": held_out(test),
        }

    def sets(self, loaded: dict[str, Batch]) -> dict[str, Batch]:
        return {"validation": loaded["validation"], "test": loaded["test"]}

    def batch(self, loaded: dict[str, Batch], key: jax.Array, step: jax.Array, size: int) -> Batch:
        if self.generated:
            return _sample_batch(jax.random.fold_in(key, step), size)
        inputs, labels, _ = loaded["train"]
        indices = batch_of_epoch(key, step, size, len(inputs))
        return Batch(jnp.swapaxes(inputs[indices], 0, 1), labels[indices][None])

    def masks(self, batch: Batch) -> dict[str, jax.Array]:
        return {"valid": ~jnp.isnan(batch.inputs[..., -1])}

    def score(self, outputs: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        """Cross entropy and hits of log odds ``[1, B, 1]``."""
        logit, long_stay = wide(outputs[-1, :, 0]), batch.targets[-1]
        loss = jax.nn.softplus(jnp.where(long_stay == 1, -logit, logit))
        hits = (logit > 0) == (long_stay == 1)
        return {"loss": loss, "accuracy": hits.astype(jnp.float32)}

    def rows(self, outputs: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        """What a stay's scores need on the host, each ``[B]``: its log odds, whether it is long
        and counts, and the log odds of the best rule, if that is known."""
        counts = jnp.ones(batch.targets.shape[1:], bool) if batch.counts is None else batch.counts
        rows = {
            "logit": wide(outputs[-1, :, 0]),
            "long_stay": batch.targets[-1],
            "counts": counts.reshape(-1),
        }
        return rows | ({"best": generated.log_odds(batch.inputs)} if self.generated else {})

    def scores(
        self, sums: Mapping[str, tuple[np.ndarray, np.ndarray]], outputs: list[Any]
    ) -> dict[str, Any]:
        scores = super().scores(sums, outputs)
        columns = {name: np.concatenate([rows[name] for rows in outputs]) for name in outputs[0]}
        counts = columns.pop("counts").astype(bool)
        rows = {name: column[counts] for name, column in columns.items()}
        long_stay = rows["long_stay"] == 1
        scores |= ranking(rows["logit"], long_stay)
        if self.generated:
            best = np.mean((rows["best"] > 0) == long_stay)
            scores["share_of_best"] = (scores["accuracy"] - 0.5) / (best - 0.5)
        return scores


def ranking(logit: np.ndarray, long_stay: np.ndarray) -> dict[str, float]:
    """Areas under the receiver operating characteristic and under precision over recall.

    Args:
      logit: log odds ``[N]``.
      long_stay: what is to be told, bool ``[N]``.

    Returns:
      ``{"auroc", "auprc"}``; NaN where a log odds is none, or all stays are alike.
    """
    from sklearn.metrics import average_precision_score, roc_auc_score

    if not np.isfinite(logit).all() or len(np.unique(long_stay)) < 2:
        return {"auroc": math.nan, "auprc": math.nan}
    return {
        "auroc": float(roc_auc_score(long_stay, logit)),
        "auprc": float(average_precision_score(long_stay, logit)),
    }


def _sample_batch(key: jax.Array, count: int) -> Batch:
    inputs, long_stay = generated.draw(key, count)
    return Batch(inputs, long_stay[None])


@functools.lru_cache(maxsize=2)
def _read(dataset: str, data_dir: str | None, stay: str) -> measured.Stays:
    return stays.load(dataset, data_dir, stay, note)
