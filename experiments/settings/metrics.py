"""A score's name and meaning."""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    """A held-out score: its name, whether more is better, and what no learning at all scores."""

    name: str
    higher_is_better: bool
    baseline: float
    baseline_name: str
