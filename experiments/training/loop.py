"""The only training loop: a config in, a workdir full of results out. It reads no flags."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.figures import learning_curve
from experiments.machine.processes import check_alike, first_says, is_first, together
from experiments.machine.profiling import Clock, Profile
from experiments.machine.stopping import StoppedError, Stopping, stopping
from experiments.records.checkpoints import Checkpoints
from experiments.records.reporting import Report, number, say
from experiments.records.storage import DEFAULTS, Patience, Storage, tolerated
from experiments.records.workdir import (
    DamagedError,
    EarlierVersionError,
    Row,
    Workdir,
    device_name,
    read_rows,
)
from experiments.settings.config import Config
from experiments.settings.errors import UserError
from experiments.settings.metrics import Metric
from experiments.training.divergence import Divergence
from experiments.training.learner import Learner
from experiments.training.optimizers import schedule
from experiments.training.state import State

_DISPATCH_SECONDS = 1.0  # steps are dispatched together until they take about this long
_CHECKPOINT_SECONDS = 10.0  # evaluations are checkpointed at most this often, and at the end
_SAVE_SECONDS = 0.1  # and less often where a checkpoint takes longer than this


Illustrate = Callable[[Learner, Any], Mapping[str, str]]
"""Texts by name that show what a model does: of the learner and the parameters of one lane."""


def run(
    config: Config,
    workdir: str | Path,
    profile: int = 0,
    illustrate: Illustrate | None = None,
    storage: Storage = DEFAULTS,
) -> dict[str, Any] | None:
    """Trains, or goes on training, and leaves everything in the workdir.

    The same config in the same workdir goes on where it was stopped, and ends with the same
    bits as if it had not been, on the same devices. Of several processes, which all call this,
    the first one alone reads and writes the workdir and prints.

    Args:
      config: the settings.
      workdir: a directory; it is made if need be.
      profile: so many steps are traced into ``profile/``; 0: none.
      illustrate: its texts on the first lane go to TensorBoard at every evaluation.
      storage: how many checkpoints stay, and what a full disk means.

    Returns:
      What ``summary.json`` holds, of other processes than the first ``{}``; None if the run was
      asked to stop before its end.

    Raises:
      UserError: if the config or the workdir cannot be.
      StorageError: if the workdir can no longer be written.
      DivergedError: if a lane diverged and ``on_divergence`` is ``"stop"``.
      ProcessError: if another process is gone.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(together())
        config.check()
        check_alike(json.dumps(config.resolved(), sort_keys=True))
        learner = Learner(config)
        learner.check_memory()
        learner.check()
        stack.enter_context(contextlib.closing(learner))
        work = stack.enter_context(contextlib.closing(Workdir(workdir)))
        checkpoints = None
        if is_first():
            work.claim(config)
            new_checkpoints = Checkpoints(work.checkpoints, storage.keep_checkpoints)
            checkpoints = stack.enter_context(contextlib.closing(new_checkpoints))
        training_run = _Run(config, learner, work, checkpoints, profile, illustrate)
        return training_run.to_the_end(storage.waits)


def describe(config: Config) -> dict[str, Any]:
    """The resolved config and the parameter counts, without training or compiling."""
    return {
        "protocol": config.protocol,
        "overrides": config.overrides,
        "config": config.resolved(),
        **Learner(config).parameter_counts(),
    }


class _Run:
    """A run that trains in its workdir; only the first process has checkpoints, and writes."""

    def __init__(
        self,
        config: Config,
        learner: Learner,
        work: Workdir,
        checkpoints: Checkpoints | None,
        profile: int,
        illustrate: Illustrate | None,
    ) -> None:
        self._config, self._learner, self._illustrate = config, learner, illustrate
        self._work, self._checkpoints = work, checkpoints
        self._clock = Clock()
        self._profile = Profile(work.path / "profile", profile if is_first() else 0)
        self._patience = Patience(False, say, lambda: True)
        self._divergence = Divergence(config, learner, say if is_first() else lambda text: None)

    def to_the_end(self, waits: bool) -> dict[str, Any] | None:
        """The summary of a run that is finished, or was brought to its end.

        Args:
          waits: whether it waits for room on a full disk.
        """
        work = self._work
        try:
            step, state = self._restored()
        except (EarlierVersionError, DamagedError) as error:
            if jax.process_count() > 1:  # the others wait for a state
                raise
            if (summary := work.summary_of(self._config.training.steps)) is None:
                raise
            if isinstance(error, DamagedError):
                say("warning: every checkpoint of this run, which is finished, is damaged.")
            _print_summary(self._config, work, summary)
            return summary
        evaluated = state is not None and _evaluated(state, self._learner.mesh.fetch)
        if is_first():
            if state is None and any(True for _ in read_rows(work.metrics)):
                say(f"there is no checkpoint in {work.path}: starting again from step 0")
            work.keep_rows(step if evaluated else step - 1, say)
        summary = None
        if state is not None and evaluated and self._finished(step, state) and is_first():
            summary = work.summary()
        finished_before = bool(first_says(np.int32(summary is not None)))
        if finished_before and self._profile.unfinished:
            say("the run was finished: no step is left to trace.")
        if not finished_before:
            try:
                with stopping() as stop:
                    self._patience = Patience(waits, say, lambda: stop.requested)
                    state = self._train(step, state, evaluated, stop)
                    summary = self._summary(state, stop)
            except StoppedError:
                self._say_stopped()
                return None
            if is_first():
                self._draw()
                self._patience(lambda: work.write_json("summary.json", summary))
        if not is_first():
            return {}
        assert summary is not None
        _print_summary(self._config, work, summary)
        return summary

    def _restored(self) -> tuple[int, State | None]:
        """The step and the state to go on from; none before the first step."""
        shapes = self._learner.shapes()
        restored = self._read_checkpoint() if self._checkpoints else None
        step = int(first_says(np.int32(-1 if restored is None else restored[0])))
        if step < 0:
            return 0, None
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
        return step, self._learner.place(first_says(restored[1] if restored else zeros))

    def _read_checkpoint(self) -> tuple[int, State] | None:
        """The newest state that has all rows before it: from there the others are made again."""
        assert self._checkpoints is not None
        metrics, interval = self._work.metrics, self._config.training.eval_every
        lost_rows: dict[int, list[int]] = {}

        def has_rows(step: int, state: State) -> bool:
            due_steps = [*range(0, step, interval)]
            if _evaluated(state) and self._due(step):
                due_steps.append(step)
            lost_rows[step] = self._work.lost_rows(due_steps)
            return not lost_rows[step]

        restored = self._checkpoints.restore(self._learner.shapes(), say, has_rows)
        if restored is not None and lost_rows[restored[0]]:
            rows = lost_rows[restored[0]]
            say(
                f"warning: {metrics} is damaged: {len(rows)} of its rows, the first one that of "
                f"step {rows[0]}, are lost, and no checkpoint is before them."
            )
        elif restored is not None and any(lost_rows.values()):
            say(f"warning: {metrics} is damaged: its rows after step {restored[0]} are made again.")
        return restored

    def _due(self, step: int) -> bool:
        """Whether there is an evaluation at a step."""
        return step % self._config.training.eval_every == 0 or step == self._config.training.steps

    def _say_stopped(self) -> None:
        if self._checkpoints is not None:
            step = self._checkpoints.last_step
            say(f"stopped at step {step}; the same command goes on from there")

    def _train(self, step: int, state: State | None, evaluated: bool, stop: Stopping) -> State:
        """The state after the last step; ``evaluated`` is whether the one of this step was.

        Raises:
          StoppedError: when asked to stop; what was learnt is saved then.
        """
        config, learner, work = self._config, self._learner, self._work
        steps, interval = config.training.steps, config.training.eval_every
        rows = [row["step"] for row in read_rows(work.metrics)] if is_first() else []
        last_row = int(first_says(np.int32(max(rows, default=-1))))
        start = time.perf_counter()
        learner.prepare()
        compiling = {"compile_seconds": time.perf_counter() - start}
        if is_first() and (
            note := self._patience(lambda: work.go_on(config, began=state is not None))
        ):
            say(note)
        settled_step = step if state is not None and evaluated else -1
        if state is not None:
            self._divergence.forget(state)
        state = learner.initial() if state is None else state
        if step and is_first():
            say(f"going on from step {step}")
        report = None
        if is_first():
            report = Report(config, work, learner.watched, step, self._patience)
        clock, step_count, saved_step = self._clock, 1, step
        clock.start()
        with contextlib.closing(report) if report else contextlib.nullcontext():
            try:
                while True:
                    if self._due(step) and step != last_row:
                        row, settled_state = self._evaluate(step, state, stop)
                        if step != settled_step:  # else its row alone was lost
                            state = settled_state
                        last_row = step
                        slowdown = max(1.0, clock.save_seconds / _SAVE_SECONDS)
                        is_due = clock.since_save > _CHECKPOINT_SECONDS * slowdown
                        if report is not None:
                            self._patience(functools.partial(work.add, row))
                        if self._finished(step, state) or first_says(np.int32(is_due)):
                            self._save(step, state)
                            saved_step = step
                        texts = self._illustrations(state)
                        if report is not None:
                            report.evaluated(row, {**clock.lap(), **compiling})
                            report.illustrated(step, texts)
                        compiling = {}
                    if self._due(step) and self._finished(step, state):  # its row is written
                        self._end_profile()
                        if step < steps and (reason := self._reason(state)) and is_first():
                            say(f"ended at step {step}: {reason}")
                        return state
                    step_count = stop.agree(step_count)
                    end = min(step + step_count, step - step % interval + interval, steps)
                    end = step + self._profiled(end - step)
                    with clock.inside(end - step):
                        state = learner.advance(state, step, end)
                    with tolerated(self._profile.directory, say):
                        self._profile.end()
                    self._divergence.look(state)
                    step_count = int(step_count * _DISPATCH_SECONDS / clock.last)
                    step_count = max(1, min(4 * (end - step), step_count))
                    step = end
                    if report is not None:
                        report.advance(step)
            except StoppedError:
                if step != saved_step:
                    self._save(step, state)
                raise

    def _reason(self, state: State) -> str:
        """Why a run ends before its last step; all processes call this."""
        if (np.atleast_1d(self._learner.mesh.fetch(state.diverged_at)) >= 0).all():
            return "every seed has diverged."
        return "every seed has diverged or run out of --patience."

    def _illustrations(self, state: State) -> Mapping[str, str]:
        """The first process's; all of them call this, and bring the parameters together."""
        if self._illustrate is None:
            return {}
        learner = self._learner
        params = learner.lanes.of(learner.fetch(state.params, learner.shapes().params), 0)
        if not is_first():
            return {}
        with self._clock.inside():
            return self._illustrate(learner, params)

    def _save(self, step: int, state: State) -> None:
        start = time.perf_counter()
        host_state = self._learner.fetch(state)
        if (checkpoints := self._checkpoints) is not None:
            self._patience(self._work.sync)
            self._patience(lambda: checkpoints.save(step, host_state))
        self._clock.saved(time.perf_counter() - start)

    def _draw(self) -> None:
        def attempt() -> None:
            with tolerated(self._work.path / "figures", say):
                learning_curve.draw(self._config, self._work, say)

        self._patience(attempt)

    def _end_profile(self) -> None:
        with tolerated(self._profile.directory, say):
            self._profile.close()
        if self._profile.unfinished:
            say("warning: --profile: the run ended before so many steps were traced.")

    def _profiled(self, count: int) -> int:
        """Of so many steps that come next, how many come together while steps are traced."""
        with tolerated(self._profile.directory, say):
            count = self._profile.begin(count)
        return int(first_says(np.int32(count)))

    def _finished(self, step: int, state: State) -> bool:
        return step >= self._config.training.steps or bool(self._learner.stopped(state).all())

    def _evaluate(self, step: int, state: State, stop: Stopping) -> tuple[Row, State]:
        """The row of metrics at a step, and the state that goes on from it."""
        config, learner = self._config, self._learner
        fetch = learner.mesh.fetch
        totals = {"loss": (state.loss_total, state.loss_weight), **state.score_totals}
        means = {name: _mean(*fetch(total)) for name, total in totals.items()}
        rates = [rate for _, rate in config.training.lanes]
        if (factor := schedule(config.training)) is not None:
            rates = [rate * float(factor(jnp.int32(step))) for rate in rates]
        if state.halving is not None:
            rates = list(np.atleast_1d(fetch(state.halving.scale)) * rates)
        self._divergence.tell_skipped(state)
        with self._clock.inside():
            state, scores = learner.evaluate(state, stop.pause)
        diverged = np.atleast_1d(fetch(state.diverged_at)) >= 0
        row = {
            "step": step,
            **_counts(config, step),
            "learning_rate": [float(rate) for rate in rates],
            **{f"train_{name}": _numbers(mean, diverged) for name, mean in means.items()},
            "diverged": [bool(bad) for bad in diverged],
            **self._divergence.skipped(state),
            learner.watched: {name: _numbers(value, diverged) for name, value in scores.items()},
        }
        return row, state

    def _summary(self, state: State, stop: Stopping) -> dict[str, Any]:
        config, learner = self._config, self._learner
        scores = learner.final_scores(state, stop.pause)
        diverged = np.atleast_1d(learner.mesh.fetch(state.diverged_at)) >= 0
        best_value = None if state.best is None else learner.mesh.fetch(state.best.value)
        skipped = self._divergence.skipped(state)
        if not is_first():  # of several processes each has brought its part by now
            return {}
        rows = list(read_rows(self._work.metrics))
        metrics = {
            metric.name: _statistics(config, metric, scores[metric.name], diverged)
            for metric in config.task.metrics
        }
        timing = list(read_rows(self._work.timing))
        best = {}
        if best_value is not None and learner.watched != learner.reported:
            headline = config.task.metrics[0]
            value = np.atleast_1d(best_value)
            value = value * (1 if headline.higher_is_better else -1)
            statistics = _statistics(config, headline, value, diverged)
            best[learner.watched] = {headline.name: statistics}
        return {
            "metrics": metrics,
            "scored_on": learner.reported,
            **best,
            **skipped,
            "baselines": {metric.name: metric.baseline for metric in config.task.metrics},
            **learner.parameter_counts(),
            "steps": rows[-1]["step"],
            **_counts(config, rows[-1]["step"]),
            "seconds": sum(row["seconds"] for row in timing),
            "compile_seconds": sum(row.get("compile_seconds", 0.0) for row in timing),
            **_rates(config, timing),
            "device": device_name(),
        }


def _evaluated(state: State, fetch: Callable[[Any], Any] = np.asarray) -> bool:
    """Whether the evaluation that was due is done: it begins a new sum of losses, and a new count
    of those that were left out."""
    skipped = state.faults is not None and np.any(fetch(state.faults.recent))
    return not (skipped or np.any(fetch(state.loss_weight)))


def _counts(config: Config, step: int) -> dict[str, int]:
    """How many examples a lane has seen by a step, and how many of the task's units."""
    examples = step * config.training.batch_size
    return {"examples": examples, config.task.unit: round(examples * config.task.units_per_row)}


def _rates(config: Config, timing: list[Row]) -> dict[str, Any]:
    """Steps and units per second of training, and the share of time outside compiled programs."""
    rows = [row for row in timing if "inside" in row]
    seconds = sum(row["seconds"] for row in rows)
    if not seconds:
        return {}
    task, training = config.task, config.training
    steps = sum(row["steps"] for row in rows) / seconds
    units = steps * training.batch_size * task.units_per_row * len(training.lanes)
    inside_seconds = sum(row["inside"] for row in rows)
    return {
        "steps_per_second": steps,
        f"{task.unit}_per_second": units,
        "share_outside_programs": 1 - inside_seconds / seconds,
    }


def _mean(total: Any, weight: Any) -> np.ndarray:
    """Totals over weights, of each lane; NaN where there is no weight."""
    weight = np.atleast_1d(weight).astype(float)
    return np.atleast_1d(total) / np.where(weight, weight, np.nan)


def _numbers(values: Any, diverged: np.ndarray) -> list[float | None]:
    """One number per lane; None for a lane that has diverged, or has no number."""
    return [
        float(value) if math.isfinite(value) and not bad else None
        for value, bad in zip(np.atleast_1d(values), diverged, strict=True)
    ]


def _statistics(
    config: Config, metric: Metric, scores: Any, diverged: np.ndarray
) -> dict[str, Any]:
    """Mean, extremes and each lane's value; one without a number counts as infinitely bad."""
    values = _numbers(scores, diverged)
    alive_values = [value for value in values if value is not None]
    complete = len(alive_values) == len(values)
    worst_is_min = metric.higher_is_better
    return {
        "mean": sum(alive_values) / len(alive_values) if complete else None,
        "min": min(alive_values) if alive_values and (complete or not worst_is_min) else None,
        "max": max(alive_values) if alive_values and (complete or worst_is_min) else None,
        "per_run": [
            {"seed": seed, "learning_rate": rate, "value": value, "diverged": bool(bad)}
            for (seed, rate), value, bad in zip(
                config.training.lanes, values, diverged, strict=True
            )
        ],
    }


def _print_summary(config: Config, work: Workdir, summary: dict[str, Any]) -> None:
    """Raises ``UserError`` if the summary is not one."""
    try:
        lines = _summary_lines(config, summary)
    except (KeyError, TypeError, AttributeError, ValueError):
        raise UserError(
            f"{work.path / 'summary.json'} is damaged; remove it, and the same command makes it "
            "again."
        ) from None
    for line in lines:
        say(line)
    curve = work.path / "figures" / "learning_curve.png"
    if curve.exists():
        say(f"figure: {curve}")
    say(f"summary: {work.path / 'summary.json'}")


def _summary_lines(config: Config, summary: dict[str, Any]) -> list[str]:
    metric = config.task.metrics[0]
    runs = summary["metrics"][metric.name]["per_run"]
    scored_on = summary.get("scored_on", "held_out").replace("_", "-")
    if config.training.reports_best and scored_on == "held-out":
        scored_on = "best held-out"  # chosen by the set that it is of
    lines = []
    for run in runs:
        value = "not finite *" if run["value"] is None else number(run["value"])
        value = "diverged *" if run["diverged"] else value
        lines.append(
            f"{scored_on} {metric.name}: {value} ({metric.baseline_name} {metric.baseline:.4g}; "
            f"seed {run['seed']}, learning rate {run['learning_rate']:g})"
        )
    each, together = (" each", f" of all {len(runs)} together") if len(runs) > 1 else ("", "")
    lines.append(
        f"{summary['steps']} steps, {summary['examples']} examples{each}, "
        f"{summary['seconds']:.0f} s of training on {summary['device']}"
    )
    if "steps_per_second" in summary:
        unit = config.task.unit
        rate = summary[f"{unit}_per_second"]
        lines.append(
            f"{summary['steps_per_second']:.4g} steps a second, {rate:,.0f} {unit}{together}, "
            f"{summary['share_outside_programs']:.1%} of the time outside "
            "of compiled programs"
        )
    return lines
