"""Unlearn saturated forget gates while learning to add: ``python -m experiments.forgetting``.

Trains an LSTM, an R-LSTM and a UR-LSTM, then compares the timescales of their units.
"""

from __future__ import annotations

from typing import Any

from absl.flags import DEFINE_float, DEFINE_list

from experiments import flags

CELLS = ("lstm", "r_lstm", "ur_lstm")


def define(values: flags.FlagValues) -> None:
    """The flags that only this binary has."""
    cells = f"several with commas, instead of --cell; default: {','.join(CELLS)}"
    DEFINE_list("cells", None, cells, flag_values=values)
    bias = "where the bias of every forget gate starts"
    DEFINE_float("gate_bias", None, bias, flag_values=values)


def begin(task: str, given: dict[str, Any]) -> None:
    """Trains each cell and compares them, or describes that."""
    from pathlib import Path

    from experiments import protocols, studies, timescale_study

    wish = flags.read(given)
    settings = wish.settings
    one = settings.pop("cell", None)
    cells = settings.pop("cells", None) or ([one] if one else CELLS)
    runs = {
        cell: protocols.resolve(task, wish.protocol, {**settings, "cell": cell}) for cell in cells
    }
    if wish.describe:
        print(studies.describe(runs))
        return
    default = studies.directory(task, wish.protocol, list(runs.values()))
    timescale_study.run(runs, Path(wish.workdir or default))


if __name__ == "__main__":
    flags.main("forgetting", define, begin)
