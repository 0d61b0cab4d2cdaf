"""Ragged examples: the padding is nothing, and every step weighs the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.settings.cells import build_cell
from experiments.training.models import recurrent_layers
from tests.experiments.probes import support
from tests.experiments.probes.ragged import RaggedTask
from tests.support import assert_identical

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def learnt():
    """By padding: data, the first parameters, those after two steps, and the scores of these."""
    results = {}
    for padding in ("nan", "0", "7"):
        config = support.config(RaggedTask(padding=padding), seeds=1)
        with support.ready(config) as learner:
            first = jax.device_get(learner.initial())
            state, scores = learner.evaluate(learner.advance(learner.place(first), 0, 2))
            results[padding] = (learner.data, first.params, jax.device_get(state.params), scores)
    return results


def test_the_padding_is_not_the_same(learnt):
    of_nan, of_seven = (learnt[padding][0]["loaded"]["train"].inputs for padding in ("nan", "7"))
    assert np.array_equal(np.isnan(of_nan), np.asarray(of_seven) == 7)
    assert 0.2 < np.isnan(of_nan).mean() < 0.8


@pytest.mark.parametrize("padding", ["nan", "7"])
def test_values_and_gradients_do_not_depend_on_the_padding(padding, learnt):
    assert_identical(learnt[padding][1:], learnt["0"][1:])
    before, after = learnt[padding][1:3]
    moved = jax.tree.map(lambda a, b: np.any(a != b), before, after)
    assert all(jax.tree.leaves(moved))  # the encoder too


def test_every_step_of_any_example_weighs_the_same(learnt):
    data, _, params, scores = learnt["nan"]
    config = support.config(RaggedTask())
    layers = recurrent_layers(build_cell(config.model), config.model)
    model = config.task.module(layers, config.model)
    held_out = jax.device_get(data["sets"]["held_out"])
    apply = jax.jit(lambda inputs: model.apply({"params": params}, inputs)[..., 0])
    errors = []
    for length in np.unique(held_out.lengths):
        of_length = held_out.lengths[0] == length
        outputs = apply(jnp.asarray(held_out.inputs[:length, of_length]))
        errors += [np.ravel(outputs - held_out.targets[:length, of_length])]
    assert len(errors) > 2
    expected = np.mean(np.concatenate(errors).astype(np.float64) ** 2)
    np.testing.assert_allclose(scores["loss"], expected, rtol=1e-6)
