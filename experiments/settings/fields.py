"""How a setting is declared: once, at its field, with meaning, range, default and source.

Flags, checks, ``--help`` and ``--describe`` are made from the declaration::

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class TrainingSettings:
        clip_norm: float = setting("largest global norm of the gradient; 0: no clipping", least=0)
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.settings.errors import UserError

TINY, HUGE = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # float32's smallest normal and largest number
_INTEGERS = 2**31
_TYPES: Mapping[type, Any] = {int: numbers.Integral, float: numbers.Real, bool: bool, str: str}
_NOUNS = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a text"}


class Sourced(NamedTuple):
    """A setting's value and where it comes from."""

    value: Any
    source: str


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is declared about a setting.

    Attributes:
      name: of the field; its flag is the same without an underscore at the end.
      kind: ``int``, ``float``, ``bool`` or ``str``; of the entries, if there are several.
      several: whether the value is a tuple.
      optional: whether it may be None: the cell or the task has no such setting.
      meaning: help text.
      default: the value where a protocol says nothing, and its source; None: protocols say it.
      least, most: the smallest and the largest allowed number.
      below: a number that is too large already.
      choices: the allowed strings; none: any.
      needs: ``(setting, values)``: it acts only where that setting has one of the values, or,
        without values, where it is neither zero nor None.
      singular: the name of a flag for a tuple of one entry.
    """

    name: str
    kind: type
    several: bool
    optional: bool
    meaning: str
    default: Sourced | None
    least: float | None
    most: float | None
    below: float | None
    choices: tuple[str, ...]
    needs: tuple[str, Sequence[Any]] | None
    singular: str | None

    @property
    def flag(self) -> str:
        """The name of its flag, without dashes."""
        return self.name.rstrip("_")

    @property
    def usual(self) -> str:
        """The allowed values in words, without the bound of every whole number."""
        unbounded = self.kind is int and self.below == _INTEGERS
        return dataclasses.replace(self, below=None).allowed if unbounded else self.allowed

    @property
    def allowed(self) -> str:
        """The allowed values in words."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if (self.least, self.most) == (0, 1):
            return "a probability in [0, 1]"
        if (self.least, self.below) == (0, 1):
            return "at least 0 and below 1"
        if (self.least, self.below) == (TINY, 1):
            return "above 0 and below 1"
        if self.least == TINY:
            return "a positive number"
        bounds = [f"at least {self.least:g}"] if self.least is not None else []
        bounds += [f"at most {self.most:g}"] if self.most is not None else []
        bounds += [f"below {self.below:.0f}"] if self.below is not None else []
        return " and ".join(bounds) or _NOUNS[self.kind]

    def check(self, value: Any) -> None:
        """Raises ``UserError`` on a value that is not allowed."""
        if value is None and self.optional:
            return
        if self.several and (isinstance(value, str) or not isinstance(value, Sequence)):
            raise UserError(f"--{self.flag} takes several values, such as ({value!r},).")
        entries = value if self.several else (value,)
        if self.several and len(set(entries)) < len(entries) and self.singular:
            raise UserError(f"--{self.flag} must name each value once.")
        if self.singular and not entries:
            raise UserError(f"--{self.flag} must name at least one value.")
        for entry in entries:
            self._check_entry(entry)

    def _check_entry(self, value: Any) -> None:
        if self.choices:
            if value not in self.choices:
                raise UserError(f"--{self.flag} is {self.allowed}, got {value}.")
            return
        if not isinstance(value, _TYPES[self.kind]) or isinstance(value, bool) != (
            self.kind is bool
        ):
            raise UserError(f"--{self.flag} must be {_NOUNS[self.kind]}, got {value!r}.")
        if self.kind not in (int, float):
            return
        if self.kind is float and not math.isfinite(value):
            raise UserError(f"--{self.flag} must be a finite number, got {value:g}.")
        in_range = (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )
        if not in_range:
            verb = "is" if self.allowed.startswith("a probability") else "must be"
            raise UserError(f"--{self.flag} {verb} {self.allowed}, got {shown_value(value)}.")
        if self.kind is float and value and not TINY <= abs(value) <= HUGE:
            raise UserError(
                f"--{self.flag}={value:g} is outside of what float32 holds "
                f"({TINY:.2g} to {HUGE:.2g})."
            )


def shown_value(value: Any) -> str:
    """A setting's value as one writes it on the command line."""
    if isinstance(value, tuple):
        return ",".join(map(shown_value, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def setting(
    meaning: str,
    default: Sourced | None = None,
    *,
    least: float | None = None,
    most: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] = (),
    needs: str | tuple[str, Sequence[Any]] | None = None,
    singular: str | None = None,
) -> Any:
    """A dataclass field that declares a setting; for the arguments see ``Setting``."""
    declaration = {
        "meaning": meaning,
        "default": default,
        "least": least,
        "most": most,
        "below": below,
        "choices": choices,
        "needs": (needs, ()) if isinstance(needs, str) else needs,
        "singular": singular,
    }
    return dataclasses.field(metadata={"setting": declaration})


@functools.cache
def declared(cls: Any) -> Mapping[str, Setting]:
    """The settings of a dataclass by name, in order."""
    hints = typing.get_type_hints(cls)
    settings = {
        field.name: _declared(field, hints[field.name])
        for field in dataclasses.fields(cls)
        if "setting" in field.metadata
    }
    return types.MappingProxyType(settings)


def _declared(field: dataclasses.Field[Any], hint: Any) -> Setting:
    optional = several = False
    if isinstance(hint, types.UnionType):
        (hint,) = (kind for kind in typing.get_args(hint) if kind is not type(None))
        optional = True
    if typing.get_origin(hint) is tuple:
        hint, several = typing.get_args(hint)[0], True
    options = dict(field.metadata["setting"])
    if hint is int and options["below"] is None and options["most"] is None:
        options["below"] = _INTEGERS
    return Setting(field.name, hint, several, optional, **options)


def check_all(settings: Any) -> None:
    """Raises ``UserError`` on the first setting of a dataclass that is not allowed."""
    cls: Any = type(settings)
    for name, declaration in declared(cls).items():
        declaration.check(getattr(settings, name))


def defaults(*classes: Any) -> Iterator[tuple[str, Sourced]]:
    """The settings of dataclasses that have a default, with it."""
    for cls in classes:
        for name, declaration in declared(cls).items():
            if declaration.default is not None:
                yield name, declaration.default


def check_effect(
    overrides: Mapping[str, Any],
    values: Mapping[str, Any],
    declarations: Mapping[str, Setting],
    starts: Mapping[str, Sourced],
) -> None:
    """Raises ``UserError`` on a setting that was given and has no effect beside the others.

    Args:
      overrides: the settings that the user named.
      values: all settings in effect.
      declarations: of all settings, by name.
      starts: the values that settings have unless they are given.
    """
    for name in overrides:
        if name not in declarations or (needs := declarations[name].needs) is None:
            continue
        value, start = overrides[name], starts.get(name)
        turns_off = not value and not (start and start.value)
        if turns_off or value is None or value is False:  # what has no effect may be turned off
            continue
        needed_name, allowed = needs
        value = values.get(needed_name)
        if value in allowed if allowed else value:
            continue
        state = (
            f"--{needed_name.rstrip('_')}={shown_value(value)}"
            if needed_name in values
            else f"no --{needed_name}"
        )
        condition = f"={' or '.join(map(str, allowed))}" if allowed else ""
        if isinstance(allowed, range):
            condition = f" of at least {allowed.start}"
        raise UserError(
            f"--{declarations[name].flag} has no effect with {state}: it needs "
            f"--{needed_name.rstrip('_')}{condition}."
        )
