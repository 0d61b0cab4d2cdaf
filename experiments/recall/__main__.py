"""Say again what was shown, and what came after it: ``python -m experiments.recall``."""

from __future__ import annotations

from typing import Any

from experiments.command.main import experiment_main, train_one
from experiments.recall.settings import RECALL


def begin(flag_values: dict[str, Any]) -> None:
    """Trains, and draws one held-out sequence with the model's answer.

    Raises:
      UserError: if a wish cannot be met.
    """
    from experiments.command import runs
    from experiments.recall import figure
    from experiments.records.reporting import say
    from experiments.records.storage import tolerated

    workdir = train_one(RECALL, flag_values)
    if workdir is None:
        return
    with tolerated(workdir / "figures", say):
        figure.draw(runs.finished(workdir, [RECALL]), workdir)


if __name__ == "__main__":
    experiment_main(RECALL, begin=begin)
