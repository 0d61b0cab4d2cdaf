"""A tiny experiment whose host reads each window and whose state streams from window to window.

``python -m tests.experiments.streaming`` is its binary, for tests of several processes. With
``CHECKS=DIRECTORY`` in the environment it does not train a run but ``checks`` what it can; with
``MET=FILE`` each process adds a line to that file once all have met; with
``DIE=PROCESS:STEP`` that process kills itself when it reads the window of that step.
"""

import dataclasses
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from experiments.command.main import experiment_main, train_one
from experiments.settings.errors import UserError
from experiments.settings.fields import Sourced, setting
from experiments.settings.metrics import Metric
from experiments.settings.resolver import Experiment, resolve
from experiments.settings.sources import LIBRARY_CELLS, Protocol
from experiments.training import loop
from experiments.training.learner import Learner
from experiments.training.models import Decoder, SequenceModel
from experiments.training.task import BaseTask, Outcome
from recurrent_gates.cells import HiddenState

READ = set()  # (seed, row) of the training windows that this process has read
SPLIT = {"seeds": 4, "mesh": "lanes:4,data:2"}  # of the runs of eight devices
SIGNALS = {}  # {step: signal} that the process sends itself when it reads that step's window


class Window(NamedTuple):
    """Inputs ``[T, B, 2]`` and targets ``[T, B]``, float32."""

    inputs: np.ndarray
    targets: np.ndarray


class Windows:
    """Noise, and its sums over time and features so far, by number."""

    def __init__(self, task):
        self._task = task

    def read(self, seed, step, rows):
        READ.update((seed, row) for row in rows.tolist())
        if (number := SIGNALS.pop(step, None)) is not None:
            os.kill(os.getpid(), number)
        return self._drawn([(0, seed, step, row) for row in rows])

    def read_held_out(self, name, index, rows):
        return self._drawn([(SETS[name], index, row) for row in rows])

    def _drawn(self, numbers):
        shape = (self._task.window, 2)
        drawn = [np.random.default_rng(entry).standard_normal(shape) for entry in numbers]
        inputs = np.stack(drawn, axis=1)
        targets = inputs.sum(axis=2).cumsum(axis=0)
        return Window(inputs.astype(np.float32), targets.astype(np.float32))


SETS = {"validation": 16, "test": 6}  # rows: 6 cannot be split over 8 devices


class Part:
    """A held-out set."""

    windows = 2

    def __init__(self, task, rows):
        self._task, self.rows = task, rows

    def start(self, fresh, data, rows):
        return self._task.start(fresh, data, None, rows)

    def draw(self, act, data, stream, index, rows):
        return data, stream


class Raw(nn.Module):
    """Inputs are features already."""

    def __call__(self, inputs):
        return inputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamingSettings:
    """The experiment."""

    window: int = setting("steps of a window", least=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamingTask(StreamingSettings, BaseTask):
    """A running sum, told window by window to a cell with one unit for each column of the state."""

    name = "streaming"
    metrics = (Metric("mse", False, 1.0, "baseline"),)
    axes = 1
    units = 4

    def module(self, recurrent, model):
        return SequenceModel(encoder=Raw(), recurrent=recurrent, decoder=Decoder((1,)))

    def example(self):
        return (jnp.zeros((1, 1, 2), jnp.float32),)

    def initial(self, params):
        """Without a draw, which would take seconds to compile."""

        def waves(leaf):
            numbers = jnp.arange(leaf.size, dtype=leaf.dtype).reshape(leaf.shape)
            return jnp.sin(numbers + 1) / 2

        return jax.tree.map(waves, params)

    def data(self):
        return Windows(self)

    def shapes(self, rows):
        shape = (self.window, rows)
        return Window(
            jax.ShapeDtypeStruct((*shape, 2), jnp.float32), jax.ShapeDtypeStruct(shape, jnp.float32)
        )

    def start(self, fresh, data, key, rows):
        columns = jnp.arange(self.units, dtype=jnp.int32)
        numbers = rows.numbers[:, None] + columns[None]
        return HiddenState(jnp.cos(numbers.astype(jnp.float32)))

    def draw(self, act, data, stream, key, step, rows):
        return data, stream

    def loss(self, apply, params, window, stream, train):
        dtype = params["decoder"]["Dense_0"]["bias"].dtype
        carry = jax.tree.map(lambda leaf: leaf.astype(dtype), stream)
        carry, outputs = apply(params, window.inputs, carry=carry, return_carry=True)
        error = jnp.square(outputs[..., 0] - window.targets).mean(axis=0)
        stream = jax.tree.map(
            lambda leaf, like: jax.lax.stop_gradient(leaf).astype(like.dtype), carry, stream
        )
        total = error.sum(), len(error)
        return Outcome(total, {"mse": total}, stream, () if train else error)

    def held_out(self, data, devices):
        return {name: Part(self, rows) for name, rows in SETS.items()}

    def scores(self, sums, outputs):
        """The mean of the outputs, which say the same as the sums."""
        mean = np.concatenate(outputs).mean()
        np.testing.assert_allclose(mean, sums["mse"][0] / sums["mse"][1], rtol=1e-5)
        return {"mse": mean}


def _sourced(**values):
    return {name: Sourced(value, "ours: tiny") for name, value in values.items()}


STREAMING = Experiment(
    "streaming",
    StreamingSettings,
    lambda: StreamingTask,
    {
        "small": Protocol(
            _sourced(
                window=3,
                cell="rnn",
                hidden_size=StreamingTask.units,
                embedding=0,
                decoder=(),
                steps=16,
                batch_size=8,
                learning_rates=(0.01,),
                clip_norm=0.0,
                eval_every=4,
            ),
            cells=LIBRARY_CELLS,
        )
    },
)


def config(**settings):
    """A config of the experiment."""
    return resolve(STREAMING, "small", settings)


def measured(**settings):
    """Losses ``[steps, ...]`` of a run, and its state after one step and after all."""
    run = config(**settings)
    learner = Learner(run)
    learner.prepare()
    state = learner.advance(learner.initial(), 0, 1)
    first = learner.mesh.fetch(state)
    totals = [np.zeros_like(first.loss_total), first.loss_total]
    for step in range(1, run.training.steps):
        state = learner.advance(state, step, step + 1)
        totals.append(learner.mesh.fetch(state.loss_total))
    learner.close()
    return np.diff(np.stack(totals), axis=0), first, learner.mesh.fetch(state)


def equality(path):
    """Losses and states of a run of three lanes in float32 and of one in float64, into a file."""
    arrays = {}
    for dtype, steps, settings in (
        ("float32", 20, {"seeds": 3}),
        ("float64", 200, {"dtype": "float64"}),
    ):
        losses, first, last = measured(steps=steps, **settings)
        arrays[f"{dtype}.losses"] = losses
        for moment, state in (("first", first), ("last", last)):
            for name, leaf in jax.tree_util.tree_leaves_with_path(state):
                key = jax.tree_util.keystr(name, simple=True, separator=".")
                arrays[f"{dtype}.{moment}.{key}"] = leaf
    np.savez(path, **arrays)


def checks(given):
    """Everything that one process, or a pair of them, can show without dying."""
    directory = Path(os.environ["CHECKS"])
    if jax.process_count() == 1:
        checks_of_one(directory)
    else:
        checks_of_a_pair(directory, jax.process_index())


def checks_of_one(directory):
    """The same numbers on eight devices and on one, which go on with what a pair has begun."""
    devices = jax.devices()
    equality(directory / "eight.npz")
    for few in (2, 1):
        jax.devices = lambda few=few: devices[:few]
        shutil.copytree(directory / "whole", directory / f"on_{few}")
        loop.run(config(seeds=4, steps=20), directory / f"on_{few}")
    equality(directory / "one.npz")


def checks_of_a_pair(directory, this):
    """Numbers; a run, and one that the second process is asked to stop; a workdir that is refused.

    The second process has other workdirs, which must never be made.
    """
    READ.clear()
    equality(directory / f"pair{this}.npz")
    np.save(directory / f"rows{this}.npy", sorted({row for _, row in READ}))
    try:
        Learner(config(batch_size=12))
    except UserError as error:
        (directory / f"refused{this}").write_text(str(error))
    whole, asked = (directory / (name + "_other" * this) for name in ("whole", "asked"))
    READ.clear()
    loop.run(config(**SPLIT), whole)
    np.save(directory / f"seeds{this}.npy", sorted({seed for seed, _ in READ}))
    if this == 1:
        SIGNALS[12] = signal.SIGTERM
    assert loop.run(config(**SPLIT), asked) is None
    assert loop.run(config(**SPLIT), asked) is not None
    loop.run(config(**SPLIT, seed=7), whole)


def announced(flag_values):
    """Trains, once the others are there and that is noted in ``MET``."""
    with open(os.environ["MET"], "a") as file:
        file.write("met\n")
    train_one(STREAMING, flag_values)


def begun():
    """What the binary does; None: it trains."""
    return checks if "CHECKS" in os.environ else announced if "MET" in os.environ else None


if __name__ == "__main__":
    loop._CHECKPOINT_SECONDS = 0.0
    loop.learning_curve.draw = lambda *_: None
    process, _, step = os.environ.get("DIE", "").partition(":")
    if f"--process_id={process}" in sys.argv:
        SIGNALS[int(step)] = signal.SIGKILL
    experiment_main(STREAMING, begin=begun())
