"""Captioning: a sentence that says what a picture shows, word by word.

Letters: B pictures of a batch, R captions of a picture, T words of a caption and its end, L
regions of a picture, V words.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from experiments.captioning import resnet, scenes, scoring
from experiments.captioning.decoding import beam_search, greedy
from experiments.captioning.model import (
    END,
    Captioner,
    Features,
    Looking,
    SmallEncoder,
    small_uniform,
)
from experiments.captioning.pictures import (
    Corpus,
    PictureFiles,
    Window,
    corpus,
    digest_of_file,
    held_out_first,
    regions_of,
)
from experiments.captioning.settings import CaptioningSettings
from experiments.machine.mesh import Rows
from experiments.records.reporting import say
from experiments.settings.cells import feedback_fields, field_of
from experiments.settings.errors import UserError
from experiments.settings.metrics import Metric
from experiments.settings.model import ModelSettings
from experiments.training.models import TokenEncoder
from experiments.training.state import threefry_key
from experiments.training.task import Apply, BaseTask, Fresh, HeldOut, Outcome, Resident, Streamed
from recurrent_gates import RNN, Stack

_SCENES = 3200  # to train on, fresh ones each time, are called a pass
_SEEDS = {"validation": 0x5CE7E, "test": 0x5CE7F}  # of the held-out scenes


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaptioningTask(CaptioningSettings, BaseTask):
    """What a picture shows.

    The model is trained on each word of a caption and on its end, the words before being the
    caption's own; the loss is the mean over words. At evaluation it says a sentence of its own, of
    which only the picture is given.
    """

    name = "captioning"
    axes = 0
    output_axes = 0

    @property
    def metrics(self) -> tuple[Metric, ...]:
        names = [*scoring.BLEU]
        if self.evaluation == "coco":
            coco_names = [name for name in scoring.COCO if name != "meteor" or scoring.has_java()]
            names = [coco_names[0], *names, *coco_names[1:]]
        word_metrics = [Metric(name, True, 0.0, "no word right") for name in names]
        return (*word_metrics, Metric("loss", False, math.log(len(self.vocabulary)), "uniform"))

    @property
    def corpus(self) -> Corpus:
        """The pictures and captions in files.

        Raises:
          UserError: if files are missing or damaged.
        """
        return corpus(self.dataset, self.data_dir, self.restval, self.min_count, self.length)

    @property
    def generated(self) -> bool:
        """Whether the pictures are scenes, drawn on the device."""
        return self.dataset == "scenes"

    @functools.cached_property
    def content(self) -> str | None:
        """A digest of captions and weights in files, which no setting tells."""
        if self.generated:
            return None
        digest = hashlib.sha256("\n".join(self.vocabulary).encode())
        for pictures in self.corpus.parts:
            digest.update(json.dumps([picture.captions for picture in pictures]).encode())
        if self.weights is not None:
            digest.update(digest_of_file(self.weights).encode())
        return digest.hexdigest()[:16]

    @property
    def vocabulary(self) -> Sequence[str]:
        """The words; that of number 0 is the end."""
        return scenes.WORDS if self.generated else self.corpus.words

    @property
    def steps(self) -> int:
        """T: the words of the longest caption, and its end."""
        return scenes.longest(self.groups) if self.generated else self.length + 1

    @property
    def examples(self) -> int:
        """How many pictures there are in a pass."""
        return _SCENES if self.generated else len(self.corpus.parts.train)

    def check(self) -> None:
        if self.evaluation == "coco" and not scoring.has_coco():
            raise UserError(scoring.NEEDS_COCO)
        if self.generated and self.encoder != "cnn":
            raise UserError("--encoder=resnet152 is for pictures from files; scenes are small.")
        if self.generated and self.captions > scenes.REFERENCES:
            raise UserError(f"--captions is at most {scenes.REFERENCES} for scenes.")
        if self.generated:
            return
        if self.encoder != "resnet152":
            raise UserError("--encoder=cnn is for scenes; pictures from files need resnet152.")
        if self.image_size % 32:
            raise UserError(f"--image_size must be a multiple of 32, got {self.image_size}.")
        if self.weights is None and not self.train_encoder:
            raise UserError(
                "--encoder=resnet152 needs --weights=FILE, unless it is trained along "
                "(--train_encoder): experiments/captioning/torchvision_weights.py writes that file."
            )

    def module(self, recurrent: RNN | Stack, model: ModelSettings) -> Captioner:
        if model.decoder:
            raise UserError("--decoder is not for captioning: its decoder is the softmax.")
        looking = None
        if self.captioner == "show_attend_tell":
            if isinstance(recurrent, Stack):
                raise UserError("--captioner=show_attend_tell is for --layers=1.")
            candidates = feedback_fields(recurrent.cell)
            if len(candidates) > 1:
                raise UserError(
                    f"--captioner=show_attend_tell asks the picture by the state's h, and the "
                    f"state of {model.cell} has the fields {' and '.join(candidates)}."
                )
            looking = Looking(self.attention_units, field_of(candidates[0]), self.detach_query)
        size = len(self.vocabulary)
        return Captioner(
            vision=self._vision(),
            words=TokenEncoder(self.inputs, size, model.embedding, small_uniform),
            recurrent=recurrent,
            vocabulary=size,
            looking=looking,
            blind=self.blind,
            output_dropout=self.output_dropout,
        )

    def _vision(self) -> nn.Module:
        if self.generated:
            return SmallEncoder(self.picture_features)
        return resnet.ResNet() if self.train_encoder else Features()

    def initial(self, params: Any) -> Any:
        if not self.train_encoder or self.weights is None:
            return params
        weights = resnet.read_weights(self.weights, params["vision"])
        return params | {"vision": jax.tree.map(jnp.asarray, weights)}

    def trainable(self, params: Any) -> Any:
        if not self.train_encoder:
            return None
        flags = {name: jax.tree.map(lambda _: True, leaves) for name, leaves in params.items()}
        return flags | {"vision": resnet.trainable(params["vision"])}

    def example(self) -> tuple[Any, jax.Array]:
        pictures = jax.tree.map(
            lambda leaf: jnp.zeros((1, *leaf.shape[1:]), leaf.dtype), self._picture_shapes(1)
        )
        return pictures, jnp.zeros((1, 1, 1), jnp.int32)

    def _picture_shapes(self, rows: int) -> Any:
        """What the encoder takes."""
        if self.generated or self.train_encoder:
            side = scenes.pixels(self.groups) if self.generated else self.image_size
            return jax.ShapeDtypeStruct((rows, side, side, 3), jnp.uint8)
        shapes = {"pooled": jax.ShapeDtypeStruct((rows, resnet.FEATURES), jnp.float16)}
        if self.captioner == "show_attend_tell":
            shape = (rows, regions_of(self.image_size), resnet.FEATURES)
            shapes["regions"] = jax.ShapeDtypeStruct(shape, jnp.float16)
        return shapes

    def data(self) -> Resident | Streamed:
        if self.evaluation == "coco" and not scoring.has_java():
            say(scoring.NEEDS_JAVA)
        if self.generated:
            return Resident(jax.jit(self._held_out_sets)())
        return PictureFiles(self)

    def shapes(self, rows: int) -> Any:
        if self.generated:
            return jax.eval_shape(self._held_out_sets)
        captions = jax.ShapeDtypeStruct((rows, self.captions, self.steps), jnp.int32)
        numbers = jax.ShapeDtypeStruct((rows,), jnp.int32)
        counts = jax.ShapeDtypeStruct((rows,), jnp.bool_)
        return Window(self._picture_shapes(rows), captions, numbers, counts)

    def _held_out_sets(self) -> dict[str, Window]:
        return _held_out_scenes(self.groups, self.held_out_scenes)

    def draw(
        self, act: Apply, data: Any, stream: Any, key: jax.Array, step: jax.Array, rows: Rows
    ) -> tuple[Window, Any]:
        del act
        if not self.generated:
            return data, stream
        keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.fold_in(key, step)))
        batch = jax.vmap(lambda key: scenes.draw(key, self.groups, None))(keys(rows.numbers))
        captions = batch.captions[:, : self.captions]
        counts = jnp.ones(rows.count, bool)
        return Window(batch.pictures, captions, rows.numbers, counts), stream

    def loss(self, apply: Apply, params: Any, window: Window, stream: Any, train: bool) -> Outcome:
        prediction = apply(params, window.pictures, window.captions)
        captions = window.captions
        log_p = jnp.take_along_axis(prediction.log_p, captions[..., None], axis=-1)[..., 0]
        mask = jnp.pad(captions[..., :-1] != END, ((0, 0), (0, 0), (1, 0)), constant_values=True)
        weights = (mask & window.counts[:, None, None]).astype(log_p.dtype)
        total, weight = -(log_p * weights).sum(), weights.sum()
        sums = {"loss": (total, weight)}
        if self.doubly_stochastic and prediction.weights is not None:
            # Xu et al., Eq. (14): each region is to be looked at once; a caption's penalty weighs
            # as its words do.
            penalties = ((1 - prediction.weights.sum(axis=-2)) ** 2).sum(axis=-1)  # [B, R]
            total += self.doubly_stochastic * (penalties * weights.sum(axis=-1)).sum()
        if train:
            return Outcome((total, weight), sums, stream)
        outputs = {
            "words": self.say(apply, params, window.pictures, len(captions)),
            "numbers": window.numbers,
            "counts": window.counts,
        }
        return Outcome((total, weight), sums, stream, outputs)

    def say(self, apply: Apply, params: Any, pictures: Any, count: int) -> jax.Array:
        """The model's own captions of pictures, int32 ``[count, T - 1]``: after so many words one
        is at its end, whether the model says so or not."""
        memory, carry = apply(params, pictures, self.beam, method="start")

        def follow(carry: Any, words: jax.Array) -> tuple[Any, jax.Array]:
            return apply(params, memory, words, carry, method="follow")

        if self.beam == 1:
            return greedy(follow, carry, count, self.steps - 1, END)
        words, _ = beam_search(
            follow,
            carry,
            rows=count,
            width=self.beam,
            steps=self.steps - 1,
            end=END,
            length_power=self.length_power,
        )
        return words

    def held_out(self, data: Any, devices: int) -> Mapping[str, HeldOut]:
        del devices
        if self.generated:
            return {name: _Pictures(name, len(window.numbers)) for name, window in data.items()}
        parts = self.corpus.parts
        return {name: _Pictures(name, len(getattr(parts, name)), True) for name in _SEEDS}

    def text(self, words: Sequence[int]) -> str:
        """Words before the end of a caption, with blanks between them."""
        sentence: list[str] = []
        for word in words:
            if word == END:
                break
            sentence.append(self.vocabulary[word])
        return " ".join(sentence)

    @property
    def references(self) -> list[list[str]]:
        """The captions of the pictures of both held-out sets, with blanks between their words."""
        if not self.generated:
            return _tokenised(self.corpus, self.evaluation == "coco")
        captions = _held_out_captions(self.groups, self.held_out_scenes)
        return [[self.text(caption) for caption in group] for group in captions]

    def tokenised(self, sentences: Sequence[str]) -> list[str]:
        """What the model says, cut into words as the references are."""
        if self.generated:
            return list(sentences)
        groups = [[sentence] for sentence in sentences]
        return [sentence for [sentence] in scoring.tokenised(groups, self.evaluation == "coco")]

    def true_of(self, name: str, count: int) -> list[set[str]]:
        """Of the first so many scenes of a held-out set, every caption that is true of each."""
        keys = _held_out_keys(name, self.held_out_scenes)[:count]
        captions_of = functools.partial(scenes.true_captions, groups=self.groups, part=name)
        captions = jax.device_get(jax.jit(jax.vmap(captions_of))(keys))
        return [{self.text(caption) for caption in group} for group in captions]

    def scores(
        self, sums: Mapping[str, tuple[np.ndarray, np.ndarray]], outputs: list[Any]
    ) -> dict[str, Any]:
        rows = {name: np.concatenate([output[name] for output in outputs]) for name in outputs[0]}
        counts = rows["counts"].astype(bool)
        references = self.references
        truth = [references[number] for number in rows["numbers"][counts]]
        sentences = [self.text(words) for words in rows["words"][counts]]
        sentences = self.tokenised(sentences)
        score = scoring.coco if self.evaluation == "coco" else scoring.bleu
        return super().scores(sums, outputs) | score(sentences, truth)


class _Pictures:
    """A held-out set in windows; see ``held_out_first``."""

    def __init__(self, name: str, pictures: int, streamed: bool = False) -> None:
        self._name, self._pictures, self._streamed = name, pictures, streamed
        _, self.rows = held_out_first(0, pictures)
        self.windows = -(-pictures // self.rows)

    def start(self, fresh: Fresh, data: Any, rows: Rows) -> tuple[()]:
        del fresh, data, rows
        return ()

    def draw(
        self, act: Apply, data: Any, stream: Any, index: jax.Array, rows: Rows
    ) -> tuple[Window, Any]:
        del act
        if self._streamed:
            return data, stream
        start = index * self.rows
        first = jnp.minimum(start, self._pictures - self.rows)
        window = jax.tree.map(
            lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, first, self.rows), data[self._name]
        )
        counts = first + jnp.arange(self.rows, dtype=first.dtype) >= start
        return rows.of(window._replace(counts=counts), 0), stream


def _held_out_keys(name: str, count: int) -> jax.Array:
    return jax.random.split(threefry_key(_SEEDS[name]), count)


def _held_out_scenes(groups: int, count: int) -> dict[str, Window]:
    """The held-out sets, which are the same for all seeds and models."""
    sets = {}
    for index, name in enumerate(_SEEDS):
        keys = _held_out_keys(name, count)
        batch = jax.vmap(lambda key, name=name: scenes.draw(key, groups, name))(keys)
        numbers = index * count + jnp.arange(count, dtype=jnp.int32)
        sets[name] = Window(batch.pictures, batch.captions, numbers, jnp.ones(count, bool))
    return sets


@functools.lru_cache(maxsize=2)
def _held_out_captions(groups: int, count: int) -> np.ndarray:
    sets = jax.jit(_held_out_scenes, static_argnums=(0, 1))(groups, count)
    return np.concatenate([np.asarray(sets[name].captions) for name in _SEEDS])


_TOKENISED: dict[tuple[int, bool], list[list[str]]] = {}


def _tokenised(dataset: Corpus, treebank: bool) -> list[list[str]]:
    """The captions of a published set's held-out parts, as they are scored; made once."""
    key = id(dataset), treebank
    if key not in _TOKENISED:
        pictures = [*dataset.parts.validation, *dataset.parts.test]
        captions = [picture.captions for picture in pictures]
        _TOKENISED[key] = scoring.tokenised(captions, treebank)
    return _TOKENISED[key]
