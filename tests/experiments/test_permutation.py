"""Random permutations of which only some values are computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from experiments.training.permutation import batch_of_epoch, permuted


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9, 1293, 54_000])
def test_every_value_comes_once(count):
    found = jax.jit(permuted, static_argnums=2)(jax.random.key(0), jnp.arange(count), count)
    np.testing.assert_array_equal(np.sort(found), np.arange(count))


def test_some_indices_give_what_all_give():
    key, count = jax.random.key(1), 1293
    whole = permuted(key, jnp.arange(count), count)
    indices = jnp.array([[1292, 0], [640, 641]])
    np.testing.assert_array_equal(permuted(key, indices, count), whole[indices])
    lanes = jax.vmap(permuted, (0, None, None))(jnp.stack([key, jax.random.key(3)]), indices, count)
    np.testing.assert_array_equal(lanes[0], whole[indices])
    assert (lanes[1] != whole[indices]).all()


def test_all_pairs_of_values_are_equally_likely():
    """Of 30,000 permutations, at two neighbouring places and at two distant ones."""
    count, draws = 50, 30_000
    keys = jax.random.split(jax.random.key(2), draws)
    for places in ([0, 1], [49, 3]):
        at = jnp.array(places)
        drawn = jax.jit(jax.vmap(lambda key, at=at: permuted(key, at, count)))(keys)
        first, second = np.asarray(drawn, int).T
        pairs = np.bincount(first * count + second, minlength=count**2).reshape(count, count)
        assert (np.diag(pairs) == 0).all()
        assert stats.chisquare(pairs[~np.eye(count, dtype=bool)]).pvalue > 0.05


def test_an_epoch_has_every_example_once():
    """Of 11 examples in batches of 3 it leaves out two; the next epoch has another order."""
    batches = [batch_of_epoch(jax.random.key(0), jnp.int32(step), 3, 11) for step in range(6)]
    epochs = np.asarray(batches).reshape(2, 9)
    for epoch in epochs:
        assert len(set(epoch.tolist())) == 9 and epoch.max() < 11
    assert (epochs[0] != epochs[1]).any()
