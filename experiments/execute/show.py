"""Programs with the answers that a model gives."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from experiments.execute.grammars import Program
from experiments.execute.programs import Programs, at_level
from experiments.settings.fields import Sourced, setting
from experiments.training.learner import Learner


@dataclasses.dataclass(frozen=True, kw_only=True)
class Showing:
    """What is shown."""

    show: int = setting(
        "print so many held-out programs and the model's answers after training, and write them "
        "to TensorBoard at every evaluation",
        Sourced(0, "ours: none"),
        least=0,
        most=256,
    )


class Examples:
    """The first programs of the set that is watched, and the compiled model that answers them.

    Args:
      learner: of an ``ExecuteTask``.
      count: how many programs, at most 256.
    """

    def __init__(self, learner: Learner, count: int) -> None:
        task: Any = learner.task
        watched = learner.watched
        source = task.source
        (level,) = source.levels(watched)
        self._programs = [source.program(watched, 0, number, level) for number in range(count)]
        self._grammar = source.grammar
        full_window = Programs(source, task.room, count).read_held_out(watched, 0, np.arange(count))
        window = at_level(full_window, 0)

        def answers(params: Any) -> jax.Array:
            return task.told(learner.apply, params, window)

        self._answers = jax.jit(answers)

    def text(self, params: Any) -> str:
        """Each program with its answer and the model's.

        Args:
          params: of one lane.
        """
        answers = np.asarray(self._answers(params)).T
        pairs = zip(self._programs, answers, strict=True)
        return "\n".join(self._example(program, numbers) for program, numbers in pairs)

    def _example(self, program: Program, numbers: np.ndarray) -> str:
        characters = "_" + self._grammar.characters  # a blank is never right
        answer = "".join(characters[number] for number in numbers)
        if self._grammar.forced:  # the model says where its answer ends
            answer = answer[: answer.find(".") + 1] or answer
        else:
            answer = answer[: len(program.answer)]
        lines = program.text.replace("#", "\n").removesuffix("@")
        verdict = "right" if answer == program.answer else f"wrong, {program.answer}"
        return f"{lines}\n    {answer}  {verdict}"
