"""A cell's gradients, gates and timescales: ``python -m experiments.diagnose --cell=lstm``.

Measures GATO's five desiderata, gradient norms along each path, gates and timescales with fresh
parameters; prints a table, draws figures. ``--workdir=DIR`` measures gradients, gates and
timescales before and after a run's training; ``--figure=gates`` draws the refine gate instead.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.command.main import main
from experiments.diagnose.options import FreshParameters
from experiments.settings import fields
from experiments.settings.errors import UserError

if TYPE_CHECKING:
    from absl.flags import FlagValues

_OF_A_RUN = ("workdir", "steps", "out_dir")
_OF_THE_REFINE_GATE = ("figure", "seed", "out_dir")


def define(values: FlagValues) -> None:
    """Defines the flags of this binary."""
    from experiments.command import flags

    for setting in fields.declared(FreshParameters).values():
        flags.add_setting(values, setting)
    meaning = "a finished run of a task with examples (copy, pixels, stay...), instead of --cell"
    flags.add(values, "workdir", meaning)
    figure = "the cell's figures, or the refine gate's; default: cell"
    flags.add(values, "figure", figure, choices=("cell", "gates"))
    places = "where figures go; default: runs/diagnose/CELL, or /gates, or DIR/figures"
    flags.add(values, "out_dir", places)


def begin(flag_values: dict[str, Any]) -> None:
    """Measures, prints and draws.

    Raises:
      UserError: if a wish cannot be met.
    """
    options = _options(flag_values)
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("Figures need matplotlib: pip install 'recurrent_gates[experiments]'.")

    from experiments.catalog import EXPERIMENTS
    from experiments.command import runs, tables
    from experiments.diagnose import measurements
    from experiments.settings.cells import bare_cell
    from experiments.training.supervised import SupervisedTask

    def directory(default: Path) -> Path:
        place = Path(flag_values.get("out_dir", default))
        tables.make(place)
        return place

    if "workdir" in flag_values:
        workdir = Path(flag_values["workdir"])
        supervised = [
            experiment
            for experiment in EXPERIMENTS
            if issubclass(experiment.task(), SupervisedTask)
        ]
        finished = runs.finished(workdir, supervised)
        name, default = workdir.resolve().name, workdir / "figures"
        measurements.measure_run(finished, name, options.steps, directory(default))
    elif flag_values.get("figure") == "gates":
        default = Path("runs", "diagnose", "gates")
        measurements.measure_refine_gate(options.seed, directory(default))
    else:
        cell = bare_cell(options.cell, options.hidden_size)
        default = Path("runs", "diagnose", options.cell.replace(":", "."))
        measurements.measure_cell(cell, options, directory(default))


def _options(flag_values: dict[str, Any]) -> FreshParameters:
    from experiments.command import flags

    if "workdir" in flag_values:
        _refuse_others(flag_values, _OF_A_RUN, "is for fresh parameters: --workdir has its own")
    elif flag_values.get("figure") == "gates":
        reason = "is for a cell: --figure=gates is of the refine gate alone"
        _refuse_others(flag_values, _OF_THE_REFINE_GATE, reason)
    declarations = fields.declared(FreshParameters)
    values = {name: entry.value for name, entry in fields.defaults(FreshParameters)}
    values |= {name: value for name, value in flag_values.items() if name in declarations}
    options = FreshParameters(**values)
    fields.check_all(options)
    if options.recurrent:
        flags.distinct("recurrent", options.recurrent)
    return options


def _refuse_others(
    flag_values: dict[str, Any], allowed_names: tuple[str, ...], reason: str
) -> None:
    for name in flag_values:
        if name not in allowed_names:
            raise UserError(f"--{name} {reason}.")


if __name__ == "__main__":
    main("diagnose", define, begin)
