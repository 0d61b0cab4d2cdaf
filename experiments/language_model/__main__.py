"""Predict the next word or character of a text: ``python -m experiments.language_model``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from experiments.command.main import experiment_main, train_one
from experiments.language_model.settings import LANGUAGE_MODEL

if TYPE_CHECKING:
    from absl.flags import FlagValues

_FLAGS = {"sample": int, "temperature": float, "top_k": int}


def define(values: FlagValues) -> None:
    """The flags of samples, beside those of the settings."""
    from experiments.command import flags

    flags.add(values, "sample", "write so many tokens of text, and at every evaluation", int)
    flags.add(values, "temperature", "of the samples; 0: the likeliest token; default: 1", float)
    flags.add(values, "top_k", "draw from so many of the likeliest tokens; default: all", int)


def begin(flag_values: dict[str, Any]) -> None:
    """Trains, and writes text.

    Raises:
      UserError: if a wish cannot be met.
    """
    from experiments.command import runs
    from experiments.language_model.sample import Sampling, sample
    from experiments.records.reporting import say
    from experiments.settings import fields

    named = {name: flag_values.pop(name) for name in _FLAGS if name in flag_values}
    known = fields.declared(Sampling)
    values = {name: entry.value for name, entry in fields.defaults(Sampling)} | named
    sampling = Sampling(**values)
    fields.check_all(sampling)
    fields.check_effect(named, values, known)

    def illustrate(learner: Any, params: Any) -> dict[str, str]:
        return {"sample": sample(learner, params, sampling)}

    workdir = train_one(LANGUAGE_MODEL, flag_values, illustrate if sampling.sample else None)
    if workdir is None or not sampling.sample:
        return
    finished = runs.finished(workdir, [LANGUAGE_MODEL])
    for lane, (seed, rate) in enumerate(finished.config.training.lanes):
        text = sample(finished.learner, finished.lane(finished.params, lane), sampling)
        say(f"--- a sample (seed {seed}, learning rate {rate:g}) ---\n{text}")


if __name__ == "__main__":
    experiment_main(LANGUAGE_MODEL, define, begin)
