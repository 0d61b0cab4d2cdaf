"""The compiled functions of a config: initial state, steps and scores, of all lanes, on all
devices."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.machine import memory
from experiments.machine.mesh import (
    WHOLE,
    DeviceMesh,
    Rows,
    check_axes,
    differing_axis,
    later,
    map_axes,
    probed_axes,
    split,
)
from experiments.machine.words import Words
from experiments.settings.axes import DATA, LANES, VOCAB, axes_of
from experiments.settings.cells import build_cell
from experiments.settings.config import Config
from experiments.settings.errors import UserError
from experiments.training.evaluate import Evaluation, Pause, Scores
from experiments.training.feed import CHUNK, Feed
from experiments.training.lanes import Lanes
from experiments.training.models import fresh_carry, recurrent_layers
from experiments.training.optimizers import Halving
from experiments.training.state import Best, Faults, Lane, Purpose, State, key_of
from experiments.training.task import Resident, Task
from experiments.training.update import Update, policy
from recurrent_gates import Cell, count_parameters


def _none() -> None:
    """No pause."""


class Learner:
    """The jitted functions of a config.

    Until ``prepare`` only shapes are known, and nothing is computed.

    Attributes:
      task: what is trained.
      mesh: the devices.
      lanes: the seeds and rates.
      watched: the name of the set that is evaluated during training.
      reported: the name of the set that the result is of.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.task: Task = config.task
        cell = build_cell(config.model)
        self._module = self.task.module(recurrent_layers(cell, config.model), config.model)
        self._fresh = functools.partial(fresh_carry, self._module.recurrent)
        training = config.training
        self.mesh = DeviceMesh(training.batch_size, axes_of(training.mesh))
        self._shapes = self.task.shapes(training.batch_size)
        module: Any = self._module  # what a device runs
        if self.mesh.parts > 1:
            module = config.task.split_words(module, self.mesh.parts)
        self._update = Update(config, self.task, module, self.mesh)
        with _backends_own_words(config.model.backend):
            self._state_shapes = jax.eval_shape(self._initial, Lane(*_LANE))
            self._window_shapes = jax.eval_shape(self._window, Lane(*_LANE), self._state_shapes)
        self.lanes = Lanes(training.lanes, self.mesh.platform, self.mesh.lanes)
        # Every device has all of a lane's state but for the rows of its stream and of its words.
        share, parts = self._rows_of_words, self.mesh.parts
        words = jax.tree.map(
            differing_axis,
            self._state_of_words(share),
            self._state_of_words(lambda count: share(count) + 1),
        )
        self.specs: State = self.lanes.specs(
            split(words, VOCAB)._replace(stream=split(self.task.stream_axes))
        )
        placed_state = self._state_of_words(lambda count: share(count) * parts)
        self._placed_shapes = self._of_lanes(placed_state)

        self._data: Any = None
        self._placed = False
        self._feed: Feed | None = None
        sets = self.task.held_out(self._shapes, self.mesh.size)
        if {*sets} not in _SETS:
            raise ValueError(
                f"the task {self.task.name} has evaluation sets of the names "
                f"{' and '.join(sets) or 'none'}: it may have held_out alone, validation alone, or "
                "validation and test."
            )
        self.watched = "validation" if "validation" in sets else "held_out"
        self.reported = "test" if "test" in sets else self.watched
        self._evaluations = {
            name: Evaluation(
                config, module, self.mesh, self.lanes, self.specs.params, name, held_out
            )
            for name, held_out in sets.items()
        }
        lane_specs = self.lanes.specs(WHOLE)
        self._window_specs = self.lanes.specs(split(later(self.task.axes)))
        # One compilation serves every number of steps, seed and rate: all of them are arguments.
        self._advance_jit = {
            streamed: jax.jit(
                self.mesh.everywhere(
                    self.lanes.over(self._update.steps, shared=3),
                    (
                        self.specs,
                        lane_specs,
                        self._window_specs if streamed else WHOLE,
                        WHOLE,
                        WHOLE,
                        WHOLE,
                    ),
                    self.specs,
                ),
                donate_argnums=0,
            )
            for streamed in (False, True)
        }
        self._start_jit = jax.jit(
            self.mesh.everywhere(
                self.lanes.over(self._start, shared=1), (lane_specs, WHOLE), self.specs.stream
            )
        )
        specs_without_stream = self.specs._replace(stream=())
        self._settle_jit = jax.jit(
            self.mesh.everywhere(
                self.lanes.over(self._settle),
                (specs_without_stream, lane_specs),
                specs_without_stream,
            )
        )
        self._streamless_jit = jax.jit(self._streamless_state)
        self._advance_compiled: Callable[..., State] | None = None

    @property
    def cell(self) -> Cell:
        """The cell of the only recurrent layer, unbound.

        Raises:
          UserError: if there are several layers.
        """
        layers = self._module.recurrent
        if not hasattr(layers, "cell"):
            raise UserError("this looks at one recurrent layer, and the run has several.")
        cell = layers.cell
        assert isinstance(cell, Cell)
        return cell

    def encoded(self, params: Any, inputs: jax.Array) -> jax.Array:
        """What the first recurrent layer reads, of a ``SequenceModel``.

        Args:
          params: of one lane.
          inputs: ``[T, B, ...]``.

        Returns:
          ``[T, B, D]``.
        """
        features = self._module.apply({"params": params}, inputs, method="encoded")
        assert isinstance(features, jax.Array)
        return features

    def apply(self, params: Any, *args: Any, **kwargs: Any) -> Any:
        """The model at evaluation, of one lane and one row; see ``policy``."""
        return policy(self._module, self._config, Rows(0, 1, 1))(params, *args, **kwargs)

    def fresh(self, rows: int) -> Any:
        """The carry of the recurrent layers before the first step, leaves ``[rows, F]``."""
        return self._fresh(rows)

    # What the driver calls.

    def place(self, state: State) -> State:
        """A state that the host has, on the devices."""
        like = self._placed_shapes._replace(stream=state.stream)
        specs = self.specs if jax.tree.leaves(state.stream) else self.specs._replace(stream=())
        return self.mesh.place(jax.tree.map(_filled, state, like), specs)

    def fetch(self, tree: Any, shapes: Any = None) -> Any:
        """A state of the devices as the host has it; see ``DeviceMesh.fetch``.

        Args:
          tree: a state, or a part of one.
          shapes: of that part on the host; None: those of a state.
        """
        shapes = self.shapes() if shapes is None else shapes
        return jax.tree.map(_unfilled, self.mesh.fetch(tree), shapes)

    def shapes(self) -> State:
        """The state's shapes and dtypes on the host, without computing anything."""
        return self._of_lanes(self._state_shapes)

    def initial(self) -> State:
        """The state before the first step, after ``load``."""
        # Lane by lane: a lane alone starts with the same bits.
        states = [self._streamless_jit(lane) for lane in self.lanes.each]
        state = self.place(self.lanes.stack(states))
        return state._replace(stream=self._start_jit(self._placed_lanes, self._resident))

    def parameter_counts(self) -> dict[str, int]:
        """``{"recurrent_parameters", "total_parameters"}`` of one lane."""
        params = jax.eval_shape(self._streamless_state, self.lanes.each[0]).params
        return {
            "recurrent_parameters": count_parameters(params["recurrent"]),
            "total_parameters": count_parameters(params),
        }

    def check_memory(self) -> None:
        """Refuses what cannot fit, from shapes alone: nothing has been allocated.

        Counted are parameters, the optimiser's state, the stream, resident data, the window and the
        state at each of its steps, of which training keeps more than one; so what is refused is
        too much.

        Raises:
          UserError: if it is more than this machine has.
        """
        state = self._state_of_words(self._rows_of_words)  # what a device has of a lane's
        training, model = self._config.training, self._config.model
        lanes = self.lanes.share
        window = self._window_shapes
        lengths = map_axes(_steps, self.task.axes, window)
        steps = max(jax.tree.leaves(lengths), default=1)
        state_bytes = (
            4 * steps * training.batch_size * model.hidden_size * model.layers // self.mesh.size
        )
        needed_bytes = {
            "the parameters and the optimiser's state": lanes
            * memory.bytes_of(state._replace(stream=())),
            "the stream": lanes * self._bytes(self.task.stream_axes, state.stream),
            "the data": 0 if self._host_reads else memory.bytes_of(self._shapes),
            "a batch and the states at its steps": self._bytes(self.task.axes, window)
            + state_bytes,
        }
        lower = "--batch_size, --length, --hidden_size or --seeds"
        memory.check(needed_bytes, self.mesh.platform, self.mesh.own_devices, lower)

    def check(self) -> None:
        """Reads the task's files, if it has any, and traces a step, without compiling.

        Raises:
          UserError: if files are missing or damaged, or the chosen backend cannot serve the model.
        """
        self._read()
        task, rows = self.task, self._batch_size
        check_axes(f"the axes of {task.name}", self._window_shapes, task.axes, rows)
        stream = self._state_shapes.stream
        check_axes(f"the stream axes of {task.name}", stream, task.stream_axes, rows)
        with _backends_own_words(self._config.model.backend):
            self._advance_jit[self._streamed].trace(*self._advance_shapes())

    def load(self) -> None:
        """Loads the data: after this, states can be scored."""
        data = self._read()
        if isinstance(data, Resident) and not self._placed:
            self._data, self._placed = Resident(self.mesh.place(data.arrays)), True

    def prepare(self) -> None:
        """Loads the data and compiles ``advance``."""
        self.load()
        lowered = self._advance_jit[self._streamed].lower(*self._advance_shapes())
        self._advance_compiled = lowered.compile()

    def lower(self) -> tuple[jax.stages.Traced, jax.stages.Lowered]:
        """``advance`` as it is traced and lowered for the target's devices, from shapes alone.

        No file is read: what depends on the number of rows is a window, and read on the host.
        """
        streamed = self._host_reads
        place_shapes = self.mesh.placed_shapes
        traced = self._advance_jit[streamed].trace(
            place_shapes(self._placed_shapes, self.specs),
            place_shapes(self.lanes.together, self.lanes.specs(WHOLE)),
            self._placed_windows() if streamed else None,
            None if streamed else place_shapes(self._shapes),
            *place_shapes((np.int32(0), np.int32(1))),
        )
        return traced, traced.lower(lowering_platforms=(self.mesh.platform,))

    def advance(self, state: State, start: int, stop: int) -> State:
        """Steps ``start`` to ``stop - 1``. The state passed in is used up."""
        assert self._advance_compiled is not None, "prepare first"
        while self._streamed and start < stop:
            middle = min(stop, start + CHUNK)
            state = self._advance_compiled(*self._advance_arguments(state, start, middle))
            start = middle
        if start < stop:
            state = self._advance_compiled(*self._advance_arguments(state, start, stop))
        return jax.block_until_ready(state)

    def evaluate(self, state: State, pause: Pause = _none) -> tuple[State, Scores]:
        """Scores of the current parameters on the watched set.

        Args:
          state: it stays as it is.
          pause: called now and then; what it raises ends the evaluation.

        Returns:
          The state, its training loss started anew and its best parameters brought up to
          date; the scores, each ``[]`` or ``[lanes]``.
        """
        scores = self._evaluations[self.watched].scores(state.params, self._data, pause)
        placed_scores = self.mesh.place(scores, self.lanes.specs(WHOLE))
        settled_state = self._settle_jit(state._replace(stream=()), placed_scores)
        return settled_state._replace(stream=state.stream), scores

    def final_scores(self, state: State, pause: Pause = _none) -> Scores:
        """Scores of the parameters to report on the set to report; for ``pause`` see above."""
        params = state.params if state.best is None else state.best.params
        return self._evaluations[self.reported].scores(params, self._data, pause)

    def stopped(self, state: State) -> np.ndarray:
        """Which lanes have nothing more to learn, bool ``[lanes]``."""
        diverged_at = np.atleast_1d(self.mesh.fetch(state.diverged_at))
        stopped = diverged_at >= 0
        if self._config.training.patience and state.best is not None:
            stale = np.atleast_1d(self.mesh.fetch(state.best.stale))
            stopped |= stale >= self._config.training.patience
        return stopped

    def bad_leaf(self, leaf: int) -> str:
        """What ``Faults.leaf`` stands for, for a person."""
        if leaf == 0:
            return "the loss diverged"
        return f"the gradient of {self._parameters[leaf - 1]} is not finite"

    def bad_parameter(self, state: State, lane: int) -> str | None:
        """The first parameter of a lane that is not finite, for a person; None: all are."""
        params = self.lanes.of(self.mesh.fetch(state.params), lane)
        for name, leaf in zip(self._parameters, jax.tree.leaves(params), strict=True):
            if not np.isfinite(np.asarray(leaf, np.float64)).all():
                return name
        return None

    @property
    def _parameters(self) -> list[str]:
        """The parameters' names, in the order of the leaves."""
        leaves = jax.tree_util.tree_leaves_with_path(self._state_shapes.params)
        return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]

    def close(self) -> None:
        """Ends the threads that read ahead."""
        if self._feed is not None:
            self._feed.close()

    @property
    def data(self) -> Any:
        """The resident arrays, after ``load``."""
        return self._resident

    # Data.

    @property
    def _batch_size(self) -> int:
        return self._config.training.batch_size

    @property
    def _host_reads(self) -> bool:
        """Whether the host reads a window at a time, from shapes alone."""
        return jax.tree.leaves(probed_axes(self.task.shapes, self._batch_size)) != []

    @property
    def _streamed(self) -> bool:
        return not isinstance(self._data, Resident)

    @property
    def _resident(self) -> Any:
        return self._data.arrays if isinstance(self._data, Resident) else None

    def _read(self) -> Any:
        """The task's data, read once."""
        if self._data is None:
            self._data = self.task.data()
            if self._streamed:
                if hasattr(self._data, "batched"):
                    self._data = self._data.batched(self._batch_size)
                lanes = self._config.training.lanes
                self._feed = Feed(
                    self._data,
                    [lanes[lane][0] for lane in self.mesh.own(LANES, len(lanes))],
                    self.mesh.own(DATA, self._batch_size),
                    self._config.training.steps,
                )
        return self._data

    def _advance_arguments(self, state: State, start: int, stop: int) -> tuple[Any, ...]:
        windows = None
        if self._feed is not None:
            lane_windows = self._feed.take(start, stop)
            stacked = (
                lane_windows
                if self.lanes.several
                else jax.tree.map(lambda leaf: leaf[0], lane_windows)
            )
            totals = {LANES: len(self.lanes.each), DATA: self._batch_size}
            windows = self.mesh.place_own(stacked, self._window_specs, totals)
        numbers = self.mesh.place((np.int32(start), np.int32(stop)))
        return (state, self._placed_lanes, windows, self._resident, *numbers)

    @property
    def _placed_lanes(self) -> Lane:
        lanes: Lane = self.mesh.place(self.lanes.together, self.lanes.specs(WHOLE))
        return lanes

    def _advance_shapes(self) -> tuple[Any, ...]:
        """The arguments of ``advance``: shapes, but for numbers.

        Data are as they will be placed, so that they need not be to trace a step, and the trace
        serves to compile it: without their places, what training does not use would be compiled
        for another.
        """
        windows = self._placed_windows() if self._streamed else None
        numbers = self.mesh.place((np.int32(0), np.int32(1)))
        resident = self.mesh.placed_shapes(self._resident)
        state = self.mesh.placed_shapes(self._placed_shapes, self.specs)
        return (state, self._placed_lanes, windows, resident, *numbers)

    def _of_lanes(self, shapes: Any) -> Any:
        """The shapes of a tree of all lanes, from one lane's."""
        return jax.eval_shape(self.lanes.stack, [shapes for _ in self.lanes.each])

    def _rows_of_words(self, count: int) -> int:
        """How many rows a device has of a table of so many words."""
        return Words(count, self.mesh.parts).count

    def _state_of_words(self, rows: Callable[[int], int]) -> State:
        """The shapes of a lane's state whose tables of words have other lengths, if devices share
        them.

        Args:
          rows: how many, for a table of so many words.
        """
        state, task = self._state_shapes, self._config.task
        if self.mesh.parts == 1:
            return state

        def table(axis: int | None, leaf: Any) -> jax.ShapeDtypeStruct:
            shape = [rows(n) if index == axis else n for index, n in enumerate(leaf.shape)]
            return jax.ShapeDtypeStruct(shape, leaf.dtype)

        params = map_axes(table, task.word_axes(state.params), state.params)
        return state._replace(
            params=params,
            optimizer=jax.eval_shape(self._update.masked(params).init, params),
            best=None if state.best is None else state.best._replace(params=params),
        )

    def _placed_windows(self) -> Any:
        """The shapes of the windows that go to the device together, as they will be placed."""
        windows = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((CHUNK, *leaf.shape), leaf.dtype), self._shapes
        )
        return self.mesh.placed_shapes(self._of_lanes(windows), self._window_specs)

    # One lane.

    def _streamless_state(self, lane: Lane) -> State:
        """The state without a stream."""
        key = key_of(lane, Purpose.PARAMETERS)
        params = self.task.initial(self._module.init(key, *self.task.example())["params"])
        training, model = self._config.training, self._config.model
        dtype = jnp.float64 if model.dtype == "float64" else jnp.float32
        if dtype == jnp.float64:
            params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        worst = jnp.float32(-jnp.inf)
        return State(
            params=params,
            optimizer=self._update.masked(params).init(params),
            stream=(),
            loss_total=dtype(0),
            loss_weight=jnp.float32(0),
            score_totals={name: (jnp.float32(0),) * 2 for name in self.task.train_scores},
            diverged_at=jnp.int32(-1),
            halving=Halving.initial() if training.halve_every else None,
            best=Best(params, worst, jnp.int32(0)) if training.reports_best else None,
            faults=None if training.on_divergence == "mark" else Faults.none(),
        )

    def _initial(self, lane: Lane) -> State:
        """The whole state, for its shapes: a stream's are those of all rows."""
        rows = Rows(0, self._batch_size, self._batch_size)
        key = key_of(lane, Purpose.STREAM)
        stream = self.task.start(self._fresh, self._shapes_as_data(), key, rows)
        return self._streamless_state(lane)._replace(stream=stream)

    def _start(self, lane: Lane, data: Any) -> Any:
        key = key_of(lane, Purpose.STREAM)
        return self.task.start(self._fresh, data, key, self.mesh.rows(self._batch_size))

    def _window(self, lane: Lane, state: State) -> Any:
        """The window of all rows, for its shapes."""
        rows = Rows(0, self._batch_size, self._batch_size)
        apply = policy(self._module, self._config, rows)

        def act(*args: Any, **kwargs: Any) -> Any:
            return apply(state.params, *args, **kwargs)

        data = self._shapes_as_data()
        key = key_of(lane, Purpose.DATA)
        return self.task.draw(act, data, state.stream, key, jnp.int32(0), rows)[0]

    def _shapes_as_data(self) -> Any:
        """Arrays of the data's shapes, inside of ``eval_shape``."""
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self._shapes)

    def _settle(self, state: State, scores: dict[str, jax.Array]) -> State:
        best = state.best
        if best is not None:
            metric = self.task.metrics[0]
            value = scores[metric.name] if metric.higher_is_better else -scores[metric.name]
            patience = self._config.training.patience
            running = (best.stale < patience) if patience else jnp.bool_(True)
            alive = running & (state.diverged_at < 0)
            better = alive & (value > best.value)
            update_mask = better
            if self._config.training.ties == "last":  # what is as good is kept, but not news
                update_mask = alive & (value >= best.value)
            best = Best(
                params=jax.tree.map(
                    lambda new, old: jnp.where(update_mask, new, old), state.params, best.params
                ),
                value=jnp.where(better, value, best.value),
                stale=jnp.where(better, 0, best.stale + 1),
            )
        return state._replace(
            loss_total=jnp.zeros_like(state.loss_total),
            loss_weight=jnp.zeros_like(state.loss_weight),
            score_totals=jax.tree.map(jnp.zeros_like, state.score_totals),
            best=best,
            faults=None if state.faults is None else state.faults.settled(),
        )

    def _bytes(self, axes: Any, tree: Any) -> int:
        """Bytes of what a device has of a tree: all of a leaf, or its rows of the batch's."""

        def share(axis: int | None, leaf: Any) -> int:
            return memory.bytes_of(leaf) // (1 if axis is None else self.mesh.size)

        return sum(jax.tree.leaves(map_axes(share, axes, tree)))


@contextlib.contextmanager
def _backends_own_words(backend: str) -> Iterator[None]:
    """Why a backend that was asked for does not serve the model, as a ``UserError``."""
    try:
        yield
    except ValueError as error:
        if backend in ("auto", "scan"):
            raise
        raise UserError(f"--backend={backend}: {error}") from error


_SETS = ({"held_out"}, {"validation", "test"}, {"validation"})
_LANE: Any = (jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.float32))


def _steps(axis: int | None, leaf: Any) -> int:
    """The length of the first axis that is not the batch's."""
    lengths = [length for index, length in enumerate(leaf.shape) if index != axis]
    return lengths[0] if lengths else 1


def _filled(leaf: Any, like: Any) -> Any:
    """A leaf with zeros behind it up to another one's shape."""
    if leaf.shape == like.shape:
        return leaf
    lengths = zip(leaf.shape, like.shape, strict=True)
    return np.pad(np.asarray(leaf), [(0, long - short) for short, long in lengths])


def _unfilled(leaf: np.ndarray, like: Any) -> np.ndarray:
    """A leaf without what ``_filled`` put behind it."""
    return leaf[tuple(map(slice, like.shape))]
