"""A training step compiled for a TPU that is not there: what it takes, and whether it fits."""

from __future__ import annotations

import math
import re
import time
from typing import Any

import jax

from experiments.machine import operations, topology
from experiments.settings.config import Config
from experiments.training.learner import Learner
from recurrent_gates import target

_COLLECTIVE = re.compile(
    r" = (?P<shapes>\(.*?\)|\S+) "
    r"(?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
_SHAPE = re.compile(r"(?P<dtype>[a-z]+)(?P<bits>[0-9]*)\[(?P<shape>[0-9,]*)\]")


def report(config: Config, name: str) -> dict[str, Any]:
    """What the compiler says of a run's training step.

    Args:
      config: of the run.
      name: of a TPU topology, such as ``"v5e:4x4"``.

    Returns:
      ``"topology"``, ``"chip"``, ``"devices"`` (those that share the batch, of ``"of_devices"``);
      by device ``"memory_bytes"``, ``"argument_bytes"``, ``"temporary_bytes"``, ``"hbm_bytes"``
      and whether it ``"fits"``; of a step and a device ``"operations"`` and ``"bytes"`` (see
      ``operations.Work``) and ``"collectives"`` by kind, ``{"count", "bytes"}``; ``"seconds"`` of
      compiling. Memory and collectives are None, and ``"needs"`` is the compiler's sentence, where
      it does not fit.

    Raises:
      UserError: if there is no such topology or no compiler for it, or the run cannot be.
    """
    devices = topology.devices(name)
    with target.compiling_for(devices):
        jax.clear_caches()  # of what has been traced for other devices
        learner = Learner(config)
        start = time.monotonic()
        traced, lowered = learner.lower()
        work = operations.of(traced.jaxpr)
        description = {
            "topology": name,
            "chip": devices[0].device_kind,
            "devices": learner.mesh.size,
            "of_devices": len(devices),
            "hbm_bytes": topology.memory(devices),
            "operations": work.operations,
            "bytes": work.bytes,
        }
        try:
            executable = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            needs = next(line for line in str(error).splitlines() if "RESOURCE_EXHAUSTED" in line)
            return description | {"fits": False, "memory_bytes": None, "needs": needs}
    seconds = time.monotonic() - start
    for sharding in jax.tree.leaves(executable.output_shardings):
        assert {device.platform for device in sharding.device_set} == {"tpu"}
    return (
        description
        | _memory(executable, description["hbm_bytes"])
        | {
            "collectives": collectives(executable.as_text() or ""),
            "seconds": round(seconds, 1),
        }
    )


def _memory(executable: jax.stages.Compiled, available: int | None) -> dict[str, Any]:
    """Bytes of one device."""
    plan = executable.memory_analysis()
    assert plan is not None
    total = (
        plan.argument_size_in_bytes
        + plan.output_size_in_bytes
        - plan.alias_size_in_bytes  # the state's place is used again
        + plan.temp_size_in_bytes
        + plan.generated_code_size_in_bytes
    )
    return {
        "memory_bytes": total,
        "argument_bytes": plan.argument_size_in_bytes,
        "temporary_bytes": plan.temp_size_in_bytes,
        "fits": None if available is None else total <= available,
    }


def collectives(program: str) -> dict[str, dict[str, int]]:
    """The messages between devices in an optimised program, each as often as it is written.

    Args:
      program: HLO as text.

    Returns:
      By kind ``{"count", "bytes"}``, the bytes those of one device's results.
    """
    sums: dict[str, dict[str, int]] = {}
    for match in _COLLECTIVE.finditer(program):
        entry = sums.setdefault(match["kind"], {"count": 0, "bytes": 0})
        shapes = [_bytes(shape) for shape in _SHAPE.finditer(match["shapes"])]
        entry["count"] += 1
        # What begins an all-gather hands out its operand, too, which is the smaller one.
        entry["bytes"] += max(shapes) if match["kind"] == "all-gather" else sum(shapes)
    return sums


def _bytes(shape: re.Match[str]) -> int:
    bits = int(shape["bits"] or 8)  # pred has none
    return math.prod(int(n) for n in shape["shape"].split(",") if n) * bits // 8
