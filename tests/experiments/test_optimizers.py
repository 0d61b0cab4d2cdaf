"""Optimisers, clipping, weight decay, schedules and GATO's rule against their equations."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.training.optimizers import Halving, optimizer, schedule
from tests.experiments.support import tiny

START = np.array([0.5, -2.0, 1.0, 1e-4])
CURVATURE = np.array([0.3, 2.0, 1.0, 0.5])
CENTRE = np.array([1.0, 1.0, -1.0, 0.0])
RATE, STEPS = 0.1, 5


def adam(g, p, s, settings, coupled=True):
    """torch.optim.Adam, and with ``coupled=False`` torch.optim.AdamW."""
    decay = settings.get("weight_decay", 0)
    g = g + decay * p * coupled
    s["t"] = s.get("t", 0) + 1
    s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
    s["v"] = 0.999 * s.get("v", 0) + 0.001 * g**2
    m, v = s["m"] / (1 - 0.9 ** s["t"]), s["v"] / (1 - 0.999 ** s["t"])
    return m / (np.sqrt(v) + 1e-8) + decay * p * (not coupled)


def adamw(g, p, s, settings):
    return adam(g, p, s, settings, coupled=False)


def momentum(g, s, settings):
    s["b"] = settings.get("momentum", 0) * s.get("b", 0) + g
    return s["b"]


def sgd(g, p, s, settings):
    """torch.optim.SGD."""
    return momentum(g + settings.get("weight_decay", 0) * p, s, settings)


def rmsprop(g, p, s, settings):
    """torch.optim.RMSprop."""
    g = g + settings.get("weight_decay", 0) * p
    s["v"] = 0.99 * s.get("v", 0) + 0.01 * g**2
    return momentum(g / (np.sqrt(s["v"]) + 1e-8), s, settings)


BY_HAND = {"adam": adam, "adamw": adamw, "sgd": sgd, "rmsprop": rmsprop}


def by_hand(settings):
    """The parameters after each step, clipped as torch.nn.utils.clip_grad_* does."""
    p, state, path = START, {}, []
    for _ in range(STEPS):
        g = CURVATURE * (p - CENTRE)
        if "clip_norm" in settings:
            g = g * min(1, settings["clip_norm"] / np.linalg.norm(g))
        if "clip_value" in settings:
            g = np.clip(g, -settings["clip_value"], settings["clip_value"])
        p = p - RATE * BY_HAND[settings.get("optimizer", "adam")](g, p, state, settings)
        path.append(p)
    return path


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"clip_norm": 1.0},
        {"clip_value": 0.4},
        {"clip_norm": 2.0, "clip_value": 0.4},
        {"clip_norm": 1.0, "weight_decay": 0.3},
        {"optimizer": "adamw"},
        {"optimizer": "adamw", "clip_norm": 1.0, "weight_decay": 0.3},
        {"optimizer": "sgd"},
        {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.3, "clip_value": 1.0},
        {"optimizer": "rmsprop"},
        {"optimizer": "rmsprop", "momentum": 0.5, "weight_decay": 0.3},
    ],
    ids=str,
)
@pytest.mark.usefixtures("x64")
def test_an_optimiser_on_a_quadratic(settings):
    rule = optimizer(dataclasses.replace(tiny().training, **settings))
    p = jnp.asarray(START)
    state, path = rule.init(p), []
    for _ in range(STEPS):
        updates, state = rule.update(CURVATURE * (p - CENTRE), state, p)
        p = p - RATE * updates
        path.append(p)
    # A millionth of the smallest coordinate: rounding alone, in float64.
    np.testing.assert_allclose(path, by_hand(settings), rtol=1e-6, atol=1e-12)


def factors(**settings):
    """The factor on the learning rate at each step."""
    training = dataclasses.replace(tiny().training, **settings)
    factor = schedule(training)
    return [float(factor(jnp.int32(step))) for step in range(training.steps)]


def test_a_constant_rate_has_no_factor():
    assert schedule(tiny().training) is None


@pytest.mark.parametrize("warmup", [1, 4])
def test_warmup_is_linear_and_then_constant(warmup):
    expected = [min(1, (step + 1) / warmup) for step in range(7)]
    actual = factors(schedule="warmup", warmup_steps=warmup, steps=7)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


@pytest.mark.parametrize("warmup", [0, 4])
def test_cosine_falls_from_1_to_0_after_its_warmup(warmup):
    steps = 10
    expected = [
        1 / warmup + (1 - 1 / warmup) * step / warmup
        if step < warmup
        else (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2
        for step in range(steps)
    ]
    actual = factors(schedule="cosine", warmup_steps=warmup, steps=steps)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    assert actual[warmup] == 1
    assert 0 < actual[-1] < 0.1


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


@pytest.mark.parametrize("skipped", [0, 5, 7])
def test_halving_rule_without_a_loss(skipped):
    """Means of the others: 1 of four, 2 of the next four. Step 7 is one of a check."""
    losses = [1.0] * 4 + [2.0] * 4 + [0.1] * 4
    rule = Halving.initial()
    for step, loss in enumerate(losses):
        rule = rule.after(None if step == skipped else jnp.float32(loss), jnp.int32(step), 10, 40)
    assert float(rule.scale) == 0.5
    alone = Halving.initial().after(None, jnp.int32(3), 10, 40)  # nothing to take
    assert (float(alone.scale), float(alone.previous)) == (1.0, math.inf)


def test_halving_rule_counts_more_examples_than_an_int32_holds():
    first = 2**31 // 1024 - 2  # of the steps, after which a check is due at every other one
    rule = Halving.initial()._replace(previous=jnp.float32(0))
    for step in range(first, first + 4):
        rule = rule.after(jnp.float32(step), jnp.int32(step), 1024, 2048)
    assert float(rule.scale) == 0.25


def test_halving_rule_is_per_lane():
    def step(rule, loss, step):
        return rule.after(loss, step, 5, 5)

    rules = jax.tree.map(lambda x: jnp.stack([x, x]), Halving.initial())
    for t, losses in enumerate([(1.0, 2.0), (2.0, 1.0)]):
        rules = jax.vmap(step, in_axes=(0, 0, None))(rules, jnp.array(losses), jnp.int32(t))
    np.testing.assert_array_equal(rules.scale, [0.5, 1.0])
