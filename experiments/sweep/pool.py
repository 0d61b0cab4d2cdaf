"""Runs beside each other, a process on a core each; what is killed goes on."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.machine.stopping import Stopping, stopping
from experiments.records.reporting import say
from experiments.records.workdir import Workdir
from experiments.sweep.plan import Run

_TRIES = 5  # of a run whose process was killed
_IN_USE = "is in use by another process."
_LOOK_SECONDS = 0.2  # between looks at the processes
_DEATH_OF_PARENT = 1  # Linux' PR_SET_PDEATHSIG


class _Child(NamedTuple):
    run: Run
    number: int
    core: int
    process: subprocess.Popen[bytes]


def train(runs: Sequence[Run], processes: int) -> int | None:
    """Trains what is not finished.

    Each process sees one device and has a core of its own, as far as there are any. What it says
    goes to a file beside its workdir, ``.log``.

    Args:
      runs: of the sweep.
      processes: how many stand beside each other.

    Returns:
      How many failed; None if it was asked to stop.
    """
    waiting = [(number, run) for number, run in enumerate(runs) if not _finished(run)]
    say(f"{len(runs)} runs, {len(runs) - len(waiting)} of them finished")
    tries: dict[int, int] = {}
    failed = 0
    children: list[_Child] = []
    cores = sorted(os.sched_getaffinity(0))
    free = list(range(processes))
    with stopping() as stop:
        while (waiting or children) and not stop.requested:
            while waiting and free:
                number, run = waiting.pop(0)
                tries[number] = tries.get(number, 0) + 1
                core = free.pop(0)
                process = _start(run, cores[core % len(cores)])
                children.append(_Child(run, number, core, process))
            time.sleep(_LOOK_SECONDS)
            for child in [child for child in children if child.process.poll() is not None]:
                children.remove(child)
                free.append(child.core)
                if _ended(child, tries[child.number], len(runs)):
                    waiting.append((child.number, child.run))
                elif not _finished(child.run):
                    failed += 1
        _stop(children, stop)
        return None if stop.requested else failed


def _finished(run: Run) -> bool:
    """Whether a run has come to its end, with all of the steps or before."""
    work = Workdir(run.workdir)
    if work.summary() is None:
        return False
    return work.read_json("config.json")["config"]["training"]["steps"] >= run.config.training.steps


def _start(run: Run, core: int) -> subprocess.Popen[bytes]:
    log = _log(run.workdir)
    log.parent.mkdir(parents=True, exist_ok=True)
    devices = "--xla_force_host_platform_device_count=1"
    environment = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {devices}"}
    with log.open("ab") as file:
        return subprocess.Popen(
            run.command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            preexec_fn=_own_core(core),
        )


def _own_core(core: int) -> Callable[[], None]:
    parent = os.getpid()

    def prepare() -> None:
        os.sched_setaffinity(0, {core})
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the sweep passes it on as SIGTERM
        try:  # with the sweep the runs end, so that the next one finds their workdirs free
            ctypes.CDLL(None).prctl(_DEATH_OF_PARENT, signal.SIGTERM)
        except (OSError, AttributeError):  # not on Linux
            return
        if os.getppid() != parent:
            os._exit(0)

    return prepare


def _ended(child: _Child, tries: int, count: int) -> bool:
    """Says how a run ended; whether it is to be tried again."""
    code = child.process.returncode
    name = f"run {child.number + 1} of {count}"
    if _finished(child.run):
        say(f"{name} is finished: {child.run.line}")
        return False
    if code < 0 and tries < _TRIES:
        say(f"{name} was killed by signal {-code} and goes on")
        return True
    said = _log(child.run.workdir).read_text(errors="replace").strip().splitlines()
    if said and said[-1].endswith(_IN_USE) and tries < _TRIES:  # by a run of the sweep before
        return True
    say(
        f"{name} failed with exit code {code} ({said[-1] if said else 'no word'}): {child.run.line}"
    )
    return False


def _stop(children: Sequence[_Child], stop: Stopping) -> None:
    for child in children:
        child.process.terminate()
    for child in children:
        child.process.wait()
    if stop.requested:
        say("stopped; the same command goes on")


def _log(workdir: Path) -> Path:
    return workdir.with_name(f"{workdir.name}.log")
