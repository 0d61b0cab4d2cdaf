"""Adding with forget gates that start saturated, so that units must learn to forget."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from experiments.adding.task import AddingTask
from experiments.forgetting.settings import ForgettingSettings
from experiments.settings.errors import UserError
from experiments.settings.model import ModelSettings
from recurrent_gates import RGLRU, RNN, Cell, Gate, MinLSTM, Stack


@dataclasses.dataclass(frozen=True)
class SaturatedGate(Gate):
    """A gate whose forget bias starts at ``forget_bias``, also where it would be drawn.

    So no unit's timescale is drawn: a UR gate is R with a second trainable bias beside the linear
    one, and U a plain gate with one that opens f and closes i.
    """

    def init(self, key: jax.Array, features: int, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
        biases = super().init(key, features, dtype)
        return {name: jnp.full_like(b, self.forget_bias) for name, b in biases.items()}


def saturate(cell: Cell, bias: float) -> Cell:
    """The cell with forget gates that start at sigmoid(bias) and refine gates at 1/2.

    The effective gate g = refine(f, 1/2) = f then starts there too (UR-gates, E.1).

    Args:
      cell: an unbound cell with a plain or refined sigmoid gate.
      bias: of every forget gate.

    Raises:
      UserError: if the cell has no such gate, or makes its decay of the gate in another way.
    """
    gate = getattr(cell, "gate", None)
    if not isinstance(gate, Gate) or gate.activation != "sigmoid" or gate.master:
        raise UserError(
            "--cell must have a sigmoid forget gate without master gates, such as lstm, r_lstm "
            "or ur_lstm."
        )
    # minLSTM divides f by f + i, which is 1 for a tied gate and where the bias of f closes i.
    divides = isinstance(cell, MinLSTM) and not gate.tied and gate.bias == "constant"
    if divides or isinstance(cell, RGLRU):
        raise UserError(
            "--cell: the decay of an rg_lru, or of a minlstm with a standard gate, does not start "
            "at --gate_bias; take u_minlstm, r_minlstm or mingru."
        )
    settings = dataclasses.asdict(gate) | {"forget_bias": bias, "refine_bias": "zero"}
    return cell.clone(gate=SaturatedGate(**settings))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForgettingTask(ForgettingSettings, AddingTask):
    """Adding from saturated gates (UR-gates, E.1)."""

    name = "forgetting"

    def module(self, recurrent: RNN | Stack, model: ModelSettings) -> nn.Module:
        if isinstance(recurrent, RNN):
            recurrent = recurrent.clone(cell=saturate(recurrent.cell, self.gate_bias))
        else:
            cells = [saturate(cell, self.gate_bias) for cell in recurrent.cells]
            recurrent = recurrent.clone(cells=cells)
        return super().module(recurrent, model)
