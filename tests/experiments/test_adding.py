"""The adding problem: sequences, baseline, the paper's counts, what trains and what does not."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.adding import task as adding
from experiments.adding.settings import ADDING
from experiments.settings.errors import UserError
from experiments.settings.resolver import resolve
from experiments.training import loop
from experiments.training.learner import Learner
from experiments.training.optimizers import Halving

TINY = {
    "cell": "gato",
    "hidden_size": 6,
    "length": 5,
    "held_out_sequences": 40,
    "decoder": (16,),
    "batch_size": 8,
    "steps": 4,
    "eval_every": 2,
}


def tiny(**settings):
    return resolve(ADDING, "small", TINY | settings)


SIZE = 1000


@functools.cache
def draw():
    task = tiny().task
    return jax.jit(lambda seed, step: task.batch((), jax.random.key(seed), step, SIZE))


def drawn(seed=0, step=0):
    """A training batch of five steps."""
    return jax.device_get(draw()(seed, step))


def test_lay_out():
    numbers = jnp.array([[0.5, 0.1], [0.25, 0.2], [0.75, 0.3], [0.125, 0.4]])
    batch = adding.lay_out(numbers, jnp.array([1, 0]), jnp.array([2, 3]))
    np.testing.assert_array_equal(batch.inputs[..., 0], numbers)
    np.testing.assert_array_equal(batch.inputs[..., 1].T, [[0, 1, 1, 0], [1, 0, 0, 1]])
    np.testing.assert_array_equal(batch.targets, np.float32([[1.0, 0.5]]))


def test_a_mark_in_each_half_and_everywhere_in_it():
    marks = drawn().inputs[..., 1]
    assert set(np.unique(marks)) == {0, 1}
    np.testing.assert_array_equal(marks[:2].sum(axis=0), np.ones(SIZE))
    np.testing.assert_array_equal(marks[2:].sum(axis=0), np.ones(SIZE))
    pairs = {(a, b) for a, b in np.stack(np.nonzero(marks.T)[1:]).reshape(-1, 2).tolist()}
    assert pairs == set(itertools.product(range(2), range(2, 5)))


def test_targets_are_the_sums_of_the_marked_numbers():
    inputs, targets, _ = drawn()
    for column, target in zip(np.moveaxis(inputs, 1, 0), targets[0], strict=True):
        a, b = column[column[:, 1] == 1, 0]
        assert target == np.float32(a + b)


def test_numbers_are_uniform():
    numbers = np.ravel([drawn(step=step).inputs[..., 0] for step in range(10)])
    assert 0 <= numbers.min() <= numbers.max() < 1
    counts = np.bincount((numbers * 10).astype(int), minlength=10)
    chi_squared = ((counts - 5000) ** 2 / 5000).sum()
    assert chi_squared < 27.9  # the 0.1% point of 9 degrees of freedom


def grid(n):
    """All pairs of n midpoints of [0, 1] as sequences of two numbers."""
    points = (jnp.arange(n) + 0.5) / n
    numbers = jnp.stack([jnp.repeat(points, n), jnp.tile(points, n)])
    return adding.lay_out(numbers, jnp.zeros(n * n, int), jnp.ones(n * n, int))


@pytest.mark.parametrize("constant", [1.0, 0.9])
def test_the_baseline_is_the_best_constant(constant):
    # The variance of n midpoints is (1 - 1 / n^2) / 12: the sum over a grid is exact, and its
    # limit is the integral.
    n, task = 50, tiny().task
    scores = task.score(jnp.full((1, n * n, 1), constant), grid(n))
    (baseline,) = {metric.baseline for metric in task.metrics}
    expected = baseline * (1 - 1 / n**2) + (1 - constant) ** 2
    assert baseline == 1 / 6
    assert np.asarray(scores["mse"], np.float64).mean() == pytest.approx(expected, rel=1e-6)
    np.testing.assert_array_equal(scores["mse"], scores["loss"])


def test_the_oracle_scores_zero():
    batch = drawn()
    scores = tiny().task.score(batch.targets[..., None], batch)
    np.testing.assert_array_equal(scores["mse"], np.zeros(SIZE))


def test_held_out_set_is_the_same_for_all_seeds_and_is_not_trained_on():
    first, second = (tiny(**run).task.load() for run in ({}, {"seed": 9, "cell": "gru"}))
    np.testing.assert_array_equal(first.inputs, second.inputs)
    held_out = set(np.asarray(first.inputs[0, :, 0]).tolist())
    for seed, step in itertools.product(range(3), range(3)):
        assert not held_out & set(drawn(seed, step).inputs[0, :, 0].tolist())


def test_batches_differ_by_step_and_seed():
    batches = [drawn(seed, step).inputs for seed in (0, 1) for step in (0, 1)]
    for a, b in itertools.combinations(batches, 2):
        assert not np.array_equal(a[..., 0], b[..., 0])
    np.testing.assert_array_equal(drawn().inputs, batches[0])


@pytest.mark.parametrize(
    ("cell", "count"), [("gato", 43_264), ("gru", 792_576), ("lstm", 1_056_768)]
)
def test_the_counts_of_the_gato_paper(cell, count):
    config = resolve(ADDING, "gato", {"cell": cell})
    described = loop.describe(config)
    assert described["recurrent_parameters"] == count
    assert described["total_parameters"] == count + (512 + 1) * 256 + 256 + 1


def test_settings_are_the_papers():
    gato = resolve(ADDING, "gato", {}).resolved()
    assert (gato["task"]["length"], gato["model"]["hidden_size"]) == (100, 512)
    assert (gato["model"]["decoder"], gato["model"]["lambda_"]) == ([256], 0.7)
    training = gato["training"]
    assert training["learning_rates"] == [4e-3]
    assert training["batch_size"] * training["steps"] == 200_000
    assert (training["halve_every"], training["clip_norm"]) == (10_000, 0)
    ur = resolve(ADDING, "ur", {}).resolved()
    assert (ur["task"]["length"], ur["model"]["hidden_size"], ur["model"]["decoder"]) == (
        *(2000, 256, []),
    )
    assert (ur["training"]["learning_rates"], ur["training"]["clip_norm"]) == ([1e-3], 1)
    assert ur["training"]["halve_every"] == 0


def test_the_rate_is_checked_twenty_times():
    # 200,000 examples hold 20 checks; the first has nothing to compare with.
    training = resolve(ADDING, "gato", {}).training

    def step(rule, number):
        rule = rule.after(number, number.astype(int), training.batch_size, training.halve_every)
        return rule, rule.scale

    losses = jnp.arange(training.steps, dtype=jnp.float32)  # ever worse
    scales = np.asarray(jax.lax.scan(step, Halving.initial(), losses)[1])
    halved = np.flatnonzero(scales[1:] < scales[:-1]) + 1
    passed = [-(-10_000 * check // 64) - 1 for check in range(2, 21)]
    np.testing.assert_array_equal(halved, passed)
    assert scales[-1] == 2.0**-19


@functools.cache
def before_and_after(**settings):
    learner = Learner(tiny(**settings))
    learner.prepare()
    before = jax.device_get(learner.initial().params)
    return before, jax.device_get(learner.advance(learner.initial(), 0, 3).params)


def unchanged(**settings):
    """Names of the leaves that three steps leave as they were."""
    before, after = before_and_after(**settings)
    pairs = zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True)
    return {
        jax.tree_util.keystr(path, simple=True, separator=".")
        for (path, old), new in pairs
        if np.array_equal(old, new)
    }


@pytest.mark.long
def test_training_changes_every_parameter_but_those_of_an_ablation():
    assert unchanged() == set()
    assert unchanged(s_update="replace") == set()
    names = {f"recurrent.cell.g.{name}" for name in ("out_bias", "out_kernel")}
    names |= {f"recurrent.cell.g.{name}.s" for name in ("bias", "kernel", "recurrent_kernel")}
    assert unchanged(s_update="zero") == names  # s stays 0: all that makes it learns nothing
    runs = [{}, {"s_update": "replace"}, {"s_update": "zero"}]
    kernels = [before_and_after(**run)[1]["decoder"]["Dense_0"]["kernel"] for run in runs]
    for a, b in itertools.combinations(kernels, 2):
        assert not np.array_equal(a, b)


def test_too_short_a_sequence_is_an_error():
    with pytest.raises(UserError, match="--length must be at least 2 and below 2147483648, got 1"):
        tiny(length=1)
