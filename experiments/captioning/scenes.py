"""Pictures of coloured shapes, and the sentences of a grammar that are true of them.

A scene is a chain of groups. A group is one to three like shapes of one colour in a cell of a
square grid; the next group is in the next cell along the grid's border, so that it is left of,
right of, above or below this one. A caption walks along the chain, from either end:

    two red circles are left of a blue square which is above three pink crosses

There are six of them for each scene: three wordings, each from both ends.

What is held out are combinations of colour, shape and relation, such as "a red circle left of
something", one in twelve for each held-out part. No group of a scene to train on makes one of
them; every group of a held-out scene makes one of its part.

Letters: G groups, S pixels of a side, R captions of a scene, T words of a caption and its end.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

COLOURS = ("red", "green", "blue", "yellow", "pink", "white")
SHAPES = ("circle", "square", "triangle", "cross")
NUMBERS = ("a", "two", "three")
_PLURALS = ("circles", "squares", "triangles", "crosses")
_RELATIONS = ("left of", "right of", "above", "below")  # the opposite of r is r ^ 1
_LONG_RELATIONS = ("to the left of", "to the right of", "over", "under")
_OTHERS = ("is", "are", "there", "which", "in", "this", "picture", "can", "be", "seen", "and")

WORDS = (
    "",
    *NUMBERS,
    *COLOURS,
    *SHAPES,
    *_PLURALS,
    *_OTHERS,
    "it",
    "they",
    "left",
    "right",
    "of",
    "to",
    "the",
    "above",
    "below",
    "over",
    "under",
)
"""The vocabulary; the first is the end of a caption and what comes after it."""

HELD_OUT = ("validation", "test")
"""The held-out parts."""

REFERENCES = 5  # R: of the six captions, drawn for each scene
_STYLES = 6
_OF_EACH_RELATION = 2  # combinations of colour and shape that a part holds out
_SLOT = 8  # pixels of the place of a shape; a cell has two by two
_RGB = ((230, 50, 40), (50, 190, 70), (60, 90, 240), (235, 220, 60), (240, 130, 200), (240,) * 3)


class Scenes(NamedTuple):
    """Pictures uint8 ``[..., S, S, 3]`` and captions int32 ``[..., R, T]``, zero at their ends."""

    pictures: jax.Array
    captions: jax.Array


class Groups(NamedTuple):
    """What stands where, int32: numbers into the tables above, from one end of the chain on.

    Attributes:
      cells: row and column of each group's cell, ``[G, 2]``.
      counts: of shapes less one, ``[G]``.
      colours, shapes: ``[G]``.
      relations: of each group but the last to the next, ``[G - 1]``.
    """

    cells: jax.Array
    counts: jax.Array
    colours: jax.Array
    shapes: jax.Array
    relations: jax.Array


def cells_of_side(groups: int) -> int:
    """How many cells a side of the grid has, whose border has room for the groups."""
    return 2 if groups <= 4 else 3


def pixels(groups: int) -> int:
    """S."""
    return 2 * _SLOT * cells_of_side(groups)


def longest(groups: int) -> int:
    """T: the words of the longest caption, and its end."""
    return 20 + 9 * (groups - 2)


def draw(key: jax.Array, groups: int, part: str | None) -> Scenes:
    """One scene.

    Args:
      key: a PRNG key.
      groups: G, 2 to 8.
      part: one of ``HELD_OUT``; None: the training part.
    """
    group_key, picture_key, caption_key = jax.random.split(key, 3)
    scene = draw_groups(group_key, groups, part)
    styles = jax.random.permutation(caption_key, _STYLES)[:REFERENCES]
    captions = jax.vmap(functools.partial(caption, scene))(styles)
    return Scenes(_picture(picture_key, scene, pixels(groups)), captions)


def true_captions(key: jax.Array, groups: int, part: str | None) -> jax.Array:
    """All that the grammar says of the scene that ``draw`` makes of this key, int32 ``[6, T]``."""
    scene = draw_groups(jax.random.split(key, 3)[0], groups, part)
    return jax.vmap(functools.partial(caption, scene))(jnp.arange(_STYLES, dtype=jnp.int32))


def draw_groups(key: jax.Array, count: int, part: str | None) -> Groups:
    """The groups of a scene; see ``draw``."""
    keys = iter(jax.random.split(key, 6))
    side = cells_of_side(count)
    ring = jnp.asarray(_ring(side), jnp.int32)
    first = jax.random.randint(next(keys), (), 0, len(ring))
    step = jnp.where(jax.random.bernoulli(next(keys)), 1, -1)
    cells = ring[(first + step * jnp.arange(count, dtype=jnp.int32)) % len(ring)]
    down, right = jnp.sign(jnp.diff(cells, axis=0)).T
    relations = jnp.where(down == 0, jnp.where(right > 0, 0, 1), jnp.where(down > 0, 2, 3))
    next_links = jnp.append(relations, relations[-1] ^ 1)  # the last group has the one before it
    previous_links = jnp.append(relations[:1], relations ^ 1)  # and the first one has the next
    combinations = jnp.asarray(_COMBINATIONS)
    if part is None:
        allowed = (combinations[next_links] < 0) & (combinations[previous_links] < 0)
    else:
        allowed = combinations[next_links] == HELD_OUT.index(part)
    logits = jnp.where(allowed, 0.0, -jnp.inf)  # [G, colours * shapes]
    pairs = jax.random.categorical(next(keys), logits).astype(jnp.int32)
    colours, shapes = pairs // len(SHAPES), pairs % len(SHAPES)
    counts = jax.random.randint(next(keys), (count,), 0, len(NUMBERS))
    return Groups(cells, counts, colours, shapes, relations.astype(jnp.int32))


def _combinations() -> np.ndarray:
    """Which held-out part has which combination, int32 ``[relations, colours * shapes]``; -1: none.

    A colour and a shape together miss one relation at most.
    """
    parts = np.full((len(_RELATIONS), len(COLOURS) * len(SHAPES)), -1, np.int32)
    pairs = iter(np.random.RandomState(0).permutation(parts.shape[1]))
    for part in range(len(HELD_OUT)):
        for row in parts:
            for _ in range(_OF_EACH_RELATION):
                row[next(pairs)] = part
    return parts


_COMBINATIONS = _combinations()


def _ring(side: int) -> list[tuple[int, int]]:
    """Row and column of the cells along the border, clockwise."""
    last = side - 1
    top = [(0, column) for column in range(last)]
    right = [(row, last) for row in range(last)]
    bottom = [(last, column) for column in range(last, 0, -1)]
    left = [(row, 0) for row in range(last, 0, -1)]
    return top + right + bottom + left


def _picture(key: jax.Array, scene: Groups, side: int) -> jax.Array:
    """uint8 ``[S, S, 3]``: every shape has a place of its own, so each pixel knows whose it is."""
    place_key, shift_key, noise_key, ground_key = jax.random.split(key, 4)
    slot_count = side // _SLOT
    count = len(scene.shapes)
    order = jax.vmap(lambda key: jax.random.permutation(key, 4))(jax.random.split(place_key, count))
    row, column = 2 * scene.cells[:, :1] + order // 2, 2 * scene.cells[:, 1:] + order % 2
    presence = jnp.arange(4, dtype=jnp.int32)[None] <= scene.counts[:, None]
    group = jnp.full((slot_count, slot_count), -1, jnp.int32)
    numbers = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32)[:, None], order.shape)
    group = group.at[row, column].set(jnp.where(presence, numbers, -1))
    shift = jax.random.uniform(shift_key, (slot_count, slot_count, 2), minval=-0.5, maxval=0.5)

    coordinates = jnp.arange(side, dtype=jnp.int32)
    place = (coordinates[:, None] // _SLOT, coordinates[None] // _SLOT)
    offsets = (coordinates % _SLOT).astype(jnp.float32) - (_SLOT - 1) / 2
    dy = offsets[:, None] - shift[..., 0][place]
    dx = offsets[None] - shift[..., 1][place]
    pixel_groups = group[place]
    coverage = jnp.stack(
        [
            dx**2 + dy**2 <= 9.5,
            jnp.maximum(jnp.abs(dx), jnp.abs(dy)) <= 2.6,
            (jnp.abs(dy) <= 3.0) & (jnp.abs(dx) <= (dy + 3.0) / 2 + 0.3),
            (jnp.minimum(jnp.abs(dx), jnp.abs(dy)) <= 1.0)
            & (jnp.maximum(jnp.abs(dx), jnp.abs(dy)) <= 3.2),
        ]
    )
    coverage = jnp.take_along_axis(coverage, scene.shapes[pixel_groups][None], axis=0)[0]
    colour = jnp.asarray(_RGB, jnp.float32)[scene.colours[pixel_groups]]
    ground = jax.random.uniform(ground_key, (), minval=0.0, maxval=60.0)
    picture = jnp.where((coverage & (pixel_groups >= 0))[..., None], colour, ground)
    picture = picture + 8 * jax.random.normal(noise_key, picture.shape)
    return jnp.clip(picture, 0, 255).astype(jnp.uint8)


def _numbers(texts: tuple[str, ...], width: int) -> np.ndarray:
    """Words of texts, each padded to a width, int32 ``[len(texts), width]``."""
    rows = [[WORDS.index(word) for word in text.split()] for text in texts]
    return np.array([row + [0] * (width - len(row)) for row in rows], np.int32)


_NUMBER, _COLOUR = _numbers(NUMBERS, 1)[:, 0], _numbers(COLOURS, 1)[:, 0]
_SHAPE = np.stack([_numbers(SHAPES, 1)[:, 0], _numbers(_PLURALS, 1)[:, 0]])
_RELATION = np.stack([_numbers(_RELATIONS, 4), _numbers(_LONG_RELATIONS, 4)])
_VERB = _numbers(("is", "are"), 1)[:, 0]
_BEGINNING = _numbers(("", "there", "in this picture"), 3)  # by wording
_SEEN = _numbers(("can be seen and it is", "can be seen and they are"), 6)
_WHICH = WORDS.index("which")


def caption(scene: Groups, style: jax.Array) -> jax.Array:
    """One of the captions of a scene, int32 ``[T]``.

    Args:
      scene: what is said.
      style: 0 to 5: the wording modulo three; from 3 on it begins at the chain's other end.
    """
    wording, backwards = style % 3, style >= 3
    count = len(scene.shapes)

    def along(forward: jax.Array, backward: jax.Array) -> jax.Array:
        return jnp.where(backwards, backward, forward)

    counts, colours, shapes = (
        along(values, values[::-1]) for values in (scene.counts, scene.colours, scene.shapes)
    )
    relations = along(scene.relations, scene.relations[::-1] ^ 1)
    plural = (counts > 0).astype(jnp.int32)
    nouns = jnp.stack(
        [
            jnp.asarray(_NUMBER)[counts],
            jnp.asarray(_COLOUR)[colours],
            jnp.asarray(_SHAPE)[plural, shapes],
        ],
        axis=1,
    )
    phrase = jnp.asarray(_RELATION)[(wording == 2).astype(jnp.int32), relations]
    verbs = jnp.asarray(_VERB)[plural]
    seen_phrase = (wording == 2) * jnp.asarray(_SEEN)[plural[0]]
    pieces = [jnp.asarray(_BEGINNING)[wording], (wording == 1) * verbs[:1], nouns[0]]
    pieces += [(wording == 0) * verbs[:1], seen_phrase, phrase[0], nouns[1]]
    for group in range(2, count):
        pieces += [jnp.array([_WHICH], jnp.int32), verbs[group - 1 : group]]
        pieces += [phrase[group - 1], nouns[group]]
    words = jnp.concatenate(pieces)
    places = jnp.argsort(words == 0, stable=True)[: longest(count)]
    return words[places]
