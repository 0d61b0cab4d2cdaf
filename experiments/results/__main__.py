"""Keep results and write the page of them: ``python -m experiments.results [--to=NAME DIR ...]``.

``--to=adding DIR ...`` puts the runs of workdirs, or of all workdirs in a directory such as a
sweep's, into ``docs/results/adding.json``. Then, and without it, ``docs/RESULTS.md`` and its
figures are made anew from all that is in ``docs/results``; with ``--directory=X`` they are
``RESULTS.md`` and ``images/results`` beside X.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.command.main import main
from experiments.settings.errors import UserError

if TYPE_CHECKING:
    from absl.flags import FlagValues


def define(values: FlagValues) -> None:
    """Defines the flags of this binary."""
    from experiments.command import flags

    flags.add(values, "to", "the file of results, without .json, that the runs are added to")
    flags.add(values, "unfinished", "take runs that are not finished, with their step", bool)
    place = "where the results are; RESULTS.md and images/results go beside it; default:"
    flags.add(values, "directory", f"{place} docs/results")


def begin(flag_values: dict[str, Any]) -> None:
    """Adds runs to the data, then writes the page.

    Raises:
      UserError: if a wish cannot be met.
    """
    from experiments.command import tables
    from experiments.records.reporting import say
    from experiments.results import figure, page, records

    directory = Path(flag_values.get("directory", "docs/results"))
    workdirs = [Path(workdir) for workdir in flag_values["arguments"]]
    if workdirs and "to" not in flag_values:
        raise UserError("--to=NAME says which file of results the runs are for.")
    if "to" in flag_values and not workdirs:
        raise UserError(f"--to={flag_values['to']} needs workdirs, such as runs/sweep/adding.")
    if not directory.is_dir():
        raise UserError(f"there is no directory {directory}: start from the clone's root.")
    path = directory.parent / "RESULTS.md"
    page.check_place(path)
    if workdirs:
        records.add(
            workdirs, directory, flag_values["to"], bool(flag_values.get("unfinished", False))
        )
        name = flag_values["to"]
        pattern = re.compile(rf"^\{{\w+ {name}\b", re.MULTILINE)
        if not any(pattern.search(section.read_text()) for section in directory.glob("*.md")):
            say(f"no page shows {name}: put a line {{runs {name}}} into one of {directory}/*.md")
    tables.write(path, page.text(directory))
    print(path)
    for page_figure in page.figures(directory):
        place = directory.parent / "images" / "results" / page_figure.file
        if not figure.is_of(place, page_figure):
            figure.draw(page_figure, place)
            print(place)


if __name__ == "__main__":
    main("results", define, begin, arguments="[DIR ...]")
