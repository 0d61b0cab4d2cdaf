"""Scenes and their captions: what is said is true, and what is held out is nowhere else."""

import collections
import itertools

import jax
import numpy as np
import pytest

from experiments.captioning import scenes
from experiments.captioning.model import END
from experiments.captioning.settings import CAPTIONING
from experiments.settings.resolver import resolve


def drawn(groups, part, count):
    """Groups and scenes, drawn with the same keys."""
    keys = jax.random.split(jax.random.key(3), count)
    of_groups = jax.vmap(lambda key: scenes.draw_groups(jax.random.split(key, 3)[0], groups, part))
    scene = jax.vmap(lambda key: scenes.draw(key, groups, part))
    return jax.device_get(jax.jit(of_groups)(keys)), jax.device_get(jax.jit(scene)(keys))


PLURALS = {"circles": "circle", "squares": "square", "triangles": "triangle", "crosses": "cross"}


def parsed(caption):
    """What a person takes from a caption: groups of (count, colour, shape), relations between."""
    words = [scenes.WORDS[word] for word in caption if word]
    assert 0 not in caption[: len(words)]
    groups, relations, verbs = [], [], []
    for at, word in enumerate(words):
        if word in scenes.COLOURS:
            number, shape = scenes.NUMBERS.index(words[at - 1]), words[at + 1]
            assert (shape in PLURALS) == bool(number)
            groups.append((number, word, PLURALS.get(shape, shape)))
        elif word in ("left", "right", "above", "below", "over", "under"):
            relations.append({"over": "above", "under": "below"}.get(word, word))
        elif word in ("is", "are"):
            verbs.append((word, len(groups) - (words[at - 1] != "there")))
    assert all((verb == "are") == bool(groups[owner][0]) for verb, owner in verbs)
    return groups, relations


OPPOSITE = {"left": "right", "right": "left", "above": "below", "below": "above"}


def combinations(groups, relations):
    """(colour, shape, relation) of each group."""
    made = [set() for _ in groups]
    for at, relation in enumerate(relations):
        made[at].add((*groups[at][1:], relation))
        made[at + 1].add((*groups[at + 1][1:], OPPOSITE[relation]))
    return made


@pytest.mark.parametrize("groups", [2, 5])
@pytest.mark.long
def test_captions_are_true(groups):
    truth, drawn_scenes = drawn(groups, None, 40)
    of_scene = jax.vmap(lambda key: scenes.true_captions(key, groups, None))
    known = jax.device_get(jax.jit(of_scene)(jax.random.split(jax.random.key(3), 40)))
    lengths = set()
    for number, captions in enumerate(drawn_scenes.captions):
        assert len({tuple(caption) for caption in captions}) == scenes.REFERENCES
        cells = truth.cells[number]
        chain = [
            (int(count), scenes.COLOURS[colour], scenes.SHAPES[shape])
            for count, colour, shape in zip(
                truth.counts[number], truth.colours[number], truth.shapes[number], strict=True
            )
        ]
        relations = []
        for (row, column), (next_row, next_column) in itertools.pairwise(cells.tolist()):
            assert abs(row - next_row) + abs(column - next_column) == 1
            across = "left" if column < next_column else "right"
            down = "above" if row < next_row else "below"
            relations.append(across if row == next_row else down)
        backwards = [OPPOSITE[relation] for relation in relations[::-1]]
        for caption in known[number]:
            assert parsed(caption) in [(chain, relations), (chain[::-1], backwards)]
        assert len({tuple(caption) for caption in known[number]}) == 6
        assert {tuple(caption) for caption in captions} < {tuple(one) for one in known[number]}
        lengths |= {int((caption != END).sum()) for caption in captions}
    assert drawn_scenes.captions.shape[-1] == scenes.longest(groups) == 20 + 9 * (groups - 2)
    # Two relations across never follow each other in a grid of two by two.
    assert (
        max(lengths) == scenes.longest(groups) - 1
        if groups == 2
        else max(lengths) < scenes.longest(groups)
    )


@pytest.mark.long
def test_a_true_paraphrase_is_no_mistake():
    """Of six true captions five are references; the sixth is true as well, and no other is."""
    task = resolve(CAPTIONING, "small", {"captioner": "show_and_tell", "held_out_scenes": 9}).task
    held_out = task.references[-task.held_out_scenes :]
    for references, true in zip(held_out[:4], task.true_of("test", 4), strict=True):
        assert set(references) < true
        assert len(true) == 6
        (left,) = true - set(references)
        assert not any(left in of for of in held_out)


def test_pictures_show_their_scenes():
    """Each cell has as many places of its group's colour as it has shapes, and the rest is dark."""
    truth, drawn_scenes = drawn(3, None, 40)
    colours = np.array(scenes._RGB, float)
    for number, picture in enumerate(drawn_scenes.pictures):
        places = picture.reshape(4, 8, 4, 8, 3).transpose(0, 2, 1, 3, 4).reshape(4, 4, 64, 3)
        bright = np.abs(places.astype(float)[..., None, :] - colours).max(-1) < 40
        pixels = bright.sum(axis=2)  # [4, 4, colours]
        seen = pixels.max(-1) >= 10
        expected = np.zeros((4, 4), int)
        for (row, column), count, colour in zip(
            truth.cells[number], truth.counts[number], truth.colours[number], strict=True
        ):
            cell = np.s_[2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
            assert seen[cell].sum() == count + 1
            assert (pixels[cell].argmax(-1)[seen[cell]] == colour).all()
            expected[cell] = 1
        assert not seen[expected == 0].any()


def test_shapes_differ():
    """By how much of its place each fills, and of that the lower half."""
    truth, drawn_scenes = drawn(2, None, 400)
    filled, lower = (collections.defaultdict(list) for _ in range(2))
    for number, picture in enumerate(drawn_scenes.pictures):
        for (row, column), count, shape in zip(
            truth.cells[number], truth.counts[number], truth.shapes[number], strict=True
        ):
            cell = picture[16 * row : 16 * row + 16, 16 * column : 16 * column + 16]
            bright = (cell.max(-1) > 150).reshape(2, 8, 16).sum((0, 2))  # by row of a place
            filled[scenes.SHAPES[shape]].append(bright.sum() / (count + 1))
            lower[scenes.SHAPES[shape]].append(bright[4:].sum() / bright.sum())
    filled, lower = ({shape: np.mean(of[shape]) for shape in of} for of in (filled, lower))
    assert filled["circle"] > filled["square"] + 1
    assert filled["square"] > max(filled["triangle"], filled["cross"]) + 1
    assert lower["triangle"] > 0.6
    assert abs(lower["cross"] - 0.5) < 0.05


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.long
def test_what_is_held_out_is_in_no_training_scene(groups):
    def made(of, count):
        keys = jax.random.split(jax.random.key(3), count)
        captions = jax.jit(jax.vmap(lambda key: scenes.draw(key, groups, of).captions[0]))(keys)
        return [combinations(*parsed(caption)) for caption in jax.device_get(captions)]

    trained = set().union(*(one for of in made(None, 3000) for one in of))
    assert len(trained) == 4 * 24 - 16  # all of them are met
    for part in scenes.HELD_OUT:
        for of_groups in made(part, 60):
            assert all(one - trained for one in of_groups)
