"""The agent: windows that line up with its play, what it learns, what it is told."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from PIL import Image

import recurrent_gates as rg
from experiments.machine.mesh import Rows
from experiments.match import losses, render
from experiments.match.agent import Agent, Answer, Eye, packed, target
from experiments.match.environments import CountRecall, RepeatPrevious, TMaze
from experiments.match.settings import MATCH
from experiments.settings.errors import UserError
from experiments.settings.resolver import resolve
from experiments.training.learner import Learner
from experiments.training.models import Decoder, Pass
from experiments.training.state import Purpose, key_of
from tests.experiments.probes.support import match as tiny
from tests.support import quick_jit, randomize

EVERY = Rows(0, 8, 8)


@functools.cache
def started(**settings):
    """A learner, its first state, its model, and a function that draws windows with it."""
    learner = Learner(tiny(seeds=1, **settings))
    learner.load()
    state = learner.initial()

    @quick_jit
    def draw(stream, step):
        act = functools.partial(learner.apply, state.params)
        return learner.task.draw(act, (), stream, jax.random.key(1), step, EVERY)

    return learner, state, quick_jit(functools.partial(learner.apply, state.params)), draw


def windows(count, **settings):
    _, state, _, draw = started(**settings)
    stream = state.stream
    for step in range(count):
        window, stream = draw(stream, jnp.int32(step))
        yield window


def replayed(played, fresh, settings):
    """Logits of a window in one go."""
    learner, _, apply, _ = started(**settings)
    inputs = packed(learner.task.environment, played.seen)
    return apply(inputs, fresh, carry=played.carry)[1].logits


def step_by_step(played, settings):
    """The same, one step at a time; a new episode begins with the layers' own start."""
    learner, _, apply, _ = started(**settings)
    inputs = packed(learner.task.environment, played.seen)
    carry, first, logits = played.carry, learner.fresh(8), []
    for now, fresh in zip(inputs, played.seen.fresh, strict=True):
        carry = jax.tree.map(
            lambda new, old, fresh=fresh: jnp.where(
                fresh.reshape(-1, *(1,) * (old.ndim - 1)), new, old
            ),
            first,
            carry,
        )
        carry, answer = apply(now[None], jnp.zeros((1, 8), bool), carry=carry)
        logits.append(answer.logits[0])
    return jnp.stack(logits)


def assert_lines_up(window, fresh, settings):
    """Replay and acting agree in all logits, and the first importance ratios are 1."""
    logits = replayed(window, fresh, settings)
    np.testing.assert_allclose(logits, step_by_step(window, settings), rtol=0, atol=1e-6)
    log_p = losses.log_probability(logits[:-1], window.actions)
    np.testing.assert_allclose(np.exp(log_p - window.log_p), 1, rtol=0, atol=1e-6)


@pytest.mark.parametrize("cell", ["ur_lstm", "gato2", "ur_rma"])
@pytest.mark.long
def test_a_window_replayed_is_the_window_played(cell):
    """Windows of 5 steps of episodes of 9, which end within them."""
    settings = {"cell": cell, "window": 5}
    ends = 0
    for window in windows(4, **settings):
        ends += window.ends.sum()
        assert_lines_up(window, window.seen.fresh, settings)
        if window.ends[:-1].any():  # a reset that comes one step late or early is noticed
            for shift in (1, -1):
                planted = jnp.roll(window.seen.fresh, shift, axis=0)
                with pytest.raises(AssertionError):
                    assert_lines_up(window, planted, settings)
    assert ends == 2 * 8


@pytest.mark.long
def test_what_is_seen_is_what_was_done_before():
    previous = None
    for window in windows(4, window=5):
        seen = window.seen
        ends = np.asarray(window.ends)
        np.testing.assert_array_equal(seen.fresh[1:], ends)
        np.testing.assert_array_equal(seen.action[1:], np.where(ends, 0, window.actions))
        np.testing.assert_array_equal(seen.reward[1:], np.where(ends, 0, window.rewards))
        if previous is not None:  # the last step of a window is the first of the next
            jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[-1], b[0]), previous, seen)
        previous = seen


@pytest.mark.long
def test_training_tells_the_rewards_of_the_episodes_that_ended():
    """A T-maze, whose episodes are longer than a window: delay costs, the last step is rewarded."""
    maze = {"challenge": "t_maze", "length": 3, "walking": True, "window": 2, "batch_size": 8}
    learner = Learner(resolve(MATCH, "small", maze | {"steps": 12, "hidden_size": 8}))
    learner.prepare()
    state, task = learner.initial(), learner.task

    @quick_jit
    def drawn(state, step):
        act = functools.partial(learner.apply, state.params)
        key = key_of(learner.lanes.each[0], Purpose.DATA)
        return task.draw(act, (), state.stream, key, step, EVERY)[0]

    whole = np.zeros(8)
    told = {"last_phase_reward": 0.0, "return": 0.0}
    episodes = 0
    for step in range(12):
        window = jax.device_get(drawn(state, jnp.int32(step)))
        for rewards, ends in zip(window.rewards, window.ends, strict=True):
            whole += rewards
            told["return"] += whole[ends].sum()
            told["last_phase_reward"] += rewards[ends].sum()
            episodes += ends.sum()
            whole[ends] = 0
        state = learner.advance(state, step, step + 1)
    assert episodes > 16
    assert told["return"] < told["last_phase_reward"]
    for name, (total, count) in state.score_totals.items():
        assert count == episodes
        np.testing.assert_allclose(total, told[name], rtol=1e-6)
    assert set(state.score_totals) == set(told)
    settled, _ = learner.evaluate(state)
    assert settled.score_totals == dict.fromkeys(told, (0, 0))


@pytest.mark.long
def test_some_rows_play_what_all_of_them_play():
    learner, state, _, draw = started(window=5)
    act = functools.partial(learner.apply, state.params)
    some = Rows(2, 3, 8)
    every = draw(state.stream, jnp.int32(0))
    part = quick_jit(lambda stream: learner.task.draw(act, (), stream, jax.random.key(1), 0, some))(
        some.of(state.stream, 0)
    )
    axes = (learner.task.axes, learner.task.stream_axes)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), part, some.of(every, axes)
    )
    assert len(np.unique(every[0].actions)) == 4


def test_the_loss_of_a_window_by_hand():
    """Discounts stop at the end of an episode; what comes after the window is its last value."""
    settings = {"window": 5, "discount": 0.8, "return_decay": 0.5, "entropy_cost": 0.2}
    task = tiny(**settings).task
    window = list(windows(2, window=5))[1]
    rng = np.random.default_rng(0)
    logits, values = rng.normal(size=(6, 8, 4)), rng.normal(size=(6, 8))

    def apply(params, inputs, fresh, carry):
        np.testing.assert_array_equal(fresh, window.seen.fresh)
        assert carry is window.carry
        return None, Answer(jnp.asarray(logits, jnp.float32), jnp.asarray(values, jnp.float32))

    total, weight = task.loss(apply, None, window, (), True).loss
    expected = 0.0
    later = values[-1]
    for t in reversed(range(5)):
        discount = np.where(window.ends[t], 0, 0.8)
        later = window.rewards[t] + discount * (0.5 * values[t + 1] + 0.5 * later)
        log_p = logits[t] - np.log(np.exp(logits[t]).sum(axis=-1, keepdims=True))
        chosen = np.take_along_axis(log_p, np.asarray(window.actions[t])[:, None], axis=-1)[:, 0]
        gain = later - values[t]
        entropy = -(np.exp(log_p) * log_p).sum(axis=-1)
        expected += (-chosen * gain + 0.4 * gain**2 / 2 - 0.2 * entropy).sum()
    assert window.ends.any()
    assert weight == 40
    np.testing.assert_allclose(total, expected, rtol=1e-5)


def test_what_is_recalled_and_strong_reading_are_priced():
    """Of the steps of the window, without what is read after it."""
    task = tiny(window=5, reconstruction=True).task
    window = list(windows(2, window=5))[1]
    seen = target(task.environment, window.seen)
    rng = np.random.default_rng(0)

    def drawn(*shape, scale=1.0):
        return jnp.asarray(rng.normal(0, scale, (6, 8, *shape)), jnp.float32)

    recalled = losses.Targeted(drawn(seen.pixels.shape[-1]), drawn(4), drawn())
    parts = {"recollection": recalled, "strengths": drawn(3, scale=1e5)}
    plain = Answer(drawn(4), drawn())

    def loss(answer):
        return task.loss(lambda *_, **__: (None, answer), None, window, (), True).loss[0]

    priced = losses.reconstruction(recalled, seen, task.image_cost)
    priced += losses.strength(parts["strengths"])
    more = loss(plain._replace(**parts)) - loss(plain)
    np.testing.assert_allclose(more, priced[:-1].sum(), rtol=1e-5)
    reading = loss(plain._replace(strengths=parts["strengths"])) - loss(plain)
    np.testing.assert_allclose(reading, losses.strength(parts["strengths"])[:-1].sum(), rtol=1e-4)


def test_steps_draw_other_actions():
    _, state, _, draw = started(window=5)
    first, second = (draw(state.stream, jnp.int32(step))[0].actions for step in (0, 1))
    assert (first != second).any(axis=1).all()


class Parts(nn.Module):
    """Gives its inputs as each part of RMA's output."""

    def __call__(self, inputs, **_):
        return None, rg.RMAOutput(inputs, inputs, inputs, inputs)


class Through(nn.Module):
    """Gives its inputs."""

    def __call__(self, inputs, **_):
        return None, inputs


def test_policy_and_value_drop_units_of_their_own():
    eye = Eye((5,), (), 6, remembers=True)
    agent = Agent(eye, Through(), Decoder((32, 1)), Decoder((32, 1)), None, memoryless=False)
    inputs, fresh = jax.random.normal(jax.random.key(0), (2, 3, 7)), jnp.zeros((2, 3), bool)
    params = randomize(jax.eval_shape(agent.init, jax.random.key(1), inputs, fresh), 0)["params"]
    params = params | {"baseline": params["policy"]}
    during = Pass(rows=Rows(0, 3, 3), dropout_key=jax.random.key(2), dropout=0.5)
    for one, alike in ((Pass(), True), (during, False)):
        _, answer = agent.apply({"params": params}, inputs, fresh, during=one)
        assert jnp.array_equal(answer.logits[..., 0], answer.value) == alike


def test_rmas_value_is_told_of_the_logits_and_does_not_train_them():
    eye = Eye((5,), (), 6, remembers=True)
    agent = Agent(eye, Parts(), Decoder((4,)), Decoder((1,)), None, memoryless=False)
    inputs, fresh = jax.random.normal(jax.random.key(0), (2, 3, 7)), jnp.zeros((2, 3), bool)
    params = randomize(jax.eval_shape(agent.init, jax.random.key(1), inputs, fresh), 0)["params"]

    @quick_jit
    @jax.value_and_grad
    def value(params):
        return agent.apply({"params": params}, inputs, fresh)[1].value.sum()

    told, gradient = value(params)
    for leaf in jax.tree.leaves(gradient["policy"]):
        np.testing.assert_array_equal(leaf, 0)
    assert np.abs(gradient["encoder"]["Dense_0"]["kernel"]).max() > 0
    other = params | {"policy": jax.tree.map(lambda leaf: 2 * leaf, params["policy"])}
    assert abs(value(other)[0] - told) > 1e-3


def test_each_pass_is_an_update_and_v_trace_corrects_for_it():
    """The second of two passes: ratios that have left 1 count in v-trace alone."""
    learner, state, *_ = started(window=5)
    window = list(windows(2, window=5))[1]
    other = window._replace(log_p=window.log_p + 0.5)  # then, actions were likelier
    costs = {}
    for returns in ("v_trace", "lambda"):
        task = tiny(window=5, returns=returns, passes=2).task
        loss = quick_jit(
            lambda window, task=task: task.loss(learner.apply, state.params, window, (), True).loss[
                0
            ]
        )
        costs |= {(returns, "same"): loss(window), (returns, "other"): loss(other)}
    np.testing.assert_allclose(costs["v_trace", "same"], costs["lambda", "same"], rtol=1e-5)
    assert costs["lambda", "other"] == costs["lambda", "same"]
    assert abs(costs["v_trace", "other"] - costs["v_trace", "same"]) > 1e-4
    counted = []

    def descend(learned, window):
        counted.append(window)
        return learned + 1, "told"

    assert task.update(descend, 0, "window", None) == (2, "told")
    assert counted == ["window"] * 2


def scores(act, **settings):
    """Means of an evaluation of a policy, and what its episodes gave in the last phase."""
    task = tiny(**settings).task
    (episodes,) = task.held_out((), 1).values()
    rows, sums, gains = Rows(0, episodes.rows, episodes.rows), {}, set()
    carry = jnp.zeros((rows.count, 1))
    play = quick_jit(lambda index: episodes.draw(act, (), carry, index, rows)[0])
    for index in range(episodes.windows):
        score = play(jnp.int32(index))
        gains |= set(score.last_phase.tolist())
        for name, (total, weight) in task.loss(None, None, score, (), False).sums.items():
            before = sums.get(name, (0, 0))
            sums[name] = (before[0] + total, before[1] + weight)
    return {name: float(total / weight) for name, (total, weight) in sums.items()}, gains


def northward(strength):
    """A policy that goes to the middle door, more or less surely."""

    def act(inputs, fresh, carry):
        logits = strength * jax.nn.one_hot(jnp.zeros(inputs.shape[:2], jnp.int32), 4)
        return carry, Answer(logits, logits[..., 0])

    return act


@pytest.mark.long
def test_an_evaluation_plays_whole_episodes_and_no_more():
    """Greedy and sure: the middle door, which is right in a third of the episodes."""
    settings = {"held_out_episodes": 200, "apples": 22, "distractor_steps": 8}
    (sure, _), (unsure, _) = (scores(northward(x), **settings) for x in (100.0, 0.1))
    for name in ("last_phase_reward", "return"):
        assert sure[name] == sure[f"greedy_{name}"] == unsure[f"greedy_{name}"]
    assert abs(sure["last_phase_reward"] - 10 / 3) < 4 * 4.7 / 200**0.5
    assert unsure["last_phase_reward"] < sure["last_phase_reward"] / 2
    apples = sure["return"] - sure["last_phase_reward"]
    assert apples == pytest.approx(10)  # two of 5 on the way north
    # After a touch an episode is over soon, and the row would play another one.
    settings = {"rules": "dmlab", "reward_steps": 60, "held_out_episodes": 200}
    many, gains = scores(northward(0.1), **settings)
    assert many["last_phase_reward"] == many["return"]
    assert gains == {0.0, 1.0, 10.0}
    # Each of them has ended at a door by then, and more time gives none of them a second reward.
    ended, later = (
        scores(northward(0.1), **{**settings, "reward_steps": steps})[0] for steps in (400, 500)
    )
    assert ended["return"] == later["return"] > many["return"]


def test_a_feed_forward_agent_sees_the_present_alone():
    window = list(windows(2, window=5))[1]
    other = window.seen._replace(
        action=(window.seen.action + 1) % 4, reward=window.seen.reward + 1, fresh=~window.seen.fresh
    )
    changed = window._replace(seen=other, carry=jax.tree.map(lambda x: x + 1, window.carry))
    for memoryless in (True, False):
        logits = [
            replayed(one, one.seen.fresh, {"window": 5, "memoryless": memoryless})
            for one in (window, changed)
        ]
        assert np.array_equal(*logits) == memoryless


@pytest.mark.long
def test_reconstructions_train_the_recurrent_layers():
    settings = {"cell": "ur_rma", "window": 5, "reconstruction": True}
    learner, state, *_ = started(**settings)
    window = next(windows(1, **settings))
    task = dataclasses.replace(learner.task, entropy_cost=0.0, baseline_cost=0.0)

    def loss(params, image_cost):
        one = dataclasses.replace(task, image_cost=image_cost)
        return one.loss(learner.apply, params, window, (), True).loss[0]

    def norm(tree):
        return sum(float(jnp.abs(leaf).sum()) for leaf in jax.tree.leaves(tree))

    gradient = quick_jit(jax.grad(loss))
    with_, without = (gradient(state.params, jnp.float32(cost)) for cost in (50, 0))
    assert norm(with_["recurrent"]) > 2 * norm(without["recurrent"])
    assert norm(without["recaller"]) > 0  # actions and rewards


def test_the_code_of_an_image_is_linear():
    """The first numbers of what the eye hands on; without convolutions they have a ReLU."""
    seen = jax.random.normal(jax.random.key(0), (1, 4, 4 * 5 * 3 + 2))
    for channels, least in (((2,), -0.1), ((), 0.0)):
        eye = Eye((4, 5, 3) if channels else (60,), channels, 6, remembers=True)
        code = eye.init_with_output(jax.random.key(1), seen)[0][..., :6]
        assert (code.min() < least) if channels else (code.min() == least)


@pytest.mark.long
def test_rows_left_out_of_a_memory_change_nothing():
    """Over an episode of nine steps: of 1,000 rows those that were never written compete."""
    learner, *_ = started(cell="ur_rma", rows_read=7)
    inner = learner._module.recurrent.cell
    assert (inner.memory_slots, inner.top_k) == (9 + 7, 7)
    whole = inner.clone(memory_slots=1000, parent=None)
    xs = 3 * jax.random.normal(jax.random.key(0), (9, 2, 64))
    params = whole.init_params(jax.random.key(1), 64)
    few, many, cut = (
        rg.unroll(cell, params, xs)[1].reads
        for cell in (inner.clone(parent=None), whole, inner.clone(memory_slots=9, parent=None))
    )
    np.testing.assert_allclose(few, many, atol=1e-6)
    assert np.abs(cut - many).max() > 1e-2


@pytest.mark.long
def test_an_agent_learns_what_it_must_remember():
    settings = {
        "challenge": "t_maze",
        "length": 3,
        "hidden_size": 16,
        "code": 8,
        "decoder": (),
        "learning_rates": (1e-2,),
        "held_out_episodes": 128,
    }
    learner = Learner(resolve(MATCH, "small", settings))
    learner.load()
    learner.prepare()
    scores = learner.final_scores(learner.advance(learner.initial(), 0, 100))
    assert scores["greedy_last_phase_reward"] > 0.95
    assert scores["last_phase_reward"] == scores["return"] > 0.9


# Settings


def test_the_papers_protocols():
    rows = {
        "ur_fig7": ("passive_match", 0, 0.96),
        "ur_fig8": ("active_match", 10, 0.998),
        "ur_fig10": ("active_match", 10, 0.96),
    }
    for protocol, (challenge, apples, discount) in rows.items():
        task = resolve(MATCH, protocol, {}).task
        assert (task.challenge, task.apples, task.discount) == (challenge, apples, discount)
        assert task.environment.phases == (75, 450, 75)
        assert (task.environment.best, task.environment.chance) == (10.0, 3.25)
    assert resolve(MATCH, "ur_fig8", {}).task.apple_rewards == (1.0,)
    assert resolve(MATCH, "ur_fig10", {}).task.apple_rewards == (5.0,)
    for protocol in (*rows, "small"):
        for cell in ("rma", "ur_rma", "lstm"):
            task = resolve(MATCH, protocol, {"cell": cell}).task
            assert task.reconstruction is cell.endswith("rma")
    noisy = {"returns": "v_trace", "dropout": 0.1}  # does not act while an agent does
    assert resolve(MATCH, "small", noisy).task.returns == "v_trace"
    public = resolve(MATCH, "pycolab", {})
    assert public.task.environment.phases == (15, 90, 15)
    assert (public.task.span, public.training.batch_size) == (120, 16)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"challenge": "t_maze", "apples": 3}, "--apples has no effect with --challenge=t_maze"),
        ({"length": 5}, "--length has no effect with --challenge=passive_match: it needs"),
        ({"challenge": "repeat_previous", "lag": 52}, "it must be below that"),
        ({"challenge": "t_maze", "channels": (4,)}, "t_maze shows symbols: give --channels=none"),
        ({"returns": "v_trace"}, "--returns=v_trace has no effect with --passes=1"),
        ({"memoryless": True, "detach_prob": 0.5}, "--detach_prob has no effect with --memoryless"),
        ({"memoryless": True, "damp_prob": 0.5}, "--damp_prob has no effect with --memoryless"),
        ({"n_steps": 5}, "--n_steps has no effect with --returns=lambda"),
        ({"image_cost": 5.0}, "--image_cost has no effect with --reconstruction=False"),
        ({"apples": 3, "distractor_steps": 0}, "--apples=3 has no effect with --distractor_steps"),
        ({"detach_query": True}, "--detach_query is not for match"),
        ({"apples": 23}, "--apples must be at least 0 and at most 22, got 23"),
        ({"apples": 3, "apple_rewards": ()}, "--apple_rewards must name at least one value"),
        ({"discount": 1.5}, "--discount is a probability in"),
        ({"rules": "3d"}, "--rules is one of pycolab, dmlab, got 3d"),
    ],
)
def test_what_cannot_be_is_one_sentence(settings, sentence):
    with pytest.raises(UserError) as error:
        resolve(MATCH, "small", settings)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_a_second_layer_of_rma_is_refused():
    with pytest.raises(UserError, match="give --layers=1 and one direction, got --layers=2"):
        Learner(tiny(cell="ur_rma", layers=2))


# Films


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("film.png", "must be the name of a file that ends in .gif"), ("no/film.gif", "no directory")],
)
def test_a_film_that_cannot_be_is_refused_before_training(name, sentence, tmp_path, program):
    workdir = f"--workdir={tmp_path / 'run'}"
    code, _, error = program("experiments.match", f"--render={tmp_path / name}", workdir)
    assert (code, error.count("\n")) == (2, 1)
    assert sentence in error
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_a_film_shows_an_episode(tmp_path):
    learner, state, *_ = started(window=5)
    shown = render.pictures(learner, state.params)
    assert len(shown) == 10  # nine steps
    assert {one.shape for one in shown} == {(7, 11, 3)}
    colour = shown[0][1, 5]  # the wall at the corridor's end
    assert sorted(colour.tolist()) == [0, 0, 255]
    doors = {tuple(shown[3][1, column].tolist()) for column in (2, 5, 8)}
    assert doors == {(127, 0, 0), (0, 127, 0), (0, 0, 127)}  # out of sight
    path = tmp_path / "film.gif"
    render.render(learner, state.params, path)
    with Image.open(path) as film:
        assert film.size == (11 * 24, 7 * 24)
        assert 1 < film.n_frames <= 10  # equal neighbours are one


@pytest.mark.parametrize("game", [TMaze(4), RepeatPrevious(), CountRecall()])
def test_every_challenge_has_pictures(game):
    observation, state = game.reset(jax.random.key(0))
    before = game.picture(state, np.asarray(observation))
    turn = game.step(jax.random.key(0), state, jnp.int32(0))
    after = game.picture(turn.state, np.asarray(turn.observation))
    assert before.dtype == np.uint8
    assert before.shape == after.shape
    assert game != TMaze(4) or (before != after).any()
