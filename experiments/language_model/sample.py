"""Text from a model, token by token.

Letters: V words.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.datasets.text import END
from experiments.language_model.settings import Sampling
from experiments.language_model.task import LanguageModelTask
from experiments.training.learner import Learner
from experiments.training.state import threefry_key

_KEY = 0x7E87  # of all samples: two of them differ by their models alone


def sampled_tokens(
    learner: Learner, params: Any, first: int, sampling: Sampling, key: jax.Array
) -> np.ndarray:
    """Tokens drawn one after the other, int32 ``[sampling.sample]``.

    Args:
      learner: of the model.
      params: of one lane.
      first: the token that comes before; it is not among those drawn.
      sampling: how many, and how they are drawn.
      key: a PRNG key.
    """

    def step(state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        carry, token = state
        carry, log_p = learner.apply(params, token[None, None], carry=carry)
        token = _choice(log_p[0, 0], sampling, key)
        return (carry, token), token

    keys = jax.random.split(key, sampling.sample)
    start = (learner.fresh(1), jnp.int32(first))
    _, tokens = jax.jit(lambda keys: jax.lax.scan(step, start, keys))(keys)
    return np.asarray(tokens)


def _choice(log_p: jax.Array, sampling: Sampling, key: jax.Array) -> jax.Array:
    """A token of log-probabilities ``[V]``, int32."""
    if not sampling.temperature:
        return jnp.argmax(log_p).astype(jnp.int32)
    if 0 < sampling.top_k < len(log_p):
        threshold = jax.lax.top_k(log_p, sampling.top_k)[0][-1]
        log_p = jnp.where(log_p < threshold, -jnp.inf, log_p)
    return jax.random.categorical(key, log_p / sampling.temperature).astype(jnp.int32)


def sample(learner: Learner, params: Any, sampling: Sampling) -> str:
    """A text that begins as after the end of a line."""
    task = learner.task
    assert isinstance(task, LanguageModelTask)
    words = task.corpus.words
    end = "\n" if task.level == "character" else END
    first = words.index(end) if end in words else 0
    tokens = sampled_tokens(learner, params, first, sampling, threefry_key(_KEY))
    sampled_words = [words[token] for token in tokens]
    if task.level == "character":
        return "".join(sampled_words)
    return " ".join("\n" if word == END else word for word in sampled_words).replace(" \n ", "\n")
