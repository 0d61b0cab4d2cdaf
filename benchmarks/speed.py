"""``python -m benchmarks.speed``: our cells beside other frameworks' and beside each other.

Every row is one comparison: both sides, each in a process of its own, are given the same arrays,
their values and gradients are checked, and forward pass and train step are timed in turn
(``pair``).
A train step is the forward pass and the gradient of sum(ys * cotangent) with respect to
parameters, inputs and initial carry. The ratio is the other side's time over ours, so above 1 we
are faster; it is the median over pairs of neighbouring runs, with quartiles.

``--random=N --draw=SEED`` asks for N sizes that are drawn at random, each beside the best of all
peers that are installed (``draws``).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from absl import flags
from absl.flags import FlagValues

import recurrent_gates as rg
from benchmarks import draws, pair, process, speed_report
from benchmarks.command import fail, parse, save, say
from benchmarks.peers import PEERS
from benchmarks.work import Contender, Size

_BACKENDS = tuple(backend.value for backend in rg.Backend)
_REFERENCE = "torch"  # its LSTM is the other side where a peer has no such cell
_CPU_SIZES = "100,120,10,128;32,520,10,256;50,784,1,512"
_GPU_SIZES = ";".join(
    f"{batch},784,1,{features}" for features in (128, 256, 512, 1024) for batch in (32, 128, 256)
)
_LSTMS = "ur_lstm,lstm+detach0.5,lstm+detach0.5*3"
_GATOS = "gato1,gato2"
_OTHER_BACKENDS = ",".join(backend for backend in _BACKENDS if backend != "auto")


class Group(NamedTuple):
    """Cells that are measured at some sizes beside some others."""

    cells: str
    sizes: str
    peers: str


PLAN: dict[str, tuple[Group, ...]] = {
    "cpu": (
        Group("lstm,gru", _CPU_SIZES, f"torch,flax,haiku,{_OTHER_BACKENDS}"),
        Group(_LSTMS, _CPU_SIZES, "lstm"),
        Group(_GATOS, "64,750,2,512", f"torch,{_OTHER_BACKENDS}"),
        Group("rmc,dnc", "16,30,8,64;32,100,32,128", "torch"),
    ),
    "gpu": (
        Group("lstm,gru", _GPU_SIZES, f"torch,flax,haiku,jax,flashrnn,{_OTHER_BACKENDS}"),
        Group(_LSTMS, _GPU_SIZES, f"torch,lstm,{_OTHER_BACKENDS}"),
        Group(_GATOS, "32,1000,64,1024;8,16384,4,512;1,65536,4,512", f"torch,{_OTHER_BACKENDS}"),
    ),
}
"""What is run where neither cells nor sizes are given, by platform."""


class Comparison(NamedTuple):
    """A row to measure: both sides as ``pair.measure`` reads them."""

    contender: str
    other: str
    size: Size


def define(values: FlagValues) -> None:
    """Defines the program's flags."""

    def text(name: str, meaning: str) -> None:
        flags.DEFINE_string(name, None, meaning, flag_values=values)

    text("cells", "ours, each cell[/backend][+detachP][*lanes]")
    text("sizes", "B,T,D,F; several with a semicolon between")
    text("peers", f"what each is compared with: {', '.join(PEERS)}, a backend, a cell of ours")
    for name, minimum, meaning in (
        ("random", 1, "so many sizes drawn at random, each beside the best of the peers"),
        ("draw", 0, "the seed of the random sizes (default: 0)"),
    ):
        flags.DEFINE_integer(name, None, meaning, minimum, flag_values=values)
    flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "of both", flag_values=values)
    for name, meaning in (
        ("resume", "with --random: keep the rows that the same command left in --out"),
        ("tf32", "let float32 products on a GPU use TF32, on both sides"),
        ("floor", "add operations, bytes and the time that the device's measured rates allow"),
    ):
        flags.DEFINE_boolean(name, False, meaning, flag_values=values)


def parse_sizes(text: str) -> list[Size]:
    """The sizes that ``"B,T,D,F;..."`` names.

    Raises:
      ValueError: if it is not that.
    """
    sizes = []
    for entry in text.split(";"):
        numbers = [int(n) if n.strip().isdecimal() else 0 for n in entry.split(",")]
        if len(numbers) != 4 or 0 in numbers:
            raise ValueError(f"A size is B,T,D,F, four positive numbers, got {entry!r}.")
        sizes.append(Size(*numbers))
    return sizes


def opponent(contender: Contender, other: str) -> str | None:
    """The other side of a contender as ``pair.measure`` reads it; None if there is none.

    A peer runs its own form of the same cell, torch its LSTM where it has no such cell. A backend
    stands for the same cell under it, a cell of ours for itself with as many lanes.
    """
    if other in PEERS:
        if contender.lanes > 1:
            return None
        if contender.cell in PEERS[other].cells and not contender.detach:
            return f"{other}.{contender.cell}"
        return f"{other}.lstm" if other == _REFERENCE else None
    if other in _BACKENDS:
        theirs = dataclasses.replace(contender, backend=other)
    else:
        theirs = dataclasses.replace(Contender.parse(other), lanes=contender.lanes)
    return None if theirs == contender else str(theirs)


def comparisons(groups: Sequence[Group]) -> list[Comparison]:
    """The rows of some groups.

    Raises:
      ValueError: if a name or a size cannot be.
    """
    rows = []
    for group in groups:
        for cell in group.cells.split(","):
            contender = Contender.parse(cell.strip())
            for size in parse_sizes(group.sizes):
                for name in group.peers.split(","):
                    side = opponent(contender, name.strip())
                    if side is not None:
                        rows.append(Comparison(str(contender), side, size))
    return list(dict.fromkeys(rows))


def plan(options: dict[str, Any], platform: str) -> list[Comparison]:
    """The rows that the flags ask for; what is not given is as in ``PLAN``."""
    groups = PLAN["gpu" if platform == "gpu" else "cpu"]
    if options["cells"]:
        first = groups[0]
        groups = (Group(options["cells"], first.sizes, first.peers),)
    if options["sizes"]:
        groups = tuple(group._replace(sizes=options["sizes"]) for group in groups)
    if options["peers"]:
        groups = tuple(group._replace(peers=options["peers"]) for group in groups)
    return comparisons(groups)


def _check_random(options: dict[str, Any]) -> None:
    """Ends the program on a flag that has no effect; fills in the seed."""
    if options["random"] is None and options["draw"] is not None:
        fail("speed", "--draw has no effect without --random.")
    if options["random"] is None and options["resume"]:
        fail("speed", "--resume has no effect without --random.")
    if options["random"] is not None and options["sizes"]:
        fail("speed", "--sizes has no effect with --random.")
    options["draw"] = options["draw"] or 0


def main(argv: Sequence[str]) -> int:
    """The program; returns its exit status: 1 if a comparison failed."""
    options = parse("speed", define, argv)
    _check_random(options)
    settings = {"dtype": options["dtype"], "tf32": options["tf32"]}
    machine = process.call("benchmarks.pair.machine", settings, options["devices"])
    if options["random"] is not None:
        return draws.run(options, machine)
    try:
        rows = plan(options, machine["platform"])
    except ValueError as error:
        fail("speed", str(error))
    if not rows:
        fail("speed", f"no row: none of {options['peers']} runs a cell that is asked for.")
    report: dict[str, Any] = {"machine": machine, "settings": options, "rows": [], "left_out": []}
    for name, reason in machine["missing"].items():
        report["left_out"].append(f"{name}: {reason}")
    if options["floor"]:
        report["rates"] = process.call("benchmarks.floor.rates", settings, options["devices"])
    failed = False
    for number, row in enumerate(rows, 1):
        if row.other.partition(".")[0] in machine["missing"]:
            continue
        say(f"{number}/{len(rows)} {row.contender} beside {row.other} at {tuple(row.size)}")
        try:
            measurement = pair.measure(
                *row, devices=options["devices"], repeats=options["repeats"], **settings
            )
        except process.ProcessError as error:
            unserved = "does not serve this" in str(error)
            failed = failed or not unserved
            section = "left_out" if unserved else "failed"
            line = f"{row.contender} beside {row.other} at {tuple(row.size)}: {error}"
            report.setdefault(section, []).append(line)
            say(f"{section.replace('_', ' ')}: {error}")
            continue
        report["rows"].append(measurement)
        say(f"  train step: {speed_report.ratio(measurement['train'])} times as fast")
        save(options["out"], "speed", report, speed_report.table(report))
    directory = save(options["out"], "speed", report, speed_report.table(report))
    if report["rows"]:
        speed_report.draw(report, directory / "speed.png")
    print(speed_report.table(report))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
