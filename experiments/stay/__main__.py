"""Predict a stay above one week: ``python -m experiments.stay --cell=gato``."""

from __future__ import annotations

from typing import Any

from experiments.command.main import experiment_main, train_one
from experiments.stay.settings import STAY


def begin(flag_values: dict[str, Any]) -> None:
    """Trains, says the scores beside the headline and draws the figure.

    Raises:
      UserError: if a wish cannot be met.
    """
    from experiments.command import runs
    from experiments.records.reporting import number, say
    from experiments.records.storage import tolerated
    from experiments.stay import roc

    workdir = train_one(STAY, flag_values)
    if workdir is None:
        return
    finished = runs.finished(workdir, [STAY])
    metrics = finished.summary["metrics"]
    other_metrics = finished.config.task.metrics[1:]
    for lane, (seed, rate) in enumerate(finished.config.training.lanes):
        if not finished.diverged[lane]:
            values = [
                number(metrics[metric.name]["per_run"][lane]["value"]) for metric in other_metrics
            ]
            scores = (
                f"{metric.name} {value}"
                + f" ({metric.baseline_name} {metric.baseline:.4g})" * (metric.name == "accuracy")
                for metric, value in zip(other_metrics, values, strict=True)
            )
            say(f"test {', '.join(scores)} (seed {seed}, learning rate {rate:g})")
    with tolerated(workdir / "figures", say):
        roc.draw(finished, workdir)


if __name__ == "__main__":
    experiment_main(STAY, begin=begin)
