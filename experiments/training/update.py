"""One training step of one lane, and many of them in one program."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from experiments.machine.mesh import DeviceMesh, Rows, check_axes
from experiments.settings.cells import field_of
from experiments.settings.config import Config
from experiments.training.models import Pass
from experiments.training.optimizers import optimizer, schedule
from experiments.training.state import Lane, Purpose, State, key_of
from experiments.training.task import Apply, Outcome, Task, Total
from recurrent_gates import Damp, Detach, Zoneout, trainable_mask

_DIVERGED = 1e10  # a loss from which nothing comes back; bounded cells stay finite far above it


class Learned(NamedTuple):
    """What an update changes: parameters and the optimiser's state.

    Attributes:
      params: the parameters.
      optimizer: optax's state.
      fault: the first bad leaf of this step so far, see ``Faults.leaf``; -1: none; None: it is not
        looked for.
    """

    params: Any
    optimizer: Any
    fault: jax.Array | None = None


class Descent(NamedTuple):
    """What an update tells: the loss over all devices and its weight, and this device's outcome."""

    loss: jax.Array
    weight: Any
    outcome: Outcome


Descend = Callable[[Learned, Any], tuple[Learned, Descent]]
"""One step down the gradient of a window."""


def carry_fns(config: Config, step: jax.Array | None) -> tuple[Any, ...]:
    """What acts on the carry at a training step; at evaluation (None) in its mean form."""
    carry, steps = config.carry, config.training.steps
    field = field_of(carry.detach_state)
    fns: list[Any] = []
    if carry.detach_prob and step is not None:
        p = jnp.float32(carry.detach_prob)
        if carry.detach_off_steps:
            p = jnp.where(step < steps - carry.detach_off_steps, p, jnp.float32(0))
        fns.append(Detach(p, field, per_example=carry.detach_per_example))
    if carry.damp_prob and step is not None:
        fns.append(Damp(jnp.float32(carry.damp_prob), field))
    for p_old, name in ((carry.zoneout_c, "c"), (carry.zoneout_h, "h")):
        if p_old:
            fns.append(Zoneout(jnp.float32(p_old), name))
    return tuple(fns)


def applied(module: nn.Module, during: Pass) -> Apply:
    """The model with what acts on it in a pass."""

    def apply(params: Any, *args: Any, **kwargs: Any) -> Any:
        return module.apply({"params": params}, *args, during=during, **kwargs)

    return apply


def policy(module: nn.Module, config: Config, rows: Rows) -> Apply:
    """The model as a policy and at evaluation: nothing is drawn."""
    return applied(module, Pass(carry_fns(config, None), rows))


class Update:
    """The training step of a lane.

    A task may bring its own update, such as several passes over one rollout: then it has
    ``update(descend, learned, window, key) -> (learned, report)``, which takes ``descend``
    as often as it likes; each call that Python makes has noise of its own.

    Args:
      config: of the run.
      task: what is trained.
      module: its model.
      mesh: the devices.
    """

    def __init__(self, config: Config, task: Task, module: nn.Module, mesh: DeviceMesh) -> None:
        self._config, self._task, self._module, self._mesh = config, task, module, mesh
        self._optimizer = optimizer(config.training, self._norm if mesh.parts > 1 else None)
        self._schedule = schedule(config.training)

    def masked(self, params: Any) -> optax.GradientTransformation:
        """The optimiser of the parameters that a task trains."""
        mask = self._task.trainable(params)
        return self._optimizer if mask is None else optax.masked(self._optimizer, mask)

    def steps(
        self, state: State, lane: Lane, windows: Any, data: Any, start: jax.Array, stop: jax.Array
    ) -> State:
        """Steps ``start`` to ``stop - 1``.

        Args:
          state: of the lane; it is used up.
          lane: whose it is.
          windows: what the host has read for this lane, ``[n, ...]`` from ``start`` on; or None.
          data: resident arrays.
          start, stop: int32.
        """

        def body(step: jax.Array, state: State) -> State:
            step_data = data
            if windows is not None:
                step_data = jax.tree.map(lambda leaf: leaf[step - start], windows)
            return self._step(state, lane, step_data, step)

        return jax.lax.fori_loop(start, stop, body, state)

    def _step(self, state: State, lane: Lane, data: Any, step: jax.Array) -> State:
        training, task = self._config.training, self._task
        rows = self._mesh.rows(training.batch_size)
        act_pass = policy(self._module, self._config, rows)

        def act(*args: Any, **kwargs: Any) -> Any:
            return act_pass(state.params, *args, **kwargs)

        key = key_of(lane, Purpose.DATA)
        window, stream = task.draw(act, data, state.stream, key, step, rows)
        check_axes(f"the axes of {task.name}", window, task.axes, rows.count)
        rate, halving = lane.rate, state.halving
        if self._schedule is not None:
            rate = rate * self._schedule(step)
        if halving is not None:
            rate = rate * halving.scale
        if hasattr(task, "rate_factor"):
            rate = rate * task.rate_factor(window)

        descents = itertools.count()

        def descend(learned: Learned, window: Any) -> tuple[Learned, Descent]:
            """Each descent of an update has noise of its own."""
            apply = applied(self._module, self._training_pass(lane, step, rows, next(descents)))
            return self._descend(learned, apply, window, stream, rate)

        faults = state.faults
        learned = Learned(state.params, state.optimizer, None if faults is None else jnp.int32(-1))
        update_key = jax.random.fold_in(key_of(lane, Purpose.UPDATE), step)
        task_update = getattr(task, "update", None)
        if task_update is None:
            learned, report = descend(learned, window)
        else:
            learned, report = task_update(descend, learned, window, update_key)
        loss, weight = report.loss, report.weight
        next_stream = task.adapt(report.outcome.stream, loss, weight)
        check_axes(f"the stream axes of {task.name}", next_stream, task.stream_axes, rows.count)
        if halving is not None:
            halving = halving.after(
                loss.astype(jnp.float32), step, training.batch_size, training.halve_every
            )
        share = weight / training.batch_size
        first_bad = (state.diverged_at < 0) & ~(loss <= _DIVERGED)  # NaN, too
        is_finished = None  # whether the lane is finished, trained on only because others are not
        if training.patience and state.best is not None:
            is_finished = state.best.stale >= training.patience
            first_bad &= ~is_finished
        new = state._replace(
            params=learned.params,
            optimizer=learned.optimizer,
            stream=next_stream,
            loss_total=state.loss_total + loss * share,
            loss_weight=state.loss_weight + jnp.asarray(share, jnp.float32),
            score_totals=self._summed(state.score_totals, report.outcome.sums),
            diverged_at=jnp.where(first_bad, step, state.diverged_at),
            halving=halving,
        )
        fault = learned.fault
        if faults is None or fault is None:
            return new
        next_faults = faults.after(step, fault)
        if is_finished is not None:
            next_faults = jax.tree.map(
                lambda a, b: jnp.where(is_finished, a, b), faults, next_faults
            )
        new = new._replace(faults=next_faults)
        if training.on_divergence == "stop":
            return new
        # The window is over, and what was learnt of it is not: its stream is as drawn.
        skipped_state = state._replace(stream=stream, faults=new.faults)
        if state.halving is not None:
            skipped_halving = state.halving.after(
                None, step, training.batch_size, training.halve_every
            )
            skipped_state = skipped_state._replace(halving=skipped_halving)
        return jax.tree.map(lambda old, new: jnp.where(fault >= 0, old, new), skipped_state, new)

    def _summed(self, totals: dict[str, Total], sums: Mapping[str, Total]) -> dict[str, Total]:
        """Totals of scores with those of one more step."""
        if not totals:
            return totals
        step_sums = self._mesh.sum({name: sums[name] for name in totals})
        return jax.tree.map(jnp.add, totals, step_sums)

    def _training_pass(self, lane: Lane, step: jax.Array, rows: Rows, descent: int) -> Pass:
        def key(purpose: Purpose) -> jax.Array:
            key_of_step = jax.random.fold_in(key_of(lane, purpose), step)
            return jax.random.fold_in(key_of_step, descent) if descent else key_of_step

        model = self._config.model
        drops = model.dropout or model.layer_dropout or model.embedding_dropout
        return Pass(
            carry_fns(self._config, step),
            rows,
            noise_key=key(Purpose.NOISE),
            dropout_key=key(Purpose.DROPOUT) if drops else None,
            dropout=model.dropout,
            layer_dropout=model.layer_dropout,
            embedding_dropout=model.embedding_dropout,
        )

    def _descend(
        self, learned: Learned, apply: Apply, window: Any, stream: Any, rate: jax.Array
    ) -> tuple[Learned, Descent]:
        train_mask = self._task.trainable(learned.params)

        def loss_of(params: Any) -> tuple[jax.Array, tuple[Any, Outcome]]:
            if train_mask is not None:
                params = jax.tree.map(
                    lambda p, train: p if train else jax.lax.stop_gradient(p), params, train_mask
                )
            outcome = self._task.loss(apply, params, window, stream, True)
            mean, weight = self._mean(outcome)
            return mean, (weight, outcome)

        (loss, (weight, outcome)), gradients = jax.value_and_grad(loss_of, has_aux=True)(
            learned.params
        )
        loss, gradients = self._mesh.mean((loss, gradients))
        updates, optimizer = self.masked(learned.params).update(
            gradients, learned.optimizer, learned.params
        )
        mask = trainable_mask(learned.params)
        if train_mask is not None:
            mask = jax.tree.map(
                lambda task_flag, library_flag: task_flag and library_flag, train_mask, mask
            )
        params = jax.tree.map(
            lambda p, u, trainable: p - rate * u if trainable else p, learned.params, updates, mask
        )
        fault = learned.fault
        if fault is not None:
            fault = jnp.where(fault < 0, _first_bad(loss, gradients, self._mesh), fault)
        return Learned(params, optimizer, fault), Descent(loss, weight, outcome)

    def _norm(self, gradients: Any) -> jax.Array:
        """The global norm of gradients of which each part of the words has its own rows."""
        split_squares: list[jax.Array] = []
        whole_squares: list[jax.Array] = []
        task: Any = self._task
        axes = jax.tree.leaves(task.word_axes(gradients), is_leaf=lambda axis: axis is None)
        for axis, leaf in zip(axes, jax.tree.leaves(gradients), strict=True):
            (whole_squares if axis is None else split_squares).append(jnp.square(leaf).sum())
        return jnp.sqrt(self._mesh.sum_of_parts(sum(split_squares)) + sum(whole_squares))

    def _mean(self, outcome: Outcome) -> tuple[jax.Array, Any]:
        """What to average over devices so that totals are divided by the weight of all of them,
        and that weight.

        A weight that is a plain number is the same on every device: then it is the local mean.
        """
        total, weight = outcome.loss
        if isinstance(weight, int | float):
            return total / np.asarray(weight, total.dtype), float(weight * self._mesh.size)
        full_weight = self._mesh.sum(weight).astype(total.dtype)
        return total * (self._mesh.size / jnp.maximum(full_weight, _SMALL)), full_weight


def _first_bad(loss: jax.Array, gradients: Any, mesh: DeviceMesh) -> jax.Array:
    """The first bad leaf of a step, as ``Faults.leaf``; -1: none. It is the same on all devices
    that share words, each of which sees its own rows of a leaf."""
    finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients)]
    bad = ~jnp.stack([loss <= _DIVERGED, *finite])  # NaN, too
    bad = mesh.sum_of_parts(bad.astype(jnp.int32)) > 0
    return jnp.where(bad.any(), jnp.argmax(bad), -1).astype(jnp.int32)


_SMALL = 1e-20  # a window of padding alone has no loss
