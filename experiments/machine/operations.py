"""What a program computes, counted from its jaxpr: loops as often as they run.

XLA's own count takes the body of a loop once. Pointwise functions are fused into what reads them
and count as nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

_READS = ("gather", "dynamic_slice")  # as much as they hand out
_WRITES = {"scatter": 2, "scatter-add": 2, "dynamic_update_slice": 1}  # which argument


class Work(NamedTuple):
    """Work of one device.

    Attributes:
      operations: floating-point operations of products and convolutions, an addition and a
        multiplication being two.
      bytes: read and written by products, convolutions, gathers, slices and by loops over time,
        each for itself: what they hand to each other on the chip is counted, too.
    """

    operations: int
    bytes: int

    def __add__(self, other: Any) -> Work:
        return Work(self.operations + other.operations, self.bytes + other.bytes)

    def times(self, count: int) -> Work:
        """The same so often."""
        return Work(self.operations * count, self.bytes * count)


def of(jaxpr: Any) -> Work:
    """The work of a jaxpr; a loop whose length only the run knows counts once.

    Args:
      jaxpr: closed or not, such as ``jax.make_jaxpr(f)(x)``, or a traced function's.
    """
    total = Work(0, 0)
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name, params = equation.primitive.name, equation.params
        moved_bytes = _bytes(equation.invars + equation.outvars)
        if name in ("dot_general", "conv_general_dilated"):
            terms = _terms_of_dot(equation) if name == "dot_general" else _terms_of_conv(equation)
            total += Work(2 * terms * equation.outvars[0].aval.size, moved_bytes)
        elif name in _READS:
            total += Work(0, 2 * _bytes(equation.outvars))
        elif name in _WRITES:
            total += Work(0, 2 * _bytes([equation.invars[_WRITES[name]]]))
        elif name == "cond":
            total += max(map(of, params["branches"]))
        elif name == "scan":
            total += of(params["jaxpr"]).times(params["length"]) + Work(
                0, _bytes(_step_variables(equation))
            )
        elif name == "pallas_call":
            count = math.prod(params["grid_mapping"].grid)
            total += Work(of(params["jaxpr"]).operations * count, moved_bytes)
        else:
            for inner in _inner(params):
                total += of(inner)
    return total


def _step_variables(equation: Any) -> list[Any]:
    """What a scan reads and hands out step by step: inside, it has an axis less."""
    body = equation.params["jaxpr"].jaxpr
    outer_variables, inner_variables = (
        equation.invars + equation.outvars,
        body.invars + body.outvars,
    )
    pairs = zip(outer_variables, inner_variables, strict=True)
    return [outer for outer, inner in pairs if outer.aval.ndim > inner.aval.ndim]


def _terms_of_dot(equation: Any) -> int:
    """How many products each number of the result is the sum of."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    return math.prod(shape[axis] for axis in contracted)


def _terms_of_conv(equation: Any) -> int:
    kernel = equation.invars[1].aval
    outputs: int = kernel.shape[equation.params["dimension_numbers"].rhs_spec[0]]
    return int(kernel.size) // outputs


def _inner(params: dict[str, Any]) -> Iterator[Any]:
    """The jaxprs that an equation calls."""
    for value in params.values():
        for candidate in value if isinstance(value, list | tuple) else (value,):
            if hasattr(candidate, "eqns") or hasattr(getattr(candidate, "jaxpr", None), "eqns"):
                yield candidate


def _bytes(variables: Iterable[Any]) -> int:
    return sum(
        variable.aval.size * variable.aval.dtype.itemsize
        for variable in variables
        if hasattr(variable.aval, "dtype") and hasattr(variable.aval, "size")
    )
