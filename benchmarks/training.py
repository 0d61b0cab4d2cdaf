"""What a comparison of training steps needs: a side, and that both sides' losses agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from benchmarks.work import MismatchError

_TOLERANCE = 1e-5  # of a loss, relative: sums of F terms in float32


class Trainer(NamedTuple):
    """A side: ``steps(n)`` trains n more steps and returns the loss of the last one."""

    steps: Callable[[int], float]
    facts: dict[str, Any]

    @classmethod
    def of(cls, learner: Any, state: Any) -> Trainer:
        """Our side, from a prepared ``Learner`` and its first state."""
        import jax

        step_number = 0

        def steps(count: int) -> float:
            nonlocal state, step_number
            zeros = jax.tree.map(np.zeros_like, (state.loss_total, state.loss_weight))
            state = state._replace(loss_total=zeros[0], loss_weight=zeros[1])
            state = learner.advance(state, step_number, step_number + count)
            step_number += count
            return float(state.loss_total / state.loss_weight)

        return cls(steps, {"devices": learner.mesh.size})


def check_losses(ours: Trainer, theirs: Trainer, count: int) -> list[tuple[float, float]]:
    """Trains both sides for so many steps, and returns their losses.

    Raises:
      MismatchError: if the losses of a step differ.
    """
    losses = [(ours.steps(1), theirs.steps(1)) for _ in range(count)]
    for step, (a, b) in enumerate(losses):
        if not abs(a - b) <= _TOLERANCE * abs(b):
            raise MismatchError(f"The losses of step {step} are {a} and {b}.")
    return losses


def copied(parameter: Any, array: np.ndarray) -> None:
    """Writes an array into a parameter of torch."""
    import torch

    with torch.no_grad():
        parameter.copy_(torch.from_numpy(np.array(array)))
