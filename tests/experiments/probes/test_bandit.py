"""A policy's own data: drawn with the model, by the number of the row."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments.machine.mesh import Rows
from tests.experiments.probes.bandit import BanditTask

TASK = BanditTask()
EVERY = Rows(0, 8, 8)
CUES = EVERY.numbers % TASK.arms


def indifferent(seen):
    return jnp.zeros((1, seen.shape[1], TASK.arms))


def test_the_policy_acts_on_what_it_sees():
    def name_the_next(seen):
        return 100 * jax.nn.one_hot((seen[:1] + 1) % TASK.arms, TASK.arms)

    episodes, after = TASK.draw(name_the_next, (), CUES, jax.random.key(0), 3, EVERY)
    np.testing.assert_array_equal(episodes.actions, (CUES + 1) % TASK.arms)
    assert not episodes.rewards.any()
    coins = (after - CUES - episodes.actions) % TASK.arms
    assert set(coins.tolist()) == {0, 1}


def test_some_rows_play_what_all_of_them_play():
    key = jax.random.key(1)
    every = TASK.draw(indifferent, (), CUES, key, 2, EVERY)
    some = TASK.draw(indifferent, (), CUES[2:5], key, 2, Rows(2, 3, 8))
    cut = Rows(2, 3, 8).of(every, (TASK.axes, TASK.stream_axes))
    jax.tree.map(np.testing.assert_array_equal, some, cut)
    assert len(set(every[0].actions.tolist())) > 1
