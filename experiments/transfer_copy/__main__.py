"""Copy after longer delays than in training: ``python -m experiments.transfer_copy``.

Trains with and without h-detach, or takes ``--copy_workdir=DIR[,DIR...]`` of finished runs of
``experiments.copy``, and evaluates at several delays (h-detach, 3.2).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.command.main import experiment_main
from experiments.settings.errors import UserError
from experiments.transfer_copy.settings import TRANSFER_COPY

if TYPE_CHECKING:
    from absl.flags import FlagValues

DETACH_PROBS = {"hdetach": (0.0, 0.25, 0.5), "small": (0.0, 0.25)}  # h-detach, Table 1
_OF_EVALUATION = ("copy_workdir", "delays", "workdir")


def define(values: FlagValues) -> None:
    """Defines the flags that only this binary has."""
    from experiments.command import flags

    flags.one_process(values)

    def add(name: str, meaning: str, kind: type = str) -> None:
        flags.add(values, name, meaning, kind, several=True)

    add("copy_workdir", "finished copy runs to evaluate, with commas; trains nothing")
    add("delays", "delays to evaluate; default: 2, 4, 5, 10, 20 and 50 times training's", int)
    add("detach_probs", "several with commas, instead of --detach_prob; each is a run", float)


def begin(flag_values: dict[str, Any]) -> None:
    """Trains or reads the runs and evaluates them, or describes what would be trained.

    Raises:
      UserError: if a wish cannot be met.
    """
    from experiments.command import flags

    if "delays" in flag_values:
        flags.distinct("delays", flag_values["delays"])
    if "copy_workdir" in flag_values:
        _evaluate(flag_values)
    else:
        _train(flag_values)


def _evaluate(flag_values: dict[str, Any]) -> None:
    from experiments.command import flags, runs
    from experiments.transfer_copy import study

    for name in flag_values:
        if name not in _OF_EVALUATION:
            raise UserError(f"--{name} is for training: --copy_workdir trains nothing.")
    workdirs = [Path(workdir) for workdir in flag_values["copy_workdir"]]
    flags.distinct("copy_workdir", [workdir.resolve() for workdir in workdirs])
    delays = flag_values.get("delays", ())
    finished = study.finished_runs(workdirs)
    configs = [run.config for run in finished.values()]
    study.check(configs, delays)
    study.check_memory(configs, delays)
    default = runs.directory(TRANSFER_COPY.name, "finished", configs)
    study.evaluate(finished, delays, Path(flag_values.get("workdir", default)))


def _train(flag_values: dict[str, Any]) -> None:
    from experiments.command import flags, runs
    from experiments.settings.resolver import resolve
    from experiments.transfer_copy import study

    request = flags.request(TRANSFER_COPY, flag_values)
    settings = request.settings
    delays = settings.pop("delays", ())
    flags.exclude(settings, "detach_prob", "detach_probs")
    probs = settings.pop("detach_probs", DETACH_PROBS[request.protocol])
    if "detach_prob" in settings:
        probs = (settings["detach_prob"],)
    flags.distinct("detach_probs", probs)
    configs = {
        f"detach-{repr(prob).removesuffix('.0')}": resolve(
            TRANSFER_COPY, request.protocol, _settings(settings, prob, probs)
        )
        for prob in probs
    }
    study.check(list(configs.values()), delays)
    if request.describe:
        print(runs.describe(TRANSFER_COPY, configs))
        return
    if request.compile_for:
        print(runs.compiled(configs, request.compile_for))
        return
    study.check_memory(list(configs.values()), delays)
    default = runs.directory(TRANSFER_COPY.name, request.protocol, list(configs.values()))
    directory = Path(request.workdir or default)
    study.run(configs, delays, directory, request.profile, request.storage)


def _settings(settings: dict[str, Any], prob: float, probs: tuple[float, ...]) -> dict[str, Any]:
    """Those of the run with one of the probabilities of detaching: a run that does not detach
    does without those that say how the others do."""
    excluded_names: tuple[str, ...] = ()
    if not prob and any(probs):
        excluded_names = ("detach_per_example", "detach_off_steps")
        excluded_names += () if settings.get("damp_prob") else ("detach_state",)
    own_settings = {name: value for name, value in settings.items() if name not in excluded_names}
    return {**own_settings, "detach_prob": prob}


if __name__ == "__main__":
    experiment_main(TRANSFER_COPY, define, begin)
