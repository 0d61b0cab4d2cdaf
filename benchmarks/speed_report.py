"""The table and the figures of ``speed``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.command import markdown, megabytes, milliseconds

_COLOURS = {"forward": "#5f6b6d", "train": "#1b6ca8"}


def ratio(times: dict[str, Any]) -> str:
    """The median ratio with its quartiles."""
    ratios = times["ratio"]
    return f"{ratios['median']:.2f} ({ratios['low']:.2f}-{ratios['high']:.2f})"


def table(report: dict[str, Any]) -> str:
    """The whole report as Markdown: where it was measured, the rows, what was left out."""
    machine, settings = report["machine"], report["settings"]
    packages = ", ".join(f"{k} {v}" for k, v in machine["versions"].items() if v)
    tf32 = f", TF32 {'on' if settings['tf32'] else 'off'}" if machine["platform"] == "gpu" else ""
    lines = [
        f"{machine['device']}, {settings['dtype']}{tf32}; {packages}.",
        "",
        "A train step is forward and all gradients. Ratio: the other's time over ours, above 1 we "
        "are faster; median and quartiles over neighbouring runs. Memory: XLA's temporary "
        "buffers of our train step, of all devices together.",
        "",
        markdown(*_rows(report)),
    ]
    for key, heading in (("left_out", "Left out"), ("failed", "FAILED")):
        lines += ["", *(f"{heading}: {line}" for line in report[key])] if report.get(key) else []
    return "\n".join(lines)


def _rows(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    rates = report.get("rates")
    titles = ["B, T, D, F", "ours", "beside", "forward ms", "beside ms", "ratio"]
    titles += ["train ms", "beside ms", "ratio", "compile s", "memory MB"]
    if rates:
        titles += ["operations 1e9", "bytes 1e6", "floor ms", "train / floor"]
    rows = []
    for row in report["rows"]:
        cells = [", ".join(map(str, row["size"].values())), f"`{row['contender']}`"]
        cells.append(f"`{row['other']}`" + ("" if row["same_equations"] else " (another model)"))
        for name in ("forward", "train"):
            times = row[name]
            cells += [milliseconds(times[side]["median"]) for side in ("ours", "theirs")]
            cells.append(ratio(times))
        cells += [f"{row['ours']['compile_seconds']:.1f}"]
        cells += [megabytes(row["ours"]["temporary_bytes"])]
        if rates:
            cells += floor_cells(row, rates)
        rows.append(cells)
    return titles, rows


def floor_cells(row: dict[str, Any], rates: dict[str, float]) -> list[str]:
    """Operations, bytes, floor time and how often it goes into our train step."""
    work = row["work"]
    floor, limit = floor_seconds(row, rates)
    times = row["train"]["ours"]["median"] / floor
    return [
        f"{work['operations'] / 1e9:,.1f}",
        f"{work['bytes'] / 1e6:,.0f}",
        milliseconds(floor) + (" (bytes)" if limit == "bytes" else ""),
        f"{times:.1f}",
    ]


def floor_seconds(row: dict[str, Any], rates: dict[str, float]) -> tuple[float, str]:
    """The time that the device's rates allow a train step, and which of them it is."""
    return max(
        (row["work"][quantity] / rates[f"{quantity}_per_second"], quantity)
        for quantity in row["work"]
    )


def draw(report: dict[str, Any], path: Path) -> None:
    """Bars of the ratios, one pair of bars a row, whiskers at the quartiles."""
    import numpy as np
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rows = report["rows"]
    places = np.arange(len(rows))[::-1]
    style: dict[Any, Any] = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 9}
    with rc_context(style):
        figure = Figure(figsize=(8.5, 1.4 + 0.38 * len(rows)), layout="constrained")
        axes = figure.subplots()
        for offset, name in ((0.2, "forward"), (-0.2, "train")):
            ratios = [row[name]["ratio"] for row in rows]
            median, low, high = (
                np.array([r[k] for r in ratios]) for k in ("median", "low", "high")
            )
            axes.barh(
                places + offset,
                median,
                0.38,
                xerr=[median - low, high - median],
                color=_COLOURS[name],
                error_kw={"linewidth": 0.8},
                label={"forward": "forward pass", "train": "train step"}[name],
            )
        axes.axvline(1, color="black", linewidth=0.8)
        labels = [
            f"{row['contender']} / {row['other']}  ({', '.join(map(str, row['size'].values()))})"
            for row in rows
        ]
        axes.set_yticks(places, labels)
        axes.set_xlabel("times as fast: the other side's time / ours (1: equal)")
        axes.set_title(f"ours / beside (B, T, D, F) on {report['machine']['device']}", fontsize=9)
        axes.grid(axis="x", alpha=0.25, linewidth=0.6)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.06 - 0.5 / len(rows)), ncols=2)
        figure.savefig(path, dpi=150)


def draw_random(report: dict[str, Any], path: Path) -> None:
    """Points of the ratios against the operations of an LSTM's train step at that size, one colour
    a cell, open where several XLA devices share the batch."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rows = report["rows"]
    style: dict[Any, Any] = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 9}
    with rc_context(style):
        figure = Figure(figsize=(8.5, 3.6), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        names = {"forward": "forward pass", "train": "train step"}
        for axes, (kind, name) in zip(panels, names.items(), strict=True):
            for number, cell in enumerate(dict.fromkeys(row["contender"] for row in rows)):
                colour = f"C{number}"
                for several in (False, True):
                    cell_rows = [
                        row
                        for row in rows
                        if row["contender"] == cell and (row["devices"] > 1) is several
                    ]
                    axes.scatter(
                        [row["operations"] for row in cell_rows],
                        [row[kind]["ratio"]["median"] for row in cell_rows],
                        s=22,
                        facecolors="none" if several else colour,
                        edgecolors=colour,
                        label=None if several else cell,
                    )
            axes.axhline(1, color="black", linewidth=0.8)
            axes.set(
                xscale="log", yscale="log", title=name, xlabel="operations of an LSTM's train step"
            )
            axes.grid(alpha=0.25, linewidth=0.6, which="both")
        panels[0].set_ylabel("the best peer's time / ours (1: equal)")
        panels[0].legend(frameon=False)
        figure.savefig(path, dpi=150)
