"""Train a grid of runs from a file: ``python -m experiments.sweep FILE``.

Runs stand beside each other, a process each. What is finished is skipped, what was killed goes
on, and so does the sweep itself with the same command.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from experiments.command.main import main

if TYPE_CHECKING:
    from absl.flags import FlagValues


def define(values: FlagValues) -> None:
    """The flags of this binary."""
    from experiments.command import flags

    flags.add(values, "processes", "runs beside each other; default: one for each core", int)
    flags.add(values, "directory", "where runs and report go; default: runs/sweep/NAME of the file")
    flags.add(values, "describe", "print the commands, train nothing", bool)


def begin(flag_values: dict[str, Any]) -> None:
    """Trains what is not finished, then writes the report.

    Raises:
      UserError: if the file or one of its runs cannot be.
    """
    import os
    from pathlib import Path

    from experiments.command import tables
    from experiments.settings.errors import FailedRunsError, UserError
    from experiments.sweep import plan, pool, report

    if len(flag_values["arguments"]) != 1:
        raise UserError("name one file, such as adding.toml.")
    path = Path(flag_values["arguments"][0])
    processes = flag_values.get("processes", len(os.sched_getaffinity(0)))
    if not 1 <= processes <= 1024:
        raise UserError(f"--processes must be at least 1 and at most 1024, got {processes}.")
    runs = plan.read(path, Path(flag_values.get("directory", Path("runs", "sweep", path.stem))))
    if flag_values.get("describe"):
        print("\n".join(run.line for run in runs))
        return
    tables.claim(runs[0].workdir.parent, (*report.NAMES, "*.log"))
    failed = pool.train(runs, processes)
    if failed is None:
        return
    report.write(runs)
    if failed:
        raise FailedRunsError(f"{failed} of {len(runs)} runs failed.")


if __name__ == "__main__":
    main("sweep", define, begin, arguments="FILE")
