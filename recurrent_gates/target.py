"""What programs are compiled for: the machine that runs, or another one.

Forms of a recurrence are chosen by platform while a program is traced. Here is asked which one that
is, so that a machine without a TPU can compile what a TPU would run.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator, Sequence

import jax

__all__ = ["compiling_for", "cores", "device_count", "devices", "platform"]

_DEVICES: contextvars.ContextVar[tuple[jax.Device, ...]] = contextvars.ContextVar(
    "devices", default=()
)


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
    chosen = _DEVICES.get()
    return chosen[0].platform if chosen else jax.default_backend()


def device_count() -> int:
    """The number of the target's devices.

    Returns:
      That of all processes.
    """
    return len(_DEVICES.get()) or jax.device_count()


def cores() -> int:
    """The number of this machine's cores.

    Returns:
      That of those which this process may use.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
