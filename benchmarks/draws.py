"""Sizes that nobody chose: ours beside the best of its peers at sizes drawn at random.

A row is one cell at one size, in a process of its own: our side and every peer's run in turn, a
round after another, and what is said is the best peer's time over ours, by round. A row that is
below ``LEAST`` is measured again, alone with that peer and with ``AGAIN`` times the rounds; what
the second measurement says is then the row's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import floor, ours, pair, process, speed_report
from benchmarks.command import fail, markdown, milliseconds, save, say
from benchmarks.peers import PEERS
from benchmarks.work import Contender, Size

CELLS = "lstm,gru,ur_lstm,gato1"
RANGES = {"batch": (1, 256), "steps": (1, 1024), "inputs": (1, 1024), "features": (32, 1024)}
MOST_OPERATIONS = 2e11  # of an LSTM's train step
LEAST = 0.95
AGAIN = 3
KINDS = ("forward", "train")


def sizes(count: int, draw: int) -> list[Size]:
    """So many sizes, each number log-uniform in ``RANGES``, of at most ``MOST_OPERATIONS``.

    F is the next even number, as GATO's pairs need. The first of many are those of few.
    """
    rng = np.random.default_rng(draw)
    low, high = np.log([RANGES[name] for name in Size._fields]).T
    drawn: list[Size] = []
    while len(drawn) < count:
        numbers = np.exp(rng.uniform(low, high)).round().astype(int)
        numbers[-1] += numbers[-1] % 2
        size = Size(*map(int, numbers))
        if floor.count(Contender("lstm"), size)["operations"] <= MOST_OPERATIONS:
            drawn.append(size)
    return drawn


def rows(cells: str, count: int, draw: int, devices: int) -> list[tuple[Contender, Size, int]]:
    """Each cell at each size, with the XLA devices for it: one, and all there are, by turns."""
    return [
        (Contender.parse(cell.strip()), size, (1, devices)[number % 2])
        for number, size in enumerate(sizes(count, draw))
        for cell in cells.split(",")
    ]


def opponents(contender: Contender, peers: Sequence[str]) -> list[str]:
    """These peers' own forms of a cell; their LSTMs where they have no such cell."""
    return [
        f"{peer}.{contender.cell if contender.cell in PEERS[peer].cells else 'lstm'}"
        for peer in peers
    ]


def measure(
    contender: str,
    others: Sequence[str],
    size: Sequence[int],
    *,
    dtype: str,
    tf32: bool,
    repeats: int,
) -> dict[str, Any]:
    """A row: runs in a process of its own (``process.call``).

    Args:
      contender: ours, as ``Contender.parse`` reads it.
      others: ``peer.cell``, with names in ``PEERS``.
      size: B, T, D, F.
      dtype: of inputs and products.
      tf32: on a GPU, whether float32 products may use TF32, on all sides.
      repeats: rounds.

    Raises:
      MismatchError: if a side's values or gradients are not those of the plain scan.
    """
    jax.config.update("jax_default_matmul_precision", None if tf32 else "highest")
    shape, mine = Size(*size), Contender.parse(contender)
    tolerance = pair.TOLERANCE["tf32" if tf32 and dtype == "float32" else dtype]
    sides = {"ours": ours.side(mine, shape, dtype)}
    pair.check(contender, sides["ours"], mine, shape, dtype, tolerance)
    for other in others:
        peer, _, cell = other.partition(".")
        theirs = PEERS[peer].contender(cell)
        sides[other] = PEERS[peer].build(theirs, shape, dtype)
        pair.check(other, sides[other], theirs, shape, dtype, tolerance)
    return {
        "contender": contender,
        "size": shape._asdict(),
        "operations": floor.count(Contender("lstm"), shape)["operations"],
        "device": pair.device_name(),
        "compile_seconds": sides["ours"].facts["compile_seconds"],
        **{
            kind: beside_best(
                in_turn({name: getattr(side, kind) for name, side in sides.items()}, repeats)
            )
            for kind in KINDS
        },
    }


def in_turn(
    runs: dict[str, Callable[[], Any]],
    rounds: int,
    timer: Callable[[Callable[[], Any]], float] = pair.seconds,
) -> dict[str, list[float]]:
    """Seconds of each function, in rounds that begin with each in turn, after one of each."""
    names = list(runs)
    for name in names:
        timer(runs[name])
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(timer(runs[name]))
    return times


def beside_best(times: dict[str, list[float]]) -> dict[str, Any]:
    """Ours beside the peer of the smallest median: ``{"best", "ratio", "seconds"}``."""
    seconds = {name: float(np.median(each)) for name, each in times.items()}
    best = min((name for name in times if name != "ours"), key=seconds.__getitem__)
    ratios = np.array(times[best]) / np.array(times["ours"])
    return {"best": best, "ratio": pair.summary(ratios), "seconds": seconds}


def below(row: dict[str, Any]) -> dict[str, list[str]]:
    """The peers beside which a row is below ``LEAST``, each with what was measured so."""
    slower: dict[str, list[str]] = {}
    for kind in KINDS:
        if row[kind]["ratio"]["median"] < LEAST:
            slower.setdefault(row[kind]["best"], []).append(kind)
    return slower


def run(options: dict[str, Any], machine: dict[str, Any]) -> int:
    """Measures what the flags ask for and prints it; returns the exit status: 1 if a row failed."""
    names = (options["peers"] or ",".join(PEERS)).split(",")
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        fail("speed", f"--random has the peers {', '.join(PEERS)}, got {', '.join(unknown)}.")
    missing = {name: machine["missing"][name] for name in names if name in machine["missing"]}
    peers = [name for name in names if name not in missing]
    if not peers:
        fail("speed", f"None of {', '.join(names)} can be run here: {'; '.join(missing.values())}.")
    left_out = [f"{name}: {reason}" for name, reason in missing.items()]
    report: dict[str, Any] = {"machine": machine, "settings": options, "rows": []}
    report |= {"again": [], "left_out": left_out, "failed": []}
    try:
        asked = rows(
            options["cells"] or CELLS, options["random"], options["draw"], options["devices"]
        )
    except ValueError as error:
        fail("speed", str(error))
    if lanes := {str(contender) for contender, *_ in asked if contender.lanes > 1}:
        fail("speed", f"--random runs one lane, as the peers do, got {', '.join(sorted(lanes))}.")
    for number, (contender, size, devices) in enumerate(asked, 1):
        where = f"{contender} at {tuple(size)} on {devices} XLA devices"
        say(f"{number}/{len(asked)} {where}")
        try:
            row = _row(contender, size, devices, opponents(contender, peers), options, report)
        except process.ProcessError as error:
            report["failed"].append(f"{where}: {error}")
            say(f"failed: {error}")
            continue
        report["rows"].append(row)
        said = [f"{kind} {_ratio(row[kind])} beside {row[kind]['best']}" for kind in KINDS]
        say(f"  {', '.join(said)}")
        save(options["out"], "random", report, table(report))
    directory = save(options["out"], "random", report, table(report))
    if report["rows"]:
        speed_report.draw_random(report, directory / "random.png")
    print(table(report))
    return int(bool(report["failed"]))


def _row(
    contender: Contender,
    size: Size,
    devices: int,
    others: list[str],
    options: dict[str, Any],
    report: dict[str, Any],
) -> dict[str, Any]:
    """A row, measured again where it must be."""

    def measured(others: list[str], repeats: int) -> dict[str, Any]:
        arguments: dict[str, Any] = {"contender": str(contender), "others": others, "size": size}
        arguments |= {"repeats": repeats, "dtype": options["dtype"], "tf32": options["tf32"]}
        row: dict[str, Any] = process.call("benchmarks.draws.measure", arguments, devices)
        return row

    row = {"devices": devices, **measured(others, options["repeats"])}
    for other, kinds in below(row).items():
        alone = measured([other], AGAIN * options["repeats"])
        for kind in kinds:
            report["again"].append(
                f"{contender} at {tuple(size)} on {devices} XLA devices, {kind} beside {other}: "
                f"first {_ratio(row[kind])}, then {_ratio(alone[kind])}"
            )
            row[kind] = alone[kind]
    return row


def table(report: dict[str, Any]) -> str:
    """All rows as Markdown, and of each cell the median, the worst and where."""
    machine, settings = report["machine"], report["settings"]
    packages = ", ".join(f"{k} {v}" for k, v in machine["versions"].items() if v)
    lines = [
        f"{machine['device']}, {settings['dtype']}; {packages}.",
        "",
        f"{settings['random']} random sizes, draw {settings['draw']}. Ratio: the time of the best "
        "peer over ours, above 1 we are faster; median and quartiles over rounds.",
        "",
        markdown(*_rows(report["rows"])),
        "",
        markdown(*_summary(report["rows"])),
    ]
    for what, lead in (("again", "Again"), ("left_out", "Left out"), ("failed", "FAILED")):
        lines += ["", *(f"{lead}: {line}" for line in report[what])] if report.get(what) else []
    return "\n".join(lines)


def _rows(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    titles = ["B, T, D, F", "devices", "ours"]
    for kind in KINDS:
        titles += [f"{kind} ms", "best", "its ms", "ratio"]
    cells = []
    for row in rows:
        line = [_place(row), str(row["devices"]), f"`{row['contender']}`"]
        for kind in KINDS:
            timed = row[kind]
            line += [milliseconds(timed["seconds"]["ours"]), f"`{timed['best']}`"]
            line += [milliseconds(timed["seconds"][timed["best"]]), _ratio(timed)]
        cells.append(line)
    return titles, cells


def _summary(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    titles = ["ours", "", "rows", "median", "worst", "where (B, T, D, F)", "devices", "beside"]
    lines = []
    for contender in dict.fromkeys(row["contender"] for row in rows):
        own = [row for row in rows if row["contender"] == contender]
        for kind in KINDS:
            ratios = [row[kind]["ratio"]["median"] for row in own]
            worst = own[int(np.argmin(ratios))]
            what = [f"`{contender}`", kind, str(len(own)), f"{np.median(ratios):.2f}"]
            where = [_place(worst), str(worst["devices"]), f"`{worst[kind]['best']}`"]
            lines.append([*what, f"{min(ratios):.2f}", *where])
    return titles, lines


def _place(row: dict[str, Any]) -> str:
    return ", ".join(map(str, row["size"].values()))


def _ratio(timed: dict[str, Any]) -> str:
    ratios = timed["ratio"]
    return f"{ratios['median']:.2f} ({ratios['low']:.2f}-{ratios['high']:.2f})"
