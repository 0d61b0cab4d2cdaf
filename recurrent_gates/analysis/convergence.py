"""How the Newton iteration over time converges on a cell."""

from __future__ import annotations

from typing import Any

import jax

from recurrent_gates import checks
from recurrent_gates.backends import newton
from recurrent_gates.base import Carry, Cell, Params
from recurrent_gates.scan import Loop, Settings, Stream, sequence_shape, with_zeros


def newton_report(
    cell: Cell,
    params: Params,
    xs: Any,
    carry: Carry | None = None,
    *,
    valid: jax.Array | None = None,
    resets: jax.Array | None = None,
    reverse: bool = False,
) -> newton.Report:
    """How the newton backend solves the recurrence of a cell.

    Args:
      cell: an unbound cell.
      params: its parameters.
      xs: inputs ``[T, *batch, D]``, or a tree of them.
      carry: the carry before the first step; default ``cell.initial(batch)``.
      valid: bool ``[T, *batch]``, as in ``unroll``.
      resets: bool ``[T, *batch]``, as in ``unroll``.
      reverse: run t from T - 1 to 0.

    Returns:
      ``passes`` over the blocks of time, and by block (in the order of the recurrence) the
      ``gaps`` that were left, whether it was ``damped``, and whether it ``fell_back``.

    Raises:
      ValueError: if shapes do not fit, or if the cell does not say that its recurrent Jacobian is
        diagonal.
    """
    checks.cell("newton_report", cell, Cell)
    checks.sequence(xs)
    shape = sequence_shape(cell, params, xs, carry)
    initial = cell.initial(shape[1:])
    carry = initial if carry is None else checks.carry("carry", carry, initial)
    valid = checks.mask("valid", valid, shape[0], shape[1:])
    resets = checks.mask("resets", resets, shape[0], shape[1:])
    settings = Settings(cell, len(shape) - 1, reverse)
    stream = Stream(valid, resets)
    loop = Loop(settings, params, with_zeros(valid, xs), carry, initial, stream=stream)
    return newton.report(loop)
