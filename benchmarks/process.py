"""Runs a function in a process of its own and hands back what it returns.

Devices, thread pools and the order of imports are settled before any framework starts.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from typing import Any


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
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.process", function, json.dumps(arguments)],
        env=environment(devices),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise ProcessError(last)
    return json.loads(done.stdout.splitlines()[-1])


def main(function: str, arguments: str) -> None:
    module, _, name = function.rpartition(".")
    result = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
