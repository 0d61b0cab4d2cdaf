"""The sweeps of the page: what each asks, and how many of its runs are among the results."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.results.records import read
from experiments.settings.errors import UserError
from experiments.sweep import plan

_Key = tuple[str, frozenset[tuple[str, str]]]  # a binary and the flags of a run


def markdown(directory: Path) -> str:
    """A table of the sweeps: first those of which runs are missing.

    Args:
      directory: ``docs/results``.

    Raises:
      UserError: if a file is damaged, or a sweep's does not begin with a comment.
    """
    finished = _finished(directory)
    rows = []
    for path in sorted((directory / "sweeps").glob("*.toml")):
        experiment, combinations = plan.asked(path)
        files = [finished.get(_key(experiment.name, one)) for one in combinations]
        count = sum(file is not None for file in files)
        names = sorted({file for file in files if file is not None})
        rows.append(
            [
                f"[{path.name}](results/sweeps/{path.name})",
                _question(path),
                f"{count} of {len(files)}",
                ", ".join(f"[{name}](results/{name})" for name in names),
            ]
        )
    rows.sort(key=lambda row: row[2].split()[0] == row[2].split()[2])
    head = ["sweep", "what it asks", "runs finished", "its results"]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _finished(directory: Path) -> dict[_Key, str]:
    """The file of each finished run, by its command."""
    files = {}
    for path in sorted(directory.glob("*.json")):
        for run in read(path).runs:
            if run.finished:
                _, _, module, *flags = shlex.split(run.command)
                own = dict(flag.removeprefix("--").split("=", 1) for flag in flags)
                files[_key(module.removeprefix("experiments."), own)] = path.name
    return files


def _key(binary: str, flags: Mapping[str, Any]) -> _Key:
    own = {"protocol": "small"}
    for name, value in flags.items():
        if name not in ("data_dir", "backend"):
            same = "learning_rates" if name == "learning_rate" else name
            own[same] = ",".join(map(_number, plan.text(value).split(",")))
    return binary, frozenset(own.items())


def _number(text: str) -> str:
    """The same text for 4e-3 and 0.004."""
    try:
        return repr(float(text))
    except ValueError:
        return text


def _question(path: Path) -> str:
    lines = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    if not lines:
        raise UserError(f"{path} must begin with a comment that says what the sweep asks.")
    return " ".join(lines)
