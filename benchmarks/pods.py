"""``python -m benchmarks.pods``: how a training step should scale to many chips, on paper.

Weak scaling: each chip keeps its rows, so its work stays, and what grows is one sum of the gradient
over all chips a step. It starts when the whole gradient is there, and clipping by its norm waits
for it: nothing hides it. Both sides of the sum come from ``--compile_for``; the speeds are those
that Google states for a TPU v5p (cloud.google.com/tpu/docs/v5p). The same sum is timed over devices
of this CPU, as a check of how its time grows with bytes and devices.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from absl.flags import FlagValues

from benchmarks import process
from benchmarks.command import fail, markdown, milliseconds, parse, save

PEAK = 459e12
"""Operations a second of a v5p in bfloat16, in which products of float32 are done by default."""
HBM = 2765e9
"""Bytes a second of its memory."""
LINKS = 1200e9
"""Bytes a second of all six of its links to other chips, both directions together."""
PODS = {8: "2x2x2", 64: "4x4x4", 512: "8x8x8"}
"""Slices by their number of chips."""


def sum_seconds(size: float, chips: int) -> float:
    """Of a sum of so many bytes over all chips, in rings along the three axes at once.

    Each chip sends 2 (n - 1) / n of the bytes, and links send half of what they do in both
    directions. Below 4x4x4 no axis is closed to a ring, and half of the links lead nowhere.
    """
    bandwidth = LINKS / 2 if chips >= 64 else LINKS / 4
    return 2 * (chips - 1) / chips * size / bandwidth


def step_seconds(operations: float, moved: float, utilisation: float) -> float:
    """Of a chip without the others: its products, or its memory where that takes longer."""
    return max(operations / (utilisation * PEAK), moved / HBM)


def expected(report: dict[str, Any]) -> list[list[str]]:
    """Rows of the table, from what ``--compile_for`` says of one chip.

    Args:
      report: see ``experiments.command.ahead.report``.
    """
    size = sum(kind["bytes"] for kind in report["collectives"].values())
    step_times = {
        "40 % of the peak": step_seconds(report["operations"], 0, 0.4),
        "memory, nothing kept on the chip": step_seconds(report["operations"], report["bytes"], 1),
    }
    return [
        [
            bound,
            f"{chips} ({shape})",
            milliseconds(step),
            milliseconds(total),
            f"{100 * step / (step + total):.0f} %",
        ]
        for bound, step in step_times.items()
        for chips, shape in PODS.items()
        for total in [sum_seconds(size, chips)]
    ]


def measure(repeats: int) -> list[list[Any]]:
    """Sums over 2, 4 and 8 devices of this process; see ``process.call``.

    Returns:
      For each bytes of one device, devices, bytes in the compiled program, and the seconds of the
      fastest of the repeats.
    """
    import jax

    from benchmarks.pair import seconds
    from experiments.command.ahead import collectives
    from experiments.machine.mesh import DeviceMesh
    from recurrent_gates import target

    rows: list[list[Any]] = []
    for size in (4 * 10**6, 16 * 10**6):
        for count in (2, 4, 8):
            with target.compiling_for(jax.devices()[:count]):
                mesh = DeviceMesh(count)
            values = mesh.place(np.ones((count, size // 4), np.float32), 0)
            total = jax.jit(mesh.everywhere(mesh.sum, (0,), 0)).lower(values).compile()
            assert float(total(values)[0, 0]) == count
            run = functools.partial(_run, total, values)
            fastest = min(seconds(run) for _ in range(repeats))
            (kind,) = collectives(total.as_text() or "").values()
            rows.append([size, count, kind["bytes"], fastest])
    return rows


def _run(function: Callable[[Any], Any], values: Any) -> None:
    function(values).block_until_ready()


def define(values: FlagValues) -> None:
    """Defines the program's flags."""
    flags.DEFINE_string("report", None, "a file of what --compile_for printed", flag_values=values)


def main(argv: Sequence[str]) -> int:
    """The program; returns its exit status."""
    options = parse("pods", define, argv)
    sentence = "--report=FILE must be what an experiment printed with --compile_for"
    if not options["report"]:
        fail("pods", f"{sentence}.")
    try:
        rows = expected(json.loads(Path(options["report"]).read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        fail("pods", f"{sentence}, and {options['report']} is not: {error!r}.")
    titles = ["bound by", "chips", "step alone ms", "sum ms", "efficiency"]
    tables = [markdown(titles, rows)]
    measured = process.call("benchmarks.pods.measure", {"repeats": options["repeats"]}, 8)
    cells = [[f"{a / 1e6:g}", str(b), f"{c / 1e6:g}", milliseconds(d)] for a, b, c, d in measured]
    tables.append(markdown(["MB", "CPU devices", "MB in the program", "fastest ms"], cells))
    save(options["out"], "pods", {"measured": measured}, "\n\n".join(tables))
    print("\n\n".join(tables))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
