"""Predict the next word or character of a text: ``python -m experiments.language_model``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from experiments.command.main import experiment_main, train_one
from experiments.language_model.settings import LANGUAGE_MODEL, Sampling
from experiments.settings import fields

if TYPE_CHECKING:
    from absl.flags import FlagValues


def define(values: FlagValues) -> None:
    """The flags of samples, beside those of the settings."""
    from experiments.command import flags

    for one in fields.declared(Sampling).values():
        assert one.default is not None
        flags.add(values, one.flag, f"{one.meaning}; default: {one.default.value:g}", one.kind)


def begin(flag_values: dict[str, Any]) -> None:
    """Trains, and writes text.

    Raises:
      UserError: if a wish cannot be met.
    """
    from experiments.command import runs
    from experiments.language_model.sample import sample
    from experiments.records.reporting import say

    declarations = fields.declared(Sampling)
    named = {name: flag_values.pop(name) for name in declarations if name in flag_values}
    values = {name: entry.value for name, entry in fields.defaults(Sampling)} | named
    sampling = Sampling(**values)
    fields.check_all(sampling)
    fields.check_effect(named, values, declarations)

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
