"""``python -m benchmarks.agents``: environment steps a core second, alone and with an agent.

``alone``: random actions; every observation is computed. ``acting``: the agent of the protocol
``small`` chooses them. ``learning``: as it trains, updates included. The batch is split over the
XLA devices; a rate is the median of some runs of a compiled program, with the slowest and fastest.
Counted are seconds of cores, not of the clock, so that other work on the machine matters less.
"""

from __future__ import annotations

import functools
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from absl import flags
from absl.flags import FlagValues

from benchmarks.command import fail, markdown, parse, save, say

CHALLENGES: dict[str, dict[str, Any]] = {
    "passive_match, pycolab": {},
    "active_match, pycolab, apples": {"challenge": "active_match", "apples": 10},
    "active_match, dmlab, apples": {"challenge": "active_match", "rules": "dmlab", "apples": 10},
    "t_maze, 30 steps": {"challenge": "t_maze", "length": 30},
    "repeat_previous": {"challenge": "repeat_previous"},
    "count_recall": {"challenge": "count_recall"},
}
_ROOMS = {"explore_steps": 15, "distractor_steps": 90, "reward_steps": 15, "shuffled": True}
_WINDOW = 120  # steps of a run, and of an update


def define(values: FlagValues) -> None:
    """Defines the program's flags."""
    flags.DEFINE_integer("batch_size", 1024, "copies of an environment", 1, flag_values=values)


def main(argv: Sequence[str]) -> None:
    """Measures, prints a table and leaves it in ``--out``."""
    options = parse("agents", define, argv)
    rows = []
    for name, settings in CHALLENGES.items():
        rates = measure(settings, options["batch_size"], options["repeats"], options["devices"])
        rows.append([name, *(_rate_text(rates[way]) for way in ("alone", "acting", "learning"))])
        say(" | ".join(rows[-1]))
    titles = ("environment", "alone", "acting", "learning")
    table = markdown(titles, rows)
    print(table)
    save(options["out"], "agents", rows, table)


def measure(
    settings: dict[str, Any], batch_size: int, repeats: int, devices: int
) -> dict[str, list[float]]:
    """Environment steps a core second of each repeat.

    Args:
      settings: of match, beside those of ``small``.
      batch_size: copies.
      repeats: how many runs are timed.
      devices: that must be there.
    """
    import jax
    import jax.numpy as jnp

    from experiments.machine.mesh import WHOLE, split
    from experiments.match.environments.base import restarted
    from experiments.match.settings import MATCH
    from experiments.match.task import MatchTask
    from experiments.settings.resolver import resolve
    from experiments.training.learner import Learner

    if len(jax.devices()) != devices:
        fail("agents", f"there are {len(jax.devices())} devices, not --devices={devices}.")
    rooms = _ROOMS if "match" in settings.get("challenge", "passive_match") else {}
    overrides = {**rooms, **settings, "batch_size": batch_size, "window": _WINDOW, "steps": 2**20}
    learner = Learner(resolve(MATCH, "small", overrides))
    learner.load()
    learner.prepare()
    task, mesh, state = learner.task, learner.mesh, learner.initial()
    assert isinstance(task, MatchTask)

    def alone(stream: Any, key: Any) -> Any:
        environment, rows = task.environment, mesh.rows(batch_size)

        def step(states: Any, key: Any) -> tuple[Any, Any]:
            keys = jax.random.split(jax.random.fold_in(key, rows.first), rows.count)
            action = jax.random.randint(key, (rows.count,), 0, environment.actions, jnp.int32)
            turn = jax.vmap(environment.step)(keys, states, action)
            _, states = restarted(environment, keys, turn.done, turn.observation, turn.state)
            return states, turn.observation.sum(dtype=jnp.int32)

        return jax.lax.scan(step, stream.environment, jax.random.split(key, _WINDOW))[1]

    def acting(params: Any, stream: Any, key: Any) -> Any:
        act = functools.partial(learner.apply, params)
        rows = mesh.rows(batch_size)
        return task.draw(act, (), stream, key, jnp.int32(0), rows)[0].rewards

    key = jax.random.key(0)
    row_specs = split(task.stream_axes)
    run_alone = jax.jit(mesh.everywhere(alone, (row_specs, WHOLE), WHOLE))
    run_acting = jax.jit(mesh.everywhere(acting, (WHOLE, row_specs, WHOLE), split(1)))
    ways: dict[str, Callable[[], Any]] = {
        "alone": lambda: run_alone(state.stream, key),
        "acting": lambda: run_acting(state.params, state.stream, key),
    }
    rates = {name: _timed(way, repeats, batch_size) for name, way in ways.items()}
    steps = itertools.count()

    def learning() -> Any:
        nonlocal state
        step = next(steps)
        state = learner.advance(state, step, step + 1)
        return state

    return rates | {"learning": _timed(learning, repeats, batch_size)}


def _timed(way: Callable[[], Any], repeats: int, batch_size: int) -> list[float]:
    import jax

    jax.block_until_ready(way())
    rates = []
    for _ in range(repeats):
        start = time.process_time()
        jax.block_until_ready(way())
        rates.append(_WINDOW * batch_size / (time.process_time() - start))
    return rates


def _rate_text(rates: list[float]) -> str:
    return f"{np.median(rates):,.0f} ({min(rates):,.0f}-{max(rates):,.0f})"


if __name__ == "__main__":
    from experiments.command.main import use_all_cores

    use_all_cores()
    main(sys.argv)
