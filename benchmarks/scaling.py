"""``python -m benchmarks.scaling``: time and memory of a train step against T, B, F and seeds.

Every point is a process of its own. Time is the median of some runs of the compiled train step,
memory what XLA's ``memory_analysis`` says its temporary buffers take, on all devices together. A
slope is that of the least-squares line through the logarithms: 1 is linear. Compiling has its
own column, as T should not change it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags
from absl.flags import FlagValues

from benchmarks import process
from benchmarks.command import fail, markdown, megabytes, milliseconds, parse, save, say
from benchmarks.work import Contender, Size

BASE = Size(batch=16, steps=512, inputs=8, features=128)
"""Where every sweep starts; one letter changes at a time, and seeds from 1."""

SWEEPS = {
    "steps": tuple(2**n for n in range(7, 17)),
    "batch": (1, 4, 16, 64, 256),
    "features": (32, 64, 128, 256, 512),
    "seeds": (1, 2, 4, 8),
}
"""What is varied, over which values."""

_LETTERS = {"steps": "T", "batch": "B", "features": "F", "seeds": "seeds"}
_COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#edae49", "#6a4c93", "#5f6b6d")


class Point(NamedTuple):
    """A cell at one place of a sweep."""

    cell: str
    sweep: str
    value: int

    def arguments(self) -> dict[str, Any]:
        """What ``measure`` is called with."""
        lanes = f"*{self.value}" if self.sweep == "seeds" and self.value > 1 else ""
        size = BASE if self.sweep == "seeds" else BASE._replace(**{self.sweep: self.value})
        return {"contender": self.cell + lanes, "size": size}


def define(values: FlagValues) -> None:
    """Defines the program's flags."""
    flags.DEFINE_string(
        "cells",
        "lstm,ur_lstm,gru,gato1,gato2",
        "ours, each cell[/backend][+detachP]",
        flag_values=values,
    )
    flags.DEFINE_list("sweeps", list(SWEEPS), "what is varied", flag_values=values)
    flags.DEFINE_integer(
        "max_t", 8192, "longest sequence; 65536 is the end of the sweep", 128, flag_values=values
    )


def measure(contender: str, size: Sequence[int], repeats: int) -> dict[str, Any]:
    """A point: runs in a process of its own (``process.call``).

    Returns:
      ``{"seconds", "temporary_bytes", "compile_seconds", "device"}`` of a train step.
    """
    from benchmarks import ours
    from benchmarks.pair import device_name, seconds

    side = ours.side(Contender.parse(contender), Size(*size), "float32")
    side.train()
    times = [seconds(side.train) for _ in range(repeats)]
    return {
        "seconds": float(np.median(times)),
        "temporary_bytes": side.facts["temporary_bytes"],
        "compile_seconds": side.facts["compile_seconds"],
        "device": device_name(),
    }


def slope(values: Sequence[float], measured: Sequence[float]) -> float:
    """Of the least-squares line through (log values, log measured)."""
    return float(np.polyfit(np.log(values), np.log(measured), 1)[0])


def series(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The rows by sweep and cell, in the order of their values."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["value"]):
        groups.setdefault((row["sweep"], row["cell"]), []).append(row)
    return groups


def table(report: dict[str, Any]) -> str:
    """The report as Markdown: slopes first, then every point."""
    slopes, points = [], []
    for (sweep, cell), rows in sorted(series(report["rows"]).items()):
        values = [row["value"] for row in rows]
        if len(rows) > 1:
            slope_pair = [
                slope(values, [row[k] for row in rows]) for k in ("seconds", "temporary_bytes")
            ]
            compile_times = [row["compile_seconds"] for row in rows]
            slopes.append(
                [f"`{cell}`", _LETTERS[sweep], f"{values[0]:,} - {values[-1]:,}"]
                + [f"{number:.2f}" for number in slope_pair]
                + [f"{min(compile_times):.1f} - {max(compile_times):.1f}"]
            )
        points += [
            [
                f"`{cell}`",
                f"{_LETTERS[sweep]} = {row['value']:,}",
                milliseconds(row["seconds"]),
                megabytes(row["temporary_bytes"]),
                f"{row['compile_seconds']:.1f}",
            ]
            for row in rows
        ]
    size = ", ".join(f"{name} {value}" for name, value in zip("BTDF", BASE, strict=True))
    return "\n".join(
        [
            f"{report['device']}, float32, train step; one number is varied from {size}, one seed.",
            "",
            markdown(
                ["cell", "varied", "over", "slope of time", "slope of memory", "compile s"], slopes
            ),
            "",
            markdown(["cell", "at", "train ms", "memory MB", "compile s"], points),
        ]
    )


def draw(report: dict[str, Any], path: Path) -> None:
    """Time above memory, a column a sweep, logarithmic both ways."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    groups = series(report["rows"])
    sweeps = [sweep for sweep in SWEEPS if any(sweep == key[0] for key in groups)]
    cells = list(dict.fromkeys(row["cell"] for row in report["rows"]))
    style: dict[Any, Any] = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 9}
    with rc_context(style):
        figure = Figure(figsize=(2.2 + 2.4 * len(sweeps), 5.6), layout="constrained")
        grid = figure.subplots(2, len(sweeps), squeeze=False, sharex="col", sharey="row")
        for column, sweep in enumerate(sweeps):
            for cell, colour in zip(cells, _COLOURS * len(cells), strict=False):
                rows = groups.get((sweep, cell), [])
                values = [row["value"] for row in rows]
                for line, (name, unit) in enumerate((("seconds", 1e3), ("temporary_bytes", 1e-6))):
                    measurements = [row[name] * unit for row in rows]
                    grid[line, column].plot(
                        values, measurements, marker="o", markersize=3, color=colour, label=cell
                    )
            for axes in grid[:, column]:
                axes.set_xscale("log", base=2)
                axes.set_yscale("log")
                axes.grid(alpha=0.25, linewidth=0.6)
            grid[1, column].set_xlabel(_LETTERS[sweep])
        grid[0, 0].set_ylabel("train step (ms)")
        grid[1, 0].set_ylabel("temporary memory (MB)")
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(cells), frameon=False)
        figure.savefig(path, dpi=150)


def main(argv: Sequence[str]) -> int:
    """The program; returns its exit status: 1 if a point failed."""
    options = parse("scaling", define, argv)
    cells = [cell.strip() for cell in options["cells"].split(",")]
    try:
        for cell in cells:
            if Contender.parse(cell).lanes > 1:
                raise ValueError("Seeds are a sweep here: name cells without *lanes.")
    except ValueError as error:
        fail("scaling", str(error))
    for sweep in options["sweeps"]:
        if sweep not in SWEEPS:
            fail("scaling", f"A sweep is one of {', '.join(SWEEPS)}, got {sweep!r}.")
    points = [
        Point(cell, sweep, value)
        for sweep in options["sweeps"]
        for cell in cells
        for value in SWEEPS[sweep]
        if sweep != "steps" or value <= options["max_t"]
    ]
    report: dict[str, Any] = {"settings": options, "device": None, "rows": [], "failed": []}
    for number, point in enumerate(points, 1):
        say(f"{number}/{len(points)} {point.cell} at {_LETTERS[point.sweep]} = {point.value}")
        arguments = {**point.arguments(), "repeats": options["repeats"]}
        try:
            measurement = process.call("benchmarks.scaling.measure", arguments, options["devices"])
        except process.ProcessError as error:
            report["failed"].append(f"{point.cell} at {point.sweep} {point.value}: {error}")
            say(f"  failed: {error}")
            continue
        report["device"] = measurement.pop("device")
        report["rows"].append({**point._asdict(), **measurement})
        save(options["out"], "scaling", report, table(report))
    if report["rows"]:
        draw(report, Path(options["out"]) / "scaling.png")
        print(table(report))
    return int(bool(report["failed"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
