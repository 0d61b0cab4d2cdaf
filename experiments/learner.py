"""The pure part of training: initial state, update and evaluation, of all lanes, on all devices.

A lane is one seed with one learning rate. Several lanes are one ``vmap``, on a CPU a loop; a
single lane has neither. The batch is split over the devices there are, lanes stay whole: every
device holds all parameters, draws the whole batch and its noise, keeps its rows of both and adds
its gradients to those of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.config import Config, UserError, build_cell
from experiments.models import dropout_masks
from experiments.optimizers import Halving, adam
from experiments.state import Best, Lane, State, key_of
from experiments.tasks import Batch, FromFiles
from recurrent_gates import (
    RNN,
    Cell,
    Damp,
    Detach,
    Zoneout,
    count_parameters,
    draw_noise,
    trainable_mask,
)

Scores = dict[str, jax.Array]
Pause = Callable[[], None]

_AXIS = "batch"
_DIVERGED = 1e10  # a loss from which nothing comes back; bounded cells stay finite far above it
_LANE_AFTER_LANE = ("cpu",)  # platforms that one lane keeps busy
_EVALUATION_ROWS = 256  # most examples that a device evaluates at a time, and
_EVALUATION_STEPS = 2**18  # most of their steps together: bounds the memory and the time to stop


def _none() -> None:
    """No pause."""


class Learner:
    """The jitted functions of a config.

    Until ``prepare`` only shapes are known, and nothing is computed.

    Attributes:
      watched: the name of the set that is evaluated during training.
      reported: the name of the set that the result is of.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._task = config.task
        model = config.model
        layer = RNN(build_cell(model), time_major=True, backend=model.backend)
        self._module = config.task.module(layer, model.embedding, model.decoder)
        self._optimizer = adam(config.training)
        self._several = len(config.training.lanes) > 1

        batch_size = config.training.batch_size
        count = max(n for n in range(1, jax.device_count() + 1) if batch_size % n == 0)
        self._mesh = Mesh(np.array(jax.devices()[:count]), (_AXIS,))
        self._replicated = NamedSharding(self._mesh, PartitionSpec())

        self._lane_list = [
            Lane(jnp.int32(seed), jnp.float32(rate)) for seed, rate in config.training.lanes
        ]
        self._data = jax.eval_shape(self._task.load)
        self._from_files: Any = None
        self._sets = jax.eval_shape(self._task.held_out, self._data)
        self.watched = "validation" if "validation" in self._sets else "held_out"
        self.reported = "test" if "test" in self._sets else self.watched
        # One compilation serves every number of steps, seed and rate: all of them are arguments.
        self._advance_jit = jax.jit(self._on_mesh(self._advance), donate_argnums=0)
        self._score_jit = jax.jit(self._on_mesh(self._score))
        self._settle_jit = jax.jit(self._over_lanes(self._settle))
        self._advance_compiled: Callable[..., State] | None = None

    @property
    def cell(self) -> Cell:
        """The cell that is trained, unbound."""
        cell = self._module.recurrent.cell
        assert isinstance(cell, Cell)
        return cell

    @property
    def sequence_steps(self) -> int:
        """T of the watched set."""
        return int(self._sets[self.watched].inputs.shape[0])

    def features(self, params: Any, count: int) -> jax.Array:
        """What the cell reads of the first examples of the watched set, after ``load``.

        Args:
          params: of one lane; its cell's are ``params["recurrent"]["cell"]``.
          count: how many examples.

        Returns:
          ``[T, count, D]``.
        """
        inputs = self._sets[self.watched].inputs[:, :count]
        encoded = self._module.apply(
            {"params": params}, inputs, method=lambda module, inputs: module.encoder(inputs)
        )
        assert isinstance(encoded, jax.Array)
        return encoded

    # What the driver calls.

    def place(self, tree: Any) -> Any:
        """A tree of arrays on all devices."""
        return jax.device_put(tree, self._replicated)

    def shapes(self) -> State:
        """The state's shapes and dtypes, without computing anything."""
        states = [jax.eval_shape(self._initial, lane) for lane in self._lane_list]
        return jax.eval_shape(self._stack, states)

    def initial(self) -> State:
        """The state before the first step."""
        init = jax.jit(self._initial)  # lane by lane: a lane alone starts with the same bits
        return self.place(self._stack([init(lane) for lane in self._lane_list]))

    def parameter_counts(self) -> dict[str, int]:
        """``{"recurrent_parameters", "total_parameters"}`` of one lane."""
        params = jax.eval_shape(self._initial, self._lane_list[0]).params
        return {
            "recurrent_parameters": count_parameters(params["recurrent"]),
            "total_parameters": count_parameters(params),
        }

    def check(self) -> None:
        """Reads the task's files, if it has any, and traces a step, without compiling.

        Raises:
          UserError: if files are missing or damaged, or the chosen backend cannot serve the model.
        """
        self._arrays()
        try:
            self._advance_jit.trace(*self._advance_arguments(self.shapes(), 0, 1))
        except ValueError as error:
            if self._config.model.backend in ("auto", "scan"):
                raise
            raise UserError(f"--backend={self._config.model.backend}: {error}") from error

    def load(self) -> None:
        """Loads the data: after this, states can be scored."""
        self._data, self._from_files = self.place(self._arrays()), None
        self._sets = self.place(jax.jit(self._task.held_out)(self._data))

    def prepare(self) -> None:
        """Loads the data and compiles ``advance``."""
        self.load()
        arguments = self._advance_arguments(self.shapes(), 0, 1)
        self._advance_compiled = self._advance_jit.lower(*arguments).compile()

    def advance(self, state: State, start: int, stop: int) -> State:
        """Steps ``start`` to ``stop - 1``. The state passed in is used up."""
        assert self._advance_compiled is not None, "prepare first"
        return jax.block_until_ready(
            self._advance_compiled(*self._advance_arguments(state, start, stop))
        )

    def evaluate(self, state: State, pause: Pause = _none) -> tuple[State, Scores]:
        """Scores of the current parameters on the watched set.

        Args:
          state: it stays as it is.
          pause: called now and then; what it raises ends the evaluation.

        Returns:
          The state, its training loss started anew and its best parameters brought up to
          date; the scores, each ``[]`` or ``[lanes]``.
        """
        scores = self._scores(state.params, self._sets[self.watched], pause)
        return self.place(self._settle_jit(state, scores)), scores

    def final_scores(self, state: State, pause: Pause = _none) -> Scores:
        """Scores of the parameters to report on the set to report; for ``pause`` see above."""
        params = state.params if state.best is None else state.best.params
        return self._scores(params, self._sets[self.reported], pause)

    def stopped(self, state: State) -> np.ndarray:
        """Which lanes have nothing more to learn, bool ``[lanes]``."""
        stopped = np.atleast_1d(state.diverged_at) >= 0
        if self._config.training.patience and state.best is not None:
            stopped |= np.atleast_1d(state.best.stale) >= self._config.training.patience
        return stopped

    def _arrays(self) -> Any:
        """The task's arrays, its files read once."""
        if not isinstance(self._task, FromFiles):
            return jax.jit(self._task.load)()
        if self._from_files is None:
            self._from_files = self._task.read()
        return self._from_files

    # Lanes and devices.

    def _stack(self, trees: list[Any]) -> Any:
        if not self._several:
            return trees[0]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)

    def _over_lanes(self, function: Callable[..., Any], shared: int = 0) -> Callable[..., Any]:
        """Maps over all arguments but the last ``shared``; nothing for a single lane.

        Where lanes would not run at the same time, one after the other is faster than vmap: it
        takes less memory, and a conditional stays one.
        """
        if not self._several:
            return function

        def mapped(*arguments: Any) -> Any:
            count = len(arguments) - shared
            own, common = arguments[:count], arguments[count:]

            def one_lane(own: tuple[Any, ...]) -> Any:
                return function(*own, *common)

            if self._mesh.devices.flat[0].platform in _LANE_AFTER_LANE:
                return jax.lax.map(one_lane, own)
            return jax.vmap(one_lane)(own)

        return mapped

    def _on_mesh(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function run by every device on the same arguments."""
        everywhere = PartitionSpec()
        return jax.shard_map(
            function,
            mesh=self._mesh,
            in_specs=everywhere,
            out_specs=everywhere,
            check_vma=False,  # gradients are averaged by hand, once a step, outside the time loop
        )

    def _rows(self, tree: Any, size: int) -> Any:
        """This device's rows of arrays ``[T, size, ...]``; arrays ``[T]`` stay whole."""
        share = size // self._mesh.size
        start = jax.lax.axis_index(_AXIS) * share

        def rows(leaf: jax.Array) -> jax.Array:
            if leaf.ndim < 2:
                return leaf
            return jax.lax.dynamic_slice_in_dim(leaf, start, share, axis=1)

        return jax.tree.map(rows, tree)

    # One lane.

    def _initial(self, lane: Lane) -> State:
        like = self._sets[self.watched].inputs  # [T, B, ...]
        inputs = jnp.zeros((1, 1, *like.shape[2:]), like.dtype)
        params = self._module.init(key_of(lane, 0), inputs)["params"]
        training = self._config.training
        worst = jnp.float32(-jnp.inf)
        return State(
            params=params,
            optimizer=self._optimizer.init(params),
            loss_sum=jnp.float32(0),
            loss_count=jnp.int32(0),
            diverged_at=jnp.int32(-1),
            halving=Halving.initial() if training.halve_every else None,
            best=Best(params, worst, jnp.int32(0)) if training.reports_best else None,
        )

    def _carry_fns(self, step: jax.Array | None) -> tuple[Any, ...]:
        """What acts on the carry at a training step; at evaluation (None) in its mean form."""
        carry, steps = self._config.carry, self._config.training.steps
        fns: list[Any] = []
        if carry.detach_prob and step is not None:
            p = jnp.float32(carry.detach_prob)
            if carry.detach_off_steps:
                p = jnp.where(step < steps - carry.detach_off_steps, p, jnp.float32(0))
            fns.append(Detach(p, carry.detach_state, per_example=carry.detach_per_example))
        if carry.damp_prob and step is not None:
            fns.append(Damp(jnp.float32(carry.damp_prob), carry.detach_state))
        for p_old, field in ((carry.zoneout_c, "c"), (carry.zoneout_h, "h")):
            if p_old:
                fns.append(Zoneout(jnp.float32(p_old), field))
        return tuple(fns)

    def _outputs(
        self, params: Any, inputs: jax.Array, carry_fns: Any, noise: Any, *masks: jax.Array
    ) -> jax.Array:
        outputs = self._module.apply({"params": params}, inputs, carry_fns, noise, *masks)
        assert isinstance(outputs, jax.Array)
        return outputs

    def _advance(
        self, state: State, lanes: Lane, data: Any, start: jax.Array, stop: jax.Array
    ) -> State:
        return self._over_lanes(self._steps, shared=3)(state, lanes, data, start, stop)

    def _advance_arguments(self, state: State, start: int, stop: int) -> tuple[Any, ...]:
        lanes = self._stack(self._lane_list)
        placed = self.place((lanes, jnp.int32(start), jnp.int32(stop)))
        return (state, placed[0], self._data, *placed[1:])

    def _steps(
        self, state: State, lane: Lane, data: Any, start: jax.Array, stop: jax.Array
    ) -> State:
        return jax.lax.fori_loop(
            start, stop, lambda step, state: self._update(state, lane, data, step), state
        )

    def _update(self, state: State, lane: Lane, data: Any, step: jax.Array) -> State:
        training = self._config.training
        size = training.batch_size
        batch = self._task.batch(data, key_of(lane, 1), step, size)
        carry_fns = self._carry_fns(step)
        noise_key = jax.random.fold_in(key_of(lane, 2), step)
        noise = draw_noise(carry_fns, noise_key, len(batch.inputs), (size,))
        model, masks_key = self._config.model, jax.random.fold_in(key_of(lane, 3), step)
        masks = dropout_masks(masks_key, model.dropout, model.decoder, size)
        batch, noise, masks = self._rows((batch, noise, masks), size)

        def loss_of(params: Any) -> jax.Array:
            outputs = self._outputs(params, batch.inputs, carry_fns, noise, *masks)
            return self._task.score(outputs, batch)["loss"].mean()

        loss, gradients = jax.lax.pmean(jax.value_and_grad(loss_of)(state.params), _AXIS)
        updates, optimizer = self._optimizer.update(gradients, state.optimizer, state.params)
        rate, halving = lane.rate, state.halving
        if halving is not None:
            rate = rate * halving.scale
            halving = halving.after(loss, step, size, training.halve_every)
        params = jax.tree.map(
            lambda p, u, trainable: p - rate * u if trainable else p,
            state.params,
            updates,
            trainable_mask(state.params),
        )
        first_bad = (state.diverged_at < 0) & ~(loss <= _DIVERGED)  # NaN, too
        return state._replace(
            params=params,
            optimizer=optimizer,
            loss_sum=state.loss_sum + loss,
            loss_count=state.loss_count + 1,
            diverged_at=jnp.where(first_bad, step, state.diverged_at),
            halving=halving,
        )

    def _scores(self, params: Any, batch: Batch, pause: Pause) -> Scores:
        """Means over all examples, which are scored part by part."""
        found, examples = [], batch.inputs.shape[1]
        for start in range(0, examples, self._part_size(batch)):
            pause()
            placed = self.place(jnp.int32(start))
            found.append(jax.block_until_ready(self._score_jit(params, batch, placed)))
        return jax.tree.map(lambda *parts: sum(parts) / np.float32(examples), *found)

    def _part_size(self, batch: Batch) -> int:
        """How many examples are scored together: parts of about equal size, split over devices."""
        steps, examples = batch.inputs.shape[:2]
        devices = self._mesh.size if examples >= self._mesh.size else 1
        most = max(1, min(_EVALUATION_ROWS, _EVALUATION_STEPS // steps)) * devices
        parts = -(-examples // most)
        size = -(-examples // (parts * devices)) * devices
        return size if size <= examples else size - devices

    def _score(self, params: Any, batch: Batch, start: jax.Array) -> Scores:
        """Sums over a part. The last one begins early, with examples that count elsewhere."""
        size = self._part_size(batch)
        first = jnp.minimum(start, batch.inputs.shape[1] - size)
        part = jax.tree.map(
            lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, first, size, axis=1), batch
        )
        counts = first + jnp.arange(size, dtype=first.dtype) >= start
        return self._over_lanes(self._score_lane, shared=2)(params, part, counts[None])

    def _score_lane(self, params: Any, batch: Batch, counts: jax.Array) -> Scores:
        size, devices = counts.shape[1], self._mesh.size
        split = size % devices == 0
        if split:
            batch, counts = self._rows((batch, counts), size)
        outputs = self._outputs(params, batch.inputs, self._carry_fns(None), None)
        scores = self._task.score(outputs, batch)
        sums = jax.tree.map(lambda score: jnp.where(counts[0], score, 0).sum(), scores)
        return jax.lax.psum(sums, _AXIS) if split else sums

    def _settle(self, state: State, scores: Scores) -> State:
        best = state.best
        if best is not None:
            metric = self._task.metrics[0]
            value = scores[metric.name] if metric.higher_is_better else -scores[metric.name]
            patience = self._config.training.patience
            running = (best.stale < patience) if patience else jnp.bool_(True)
            better = running & (state.diverged_at < 0) & (value > best.value)
            best = Best(
                params=jax.tree.map(
                    lambda new, old: jnp.where(better, new, old), state.params, best.params
                ),
                value=jnp.where(better, value, best.value),
                stale=jnp.where(better, 0, best.stale + 1),
            )
        return state._replace(loss_sum=jnp.float32(0), loss_count=jnp.int32(0), best=best)
