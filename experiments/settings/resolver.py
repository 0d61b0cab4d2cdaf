"""From an experiment, a protocol and settings given beside it to a config."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from experiments.settings import fields
from experiments.settings.config import Config
from experiments.settings.derived import in_steps, without_dependence
from experiments.settings.errors import UserError
from experiments.settings.fields import Setting
from experiments.settings.model import CarrySettings, ModelSettings
from experiments.settings.optimization import Passes, TrainingSettings
from experiments.settings.sources import Protocol

_SHARED = (ModelSettings, CarrySettings, TrainingSettings)


class Experiment(NamedTuple):
    """What a binary trains.

    Attributes:
      name: of the binary.
      settings: the dataclass of the task's own settings. It may have ``forms``, which names the
        cell that a name stands for in this experiment.
      task: gives the task's class, a subclass of ``settings``; JAX is imported only then.
      protocols: by name.
      study: whether the binary trains several runs that belong together.
    """

    name: str
    settings: Any
    task: Callable[[], Any]
    protocols: Mapping[str, Protocol]
    study: bool = False

    @property
    def in_passes(self) -> bool:
        """Whether its length may be given in passes over a training set."""
        return any("epochs" in protocol.settings for protocol in self.protocols.values())

    def declarations(self) -> dict[str, Setting]:
        """Every setting by name: the shared ones, the task's, and epochs where there are any."""
        classes = [*_SHARED, self.settings, *([Passes] if self.in_passes else [])]
        declarations = {
            name: declaration
            for cls in classes
            for name, declaration in fields.declared(cls).items()
        }
        return {
            name: declaration
            for name, declaration in declarations.items()
            if declaration.needs is None
            or declaration.needs[0] in declarations  # else it could have no effect
        }

    def values(self, protocol: str) -> dict[str, fields.Sourced]:
        """A protocol's settings with those that have a default, before any dependence.

        Raises:
          UserError: if there is no such protocol.
        """
        if protocol not in self.protocols:
            names = ", ".join(self.protocols)
            raise UserError(f"There is no protocol {protocol!r}; known: {names}.")
        return {
            **dict(fields.defaults(*_SHARED, self.settings)),
            **self.protocols[protocol].settings,
        }


def resolve(experiment: Experiment, protocol: str, overrides: Mapping[str, Any]) -> Config:
    """The config of a protocol with some settings given beside it.

    Args:
      experiment: what is trained.
      protocol: a paper's name, or ``"small"``.
      overrides: setting name -> value.

    Returns:
      The config, checked.

    Raises:
      UserError: if there is no such protocol, or the settings cannot be.
    """
    declarations, sourced = experiment.declarations(), experiment.values(protocol)
    _check_protocol(experiment, protocol, sourced, overrides)
    for name, value in overrides.items():
        if name not in declarations:
            raise UserError(f"--{name.rstrip('_')} is not for {experiment.name}: {_NO_SETTING}")
        declarations[name].check(value)
    raw_settings = {name: entry.value for name, entry in sourced.items()} | dict(overrides)
    forms = getattr(experiment.settings, "forms", {})
    raw_settings["cell"] = forms.get(raw_settings["cell"], raw_settings["cell"])
    settings = without_dependence(raw_settings)
    cells = experiment.protocols[protocol].cells
    decided_names = getattr(experiment.settings, "decides", ())
    settings |= _cell_settings(cells, settings, overrides, decided_names)
    task = _fill(experiment.task(), settings)
    if task.name != experiment.name and not experiment.study:
        raise UserError(
            f"the experiment {experiment.name} has a task of the name {task.name}: they must be "
            "the same."
        )
    task.check()
    settings = in_steps(task, settings, overrides)
    _check_effect(overrides, settings, declarations, sourced)
    config = Config(
        protocol=protocol,
        overrides=dict(overrides),
        task=task,
        model=_fill(ModelSettings, settings),
        carry=_fill(CarrySettings, settings),
        training=_fill(TrainingSettings, settings),
    )
    config.check()
    return config


def _check_protocol(
    experiment: Experiment,
    protocol: str,
    sourced: Mapping[str, fields.Sourced],
    overrides: Mapping[str, Any],
) -> None:
    """Raises ``UserError`` on a setting that a protocol misspells, or that nothing gives."""
    names = [
        field.name for cls in (*_SHARED, experiment.settings) for field in dataclasses.fields(cls)
    ]
    known_names = {*names, *(field.name for field in dataclasses.fields(Passes))}
    unknown_names = [name for name in sourced if name not in known_names]
    families = experiment.protocols[protocol].cells.values()
    unknown_names += [name for cell in families for name in cell if name not in _OF_THE_CELL]
    if unknown_names:
        raise UserError(
            f"the protocol {protocol} of {experiment.name} gives {' and '.join(unknown_names)}, "
            "which no setting is called."
        )
    given_names = {*sourced, *overrides, *_OF_THE_CELL}
    missing_names = [name for name in names if name not in given_names]
    if missing_names:
        missing = " and no ".join(missing_names)
        raise UserError(
            f"the protocol {protocol} of {experiment.name} gives no {missing}, and there is no "
            "default."
        )


_NO_SETTING = "it has no such setting."


def _check_effect(
    overrides: Mapping[str, Any],
    settings: Mapping[str, Any],
    declarations: Mapping[str, Setting],
    sourced: Mapping[str, fields.Sourced],
) -> None:
    fields.check_effect(overrides, settings, declarations, sourced)
    for name in ("detach_state", "detach_query"):
        if overrides.get(name) and not (settings["detach_prob"] or settings["damp_prob"]):
            raise UserError(f"--{name} has no effect without --detach_prob or --damp_prob.")
    if "ties" in overrides and not (settings["keep_best"] or settings["patience"]):
        raise UserError("--ties has no effect without --keep_best or --patience.")
    if overrides.get("keep_best") is False and settings["patience"]:
        raise UserError("--keep_best=false contradicts --patience, which reports the best ones.")


def _cell_settings(
    cells: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Any],
    overrides: Mapping[str, Any],
    decided_names: tuple[str, ...],
) -> dict[str, Any]:
    """The settings that the cell has: from the command line, the protocol or the cell itself."""
    from experiments.settings.cells import (
        bare_cell,
        check_size,
        feedback_fields,
        has_whole_matrices,
        left_to_protocols,
        own_settings,
        parts_of,
    )

    name = settings["cell"]
    cell = bare_cell(name, settings["hidden_size"], **parts_of(overrides))
    check_size(name, cell, settings["hidden_size"])
    cell_values = {
        setting: value
        for setting, value in own_settings(cell).items()
        if setting not in decided_names
    }
    family = _family(cells, cell)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(ModelSettings):
        setting = field.name
        if setting not in _OF_THE_CELL:
            continue
        if setting in overrides and setting not in cell_values:
            raise UserError(f"--{setting.rstrip('_')} is not for {name}: {_NO_SETTING}")
        if setting in overrides:
            values[setting] = overrides[setting]
        elif setting in cell_values and setting in family and left_to_protocols(cell, setting):
            values[setting] = family[setting].value
        else:
            values[setting] = cell_values.get(setting)
    if values["heads"] == 1 and has_whole_matrices(cell):
        values["heads"] = None  # the same model
    if values["tmax"] == "hidden_size":
        values["tmax"] = settings["hidden_size"]
    if settings["detach_state"] == "feedback":
        candidates = feedback_fields(cell)
        cuts = next((cut for cut in ("detach_prob", "damp_prob") if settings[cut]), None)
        if cuts and len(candidates) > 1 and not cell.linear:
            raise UserError(
                f"--{cuts}: the state of {name} has the fields {' and '.join(candidates)}, and "
                "none is named h: say which one feeds back, such as "
                f"--detach_state={candidates[-1]}."
            )
        values["detach_state"] = candidates[0]
    return values


def _family(cells: Mapping[str, Mapping[str, Any]], cell: Any) -> Mapping[str, Any]:
    """A protocol's defaults for a cell."""
    from recurrent_gates import GATO

    return cells["gato" if isinstance(cell, GATO) else "*"]


def explain(experiment: Experiment, config: Config) -> dict[str, dict[str, Any]]:
    """``{flag: {"value", "meaning", "source"}}`` of every setting in effect.

    Args:
      experiment: what is trained.
      config: as ``resolve`` made it.
    """
    from experiments.settings.cells import OWN_SOURCES, bare_cell, left_to_protocols, parts_of

    sourced = experiment.values(config.protocol)
    model = config.model
    cell = bare_cell(model.cell, model.hidden_size, **parts_of(dataclasses.asdict(model)))
    family = _family(experiment.protocols[config.protocol].cells, cell)
    values = {name: value for part in config.resolved().values() for name, value in part.items()}
    explanations = {}
    for name, declaration in experiment.declarations().items():
        if values.get(name) is None:
            continue
        if name in config.overrides:
            source = "the command line"
        elif name in family and left_to_protocols(cell, name):
            source = family[name].source
        else:
            fallback = OWN_SOURCES.get(name, "the cell's own")
            source = sourced[name].source if name in sourced else fallback
        explanations[declaration.flag] = {
            "value": values[name],
            "meaning": declaration.meaning,
            "source": source,
        }
    return explanations


_OF_THE_CELL = (
    "init",
    "bias_vectors",
    "forget_bias",
    "refine_bias",
    "reset",
    "downsize",
    "tmax",
    "s_update",
    "memory_slots",
    "heads",
    "word_size",
    "read_heads",
    "rows_read",
    "lambda_",
)


def _fill(cls: Any, settings: Mapping[str, Any]) -> Any:
    return cls(**{field.name: settings[field.name] for field in dataclasses.fields(cls)})
