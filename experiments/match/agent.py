"""The agent: encoder, recurrent layers, and from their output a policy and a value.

Letters: T steps, B batch, A actions, P numbers of an encoded observation, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from experiments.match.environments import Environment
from experiments.match.losses import Targeted
from experiments.training.models import EVALUATION, Decoder, Pass, recurred
from recurrent_gates import RNN, Stack
from recurrent_gates.initializers import torch_linear_bias, torch_linear_kernel


class Seen(NamedTuple):
    """What an agent reads at a step, leaves ``[T, B, ...]`` or ``[B, ...]``.

    Attributes:
      observation: of the environment.
      action: the one before, int32; 0 at the first step of an episode.
      reward: the one before, float32; 0 at the first step of an episode.
      fresh: whether this is the first step of an episode.
    """

    observation: jax.Array
    action: jax.Array
    reward: jax.Array
    fresh: jax.Array


class Answer(NamedTuple):
    """What an agent says at a step.

    Attributes:
      logits: of the actions, ``[T, B, A]``.
      value: ``[T, B]``.
      recollection: what it gives back of what it saw; None: it is not asked for it.
      strengths: of the heads that read a memory, ``[T, B, R]``; None: there are none.
    """

    logits: jax.Array
    value: jax.Array
    recollection: Targeted | None = None
    strengths: jax.Array | None = None


def packed(environment: Environment, reading: Seen) -> jax.Array:
    """What an agent reads as numbers, float32 ``[..., P + A + 1]``."""
    parts = [
        environment.encode(reading.observation),
        jax.nn.one_hot(reading.action, environment.actions, dtype=jnp.float32),
        reading.reward[..., None],
    ]
    return jnp.concatenate(parts, axis=-1)


def target(environment: Environment, reading: Seen) -> Targeted:
    """What a memory should give back of a step."""
    return Targeted(environment.encode(reading.observation), reading.action, reading.reward)


class Eye(nn.Module):
    """Packed inputs -> features: the observation's code, action and reward as they are.

    The code of an image is linear, as in the public code; that of plain pixels or symbols has a
    ReLU, which is ours.

    Attributes:
      shape: rows, columns and channels of an image, or the P numbers of symbols.
      channels: of 3 x 3 convolutions with ReLU between them; none: the pixels as they are.
      width: of the observation's code.
      remembers: whether action and reward are read, too.
    """

    shape: tuple[int, ...]
    channels: Sequence[int]
    width: int
    remembers: bool

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        count = 1
        for length in self.shape:
            count *= length
        x, feedback = inputs[..., :count], inputs[..., count:]
        if self.channels:
            x = x.reshape(*x.shape[:-1], *self.shape)
            for index, channels in enumerate(self.channels):
                x = nn.relu(x) if index else x
                x = nn.Conv(channels, (3, 3))(x)
            x = x.reshape(*x.shape[:-3], -1)
        code = nn.Dense(
            self.width, kernel_init=torch_linear_kernel, bias_init=torch_linear_bias(x.shape[-1])
        )(x)
        code = code if self.channels else nn.relu(code)
        return jnp.concatenate([code, feedback if self.remembers else 0 * feedback], axis=-1)


class Recaller(nn.Module):
    """Output of the recurrent layers -> what was seen at that step, by one linear map for each.

    In the public code the image comes from a linear map, a ReLU and transposed convolutions.

    Attributes:
      pixels: P.
      actions: A.
    """

    pixels: int
    actions: int

    @nn.compact
    def __call__(self, y: jax.Array) -> Targeted:
        pixels, action, reward = (Decoder((n,))(y) for n in (self.pixels, self.actions, 1))
        return Targeted(pixels, action, reward[..., 0])


class Agent(nn.Module):
    """Policy and value from the output of recurrent layers.

    RMA's core gives its output in parts: then what was seen is recalled from its code z, and the
    value is told of that and of the logits alone, as in the public code.

    Attributes:
      encoder: of packed inputs.
      recurrent: time-major recurrent layers.
      policy: output -> logits.
      baseline: output -> value.
      recaller: output -> what was seen, or None.
      memoryless: every step starts from the layers' first state: a feed-forward agent.
    """

    encoder: Eye
    recurrent: RNN | Stack
    policy: Decoder
    baseline: Decoder
    recaller: Recaller | None
    memoryless: bool

    def __call__(
        self, inputs: jax.Array, fresh: jax.Array, *, during: Pass = EVALUATION, carry: Any = None
    ) -> tuple[Any, Answer]:
        """Some steps.

        Args:
          inputs: packed, ``[T, B, P + A + 1]``.
          fresh: which steps are the first of an episode, bool ``[T, B]``.
          during: what acts on the model in this pass.
          carry: before the first step; default: the layers' own start.

        Returns:
          The carry after the last step, and the answers of all.
        """
        resets = jnp.ones_like(fresh) if self.memoryless else fresh
        carry, y = recurred(self, inputs, during, carry, {"resets": resets})
        # Each network has a dropout of its own.
        depth = len(self.policy.widths) - 1
        all_masks = during.masks((*self.policy.widths[:-1], *self.baseline.widths[:-1]))
        masks, baseline_masks = all_masks[:depth], all_masks[depth:]
        if isinstance(y, jax.Array):
            logits, code, strengths = self.policy(y, *masks), y, None
            value = self.baseline(y, *baseline_masks)
        else:
            code, strengths = y.z, y.strengths
            logits = self.policy(jnp.concatenate([y.z, y.h, y.reads], axis=-1), *masks)
            critic_inputs = [code, jax.lax.stop_gradient(logits).astype(code.dtype)]
            value = self.baseline(jnp.concatenate(critic_inputs, axis=-1), *baseline_masks)
        recollection = None if self.recaller is None else self.recaller(code)
        return carry, Answer(logits, value[..., 0], recollection, strengths)
