"""Learning to execute: its own settings and UR-gates' protocols."""

from __future__ import annotations

import dataclasses
from typing import Any

from experiments.settings.derived import Depends
from experiments.settings.fields import setting
from experiments.settings.resolver import Experiment
from experiments.settings.sources import LIBRARY_CELLS, Protocol, Sourced

_CLIMBING = ("combine", "naive")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecuteSettings:
    """What a program evaluates to, read character by character."""

    grammar: str = setting(
        "the programs: expressions (Santoro et al., 2018) or lines of Python (Zaremba and "
        "Sutskever, 2014)",
        Sourced("santoro", "UR D.4: its protocol is Santoro's"),
        choices=("santoro", "zaremba"),
    )
    category: str = setting(
        "their operations: addition (+), control (if, for) or program (+, -, *, if, for)",
        choices=("addition", "control", "program"),
        needs=("grammar", ("santoro",)),
    )
    length: int = setting("L, the most digits of a literal", least=1, most=50)
    nesting: int = setting("N, the most operations of a program", least=1, most=10)
    curriculum: str = setting(
        "length and nesting of a training program: uniform (mix), by a level that rises with the "
        "loss (naive), uniform up to it (combine), or the full ones (baseline)",
        choices=("mix", "combine", "naive", "baseline"),
    )
    level_steps: int = setting(
        "steps whose mean loss is one of the ten that decide whether a level is left",
        Sourced(100, "ours: the published code leaves it to its caller"),
        least=1,
        needs=("curriculum", _CLIMBING),
    )
    level_threshold: float = setting(
        "a level is left when the mean change of these losses, over their mean, is below it",
        Sourced(0.1, "Santoro et al.'s code"),
        needs=("curriculum", _CLIMBING),
    )
    program_steps: int = setting(
        "steps that there are for a program; 0: the characters of the longest one",
        Sourced(0, "ours: no step is spent on padding alone"),
        least=0,
    )
    inputs: str = setting("how a character becomes an input", choices=("embed", "one_hot"))
    held_out_programs: int = setting(
        "the size of each held-out set, of full length and nesting",
        Sourced(1000, "ours: three standard errors of an accuracy of 0.9 are 0.03"),
        least=1,
    )


_UR_CELLS = {
    **LIBRARY_CELLS,
    "*": {**LIBRARY_CELLS["*"], "downsize": Sourced(32, "UR D: C = 32 for program execution")},
}

_MIX = "UR D.4; ours: nestings up to --nesting, in the published code up to --length"

_PROTOCOLS = {
    "ur": Protocol(
        settings={
            "cell": Sourced("ur_lstm", "UR E.3"),
            "category": Sourced("program", "UR E.3: Addition, Control and Program"),
            "length": Sourced(9, "UR E.3"),
            "nesting": Sourced(4, "UR E.3"),
            "curriculum": Sourced("mix", _MIX),
            "inputs": Sourced("one_hot", "Santoro et al.'s code"),
            "hidden_size": Sourced(
                1024, "UR D.4: 1024 or 2048; of the RMC 2 or 4 slots (--memory_slots) of 512"
            ),
            "embedding": Sourced(0, "Santoro et al.'s code: one-hot"),
            "decoder": Sourced((256,) * 4, "Santoro et al.'s code"),
            "steps": Sourced(
                Depends("cell", {"*rmc": 200_000, "*": 500_000}), "UR D.4: of the RMC, of the LSTM"
            ),
            "batch_size": Sourced(128, "UR D.4"),
            "learning_rates": Sourced((5e-4, 1e-3), "UR D.4: the sweep"),
            "clip_norm": Sourced(0.0, "Santoro et al.'s code: none"),
            "eval_every": Sourced(5000, "ours: a hundred points of a curve"),
        },
        cells=_UR_CELLS,
    ),
    "small": Protocol(
        settings={
            "cell": Sourced("ur_lstm", "ours: UR's best LSTM on programs"),
            "category": Sourced("addition", "ours: what two cores learn in minutes"),
            "length": Sourced(2, "ours: as category"),
            "nesting": Sourced(2, "ours: as category"),
            "curriculum": Sourced("mix", _MIX),
            "inputs": Sourced("one_hot", "Santoro et al.'s code"),
            "hidden_size": Sourced(128, "ours: as category"),
            "embedding": Sourced(0, "Santoro et al.'s code: one-hot"),
            "decoder": Sourced((128,), "ours: as category"),
            "steps": Sourced(6000, "ours: as category"),
            "batch_size": Sourced(128, "UR D.4"),
            "learning_rates": Sourced((4e-3,), "ours: as category"),
            "clip_norm": Sourced(1.0, "ours: as category"),
            "eval_every": Sourced(500, "ours: as category"),
        },
        cells=LIBRARY_CELLS,
    ),
}


def _task() -> Any:
    from experiments.execute.task import ExecuteTask

    return ExecuteTask


EXECUTE = Experiment("execute", ExecuteSettings, _task, _PROTOCOLS)
