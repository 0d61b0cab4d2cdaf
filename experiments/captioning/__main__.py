"""Say what a picture shows: ``python -m experiments.captioning``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from experiments.captioning.settings import CAPTIONING
from experiments.command.main import experiment_main, train_one

if TYPE_CHECKING:
    from absl.flags import FlagValues

_MOST_SHOWN = 36


def define(values: FlagValues) -> None:
    """The flag of the figures, beside those of the settings."""
    from experiments.command import flags

    flags.add(values, "show", "draw so many test pictures with true captions and the model's", int)


def begin(flag_values: dict[str, Any]) -> None:
    """Trains, says the scores beside the headline and draws figures.

    Raises:
      UserError: if a wish cannot be met.
    """
    from experiments.captioning import show
    from experiments.command import runs
    from experiments.records.reporting import number, say
    from experiments.records.storage import tolerated
    from experiments.settings.errors import UserError

    count = flag_values.pop("show", 0)
    if not 0 <= count <= _MOST_SHOWN:
        raise UserError(f"--show must be at least 0 and at most {_MOST_SHOWN}, got {count}.")
    workdir = train_one(CAPTIONING, flag_values)
    if workdir is None:
        return
    finished = runs.finished(workdir, [CAPTIONING])
    metrics = finished.summary["metrics"]
    names = [metric.name for metric in finished.config.task.metrics[1:]]
    for lane, (seed, rate) in enumerate(finished.config.training.lanes):
        if not finished.diverged[lane]:
            scores = (f"{name} {number(metrics[name]['per_run'][lane]['value'])}" for name in names)
            say(f"test {', '.join(scores)} (seed {seed}, learning rate {rate:g})")
    if count:
        with tolerated(workdir / "figures", say):
            show.draw(finished, workdir, count)


if __name__ == "__main__":
    experiment_main(CAPTIONING, define, begin)
