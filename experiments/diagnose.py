"""How a cell's gradients, gates and timescales are: ``python -m experiments.diagnose --cell=lstm``.

Measures GATO's five desiderata, gradient norms along each path, gates and timescales with fresh
parameters; prints a table, draws figures. ``--figure=gates`` draws the refine gate instead.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from absl.flags import FlagValues

from experiments import flags

_GAMMAS = ("identity", "tanh", "sigmoid", "cos", "sin")
_TIMESCALE_DRAWS = 40
_GATE_BATCH = 16
_LARGEST = 2**31
_MEMORY = 4e9  # bytes of Jacobians, beyond which a wish is refused


def define(values: FlagValues) -> None:
    """The flags of this binary; those of training have no meaning here and are taken back."""
    values.remove_flag_values(list(values))

    def add(define: Any, name: str, default: Any, text: str) -> None:
        define(name, default, text, flag_values=values)

    string, integer = flags.flags.DEFINE_string, flags.flags.DEFINE_integer
    add(string, "cell", "gato", "a name in recurrent_gates.CELLS, or module:Class of your own")
    flags.enum(values, "figure", ["cell", "gates"], "the cell's figures, or the refine gate's")
    add(integer, "hidden_size", 32, "units of the cell; for GATO 2J")
    add(integer, "in_features", 8, "width of the inputs, which are N(0, 1)")
    add(integer, "steps", 200, "length of the runs behind the gradient and gate figures")
    add(integer, "draws", 5, "how often parameters are drawn")
    add(integer, "seed", 0, "of parameters and inputs")
    add(string, "remembered", None, "the field that remembers; default: inferred, and printed")
    flags.enum(values, "gamma", _GAMMAS, "the map from that field to y; default: inferred")
    add(
        flags.flags.DEFINE_list,
        "recurrent",
        None,
        "the fields that feed back, with commas; default: inferred",
    )
    add(string, "out_dir", None, "where figures go; default: runs/diagnose/CELL, or /gates")


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

    for name in ("hidden_size", "in_features", "steps", "draws"):
        if not 1 <= given[name] < _LARGEST:
            raise UserError(f"--{name} must be at least 1 and below 2^31, got {given[name]}.")
    if not 0 <= given["seed"] < _LARGEST:
        raise UserError(f"--seed must be at least 0 and below 2^31, got {given['seed']}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("Figures need matplotlib: pip install 'recurrent_gates[experiments]'.")
    gates = given.get("figure") == "gates"
    cell = None if gates else build(given["cell"], given["hidden_size"])
    name = "gates" if gates else given["cell"].replace(":", ".")
    out = Path(given.get("out_dir") or Path("runs", "diagnose", name))
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out_dir {out} cannot be made: {error.strerror}.") from None
    try:
        _refine_gate(given, out) if gates else _diagnose(cell, given, out)
    except KeyboardInterrupt:
        print("experiments.diagnose: interrupted.", file=sys.stderr)
        sys.exit(130)


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
        raise UserError(f"--cell={name} cannot be built: {_sentence(error)}") from None
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

    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except AttributeError:
        raise UserError(f"Module {module} has no {attribute!r}.") from None
    except Exception as error:
        raise UserError(f"Module {module!r} cannot be imported: {_sentence(error)}") from None


def _sentence(error: Exception) -> str:
    """The first line of an error, with its kind."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else f"{type(error).__name__}."


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
        how["recurrent"] = tuple(_field(name) for name in given["recurrent"])
    return how


# ---------------------------------------------------------------------------------------
# One cell
# ---------------------------------------------------------------------------------------


def _diagnose(cell: Any, given: dict[str, Any], out: Path) -> None:
    import jax
    import jax.numpy as jnp

    from experiments.config import UserError
    from recurrent_gates import analysis
    from recurrent_gates import desiderata as theory

    D, T, draws = given["in_features"], given["steps"], given["draws"]
    key = jax.random.key(given["seed"])
    how = _reading(given)
    try:
        _check_memory(cell, draws * T)
        print(f"{given['cell']}: {theory.reading(cell, **how).text}\n", flush=True)
        results = theory.desiderata(cell, D, key=key, draws=draws, **how)
    except UserError:
        raise
    except Exception as error:  # a cell of the user's own may fail in any way
        raise UserError(f"--cell={given['cell']} cannot be measured: {_sentence(error)}") from None
    family = None if how else theory.family(cell)
    verdicts = theory.EXPECTED[family] if family else None
    print(table(results, verdicts), flush=True)

    # Parameters one draw after another: see analysis.initial_timescales.
    params = [cell.init_params(k, D) for k in jax.random.split(key, draws)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
    xs = jax.random.normal(jax.random.fold_in(key, 2), (draws, T, _GATE_BATCH, D))
    title = f"{given['cell']}  ·  {given['hidden_size']} units  ·  {draws} draws of parameters"

    from experiments import analysis_figures as figures

    figures.criteria(results, verdicts, f"{title}, times 1 and 3", out / "criteria.png")
    drawn = ["criteria.png"]
    drawn += _gradient_paths(cell, stacked, xs[:, :, 0], title, out)
    activations = jax.vmap(lambda p, x: analysis.gate_activations(cell, p, x))(stacked, xs)
    if not activations:
        print("\nThis cell names no gates: neither their histograms nor timescales are drawn.")
    else:
        drawn += _gates(activations, title, out)
    if "f" in activations:
        drawn += _timescales(cell, key, D, given["cell"], out)
    print("\n" + "\n".join(f"drew {out / name}" for name in drawn))


def _check_memory(cell: Any, matrices: int) -> None:
    import jax

    from experiments.config import UserError

    carry = jax.eval_shape(lambda: cell.initial(()))
    width = sum(leaf.size for leaf in jax.tree.leaves(carry))
    need = 4.0 * matrices * width**2
    if need > _MEMORY:
        raise UserError(
            f"Jacobians of {width} by {width} over all steps and draws need {need / 1e9:.0f} GB: "
            "lower --steps, --hidden_size or --draws."
        )


def table(results: Any, expected: Any) -> str:
    """The five criteria as lines of text.

    Args:
      results: as ``desiderata`` returns them.
      expected: verdicts of the same criteria, or None.
    """
    from experiments.analysis_figures import shown, verdict

    head = ("criterion", "measured, the worst draw", "number", "limit", "expected", "verdict")
    rows = [head]
    for index, result in enumerate(results):
        rows.append(
            (
                f"{result.number} {result.statement}",
                result.quantity,
                shown(result.value),
                f"{'>=' if result.number == 3 else '<='} {result.limit:g}",
                verdict(expected[index].met) if expected else "-",
                verdict(result.met),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, "  ".join("-" * w for w in widths))
    if expected:
        lines += ["", "expected because"]
        lines += [f"{r.number} {e.because}" for r, e in zip(results, expected, strict=True)]
        wrong = [r.number for r, e in zip(results, expected, strict=True) if r.met != e.met]
        agree = f"all but {', '.join(map(str, wrong))}" if wrong else "all five"
        lines += ["", f"measured as expected: {agree}"]
    return "\n".join(line.rstrip() for line in lines)


def _gradient_paths(cell: Any, params: Any, xs: Any, title: str, out: Path) -> list[str]:
    """Norms against the gap for parameters as drawn and three times as large."""
    import jax
    import numpy as np

    from experiments import analysis_figures as figures
    from recurrent_gates import LSTM, Elman, analysis
    from recurrent_gates.desiderata import scaled

    panels: dict[str, dict[str, np.ndarray]] = {}
    extras: dict[str, dict[str, np.ndarray]] = {}
    paths = jax.jit(jax.vmap(lambda p, x: analysis.gradient_paths(cell, p, x)))
    for scale, name in ((1, "parameters as drawn"), (3, "parameters times 3")):
        large = scaled(params, scale)
        norms = {key: np.asarray(value) for key, value in paths(large, xs).items()}
        single = len(norms) == 2  # all, and without the only field: nothing
        panels[name] = {
            _label(blocked): value for blocked, value in norms.items() if not (single and blocked)
        }
        if isinstance(cell, LSTM):
            found = jax.vmap(lambda p, x: analysis.lecture_paths(cell, p, x))(large, xs)
            extras[name] = {
                "the lecture's forget-gate path": np.asarray(found.forget),
                "its output-gate path": _from_one(found.output),
                "and the bound on that": _from_one(found.bound),
            }
        elif isinstance(cell, Elman):
            bounds = jax.vmap(lambda p, x: analysis.singular_bounds(cell, p, x))(large, xs)
            extras[name] = {
                "upper bound by U": np.asarray(bounds.upper),
                "lower bound by U": np.asarray(bounds.lower),
            }
        last = {label: float(np.median(value[:, -1])) for label, value in panels[name].items()}
        said = ", ".join(f"{label} {value:.1f}" for label, value in last.items())
        print(f"\nlog10 |d state_T / d state_t| at gap {xs.shape[1]}, {name}: {said}")
    figures.gradient_paths(panels, extras, title, out / "gradient_paths.png")
    return ["gradient_paths.png"]


def _from_one(table: Any) -> Any:
    """Lines that begin at gap 1, with gap 0's 1 before them."""
    import numpy as np

    return np.pad(np.asarray(table), ((0, 0), (1, 0)))


def _label(blocked: tuple[Any, ...]) -> str:
    if not blocked:
        return "all paths"
    field = blocked[0]
    return f"without field {field}" if isinstance(field, int) else f"without {field}"


def _gates(activations: dict[str, Any], title: str, out: Path) -> list[str]:
    import jax
    import numpy as np

    from experiments import analysis_figures as figures
    from recurrent_gates import analysis

    means = jax.vmap(analysis.gate_means)(activations)
    flat = {name: np.ravel(value) for name, value in means.items()}
    text = "  ".join(
        f"{k} {v.mean():.3f} ({v.min():.3f} to {v.max():.3f})" for k, v in flat.items()
    )
    print(f"\ngates, mean and range over units: {text}")
    figures.gate_histograms(flat, title, out / "gate_histograms.png")
    return ["gate_histograms.png"]


def _timescales(cell: Any, key: Any, in_features: int, name: str, out: Path) -> list[str]:
    import numpy as np

    from experiments import analysis_figures as figures
    from recurrent_gates import GATO, GRU, LSTM, analysis, gate_theory

    periods = analysis.initial_timescales(
        cell, key, in_features=in_features, draws=_TIMESCALE_DRAWS
    )
    values = np.ravel(np.asarray(periods))
    gated = isinstance(cell, LSTM | GRU) and getattr(cell, "forget_gate", True)
    law = gate_theory.gate_law(cell.gate, cell.features) if gated else None
    ranks = np.round(np.array([0.01, 0.5, 0.99]) * (values.size - 1)).astype(int)
    middle = np.sort(values)[ranks]  # some may be infinite
    print(
        "\ntimescales 1/(1-f) at the start, 1%, 50%, 99% of units: "
        + ", ".join(f"{v:.3g}" for v in middle)
    )
    if law is not None:
        print(f"distance from {law.name}: {gate_theory.distance(values, law):.3f}")
    of = "of r, " if isinstance(cell, GATO) else ""
    figures.timescales(
        values,
        law,
        gate_theory.table_4(),
        f"{name}  ·  decay periods {of}at the start, {values.size} units",
        out / "timescales.png",
    )
    return ["timescales.png"]


# ---------------------------------------------------------------------------------------
# The refine gate
# ---------------------------------------------------------------------------------------


def _refine_gate(given: dict[str, Any], out: Path) -> None:
    import jax
    import numpy as np

    from experiments import analysis_figures as figures
    from recurrent_gates import gate_theory as theory

    first = theory.proposition_1(jax.random.key(given["seed"]))
    grid = np.linspace(0.01, 0.99, 99)
    second = theory.proposition_2(grid)
    shortest = second["shortest"] / (second["period"] / 2)
    longest = second["longest"] / second["period"] ** 2
    third = theory.proposition_3()
    fourth = theory.proposition_4(grid[:, None], grid[None])
    apart = np.abs(fourth["master_gate"] - fourth["refine_gate"]).max()
    bounds = theory.gradient_bounds(grid)
    lines = [
        f"proposition 1: decay periods of uniform gates are Pareto of shape {first['shape']:.3f} "
        f"(1), Kolmogorov-Smirnov distance {first['distance']:.4f}",
        f"proposition 2: the shortest refined period is {shortest.min():.3f} to "
        f"{shortest.max():.3f} times D/2, the longest {longest.min():.3f} times D^2",
        f"proposition 3: E[f^ + i^] = {third['sum']:.4f} (5/6 = {5 / 6:.4f}), "
        f"E[f^] = {third['f']:.4f} (5/12 = {5 / 12:.4f})",
        f"proposition 4: tied, rescaled master gates and the refine gate differ by {apart:.1e}",
        f"gradient with a refine gate over that without: {bounds.lower_ratio.min():.3f} to "
        f"{bounds.upper_ratio.max():.3f}",
    ]
    print("\n".join(lines))
    figures.refine_gate(out / "refine_gate.png")
    print(f"\ndrew {out / 'refine_gate.png'}")


if __name__ == "__main__":
    flags.main("diagnose", define, begin)
