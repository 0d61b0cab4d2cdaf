"""Gates and timescales of a cell, along a run and at its start."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from recurrent_gates import checks
from recurrent_gates.analysis.trajectories import carry_dtype, trajectory
from recurrent_gates.base import Carry, Cell, Params
from recurrent_gates.shapes import expand
from recurrent_gates.slstm import SLSTM


@functools.partial(jax.jit, static_argnames="cell")
def gate_activations(
    cell: Cell,
    params: Params,
    xs: jax.Array,
    carry: Carry | None = None,
    *,
    valid: jax.Array | None = None,
) -> dict[str, jax.Array]:
    """Every gate over time and batch.

    Args:
      cell: an unbound cell.
      params: its parameters.
      xs: inputs ``[T, *batch, D]``.
      carry: the carry before the first step; default ``cell.initial(batch)``.
      valid: bool ``[T, *batch]``, as ``unroll`` takes it; of other steps the gates mean nothing.

    Returns:
      ``{gate: [T, *batch, F]}``, empty for a cell that names no gates.

    Raises:
      TypeError: if ``cell`` is not a ``Cell``.
      ValueError: if the carry is not one of the cell's for this batch.
    """
    run = trajectory(cell, params, xs, carry, valid=valid)
    return cell.gates(params, run.before, run.z)


def gate_means(
    gates: Mapping[str, jax.Array], valid: jax.Array | None = None
) -> dict[str, jax.Array]:
    """Activations averaged over time and batch, one number for each unit (UR-gates, Fig. 4, D.1).

    Args:
      gates: ``{gate: [T, *batch, F]}``.
      valid: bool ``[T, *batch]``: which steps count; default: all.

    Returns:
      ``{gate: [F]}``; NaN where no step counts.

    Raises:
      ValueError: if ``valid`` has another shape than the steps and examples of a gate.
    """

    def mean(gate: jax.Array) -> jax.Array:
        if valid is not None:
            shape = gate.shape[: valid.ndim]
            if any(n not in (1, size) for n, size in zip(valid.shape, shape, strict=True)):
                raise ValueError(f"valid has the shape {valid.shape}; these gates need {shape}.")
        mask = None if valid is None else expand(valid, gate)
        return jnp.mean(gate, axis=range(gate.ndim - 1), where=mask)

    return {name: mean(gate) for name, gate in gates.items()}


def histogram(
    values: jax.Array, bins: int = 50, limits: tuple[float, float] = (0.0, 1.0)
) -> tuple[jax.Array, jax.Array]:
    """Counts of values, for Fig. 4 of UR-gates those of ``gate_means``.

    Args:
      values: any shape.
      bins: number of bins of equal width; the last includes its upper edge.
      limits: lower and upper edge.

    Returns:
      (counts ``[bins]``, edges ``[bins + 1]``). Values outside the limits are not counted.
    """
    return jnp.histogram(values, bins, limits)


def timescales(f: jax.Array) -> jax.Array:
    """The decay period D = 1 / (1 - f) of a forget activation, in steps (UR-gates, 2.2).

    Args:
      f: forget activations in [0, 1], any shape.

    Returns:
      D, the same shape; infinite where f is 1.
    """
    return 1 / (1 - f)


def initial_timescales(
    cell: Cell, key: jax.Array, *, gate: str = "f", in_features: int = 1, draws: int = 1
) -> jax.Array:
    """Timescales of fresh parameters at a zero state and input: what the biases alone say.

    Args:
      cell: an unbound cell that names the gate.
      key: PRNG key of the draws.
      gate: which gate forgets.
      in_features: D, the width of the inputs.
      draws: how many parameters are drawn.

    Returns:
      D ``[draws, F]``; infinite where the gate rounds to 1.

    Raises:
      TypeError: if ``cell`` is not a ``Cell``.
      ValueError: if the cell names no such gate, or is an sLSTM, or ``key`` is not one PRNG key.
    """
    checks.cell("initial_timescales", cell, Cell)
    if isinstance(cell, SLSTM):
        raise ValueError(
            "An sLSTM shares its memory out by f, i and its normaliser: f alone has no timescale."
        )
    checks.key("key", key)
    return _initial_timescales(cell, key, gate, checks.in_features(in_features), draws)


@functools.partial(jax.jit, static_argnums=(0, 2, 3, 4))
def _initial_timescales(
    cell: Cell, key: jax.Array, gate: str, in_features: int, draws: int
) -> jax.Array:
    def sample(key: jax.Array) -> jax.Array:
        params = cell.init_params(key, in_features)
        zeros = jax.tree.map(jnp.zeros_like, cell.initial(()))
        x = jnp.zeros((in_features,), carry_dtype(zeros))
        gates = cell.gates(params, zeros, cell.project(params, x))
        if gate not in gates:
            gate_names = ", ".join(gates) or "none"
            raise ValueError(f"{type(cell).__name__} names no gate {gate!r}; it has {gate_names}.")
        return timescales(gates[gate])

    # Not vmap: XLA's CPU runtime can wait for ever on a batch of QR factorisations, which
    # orthogonal initialisation needs.
    return jax.lax.map(sample, jax.random.split(key, draws))
