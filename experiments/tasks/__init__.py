"""What a task offers the training loop: batches as pure functions of a key, and a score.

Letters: T time, B batch. Every leaf of a batch is time-major, ``[time, batch, ...]``.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from flax import linen as nn


class Batch(NamedTuple):
    """Inputs ``[T, B, ...]`` and targets ``[T or fewer, B, ...]``."""

    inputs: jax.Array
    targets: jax.Array


class Metric(NamedTuple):
    """A held-out score: its name, whether more is better, and what no learning at all scores."""

    name: str
    higher_is_better: bool
    baseline: float
    baseline_name: str


class Task(Protocol):
    """A frozen dataclass of plain settings with these methods."""

    @property
    def name(self) -> str:
        """The binary's name."""

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """What ``score`` reports besides the training loss; the first one is the headline."""

    def check(self) -> None:
        """Raises ``UserError`` on settings that cannot be."""

    def module(self, recurrent: nn.Module, embedding: int, decoder: tuple[int, ...]) -> nn.Module:
        """The model around a recurrent layer, which it has as its field ``recurrent``.

        It is called with a batch's inputs, carry functions and their noise.
        """

    def load(self) -> Any:
        """Arrays that stay on the devices for the whole run, handed to the methods below."""

    def held_out(self, data: Any) -> dict[str, Batch]:
        """The evaluation sets, equal for all seeds and cells.

        Either ``{"held_out": ...}``, or ``{"validation": ..., "test": ...}``: then the
        parameters that were best on validation are tested once, at the end.
        """

    def batch(self, data: Any, key: jax.Array, step: jax.Array, size: int) -> Batch:
        """The training batch of a step; ``key`` belongs to the seed, not to the step."""

    def score(self, outputs: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        """``{"loss": [B], metric name: [B], ...}``, one value per example."""


@runtime_checkable
class FromFiles(Protocol):
    """A task whose arrays come from files; its ``load`` is only asked for their shapes."""

    def read(self) -> Any:
        """What ``load`` has the shapes of, NumPy arrays.

        Raises:
          UserError: if files are missing or damaged.
        """
