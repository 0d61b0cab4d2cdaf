"""The only training loop: a config in, a workdir full of results out. It reads no flags."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from experiments import figures
from experiments.checkpoints import Checkpoints
from experiments.config import Config
from experiments.learner import Learner, Pause
from experiments.reporting import Progress, TensorBoard, number, say
from experiments.state import State
from experiments.tasks import Metric
from experiments.workdir import Row, Workdir, append_row, device_name, read_rows

_DISPATCH_SECONDS = 1.0  # steps are dispatched together until they take about this long


def run(config: Config, workdir: str | Path) -> dict[str, Any] | None:
    """Trains, or goes on training, and leaves everything in the workdir.

    The same config in the same workdir goes on where it was stopped, and ends with the same
    bits as if it had not been, on the same devices.

    Args:
      config: the settings.
      workdir: a directory; it is made if need be.

    Returns:
      What ``summary.json`` holds; None if the run was asked to stop (SIGTERM) before its end.

    Raises:
      UserError: if the config or the workdir cannot be.
    """
    config.check()
    learner = Learner(config)
    learner.check()
    with contextlib.closing(Workdir(workdir)) as work:
        work.claim(config)
        with contextlib.closing(Checkpoints(work.path / "checkpoints")) as checkpoints:
            summary = _run(config, learner, work, checkpoints)
        if summary is not None:
            _print_summary(config, work, summary)
        return summary


def _run(
    config: Config, learner: Learner, work: Workdir, checkpoints: Checkpoints
) -> dict[str, Any] | None:
    """The summary of a run that is finished, or was brought to its end."""
    step, state = 0, None
    if restored := checkpoints.restore(learner.shapes(), say):
        step, state = restored[0], learner.place(restored[1])
    # With losses since the last evaluation, the one that is due at this step was not finished.
    evaluated = state is None or not np.any(state.loss_count)
    work.keep_rows(step if evaluated else step - 1)
    finished = state is not None and evaluated and _finished(config, learner, step, state)
    if finished and (summary := work.summary()) is not None:
        return summary
    try:
        with _termination() as pause:
            state = _train(config, learner, work, checkpoints, step, state, pause)
            summary = _summarise(config, learner, work, state, pause)
    except _TerminatedError:
        say(f"stopped at step {checkpoints.last_step}; the same command goes on from there")
        return None
    work.write_json("summary.json", summary)
    figures.learning_curve(config, work, say)
    return summary


def describe(config: Config) -> dict[str, Any]:
    """The resolved config and the parameter counts, without training or compiling."""
    return {
        "protocol": config.protocol,
        "overrides": config.overrides,
        "config": config.resolved(),
        **Learner(config).parameter_counts(),
    }


def _train(
    config: Config,
    learner: Learner,
    work: Workdir,
    checkpoints: Checkpoints,
    step: int,
    state: State | None,
    pause: Pause,
) -> State:
    """The state after the last step.

    Raises:
      _TerminatedError: by ``pause``; what was learnt is saved then.
    """
    steps, every = config.training.steps, config.training.eval_every
    last_row = max((row["step"] for row in read_rows(work.metrics)), default=-1)
    began = time.perf_counter()
    learner.prepare()
    clock = {"compile_seconds": time.perf_counter() - began}
    if note := work.go_on(config, began=state is not None):
        say(note)
    state = learner.initial() if state is None else state
    if step:
        say(f"going on from step {step}")
    progress = Progress(config, step)
    board = TensorBoard(work.path / "tensorboard", config, step)
    together, since, saved = 1, time.perf_counter(), step
    with contextlib.closing(progress), contextlib.closing(board):
        try:
            while True:
                if (step % every == 0 or step == steps) and step != last_row:
                    row, state = _evaluate(config, learner, step, state, pause)
                    append_row(work.metrics, row)
                    checkpoints.save(step, state)
                    now = time.perf_counter()
                    append_row(work.timing, {"step": step, "seconds": now - since, **clock})
                    clock, since, last_row, saved = {}, now, step, step
                    board.write(row, learner.watched)
                    progress.evaluated(row, learner.watched)
                if _finished(config, learner, step, state):
                    return state
                pause()
                stop = min(step + together, step - step % every + every, steps)
                began = time.perf_counter()
                state = learner.advance(state, step, stop)
                seconds = time.perf_counter() - began
                together = max(1, min(4 * together, int(together * _DISPATCH_SECONDS / seconds)))
                step = stop
                progress.advance(step)
        except _TerminatedError:
            if step != saved:
                checkpoints.save(step, state)
            raise


def _finished(config: Config, learner: Learner, step: int, state: State) -> bool:
    return step >= config.training.steps or bool(learner.stopped(state).all())


class _TerminatedError(Exception):
    """SIGTERM has come."""


@contextlib.contextmanager
def _termination() -> Iterator[Pause]:
    """A function that raises ``_TerminatedError`` once SIGTERM has come.

    Signals are caught in the main thread alone; in others it does nothing.
    """
    event = threading.Event()

    def pause() -> None:
        if event.is_set():
            raise _TerminatedError

    if threading.current_thread() is not threading.main_thread():
        yield pause
        return
    before = signal.signal(signal.SIGTERM, lambda *_: event.set())
    try:
        yield pause
    finally:
        signal.signal(signal.SIGTERM, before)


def _evaluate(
    config: Config, learner: Learner, step: int, state: State, pause: Pause
) -> tuple[Row, State]:
    """The row of metrics at a step, and the state that goes on from it."""
    count = np.atleast_1d(state.loss_count)
    train_loss = np.atleast_1d(state.loss_sum) / np.where(count, count, np.nan)
    rates = [rate for _, rate in config.training.lanes]
    if state.halving is not None:
        rates = list(np.atleast_1d(state.halving.scale) * rates)
    state, scores = learner.evaluate(state, pause)
    row = {
        "step": step,
        "examples": step * config.training.batch_size,
        "learning_rate": [float(rate) for rate in rates],
        "train_loss": _numbers(train_loss, state),
        "diverged": [bool(at >= 0) for at in np.atleast_1d(state.diverged_at)],
        learner.watched: {name: _numbers(value, state) for name, value in scores.items()},
    }
    return row, state


def _numbers(values: Any, state: State) -> list[float | None]:
    """One number per lane; None for a lane that has diverged, or has no number."""
    diverged = np.atleast_1d(state.diverged_at) >= 0
    return [
        float(value) if math.isfinite(value) and not bad else None
        for value, bad in zip(np.atleast_1d(values), diverged, strict=True)
    ]


def _summarise(
    config: Config, learner: Learner, work: Workdir, state: State, pause: Pause
) -> dict[str, Any]:
    rows = list(read_rows(work.metrics))
    scores = learner.final_scores(state, pause)
    metrics = {
        metric.name: _statistics(config, metric, _numbers(scores[metric.name], state))
        for metric in config.task.metrics
    }
    timing = list(read_rows(work.timing))
    best = {}
    if state.best is not None and learner.watched != learner.reported:
        headline = config.task.metrics[0]
        value = np.atleast_1d(state.best.value) * (1 if headline.higher_is_better else -1)
        found = _statistics(config, headline, _numbers(value, state))
        best[learner.watched] = {headline.name: found}
    return {
        "metrics": metrics,
        "scored_on": learner.reported,
        **best,
        "baselines": {metric.name: metric.baseline for metric in config.task.metrics},
        **learner.parameter_counts(),
        "steps": rows[-1]["step"],
        "examples": rows[-1]["examples"],
        "seconds": sum(row["seconds"] for row in timing),
        "compile_seconds": sum(row.get("compile_seconds", 0.0) for row in timing),
        "device": device_name(),
    }


def _statistics(config: Config, metric: Metric, values: list[float | None]) -> dict[str, Any]:
    """Mean, extremes and each lane's value; a diverged lane counts as infinitely bad."""
    alive = [value for value in values if value is not None]
    complete = len(alive) == len(values)
    worst_is_min = metric.higher_is_better
    return {
        "mean": sum(alive) / len(alive) if complete else None,
        "min": min(alive) if alive and (complete or not worst_is_min) else None,
        "max": max(alive) if alive and (complete or worst_is_min) else None,
        "per_run": [
            {"seed": seed, "learning_rate": rate, "value": value, "diverged": value is None}
            for (seed, rate), value in zip(config.training.lanes, values, strict=True)
        ],
    }


def _print_summary(config: Config, work: Workdir, summary: dict[str, Any]) -> None:
    metric = config.task.metrics[0]
    runs = summary["metrics"][metric.name]["per_run"]
    scored_on = summary.get("scored_on", "held_out").replace("_", "-")
    if config.training.reports_best and scored_on == "held-out":
        scored_on = "best held-out"  # chosen by the set that it is of
    for run in runs:
        value = "diverged *" if run["diverged"] else number(run["value"])
        say(
            f"{scored_on} {metric.name}: {value} ({metric.baseline_name} {metric.baseline:.4g}; "
            f"seed {run['seed']}, learning rate {run['learning_rate']:g})"
        )
    say(
        f"{summary['steps']} steps, {summary['examples']} examples, "
        f"{summary['seconds']:.0f} s of training on {summary['device']}"
    )
    curve = work.path / "figures" / "learning_curve.png"
    if curve.exists():
        say(f"figure: {curve}")
    say(f"summary: {work.path / 'summary.json'}")
