"""Test pictures with their true captions and the model's, and where it looked, word by word.

A caption of a scene is true or not: the grammar says so, whether or not it is among the references.
Of a photograph only the references are known to be true, so no other caption is called wrong.

Letters: N pictures, S pixels of a side, T words, L regions.
"""

from __future__ import annotations

import difflib
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
_COLOURS = {True: "#2e933c", False: "#d1495b", None: "black"}


class Shown(NamedTuple):
    """Pictures to be drawn.

    Attributes:
      pixels: uint8 ``[N, S, S, 3]``.
      captions: those of the model.
      truths: whether they are true; None: not known.
      nearest: of the references of each picture the one most like the caption.
      weights: where it looked ``[N, T, L]``; None: it does not look at regions.
    """

    pixels: np.ndarray
    captions: list[str]
    truths: list[bool | None]
    nearest: list[str]
    weights: np.ndarray | None


def draw(finished: Finished, workdir: Path, count: int) -> None:
    """Draws ``figures/captions.png``, and where the model looked ``figures/attention.png``, of
    the first lane that has not diverged.

    Raises:
      OSError: if they cannot be written.
    """
    lanes = finished.sound_lanes
    if not available(say) or not lanes:
        return
    examples = _examples(finished, finished.lane(finished.params, lanes[0]), count)
    config = finished.config
    assert isinstance(config.task, CaptioningTask)
    title = f"{config.task.captioner}  ·  {config.model.cell}  ·  test pictures"
    legend = "green: true, red: false" if config.task.generated else "green: a reference"
    _draw_captions(examples, workdir / "figures" / "captions.png", f"{title}  ·  {legend}")
    if examples.weights is not None:
        _draw_attention(examples, workdir / "figures" / "attention.png", title)


def _examples(finished: Finished, params: Any, count: int) -> Shown:
    learner = finished.learner
    task = learner.task
    assert isinstance(task, CaptioningTask)
    window, pixels = _pictures(finished, task, count)

    @jax.jit
    def say_and_look(params: Any, pictures: Any) -> tuple[jax.Array, Any]:
        words = task.say(learner.apply, params, pictures, len(window.counts))
        return words, learner.apply(params, pictures, words[:, None]).weights

    words, weights = jax.device_get(say_and_look(params, window.pictures))
    captions = task.tokenised([task.text(row) for row in words])
    references = [task.references[number] for number in window.numbers]
    truths: list[bool | None]
    if task.generated:
        true_captions = task.true_of("test", count)
        truths = [caption in texts for caption, texts in zip(captions, true_captions, strict=True)]
    else:
        truths = [
            caption in texts or None for caption, texts in zip(captions, references, strict=True)
        ]
    nearest = [
        _nearest(caption, texts) for caption, texts in zip(captions, references, strict=True)
    ]
    return Shown(pixels, captions, truths, nearest, None if weights is None else weights[:, 0])


def _nearest(caption: str, references: list[str]) -> str:
    """The reference with most of the same words in the same order."""

    def likeness(reference: str) -> float:
        return difflib.SequenceMatcher(None, caption.split(), reference.split()).ratio()

    return max(references, key=likeness)


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


def _draw_captions(examples: Shown, path: Path, title: str) -> None:
    row_count = math.ceil(len(examples.captions) / _ACROSS)
    with page(path, 3.6 * _ACROSS, 3.6 * row_count, title, of_a_run=True) as figure:
        for axes in figure.subplots(row_count, _ACROSS, squeeze=False).ravel()[
            len(examples.captions) :
        ]:
            axes.remove()
        for axes, pixels, caption, truth, reference in zip(
            figure.axes,
            examples.pixels,
            examples.captions,
            examples.truths,
            examples.nearest,
            strict=True,
        ):
            _draw_picture(axes, pixels)
            axes.set_title(_wrapped(caption), fontsize=8, color=_COLOURS[truth])
            axes.set_xlabel(_wrapped(f"reference: {reference}"), fontsize=8, color="0.35")
    say(f"figure: {path}")


def _draw_attention(examples: Shown, path: Path, title: str) -> None:
    assert examples.weights is not None
    sentences = [caption.split() for caption in examples.captions]
    column_count = 1 + max(map(len, sentences))
    side = math.isqrt(examples.weights.shape[-1])
    with page(path, 0.95 * column_count, 1.15 * len(sentences), title, of_a_run=True) as figure:
        rows = figure.subplots(len(sentences), column_count, squeeze=False)
        for row, pixels, words, weights in zip(
            rows, examples.pixels, sentences, examples.weights, strict=True
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
                    vmax=weights[: len(words)].max(),  # one scale for a caption's words
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
