"""One held-out sequence of a finished run: what was asked, what was answered, and of a cell with
addresses where it wrote and read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np

import recurrent_gates as rg
from experiments.command.runs import Finished
from experiments.figures.canvas import available, page
from experiments.records.reporting import say

_CANDIDATES = 64  # the longest of so many held-out sequences is drawn


def draw(finished: Finished, workdir: Path) -> None:
    """Draws ``figures/recall.png``, of the first lane that has not diverged.

    Raises:
      OSError: if it cannot be written.
    """
    lanes = finished.sound_lanes
    if not lanes or not available(say):
        return
    learner, config = finished.learner, finished.config
    learner.load()
    held_out = learner.data["sets"]["held_out"]
    due_steps = np.asarray(held_out.targets[:, :_CANDIDATES, -1])
    index = int(due_steps.sum(axis=0).argmax())
    inputs = held_out.inputs[:, index : index + 1]
    targets = np.asarray(held_out.targets[:, index])
    params = finished.lane(finished.params, lanes[0])
    logits = np.asarray(learner.apply(params, inputs))[:, 0]
    mask = targets[:, -1:] > 0
    panels = [
        ("input", np.asarray(inputs[:, 0])),
        ("answer", np.where(mask, targets[:, :-1], np.nan)),
        ("model", np.where(mask, 1 / (1 + np.exp(-logits)), np.nan)),
        *_addresses(learner, params, inputs),
    ]
    name = (
        f"recall  ·  {config.model.cell}  ·  protocol {config.protocol}  ·  one held-out sequence"
    )
    path = workdir / "figures" / "recall.png"
    heights = [max(rows.shape[1], 4) for _, rows in panels]
    with page(path, 7.0, 1.0 + 0.13 * sum(heights), name, of_a_run=True) as figure:
        axes = figure.subplots(len(panels), 1, sharex=True, height_ratios=heights)
        for ax, (label, rows) in zip(axes, panels, strict=True):
            image = ax.imshow(
                rows.T, aspect="auto", interpolation="nearest", cmap="Blues", vmin=0, vmax=1
            )
            ax.set_ylabel(label, rotation=0, ha="right", va="center")
            ax.set_yticks([])
            ax.set_facecolor("#eeeeee")  # where nothing is asked
        axes[-1].set_xlabel("step")
        axes[-1].xaxis.get_major_locator().set_params(integer=True)
        figure.colorbar(image, ax=axes, shrink=0.5, label="bit, probability, weight")


def _addresses(learner: Any, params: Any, inputs: jax.Array) -> list[tuple[str, np.ndarray]]:
    """Where a DNC wrote and read at each step, summed over its heads, ``[T, slots]``."""
    if not hasattr(learner._module.recurrent, "cell"):
        return []
    cell = learner.cell
    if not isinstance(cell, rg.DNC):
        return []
    cell_params = params["recurrent"]["cell"]
    encoded = learner.encoded(params, inputs)
    carries, _ = rg.unroll(cell, cell_params, encoded, return_carries="all")
    panels = [("written", carries.write_weights[:, 0].sum(axis=-2))]
    panels.append(("read", carries.read_weights[:, 0].sum(axis=-2)))
    panels.append(("in use", carries.usage[:, 0]))
    return [(label, np.minimum(np.asarray(rows), 1)) for label, rows in panels]
