"""The main function of a binary: from the command line to a run.

Little is imported before ``main`` has begun: until then an interrupt is a traceback.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from pathlib import Path

    from experiments.command import flags
    from experiments.settings.resolver import Experiment

_OF_SLURM = {"SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID"}
HELP = {"--help", "-help", "-h", "-?", "--helpshort", "--helpfull"}

Begin = Callable[[dict[str, Any]], None]


def main(
    name: str,
    define: flags.Define,
    begin: Begin,
    *,
    experiment: Experiment | None = None,
    arguments: str = "",
) -> None:
    """Parses the command line and begins.

    Exits with 2 and one sentence on standard error where a wish cannot be met, with 1 and one
    sentence where the machine fails.

    Args:
      name: of the binary.
      define: defines its flags.
      begin: what it does with those that are given; what stood beside flags is ``"arguments"``.
      experiment: what it trains, for its defaults in ``--help``.
      arguments: the name of what may stand beside flags in ``--help``; none: nothing may.
    """
    signal.signal(signal.SIGINT, lambda *_: _interrupted(name))
    from absl import app, logging
    from absl import flags as absl_flags

    from experiments.command import flags
    from experiments.settings.errors import (
        DivergedError,
        FailedRunsError,
        ProcessError,
        StorageError,
        UserError,
    )

    usage = f"python -m experiments.{name} [--flag=value ...] {arguments}".rstrip()

    def flags_parser(argv: Sequence[str]) -> dict[str, Any]:
        absl_flags.FLAGS(argv[:1])  # absl's own stay at their defaults
        if HELP & set(argv[1:]):
            with contextlib.suppress(BrokenPipeError):  # whoever read it, such as head, has enough
                print(flags.help_text(usage, define, experiment), flush=True)
                sys.exit(0)
            # Python flushes the rest at its end, and would say it again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
        return _parse(name, argv, define, bool(arguments))

    def body(flag_values: dict[str, Any]) -> None:
        logging.set_verbosity(logging.WARNING)
        use_all_cores()
        keep_compilations()
        try:
            begin(flag_values)
            sys.stdout.flush()
        except UserError as error:
            fail(name, str(error))
        except (StorageError, ProcessError, FailedRunsError, DivergedError) as error:
            fail(name, str(error), 1)
        except BrokenPipeError:  # whoever read it, such as ``head``, has enough
            fail(name, "nobody reads the standard output.", 1)

    app.run(body, flags_parser=flags_parser)


def _parse(name: str, argv: Sequence[str], define: flags.Define, arguments: bool) -> dict[str, Any]:
    """The flags' values by name; ends the binary with a sentence if one cannot be."""
    from absl import flags as absl_flags

    from experiments.command import flags

    try:
        if not arguments:
            return flags.parse(argv, define)
        flag_values, operands = flags.parse_with_arguments(argv, define)
        return {**flag_values, "arguments": operands}
    except absl_flags.Error as error:
        fail(name, str(error))


def experiment_main(
    experiment: Experiment,
    define: flags.Define = lambda values: None,
    begin: Begin | None = None,
) -> None:
    """The main function of a binary that trains.

    Args:
      experiment: what it trains.
      define: defines the flags that only this binary has, beside those of the settings.
      begin: what it does; None: it trains one run.
    """

    def define_all(values: Any) -> None:
        from experiments.command import flags

        flags.define_experiment(experiment, values)
        define(values)

    def begin_together(flag_values: dict[str, Any]) -> None:
        if not experiment.study:  # it reads its own runs again, in one process
            join_processes(experiment.name, flag_values)
        if begin is None:
            train_one(experiment, flag_values)
        else:
            begin(flag_values)

    main(experiment.name, define_all, begin_together, experiment=experiment)


def train_one(
    experiment: Experiment,
    flag_values: Mapping[str, Any],
    illustrate: Callable[[Any, Any], Mapping[str, str]] | None = None,
) -> Path | None:
    """Describes or trains.

    Args:
      experiment: what is trained.
      flag_values: by name.
      illustrate: see ``loop.run``.

    Returns:
      The workdir of a run that has come to its end, in the first process; else None.

    Raises:
      UserError: if a wish cannot be met.
    """
    import json
    from pathlib import Path

    from experiments.command import ahead, flags, runs
    from experiments.machine.processes import is_first
    from experiments.settings.resolver import resolve
    from experiments.training import loop

    request = flags.request(experiment, flag_values)
    config = resolve(experiment, request.protocol, request.settings)
    if request.describe:
        description = json.dumps(runs.description(experiment, config), indent=2)
        if is_first():
            print(description)
        return None
    if request.compile_for:
        print(json.dumps(ahead.report(config, request.compile_for), indent=2))
        return None
    cell = config.model.cell.replace(":", ".")
    default = os.path.join("runs", experiment.name, f"{cell}-{request.protocol}-{config.hash()}")
    workdir = Path(request.workdir or default)
    done = loop.run(config, workdir, request.profile, illustrate, request.storage)
    return workdir if done else None


def join_processes(name: str, flag_values: Mapping[str, Any]) -> None:
    """Joins the processes that train together, before JAX looks for devices: those that flags
    name, else those that a cluster has started. What is compiled ahead is compiled alone.

    Args:
      name: of the binary.
      flag_values: flags.

    Raises:
      UserError: if only some of the flags are given, or they contradict each other.
    """
    from experiments.command.flags import EXPLICIT, exclude
    from experiments.settings.errors import UserError

    values = {flag: flag_values[flag] for flag in EXPLICIT if flag in flag_values}
    for flag in values:
        exclude(flag_values, "compile_for", flag)
    opt_out = flag_values.get("distributed") == "off" or "compile_for" in flag_values
    if not values:
        if not opt_out and _started_by_a_cluster():
            _join(name)
        return
    if opt_out:
        raise UserError(f"--distributed=off contradicts --{next(iter(values))}.")
    if len(values) < len(EXPLICIT):
        missing_flags = " and ".join(f"--{flag}" for flag in EXPLICIT if flag not in values)
        raise UserError(f"several processes need {missing_flags}, too.")
    if not 0 <= values["process_id"] < values["num_processes"]:
        raise UserError(
            f"--process_id must be at least 0 and below --num_processes, got "
            f"{values['process_id']} of {values['num_processes']}."
        )
    _join(name, **values)


def _join(name: str, **values: Any) -> None:
    # Pages about a dead process, where one sentence says it; before XLA is loaded.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "4")
    from experiments.machine.processes import join

    join(name, **values)


def _started_by_a_cluster() -> bool:
    """Whether this may be one of several processes that something has started together.

    That is a step of a SLURM job with several tasks, a GKE pod with several TPU hosts, or a TPU
    VM, which asks its metadata server how many there are.
    """
    import glob
    import importlib.util

    def several(name: str) -> bool:
        return os.environ.get(name, "1") not in ("", "1")

    if several("SLURM_NTASKS") and {*os.environ} >= _OF_SLURM:
        return True
    if not importlib.util.find_spec("libtpu") or os.environ.get("JAX_PLATFORMS") == "cpu":
        return False
    if not (glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")):
        return False
    hosts = os.environ.get("TPU_PROCESS_ADDRESSES") or os.environ.get("TPU_WORKER_HOSTNAMES")
    return several("MEGASCALE_NUM_SLICES") or hosts is None or "," in hosts


def fail(name: str, sentence: str, code: int = 2) -> NoReturn:
    """Ends a binary with a sentence on standard error."""
    text = f"experiments.{name}: {sentence}"
    if "experiments.machine.processes" in sys.modules:  # where it is not, nothing has been joined
        from experiments.machine.processes import leave

        leave(code, text)
    print(text, file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:  # a full disk, or nobody who reads; Python would try again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _interrupted(name: str) -> None:
    """Ends at once: nothing is being trained. An exception could be swallowed anywhere."""
    os.write(2, f"experiments.{name}: interrupted.\n".encode())  # print may be in use
    os._exit(128 + signal.SIGINT)


def use_all_cores() -> None:
    """Makes XLA see as many CPU devices as there are cores, before JAX starts."""
    option = "--xla_force_host_platform_device_count"
    options = os.environ.get("XLA_FLAGS", "")
    if option not in options:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        os.environ["XLA_FLAGS"] = f"{options} {option}={cores}".strip()


def keep_compilations() -> None:
    """Makes JAX keep compiled programs on disk, where a user keeps caches, before JAX starts.

    JAX_COMPILATION_CACHE_DIR names another place; JAX_ENABLE_COMPILATION_CACHE=false keeps none.
    """
    import warnings

    # A cache on a full disk keeps nothing, and the run is none the worse for it.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{caches}/recurrent_gates/xla")
