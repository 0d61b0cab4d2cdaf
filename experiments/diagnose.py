"""How a cell's gradients, gates and timescales are: ``python -m experiments.diagnose --cell=lstm``.

Measures GATO's five desiderata, gradient norms along each path, gates and timescales with fresh
parameters; prints a table, draws figures. ``--workdir=DIR`` measures gradients, gates and
timescales before and after a run's training; ``--figure=gates`` draws the refine gate instead.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl.flags import FlagValues

from experiments import flags

_DEFAULTS: dict[str, Any] = {
    "cell": "gato",
    "hidden_size": 32,
    "in_features": 8,
    "steps": 200,
    "draws": 5,
    "seed": 0,
}
_OF_A_RUN = ("workdir", "steps", "out_dir")
_GAMMAS = ("identity", "tanh", "sigmoid", "cos", "sin")
_LARGEST = 2**31


def define(values: FlagValues) -> None:
    """The flags of this binary; those of training have no meaning here and are taken back."""
    values.remove_flag_values(list(values))

    def add(define: Any, name: str, text: str) -> None:
        define(name, None, text, flag_values=values)

    string, integer = flags.flags.DEFINE_string, flags.flags.DEFINE_integer
    add(string, "cell", "a name in recurrent_gates.CELLS, or module:Class; default: gato")
    add(string, "workdir", "a finished run of an experiment, instead of --cell")
    flags.enum(values, "figure", ["cell", "gates"], "the cell's figures, or the refine gate's")
    add(integer, "hidden_size", "units of the cell; for GATO 2J; default: 32")
    add(integer, "in_features", "width of the inputs, which are N(0, 1); default: 8")
    steps = "length of the runs behind the gradient and gate figures; of a --workdir's gradients"
    add(integer, "steps", f"{steps}, at most; default: 200")
    add(integer, "draws", "how often parameters are drawn; default: 5")
    add(integer, "seed", "of parameters and inputs; default: 0")
    add(string, "remembered", "the field that remembers; default: inferred, and printed")
    flags.enum(values, "gamma", _GAMMAS, "the map from that field to y; default: inferred")
    add(
        flags.flags.DEFINE_list,
        "recurrent",
        "the fields that feed back, with commas, or none; default: inferred",
    )
    add(
        string,
        "out_dir",
        "where figures go; default: runs/diagnose/CELL, or /gates, or DIR/figures",
    )


def begin(task: str, given: dict[str, Any]) -> None:
    """Measures, prints and draws.

    Args:
      task: this binary's name.
      given: flags by name.

    Raises:
      UserError: if a wish cannot be met.
    """
    del task
    from experiments.config import UserError

    if "workdir" in given:
        for name in given:
            if name not in _OF_A_RUN:
                raise UserError(f"--{name} is for fresh parameters: --workdir has its own.")
    given = {**_DEFAULTS, **given}
    for name in ("hidden_size", "in_features", "steps", "draws"):
        if not 1 <= given[name] < _LARGEST:
            raise UserError(f"--{name} must be at least 1 and below 2^31, got {given[name]}.")
    if not 0 <= given["seed"] < _LARGEST:
        raise UserError(f"--seed must be at least 0 and below 2^31, got {given['seed']}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("Figures need matplotlib: pip install 'recurrent_gates[experiments]'.")
    try:
        _measure(given)
    except KeyboardInterrupt:
        print("experiments.diagnose: interrupted.", file=sys.stderr)
        sys.exit(130)


def _measure(given: dict[str, Any]) -> None:
    from experiments.config import UserError

    measure, default = _measurement(given)
    out = Path(given.get("out_dir", default))
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out_dir {out} cannot be made: {error.strerror}.") from None
    try:
        measure(out)
    except OSError as error:
        raise UserError(f"cannot write to --out_dir {out}: {error.strerror}.") from None


def _measurement(given: dict[str, Any]) -> tuple[Callable[[Path], None], Path]:
    """What measures and draws into a directory, and which one by default.

    Raises:
      UserError: if there is no such cell or run.
    """
    from experiments import diagnosis, studies

    runs = Path("runs", "diagnose")
    if "workdir" in given:
        workdir = Path(given["workdir"])
        found, name, steps = studies.finished(workdir), workdir.resolve().name, given["steps"]
        return lambda out: diagnosis.diagnose_run(found, name, steps, out), workdir / "figures"
    if given.get("figure") == "gates":
        return lambda out: diagnosis.refine_gate(given, out), runs / "gates"
    cell, reading = build(given["cell"], given["hidden_size"]), _reading(given)
    directory = runs / given["cell"].replace(":", ".")
    return lambda out: diagnosis.diagnose_cell(cell, given, reading, out), directory


def build(name: str, features: int) -> Any:
    """The cell of a name in ``CELLS`` or of ``module:Class``.

    A class takes ``features``, or nothing; a foreign Flax cell is wrapped in ``FlaxCell``.

    Args:
      name: of the cell.
      features: the hidden size.

    Raises:
      UserError: if there is no such cell, or it cannot be of that size.
    """
    from flax import linen as nn

    import recurrent_gates as rg
    from experiments.config import UserError
    from experiments.diagnosis import sentence

    if ":" not in name:
        try:
            return rg.CELLS[name](features)
        except (rg.UnknownCellError, ValueError) as error:
            raise UserError(str(error)) from None
    found = _imported(name)
    try:
        cell = found
        if isinstance(found, type) or not isinstance(found, nn.Module):
            fields = getattr(found, "__dataclass_fields__", {"features": None})
            cell = found(features=features) if "features" in fields else found()
    except Exception as error:
        raise UserError(f"--cell={name} cannot be built: {sentence(error)}") from None
    if isinstance(cell, nn.RNNCellBase) and not isinstance(cell, rg.Cell):
        cell = rg.FlaxCell(cell)
    if not isinstance(cell, rg.Cell):
        raise UserError(
            f"--cell={name} is neither a recurrent_gates.Cell nor a Flax cell, "
            f"but {type(cell).__name__}."
        )
    return cell


def _imported(name: str) -> Any:
    from experiments.config import UserError
    from experiments.diagnosis import sentence

    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except AttributeError:
        raise UserError(f"Module {module} has no {attribute!r}.") from None
    except Exception as error:
        raise UserError(f"Module {module!r} cannot be imported: {sentence(error)}") from None


def _field(name: str) -> str | int:
    return int(name) if name.lstrip("-").isdigit() else name


def _reading(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of ``reading`` that flags give."""
    import jax
    import jax.numpy as jnp

    from recurrent_gates.desiderata import identity

    known = {
        "identity": identity,
        "tanh": jnp.tanh,
        "sigmoid": jax.nn.sigmoid,
        "cos": jnp.cos,
        "sin": jnp.sin,
    }
    how: dict[str, Any] = {}
    if "remembered" in given:
        how["remembered"] = _field(given["remembered"])
    if "gamma" in given:
        how["gamma"] = known[given["gamma"]]
    if "recurrent" in given:
        names = [] if given["recurrent"] == ["none"] else given["recurrent"]
        how["recurrent"] = tuple(_field(name) for name in names)
    return how


if __name__ == "__main__":
    flags.main("diagnose", define, begin)
