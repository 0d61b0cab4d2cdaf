"""From the settings of a model to the library's cell, and which of them a cell has."""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

import recurrent_gates as rg
from experiments.settings.errors import UserError
from experiments.settings.model import ModelSettings
from recurrent_gates import initializers

_INITIALIZERS = ("kernel_init", "recurrent_kernel_init", "bias_init")
# Settings without which a cell may not be built at all, and their names in it.
_PARTS = {
    "memory_slots": "memory_slots",
    "heads": "heads",
    "word_size": "word_size",
    "read_heads": "read_heads",
    "rows_read": "top_k",
}
_UNSTATED = ("word_size", "read_heads", "rows_read")  # None: as the cell has it
_STANDARD = rg.GATES["standard"]

# Of what a cell decides and a protocol does not.
OWN_SOURCES = {
    "forget_bias": "ours: UR Listing 1 is of the plain LSTM; R starts at 1, too, the GRU at 0",
    "refine_bias": "UR Listing 2: -b beside f's b; the authors' later code has none",
    "reset": "ours: as the authors' later code, before the product",
}


def bare_cell(name: str, hidden_size: int, **parts: int) -> rg.Cell:
    """The cell of a name in ``CELLS`` or of ``module:Class``, with its own settings.

    A class takes ``features``, or nothing; a foreign Flax cell is wrapped in ``FlaxCell``.

    Args:
      name: of the cell.
      hidden_size: its units.
      **parts: the sizes of its parts, of ``parts_of``, where the cell has such settings.

    Raises:
      UserError: if there is no such cell, or it cannot have that size.
    """
    if hidden_size < 1:
        raise UserError(f"--hidden_size must be at least 1, got {hidden_size}.")
    if ":" not in name:
        try:
            return _divided(rg.CELLS[name], hidden_size, parts)
        except rg.UnknownCellError as error:
            raise UserError(str(error)) from None
        except ValueError as error:
            raise UserError(f"--cell={name}: {_as_flags(str(error))}") from None
    member = _imported(name)
    try:
        cell = member
        if isinstance(member, type) or not isinstance(member, nn.Module):
            fields = getattr(member, "__dataclass_fields__", {"features": None})
            cell = member(features=hidden_size) if "features" in fields else member()
    except Exception as error:  # a cell of the user's own may fail in any way
        raise UserError(f"--cell={name} cannot be built: {first_line(error)}") from None
    if isinstance(cell, nn.RNNCellBase) and not isinstance(cell, rg.Cell):
        cell = rg.FlaxCell(cell)
    if not isinstance(cell, rg.Cell):
        raise UserError(
            f"--cell={name} is neither a recurrent_gates.Cell nor a Flax cell, "
            f"but {type(cell).__name__}."
        )
    return cell


def check_size(name: str, cell: rg.Cell, hidden_size: int) -> None:
    """Raises ``UserError`` where a cell of the user's own is not of the size of the setting.

    Such is an instance, or what a function returns. The size is recorded, and starts of the
    parameters are made of it.

    Args:
      name: of the cell.
      cell: as ``bare_cell`` made it.
      hidden_size: the setting.
    """
    features = getattr(cell.module if isinstance(cell, rg.FlaxCell) else cell, "features", None)
    if isinstance(features, int) and features != hidden_size:
        raise UserError(
            f"--cell={name} has {features} units and --hidden_size is {hidden_size}; give "
            f"--hidden_size={features}."
        )


def parts_of(settings: Mapping[str, Any]) -> dict[str, int]:
    """Those settings of a cell without which it may not be built at all, by their names in it."""
    return {
        field: settings[name] for name, field in _PARTS.items() if settings.get(name) is not None
    }


def _divided(cell: Callable[..., rg.Cell], hidden_size: int, parts: Mapping[str, int]) -> rg.Cell:
    try:
        return cell(hidden_size, **parts)
    except TypeError:  # it has no such settings
        return cell(hidden_size)


def _as_flags(message: str) -> str:
    """What a cell says of its parts, by the names of their flags where these are others."""
    for flag, field in _PARTS.items():
        if flag != field:
            message = re.sub(rf"\b{field}\b", flag, message)
    return message


def _imported(name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except AttributeError:
        raise UserError(f"--cell={name}: module {module} has no {attribute!r}.") from None
    except Exception as error:  # so may its module
        raise UserError(
            f"--cell={name}: module {module} cannot be imported: {first_line(error)}"
        ) from None


def source_digest(name: str) -> str | None:
    """8 hexadecimal digits of the module of a ``module:Class``, without its comments; None if there
    is no source.

    Raises:
      UserError: if there is no such cell.
    """
    _imported(name)
    return _program_digest(sys.modules[name.partition(":")[0]])


@functools.cache  # what was imported stays, whatever becomes of its file
def _program_digest(module: Any) -> str | None:
    try:
        source = inspect.getsource(module)
    except (OSError, TypeError):
        return None
    return hashlib.sha256(ast.unparse(ast.parse(source)).encode()).hexdigest()[:8]


def first_line(error: Exception) -> str:
    """The first line of an error, with its kind."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else f"{type(error).__name__}."


def own_settings(cell: rg.Cell) -> dict[str, Any]:
    """The settings that a cell has, with the values that it has of its own accord."""
    fields = {field.name for field in dataclasses.fields(cell)}
    settings: dict[str, Any] = {}
    if fields.issuperset(_INITIALIZERS):
        settings["init"] = "library"
    for name, field in {"bias_vectors": "bias_vectors", **_PARTS}.items():
        if field in fields:
            settings[name] = None if name in _UNSTATED else getattr(cell, field)
    if settings.get("heads") == 1:
        settings["heads"] = None  # whole matrices, as before there were heads
    gate: Any = getattr(cell, "gate", None)
    if isinstance(gate, rg.Gate):
        if gate.activation == "sigmoid" and gate.bias == "constant" and not gate.master:
            settings["forget_bias"] = gate.forget_bias
        if gate.bias != "constant" and (gate.refine or gate.refine_input):
            settings["refine_bias"] = gate.refine_bias
        if gate.master:
            settings["downsize"] = gate.downsize
        if gate.bias == "chrono":
            settings["tmax"] = gate.tmax
    if reset := getattr(cell, "reset", None):
        settings["reset"] = reset
    if "s_update" in fields:
        settings["s_update"] = cell.s_update
    if isinstance(cell, rg.GATO) and isinstance(cell.f, rg.GatedDecay):
        settings["lambda_"] = cell.f.rate
    return settings


def has_whole_matrices(cell: rg.Cell) -> bool:
    """Whether a cell's recurrent weights are in one block, as its class has them."""
    defaults = {field.name: field.default for field in dataclasses.fields(cell)}
    return defaults.get("heads") == 1 == getattr(cell, "heads", None)


def left_to_protocols(cell: rg.Cell, name: str) -> bool:
    """Whether a protocol's default is for this cell's setting of that name.

    The forget bias of the papers is that of a standard gate, and where the reset gate acts is a
    question of the plain GRU: refined gates and gated GRUs keep their own (ours).
    """
    if name == "forget_bias":
        return getattr(cell, "gate", None) in (_STANDARD, _STANDARD.tie())
    if name == "reset":
        return getattr(cell, "reset", None) == "after"
    return True


def cells_own(model: ModelSettings) -> dict[str, Any]:
    """The settings of a model's cell that no protocol decides, with the cell's own values."""
    cell = bare_cell(model.cell, model.hidden_size, **parts_of(dataclasses.asdict(model)))
    settings = own_settings(cell)
    return {name: value for name, value in settings.items() if not left_to_protocols(cell, name)}


def feedback_fields(cell: rg.Cell) -> list[str]:
    """The fields of the state that may feed back: h alone where there is one."""
    fields = state_fields(cell)
    if isinstance(cell, rg.FlaxCell):
        fields = fields[:-1]  # the last one is y
    summed_fields = cell.sums.fields if cell.sums else ()
    return ["h"] if "h" in fields else [name for name in fields if name not in summed_fields]


def state_fields(cell: rg.Cell) -> tuple[str, ...]:
    """The names of a state's fields; their numbers where they have no names."""
    state = jax.eval_shape(lambda: cell.initial(()))
    if not isinstance(state, tuple):
        return ("0",)
    return getattr(state, "_fields", tuple(map(str, range(len(state)))))


def field_of(name: str) -> str | int:
    """A field as the library takes it: a name or a number."""
    return int(name) if name.removeprefix("-").isdecimal() else name


def reads_missing(cell: rg.Cell) -> bool:
    """Whether a cell reads, beside values, which are missing and since when."""
    return isinstance(cell, rg.GRUD)


def memory_is_scaled(cell: rg.Cell) -> bool:
    """Whether the fields of a cell's memory are in units of another field, and so none is alone."""
    return isinstance(cell, rg.SLSTM)


def _dtypes(cell: rg.Cell, model: ModelSettings) -> dict[str, Any]:
    if not hasattr(cell, "dtype"):
        raise UserError(f"--dtype: {model.cell} has no such setting.")
    if model.dtype != "float64":
        return {"dtype": model.dtype}
    if jnp.result_type(float) != "float64":
        raise UserError("--dtype=float64 needs the environment variable JAX_ENABLE_X64=1.")
    return {"dtype": "float64", "param_dtype": "float64"}


def build_cell(model: ModelSettings) -> rg.Cell:
    """The cell that the settings describe.

    Raises:
      UserError: if they do not fit together.
    """
    cell = bare_cell(model.cell, model.hidden_size, **parts_of(dataclasses.asdict(model)))
    if model.tmax is not None and model.tmax <= 2:
        raise UserError(
            f"--tmax must be above 2, got {model.tmax:g}; unless given, it is --hidden_size."
        )
    changes: dict[str, Any] = {
        name: value
        for name in ("bias_vectors", "reset", "s_update")
        if (value := getattr(model, name)) is not None
    }
    changes |= parts_of(dataclasses.asdict(model))
    gate_changes = {
        name: value
        for name in ("forget_bias", "refine_bias", "downsize", "tmax")
        if (value := getattr(model, name)) is not None
    }
    try:
        if gate_changes:
            changes["gate"] = dataclasses.replace(cell.gate, **gate_changes)
        if model.lambda_ is not None:
            changes["f"] = dataclasses.replace(cell.f, rate=model.lambda_)
        if model.init == "torch":
            uniform = initializers.torch_recurrent(model.hidden_size)
            changes |= dict.fromkeys(_INITIALIZERS, uniform)
        elif model.init == "torch_inputs":
            changes["kernel_init"] = initializers.torch_linear_kernel
        if model.dtype != "float32":
            changes |= _dtypes(cell, model)
        return cell.clone(**changes)
    except ValueError as error:
        raise UserError(f"--cell={model.cell}: {error}") from None
