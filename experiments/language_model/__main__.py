"""Predict the next word or character of a text: ``python -m experiments.language_model``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from experiments.command.main import experiment_main, train_one
from experiments.language_model.settings import LANGUAGE_MODEL, Sampling
from experiments.settings import fields
from experiments.settings.errors import UserError

if TYPE_CHECKING:
    from absl.flags import FlagValues


def define(values: FlagValues) -> None:
    """The flags of samples, beside those of the settings."""
    from experiments.command import flags

    for setting in fields.declared(Sampling).values():
        assert setting.default is not None
        flags.add(
            values,
            setting.flag,
            f"{setting.meaning}; default: {setting.default.value:g}",
            setting.kind,
        )


def begin(flag_values: dict[str, Any]) -> None:
    """Trains, and writes text.

    Raises:
      UserError: if a wish cannot be met.
    """
    from experiments.command import runs
    from experiments.language_model.sample import sample
    from experiments.records.reporting import say

    declarations = fields.declared(Sampling)
    explicit_values = {name: flag_values.pop(name) for name in declarations if name in flag_values}
    starts = dict(fields.defaults(Sampling))
    values = {name: entry.value for name, entry in starts.items()} | explicit_values
    sampling = Sampling(**values)
    fields.check_all(sampling)
    fields.check_effect(explicit_values, values, declarations, starts)
    if explicit_values.get("top_k") and not sampling.temperature:
        raise UserError("--top_k has no effect with --temperature=0, which takes the likeliest.")

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
