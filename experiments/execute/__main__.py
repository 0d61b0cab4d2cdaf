"""Execute short programs, read character by character: ``python -m experiments.execute``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from experiments.command.main import experiment_main, train_one
from experiments.execute.settings import EXECUTE

if TYPE_CHECKING:
    from absl.flags import FlagValues


def define(values: FlagValues) -> None:
    """The flag of examples, beside those of the settings."""
    from experiments.command import flags

    meaning = "print so many held-out programs with the model's answers; TensorBoard has them too"
    flags.add(values, "show", meaning, int)


def begin(flag_values: dict[str, Any]) -> None:
    """Trains, and shows programs with the model's answers.

    Raises:
      UserError: if a wish cannot be met.
    """
    import functools

    from experiments.command import flags, runs
    from experiments.execute.show import Examples, Showing
    from experiments.records.reporting import say
    from experiments.settings import fields
    from experiments.settings.errors import UserError
    from experiments.settings.resolver import resolve

    count = flag_values.pop("show", 0)
    fields.check_all(Showing(show=count))
    request = flags.request(EXECUTE, flag_values)
    held_out = resolve(EXECUTE, request.protocol, request.settings).task.held_out_programs
    if count > held_out:
        raise UserError(f"--show={count} is more than --held_out_programs={held_out}.")
    examples = functools.cache(lambda learner: Examples(learner, count))

    def illustrate(learner: Any, params: Any) -> dict[str, str]:
        return {"programs": examples(learner).text(params)}

    workdir = train_one(EXECUTE, flag_values, illustrate if count else None)
    if workdir is None or not count:
        return
    finished = runs.finished(workdir, [EXECUTE])
    for lane, (seed, rate) in enumerate(finished.config.training.lanes):
        text = examples(finished.learner).text(finished.lane(finished.params, lane))
        say(f"--- programs and the model's answers (seed {seed}, rate {rate:g}) ---\n{text}")


if __name__ == "__main__":
    experiment_main(EXECUTE, define, begin)
