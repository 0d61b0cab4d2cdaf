"""Softmaxes over large vocabularies against the plain one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.language_model.softmax import (
    AdaptiveSoftmax,
    FullSoftmax,
    chunk_rows,
    cross_entropy,
)
from experiments.machine.words import Words
from experiments.settings.axes import VOCAB
from experiments.training.models import TokenEncoder
from tests.support import assert_close

N, F, V = 23, 5, 11


@pytest.fixture(autouse=True)
def in_float64(x64):
    """All of it: a million roundings are 1e-10 then."""


def drawn(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def rows(words=V):
    """Hidden states, targets, and weights of which some are zero: whole chunks, too."""
    targets = jnp.asarray(np.random.default_rng(1).integers(0, words, N), jnp.int32)
    weights = jnp.asarray(np.r_[np.zeros(9), np.linspace(0.1, 2, N - 9)])
    return drawn(N, F), targets, weights


def plain(h, table, bias, targets, weights):
    log_p = jax.nn.log_softmax(h @ table.T + bias[None])
    return -(weights * log_p[jnp.arange(N), targets]).sum()


@pytest.mark.parametrize("chunk", [1, 4, 8, N, 100])
def test_chunks_have_the_value_and_the_gradients_of_the_whole(chunk):
    h, targets, weights = rows()
    parameters = (h, drawn(V, F, seed=2), drawn(V, seed=3))
    actual, expected = (
        jax.value_and_grad(lambda h, w, b, fn=fn: jnp.sin(fn(h, w, b)), argnums=(0, 1, 2))(
            *parameters
        )
        for fn in (
            lambda h, w, b: cross_entropy(h, w, b, targets, weights, chunk),
            lambda h, w, b: plain(h, w, b, targets, weights),
        )
    )
    assert_close(actual, expected)
    assert_close(
        cross_entropy(*parameters, targets, weights, chunk), plain(*parameters, targets, weights)
    )


@pytest.mark.parametrize(("parts", "chunk"), [(2, N), (3, 8), (4, 100)])
def test_parts_of_the_words_have_the_value_and_the_gradients_of_all(parts, chunk):
    """Eleven words on so many devices, of which the last one's rows are not all words."""
    h, targets, weights = rows()
    parameters = (h, drawn(V, F, seed=2), drawn(V, seed=3))
    words = Words(V, parts)
    short = words.count * parts - V

    def of_parts(leaf):
        filled = jnp.pad(leaf, [(0, short)] + [(0, 0)] * (leaf.ndim - 1), constant_values=9)
        return filled.reshape(parts, words.count, *leaf.shape[1:])

    def on_a_device(table, bias):
        def loss(h, table, bias):
            return jnp.sin(cross_entropy(h, table, bias, targets, weights, chunk, words))

        return jax.value_and_grad(loss, argnums=(0, 1, 2))(h, table, bias)

    value, (d_h, *d_parts) = jax.vmap(on_a_device, axis_name=VOCAB)(*map(of_parts, parameters[1:]))
    expected, (expected_h, *expected_parts) = jax.value_and_grad(
        lambda h, w, b: jnp.sin(plain(h, w, b, targets, weights)), argnums=(0, 1, 2)
    )(*parameters)
    np.testing.assert_allclose(value, np.full(parts, expected), rtol=1e-10)
    assert_all_close(d_h, jnp.broadcast_to(expected_h, d_h.shape))
    for actual, whole in zip(d_parts, expected_parts, strict=True):
        actual = actual.reshape(-1, *whole.shape[1:])
        assert_all_close(actual[:V], whole)
        np.testing.assert_array_equal(actual[V:], 0)  # no words learn nothing


def assert_all_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-10 * np.abs(expected).max())


@pytest.mark.parametrize("parts", [2, 3])
def test_parts_of_an_embedding_are_those_of_all(parts):
    """What they embed together, and each one's gradient: not once for each device."""
    table, tokens = drawn(V, F), jnp.asarray([[0, 3, 10], [5, 3, 7]])
    weights = drawn(2, 3, F, seed=1)
    words = Words(V, parts)
    filled = jnp.pad(table, [(0, words.count * parts - V), (0, 0)])
    encoder = TokenEncoder("embed", V, F, parts=parts)

    def embedded(table):
        params = {"params": {"Embed_0": {"embedding": table}}}
        return jnp.sin((weights * encoder.apply(params, tokens)).sum())

    value, gradient = jax.vmap(jax.value_and_grad(embedded), axis_name=VOCAB)(
        filled.reshape(parts, words.count, F)
    )
    expected, expected_gradient = jax.value_and_grad(
        lambda table: jnp.sin((weights * table[tokens]).sum())
    )(table)
    np.testing.assert_allclose(value, np.full(parts, expected), rtol=1e-10)
    assert_all_close(gradient.reshape(-1, F)[:V], expected_gradient)


def test_no_more_than_a_chunk_of_logits_exists():
    """Temporary memory of value and gradient, beside the gradients themselves."""
    count, words, features = 4096, 20_000, 8
    chunk = 64
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((count, features), jnp.float32),
            ((words, features), jnp.float32),
            ((words,), jnp.float32),
            ((count,), jnp.int32),
            ((count,), jnp.float32),
        )
    ]
    step = jax.jit(
        jax.value_and_grad(lambda *arrays: cross_entropy(*arrays, chunk), argnums=(0, 1, 2))
    )
    temporary = step.lower(*shapes).compile().memory_analysis().temp_size_in_bytes
    logits = 4 * words  # bytes of a row
    assert temporary < 4 * chunk * logits  # logits, their exponentials, the gradient
    assert temporary < count * logits / 16


def test_a_chunk_has_some_sixteen_million_logits():
    assert chunk_rows(10_000) == 1677
    assert chunk_rows(267_735) == 64


@pytest.mark.parametrize("width", [F, 7])
def test_a_tied_table_learns_from_both_ends(width):
    h, targets, weights = rows()
    table = drawn(V, width, seed=4)
    softmax = FullSoftmax(V, F, tied=True, width=width)
    params = softmax.init(jax.random.key(0), h, table)
    params = jax.tree.map(lambda leaf: drawn(*leaf.shape, seed=5), params)

    def loss(params, table):
        return softmax.apply(params, h, targets, weights, table, method="losses")

    def expected(params, table):
        leaves = params["params"]
        features = h @ leaves["projection"] if width != F else h
        return plain(features, table, leaves["bias"], targets, weights)

    grad = jax.value_and_grad(loss, argnums=(0, 1))(params, table)
    assert_close(grad, jax.value_and_grad(expected, argnums=(0, 1))(params, table))


def adaptive_log_p(params, h, cutoffs, words):
    """log p of every word, word by word."""
    first, columns = cutoffs[0], []
    head = h @ params["head"].T
    head = head - jax.nn.logsumexp(head, axis=-1, keepdims=True)
    for word in range(words):
        cluster = sum(word >= low for low in cutoffs)
        if not cluster:
            columns.append(head[:, word])
            continue
        inside = h @ params[f"projection_{cluster}"] @ params[f"tail_{cluster}"].T
        inside = inside - jax.nn.logsumexp(inside, axis=-1, keepdims=True)
        columns.append(head[:, first + cluster - 1] + inside[:, word - cutoffs[cluster - 1]])
    return jnp.stack(columns, axis=1)


@pytest.mark.parametrize("cutoffs", [(4,), (3, 7), (1, 2, 10)])
@pytest.mark.long
def test_adaptive_is_its_definition(cutoffs):
    h, targets, weights = rows()
    softmax = AdaptiveSoftmax(V, F, cutoffs)
    params = softmax.init(jax.random.key(0), h, None)
    widths = [params["params"][f"projection_{k}"].shape[1] for k in range(1, len(cutoffs) + 1)]
    assert widths == [max(1, F // 4**k) for k in range(1, len(cutoffs) + 1)]
    params = jax.tree.map(lambda leaf: drawn(*leaf.shape, seed=6), params)
    log_p = softmax.apply(params, h, None)
    assert_close(log_p, adaptive_log_p(params["params"], h, cutoffs, V))
    assert_close(jnp.exp(log_p).sum(axis=1), jnp.ones(N))

    def loss(params, h):
        return softmax.apply(params, h, targets, weights, None, method="losses")

    def expected(params, h):
        log_p = adaptive_log_p(params["params"], h, cutoffs, V)
        return -(weights * log_p[jnp.arange(N), targets]).sum()

    actual = jax.value_and_grad(loss, argnums=(0, 1))(params, h)
    assert_close(actual, jax.value_and_grad(expected, argnums=(0, 1))(params, h))
