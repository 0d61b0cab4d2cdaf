"""Adam, clipping, coupled weight decay and GATO's rule against the same by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.optimizers import Halving, adam
from tests.experiments.support import tiny

PARAMS = np.array([0.5, -2.0, 1.0])
GRADIENTS = np.array([[0.3, -4.0, 0.0], [0.1, 2.0, -1.0], [-0.2, 0.5, 3.0]])


def by_hand(clip_norm=0.0, clip_value=0.0, weight_decay=0.0):
    """torch.optim.Adam after torch.nn.utils.clip_grad_*, with rate 0.1."""
    p, m, v = PARAMS.copy(), np.zeros(3), np.zeros(3)
    for t, g in enumerate(GRADIENTS, start=1):
        if clip_norm:
            g = g * min(1, clip_norm / np.linalg.norm(g))
        if clip_value:
            g = np.clip(g, -clip_value, clip_value)
        g = g + weight_decay * p
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        p = p - 0.1 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    return p


@pytest.mark.parametrize(
    "settings",
    [{}, {"clip_norm": 1.0}, {"clip_value": 0.4}, {"clip_norm": 1.0, "weight_decay": 0.3}],
    ids=str,
)
@pytest.mark.usefixtures("x64")
def test_adam(settings):
    training = tiny().training
    optimizer = adam(dataclasses.replace(training, **settings))
    p = jnp.asarray(PARAMS)
    state = optimizer.init(p)
    for g in GRADIENTS:
        updates, state = optimizer.update(jnp.asarray(g), state, p)
        p = p - 0.1 * updates
    np.testing.assert_allclose(p, by_hand(**settings), rtol=1e-12)


def halved(losses, batch_size, every):
    rule, scales = Halving.initial(), []
    for step, loss in enumerate(losses):
        rule = rule.after(jnp.float32(loss), jnp.int32(step), batch_size, every)
        scales.append(float(rule.scale))
    return scales


def test_halving_rule():
    # Batches of 4 and a check at each 10 examples: after steps 2, 4, 7 and 9, counted from 0.
    # Means between checks: 2 (first), 4 (worse), 3 (better), 5 (worse).
    losses = [1, 2, 3, 4, 4, 1, 5, 3, 6, 4, 0]
    expected = [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25]
    assert halved(losses, batch_size=4, every=10) == expected


def test_halving_rule_keeps_the_rate_on_a_tie():
    assert halved([2, 2, 2, 2], batch_size=5, every=5) == [1, 1, 1, 1]


def test_halving_rule_is_per_lane():
    def step(rule, loss, step):
        return rule.after(loss, step, 5, 5)

    rules = jax.tree.map(lambda x: jnp.stack([x, x]), Halving.initial())
    for t, losses in enumerate([(1.0, 2.0), (2.0, 1.0)]):
        rules = jax.vmap(step, in_axes=(0, 0, None))(rules, jnp.array(losses), jnp.int32(t))
    np.testing.assert_array_equal(rules.scale, [0.5, 1.0])
