"""What zoneout asks of a cell, because it mixes a field's old value with the new one.

A field that a cell keeps within a period has no mean with its earlier value: they may lie on
different sides of the bound. What is mixed is therefore the value plus the increment, and the
bound is applied after it. And a foreign cell's output that is a copy of a field is copied again
from what was kept.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from recurrent_gates.carry import CarryFn, Noise, Zoneout, get_field, set_field
from recurrent_gates.declared import summed_fields

Around = tuple[Any, tuple[CarryFn, ...], tuple[Noise, ...]]
"""A cell, carry functions and their noise."""


@struct.dataclass
class _Bounded(CarryFn):
    """Brings a summed field back into its range, after what the others made of it."""

    cell: Any = struct.field(pytree_node=False, default=None)

    @property
    def elementwise(self) -> bool:
        return True

    def after(self, noise_t: Noise, prev: Any, new: Any) -> Any:
        del noise_t, prev
        value = get_field(new, self.field)
        return set_field(new, self.field, self.cell.sums.bound(self.field, value))


@struct.dataclass
class _Copied(CarryFn):
    """Makes the last field, the output, a copy of another."""

    def after(self, noise_t: Noise, prev: Any, new: Any) -> Any:
        del noise_t, prev
        return set_field(new, -1, get_field(new, self.field))


def bound_after_zoneout(cell: Any, carry_fns: Sequence[CarryFn], noise: Sequence[Noise]) -> Around:
    """The same with bounds on summed fields applied after zoneout's means of them.

    Args:
      cell: the cell.
      carry_fns, noise: as ``unroll`` has them.

    Raises:
      ValueError: if such a field does not grow by its increments, so that its mean within a
        period is not that of the sums.
    """
    names = [
        name
        for name in summed_fields(cell)
        if any(_is_mean_of(name, cell, *pair) for pair in zip(carry_fns, noise, strict=True))
        and _is_bounded(cell, name)
    ]
    if names:
        bounded, cell = cell, _without_bounds(cell)
        carry_fns = (*carry_fns, *(_Bounded(0.0, name, bounded) for name in names))
        noise = (*noise, *(None for _ in names))
    return cell, tuple(carry_fns), tuple(noise)


def copy_after_zoneout(
    copied: int | None,
    fields: int,
    name: str,
    carry_fns: Sequence[CarryFn],
    noise: Sequence[Noise],
) -> tuple[tuple[CarryFn, ...], tuple[Noise, ...]]:
    """The carry functions of a carry whose last field is the output, made to follow zoneout.

    Args:
      copied: the field that the output is a copy of, or None.
      fields: how many fields the carry has, the output included.
      name: of the cell.
      carry_fns, noise: as ``unroll`` has them.

    Raises:
      ValueError: if zoneout acts on a field that the output is made from, and not a copy of.
    """
    pairs: list[tuple[CarryFn, Noise]] = []
    for fn, noise_t in zip(carry_fns, noise, strict=True):
        pairs.append((fn, noise_t))
        if not isinstance(fn, Zoneout) or fn.field in (-1, fields - 1):
            continue
        if copied is None:
            raise ValueError(
                f"Zoneout on field {fn.field!r} of {name} would not reach its output, which is "
                f"made inside the cell: zone out the output, field {fields - 1}, or write a Cell."
            )
        if isinstance(fn.field, int) and fn.field % fields == copied:
            pairs.append((_Copied(0.0, copied), None))
    return tuple(fn for fn, _ in pairs), tuple(noise_t for _, noise_t in pairs)


def _is_mean_of(name: str, cell: Any, fn: CarryFn, noise: Noise) -> bool:
    if not isinstance(fn, Zoneout) or noise is not None:
        return False
    carry = jax.eval_shape(lambda: cell.initial(()))
    names = type(carry)(*carry._fields)
    return bool(get_field(names, fn.field) == name)


def _is_bounded(cell: Any, name: str) -> bool:
    """Whether zoneout's mean of a field has to be taken before its bound."""
    if cell.sums.bound is None or cell.sums.rule == "zero":  # no bound, or never leaves its start
        return False
    with jax.ensure_compile_time_eval():
        large = jnp.asarray(1e6)
        bounded = cell.sums.bound(name, large)
    if float(bounded) == float(large):
        return False
    if cell.sums.rule == "replace":
        raise ValueError(
            f"The mean of zoneout on {name!r}, which {type(cell).__name__} replaces at every step "
            "and keeps within a period, depends on how often it went around: use no period "
            "(wrap=None), or draw zoneout's masks."
        )
    return True


def _without_bounds(cell: Any) -> Any:
    """The cell without bounds on its summed fields."""
    fields = {field.name: getattr(cell, field.name) for field in dataclasses.fields(cell)}
    fields |= {"parent": None, "name": None}
    cls: Any = type(cell)
    return _unbounded(cls)(**fields)


@functools.cache
def _unbounded(cls: type) -> type:
    def sums(self: Any) -> Any:
        return dataclasses.replace(super(unbounded, self).sums, bound=None)

    # Of the same name: messages speak of the cell that the user knows.
    members = {"__annotations__": {}, "__module__": cls.__module__, "sums": property(sums)}
    unbounded: Any = type(cls.__name__, (cls,), members)
    return unbounded
