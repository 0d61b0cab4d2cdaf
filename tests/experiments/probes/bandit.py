"""A policy that makes its own data: it names a cue that was shown some steps before.

Letters: T steps of an episode, B batch.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from experiments.settings.metrics import Metric
from experiments.training.models import Decoder, SequenceModel, TokenEncoder
from experiments.training.task import BaseTask, Outcome, Resident


class Episodes(NamedTuple):
    """What was seen, int32 ``[T, B]``, done, int32 ``[B]``, and gained, float32 ``[B]``."""

    seen: jax.Array
    actions: jax.Array
    rewards: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class BanditTask(BaseTask):
    """One of ``arms`` cues, blanks, an action: its reward is one where it is the cue.

    The environment is the cue that comes next: the action and a coin decide it.

    Attributes:
      arms: how many actions there are.
      delay: blanks between cue and action.
    """

    arms: int = 3
    delay: int = 1

    name = "bandit"
    axes = Episodes(1, 0, 0)
    stream_axes = 0
    unit = "episodes"

    @property
    def metrics(self):
        return (Metric("reward", True, 1 / self.arms, "chance"),)

    def module(self, recurrent, model):
        del model
        encoder = TokenEncoder("one_hot", self.arms + 1, 0)
        return SequenceModel(encoder, recurrent, Decoder((self.arms,)), outputs=1)

    def example(self):
        return (jnp.zeros((1, 1), jnp.int32),)

    def data(self):
        return Resident(())

    def shapes(self, rows):
        del rows
        return ()

    def start(self, fresh, data, key, rows):
        del fresh, data, key
        return rows.numbers % self.arms

    def draw(self, act, data, stream, key, step, rows):
        del data
        key = jax.random.fold_in(key, step)
        keys = jax.vmap(lambda row: jax.random.split(jax.random.fold_in(key, row)))(rows.numbers)
        episodes = self._play(act, stream, keys[:, 0])
        coins = jax.vmap(lambda key: jax.random.randint(key, (), 0, 2))(keys[:, 1])
        return episodes, (stream + episodes.actions + coins) % self.arms

    def _play(self, act, cues, keys):
        """Episodes of these cues ``[B]``, the actions drawn with keys ``[B]``."""
        blanks = jnp.full((1 + self.delay, len(cues)), self.arms, jnp.int32)
        seen = jnp.concatenate([cues[None], blanks])
        actions = jax.vmap(jax.random.categorical)(keys, act(seen)[0]).astype(jnp.int32)
        return Episodes(seen, actions, (actions == cues).astype(jnp.float32))

    def loss(self, apply, params, window, stream, train):
        """REINFORCE, with chance as the baseline."""
        del train
        log_p = jax.nn.log_softmax(apply(params, window.seen)[0])
        of_action = jnp.take_along_axis(log_p, window.actions[:, None], axis=-1)[:, 0]
        rows = len(of_action)
        total = (-(of_action * (window.rewards - 1 / self.arms)).sum(), rows)
        return Outcome(total, {"reward": (window.rewards.sum(), rows)}, stream)

    def held_out(self, data, devices):
        del data, devices
        return {"held_out": Trial(self)}


class Trial:
    """Two windows of episodes, the second with the cues that follow from the first."""

    windows = 2
    rows = 30  # eight devices cannot share them evenly

    def __init__(self, task):
        self._task = task

    def start(self, fresh, data, rows):
        return self._task.start(fresh, data, None, rows)

    def draw(self, act, data, stream, index, rows):
        return self._task.draw(act, data, stream, jax.random.key(0xBA4D), index, rows)
