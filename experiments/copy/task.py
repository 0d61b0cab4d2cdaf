"""The copy task in the three layouts of the papers.

A is ``tokens`` symbols drawn uniformly from 1..``symbols``; 0 is the blank. Letters: n tokens,
N ``length``, T steps, B batch.

===========  =================================  ============================  ============
layout       inputs                             targets                       T
===========  =================================  ============================  ============
aba          A, N blanks, A without its last    the same, one step ahead      2 n + N - 1
cue          A, N blanks, n cues                N + n blanks, A               2 n + N
delimiter    A, N - 1 blanks, one cue, n blanks N + n blanks, A               2 n + N
===========  =================================  ============================  ============

The cue is the symbol ``symbols + 1``. The copied tokens are always the last n targets.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import linen as nn

from experiments.copy.settings import CopySettings
from experiments.settings.errors import UserError
from experiments.settings.metrics import Metric
from experiments.settings.model import ModelSettings
from experiments.training.models import Decoder, SequenceModel, TokenEncoder, wide
from experiments.training.state import threefry_key
from experiments.training.supervised import Batch, SupervisedTask
from recurrent_gates import RNN, Stack

_HELD_OUT_KEY = 0x5EED  # of the held-out sequences: the same for all seeds and cells


def aba(tokens: jax.Array, length: int) -> Batch:
    """A, blanks, A; the next symbol is the target at every step (GATO, 5.2).

    Args:
      tokens: A, integers ``[n, B]``.
      length: N, the number of blanks.

    Returns:
      Inputs and targets, each ``[2 n + N - 1, B]``.
    """
    sequence = jnp.concatenate([tokens, _constant(tokens, length, 0), tokens])
    return Batch(sequence[:-1], sequence[1:])


def cue(tokens: jax.Array, length: int, symbols: int) -> Batch:
    """A, blanks, as many cues as tokens; A is due under the cues (UR-gates, 3.1).

    Args:
      tokens: A, integers ``[n, B]``.
      length: N, the number of blanks.
      symbols: the size of A's alphabet; the cue is ``symbols + 1``.

    Returns:
      Inputs and targets, each ``[2 n + N, B]``.
    """
    n = len(tokens)
    inputs = [tokens, _constant(tokens, length, 0), _constant(tokens, n, symbols + 1)]
    targets = [_constant(tokens, n + length, 0), tokens]
    return Batch(jnp.concatenate(inputs), jnp.concatenate(targets))


def delimiter(tokens: jax.Array, length: int, symbols: int) -> Batch:
    """A, blanks, one cue, blanks; A is due after the cue (h-detach, App. A; Arjovsky et al.).

    Args:
      tokens: A, integers ``[n, B]``.
      length: the delay, which the cue ends: ``length - 1`` blanks come before it.
      symbols: the size of A's alphabet; the cue is ``symbols + 1``.

    Returns:
      Inputs and targets, each ``[2 n + length, B]``.
    """
    n = len(tokens)
    inputs = [
        tokens,
        _constant(tokens, length - 1, 0),
        _constant(tokens, 1, symbols + 1),
        _constant(tokens, n, 0),
    ]
    targets = [_constant(tokens, n + length, 0), tokens]
    return Batch(jnp.concatenate(inputs), jnp.concatenate(targets))


def _constant(tokens: jax.Array, steps: int, value: int) -> jax.Array:
    return jnp.full((steps, tokens.shape[1]), value, tokens.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyTask(CopySettings, SupervisedTask):
    """The copy task.

    No training sequence has the tokens of a held-out one: such draws are drawn again.
    """

    name = "copy"

    @property
    def vocabulary(self) -> int:
        """How many different inputs there are: blank, symbols and, where there is one, the cue."""
        return self.symbols + (1 if self.layout == "aba" else 2)

    @property
    def classes(self) -> int:
        """How many different outputs; UR-gates' output has its cue's class too."""
        return self.symbols + (2 if self.layout == "cue" else 1)

    @property
    def steps(self) -> int:
        """T."""
        return 2 * self.tokens + self.length - (self.layout == "aba")

    @property
    def metrics(self) -> tuple[Metric, ...]:
        guesses, scored_count = self.tokens, self.tokens
        if self.loss_on == "all":
            scored_count = self.steps
            guesses += self.tokens - 1 if self.layout == "aba" else 0  # A itself is unpredictable
        chance = 1 / self.symbols
        metrics = {
            "copied_token_probability": Metric("copied_token_probability", True, chance, "chance"),
            "accuracy": Metric("accuracy", True, chance, "chance"),
            "loss": Metric(
                "loss", False, guesses * math.log(self.symbols) / scored_count, "baseline"
            ),
        }
        return (metrics.pop(self.headline), *metrics.values())

    def check(self) -> None:
        log_count = self.tokens * math.log(self.symbols)  # the logarithm: there may be very many
        if log_count < math.log(4 * self.held_out_sequences):
            raise UserError(
                f"--tokens={self.tokens} of --symbols={self.symbols} are too few different "
                f"sequences to hold out {self.held_out_sequences}: lower --held_out_sequences."
            )

    def module(self, recurrent: RNN | Stack, model: ModelSettings) -> nn.Module:
        return SequenceModel(
            encoder=TokenEncoder(self.inputs, self.vocabulary, model.embedding),
            recurrent=recurrent,
            decoder=Decoder((*model.decoder, self.classes)),
            outputs=self.tokens if self.loss_on == "copied" else self.steps,
        )

    def load(self) -> dict[str, jax.Array]:
        """``{"tokens": [n, held-out] int32, "codes": their sorted codes}``."""
        return self.drawn(_HELD_OUT_KEY)

    def drawn(self, seed: int) -> dict[str, jax.Array]:
        """What ``load`` returns, of sequences drawn from a seed."""
        keys = jax.random.split(threefry_key(seed), self.held_out_sequences)
        tokens = jax.vmap(self._draw, out_axes=1)(keys)
        return {"tokens": tokens, "codes": jnp.sort(_code(tokens))}

    def sets(self, loaded: dict[str, jax.Array]) -> dict[str, Batch]:
        return {"held_out": self.lay_out(loaded["tokens"])}

    def batch(
        self, loaded: dict[str, jax.Array], key: jax.Array, step: jax.Array, size: int
    ) -> Batch:
        set_key, step_key = jax.random.split(key)
        step_key = jax.random.fold_in(step_key, step)
        if self.sequences:  # drawn with replacement; a sequence is a function of its number
            numbers = jax.random.randint(step_key, (size,), 0, self.sequences)
            keys = jax.vmap(lambda number: jax.random.fold_in(set_key, number))(numbers)
        else:
            keys = jax.random.split(step_key, size)
        draw = jax.vmap(lambda key: self._draw_training(key, loaded["codes"]), out_axes=1)
        return self.lay_out(draw(keys))

    def lay_out(self, tokens: jax.Array) -> Batch:
        """The batch that copies tokens ``[n, B]``."""
        if self.layout == "aba":
            return aba(tokens, self.length)
        make = {"cue": cue, "delimiter": delimiter}[self.layout]
        return make(tokens, self.length, self.symbols)

    def score(self, outputs: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        """Scores of logits ``[last steps, B, classes]``; metrics read the copied tokens alone."""
        targets = batch.targets[-len(outputs) :]
        log_p = jax.nn.log_softmax(wide(outputs))
        target_log_p = jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
        hits = jnp.argmax(outputs, axis=-1) == targets
        copied_steps = slice(len(outputs) - self.tokens, None)
        return {
            "loss": -target_log_p.mean(axis=0),
            "copied_token_probability": jnp.exp(target_log_p[copied_steps]).mean(axis=0),
            "accuracy": hits[copied_steps].mean(axis=0),
        }

    def _draw(self, key: jax.Array) -> jax.Array:
        """One A, ``[n]``."""
        return jax.random.randint(key, (self.tokens,), 1, self.symbols + 1)

    def _draw_training(self, key: jax.Array, codes: jax.Array) -> jax.Array:
        """One A that is not held out, ``[n]``."""

        def held_out(state: tuple[jax.Array, jax.Array]) -> jax.Array:
            code = _code(state[1])
            place = jnp.minimum(jnp.searchsorted(codes, code), len(codes) - 1)
            return codes[place] == code

        def redraw(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            attempt = state[0] + 1
            return attempt, self._draw(jax.random.fold_in(key, attempt))

        first = (jnp.int32(0), self._draw(jax.random.fold_in(key, 0)))
        return jax.lax.while_loop(held_out, redraw, first)[1]


def _code(tokens: jax.Array) -> jax.Array:
    """A number for tokens ``[n, ...]``, uint32 ``[...]``: equal tokens have equal codes.

    Different tokens may share a code, rarely; a training draw that meets a held-out code by
    chance is drawn again like any other.
    """
    code = jnp.zeros(tokens.shape[1:], jnp.uint32)
    for row in tokens.astype(jnp.uint32):
        code = code * jnp.uint32(1_000_003) + row
    return code
