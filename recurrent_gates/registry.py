"""``CELLS``: names to cells, every gate on every family that has one."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable
from typing import Any

from recurrent_gates.base import Cell
from recurrent_gates.cells import GRU, JANET, LSTM, Elman, Exploding
from recurrent_gates.gates import GATES, Gate
from recurrent_gates.gato import GATO, GatedDecay, GATOMap, OneLayer, TwoLayer
from recurrent_gates.gru_d import GRUD
from recurrent_gates.linear import LRU, RGLRU, MinGRU, MinLSTM
from recurrent_gates.memory import DNC, RMA, RMC
from recurrent_gates.slstm import SLSTM


class UnknownCellError(KeyError):
    """A name that is not in ``CELLS``; its text is one sentence that names the nearest."""

    def __str__(self) -> str:
        return str(self.args[0])


class _Registry(dict[str, Callable[..., Cell]]):
    def __missing__(self, name: str) -> Callable[..., Cell]:
        matches = difflib.get_close_matches(str(name).lower(), self, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(matches)}?" if matches else f"known: {', '.join(self)}."
        raise UnknownCellError(f"There is no cell named {name!r}; {hint}")


_GATE_FIELDS = ("forget_bias", "downsize", "tmax", "bias_mode", "refine_bias")


def _changed(gate: Gate, changes: dict[str, Any]) -> Gate:
    """A gate with other fields."""
    gate = dataclasses.replace(gate, **changes)
    if "forget_bias" in changes:  # even 1, the default, is none of a gate's that starts elsewhere
        gate._refuse(["forget_bias"])
    return gate


def _gated(cell: Callable[..., Cell], gate: Gate, /, features: int, **fields: Any) -> Cell:
    changes = {name: fields.pop(name) for name in _GATE_FIELDS if name in fields}
    if changes and "gate" in fields:
        raise ValueError(f"Give a gate or its {', '.join(changes)}, not both.")
    gate = _changed(gate, changes)
    if "forget_bias" in changes and fields.get("forget_gate") is False:
        raise ValueError("forget_bias has no effect: forget_gate=False leaves no forget gate.")
    return cell(features, **{"gate": gate, **fields})


def _gato(
    g: Callable[..., GATOMap],
    gate: Gate | None,
    /,
    features: int,
    *,
    rate: float | None = None,
    **fields: Any,
) -> GATO:
    if "hidden" in fields and "g" in fields:
        raise ValueError("Give g or its hidden, not both.")
    if "f" in fields and (gate is not None or rate is not None):
        raise ValueError(
            f"Give f or its {'gate' if rate is None else 'rate'}, not both: f=rg.GatedDecay(rate, "
            "gate) of gato has each."
        )
    if "hidden" in fields:
        g = functools.partial(g, hidden=fields.pop("hidden"))
    if gate is not None:
        gate = _changed(gate, {name: fields.pop(name) for name in _GATE_FIELDS if name in fields})
    decay = GatedDecay(gate=gate) if rate is None else GatedDecay(rate, gate)
    return GATO(features, **{"f": decay, "g": g(), **fields})


def _registry() -> _Registry:
    reset_before_gru = functools.partial(GRU, reset="before")
    cells: dict[str, Callable[..., Cell]] = {
        "lstm": functools.partial(_gated, LSTM, GATES["standard"]),
        "gru": functools.partial(_gated, GRU, GRU.gate),
        "gru_d": GRUD,
        "janet": functools.partial(_gated, JANET, GATES["standard"].tie()),
        "rnn": Elman,
        "exploding": Exploding,
        "gato": functools.partial(_gato, TwoLayer, None),
        "gato1": functools.partial(_gato, OneLayer, None),
        "gato2": functools.partial(_gato, TwoLayer, None),
        "ur_gato": functools.partial(_gato, TwoLayer, GATES["ur"]),
        "or_gato": functools.partial(_gato, TwoLayer, GATES["or"]),
        "on_lstm": functools.partial(_gated, LSTM, GATES["om"]),
        "mingru": functools.partial(_gated, MinGRU, MinGRU.gate),
        "minlstm": functools.partial(_gated, MinLSTM, MinLSTM.gate),
        "rg_lru": functools.partial(_gated, RGLRU, RGLRU.gate),
        "lru": LRU,
        "slstm": SLSTM,
    }
    memories: dict[str, Callable[..., Cell]] = {"rmc": RMC, "dnc": DNC, "rma": RMA}
    for family, cell in memories.items():
        cells[family] = functools.partial(_gated, cell, GATES["standard"])
    gated: dict[str, Callable[..., Cell]] = {
        "lstm": LSTM,
        "gru": reset_before_gru,
        "janet": JANET,
        "mingru": MinGRU,
        "minlstm": MinLSTM,
        "rg_lru": RGLRU,
        **memories,
    }
    for family, cell in gated.items():
        for name, gate in GATES.items():
            if name != "standard":
                cells[f"{name}_{family}"] = functools.partial(_gated, cell, gate)
    return _Registry(cells)


CELLS = _registry()
"""Name -> factory ``(features, **fields) -> Cell``.

``lstm gru gru_d janet rnn exploding gato gato1 gato2 ur_gato or_gato on_lstm mingru minlstm rg_lru
lru slstm rmc dnc rma`` and ``{c,u,o,r,ur,cr,or,om,um,cm}_`` times ``{lstm,gru,janet,mingru,minlstm,
rg_lru,rmc,dnc,rma}``; every ``X_gru``, but not ``gru``, resets before the product, as the later
code of UR-gates' authors does: the paper prints no GRU equations. ``gato`` is ``gato2``.
Gated factories also take the gate's ``forget_bias downsize tmax bias_mode refine_bias``;
GATO's take ``rate`` (lambda) and, with two layers, ``hidden`` (k).
"""
