"""An agent as a task: its own play is the data, its environment and memory are the stream.

Letters: T steps of a window, B batch.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from experiments.machine.mesh import Rows
from experiments.match import losses
from experiments.match.agent import Agent, Answer, Eye, Recaller, Seen, packed, target
from experiments.match.environments import Environment, build
from experiments.match.environments.base import Turn, restarted
from experiments.match.environments.repeat_previous import DECK
from experiments.match.settings import MatchSettings
from experiments.settings.errors import UserError
from experiments.settings.metrics import Metric
from experiments.settings.model import CarrySettings, ModelSettings
from experiments.training.models import Decoder
from experiments.training.state import threefry_key
from experiments.training.task import Apply, BaseTask, Fresh, Outcome, Resident, Total
from recurrent_gates import RMA, RNN, Stack

_HELD_OUT_KEY = 0x3A7C8  # of the held-out episodes: the same for all seeds and cells


class Rewards(NamedTuple):
    """Sums of rewards since an episode's first step, leaves ``[B]`` or ``[T, B]``, float32.

    Attributes:
      whole: of all steps.
      last_phase: of the steps of the last phase.
    """

    whole: jax.Array
    last_phase: jax.Array


class Stream(NamedTuple):
    """What goes on from window to window, leaves ``[B, ...]``.

    Attributes:
      environment: the environments' states.
      seen: what the agent reads next.
      carry: of the recurrent layers.
      rewards: of the episodes that go on.
    """

    environment: Any
    seen: Seen
    carry: Any
    rewards: Rewards


class Play(NamedTuple):
    """Steps that were played, leaves ``[T, B]``.

    Attributes:
      seen: what the agent read.
      action: what it did, int32.
      log_p: how likely that was, float32.
      turn: what followed.
      rewards: of the episode so far, this step's included.
    """

    seen: Seen
    action: jax.Array
    log_p: jax.Array
    turn: Turn
    rewards: Rewards


class Window(NamedTuple):
    """What an update learns from.

    Attributes:
      seen: what the agent read, and after the last step what it reads next, ``[T + 1, B, ...]``.
      actions: int32 ``[T, B]``.
      log_p: how likely they were when they were taken, ``[T, B]``.
      rewards: ``[T, B]``.
      ends: which steps ended an episode, bool ``[T, B]``.
      carry: of the recurrent layers before the first step, leaves ``[B, ...]``.
      sums: of the rewards of an episode so far, ``[T, B]``.
    """

    seen: Any
    actions: Any
    log_p: Any
    rewards: Any
    ends: Any
    carry: Any
    sums: Any


class Score(NamedTuple):
    """Rewards of episodes ``[B]``, all and those of the last phase, and whether actions were
    greedy."""

    episode: jax.Array
    last_phase: jax.Array
    greedy: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatchTask(MatchSettings, BaseTask):
    """Actor and critic on many copies of an environment at once."""

    name = "match"
    axes = Window(1, 1, 1, 1, 1, 0, 1)
    stream_axes = 0
    train_scores = ("last_phase_reward", "return")
    unit = "frames"

    @property
    def metrics(self) -> tuple[Metric, ...]:
        chance = self.environment.chance  # says nothing of apples, nor of what steps cost
        baseline_names = {"last_phase_reward": "chance", "return": "chance of the last phase alone"}
        return tuple(
            Metric(prefix + name, True, chance, baseline_name)
            for prefix in ("", "greedy_")
            for name, baseline_name in baseline_names.items()
        )

    @property
    def units_per_row(self) -> float:
        return float(self.span)

    @functools.cached_property
    def environment(self) -> Environment:
        """What is played."""
        return build(self)

    @property
    def span(self) -> int:
        """T."""
        return self.window or self.environment.steps

    def check(self) -> None:
        """Raises ``UserError`` on settings that cannot be."""
        if self.challenge == "repeat_previous" and self.lag >= DECK * self.decks:
            raise UserError(
                f"--lag={self.lag} asks for a card before the first of the {DECK * self.decks} "
                f"that --decks={self.decks} has; it must be below that."
            )
        if self.apples and not self.apple_rewards:
            raise UserError("--apple_rewards must name at least one value.")
        if self.channels and self.environment.symbols:
            raise UserError(
                f"--channels is for images, and {self.challenge} shows symbols: give "
                "--channels=none."
            )
        if self.apples and self.challenge.endswith("match") and not self.distractor_steps:
            raise UserError(
                f"--apples={self.apples} has no effect with --distractor_steps=0, which leaves no "
                "time to eat them: give --apples=0."
            )

    def check_beside(self, model: ModelSettings, carry: CarrySettings) -> None:
        """Raises ``UserError`` on V-trace between two policies that are one, and where there is no
        gradient through the state to detach or to damp."""
        if self.memoryless and (carry.detach_prob or carry.damp_prob):
            flag = "detach_prob" if carry.detach_prob else "damp_prob"
            raise UserError(
                f"--{flag} has no effect with --memoryless: no gradient passes from step to step."
            )
        # No dropout or zoneout acts while an agent acts.
        noise = (model.dropout, model.layer_dropout, carry.zoneout_c, carry.zoneout_h)
        if self.returns == "v_trace" and self.passes == 1 and not any(noise):
            raise UserError(
                "--returns=v_trace has no effect with --passes=1: the policy that acted is the "
                "one that learns."
            )

    # The model.

    def module(self, recurrent: RNN | Stack, model: ModelSettings) -> nn.Module:
        observation = jax.eval_shape(self.environment.reset, jax.random.key(0))[0]
        pixels = jax.eval_shape(self.environment.encode, observation).shape[-1]
        shape = observation.shape if self.channels else (pixels,)
        actions = self.environment.actions
        if isinstance(recurrent, RNN) and isinstance(recurrent.cell, RMA):
            recurrent = recurrent.clone(cell=self._remembering(recurrent.cell))
        elif model.cell.endswith("rma"):
            raise UserError(
                "The RMA is an agent's whole core, whose controller has two layers of its own: "
                f"give --layers=1 and one direction, got --layers={model.layers}."
            )
        return Agent(
            encoder=Eye(shape, self.channels, self.code, not self.memoryless),
            recurrent=recurrent,
            policy=Decoder((*model.decoder, actions)),
            baseline=Decoder((*model.decoder, 1)),
            recaller=Recaller(pixels, actions) if self.reconstruction else None,
            memoryless=self.memoryless,
        )

    def _remembering(self, core: RMA) -> RMA:
        """A core that gives its output in parts, with no more rows than make a difference.

        Those that an episode can fill, and as many as a head reads: rows that were never written
        compete with those that were, and are all alike.
        """
        rows = min(core.memory_slots, self.environment.steps + core.top_k)
        return core.clone(emit_parts=True, memory_slots=rows)

    def example(self) -> tuple[jax.Array, jax.Array]:
        inputs = jax.eval_shape(
            lambda key: packed(self.environment, self._first(key[None])[0]), jax.random.key(0)
        )
        return jnp.zeros((1, *inputs.shape), inputs.dtype), jnp.ones((1, 1), bool)

    # The stream.

    def data(self) -> Resident:
        return Resident(())

    def shapes(self, rows: int) -> tuple[()]:
        del rows
        return ()

    def start(self, fresh: Fresh, data: Any, key: jax.Array, rows: Rows) -> Stream:
        del data
        reading, states = self._first(_of_rows(key, rows))
        zeros = jnp.zeros(rows.count, jnp.float32)
        return Stream(states, reading, fresh(rows.count), Rewards(zeros, zeros))

    def draw(
        self, act: Apply, data: Any, stream: Stream, key: jax.Array, step: jax.Array, rows: Rows
    ) -> tuple[Window, Stream]:
        del data
        keys = jax.random.split(jax.random.fold_in(key, step), self.span)

        def play(stream: Stream, key: jax.Array) -> tuple[Stream, Play]:
            return self.play(act, stream, _of_rows(key, rows), jnp.bool_(False))

        next_stream, plays = jax.lax.scan(play, stream, keys)
        readings = jax.tree.map(
            lambda steps, last: jnp.concatenate([steps, last[None]]), plays.seen, next_stream.seen
        )
        turn = plays.turn
        window = Window(
            readings,
            plays.action,
            plays.log_p,
            turn.reward,
            turn.done,
            stream.carry,
            plays.rewards,
        )
        return window, next_stream

    def play(
        self, act: Apply, stream: Stream, keys: jax.Array, greedy: jax.Array
    ) -> tuple[Stream, Play]:
        """A step of every row.

        Args:
          act: the model.
          stream: before the step.
          keys: one for each row.
          greedy: take the likeliest action instead of drawing one.

        Returns:
          The stream after it, in which an episode that ended has begun anew, and the step.
        """
        action_keys, step_keys, reset_keys = jax.vmap(lambda key: jax.random.split(key, 3))(keys).T
        carry, answer = self.answer(act, stream)
        logits = answer.logits[0]
        sample = jax.vmap(jax.random.categorical)(action_keys, logits)
        action = jnp.where(greedy, logits.argmax(axis=-1), sample).astype(jnp.int32)
        turn = jax.vmap(self.environment.step)(step_keys, stream.environment, action)
        observation, state = restarted(
            self.environment, reset_keys, turn.done, turn.observation, turn.state
        )
        reading = Seen(
            observation,
            jnp.where(turn.done, 0, action),
            jnp.where(turn.done, 0, turn.reward),
            turn.done,
        )
        log_p = losses.log_probability(logits, action)
        last_phase_reward = jnp.where(turn.info["last_phase"], turn.reward, 0)
        rewards = jax.tree.map(jnp.add, stream.rewards, Rewards(turn.reward, last_phase_reward))
        next_rewards = jax.tree.map(lambda total: jnp.where(turn.done, 0, total), rewards)
        next_stream = Stream(state, reading, carry, next_rewards)
        return next_stream, Play(stream.seen, action, log_p, turn, rewards)

    def answer(self, act: Apply, stream: Stream) -> tuple[Any, Answer]:
        """What the model says now: the carry after it, and answers ``[1, B, ...]``."""
        window = jax.tree.map(lambda leaf: leaf[None], stream.seen)
        result: tuple[Any, Answer] = act(
            packed(self.environment, window), window.fresh, carry=stream.carry
        )
        return result

    def _first(self, keys: jax.Array) -> tuple[Seen, Any]:
        """The first step of new episodes, and their states."""
        observation, states = jax.vmap(self.environment.reset)(keys)
        rows = len(observation)
        zeros = jnp.zeros(rows, jnp.int32), jnp.zeros(rows, jnp.float32)
        return Seen(observation, *zeros, jnp.ones(rows, bool)), states

    # What is learnt.

    def loss(self, apply: Apply, params: Any, window: Any, stream: Any, train: bool) -> Outcome:
        if not train:
            return Outcome((jnp.float32(0), 1), self._sums(window), stream)
        readings: Seen = window.seen
        _, answer = apply(
            params, packed(self.environment, readings), readings.fresh, carry=window.carry
        )
        logits = answer.logits[:-1]
        log_p = losses.log_probability(logits, window.actions)
        ratios = jnp.exp(log_p - window.log_p)
        targets = self._targets(window, answer.value, ratios)
        costs = losses.Costs(self.baseline_cost, self.entropy_cost)
        cost = losses.actor_critic(logits, answer.value[:-1], window.actions, targets, costs)
        if answer.recollection is not None:
            recall_cost = losses.reconstruction(
                answer.recollection, target(self.environment, readings), self.image_cost
            )
            cost += recall_cost[:-1]
        if answer.strengths is not None:
            cost += losses.strength(answer.strengths[:-1])
        total = (cost.sum(), cost.size)
        episode_count = window.ends.sum(dtype=jnp.float32)
        episode, last_phase = (jnp.where(window.ends, x, 0).sum() for x in window.sums)
        scores = {
            "last_phase_reward": (last_phase, episode_count),
            "return": (episode, episode_count),
        }
        return Outcome(total, scores, stream)

    def _targets(self, window: Window, values: jax.Array, ratios: jax.Array) -> losses.Targets:
        discounts = jnp.where(window.ends, 0, jnp.float32(self.discount))
        if self.returns == "n_step":
            return losses.n_step_targets(window.rewards, discounts, values, self.n_steps)
        if self.returns == "v_trace":
            return losses.v_trace_targets(
                window.rewards, discounts, values, ratios, self.return_decay
            )
        return losses.lambda_targets(window.rewards, discounts, values, self.return_decay)

    def update(self, descend: Any, learned: Any, window: Window, key: jax.Array) -> tuple[Any, Any]:
        """Some updates on a window."""
        del key
        learned, descent = descend(learned, window)
        for _ in range(self.passes - 1):
            learned, descent = descend(learned, window)
        return learned, descent

    # Evaluation.

    def held_out(self, data: Any, devices: int) -> dict[str, _Episodes]:
        del data, devices
        return {"held_out": _Episodes(self)}

    def _sums(self, score: Score) -> dict[str, Total]:
        """Totals and weights of one window of episodes, which were won in one of two ways."""
        sums: dict[str, Total] = {}
        for prefix, mask in (("", ~score.greedy), ("greedy_", score.greedy)):
            weight = jnp.where(mask, jnp.float32(len(score.episode)), 0)
            sums[f"{prefix}last_phase_reward"] = (
                jnp.where(mask, score.last_phase.sum(), 0),
                weight,
            )
            sums[f"{prefix}return"] = (jnp.where(mask, score.episode.sum(), 0), weight)
        return sums


class _Episodes:
    """Fixed episodes, played twice: with actions that are drawn, and with the likeliest ones."""

    windows = 2

    def __init__(self, task: MatchTask) -> None:
        self._task, self.rows = task, task.held_out_episodes

    def start(self, fresh: Fresh, data: Any, rows: Rows) -> Any:
        """The layers' own start, for the shape of a carry: every episode begins anew."""
        del data
        return fresh(rows.count)

    def draw(
        self, act: Apply, data: Any, stream: Any, index: jax.Array, rows: Rows
    ) -> tuple[Score, Any]:
        task, greedy = self._task, index == 1
        start_key, play_key = jax.random.split(threefry_key(_HELD_OUT_KEY))
        first_stream = task.start(lambda _: stream, data, start_key, rows)

        def play(state: Any, key: jax.Array) -> tuple[Any, None]:
            current, running, rewards = state
            current, step = task.play(act, current, _of_rows(key, rows), greedy)
            rewards = jax.tree.map(
                lambda new, old: jnp.where(running, new, old), step.rewards, rewards
            )
            return (current, running & ~step.turn.done, rewards), None

        keys = jax.random.split(play_key, task.environment.steps)
        state = (first_stream, jnp.ones(rows.count, bool), first_stream.rewards)
        (_, _, rewards), _ = jax.lax.scan(play, state, keys)
        return Score(rewards.whole, rewards.last_phase, greedy), stream


def _of_rows(key: jax.Array, rows: Rows) -> jax.Array:
    """A key for each row, by its number: the same on any number of devices."""
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(rows.numbers)
