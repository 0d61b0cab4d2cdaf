"""Every experiment, for what looks at runs of all of them: ``python -m experiments.catalog``
prints the page of their settings, docs/SETTINGS.md.

An experiment is a room with a module ``settings`` that holds an ``Experiment``.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

from experiments.command.flags import defaults_text
from experiments.settings.resolver import Experiment


def _experiments() -> Iterator[Experiment]:
    for path in sorted(Path(__file__).parent.glob("*/settings.py")):
        module = importlib.import_module(f"experiments.{path.parent.name}.settings")
        yield from (
            value
            for value in vars(module).values()
            if isinstance(value, Experiment) and value.name == path.parent.name
        )


EXPERIMENTS = tuple(_experiments())


def page() -> str:
    """The settings of every experiment as Markdown: flag, meaning, allowed values, defaults."""
    lines = [
        "# Settings",
        "",
        "Every setting is a flag of the binaries that have it, and is declared once, at a field of "
        "`experiments/settings/` or of an experiment's own `settings.py`; this page is printed by "
        "`python -m experiments.catalog`. A protocol's values stand with their sources in "
        "`experiments/NAME/settings.py`, and `--describe` shows those of one run.",
    ]
    shared_names = set.intersection(*(set(experiment.declarations()) for experiment in EXPERIMENTS))
    first = EXPERIMENTS[0]
    lines += ["", "## Of every experiment", "", "| flag | meaning | allowed |", "|---|---|---|"]
    for name, setting in first.declarations().items():
        if name in shared_names:
            lines.append(f"| `--{setting.flag}` | {setting.meaning} | {setting.usual} |")
    for experiment in EXPERIMENTS:
        lines += ["", f"## {experiment.name}", "", "| flag | meaning | allowed |", "|---|---|---|"]
        declarations = experiment.declarations()
        for name, setting in declarations.items():
            if name not in shared_names:
                lines.append(f"| `--{setting.flag}` | {setting.meaning} | {setting.usual} |")
        texts = {s.flag: defaults_text(experiment, s) for s in declarations.values()}
        differing = [f"- `--{flag}`: {text}" for flag, text in texts.items() if "(" in text]
        if differing:
            lines += ["", "Defaults that differ between protocols:", "", *differing]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
