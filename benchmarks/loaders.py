"""How fast data come, beside training on them: ``python -m benchmarks.loaders``.

A training step is that of the experiment's default, the loader alone is its task's ``draw``:
windows read from a text, stays and reviews drawn or gathered in an order of their own. Both are
compiled programs of as many steps, timed in turn.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from absl import flags
from absl.flags import FlagValues

from benchmarks import process
from benchmarks.command import fail, markdown, parse, save, say
from benchmarks.pair import interleave

EXPERIMENTS = ("language_model", "stay", "sentiment")


def define(values: FlagValues) -> None:
    """Defines the program's flags."""
    flags.DEFINE_list(
        "experiments", list(EXPERIMENTS), "whose defaults are timed", flag_values=values
    )
    flags.DEFINE_integer("steps", 20, "timed together", 1, flag_values=values)


def measure(experiment: str, settings: dict[str, Any], steps: int, repeats: int) -> dict[str, Any]:
    """Times of training and of drawing alone; runs in a process of its own (``process.call``).

    Args:
      experiment: its name in the catalog.
      settings: beside its default.
      steps: timed together.
      repeats: pairs of times.
    """
    import jax
    import jax.numpy as jnp

    from experiments.catalog import EXPERIMENTS as CATALOG
    from experiments.machine.mesh import Rows
    from experiments.settings.resolver import resolve
    from experiments.training.learner import Learner

    chosen = next(one for one in CATALOG if one.name == experiment)
    config = resolve(chosen, "small", settings)
    learner = Learner(config)
    learner.prepare()
    state, data, key = learner.initial(), learner.data, jax.random.key(0)
    task, batch = learner.task, config.training.batch_size
    rows = Rows(jnp.int32(0), batch, batch)
    start = task.start(learner.fresh, data, key, rows)

    @jax.jit
    def draw(data: Any, stream: Any) -> tuple[Any, jax.Array]:
        def body(step: jax.Array, state: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
            stream, total = state
            window, stream = task.draw(lambda *_: None, data, stream, key, step, rows)
            sums = [leaf.astype(jnp.float32).sum() for leaf in jax.tree.leaves(window)]
            return stream, total + sum(sums)  # all of a window is made

        return jax.lax.fori_loop(0, steps, body, (stream, jnp.float32(0)))

    done = 0

    def train() -> None:
        nonlocal state, done
        state = learner.advance(state, done, done + steps)
        done += steps

    times = interleave(lambda: jax.block_until_ready(draw(data, start)), train, repeats)
    units = batch * task.units_per_row * steps
    return {"experiment": experiment, "unit": task.unit, "units": units, "times": times}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = []
    for row in rows:
        times = row["times"]
        ratio = times["ratio"]
        lines.append(
            [
                f"`{row['experiment']}`",
                row["unit"],
                *(f"{row['units'] / times[side]['median']:,.0f}" for side in ("ours", "theirs")),
                f"{ratio['median']:.1f} [{ratio['low']:.1f}, {ratio['high']:.1f}]",
            ]
        )
    titles = ["experiment", "unit", "loader, a second", "training, a second", "ratio"]
    return markdown(titles, lines)


def main(argv: Sequence[str]) -> int:
    """The program; returns its exit status."""
    options = parse("loaders", define, argv)
    rows = []
    for name in options["experiments"]:
        if name not in EXPERIMENTS:
            fail("loaders", f"An experiment is one of {', '.join(EXPERIMENTS)}, got {name!r}.")
    for name in options["experiments"]:
        say(name)
        settings: dict[str, Any] = {"experiment": name, "settings": {}}
        arguments = {**settings, "steps": options["steps"], "repeats": options["repeats"]}
        rows.append(process.call("benchmarks.loaders.measure", arguments, options["devices"]))
        save(options["out"], "loaders", rows, table(rows))
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
