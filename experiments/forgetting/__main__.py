"""Unlearn saturated forget gates while learning to add: ``python -m experiments.forgetting``.

Trains an LSTM, a U-LSTM, an R-LSTM and a UR-LSTM, then compares the timescales of their units.
Where forget gates start at 1, R and UR close the input gate, i = 1 - g, and the LSTM leaves it half
open: the U-LSTM, f at +6 and i at -6 without a refine gate, tells the two causes apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from experiments.command.main import experiment_main
from experiments.forgetting.settings import FORGETTING

if TYPE_CHECKING:
    from absl.flags import FlagValues

CELLS = ("lstm", "u_lstm", "r_lstm", "ur_lstm")  # UR E.1 but for u_lstm, the control: ours


def define(values: FlagValues) -> None:
    """Defines the flags that only this binary has."""
    from experiments.command import flags

    flags.one_process(values)
    cells = f"several with commas, instead of --cell; default: {','.join(CELLS)}"
    flags.add(values, "cells", cells, several=True)


def begin(flag_values: dict[str, Any]) -> None:
    """Trains each cell and compares them, or describes that.

    Raises:
      UserError: if a wish cannot be met.
    """
    from pathlib import Path

    from experiments.command import flags, runs
    from experiments.forgetting import study
    from experiments.settings.resolver import resolve

    request = flags.request(FORGETTING, flag_values)
    settings = request.settings
    flags.exclude(settings, "cell", "cells")
    cells = (settings.pop("cell"),) if "cell" in settings else settings.pop("cells", CELLS)
    flags.distinct("cells", cells)
    configs = {
        cell.replace(":", "."): resolve(FORGETTING, request.protocol, {**settings, "cell": cell})
        for cell in cells
    }
    study.check(configs)
    if request.describe:
        print(runs.describe(FORGETTING, configs))
        return
    if request.compile_for:
        print(runs.compiled(configs, request.compile_for))
        return
    default = runs.directory(FORGETTING.name, request.protocol, list(configs.values()))
    study.run(configs, Path(request.workdir or default), request.profile, request.storage)


if __name__ == "__main__":
    experiment_main(FORGETTING, define, begin)
