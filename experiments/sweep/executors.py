"""Where the runs of a sweep are trained: here, on Ray's workers, or as jobs of SLURM."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from experiments.records.storage import written
from experiments.settings.errors import UserError
from experiments.sweep import process
from experiments.sweep.plan import Run

_LOST = -signal.SIGKILL  # the exit code of a run whose worker is gone


class Job(Protocol):
    """A run that was started."""

    def poll(self) -> int | None:
        """Its exit code; negative: it was killed; None: it has not ended."""

    def stop(self) -> None:
        """Asks it to save and end."""


class Executor(Protocol):
    """Starts runs."""

    slots: int | None
    """How many stand beside each other; None: as many as there are."""

    def start(self, runs: Sequence[Run]) -> list[Job]:
        """A job for each run."""

    def close(self) -> None:
        """Ends what the executor itself started."""


class Options(NamedTuple):
    """What the command line says of an executor.

    Attributes:
      processes: how many runs stand beside each other; None: the executor's own number.
      gpus_per_run: how many GPUs each has, on Ray and SLURM.
      cluster: what submitit submits to: ``"slurm"``, or ``"local"``, processes on this machine.
      partition: SLURM's.
      minutes: SLURM's limit of a job, which goes on in another one then.
      sbatch: further options of sbatch by name.
    """

    processes: int | None = None
    gpus_per_run: int = 0
    cluster: str = "slurm"
    partition: str | None = None
    minutes: int = 24 * 60
    sbatch: Mapping[str, str] = {}


def build(name: str, options: Options, directory: Path) -> Executor:
    """The executor of a name: ``local``, ``ray`` or ``slurm``.

    Args:
      name: of the executor.
      options: of the command line.
      directory: of the sweep.

    Raises:
      UserError: if it cannot be had here.
    """
    if name == "ray":
        return OnRay(options)
    if name == "slurm":
        return OnSlurm(options, directory)
    return Local(options)


def log(run: Run) -> Path:
    """The file that has what a run says, beside its workdir."""
    return run.workdir.with_name(f"{run.workdir.name}.log")


def _cores() -> list[int | None]:
    """The cores that this process may use; None for each where the system does not name them, as
    macOS: no run can be kept on one."""
    if hasattr(os, "sched_getaffinity"):
        return [*sorted(os.sched_getaffinity(0))]
    return [None] * (os.cpu_count() or 1)


class Local:
    """Processes of this machine, each on a core of its own where they are to use all of them.

    Fewer are left to the system: another sweep may run beside this one.
    """

    def __init__(self, options: Options) -> None:
        cores = _cores()
        self.slots: int | None = options.processes or len(cores)
        self._cores = cores if self.slots >= len(cores) else [None]
        self._free = list(range(self.slots))

    def start(self, runs: Sequence[Run]) -> list[Job]:
        return [_Process(run, self._free, self._cores) for run in runs]

    def close(self) -> None:
        """Nothing: each run is a child of this process."""


class _Process:
    def __init__(self, run: Run, free: list[int], cores: Sequence[int | None]) -> None:
        self._slot, self._free = free.pop(0), free
        with written(log(run)):
            self._process: subprocess.Popen[bytes] = process.start(
                run.command, log(run), cores[self._slot % len(cores)]
            )

    def poll(self) -> int | None:
        code = self._process.poll()
        if code is not None:
            self._free.append(self._slot)
        return code

    def stop(self) -> None:
        self._process.terminate()


class OnRay:
    """Tasks of Ray, one CPU each: on the cluster that RAY_ADDRESS names, else on one that is
    started here. The clone and the sweep's directory are at the same path on all machines."""

    def __init__(self, options: Options) -> None:
        self._ray: Any = _module("ray", "ray")
        address = os.environ.get("RAY_ADDRESS", "local")
        workers = options.processes or len(_cores())
        self.slots: int | None = workers
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        cluster_options = (
            {"num_cpus": workers, "include_dashboard": False} if address == "local" else {}
        )
        try:
            self._ray.init(address, log_to_driver=False, logging_level="ERROR", **cluster_options)
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0].rstrip(".")
            raise UserError(f"--executor=ray: {reason}.") from None
        # A run that is lost is tried again by the sweep, which knows what it has left.
        resources = {"num_cpus": 1, "num_gpus": options.gpus_per_run, "max_retries": 0}
        self._call = self._ray.remote(**resources)(process.call)

    def start(self, runs: Sequence[Run]) -> list[Job]:
        directory = os.getcwd()
        return [
            _Task(self._ray, self._call.remote(run.command, str(log(run)), directory))
            for run in runs
        ]

    def close(self) -> None:
        self._ray.shutdown()


class _Task:
    def __init__(self, ray: Any, reference: Any) -> None:
        self._ray, self._reference = ray, reference

    def poll(self) -> int | None:
        if not self._ray.wait([self._reference], timeout=0)[0]:
            return None
        try:
            return int(self._ray.get(self._reference))
        except self._ray.exceptions.RayError:
            return _LOST

    def stop(self) -> None:
        self._ray.cancel(self._reference)


class OnSlurm:
    """Arrays of jobs of SLURM, through submitit. Its files are in ``submitit`` beside the runs."""

    def __init__(self, options: Options, directory: Path) -> None:
        submitit = _module("submitit", "slurm")
        is_local = options.cluster == "local"
        self.slots: int | None = None
        if is_local:  # submitit's own start all at once
            self.slots = options.processes or len(_cores())
        try:
            self._executor = submitit.AutoExecutor(directory / "submitit", options.cluster)
        except RuntimeError as error:
            raise UserError(f"--executor=slurm: {error}") from None
        parameters: dict[str, Any] = {"timeout_min": options.minutes, "name": directory.name}
        if options.gpus_per_run:
            parameters["gpus_per_node"] = options.gpus_per_run
        if not is_local:
            parameters["slurm_array_parallelism"] = options.processes or 256
            if options.partition:
                parameters["slurm_partition"] = options.partition
            if options.sbatch:
                parameters["slurm_additional_parameters"] = dict(options.sbatch)
        self._executor.update_parameters(**parameters)
        self._errors = submitit.core.utils.UncompletedJobError

    def start(self, runs: Sequence[Run]) -> list[Job]:
        directory, jobs = os.getcwd(), []
        with self._refused(), self._executor.batch():
            for run in runs:
                task = _Requeued()
                jobs.append(self._executor.submit(task, run.command, str(log(run)), directory))
        return [_Submitted(job, self._errors) for job in jobs]

    @contextlib.contextmanager
    def _refused(self) -> Iterator[None]:
        """Raises what sbatch says, which submitit prints, too, as a ``UserError``."""
        try:
            with written(self._executor.folder), contextlib.redirect_stderr(io.StringIO()):
                yield
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0].rstrip(".")
            raise UserError(f"--executor=slurm: {reason}.") from None

    def close(self) -> None:
        """Nothing: SLURM has the jobs."""


class _Requeued:
    """A run that SLURM may interrupt, at a time limit or for another job: it saves, and the same
    job goes on with it later."""

    def __call__(self, command: Sequence[str], log: str, directory: str) -> int:
        return process.call(command, log, directory)

    def checkpoint(self, *arguments: Any) -> Any:
        """What submitit calls then; it ends this process next, and with it the run."""
        return _module("submitit", "slurm").helpers.DelayedSubmission(self, *arguments)


class _Submitted:
    def __init__(self, job: Any, errors: type[Exception]) -> None:
        self._job, self._errors = job, errors

    def poll(self) -> int | None:
        if not self._job.done():
            return None
        try:
            return int(self._job.result())
        except self._errors:  # without a result: the node, or the job as a whole, is gone
            return _LOST

    def stop(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):  # it has just ended
            self._job.cancel()


def _module(name: str, extra: str) -> Any:
    """A library of an extra.

    Raises:
      UserError: if it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(
            f"--executor={extra} needs {name}, which is not installed: "
            f"pip install -e '.[experiments,{extra}]' brings it."
        ) from None
