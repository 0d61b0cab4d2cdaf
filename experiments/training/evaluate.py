"""Scores of parameters on a held-out set: windows in order, sums added, divided last."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from experiments.machine.mesh import WHOLE, DeviceMesh, Rows, check_axes, split
from experiments.settings.axes import DATA
from experiments.settings.config import Config
from experiments.training.lanes import Lanes
from experiments.training.models import fresh_carry
from experiments.training.task import HeldOut, Resident, Streamed, Task
from experiments.training.update import policy

Scores = dict[str, np.ndarray]
Pause = Callable[[], None]


class Evaluation:
    """The jitted scoring of one held-out set.

    Args:
      config: of the run.
      module: the model.
      mesh: the devices.
      lanes: the lanes of the parameters.
      params: how the parameters of all lanes are split.
      name: of the set.
      held_out: the set.
    """

    def __init__(
        self,
        config: Config,
        module: nn.Module,
        mesh: DeviceMesh,
        lanes: Lanes,
        params: Any,
        name: str,
        held_out: HeldOut,
    ) -> None:
        task: Task = config.task
        self._config, self._task, self._module = config, task, module
        self._mesh, self._lanes, self._name, self._set = mesh, lanes, name, held_out
        self._params = params
        even = held_out.rows % mesh.size == 0
        self._split = even and mesh.size > 1

        def specs(axes: Any) -> Any:
            return split(axes) if even else WHOLE

        stream, outputs = (
            lanes.specs(specs(axes)) for axes in (task.stream_axes, task.output_axes)
        )
        self._window_specs = specs(task.axes)
        self._start = jax.jit(mesh.everywhere(self._begin, (WHOLE,), stream))
        self._jits = {
            streamed: jax.jit(
                mesh.everywhere(
                    lanes.over(self._window, shared=2),
                    (params, stream, self._window_specs if streamed else WHOLE, WHOLE),
                    (lanes.specs(WHOLE), stream, outputs),
                )
            )
            for streamed in (False, True)
        }

    def scores(self, params: Any, data: Resident | Streamed, pause: Pause) -> Scores:
        """Each score of all lanes, float32 ``[]`` or ``[lanes]``.

        Args:
          params: of all lanes.
          data: placed on the devices, if they are resident.
          pause: called now and then; what it raises ends the evaluation.
        """
        resident = data.arrays if isinstance(data, Resident) else None
        stream = self._start(resident)
        sums: Any = None
        outputs = []
        for index in range(self._set.windows):
            pause()
            streamed = not isinstance(data, Resident)
            arrays = self._read(data, index) if not isinstance(data, Resident) else resident
            placed_index = self._mesh.place(np.int32(index))
            sums_of_window, stream, rows = jax.block_until_ready(
                self._jits[streamed](params, stream, arrays, placed_index)
            )
            sums_of_window = self._mesh.fetch(sums_of_window)
            sums = sums_of_window if sums is None else jax.tree.map(np.add, sums, sums_of_window)
            outputs.append(self._mesh.fetch(rows))
        lane_scores = [
            self._task.scores(
                self._lanes.of(sums, lane), [self._lanes.of(rows, lane) for rows in outputs]
            )
            for lane in range(len(self._lanes.each))
        ]
        columns = {
            name: np.array([scores[name] for scores in lane_scores], np.float32)
            for name in lane_scores[0]
        }
        if self._lanes.several:
            return columns
        return {name: column.reshape(()) for name, column in columns.items()}

    def _read(self, data: Streamed, index: int) -> Any:
        total = self._set.rows
        window = data.read_held_out(self._name, index, self._mesh.own(DATA, total))
        return self._mesh.place_own(window, self._window_specs, {DATA: total})

    def _rows(self) -> Rows:
        return self._mesh.rows(self._set.rows)

    def _check(self, kind: str, tree: Any, axes: Any) -> None:
        """Raises ``ValueError`` if a tree has not the rows of this device, while it is traced."""
        check_axes(f"the {kind} axes of {self._task.name}", tree, axes, self._rows().count)

    def _begin(self, data: Any) -> Any:
        fresh = functools.partial(fresh_carry, self._module.recurrent)
        stream = self._set.start(fresh, data, self._rows())
        self._check("stream", stream, self._task.stream_axes)
        return self._lanes.stack([stream] * self._lanes.share)

    def _window(
        self, params: Any, stream: Any, data: Any, index: jax.Array
    ) -> tuple[Mapping[str, Any], Any, Any]:
        """Sums over all devices, the stream and the rows' outputs, of one lane."""
        rows = self._rows()
        apply = policy(self._module, self._config, rows)

        def act(*args: Any, **kwargs: Any) -> Any:
            return apply(params, *args, **kwargs)

        window, stream = self._set.draw(act, data, stream, index, rows)
        outcome = self._task.loss(apply, params, window, stream, False)
        self._check("stream", outcome.stream, self._task.stream_axes)
        self._check("output", outcome.outputs, self._task.output_axes)
        sums = {
            name: (total, jnp.asarray(weight, jnp.float32))
            for name, (total, weight) in outcome.sums.items()
        }
        return self._mesh.sum(sums) if self._split else sums, outcome.stream, outcome.outputs
