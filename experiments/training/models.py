"""The model around a cell: encoder, recurrent layer, decoder; torch's defaults outside the cell."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from experiments.machine.mesh import Rows, probed_axes
from experiments.machine.words import Words, total_over_parts
from experiments.settings.model import ModelSettings
from recurrent_gates import RNN, Cell, Stack, draw_noise
from recurrent_gates.initializers import (
    Initializer,
    torch_embedding,
    torch_linear_bias,
    torch_linear_kernel,
)


def wide(x: jax.Array) -> jax.Array:
    """x in float32, or in float64 where it is that already."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


class TokenEncoder(nn.Module):
    """Integer tokens ``[...]`` -> float32 features ``[..., D]``.

    Attributes:
      inputs: ``"embed"``, ``"one_hot"`` or ``"scalar"``: the number itself, D = 1.
      vocabulary: how many different tokens there are.
      width: D of an embedding.
      embedding_init: draws its table.
      parts: how many devices share its table; each has equally many rows.
    """

    inputs: str
    vocabulary: int
    width: int
    embedding_init: Initializer = torch_embedding
    parts: int = 1

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        if self.inputs == "embed":
            words = Words(self.vocabulary, self.parts)
            embed = nn.Embed(words.count, self.width, embedding_init=self.embedding_init)
            if self.parts == 1:
                return embed(tokens)
            row, own = words.place(tokens)
            embedded = embed(row)
            return total_over_parts(jnp.where(own[..., None], embedded, jnp.zeros_like(embedded)))
        if self.inputs == "one_hot":
            return jax.nn.one_hot(tokens, self.vocabulary, dtype=jnp.float32)
        return tokens[..., None].astype(jnp.float32)

    @property
    def features(self) -> int:
        """D."""
        return {"embed": self.width, "one_hot": self.vocabulary, "scalar": 1}[self.inputs]

    @property
    def table(self) -> jax.Array:
        """The embeddings ``[vocabulary, D]``, or a device's part of them, of a bound module that
        has embedded something."""
        return self.variables["params"]["Embed_0"]["embedding"]


class Decoder(nn.Module):
    """Linear layers with ReLU between them, ``[..., F]`` -> ``[..., widths[-1]]``, float32 at
    least.

    Masks, if given, are factors on the hidden layers; see ``dropout_masks``.
    """

    widths: Sequence[int]

    @nn.compact
    def __call__(self, x: jax.Array, *masks: jax.Array) -> jax.Array:
        x = wide(x)
        for index, width in enumerate(self.widths):
            if index:
                x = nn.relu(x)
                x = x * masks[index - 1] if masks else x
            x = nn.Dense(
                width,
                kernel_init=torch_linear_kernel,
                bias_init=torch_linear_bias(x.shape[-1]),
            )(x)
        return x


def dropout_masks(
    key: jax.Array, rate: float, widths: Sequence[int], size: int
) -> tuple[jax.Array, ...]:
    """Factors on hidden layers, zero with probability ``rate`` and else such that their mean is 1.

    Args:
      key: a PRNG key.
      rate: probability of dropping a unit; 0: no masks.
      widths: of the hidden layers.
      size: examples; each has its own mask, the same at every step.

    Returns:
      One array float32 ``[1, size, width]`` for each hidden layer, or none.
    """
    if not rate:
        return ()
    keys = jax.random.split(key, max(1, len(widths)))
    masks = [
        jax.random.bernoulli(key, 1 - rate, (1, size, width))
        for key, width in zip(keys, widths, strict=False)
    ]
    return tuple(mask.astype(jnp.float32) / jnp.float32(1 - rate) for mask in masks)


_ONE_ROW = Rows(0, 1, 1)
_LAYERS = 0x1A7E5  # folded into the key of dropout for the masks between layers
_EMBEDDING = 0xE3BED  # and for those on embedded inputs


@dataclasses.dataclass(frozen=True)
class Pass:
    """What acts on the model in one pass besides parameters and inputs.

    Random factors are drawn for the whole batch and cut, so that they are the same on any number
    of devices.

    Attributes:
      carry_fns: what happens to the carry around each step.
      rows: this device's rows of the batch.
      noise_key: of the carry functions; None: at evaluation, where they act in their mean form.
      dropout_key: of dropout; None: none is dropped.
      dropout: probability of dropping a hidden unit of the decoder.
      layer_dropout: probability of dropping an output of a recurrent layer below the last.
      embedding_dropout: probability of dropping an entry of an embedded input.
    """

    carry_fns: tuple[Any, ...] = ()
    rows: Rows = _ONE_ROW
    noise_key: jax.Array | None = None
    dropout_key: jax.Array | None = None
    dropout: float = 0.0
    layer_dropout: float = 0.0
    embedding_dropout: float = 0.0

    def noise(self, steps: int) -> Any:
        """The draws of the carry functions for so many steps; None at evaluation."""
        return None if self.noise_key is None else self._noise_sample(self.noise_key, steps)

    def noise_of_layers(self, steps: int, layers: int) -> Any:
        """The same for each layer of a stack, which draw for themselves."""
        if self.noise_key is None:
            return None
        return [
            self._noise_sample(jax.random.fold_in(self.noise_key, layer), steps)
            for layer in range(layers)
        ]

    def _noise_sample(self, key: jax.Array, steps: int) -> Any:
        def draw(size: int) -> Any:
            return draw_noise(self.carry_fns, key, steps, (size,))

        axes = probed_axes(lambda size: jax.eval_shape(lambda: draw(size)), self.rows.total)
        return self.rows.of(draw(self.rows.total), axes)

    def masks(self, widths: Sequence[int]) -> tuple[jax.Array, ...]:
        """Factors on the decoder's hidden layers of these widths, one or none for each."""
        if self.dropout_key is None:
            return ()
        masks = dropout_masks(self.dropout_key, self.dropout, widths, self.rows.total)
        return self.rows.of(masks, 1)

    def layer_masks(self, steps: int, widths: Sequence[int]) -> tuple[jax.Array, ...] | None:
        """Factors ``[steps, B, width]`` on the outputs of layers below the last; None: none."""
        if self.dropout_key is None or not self.layer_dropout:
            return None
        key = jax.random.fold_in(self.dropout_key, _LAYERS)
        return tuple(
            self._mask(jax.random.fold_in(key, layer), self.layer_dropout, steps, (width,))
            for layer, width in enumerate(widths)
        )

    def embedding_mask(self, steps: int, shape: Sequence[int]) -> jax.Array | None:
        """Factors ``[steps, B, *shape]`` on embedded inputs; None: none."""
        if self.dropout_key is None or not self.embedding_dropout:
            return None
        key = jax.random.fold_in(self.dropout_key, _EMBEDDING)
        return self._mask(key, self.embedding_dropout, steps, shape)

    def _mask(self, key: jax.Array, rate: float, steps: int, shape: Sequence[int]) -> jax.Array:
        keep_prob = 1 - rate
        sample = jax.random.bernoulli(key, keep_prob, (steps, self.rows.total, *shape))
        return self.rows.of(sample.astype(jnp.float32) / jnp.float32(keep_prob), 1)


def width_of(cell: Cell) -> int:
    """The width of what a cell emits; a foreign cell's is the last field of its carry."""
    width = getattr(cell, "emitted_features", 0) or getattr(cell, "features", 0)
    return width or cell.initial((1,))[-1].shape[-1]


def _without_padding(
    inputs: jax.Array,
    valid: jax.Array | None = None,
    seq_lengths: jax.Array | None = None,
    resets: jax.Array | None = None,
) -> jax.Array:
    """Inputs ``[T, B, ...]`` with zeros in the padding: an encoder's gradient has zero times
    what stands there, which is NaN if that is."""
    del resets
    if seq_lengths is not None:
        valid = jnp.arange(len(inputs), dtype=seq_lengths.dtype)[:, None] < seq_lengths[None]
    if valid is None:
        return inputs
    mask = valid.reshape(valid.shape + (1,) * (inputs.ndim - valid.ndim))
    return jnp.where(mask, inputs, jnp.zeros_like(inputs))


EVALUATION = Pass()
"""Nothing acts but the carry functions that are given a mean form."""


def recurred(
    module: Any, inputs: jax.Array, during: Pass, carry: Any, masks: Mapping[str, Any]
) -> tuple[Any, jax.Array]:
    """What the recurrent layers of a model make of its encoded inputs.

    Args:
      module: a bound module with ``encoder`` and ``recurrent``, as ``SequenceModel`` has them.
      inputs: ``[T, B, ...]``.
      during: what acts on the model in this pass.
      carry: before the first step; None: the layers' own start.
      masks: see ``SequenceModel``.

    Returns:
      The carry after the last step, and outputs ``[T, B, F]``.
    """
    steps, recurrent = len(inputs), module.recurrent
    options: dict[str, Any] = {}
    if isinstance(recurrent, Stack):
        lower_widths = [width_of(cell) for cell in recurrent.cells[:-1]]
        options["noise"] = during.noise_of_layers(steps, len(recurrent.cells))
        options["masks"] = during.layer_masks(steps, lower_widths)
    else:
        options["noise"] = during.noise(steps)
    features = module.encoder(_without_padding(inputs, **masks))
    if (mask := during.embedding_mask(features.shape[0], features.shape[2:])) is not None:
        features = features * mask
    return recurrent(
        features,
        initial_carry=carry,
        return_carry=True,
        carry_fns=during.carry_fns,
        deterministic=options["noise"] is None,
        **options,
        **masks,
    )


class SequenceModel(nn.Module):
    """Encoder, recurrent layers, decoder.

    Attributes:
      encoder: inputs ``[T, B, ...]`` -> features ``[T, B, D]``.
      recurrent: a time-major ``recurrent_gates.RNN`` or ``Stack``, ``[T, B, D]`` -> ``[T, B, F]``.
      decoder: ``[..., F]`` -> outputs.
      outputs: how many of the last steps are decoded; None: all.
    """

    encoder: nn.Module
    recurrent: RNN | Stack
    decoder: Decoder
    outputs: int | None = None

    def __call__(
        self,
        inputs: jax.Array,
        *,
        during: Pass = EVALUATION,
        carry: Any = None,
        return_carry: bool = False,
        **masks: Any,
    ) -> Any:
        """Outputs of the last steps.

        Args:
          inputs: ``[T, B, ...]``.
          during: what acts on the model in this pass.
          carry: before the first step; default: the layers' own start.
          return_carry: return ``(carry, outputs)``.
          **masks: ``valid`` or ``resets`` ``[T, B]``, ``seq_lengths`` ``[B]``; see
            ``recurrent_gates.RNN``. What stands in the padding, NaN included, reaches neither
            values nor gradients.

        Returns:
          ``[outputs, B, ...]``, with the carry after the last step if asked.
        """
        carry, ys = recurred(self, inputs, during, carry, masks)
        last_ys = ys if self.outputs is None else ys[-self.outputs :]
        outputs = self.decoder(last_ys, *during.masks(self.decoder.widths[:-1]))
        return (carry, outputs) if return_carry else outputs

    def encoded(self, inputs: jax.Array) -> jax.Array:
        """What the first recurrent layer reads ``[T, B, D]`` of inputs without padding."""
        features: jax.Array = self.encoder(inputs)
        return features


def fresh_carry(recurrent: RNN | Stack, rows: int) -> Any:
    """The carry of recurrent layers before the first step, leaves ``[rows, F]``."""
    if isinstance(recurrent, Stack):
        return tuple(cell.initial((rows,)) for cell in recurrent.cells)
    return recurrent.cell.initial((rows,))


def recurrent_layers(cell: Cell, model: ModelSettings) -> RNN | Stack:
    """The time-major recurrent layers of the settings, all of the same cell."""
    if model.layers == 1:
        return RNN(cell, time_major=True, backend=model.backend)
    cells = [cell.clone() for _ in range(model.layers)]  # one cell would share its parameters
    return Stack(cells, time_major=True, backend=model.backend)
