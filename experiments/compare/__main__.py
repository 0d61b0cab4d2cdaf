"""Overlay the learning curves of runs: ``python -m experiments.compare DIR [DIR ...]``.

Draws one figure and prints one Markdown table. Runs that still train are shown as far as
they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.command.main import main
from experiments.settings.errors import UserError

if TYPE_CHECKING:
    from absl.flags import FlagValues


def define(values: FlagValues) -> None:
    """Defines the flags of this binary."""
    from experiments.command import flags

    style = "the line and band over seeds: mean and range, or median and quartiles; default: mean"
    flags.add(values, "style", style, choices=("mean", "median"))
    metric = "one of the task's, or of training, such as train_loss; default: the task's headline"
    flags.add(values, "metric", metric)
    figure = "a file, or a directory in which it is comparison.png; default: runs/comparison.png"
    flags.add(values, "figure", figure)


def begin(flag_values: dict[str, Any]) -> None:
    """Prints the table and draws the figure.

    Raises:
      UserError: if a wish cannot be met.
    """
    from experiments.compare import table

    workdirs = [Path(workdir) for workdir in flag_values["arguments"]]
    if not workdirs:
        raise UserError("Name at least one workdir, such as runs/adding/gato-small-*.")
    places = [workdir.resolve() for workdir in workdirs]
    for workdir, place in zip(workdirs, places, strict=True):
        if places.count(place) > 1:
            raise UserError(f"{workdir} is named twice: a run is compared with others.")
    figure = figure_path(flag_values.get("figure", "runs/comparison.png"))
    table.run(workdirs, flag_values.get("style", "mean"), figure, flag_values.get("metric"))


def figure_path(place: str) -> Path:
    """The file that ``--figure`` means."""
    path = Path(place)
    if place.endswith("/") or path.is_dir():
        return path / "comparison.png"
    return path if path.suffix else path.with_suffix(".png")


if __name__ == "__main__":
    main("compare", define, begin, arguments="DIR [DIR ...]")
