"""``python -m tests.tpu.table``: every binary's memory per chip, the table of docs/TPU.md.

One row for each binary and protocol, one column for each topology; compiled on any machine that has
libtpu. What is compiled is said at once, the table at the end. ``SECONDS`` as an argument ends it
earlier, and cells that have not been compiled are empty.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from experiments.catalog import EXPERIMENTS
from experiments.command import ahead
from experiments.settings.resolver import resolve

TOPOLOGIES = ("v4:2x2x1", "v5e:2x2", "v5e:4x4", "v5p:2x2x1", "v6e:2x2")
# As published, where the size is one for a TPU: (binary, protocol, settings).
PUBLISHED: list[tuple[str, str, dict[str, Any]]] = [
    ("copy", "gato", {}),
    ("pixels", "ur", {}),
    ("language_model", "gato", {"dataset": "ptb"}),
    ("language_model", "ur", {"dataset": "wikitext103"}),
    ("execute", "ur", {}),
]
CASES: list[tuple[str, str, dict[str, Any]]] = [
    (one.name, "small", {}) for one in EXPERIMENTS
] + PUBLISHED


def report(case: tuple[str, str, dict[str, Any]], topology: str) -> dict[str, Any]:
    """What the compiler says of a case; see ``ahead.report``."""
    name, protocol, settings = case
    (experiment,) = [one for one in EXPERIMENTS if one.name == name]
    return ahead.report(resolve(experiment, protocol, settings), topology)


def cell(said: dict[str, Any] | None) -> str:
    """Megabytes of a chip, and how many chips share the batch where that is not all of them."""
    if said is None:
        return ""
    memory = f"{said['memory_bytes'] / 1e6:,.1f}" if said["fits"] else "does not fit"
    all_of_them = said["devices"] == said["of_devices"]
    return memory if all_of_them else f"{memory} ({said['devices']})"


def main(seconds: float) -> None:
    """Compiles, a different topology for each binary first, and prints the table."""
    end = time.monotonic() + seconds
    cells: dict[tuple[int, str], dict[str, Any]] = {}
    for turn in range(len(TOPOLOGIES)):
        for number, case in enumerate(CASES):
            topology = TOPOLOGIES[(number + turn) % len(TOPOLOGIES)]
            if time.monotonic() > end:
                break
            said = cells[number, topology] = report(case, topology)
            print(*case[:2], topology, cell(said), said, sep="; ", file=sys.stderr, flush=True)
    print("| experiment, protocol | " + " | ".join(TOPOLOGIES) + " |")
    print("|---|" + "---:|" * len(TOPOLOGIES))
    for number, case in enumerate(CASES):
        row = [cell(cells.get((number, topology))) for topology in TOPOLOGIES]
        print(f"| {case[0]}, `{case[1]}` | " + " | ".join(row) + " |")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else float("inf"))
