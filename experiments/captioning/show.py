"""Test pictures with their true captions and the model's, and where it looked, word by word.

Letters: N pictures, S pixels of a side, T words, L regions.
"""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.captioning.pictures import PictureFiles, Window
from experiments.captioning.task import CaptioningTask
from experiments.command.runs import Finished
from experiments.figures.canvas import available, page
from experiments.records.reporting import say

_ACROSS = 3  # pictures beside each other
_LINE = 44  # letters of a line of a caption
_RIGHT, _OTHER = "#2e933c", "#d1495b"


class Shown(NamedTuple):
    """Pictures to be drawn.

    Attributes:
      pixels: uint8 ``[N, S, S, 3]``.
      said: the model's captions.
      truth: true ones of each picture.
      weights: where it looked ``[N, T, L]``; None: it does not look at regions.
    """

    pixels: np.ndarray
    said: list[str]
    truth: list[list[str]]
    weights: np.ndarray | None


def draw(finished: Finished, workdir: Path, count: int) -> None:
    """Draws ``figures/captions.png``, and where the model looked ``figures/attention.png``, of
    the first lane that has not diverged.

    Raises:
      OSError: if they cannot be written.
    """
    lanes = [lane for lane, diverged in enumerate(finished.diverged) if not diverged]
    if not available(say) or not lanes:
        return
    shown = _shown(finished, finished.lane(finished.params, lanes[0]), count)
    config = finished.config
    title = f"{config.task.captioner}  ·  {config.model.cell}  ·  test pictures"
    _draw_captions(shown, workdir / "figures" / "captions.png", title)
    if shown.weights is not None:
        _draw_attention(shown, workdir / "figures" / "attention.png", title)


def _shown(finished: Finished, params: Any, count: int) -> Shown:
    learner = finished.learner
    task = learner.task
    assert isinstance(task, CaptioningTask)
    window, pixels = _pictures(finished, task, count)

    @jax.jit
    def say_and_look(params: Any, pictures: Any) -> tuple[jax.Array, Any]:
        words = task.say(learner.apply, params, pictures, len(window.counts))
        return words, learner.apply(params, pictures, words[:, None]).weights

    words, weights = jax.device_get(say_and_look(params, window.pictures))
    references = task.references
    return Shown(
        pixels,
        [task.text(row) for row in words],
        [references[number] for number in window.numbers],
        None if weights is None else weights[:, 0],
    )


def _pictures(finished: Finished, task: CaptioningTask, count: int) -> tuple[Window, np.ndarray]:
    """The first test pictures as the model takes them, and their pixels."""
    if task.generated:
        finished.learner.load()
        window = jax.tree.map(lambda leaf: leaf[:count], finished.learner.data["test"])
        return window._replace(numbers=np.asarray(window.numbers)), np.asarray(window.pictures)
    files = PictureFiles(task)
    count = min(count, len(task.corpus.parts.test))
    window = files.read_held_out("test", 0, np.arange(count))
    first = len(task.corpus.parts.train)
    return jax.tree.map(jnp.asarray, window), files.pixels([first + int(n) for n in window.numbers])


def _draw_captions(shown: Shown, path: Path, title: str) -> None:
    down = math.ceil(len(shown.said) / _ACROSS)
    with page(path, 3.6 * _ACROSS, 3.6 * down, title, of_a_run=True) as figure:
        for axes in figure.subplots(down, _ACROSS, squeeze=False).ravel()[len(shown.said) :]:
            axes.remove()
        for axes, pixels, said, truth in zip(
            figure.axes, shown.pixels, shown.said, shown.truth, strict=True
        ):
            _draw_picture(axes, pixels)
            right = said in truth
            axes.set_title(_wrapped(said), fontsize=8, color=_RIGHT if right else _OTHER)
            axes.set_xlabel(_wrapped(f"true: {truth[0]}"), fontsize=8, color="0.35")
    say(f"figure: {path}")


def _draw_attention(shown: Shown, path: Path, title: str) -> None:
    assert shown.weights is not None
    spoken = [said.split() for said in shown.said]
    across = 1 + max(map(len, spoken))
    side = math.isqrt(shown.weights.shape[-1])
    with page(path, 0.95 * across, 1.15 * len(spoken), title, of_a_run=True) as figure:
        rows = figure.subplots(len(spoken), across, squeeze=False)
        for row, pixels, words, weights in zip(
            rows, shown.pixels, spoken, shown.weights, strict=True
        ):
            _draw_picture(row[0], pixels)
            for axes, word, look in zip(row[1:], words, weights, strict=False):
                _draw_picture(axes, pixels.mean(axis=-1), cmap="gray")
                size = len(pixels)
                axes.imshow(
                    look.reshape(side, side),
                    cmap="inferno",
                    alpha=0.65,
                    vmin=0,
                    extent=(-0.5, size - 0.5, size - 0.5, -0.5),
                )
                axes.set_title(word, fontsize=8)
            for axes in row[1 + len(words) :]:
                axes.remove()
    say(f"figure: {path}")


def _draw_picture(axes: Any, pixels: np.ndarray, cmap: str | None = None) -> None:
    axes.imshow(pixels, cmap=cmap)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)


def _wrapped(text: str) -> str:
    return textwrap.fill(text or "(nothing)", _LINE)
