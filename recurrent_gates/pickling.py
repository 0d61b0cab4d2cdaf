"""Modules by their settings: what a pickle of one holds.

Flax's default initializers are closures, which no pickle takes; a setting that is the default is
left out, and found again in the class.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from flax import linen as nn


@dataclasses.dataclass(frozen=True)
class _Settings:
    """A module that is a setting of another."""

    cls: type
    values: dict[str, Any]


def reduced(module: nn.Module) -> tuple[Any, ...]:
    """What ``__reduce__`` returns: a function and its arguments, which make an unbound module."""
    settings = _settings(module)
    return _built, (settings,)


def _settings(module: nn.Module) -> _Settings:
    values = {}
    for field in dataclasses.fields(module):
        value = getattr(module, field.name)
        if field.name == "parent" or not field.init or value is field.default:
            continue
        values[field.name] = _settings(value) if isinstance(value, nn.Module) else value
    return _Settings(type(module), values)


def _built(settings: _Settings) -> Any:
    values = {
        name: _built(value) if isinstance(value, _Settings) else value
        for name, value in settings.values.items()
    }
    return settings.cls(**values, parent=None)
