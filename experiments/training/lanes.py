"""Lanes: every seed with every learning rate, trained as one program.

Several lanes are one ``vmap``; on a CPU, which one lane keeps busy, a loop: it takes less
memory, and a conditional stays one. A single lane has neither, and no axis of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from experiments.settings.axes import LANES
from experiments.training.state import Lane

_LANE_AFTER_LANE = ("cpu",)


class Lanes:
    """The lanes of a run.

    Args:
      seeds_and_rates: one pair for each lane.
      platform: of the devices.
      parts: how many devices share the lanes.

    Attributes:
      several: whether there is more than one.
      each: every one of them.
      share: how many each device has.
    """

    def __init__(
        self, seeds_and_rates: list[tuple[int, float]], platform: str, parts: int = 1
    ) -> None:
        self.several = len(seeds_and_rates) > 1
        self.each = [Lane(jnp.int32(seed), jnp.float32(rate)) for seed, rate in seeds_and_rates]
        self.share = len(self.each) // parts
        self._in_turn = platform in _LANE_AFTER_LANE

    @property
    def together(self) -> Lane:
        """All lanes, as the mapped functions take them."""
        return self.stack(list(self.each))

    def stack(self, trees: list[Any]) -> Any:
        """One tree for each lane -> one with an axis of lanes, if there are several."""
        if not self.several:
            return trees[0]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)

    def of(self, tree: Any, lane: int) -> Any:
        """A lane's part of a tree of all."""
        return jax.tree.map(lambda leaf: leaf[lane], tree) if self.several else tree

    def specs(self, specs: Any) -> Any:
        """How a tree of all lanes is split, from how one lane's is."""
        if not self.several:
            return specs
        return jax.tree.map(lambda spec: PartitionSpec(LANES, *spec), specs)

    def over(self, function: Callable[..., Any], shared: int = 0) -> Callable[..., Any]:
        """The function of all lanes; the last ``shared`` arguments are the same for each."""
        if not self.several:
            return function

        def mapped(*arguments: Any) -> Any:
            count = len(arguments) - shared
            lane_arguments, common = arguments[:count], arguments[count:]

            def one_lane(lane_arguments: tuple[Any, ...]) -> Any:
                return function(*lane_arguments, *common)

            return (
                jax.lax.map(one_lane, lane_arguments)
                if self._in_turn
                else jax.vmap(one_lane)(lane_arguments)
            )

        return mapped
