"""A run as a process that ends with the one that started it. Only the standard library is imported:
workers on other machines call this."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

_DEATH_OF_PARENT = 1  # Linux' PR_SET_PDEATHSIG


def start(command: Sequence[str], log: Path, core: int | None = None) -> subprocess.Popen[bytes]:
    """Starts a run that sees one CPU device.

    Args:
      command: its command line.
      log: what it says is added to this file.
      core: the only one that it runs on; None: any.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    devices = "--xla_force_host_platform_device_count=1"
    environment = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {devices}"}
    # Not as preexec_fn: after a fork Python may hang in a process of many threads, such as Ray's.
    child = [command[0], "-I", "-S", __file__, str(os.getpid()), str(-1 if core is None else core)]
    with log.open("ab") as file:
        return subprocess.Popen(
            [*child, *command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
        )


def call(command: Sequence[str], log: str, directory: str) -> int:
    """Brings a run to its end, in a worker; what ends the worker lets the run save and stop.

    Args:
      command: its command line.
      log: see ``start``.
      directory: where the command is run, and what paths in it begin at.

    Returns:
      The exit code; negative: the signal that killed it.
    """
    os.chdir(directory)
    process = start(command, Path(log))
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def _become(parent: int, core: int, command: Sequence[str]) -> NoReturn:
    """Makes this process a run that ends with its parent.

    Args:
      parent: the process that started it.
      core: the only one that it runs on; -1: any.
      command: of the run, its interpreter first.
    """
    if core >= 0:
        os.sched_setaffinity(0, {core})
    os.setpgid(0, 0)  # Ctrl-C is the sweep's, which passes it on as SIGTERM
    # With the sweep the runs end, so that the next one finds their workdirs free: on Linux.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DEATH_OF_PARENT, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(0)
    os.execv(command[0], list(command))


if __name__ == "__main__":
    _become(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
