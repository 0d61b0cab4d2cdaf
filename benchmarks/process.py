"""Runs a function in a process of its own, or holds an object there and calls its methods.

Devices, thread pools and the order of imports are settled before any framework starts.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
from typing import Any, Self


class ProcessError(Exception):
    """The process ended with an error; the text is its last words."""


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment(devices: int) -> dict[str, str]:
    """The variables of a process with so many XLA CPU devices.

    OpenMP's workers wait as a user's do: with a passive policy torch's LSTM took 1.8 to 2.9 times
    as long, and without it ours, run in turn with it, took no longer. What the caller has set
    stays.
    """
    defaults = {
        "OMP_NUM_THREADS": str(cores()),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # a GPU's memory is for both frameworks
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "JAX_TRACEBACK_FILTERING": "off",  # the last line of an error is then its sentence
    }
    flag = f"--xla_force_host_platform_device_count={devices}"
    flags = os.environ.get("XLA_FLAGS", "")
    return {**defaults, **os.environ, "XLA_FLAGS": f"{flags} {flag}".strip()}


def call(function: str, arguments: dict[str, Any], devices: int) -> Any:
    """Calls ``module.function(**arguments)`` in a new process.

    Args:
      function: dotted name; what it returns must pass through JSON, as the arguments must.
      arguments: keywords.
      devices: XLA CPU devices of the process.

    Raises:
      ProcessError: if it fails.
    """
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.process", function, json.dumps(arguments)],
        env=environment(devices),
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise ProcessError(_last_line(result.stderr, result.returncode))
    return json.loads(result.stdout.splitlines()[-1])


class Held:
    """An object in a process of its own: two of them wait while a third computes.

    Sides of a comparison that share a process disturb each other: torch's idle threads stay awake
    for some milliseconds and take a core from ours.

    Args:
      function: dotted name of what makes the object; arguments and results pass through JSON.
      arguments: its keywords.
      devices: XLA CPU devices of the process.
    """

    def __init__(self, function: str, arguments: dict[str, Any], devices: int) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115, it lives as long as the process
        command = [sys.executable, "-m", "benchmarks.process", function, json.dumps(arguments)]
        self._process = subprocess.Popen(
            [*command, "hold"],
            env=environment(devices),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def send(self, method: str, **arguments: Any) -> None:
        """Asks for ``object.method(**arguments)``; ``answer`` waits for what it returns."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # what it died of is said by ``answer``
            print(json.dumps([method, arguments]), file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        """What the oldest question that has no answer yet returned.

        Raises:
          ProcessError: if the process ended with an error.
        """
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._errors.seek(0)
            raise ProcessError(_last_line(self._errors.read(), status))
        return json.loads(line)

    def ask(self, method: str, **arguments: Any) -> Any:
        """``send``, then ``answer``."""
        self.send(method, **arguments)
        return self.answer()


def _last_line(errors: str, status: int) -> str:
    return (errors.strip() or f"exit status {status}").splitlines()[-1]


def main(function: str, arguments: str, *hold: str) -> None:
    module, _, name = function.rpartition(".")
    answers = sys.stdout
    if hold:  # whatever a framework prints is no answer
        sys.stdout = sys.stderr
    result = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    if not hold:
        print(json.dumps(result))
        return
    for line in sys.stdin:
        method, keywords = json.loads(line)
        print(json.dumps(getattr(result, method)(**keywords)), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
