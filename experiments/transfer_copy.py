"""Copy after longer delays than in training: ``python -m experiments.transfer_copy``.

Trains with and without h-detach, or takes ``--copy_workdir=DIR[,DIR...]`` of finished runs of
``experiments.copy``, and evaluates at several delays (h-detach, 3.2).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from absl.flags import DEFINE_list

from experiments import flags

DETACH_PROBS = {"hdetach": (0.0, 0.25, 0.5), "small": (0.0, 0.25)}  # h-detach, Table 1


def define(values: flags.FlagValues) -> None:
    """The flags that only this binary has."""

    def several(name: str, text: str) -> None:
        DEFINE_list(name, None, text, flag_values=values)

    several("copy_workdir", "finished copy runs to evaluate, with commas; trains nothing")
    several("delays", "delays to evaluate; default: 2, 4, 5, 10, 20 and 50 times training's")
    several("detach_probs", "several with commas, instead of --detach_prob; each is a run")


def begin(task: str, given: dict[str, Any]) -> None:
    """Trains or finds the runs and evaluates them, or describes what would be trained."""
    from experiments import protocols, studies, transfer_study
    from experiments.config import UserError

    wish = flags.read(given)
    settings = wish.settings
    delays = _numbers("delays", settings.pop("delays", None), int)
    if delays and min(delays) < 1:
        raise UserError(f"--delays must be at least 1, got {min(delays)}.")
    workdirs = settings.pop("copy_workdir", None)
    probs = _numbers("detach_probs", settings.pop("detach_probs", None), float)
    if workdirs:
        if settings or probs or wish.describe:
            other = "describe" if wish.describe else next(iter(settings), "detach_probs")
            raise UserError(
                f"--{other.rstrip('_')} is for training: --copy_workdir trains nothing."
            )
        found = transfer_study.given_runs([Path(workdir) for workdir in workdirs])
        configs = [run.config for run in found.values()]
        default = studies.directory(task, "given", configs)
        transfer_study.run(found, delays, Path(wish.workdir or default))
        return
    if "detach_prob" in settings:
        probs = (settings.pop("detach_prob"),)
    probs = probs or DETACH_PROBS.get(wish.protocol, DETACH_PROBS["small"])
    runs = {
        f"detach-{p:g}": protocols.resolve(task, wish.protocol, {**settings, "detach_prob": p})
        for p in probs
    }
    if wish.describe:
        print(studies.describe(runs))
        return
    default = studies.directory(task, wish.protocol, list(runs.values()))
    directory = Path(wish.workdir or default)
    trained = studies.train_all(runs, directory)
    if trained is not None:
        transfer_study.run(trained, delays, directory)


def _numbers(flag: str, values: list[str] | None, kind: type) -> tuple[Any, ...]:
    from experiments.config import UserError

    try:
        return tuple(kind(value) for value in values or ())
    except ValueError:
        texts = ",".join(values or ())
        raise UserError(f"--{flag} is a list of numbers, got {texts!r}.") from None


if __name__ == "__main__":
    flags.main("transfer_copy", define, begin)
