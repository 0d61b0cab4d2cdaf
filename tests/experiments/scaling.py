"""A binary that trains tiny models of four tasks and keeps what must not depend on the devices.

``python -m tests.experiments.scaling FILE NAME=MESH ...`` writes, for each of the names in
``CASES``, the gradient of the first step, the losses of 20 steps in float32 and those of 200 in
float64. Where a mesh is empty it is that of one device.
"""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from experiments.command import flags
from experiments.command.main import join_processes, main
from experiments.copy.settings import COPY
from experiments.language_model.settings import LANGUAGE_MODEL
from experiments.match.settings import MATCH
from experiments.match.task import MatchTask
from experiments.pixels.settings import PIXELS
from experiments.settings.resolver import resolve
from experiments.training.learner import Learner
from experiments.training.task import Resident

RUNS = {"float32": 20, "float64": 200}  # steps
_SHARED = {"hidden_size": 8, "batch_size": 8, "clip_norm": 1.0, "learning_rates": (0.01,)}
_ROOMS = {"explore_steps": 1, "distractor_steps": 2, "reward_steps": 4, "code": 6, "decoder": ()}
CASES = {
    "copy": (
        COPY,
        {"cell": "gato", "length": 4, "embedding": 3, "decoder": (8,), "seeds": 2}
        | {"learning_rates": (0.003, 0.001), "detach_prob": 0.25},
    ),
    "pixels": (PIXELS, {"cell": "lstm", "decoder": (8,), "dropout": 0.25}),
    "language_model": (
        LANGUAGE_MODEL,
        {"cell": "ur_lstm", "embedding": 6, "tied": True, "inputs": "embed", "window": 8}
        | {"clip_norm": 0.25},
    ),
    "match": (MATCH, {"cell": "lstm", "held_out_episodes": 8, **_ROOMS}),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedMatch(MatchTask):
    """An agent that does what was recorded: a choice by rounded numbers could be another one."""

    def data(self):
        steps = max(RUNS.values())
        shape = (steps, self.span, _SHARED["batch_size"])
        return Resident(np.random.default_rng(0).integers(0, 4, shape).astype(np.int32))

    def shapes(self, rows):
        del rows
        return jax.eval_shape(lambda: jnp.asarray(self.data().arrays))

    def draw(self, act, data, stream, key, step, rows):
        time = iter(range(self.span))
        recorded = rows.of(data[step], 1)

        def forced(key, logits):
            """The recorded actions of the next step of all rows."""
            del key, logits
            return recorded[next(time)]

        with _unrolled(), _choices(forced):
            return super().draw(act, (), stream, key, step, rows)


@contextlib.contextmanager
def _replaced(place, name, value):
    before = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, before)


def _choices(forced):
    """``jax.vmap(jax.random.categorical)`` is another function while a step is traced."""
    vmap, categorical = jax.vmap, jax.random.categorical

    def mapped(function, *arguments, **options):
        return forced if function is categorical else vmap(function, *arguments, **options)

    return _replaced(jax, "vmap", mapped)


def _unrolled():
    """``jax.lax.scan`` over keys is a loop of Python, so that each step has its own number."""
    scan = jax.lax.scan

    def loop(body, carry, keys, *arguments, **options):
        if not (isinstance(keys, jax.Array) and jnp.issubdtype(keys.dtype, jax.dtypes.prng_key)):
            return scan(body, carry, keys, *arguments, **options)
        values = []
        for key in keys:
            carry, value = body(carry, key)
            values.append(value)
        return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *values)

    return _replaced(jax.lax, "scan", loop)


def measured(name, mesh, dtype):
    """The gradient of the first step by parameter, and the losses of all ``[steps, ...]``."""
    experiment, settings = CASES[name]
    steps = RUNS[dtype]
    known = _SHARED | settings | {"dtype": dtype, "mesh": mesh, "steps": steps}
    config = resolve(experiment, "small", known)
    if name == "match":
        config = dataclasses.replace(config, task=RecordedMatch(**vars(config.task)))
    learner = Learner(config)
    with contextlib.closing(learner):
        learner.prepare()
        state, totals = learner.initial(), []
        for step in range(steps):
            state = learner.advance(state, step, step + 1)
            totals.append(learner.mesh.fetch(state.loss_total))
            if step == 0:
                first = learner.fetch(state)
    # Adam's first moment after one step is a tenth of the gradient.
    gradient = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(first.optimizer)
    }
    gradient = {key: leaf for key, leaf in gradient.items() if ".mu." in key}
    return gradient, np.diff(np.stack(totals), axis=0, prepend=0)


def begin(flag_values):
    """Measures everything, and writes it if this is the first process."""
    path, *cases = flag_values.pop("arguments")
    join_processes("scaling", flag_values)
    arrays = {}
    for case in cases:
        name, _, mesh = case.partition("=")
        for dtype in RUNS:
            gradient, losses = measured(name, mesh or "data:1", dtype)
            arrays |= {f"{case}/{dtype}/{key}": leaf for key, leaf in gradient.items()}
            arrays[f"{case}/{dtype}/losses"] = losses
    if jax.process_index() == 0:
        np.savez(path, **arrays)


if __name__ == "__main__":
    main("scaling", flags.define_run, begin, arguments="FILE NAME=MESH ...")
