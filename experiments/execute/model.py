"""The model: one core reads a program and goes on from its state to the answer.

Letters: T steps, S characters of the longest answer, B batch, F features, V characters.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from experiments.execute.programs import BLANK, Window
from experiments.training.models import EVALUATION, Decoder, Pass, TokenEncoder, recurred
from experiments.training.task import Apply
from recurrent_gates import RNN, Stack


class CharacterEncoder(nn.Module):
    """Characters ``[T, B]`` -> features float32 ``[T, B, D]``, of a blank zeros.

    Attributes:
      tokens: of characters and the blank.
    """

    tokens: TokenEncoder

    def __call__(self, characters: jax.Array) -> jax.Array:
        features = self.tokens(characters.astype(jnp.int32))
        return jnp.where((characters == BLANK)[..., None], 0, features)


class ProgramModel(nn.Module):
    """Logits of an answer's characters, from the outputs behind the program.

    Attributes:
      encoder: of the characters.
      recurrent: time-major recurrent layers.
      decoder: of the outputs that are asked for.
    """

    encoder: CharacterEncoder
    recurrent: RNN | Stack
    decoder: Decoder

    def __call__(
        self,
        tokens: jax.Array,
        first: jax.Array,
        count: int,
        *,
        during: Pass = EVALUATION,
        carry: Any = None,
        **masks: Any,
    ) -> tuple[Any, jax.Array]:
        """One pass.

        Args:
          tokens: ``[T, B]``.
          first: the first step of each row whose output is decoded, int32 ``[B]``.
          count: how many are; a step beyond the last one stands for the last.
          during: what acts on the model in this pass.
          carry: before the first step; default: the layers' own start.
          **masks: ``seq_lengths`` ``[B]``; see ``recurrent_gates.RNN``.

        Returns:
          The carry after the last step, and logits ``[count, B, V]``.
        """
        carry, ys = recurred(self, tokens, during, carry, masks)
        steps = first[None] + jnp.arange(count, dtype=jnp.int32)[:, None]
        steps = jnp.minimum(steps, len(tokens) - 1)
        outputs = jnp.take_along_axis(ys, steps[..., None], axis=0)
        return carry, self.decoder(outputs, *during.masks(self.decoder.widths[:-1]))


def logits_of(apply: Apply, params: Any, window: Window) -> jax.Array:
    """Logits ``[S, B, V]`` of the answers, each given the right characters before."""
    logits: jax.Array
    _, logits = apply(
        params,
        window.tokens,
        window.first,
        len(window.answers),
        seq_lengths=window.first + window.size,
    )
    return logits


def free_answers(apply: Apply, params: Any, window: Window) -> jax.Array:
    """The likeliest characters one after the other, each read to tell the next, ``[S, B]``.

    Args:
      apply: the model.
      params: its parameters.
      window: programs of a grammar whose answers are read.
    """
    tokens, first = window.tokens, window.first
    last_tokens = jnp.take_along_axis(tokens, first[None], axis=0)  # of the program
    carry, _ = apply(params, tokens, first, 1, seq_lengths=first)

    def step(state: Any, _: None) -> tuple[Any, jax.Array]:
        carry, token = state
        carry, logits = apply(params, token, jnp.zeros_like(first), 1, carry=carry)
        token = jnp.argmax(logits, axis=-1).astype(tokens.dtype)
        return (carry, token), token[0]

    _, answers = jax.lax.scan(step, (carry, last_tokens), None, length=len(window.answers))
    return answers
