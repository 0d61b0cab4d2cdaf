"""What is told of seeds that diverge, and when that ends a run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from experiments.settings.config import Config
from experiments.settings.errors import DivergedError
from experiments.training.learner import Learner
from experiments.training.state import State


class Divergence:
    """Tells of each lane once.

    Args:
      config: of the run.
      learner: of that config.
      say: is told.
    """

    def __init__(self, config: Config, learner: Learner, say: Callable[[str], None]) -> None:
        self._learner, self._say = learner, say
        self._stops = config.training.on_divergence == "stop"
        self._names = [
            f"seed {seed}, learning rate {rate:g}" for seed, rate in config.training.lanes
        ]
        self._reported_lanes: set[int] = set()

    def forget(self, state: State) -> None:
        """Says nothing of what has diverged by now: the run before has told it."""
        self._reported_lanes = set(self._diverged(state))

    def look(self, state: State) -> None:
        """Tells of lanes that have diverged since the last look.

        Raises:
          DivergedError: of a lane with a fault, where the run is to stop then.
        """
        if self._stops:
            for lane, (step, leaf, _, total) in enumerate(self._faults(state)):
                if total:
                    raise DivergedError(
                        f"{self._names[lane]}: {self._learner.bad_leaf(leaf)} at step {step}; "
                        "--on_divergence=skip leaves such updates out, and mark goes "
                        "on with the other seeds."
                    )
        for lane, step in self._diverged(state).items():
            if lane not in self._reported_lanes:
                self._reported_lanes.add(lane)
                parameter = self._learner.bad_parameter(state, lane)
                detail = f"; the first parameter that is not finite is {parameter}"
                self._say(
                    f"warning: {self._names[lane]}: the loss diverged at step {step}"
                    f"{detail if parameter else ''}."
                )

    def tell_skipped(self, state: State) -> None:
        """Tells of the updates that were left out since the last evaluation."""
        for lane, (step, leaf, recent, _) in enumerate(self._faults(state)):
            if recent:
                self._say(
                    f"warning: {self._names[lane]}: {self._learner.bad_leaf(leaf)} "
                    f"at step {step}; updates left out since the last evaluation: {recent}."
                )

    def skipped(self, state: State) -> dict[str, list[int]]:
        """How many updates of each lane were left out, where that may be."""
        faults = self._faults(state)
        return {"skipped": [total for *_, total in faults]} if faults else {}

    def _diverged(self, state: State) -> dict[int, int]:
        """The step of each lane that has diverged."""
        steps = np.atleast_1d(self._learner.mesh.fetch(state.diverged_at)).tolist()
        return {lane: step for lane, step in enumerate(steps) if step >= 0}

    def _faults(self, state: State) -> list[tuple[int, int, int, int]]:
        """The numbers of each lane's ``Faults``; none where these are not looked for."""
        if state.faults is None:
            return []
        faults = self._learner.mesh.fetch(state.faults)
        return list(zip(*(np.atleast_1d(leaf).tolist() for leaf in faults), strict=True))
