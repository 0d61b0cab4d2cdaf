"""TPUs that are not there, for what is compiled ahead of time."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence

import jax

from experiments.settings.errors import UserError

# What libtpu would ask a TPU VM.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # processes side by side
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
_EXAMPLES = "v4:2x2x1, v5e:4x4, v5p:2x2x1, v6e:2x2"

# Bytes of a chip's memory by device kind: "TPU system architecture" and the pages of each version
# on cloud.google.com/tpu/docs. A TPU v5e and a v6e are called "lite".
_MEMORY = {
    "TPU v4": 32 * 2**30,
    "TPU v5 lite": 16 * 2**30,
    "TPU v5": 95 * 2**30,
    "TPU v6 lite": 32 * 2**30,
}


def devices(name: str) -> list[jax.Device]:
    """The devices of a TPU topology, none of which can run anything.

    JAX's own platform is the CPU from here on.

    Args:
      name: such as ``"v5e:4x4"``.

    Raises:
      UserError: if there is no such topology, or libtpu is not installed.
    """
    from jax.experimental import topologies

    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            "--compile_for needs TPU's compiler, libtpu, which is not installed: "
            "pip install -e '.[experiments,tpu]' brings it."
        )
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # it keeps what this machine can run
    version, _, shape = name.partition(":")
    if not version or not all(length.isdecimal() for length in shape.split("x")):
        raise UserError(f"--compile_for={name} is no topology such as {_EXAMPLES}.")
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    except (jax.errors.JaxRuntimeError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise UserError(
            f"--compile_for={name} is no topology such as {_EXAMPLES}: libtpu says {reason!r}."
        ) from None


def memory(devices: Sequence[jax.Device]) -> int | None:
    """Bytes that each of a topology's devices has; None: not known here.

    A device is a chip, or one of a chip's two cores, which share its memory.
    """
    chips = {tuple(device.coords) for device in devices}
    chip_memory = _MEMORY.get(devices[0].device_kind)
    return None if chip_memory is None else chip_memory * len(chips) // len(devices)
