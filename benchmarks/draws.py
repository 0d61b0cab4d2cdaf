"""Sizes that nobody chose: ours beside the best of its peers at sizes drawn at random.

A row is one cell at one size: our side and every peer's, each in a process of its own, run in
turn, a round after another, and what is said is the best peer's time over ours, by round. A peer
that took more than ``HOPELESS`` times as long as another in the first round takes part in no more.
A row that is below ``LEAST`` is measured again with ``AGAIN`` times the rounds; what the second
measurement says is then the row's.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import floor, pair, process, speed_report
from benchmarks.command import fail, markdown, milliseconds, save, say
from benchmarks.peers import PEERS
from benchmarks.process import Held
from benchmarks.work import Contender, Size

CELLS = "lstm,ur_lstm,gato1,gru"  # those beside the same peers follow each other
RANGES = {"batch": (1, 256), "steps": (1, 1024), "inputs": (1, 1024), "features": (32, 1024)}
MOST_OPERATIONS = 2e11  # of an LSTM's train step
LEAST = 0.95
AGAIN = 3
HOPELESS = 2.0
DOMINATED = 16_384  # B F from which products take most of the time


def sizes(count: int, draw: int) -> list[Size]:
    """So many sizes, each number log-uniform in ``RANGES``, of at most ``MOST_OPERATIONS``.

    F is the next even number, as GATO's pairs need. The first of many are those of few.
    """
    rng = np.random.default_rng(draw)
    low, high = np.log([RANGES[name] for name in Size._fields]).T
    sample: list[Size] = []
    while len(sample) < count:
        numbers = np.exp(rng.uniform(low, high)).round().astype(int)
        numbers[-1] += numbers[-1] % 2
        size = Size(*map(int, numbers))
        if floor.count(Contender("lstm"), size)["operations"] <= MOST_OPERATIONS:
            sample.append(size)
    return sample


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
    contender: str, rivals: Sequence[str], size: Size, processes: dict[str, Held], repeats: int
) -> tuple[dict[str, Any], list[str]]:
    """A row, measured again where it must be.

    Args:
      contender: ours, as ``Contender.parse`` reads it.
      rivals: ``peer.cell``, with names in ``PEERS``.
      size: B, T, D, F.
      processes: by peer its process, and that of ``ours``.
      repeats: rounds.

    Returns:
      The row, and what is to be said of what was measured again.

    Raises:
      ProcessError: if a side fails, or if its values or gradients are not those of the plain scan.
    """
    sides = {
        "ours": processes["ours"],
        **{rival: processes[pair.peer_of(rival)] for rival in rivals},
    }
    for name, side in sides.items():
        side.send("build", name=contender if name == "ours" else name)
    facts = {name: side.answer() for name, side in sides.items()}

    def timed(kind: str, names: Sequence[str], rounds: int) -> dict[str, Any]:
        runs = {name: functools.partial(sides[name].ask, "seconds", kind=kind) for name in names}
        return beside_best(in_turn(runs, rounds))

    row = {
        "contender": contender,
        "size": size._asdict(),
        "work": floor.count(Contender.parse(contender), size),
        "operations": floor.count(Contender("lstm"), size)["operations"],
        "device": facts["ours"]["device"],
        "compile_seconds": facts["ours"]["compile_seconds"],
        **{kind: timed(kind, list(sides), repeats) for kind in pair.KINDS},
    }
    notes = []
    for kind in pair.KINDS:
        best, first_ratio = row[kind]["best"], speed_report.ratio(row[kind])
        if row[kind]["ratio"]["median"] < LEAST:
            row[kind] = retry = timed(kind, list(sides), AGAIN * repeats)
            notes.append(
                f"{kind}: first {first_ratio} beside {best}, then {speed_report.ratio(retry)} "
                f"beside {retry['best']}"
            )
    return row, notes


def in_turn(runs: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds that each function returns, in rounds that begin with each in turn.

    The first round is not counted; a peer that is hopeless in it has that time alone.
    """
    first_times = {name: run() for name, run in runs.items()}
    best_time = min(time for name, time in first_times.items() if name != "ours")
    names = [name for name in runs if name == "ours" or first_times[name] <= HOPELESS * best_time]
    times = {name: [] if name in names else [first_times[name]] for name in runs}
    for number in range(rounds):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            times[name].append(runs[name]())
    return times


def beside_best(times: dict[str, list[float]]) -> dict[str, Any]:
    """Ours beside the peer of the smallest median: ``{"best", "ratio", "seconds"}``."""
    seconds = {name: float(np.median(run_times)) for name, run_times in times.items()}
    best = min((name for name in times if name != "ours"), key=seconds.__getitem__)
    ratios = np.array(times[best]) / np.array(times["ours"])
    return {"best": best, "ratio": pair.summary(ratios), "seconds": seconds}


def run(options: dict[str, Any], machine: dict[str, Any]) -> int:
    """Measures what the flags ask for and prints it; returns the exit status: 1 if a row failed."""
    names = (options["peers"] or ",".join(PEERS)).split(",")
    unknown_names = [name for name in names if name not in PEERS]
    if unknown_names:
        fail("speed", f"--random has the peers {', '.join(PEERS)}, got {', '.join(unknown_names)}.")
    missing = {name: machine["missing"][name] for name in names if name in machine["missing"]}
    peers = [name for name in names if name not in missing]
    if not peers:
        fail("speed", f"None of {', '.join(names)} can be run here: {'; '.join(missing.values())}.")
    omissions = [f"{name}: {reason}" for name, reason in missing.items()]
    report: dict[str, Any] = {"machine": machine, "settings": options, "rows": []}
    report |= {"again": [], "left_out": omissions, "failed": []}
    if options["floor"]:
        settings = {"dtype": options["dtype"], "tf32": options["tf32"]}
        report["rates"] = process.call("benchmarks.floor.rates", settings, options["devices"])
    try:
        planned_rows = rows(
            options["cells"] or CELLS, options["random"], options["draw"], options["devices"]
        )
    except ValueError as error:
        fail("speed", str(error))
    earlier_rows = _earlier_rows(report) if options["resume"] else []
    if lanes := {str(contender) for contender, *_ in planned_rows if contender.lanes > 1}:
        fail("speed", f"--random runs one lane, as the peers do, got {', '.join(sorted(lanes))}.")
    report["rows"] += earlier_rows
    finished_rows = {(row["contender"], Size(**row["size"])) for row in earlier_rows}
    planned_rows = [row for row in planned_rows if (str(row[0]), row[1]) not in finished_rows]
    number = 0
    for (size, devices), group in itertools.groupby(planned_rows, key=lambda row: row[1:]):
        settings = {"dtype": options["dtype"], "tf32": options["tf32"]}
        with contextlib.ExitStack() as stack:
            processes: dict[str, Held] = {}
            for contender, *_ in group:
                number += 1
                label = f"{contender} at {tuple(size)} on {devices} XLA devices"
                say(f"{number}/{len(planned_rows)} {label}")
                for name in ("ours", *peers):
                    if name not in processes:
                        count = devices if name == "ours" else 1
                        processes[name] = stack.enter_context(pair.hold(size, count, **settings))
                try:
                    row, notes = measure(
                        str(contender),
                        opponents(contender, peers),
                        size,
                        processes,
                        options["repeats"],
                    )
                except process.ProcessError as error:
                    report["failed"].append(f"{label}: {error}")
                    say(f"failed: {error}")
                    stack.close()  # a process has ended, and others have answers that nobody read
                    processes = {}
                    continue
                report["rows"].append({"devices": devices, **row})
                report["again"] += [f"{label}, {line}" for line in notes]
                summaries = [
                    f"{kind} {speed_report.ratio(row[kind])} beside {row[kind]['best']}"
                    for kind in pair.KINDS
                ]
                say(f"  {', '.join(summaries)}")
                save(options["out"], "random", report, table(report))
    directory = save(options["out"], "random", report, table(report))
    if report["rows"]:
        speed_report.draw_random(report, directory / "random.png")
    print(table(report))
    return int(bool(report["failed"]))


def _earlier_rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that the same command, which was stopped, has left; it may have had fewer sizes."""
    path = Path(report["settings"]["out"]) / "random.json"
    try:
        previous = json.loads(path.read_text())
    except FileNotFoundError:
        fail("speed", f"--resume: there is no {path}.")
    except ValueError:
        fail("speed", f"--resume: {path} is damaged; give another --out.")
    for section in ("machine", "settings"):
        ours, theirs = (
            {**document[section], "random": 0, "resume": False} for document in (report, previous)
        )
        if differences := [name for name in ours if ours[name] != theirs.get(name)]:
            fail("speed", f"--resume: in {path} the {section}'s {differences[0]} differs.")
    report["again"] += previous["again"]
    return list(previous["rows"])


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
    if "rates" in report:
        lines += ["", markdown(*_floors(report))]
    for key, heading in (("again", "Again"), ("left_out", "Left out"), ("failed", "FAILED")):
        lines += ["", *(f"{heading}: {line}" for line in report[key])] if report.get(key) else []
    return "\n".join(lines)


def _rows(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    titles = ["B, T, D, F", "devices", "ours"]
    for kind in pair.KINDS:
        titles += [f"{kind} ms", "best", "its ms", "ratio"]
    cells = []
    for row in rows:
        line = [_place(row), str(row["devices"]), f"`{row['contender']}`"]
        for kind in pair.KINDS:
            times = row[kind]
            line += [milliseconds(times["seconds"]["ours"]), f"`{times['best']}`"]
            line += [milliseconds(times["seconds"][times["best"]]), speed_report.ratio(times)]
        cells.append(line)
    return titles, cells


def _summary(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    titles = ["ours", "", "rows", "median", "worst", "where (B, T, D, F)", "devices", "beside"]
    lines = []
    for contender in dict.fromkeys(row["contender"] for row in rows):
        cell_rows = [row for row in rows if row["contender"] == contender]
        for kind in pair.KINDS:
            ratios = [row[kind]["ratio"]["median"] for row in cell_rows]
            worst = cell_rows[int(np.argmin(ratios))]
            cells = [f"`{contender}`", kind, str(len(cell_rows)), f"{np.median(ratios):.2f}"]
            worst_cells = [_place(worst), str(worst["devices"]), f"`{worst[kind]['best']}`"]
            lines.append([*cells, f"{min(ratios):.2f}", *worst_cells])
    return titles, lines


def _floors(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Train steps that products dominate, in times of their floor, beside torch's."""
    titles = ["B, T, D, F", "devices", "ours", "floor ms", "ours / floor", "torch / floor"]
    lines = []
    for row in report["rows"]:
        if row["size"]["batch"] * row["size"]["features"] < DOMINATED:
            continue
        seconds = row["train"]["seconds"]
        floor_time, _ = speed_report.floor_seconds(row, report["rates"])
        torch = [time for name, time in seconds.items() if name == f"torch.{row['contender']}"]
        lines.append(
            [
                *(
                    _place(row),
                    str(row["devices"]),
                    f"`{row['contender']}`",
                    milliseconds(floor_time),
                ),
                *(f"{time / floor_time:.2f}" for time in (seconds["ours"], *torch)),
                *([] if torch else ["-"]),
            ]
        )
    return titles, lines


def _place(row: dict[str, Any]) -> str:
    return ", ".join(map(str, row["size"].values()))
