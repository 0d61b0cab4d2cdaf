"""The models: a picture is seen, and a recurrent layer says what it shows.

Letters: T words of a caption and its end, B pictures, R captions of a picture, N = B * R, E width
of an embedded word, L regions of a picture, D features of a region, F features of the layer,
V words.
"""

from __future__ import annotations

import dataclasses
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from experiments.captioning.attention import (
    AttendingCell,
    Field,
    around_state,
    field_of_state,
)
from experiments.machine.mesh import Rows
from experiments.training.models import EVALUATION, Decoder, Pass, TokenEncoder, recurred, wide
from recurrent_gates import RNN, Cell, SLSTMState, Stack, unroll
from recurrent_gates.initializers import torch_linear_kernel

END = 0  # the word that ends a caption, stands before it and fills what is left of its row

_OUTPUTS = 0xCA97  # folded into the key of the noise for the masks on what the layer emits


class Seen(NamedTuple):
    """What the encoder made of pictures: ``[B, D]``, and regions ``[B, L, D]``."""

    pooled: jax.Array
    regions: jax.Array


class Memory(NamedTuple):
    """What the decoder has of a picture at every step: regions, and what they are compared by."""

    regions: jax.Array
    keys: jax.Array


class Said(NamedTuple):
    """Of each word its log-probabilities ``[B, R, T, V]``; where each step looked ``[B, R, T, L]``,
    zero behind a caption's end, or None."""

    log_p: jax.Array
    weights: jax.Array | None


class HalvingConvolution(nn.Module):
    """A convolution of 4 x 4 pixels at every second pixel, as one matrix product.

    XLA's convolutions inside of a loop take thirty times as long on a CPU.

    Attributes:
      features: of the output.
    """

    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        count, height, width, channels = x.shape
        x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        x = x.reshape(count, height // 2 + 1, 2, width // 2 + 1, 2, channels)
        x = x.swapaxes(2, 3).reshape(count, height // 2 + 1, width // 2 + 1, 4 * channels)
        row_pairs = jnp.concatenate([x[:, :-1], x[:, 1:]], axis=-1)
        return nn.Dense(self.features)(
            jnp.concatenate([row_pairs[:, :, :-1], row_pairs[:, :, 1:]], axis=-1)
        )


class SmallEncoder(nn.Module):
    """Pictures uint8 ``[B, S, S, 3]`` -> ``Seen``; three convolutions, eight pixels a region.

    Attributes:
      width: of the pooled features.
    """

    width: int

    @nn.compact
    def __call__(self, pictures: jax.Array) -> Seen:
        x = pictures.astype(jnp.float32) / 255
        for features in (32, 64, 64):
            x = nn.relu(nn.LayerNorm()(HalvingConvolution(features)(x)))
        regions = x.reshape(len(x), -1, x.shape[-1])
        pooled = nn.relu(nn.LayerNorm()(nn.Dense(self.width)(x.reshape(len(x), -1))))
        return Seen(pooled, regions)


class Features(nn.Module):
    """Features that were made before, ``{"pooled", "regions"}`` -> ``Seen``."""

    def __call__(self, features: dict[str, jax.Array]) -> Seen:
        pooled = features["pooled"].astype(jnp.float32)
        regions = features.get("regions")
        if regions is None:
            return Seen(pooled, jnp.zeros((len(pooled), 0, pooled.shape[-1]), jnp.float32))
        return Seen(pooled, regions.astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class Looking:
    """How a decoder looks at the regions (Show, Attend and Tell).

    Attributes:
      units: A, that compare regions with the query.
      field: of the state, what is the query.
      detach_query: whether h-detach acts on the query.
    """

    units: int
    field: Field
    detach_query: bool


class Captioner(nn.Module):
    """Show and Tell (Vinyals et al., 2015), or Show, Attend and Tell (Xu et al., 2015).

    The first reads a linear map of the picture in the place of a word before all words, and what
    it emits there is not used. The second begins with a linear map of the picture for its state,
    and at each step reads the regions that it looks at beside the word. A memory begins as its
    cell has it, and the map gives what its controller has.

    Attributes:
      vision: pictures -> ``Seen``.
      words: word numbers -> ``[..., E]``.
      recurrent: time-major recurrent layers.
      vocabulary: V.
      looking: how it looks at the regions; None: Show and Tell.
      blind: whether it sees nothing, to know what the words alone tell.
      output_dropout: probability of dropping what the layer emits.
    """

    vision: nn.Module
    words: TokenEncoder
    recurrent: RNN | Stack
    vocabulary: int
    looking: Looking | None = None
    blind: bool = False
    output_dropout: float = 0.0

    def setup(self) -> None:
        self.head = nn.Dense(self.vocabulary, kernel_init=small_uniform)
        if self.looking is None:
            self.begin: Decoder | None = Decoder((self.words.features,))
            return
        field, units = self.looking.field, self.looking.units
        state = jax.eval_shape(lambda: self._cell.initial((1,)))
        query = jax.eval_shape(lambda: field_of_state(self._cell.initial((1,)), field))
        widths = [leaf.shape[-1] for leaf in jax.tree.leaves(_picture_state(state))]
        self.begin = Decoder((max(widths),)) if widths else None
        self.key = Decoder((units,))
        self.query = self.param("query", torch_linear_kernel, (query.shape[-1], units))
        self.score = self.param("score", torch_linear_kernel, (units, 1))

    @property
    def _cell(self) -> Cell:
        assert isinstance(self.recurrent, RNN)
        return self.recurrent.cell

    def __call__(self, pictures: Any, captions: jax.Array, *, during: Pass = EVALUATION) -> Said:
        """What is said of each word, the words before it being those of the caption.

        Args:
          pictures: what ``vision`` takes, ``[B, ...]``.
          captions: int32 ``[B, R, T]``, ``END`` from their ends on.
          during: what acts on the model in this pass.
        """
        count, caption_count, steps = captions.shape
        previous_words = captions.reshape(-1, steps).T[:-1]  # [T - 1, N]
        valid = jnp.pad(previous_words != END, ((1, 0), (0, 0)), constant_values=True)
        inputs = self.words(jnp.pad(previous_words, ((1, 0), (0, 0)), constant_values=END))
        memory, first, carry = self._begin(self.see(pictures), caption_count)
        during = _caption_pass(during, caption_count)
        if first is not None:
            inputs = jnp.concatenate([first[None], inputs])
            valid = jnp.pad(valid, ((1, 0), (0, 0)), constant_values=True)
        _, ys, weights = self._unroll(memory, inputs, carry, during, valid)
        ys = self._dropout(ys[len(ys) - steps :], during)
        log_p = jax.nn.log_softmax(wide(self.head(ys)))

        def by_picture(x: jax.Array) -> jax.Array:
            return jnp.swapaxes(x, 0, 1).reshape(count, caption_count, steps, -1)

        return Said(by_picture(log_p), None if weights is None else by_picture(weights))

    def see(self, pictures: Any) -> Seen:
        """What the encoder makes of pictures; zeros for a blind decoder."""
        features = self.vision(pictures)
        return jax.tree.map(jnp.zeros_like, features) if self.blind else features

    def start(
        self, pictures: Any, each: int, *, during: Pass = EVALUATION
    ) -> tuple[Memory | None, Any]:
        """The memory and the carry before the first word of ``each`` captions of a picture."""
        memory, first, carry = self._begin(self.see(pictures), each)
        if first is not None:
            carry, _, _ = self._unroll(memory, first[None], carry, during, None)
        return memory, carry

    def follow(
        self, memory: Memory | None, words: jax.Array, carry: Any, *, during: Pass = EVALUATION
    ) -> tuple[Any, jax.Array]:
        """The carry after one more word ``[N]``, and log-probabilities ``[N, V]`` of the next."""
        carry, ys, _ = self._unroll(memory, self.words(words[None]), carry, during, None)
        return carry, jax.nn.log_softmax(wide(self.head(ys[0])))

    def _begin(
        self, features: Seen, caption_count: int
    ) -> tuple[Memory | None, jax.Array | None, Any]:
        """The memory, the input before the words or None, the carry or None."""
        projection = None
        if self.begin is not None:
            projection = jnp.repeat(self.begin(features.pooled), caption_count, axis=0)
        if self.looking is None:
            return None, projection, None
        carry = self._attending(features.regions).initial((caption_count * len(features.pooled),))
        state = carry.state
        if projection is not None:
            replacement = jax.tree.map(
                lambda leaf: projection[:, : leaf.shape[-1]].astype(leaf.dtype),
                _picture_state(state),
            )
            state = state._replace(**replacement) if isinstance(replacement, dict) else replacement
        if isinstance(state, SLSTMState):  # the picture has a weight of 1
            state = state._replace(n=jnp.ones_like(state.n), m=jnp.zeros_like(state.m))
        carry = carry._replace(state=state, query=field_of_state(state, self.looking.field))
        return Memory(features.regions, self.key(features.regions)), None, carry

    def _attending(self, regions: jax.Array) -> AttendingCell:
        assert self.looking is not None
        cell = self._cell.copy(parent=None, name=None)
        return AttendingCell(cell, self.looking.field, regions.shape[1], parent=None)

    def _unroll(
        self, memory: Memory | None, inputs: jax.Array, carry: Any, during: Pass, valid: Any
    ) -> tuple[Any, jax.Array, jax.Array | None]:
        """The last carry, what is emitted ``[T, N, F]`` and where it looked ``[T, N, L]``."""
        masks = {} if valid is None else {"valid": valid}
        if memory is None or self.looking is None:
            layers = types.SimpleNamespace(encoder=lambda x: x, recurrent=self.recurrent)
            carry, ys = recurred(layers, inputs, during, carry, masks)
            return carry, ys, None
        if (mask := during.embedding_mask(len(inputs), inputs.shape[2:])) is not None:
            inputs = inputs * mask
        params = {
            "cell": self._cell.weights(inputs.shape[-1] + memory.regions.shape[-1]),
            "query": self.query,
            "score": self.score[:, 0],
            "keys": memory.keys,
            "regions": memory.regions,
        }
        looking = self.looking
        noise = during.noise(len(inputs))
        fns, noise = around_state(during.carry_fns, noise, looking.field, looking.detach_query)
        carry, (ys, weights) = unroll(
            self._attending(memory.regions),
            params,
            inputs,
            carry,
            carry_fns=fns,
            noise=noise,
            deterministic=noise is None,
            backend=self.recurrent.backend,
            **masks,
        )
        return carry, ys, weights

    def _dropout(self, ys: jax.Array, during: Pass) -> jax.Array:
        """What the layer emits ``[T, N, F]``, some of it dropped in training."""
        if not self.output_dropout or during.noise_key is None:
            return ys
        keep_prob, rows = 1 - self.output_dropout, during.rows
        key = jax.random.fold_in(during.noise_key, _OUTPUTS)
        mask = jax.random.bernoulli(key, keep_prob, (len(ys), rows.total, ys.shape[-1]))
        return ys * rows.of(mask.astype(ys.dtype) / jnp.asarray(keep_prob, ys.dtype), 1)


def small_uniform(key: jax.Array, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
    """U(-0.1, 0.1): how embedding and softmax start in h-detach's code."""
    return jax.random.uniform(key, shape, dtype, -0.1, 0.1)


def _caption_pass(during: Pass, caption_count: int) -> Pass:
    """A pass over pictures as one over their captions, for what is drawn by row."""
    first, count, total = (
        getattr(during.rows, name) * caption_count for name in ("first", "count", "total")
    )
    return dataclasses.replace(during, rows=Rows(first, count, total))


def _picture_state(state: Any) -> Any:
    """What of a cell's state a picture gives: all of it, or of an sLSTM, and where there is a
    memory, c and h by name."""
    vectors = all(leaf.ndim == 2 for leaf in jax.tree.leaves(state))
    if vectors and not isinstance(state, SLSTMState):
        return state
    return {name: getattr(state, name) for name in ("c", "h") if name in state._fields}
