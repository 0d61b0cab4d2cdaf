"""Whether arrays fit into the machine, from their shapes alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from experiments.settings.errors import UserError


def check(needed: Mapping[str, int], platform: str, devices: int, lower: str) -> None:
    """Refuses what cannot fit.

    Args:
      needed: bytes of one device, by what they are for.
      platform: of the devices.
      devices: how many of this machine need so much; those of a CPU share its memory.
      lower: the flags that would help.

    Raises:
      UserError: if it is more than there is.
    """
    sharing = devices if platform == "cpu" else 1
    total, available = sum(needed.values()) * sharing, _available(platform)
    if total > available:
        if sharing > 1 and total / sharing <= available and jax.process_count() == 1:
            flags = "XLA_FLAGS=--xla_force_host_platform_device_count=1"
            lower += f", or take one device, {flags}, for devices of a CPU share its memory"
        largest = max(needed, key=lambda name: needed[name])
        raise UserError(
            f"this run needs more than {total / 1e9:,.0f} GB of memory, and there are "
            f"{available / 1e9:,.0f}: most of it is for {largest}; lower {lower}."
        )


def bytes_of(shapes: Any) -> int:
    """Bytes of a tree of arrays or shapes."""
    return sum(
        int(np.prod(leaf.shape, dtype=object)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(shapes)
    )


def _available(platform: str) -> float:
    """Bytes of memory that a device of this machine has; without bound for another platform's."""
    if platform == "cpu":
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    device = jax.local_devices()[0]
    stats = (device.memory_stats() or {}) if device.platform == platform else {}
    return float(stats.get("bytes_limit", np.inf))
