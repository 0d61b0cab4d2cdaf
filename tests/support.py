"""What several test files share: how two trees are compared, and random parameters of a cell."""

import functools
import runpy
import sys

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

TOLERANCE = 1e-10  # of float64: about a million roundings

# C is U, CR is UR and CM is UM with other values of b: with random parameters they are the same.
TWINS = {"c": "u", "cr": "ur", "cm": "um"}


def assert_close(actual, expected, tolerance=TOLERANCE):
    """Asserts max|a - b| / max|b| < tolerance for every array of two trees of the same
    structure."""
    actual_leaves, actual_tree = jax.tree.flatten(actual)
    expected_leaves, expected_tree = jax.tree.flatten(expected)
    assert actual_tree == expected_tree, f"{actual_tree} is not {expected_tree}"
    paths = [
        jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(expected)
    ]
    for path, a, b in zip(paths, actual_leaves, expected_leaves, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape, f"{path}: shape {a.shape} is not {b.shape}"
        if a.size == 0:
            continue
        assert np.isfinite(b).all(), f"{path}: the expected value is not finite"
        largest = np.abs(b).max()
        error = np.abs(a - b).max() / (largest if largest > 0 else 1.0)
        assert error < tolerance, f"{path}: relative error {error:.2e} is not below {tolerance:.0e}"


def assert_identical(actual, expected):
    """Asserts that two trees hold the same bits."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def randomize(tree, seed, scale=0.7):
    """The same tree with every float leaf drawn from N(0, scale^2), so that no gate sits at its
    start."""
    leaves, structure = jax.tree.flatten(tree)
    draw = np.random.default_rng(seed).normal
    return jax.tree.unflatten(
        structure, [jnp.asarray(draw(0.0, scale, np.shape(leaf))) for leaf in leaves]
    )


def parameters(cell, in_features, seed=0, scale=0.7):
    """Random float64 parameters for a cell, of the tree that `init_params` gives."""
    widths = tuple(in_features.items()) if isinstance(in_features, dict) else in_features
    return randomize(_shapes(cell, widths, jax.config.jax_enable_x64), seed + 1, scale)


@functools.cache
def _shapes(cell, widths, _):
    in_features = dict(widths) if isinstance(widths, tuple) else widths
    return jax.eval_shape(lambda key: cell.init_params(key, in_features), jax.random.key(0))


def state(cell, batch_shape, seed=0, scale=0.5):
    """A random float64 carry for a cell."""
    return randomize(cell.initial(batch_shape), seed + 2, scale)


def array(seed, *shape, scale=1.0):
    """A random float64 array."""
    return jnp.asarray(np.random.default_rng(seed).normal(0.0, scale, shape))


def thinned(cases, chosen, rest=pytest.mark.full, long=lambda *case: False):
    """A test's cases; those that ``chosen(*case)`` leaves out have the mark ``rest``, and of the
    others those of ``long(*case)`` have the mark ``long``."""

    def marks(case):
        if not chosen(*case):
            return (rest,)
        return (pytest.mark.long,) if long(*case) else ()

    return [pytest.param(*case, marks=marks(case)) for case in cases]


def fuzzed(test):
    """A test by hypothesis of mutated files: a few, and 2,000 of them in a full run."""
    return hypothesis.settings(hypothesis.settings.get_profile("fuzzed"))(test)


def dot(tree, cotangents):
    """The scalar product of two trees."""
    return sum(
        jnp.sum(a * b)
        for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(cotangents), strict=True)
    )


@functools.cache
def _known(**wished):
    """Those of some compiler options that this jaxlib knows."""

    def known(option):
        try:
            jax.jit(lambda x: x + 1, compiler_options=option)(1.0)
        except jax.errors.JaxRuntimeError:
            return False
        return True

    return {name: value for name, value in wished.items() if known({name: value})}


def quick_jit(function=None, **how):
    """`jax.jit` for the many programs that a test runs once: same numbers, a third of the time in
    the compiler."""
    if function is None:
        return functools.partial(quick_jit, **how)
    options = _known(xla_backend_optimization_level=0, xla_cpu_use_fusion_emitters=False)
    return jax.jit(function, compiler_options=options, **how)


def users_jit(function):
    """`jax.jit` with the compiler's own settings, which `conftest.py` changes for most tests."""
    options = _known(xla_backend_optimization_level=3, xla_cpu_use_fusion_emitters=True)
    return jax.jit(function, compiler_options=options)


def to_numpy(tree):
    return jax.tree.map(np.asarray, tree)


def count_traces(function):
    """`function` with a list that grows by one each time that JAX traces it."""
    traces = []

    @functools.wraps(function)
    def counted(*args, **kwargs):
        traces.append(1)
        return function(*args, **kwargs)

    return counted, traces


def run_as_main(patch, module, argv):
    """Runs a module as ``python -m`` does, in this process; ``patch`` is pytest's MonkeyPatch."""
    patch.setattr(sys, "argv", [module, *argv])
    for name in (module, f"{module}.__main__"):  # a test may have imported what is to run
        if not hasattr(sys.modules.get(name), "__path__"):
            patch.delitem(sys.modules, name, raising=False)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
