"""What a task offers the training loop.

A task is a frozen dataclass of plain settings with the methods of ``Task``. A training step is

    window, stream = task.draw(act, data, stream, key, step, rows)
    outcome = task.loss(apply, params, window, stream, train=True)

and the stream of the outcome is that of the next step: the state that a language model carries
from window to window, a cursor, a curriculum, an environment; ``()`` where there is none.
Totals and weights are added over devices and windows and divided last, so that a device with
more padding, or a shorter window, counts for less.

Every tree of a task (windows, streams, held-out outputs) says which axis of each leaf is the
batch: a tree of axes, or a prefix of one, as ``jax.vmap`` takes it; None for a leaf that every
device has whole. Leaves are plain arrays (of a PRNG key its ``jax.random.key_data``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from flax import linen as nn

from experiments.machine.mesh import Rows
from experiments.settings.metrics import Metric
from experiments.settings.model import ModelSettings

Total = tuple[Any, Any]
"""A total and its weight: a scalar array, and another or, equal on all devices, a number."""

Apply = Callable[..., Any]
"""``apply(params, *args, **kwargs)``: the model, with what acts on it in this step."""


Fresh = Callable[[int], Any]
"""``fresh(rows)``: the carry of the recurrent layers before the first step, ``[rows, F]``."""


class Outcome(NamedTuple):
    """What a window gave, on one device's rows.

    Attributes:
      loss: the total to differentiate, and its weight.
      sums: a total and a weight for each score.
      stream: what goes on to the next step.
      outputs: what the host needs of each row to finish a score; at evaluation only.
    """

    loss: Total
    sums: Mapping[str, Total]
    stream: Any = ()
    outputs: Any = ()


class Resident(NamedTuple):
    """Data that stay on every device for the whole run, a tree of arrays."""

    arrays: Any


class Streamed(Protocol):
    """Data that the host reads window by window, by number: resuming is exact.

    What is read has the axes of the task's windows and is handed to ``draw`` as ``data``.
    """

    def read(self, seed: int, step: int, rows: np.ndarray) -> Any:
        """The window of a training step, NumPy arrays of these rows of it alone."""

    def read_held_out(self, name: str, index: int, rows: np.ndarray) -> Any:
        """The same of a held-out set."""

    # It may also have ``batched(rows) -> Streamed``: itself, for windows of so many rows.


class HeldOut(Protocol):
    """A held-out set: windows in order, equal for all seeds and cells."""

    windows: int
    """How many windows there are."""
    rows: int
    """How many rows each has."""

    def start(self, fresh: Fresh, data: Any, rows: Rows) -> Any:
        """The stream before the first window, with the axes of the task's streams."""

    def draw(self, act: Apply, data: Any, stream: Any, index: jax.Array, rows: Rows) -> Any:
        """``(window, stream)`` of the window of a number."""


class Task(Protocol):
    """See the module. ``BaseTask`` has what most tasks leave as it is."""

    axes: Any
    """The batch axis of every leaf of a window."""
    stream_axes: Any
    """The batch axis of every leaf of a stream."""
    output_axes: Any
    """The batch axis of every leaf of an outcome's outputs."""
    unit: str
    """What progress and rates are counted in: ``"examples"``, ``"tokens"``, ``"frames"``."""

    @property
    def name(self) -> str:
        """The binary's name."""

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """What is reported of a held-out set; the first one is the headline."""

    @property
    def units_per_row(self) -> float:
        """How many units a row of a window has, on average."""

    @property
    def train_scores(self) -> tuple[str, ...]:
        """Which scores of training windows are reported beside the loss."""

    def check(self) -> None:
        """Raises ``UserError`` on settings that cannot be."""

    def module(self, recurrent: nn.Module, model: ModelSettings) -> nn.Module:
        """The model around a recurrent layer, which it has as its field ``recurrent``.

        It takes a ``models.Pass`` as its keyword ``during``.
        """

    def example(self) -> tuple[Any, ...]:
        """Arguments of the model's first call, as small as can be."""

    def initial(self, params: Any) -> Any:
        """Parameters to start from, made from drawn ones: given weights put in their places."""

    def trainable(self, params: Any) -> Any:
        """A tree of bools: which parameters are trained; None: all of them."""

    def data(self) -> Resident | Streamed:
        """The data; files are read here, once.

        Raises:
          UserError: if files are missing or damaged.
        """

    def shapes(self, rows: int) -> Any:
        """The shapes and dtypes of what ``draw`` gets as ``data``, without reading files.

        Args:
          rows: of a window, where the host reads them.
        """

    def start(self, fresh: Fresh, data: Any, key: jax.Array, rows: Rows) -> Any:
        """The stream before the first step, of one seed.

        Args:
          fresh: gives the carry of the recurrent layers.
          data: the resident arrays; not to be used where the host reads the data.
          key: of the seed; another one than that of ``draw``.
          rows: the rows of the batch that are wanted.
        """

    def draw(
        self, act: Apply, data: Any, stream: Any, key: jax.Array, step: jax.Array, rows: Rows
    ) -> tuple[Any, Any]:
        """The window of a step and the stream after it, of these rows alone.

        Args:
          act: the model with the parameters of now, for tasks that make their own data.
          data: the resident arrays, or the window that the host has read.
          stream: of the step before.
          key: of the seed, not of the step.
          step: its number, int32.
          rows: the rows of the batch that are wanted; what they hold must not depend on it.
        """

    def loss(self, apply: Apply, params: Any, window: Any, stream: Any, train: bool) -> Outcome:
        """The outcome of a window."""

    # A task may also have ``update(descend, learned, window, key) -> (learned, descent)``, an
    # update of its own: see ``update.Update``; and ``rate_factor(window)``, a factor on the
    # learning rate of a step, float32 scalar and equal on all devices. One whose model has tables
    # of words that devices can share has ``word_axes(params)``, the axis of the words of every
    # parameter or None, and ``split_words(module, parts)``, the model of a device that has an
    # equal part of them: see ``machine.words``.

    def adapt(self, stream: Any, loss: jax.Array, weight: Any) -> Any:
        """The stream that goes on to the next step, after the update.

        What every device has whole must come out equal on all of them; ``draw`` and ``loss`` see
        the rows of one, so what follows from a loss, such as a curriculum, is decided here.

        Args:
          stream: of the outcome.
          loss: over all devices, float32 scalar.
          weight: of that loss, over all devices.
        """

    def held_out(self, data: Any, devices: int) -> Mapping[str, HeldOut]:
        """The evaluation sets, by name.

        Either ``{"held_out": ...}``, or ``{"validation": ..., "test": ...}``: then the
        parameters that were best on validation are tested once, at the end.

        Args:
          data: shapes, or arrays.
          devices: how many share a window's rows, if these divide.
        """

    def scores(self, sums: Mapping[str, tuple[np.ndarray, np.ndarray]], outputs: list[Any]) -> Any:
        """``{metric: value}`` of a held-out set, on the host, of one seed.

        Args:
          sums: totals and weights, added over devices and windows.
          outputs: of every window, whole.
        """


class BaseTask:
    """What most tasks leave as it is."""

    axes: Any = 0
    stream_axes: Any = 0
    output_axes: Any = 0
    unit = "examples"
    train_scores: tuple[str, ...] = ()

    @property
    def units_per_row(self) -> float:
        """One."""
        return 1.0

    def check(self) -> None:
        """Nothing to check beside the ranges of the settings."""

    def initial(self, params: Any) -> Any:
        """The drawn parameters."""
        return params

    def trainable(self, params: Any) -> Any:
        """All."""
        del params

    def start(self, fresh: Fresh, data: Any, key: jax.Array, rows: Rows) -> Any:
        """No stream."""
        del fresh, data, key, rows
        return ()

    def adapt(self, stream: Any, loss: jax.Array, weight: Any) -> Any:
        """As it is."""
        del loss, weight
        return stream

    def scores(self, sums: Mapping[str, tuple[np.ndarray, np.ndarray]], outputs: list[Any]) -> Any:
        """Totals over weights."""
        del outputs
        return {name: total / weight for name, (total, weight) in sums.items()}
