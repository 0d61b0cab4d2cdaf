"""Train a grid of runs from a file: ``python -m experiments.sweep FILE``.

Runs stand beside each other, a process each: here, on Ray's workers, or as jobs of SLURM. What is
finished is skipped, what was killed goes on, and so does the sweep itself with the same command.
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
    places = "where runs are trained; default: local, processes of this machine"
    flags.add(values, "executor", places, choices=("local", "ray", "slurm"))
    flags.add(values, "gpus_per_run", "GPUs of each run, on Ray and SLURM; default: 0", int)
    clusters = "submitit's: slurm (default), or local, which needs no SLURM"
    flags.add(values, "cluster", clusters, choices=("slurm", "local"))
    flags.add(values, "partition", "SLURM's partition")
    flags.add(values, "minutes", "SLURM's limit of a job, which then goes on; default: 1440", int)
    flags.add(values, "sbatch", "further options of sbatch, such as account=NAME,qos=high")
    flags.add(values, "directory", "where runs and report go; default: runs/sweep/NAME of the file")
    flags.add(values, "describe", "print the commands, train nothing", bool)


def begin(flag_values: dict[str, Any]) -> None:
    """Trains what is not finished, then writes the report.

    Raises:
      UserError: if the file or one of its runs cannot be.
    """
    import contextlib
    from pathlib import Path

    from experiments.command import tables
    from experiments.settings.errors import FailedRunsError, UserError
    from experiments.sweep import executors, plan, pool, report

    if len(flag_values["arguments"]) != 1:
        raise UserError("name one file, such as adding.toml.")
    path = Path(flag_values["arguments"][0])
    name = flag_values.get("executor", "local")
    options = _options(name, flag_values)
    runs = plan.read(path, Path(flag_values.get("directory", Path("runs", "sweep", path.stem))))
    if flag_values.get("describe"):
        print("\n".join(run.line for run in runs))
        return
    directory = runs[0].workdir.parent
    tables.claim(directory, (*report.NAMES, *report.SET_ASIDE, "*.log", "submitit"))
    with contextlib.closing(executors.build(name, options, directory)) as executor:
        failed = pool.train(runs, executor)
    if failed is None:
        return
    report.write(runs)
    if failed:
        raise FailedRunsError(f"{failed} of {len(runs)} runs failed.")


def _options(executor: str, flag_values: dict[str, Any]) -> Any:
    """What the flags say of an executor.

    Raises:
      UserError: if one of them cannot be, or has no effect.
    """
    from experiments.settings.errors import UserError
    from experiments.sweep.executors import Options

    options = {name: flag_values[name] for name in Options._fields if name in flag_values}
    for name in options:
        executor_names = {"processes": "local ray slurm", "gpus_per_run": "ray slurm"}.get(
            name, "slurm"
        )
        if executor not in executor_names.split():
            raise UserError(f"--{name} has no effect with --executor={executor}.")
        if options.get("cluster") == "local" and name in ("partition", "sbatch"):
            raise UserError(f"--{name} has no effect with --cluster=local.")
    for name, minimum, maximum in (
        ("processes", 1, 1024),
        ("gpus_per_run", 0, 1024),
        ("minutes", 1, 525_600),
    ):
        if not minimum <= options.get(name, minimum) <= maximum:
            raise UserError(
                f"--{name} must be at least {minimum} and at most {maximum}, got {options[name]}."
            )
    if "sbatch" in options:
        pairs = [entry.partition("=") for entry in options["sbatch"].split(",")]
        if not all(name and equals and value for name, equals, value in pairs):
            raise UserError(f"--sbatch must be NAME=VALUE,..., got {options['sbatch']}.")
        options["sbatch"] = {name: value for name, _, value in pairs}
    return Options(**options)


if __name__ == "__main__":
    main("sweep", define, begin, arguments="FILE")
