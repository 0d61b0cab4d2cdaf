"""Measurements of cells with fresh and with trained parameters, printed and drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.command.runs import Finished
from experiments.diagnose import figures
from experiments.diagnose.figures import shown, verdict
from experiments.diagnose.options import FreshParameters
from experiments.settings.cells import field_of, first_line
from experiments.settings.errors import UserError
from recurrent_gates import (
    GATO,
    GRU,
    LSTM,
    Cell,
    Elman,
    FlaxCell,
    analysis,
    desiderata,
    gate_theory,
    unroll,
)

_TIMESCALE_DRAWS = 40
_GATE_BATCH = 16
_MEMORY = 4e9  # bytes, beyond which a wish is refused
_GAMMAS = {
    "identity": desiderata.identity,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "cos": jnp.cos,
    "sin": jnp.sin,
}


def measure_cell(cell: Cell, options: FreshParameters, out: Path) -> None:
    """Measures a cell with fresh parameters, prints what comes out and draws it.

    Args:
      cell: an unbound cell, that of the options.
      options: how it is read, and the sizes.
      out: the directory of the figures.

    Raises:
      UserError: if the cell cannot be measured, or needs too much memory.
    """
    D, T, draws, name = options.in_features, options.steps, options.draws, options.cell
    key = jax.random.key(options.seed)
    reading = _reading(options)
    try:
        _check_memory_of_cell(cell, options)
        print(f"{name}: {desiderata.reading(cell, **reading).text}\n", flush=True)
        results = desiderata.measure(cell, D, key=key, draws=draws, **reading)
    except UserError:
        raise
    except Exception as error:  # a cell of the user's own may fail in any way
        raise UserError(f"--cell={name} cannot be measured: {first_line(error)}") from None
    family = None if reading else desiderata.family(cell)
    verdicts = desiderata.EXPECTED[family] if family else None
    print(table(results, verdicts), flush=True)

    # Parameters one draw after another: see analysis.initial_timescales.
    params = [cell.init_params(k, D) for k in jax.random.split(key, draws)]
    stacked = _stacked(params)
    xs = jax.random.normal(jax.random.fold_in(key, 2), (draws, T, _GATE_BATCH, D))
    y = jax.eval_shape(lambda p, x: unroll(cell, p, x)[1], params[0], xs[0, :, 0])
    title = f"{name}  ·  {y.shape[-1]} units  ·  {draws} draws of parameters"

    figures.criteria(results, verdicts, f"{title}, times 1 and 3", out / "criteria.png")
    files = ["criteria.png"]
    scales = {"parameters as drawn": 1, "parameters times 3": 3}
    scaled = {name: desiderata.scaled(stacked, scale) for name, scale in scales.items()}
    files += _gradient_paths(
        cell, {name: (params, xs[:, :, 0]) for name, params in scaled.items()}, title, out
    )
    means = _gate_means(cell, stacked, xs)
    if not means:
        print("\nThis cell names no gates: neither their histograms nor timescales are drawn.")
    else:
        files += _gates({"": means}, title, out)
    if "f" in means:
        files += _timescales(cell, key, D, name, out)
    print("\n" + "\n".join(f"drew {out / name}" for name in files))


def measure_run(finished: Finished, name: str, steps: int, out: Path) -> None:
    """Measures the cell of a run before and after its training, prints and draws it.

    Gates and timescales are averages over the first few sequences that the run was evaluated on,
    gradients are those of the first; padding is left out. The parameters are those that the run
    reports.

    Args:
      finished: the run; seeds and learning rates that diverged are left out.
      name: of the run, for titles.
      steps: the gradients are those through the first so many steps, or all if there are fewer.
      out: the directory of the figures.

    Raises:
      UserError: if all of it diverged, or the Jacobians need too much memory.
    """
    cell, learner = finished.learner.cell, finished.learner
    lanes = finished.sound_lanes
    if not lanes:
        raise UserError("every seed of this run diverged: there is nothing to measure.")
    T = min(steps, finished.sequence_steps)
    _check_memory({"Jacobians": len(lanes) * T * _width(cell) ** 2}, "--steps")
    valid = finished.valid(_GATE_BATCH)
    places = np.flatnonzero(valid[:, 0])[:T]  # of the first sequence, without its padding
    cases, means = {}, {}
    for moment, moment_params in (("before", learner.initial().params), ("after", finished.params)):
        lane_params = [finished.lane(moment_params, lane) for lane in lanes]
        params = _stacked([tree["recurrent"]["cell"] for tree in lane_params])
        xs = jnp.stack([finished.features(tree, _GATE_BATCH) for tree in lane_params])
        # On one device: singular values of lanes that lie on several wait for each other for ever.
        cases[f"{moment} training"] = jax.device_get((params, xs[:, places, 0]))
        if gates := _gate_means(cell, params, xs, valid):
            means[f"{moment} training"] = gates
    runs_text = f"{len(lanes)} runs" if len(lanes) > 1 else "one run"
    model, step_count = finished.config.model, finished.summary["steps"]
    title = f"{model.cell}  ·  {model.hidden_size} units  ·  {runs_text} in {name}"
    note = "" if finished.state.best is None else ", with the best parameters of that time"
    print(f"{name}: {model.cell} before and after {step_count} steps of training{note}", flush=True)
    files = _gradient_paths(cell, cases, title, out)
    if not means:
        print("\nThis cell names no gates: neither they nor timescales are measured.")
    else:
        files += _gates(means, title, out)
    for moment, gates in means.items():
        if "f" in gates:
            values = np.asarray(analysis.timescales(jnp.asarray(gates["f"])))
            print(f"\ntimescales 1/(1-f) {moment}, {_middle(values)}")
    print("\n" + "\n".join(f"drew {out / name}" for name in files))


def _stacked(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _reading(options: FreshParameters) -> dict[str, Any]:
    """The arguments of ``desiderata.reading`` that are not inferred."""
    reading: dict[str, Any] = {}
    if options.remembered is not None:
        reading["remembered"] = field_of(options.remembered)
    if options.gamma is not None:
        reading["gamma"] = _GAMMAS[options.gamma]
    if options.recurrent is not None:
        reading["recurrent"] = tuple(field_of(name) for name in options.recurrent)
    return reading


def _check_memory_of_cell(cell: Cell, options: FreshParameters) -> None:
    D, T, draws = options.in_features, options.steps, options.draws
    params = jax.eval_shape(lambda: cell.init_params(jax.random.key(0), D))
    numbers = {
        "Jacobians": draws * T * _width(cell) ** 2,
        "parameters": max(draws, _TIMESCALE_DRAWS) * _numbers(params),
        "inputs": draws * T * _GATE_BATCH * D,
    }
    _check_memory(numbers, "--steps, --hidden_size, --in_features or --draws")


def _width(cell: Cell) -> int:
    """How many numbers the state of one example has."""
    return _numbers(jax.eval_shape(lambda: cell.initial(())))


def _numbers(shapes: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def _check_memory(numbers: Mapping[str, int], flags: str) -> None:
    """Refuses so many float32 numbers of each kind, if all of them together are too many."""
    need = 4.0 * sum(numbers.values())
    if need > _MEMORY:
        largest_kind = max(numbers, key=lambda kind: numbers[kind])
        raise UserError(
            f"this needs {need / 1e9:,.0f} GB of memory, and {_MEMORY / 1e9:.0f} are the most "
            f"that is measured with; most of it is for {largest_kind}: lower {flags}."
        )


def table(results: Any, expected: Any) -> str:
    """The five criteria as lines of text.

    Args:
      results: as ``desiderata.measure`` returns them.
      expected: verdicts of the same criteria, or None.
    """
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
        mismatches = [r.number for r, e in zip(results, expected, strict=True) if r.met != e.met]
        agreement = f"all but {', '.join(map(str, mismatches))}" if mismatches else "all five"
        lines += ["", f"measured as expected: {agreement}"]
    return "\n".join(line.rstrip() for line in lines)


def _gradient_paths(
    cell: Any, cases: Mapping[str, tuple[Any, Any]], title: str, out: Path
) -> list[str]:
    """Norms against the gap: a panel for each name's parameters ``[draws]`` and inputs
    ``[draws, T, D]``."""
    panels: dict[str, dict[str, np.ndarray]] = {}
    extras: dict[str, dict[str, np.ndarray]] = {}
    paths = jax.jit(jax.vmap(lambda p, x: analysis.gradient_paths(cell, p, x)))
    for name, (params, xs) in cases.items():
        norms = {key: np.asarray(value) for key, value in paths(params, xs).items()}
        if isinstance(cell, FlaxCell):
            norms.popitem()  # its last field is y, which only goes out
        single = len(norms) == 2  # all, and without the only field: nothing
        panels[name] = {
            _label(blocked): value for blocked, value in norms.items() if not (single and blocked)
        }
        if isinstance(cell, LSTM):
            lecture = jax.vmap(lambda p, x: analysis.lecture_paths(cell, p, x))(params, xs)
            extras[name] = {
                "the lecture's forget-gate path": np.asarray(lecture.forget),
                "its output-gate path": _from_one(lecture.output),
                "and the bound on that": _from_one(lecture.bound),
            }
        elif isinstance(cell, Elman):
            bounds = jax.vmap(lambda p, x: analysis.singular_bounds(cell, p, x))(params, xs)
            extras[name] = {
                "upper bound by U": np.asarray(bounds.upper),
                "lower bound by U": np.asarray(bounds.lower),
            }
        last_values = {
            label: float(np.median(value[:, -1])) for label, value in panels[name].items()
        }
        summary = ", ".join(f"{label} {value:.1f}" for label, value in last_values.items())
        print(f"\nlog10 |d state_T / d state_t| at gap {xs.shape[1]}, {name}: {summary}")
    figures.gradient_paths(panels, extras, title, out / "gradient_paths.png")
    return ["gradient_paths.png"]


def _from_one(table: Any) -> Any:
    """Lines that begin at gap 1, with gap 0's 1 before them."""
    return np.pad(np.asarray(table), ((0, 0), (1, 0)))


def _label(blocked: tuple[Any, ...]) -> str:
    if not blocked:
        return "all paths"
    field = blocked[0]
    return f"without field {field}" if isinstance(field, int) else f"without {field}"


def _gate_means(
    cell: Any, params: Any, xs: Any, valid: jax.Array | None = None
) -> dict[str, np.ndarray]:
    """``{gate: mean over time and batch of each unit of each draw}``; empty: it names none."""

    def means_of(params: Any, xs: Any) -> dict[str, jax.Array]:
        gates = analysis.gate_activations(cell, params, xs, valid=valid)
        return analysis.gate_means(gates, valid)

    means = jax.vmap(means_of)(params, xs)
    return {name: np.ravel(value) for name, value in means.items()}


def _gates(moments: Mapping[str, Mapping[str, np.ndarray]], title: str, out: Path) -> list[str]:
    for moment, means in moments.items():
        text = "  ".join(
            f"{k} {v.mean():.3f} ({v.min():.3f} to {v.max():.3f})" for k, v in means.items()
        )
        label = f" {moment}" if moment else ""
        print(f"\ngates{label}, mean and range over units: {text}")
    figures.gate_histograms(moments, title, out / "gate_histograms.png")
    return ["gate_histograms.png"]


def _timescales(cell: Any, key: Any, in_features: int, name: str, out: Path) -> list[str]:
    periods = analysis.initial_timescales(
        cell, key, in_features=in_features, draws=_TIMESCALE_DRAWS
    )
    values = np.ravel(np.asarray(periods))
    gated = isinstance(cell, LSTM | GRU) and getattr(cell, "forget_gate", True)
    law = gate_theory.gate_law(cell.gate, cell.features) if gated else None
    print(f"\ntimescales 1/(1-f) at the start, {_middle(values)}")
    if law is not None:
        print(f"distance from {law.name}: {gate_theory.distance(values, law):.3f}")
    qualifier = "of r, " if isinstance(cell, GATO) else ""
    figures.timescales(
        values,
        law,
        gate_theory.timescale_laws(),
        f"{name}  ·  decay periods {qualifier}at the start, {values.size} units",
        out / "timescales.png",
    )
    return ["timescales.png"]


def _middle(values: np.ndarray) -> str:
    ranks = np.round(np.array([0.01, 0.5, 0.99]) * (values.size - 1)).astype(int)
    quantiles = np.sort(np.ravel(values))[ranks]  # some may be infinite
    return "1%, 50%, 99% of units: " + ", ".join(f"{v:.3g}" for v in quantiles)


def measure_refine_gate(seed: int, out: Path) -> None:
    """Prints what UR-gates' propositions say and what holds, and draws its Figure 2.

    Args:
      seed: of the draws behind proposition 1.
      out: the directory of the figure.
    """
    first = gate_theory.pareto_fit(jax.random.key(seed))
    grid = np.linspace(0.01, 0.99, 99)
    second = gate_theory.timescale_range(grid)
    shortest = second["shortest"] / (second["period"] / 2)
    longest = second["longest"] / second["period"] ** 2
    third = gate_theory.master_gate_means()
    fourth = gate_theory.tied_master_gates(grid[:, None], grid[None])
    gap = np.abs(fourth["master_gate"] - fourth["refine_gate"]).max()
    bounds = gate_theory.gradient_bounds(grid)
    lines = [
        f"proposition 1: decay periods of uniform gates are Pareto of shape {first['shape']:.3f} "
        f"(1), Kolmogorov-Smirnov distance {first['distance']:.4f}",
        f"proposition 2: the shortest refined period is {shortest.min():.3f} to "
        f"{shortest.max():.3f} times D/2, the longest {longest.min():.3f} times D^2",
        f"proposition 3: E[f^ + i^] = {third['sum']:.4f} (5/6 = {5 / 6:.4f}), "
        f"E[f^] = {third['f']:.4f} (5/12 = {5 / 12:.4f})",
        f"proposition 4: tied, rescaled master gates and the refine gate differ by {gap:.1e}",
        f"gradient with a refine gate over that without: {bounds.lower_ratio.min():.3f} to "
        f"{bounds.upper_ratio.max():.3f}",
    ]
    print("\n".join(lines))
    figures.refine_gate(out / "refine_gate.png")
    print(f"\ndrew {out / 'refine_gate.png'}")
