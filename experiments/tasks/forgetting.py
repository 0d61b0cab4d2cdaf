"""Adding with forget gates that start saturated, so that units must learn to forget."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from experiments.config import UserError
from experiments.tasks.adding import AddingTask
from recurrent_gates import RNN, Cell, Gate


@dataclasses.dataclass(frozen=True)
class SaturatedGate(Gate):
    """A gate whose forget bias starts at ``forget_bias``, also where it would be drawn."""

    def init(self, key: jax.Array, features: int, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
        drawn = super().init(key, features, dtype)
        return {name: jnp.full_like(b, self.forget_bias) for name, b in drawn.items()}


def saturate(cell: Cell, bias: float) -> Cell:
    """The cell with forget gates that start at sigmoid(bias) and refine gates at 1/2.

    The effective gate g = refine(f, 1/2) = f then starts there too (UR-gates, E.1).

    Args:
      cell: an unbound cell with a plain or refined sigmoid gate.
      bias: of every forget gate.

    Raises:
      UserError: if the cell has no such gate.
    """
    gate = getattr(cell, "gate", None)
    if not isinstance(gate, Gate) or gate.activation != "sigmoid" or gate.master:
        raise UserError(
            "--cell must have a sigmoid forget gate without master gates, such as lstm, r_lstm "
            "or ur_lstm."
        )
    settings = dataclasses.asdict(gate) | {"forget_bias": bias, "refine_bias": "zero"}
    return cell.clone(gate=SaturatedGate(**settings))


@dataclasses.dataclass(frozen=True)
class ForgettingTask(AddingTask):
    """Adding from saturated gates (UR-gates, E.1).

    Attributes:
      gate_bias: where the bias of every forget gate starts.
    """

    gate_bias: float

    name = "forgetting"

    def check(self) -> None:
        super().check()
        if not math.isfinite(self.gate_bias):
            raise UserError(f"--gate_bias must be a finite number, got {self.gate_bias:g}.")

    def module(self, recurrent: nn.Module, embedding: int, decoder: tuple[int, ...]) -> nn.Module:
        assert isinstance(recurrent, RNN)
        saturated = recurrent.clone(cell=saturate(recurrent.cell, self.gate_bias))
        return super().module(saturated, embedding, decoder)
