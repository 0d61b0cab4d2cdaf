"""The model: embedding, recurrent layers, softmax.

Letters: T steps, B batch, F features, V words.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from experiments.training.models import EVALUATION, Pass, TokenEncoder, recurred
from recurrent_gates import RNN, Stack


class LanguageModel(nn.Module):
    """Tokens so far -> the next one.

    Attributes:
      encoder: of the tokens.
      recurrent: time-major recurrent layers.
      softmax: a ``FullSoftmax`` or an ``AdaptiveSoftmax``.
      tied: the softmax's table is the embedding's.
    """

    encoder: TokenEncoder
    recurrent: RNN | Stack
    softmax: nn.Module
    tied: bool

    def __call__(
        self,
        tokens: jax.Array,
        targets: jax.Array | None = None,
        weights: jax.Array | None = None,
        *,
        during: Pass = EVALUATION,
        carry: Any = None,
        **masks: Any,
    ) -> tuple[Any, jax.Array]:
        """One window.

        Args:
          tokens: integers ``[T, B]``.
          targets: the tokens that follow, ``[T, B]``; None: all log-probabilities are wanted.
          weights: of the targets, ``[T, B]``.
          during: what acts on the model in this pass.
          carry: before the first step; default: the layers' own start.
          **masks: ``valid`` and ``resets`` ``[T, B]``; see ``recurrent_gates.RNN``.

        Returns:
          ``(carry, value)``: the carry after the last step, and the sum of weighted losses, or
          without targets log p ``[T, B, V]``.
        """
        carry, ys = recurred(self, tokens, during, carry, masks)
        table = self.encoder.table if self.tied else None
        if targets is None:
            log_p: jax.Array = self.softmax(ys, table)
            return carry, log_p
        if weights is None:
            weights = jnp.ones(targets.shape, ys.dtype)
        return carry, self.softmax.losses(ys, targets, weights, table)
