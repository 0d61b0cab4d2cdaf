"""Returns, advantages and losses of actors and critics, beside rlax's numbers and loops."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from experiments.match import losses
from tests.support import assert_close

pytestmark = pytest.mark.usefixtures("x64")
GOLDEN = dict(np.load(Path(__file__).parents[1] / "golden" / "rlax_actor_critic.npz"))
EACH = [GOLDEN[name] for name in ("rewards", "discounts", "values")]
LOGITS, ACTIONS, RATIOS = GOLDEN["logits"], GOLDEN["actions"], GOLDEN["ratios"]


def test_lambda_returns_are_rlaxs():
    targets = losses.lambda_targets(*EACH, 0.7)
    assert_close(targets.returns, GOLDEN["lambda_returns"])
    assert_close(targets.advantages, GOLDEN["lambda_returns"] - GOLDEN["values"][:-1])


@pytest.mark.parametrize("steps", [1, 3, 20])
def test_n_step_returns_are_rlaxs(steps):
    targets = losses.n_step_targets(*EACH, steps)
    assert_close(targets.returns, GOLDEN[f"n_step_returns_{steps}"])
    assert_close(targets.advantages, targets.returns - EACH[2][:-1])


def test_v_trace_is_rlaxs():
    targets = losses.v_trace_targets(*EACH, RATIOS, 0.8)
    assert_close(targets.returns, GOLDEN["v_trace_returns"])
    assert_close(targets.advantages, GOLDEN["v_trace_advantages"])


def test_v_trace_on_policy_is_lambda_returns():
    on_policy = losses.v_trace_targets(*EACH, np.ones_like(RATIOS), 0.8)
    assert_close(on_policy, losses.v_trace_targets(*EACH, 1 + RATIOS, 0.8))  # it is clipped
    expected = losses.lambda_targets(*EACH, 0.8)
    assert_close(on_policy.returns, expected.returns)
    assert_close(on_policy.advantages, expected.advantages)


def test_the_loss_and_its_gradient_are_rlaxs():
    """rlax averages each of its losses; its entropy loss is minus the entropy."""
    targets = losses.Targets(GOLDEN["v_trace_returns"], GOLDEN["v_trace_advantages"])
    values = EACH[2][:-1]

    def loss(logits, values, baseline, entropy):
        costs = losses.Costs(baseline, entropy)
        return losses.actor_critic(logits, values, ACTIONS, targets, costs).mean()

    value, of_logits = jax.value_and_grad(loss)(LOGITS, values, 0.0, 0.3)
    assert_close(value, GOLDEN["policy_loss"] + 0.3 * GOLDEN["entropy_loss"])
    assert_close(of_logits, GOLDEN["grad.policy_loss"] + 0.3 * GOLDEN["grad.entropy_loss"])
    of_values = jax.grad(loss, argnums=1)(LOGITS, values, 0.4, 0.3)
    assert_close(of_values, 0.4 * (values - targets.returns) / values.size)
    check_grads(
        lambda logits: loss(logits, values, 0.4, 0.3),
        (LOGITS,),
        order=1,
        eps=1e-6,
        atol=1e-7,
        rtol=1e-7,
    )


def test_targets_are_constants():
    def loss(values):
        targets = losses.lambda_targets(*EACH[:2], values, 0.7)
        costs = losses.Costs(1.0, 0.0)
        return losses.actor_critic(LOGITS, values[:-1], ACTIONS, targets, costs).sum()

    targets = losses.lambda_targets(*EACH, 0.7)
    assert_close(jax.grad(loss)(EACH[2])[:-1], -targets.advantages)


def test_nothing_is_credited_beyond_the_end_of_an_episode():
    rewards, discounts, values = map(jnp.asarray, EACH)
    discounts = discounts.at[4, 1].set(0)
    later = rewards.at[5:, 1].add(100.0)
    after = values.at[5:, 1].add(7.0)
    for targets in (
        lambda r, v: losses.lambda_targets(r, discounts, v, 0.7),
        lambda r, v: losses.n_step_targets(r, discounts, v, 3),
        lambda r, v: losses.v_trace_targets(r, discounts, v, RATIOS, 0.8),
    ):
        changed, plain = targets(later, after), targets(rewards, values)
        assert_close(changed.returns[:5, 1], plain.returns[:5, 1])
        assert_close(changed.advantages[:5, 1], plain.advantages[:5, 1])
        assert not np.allclose(changed.returns[5:, 1], plain.returns[5:, 1])


def test_reconstructions_by_hand():
    rng = np.random.default_rng(0)
    steps, rows, pixels, actions = 3, 2, 6, 4
    given = losses.Targeted(
        rng.normal(size=(steps, rows, pixels)),
        rng.normal(size=(steps, rows, actions)),
        rng.normal(size=(steps, rows)),
    )
    target = losses.Targeted(
        rng.random((steps, rows, pixels)),
        rng.integers(0, actions, (steps, rows)),
        rng.normal(size=(steps, rows)),
    )
    p = 1 / (1 + np.exp(-given.pixels))
    expected = np.zeros((steps, rows))
    for t, b in np.ndindex(steps, rows):
        x = target.pixels[t, b]
        image = -(x * np.log(p[t, b]) + (1 - x) * np.log(1 - p[t, b])).sum()
        exponentials = np.exp(given.action[t, b])
        action = -np.log(exponentials[target.action[t, b]] / exponentials.sum())
        reward = 0.5 * (given.reward[t, b] - target.reward[t, b]) ** 2
        expected[t, b] = 50 / pixels * image + action + reward
    actual = losses.reconstruction(*jax.tree.map(jnp.asarray, (given, target)), 50.0)
    assert_close(actual, expected)


def test_the_price_of_strong_reading_by_hand():
    """A strength below two costs what two costs."""
    strengths = jnp.array([[[1.0, 2.0, 2.0], [0.0, 3.0, 7.5]]])
    assert_close(losses.strength(strengths), 5e-5 * np.array([[6.0, 12.5]]))
    slope = jax.grad(lambda strengths: losses.strength(strengths).sum())(strengths)
    assert_close(slope[0, 1], 5e-5 * np.array([0.0, 1.0, 1.0]))
