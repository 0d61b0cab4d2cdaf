"""Runs beside each other; what is killed goes on."""

from __future__ import annotations

import time
from collections.abc import Sequence

from experiments.machine.stopping import stopping
from experiments.records.reporting import say
from experiments.records.workdir import Workdir, read_rows
from experiments.sweep.executors import Executor, Job, log
from experiments.sweep.plan import Run

_TRIES = 5  # of a run that is killed again and again without another row of metrics
_REFUSED = 2  # the exit code of a request that cannot be met, such as a workdir in use
_IN_USE = "is in use by another process."
_JAX_NOTES = ("For simplicity, JAX has removed", "----")  # what JAX writes below an error
_LOOK_SECONDS = 0.2  # between looks at the runs


def train(runs: Sequence[Run], executor: Executor) -> int | None:
    """Trains what is not finished.

    Each process sees one CPU device. What it says goes to a file beside its workdir, ``.log``. A
    run that another process trains, such as a job of a sweep that is no more, is waited for.

    Args:
      runs: of the sweep.
      executor: where they are trained.

    Returns:
      How many failed; None if it was asked to stop.
    """
    pool = _Pool(runs, executor)
    say(f"{len(runs)} runs, {len(runs) - len(pool.waiting)} of them finished")
    with stopping() as stop:
        while (pool.waiting or pool.jobs) and not stop.requested:
            pool.start()
            time.sleep(_LOOK_SECONDS)
            pool.look()
        pool.stop()
        if stop.requested:
            say("stopped; the same command goes on")
        return None if stop.requested else pool.failed


class _Pool:
    """The runs by number: those that wait, and the jobs of the others."""

    def __init__(self, runs: Sequence[Run], executor: Executor) -> None:
        self._runs, self._executor = runs, executor
        self.waiting = [number for number, run in enumerate(runs) if not _finished(run)]
        self.jobs: dict[int, Job] = {}
        self.failed = 0
        self._tries = dict.fromkeys(self.waiting, 0)
        self._rows = dict.fromkeys(self.waiting, 0)
        self._reported_numbers: set[int] = set()  # that another process trains them

    def start(self) -> None:
        """Starts what there is room for."""
        slots = self._executor.slots
        room = len(self.waiting) if slots is None else slots - len(self.jobs)
        numbers: list[int] = []
        for number in list(self.waiting):
            if len(numbers) >= room:
                break
            if Workdir(self._runs[number].workdir).in_use():
                if number not in self._reported_numbers:
                    say(f"{self._name(number)} is trained by another process; waiting for it")
                self._reported_numbers.add(number)
                continue
            self.waiting.remove(number)
            if not _finished(self._runs[number]):
                numbers.append(number)
        if not numbers:
            return
        for number in numbers:
            self._rows[number] = _rows(self._runs[number])
        jobs = self._executor.start([self._runs[number] for number in numbers])
        self.jobs |= dict(zip(numbers, jobs, strict=True))

    def look(self) -> None:
        """Says which runs have ended; those that were killed wait again."""
        for number, job in list(self.jobs.items()):
            if (code := job.poll()) is not None:
                del self.jobs[number]
                self._ended(number, code)

    def stop(self) -> None:
        """Asks the jobs to end, and waits until they have."""
        for job in self.jobs.values():
            job.stop()
        while any([job.poll() is None for job in self.jobs.values()]):
            time.sleep(_LOOK_SECONDS)

    def _ended(self, number: int, code: int) -> None:
        run, name = self._runs[number], self._name(number)
        # A run that ended early is finished under more steps, too.
        if _finished(run) or (code == 0 and Workdir(run.workdir).summary() is not None):
            say(f"{name} is finished: {run.line}")
            return
        path = log(run)
        lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
        # Begun elsewhere between our look and our start; who trains it writes into the same log.
        was_in_use = bool(lines) and lines[-1].endswith(_IN_USE)
        if code == _REFUSED and (was_in_use or Workdir(run.workdir).in_use()):
            self.waiting.append(number)
            return
        self._tries[number] = 1 + self._tries[number] * (_rows(run) <= self._rows[number])
        if code <= 0 and self._tries[number] < _TRIES:
            ending = f"killed by signal {-code}" if code else "asked to stop"
            say(f"{name} was {ending} and goes on")
            self.waiting.append(number)
            return
        self.failed += 1
        messages = [line for line in lines if not line.startswith(_JAX_NOTES)]
        last_line = messages[-1] if messages else "no word"
        say(f"{name} failed with exit code {code} ({last_line}; see {path}): {run.line}")

    def _name(self, number: int) -> str:
        return f"run {number + 1} of {len(self._runs)}"


def _finished(run: Run) -> bool:
    """Whether a run of so many steps, no more and no less, has come to its end."""
    return Workdir(run.workdir).summary_of(run.config.training.steps) is not None


def _rows(run: Run) -> int:
    """How many rows of metrics a run has."""
    return len(list(read_rows(Workdir(run.workdir).metrics)))
