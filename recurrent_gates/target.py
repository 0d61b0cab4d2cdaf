"""The platform that programs are compiled for: this machine, or another one.

Backends are chosen by platform while a program is traced. This module says which platform that is,
so that a machine without a TPU can compile the program that a TPU would run.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

__all__ = ["compiling_for", "cores", "device_count", "devices", "platform"]

_DEVICES: contextvars.ContextVar[tuple[jax.Device, ...]] = contextvars.ContextVar(
    "devices", default=()
)

# Microseconds that may be used in each period, and the period: version 2 of control groups.
_LIMIT_OF_TIME = Path("/sys/fs/cgroup/cpu.max")


@contextlib.contextmanager
def compiling_for(devices: Sequence[jax.Device]) -> Iterator[None]:
    """Takes these devices for the machine's own while programs are traced and compiled.

    Args:
      devices: of one kind, such as those of
        ``jax.experimental.topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")``.

    Returns:
      A context manager.

    Raises:
      ValueError: if there is no device.
    """
    if not devices:
        raise ValueError("devices must not be empty.")
    token = _DEVICES.set(tuple(devices))
    try:
        yield
    finally:
        _DEVICES.reset(token)


def devices() -> list[jax.Device]:
    """The devices of the target.

    Returns:
      Those of all processes.
    """
    return list(_DEVICES.get()) or jax.devices()


def platform() -> str:
    """The kind of the target's devices.

    Returns:
      ``"cpu"``, ``"gpu"`` or ``"tpu"``.
    """
    override = _DEVICES.get()
    return override[0].platform if override else jax.default_backend()


def device_count() -> int:
    """Counts the target's devices.

    Returns:
      The number of devices of all processes.
    """
    return len(_DEVICES.get()) or jax.device_count()


def cores() -> int:
    """Counts this machine's cores.

    Returns:
      The number of cores that the calling thread may use; fewer where a container (cgroup v2)
      gives it less time.
    """
    if hasattr(os, "sched_getaffinity"):
        return min(len(os.sched_getaffinity(0)), _core_limit())
    return os.cpu_count() or 1


def _core_limit() -> int:
    """How many cores a container's limit of time keeps busy; more threads would stand still."""
    try:
        time, period = _LIMIT_OF_TIME.read_text().split()
        return max(1, math.ceil(int(time) / int(period)))
    except (OSError, ValueError):  # no file, or "max" for no limit
        return sys.maxsize
