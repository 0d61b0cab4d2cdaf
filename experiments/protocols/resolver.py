"""From a task, a protocol and settings given beside it to a config."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from experiments.config import (
    CarryConfig,
    Config,
    ModelConfig,
    TrainingConfig,
    UserError,
    bare_cell,
)
from experiments.derived import in_steps, without_dependence
from experiments.protocols.adding import ADDING
from experiments.protocols.copy import COPY, TRANSFER_COPY
from experiments.protocols.forgetting import FORGETTING
from experiments.protocols.pixels import PIXELS
from experiments.protocols.settings import GATO_CELL, Protocol
from experiments.tasks.adding import AddingTask
from experiments.tasks.copy import CopyTask
from experiments.tasks.forgetting import ForgettingTask
from experiments.tasks.pixels import PixelsTask
from recurrent_gates import GATO


class Entry(NamedTuple):
    """A task's class, and its protocols by name."""

    task: Any
    protocols: Mapping[str, Protocol]


TASKS = {
    "copy": Entry(CopyTask, COPY),
    "transfer_copy": Entry(CopyTask, TRANSFER_COPY),
    "adding": Entry(AddingTask, ADDING),
    "forgetting": Entry(ForgettingTask, FORGETTING),
    "pixels": Entry(PixelsTask, PIXELS),
}
"""What every binary trains, by the binary's name."""


def resolve(task: str, protocol: str, overrides: Mapping[str, Any]) -> Config:
    """The config of a protocol with some settings given beside it.

    Args:
      task: a binary's name.
      protocol: a paper's name, or ``"small"``.
      overrides: setting name -> value.

    Returns:
      The config, checked.

    Raises:
      UserError: if there is no such protocol, or the settings cannot be.
    """
    entry = TASKS[task]
    if protocol not in entry.protocols:
        raise UserError(f"There is no protocol {protocol!r}; known: {', '.join(entry.protocols)}.")
    chosen = entry.protocols[protocol]
    for name in overrides:
        if name not in chosen.settings and name not in chosen.cells["*"] and name not in GATO_CELL:
            raise UserError(f"--{name.rstrip('_')} is not for {task}: it has no such setting.")
    settings = {name: sourced.value for name, sourced in chosen.settings.items()} | dict(overrides)
    settings = without_dependence(settings)
    settings |= _cell_settings(chosen, settings, overrides)
    settings = in_steps(_fill(entry.task, settings), settings, overrides)
    config = Config(
        protocol=protocol,
        overrides=dict(overrides),
        task=_fill(entry.task, settings),
        model=_fill(ModelConfig, settings),
        carry=_fill(CarryConfig, settings),
        training=_fill(TrainingConfig, settings),
    )
    config.check()
    return config


def _cell_settings(
    protocol: Protocol, settings: Mapping[str, Any], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """The settings that the cell has, each from the command line or from the protocol."""
    name = settings["cell"]
    cell = bare_cell(name, settings["hidden_size"])
    gate: Any = getattr(cell, "gate", None)
    gato = isinstance(cell, GATO)
    has = {
        "init": True,
        "bias_vectors": hasattr(cell, "bias_vectors"),
        # With --gate_bias the task sets every forget gate's bias.
        "forget_bias": name in ("lstm", "janet") and "gate_bias" not in settings,
        "reset": name == "gru",  # every other gated GRU resets before the product
        "downsize": gate is not None and gate.master,
        "tmax": gate is not None and gate.bias == "chrono",
        "s_update": gato,
        "lambda_": gato,
    }
    family = protocol.cells["gato" if gato else "*"]
    found: dict[str, Any] = {}
    for setting, present in has.items():
        given = setting in overrides
        if given and not present:
            flag = setting.rstrip("_")
            raise UserError(f"--{flag} is not for {name}: it has no such setting.")
        default = family[setting].value if setting in family else None
        found[setting] = (overrides[setting] if given else default) if present else None
    if found["tmax"] == "hidden_size":
        found["tmax"] = settings["hidden_size"]
    if settings["detach_state"] == "feedback":
        found["detach_state"] = "r" if gato else "h"
    return found


def _fill(cls: Any, settings: Mapping[str, Any]) -> Any:
    return cls(**{field.name: settings[field.name] for field in dataclasses.fields(cls)})
