"""The model around a cell: encoder, recurrent layer, decoder; torch's defaults outside the cell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from recurrent_gates.initializers import torch_embedding, torch_linear_bias, torch_linear_kernel


class TokenEncoder(nn.Module):
    """Integer tokens ``[...]`` -> float32 features ``[..., D]``.

    Attributes:
      inputs: ``"embed"``, ``"one_hot"`` or ``"scalar"``: the number itself, D = 1.
      vocabulary: how many different tokens there are.
      width: D of an embedding.
    """

    inputs: str
    vocabulary: int
    width: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        if self.inputs == "embed":
            embed = nn.Embed(self.vocabulary, self.width, embedding_init=torch_embedding)
            return embed(tokens)
        if self.inputs == "one_hot":
            return jax.nn.one_hot(tokens, self.vocabulary, dtype=jnp.float32)
        return tokens[..., None].astype(jnp.float32)


class Decoder(nn.Module):
    """Linear layers with ReLU between them, ``[..., F]`` -> float32 ``[..., widths[-1]]``.

    Masks, if given, are factors on the hidden layers; see ``dropout_masks``.
    """

    widths: Sequence[int]

    @nn.compact
    def __call__(self, x: jax.Array, *masks: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32)
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
    kept = [
        jax.random.bernoulli(key, 1 - rate, (1, size, width))
        for key, width in zip(keys, widths, strict=False)
    ]
    return tuple(mask.astype(jnp.float32) / jnp.float32(1 - rate) for mask in kept)


class SequenceModel(nn.Module):
    """Encoder, recurrent layer, decoder.

    Attributes:
      encoder: inputs ``[T, B, ...]`` -> features ``[T, B, D]``.
      recurrent: a time-major ``recurrent_gates.RNN``, ``[T, B, D]`` -> ``[T, B, F]``.
      decoder: ``[..., F]`` -> outputs.
      outputs: how many of the last steps are decoded.
    """

    encoder: nn.Module
    recurrent: nn.Module
    decoder: nn.Module
    outputs: int

    def __call__(
        self,
        inputs: jax.Array,
        carry_fns: Sequence[Any] = (),
        noise: Sequence[Any] | None = None,
        *masks: jax.Array,
    ) -> jax.Array:
        """Outputs of the last steps; carry functions without noise act in their mean form.

        Args:
          inputs: ``[T, B, ...]``.
          carry_fns: see ``recurrent_gates.RNN``.
          noise: one entry for each carry function, or None.
          *masks: of the decoder.

        Returns:
          ``[outputs, B, ...]``.
        """
        ys = self.recurrent(
            self.encoder(inputs), carry_fns=carry_fns, noise=noise, deterministic=noise is None
        )
        return self.decoder(ys[-self.outputs :], *masks)
