"""Environments as pure functions in gymnax's form: ``reset(key)``, ``step(key, state, action)``.

``build(settings)`` makes the one of a run's settings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from experiments.match.environments.base import Environment
from experiments.match.environments.count_recall import CountRecall
from experiments.match.environments.repeat_previous import RepeatPrevious
from experiments.match.environments.rooms import Match
from experiments.match.environments.t_maze import TMaze

if TYPE_CHECKING:
    from experiments.match.settings import MatchSettings


def build(settings: MatchSettings) -> Environment:
    """The environment of these settings."""
    if settings.challenge == "t_maze":
        return TMaze(settings.length, settings.walking)
    if settings.challenge == "repeat_previous":
        return RepeatPrevious(settings.decks, settings.lag)
    if settings.challenge == "count_recall":
        return CountRecall(settings.decks, settings.cards)
    return Match(
        active=settings.challenge == "active_match",
        rules=settings.rules,
        phases=(settings.explore_steps, settings.distractor_steps, settings.reward_steps),
        apples=settings.apples,
        apple_rewards=settings.apple_rewards,
        shuffled=settings.shuffled,
    )
