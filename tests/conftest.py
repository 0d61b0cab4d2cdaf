"""Settings of the whole test run: the CPU, strict promotion, float64 on request, reproducible
hypothesis, memory."""

import importlib.metadata
import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Flags that are set already stay: a worker has those of the process that started it.
# LLVM gets each program whole, not in 32 parts: on two busy cores that takes a third less time.
# Most programs run once, and take longer to compile than to run, so LLVM optimizes none. Those of
# a full run, those for accelerators, and in any run those of `tests.support.users_jit` are compiled
# as a user's are.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_cpu_parallel_codegen_split_count=1"
    if {"--full", "tests/cuda", "tests/gpu", "tests/tpu"} & set(sys.argv)
    else "--xla_cpu_parallel_codegen_split_count=1 --xla_backend_optimization_level=0"
    # jaxlib 0.12 has one kind of emitters.
    + " --xla_cpu_use_fusion_emitters=false"
    * importlib.metadata.version("jaxlib").startswith("0.10."),
)

import gc

import hypothesis
import jax
import pytest

# A trace makes many objects that live as long as it does: look for garbage less often.
gc.set_threshold(20_000, 20, 20)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

hypothesis.settings.register_profile(
    "repeatable", derandomize=True, deadline=None, max_examples=15, database=None
)
hypothesis.settings.load_profile("repeatable")


def pytest_addoption(parser):
    parser.addoption(
        "--full",
        action="store_true",
        help="test the full product of options, what takes minutes, and thousands of bad files",
    )
    parser.addoption(
        "--long",
        action="store_true",
        help="run only the tests that a default run leaves out because they take long",
    )


def pytest_configure(config):
    """How many mutated files a reader is given: see `tests.support.fuzzed`."""
    examples = 2000 if config.getoption("full") else 15
    hypothesis.settings.register_profile(
        "fuzzed", hypothesis.settings.get_profile("repeatable"), max_examples=examples
    )


def pytest_collection_modifyitems(config, items):
    """What takes minutes, and combinations of what is tested apart, are for ``--full``. What takes
    seconds is for ``--long``, which leaves out the rest; a long test that is asked for by its name,
    with ``-k`` or ``::``, or by its mark runs without it."""
    if config.getoption("full"):
        return
    by_name = (
        config.getoption("keyword")
        or "long" in config.getoption("markexpr")
        or any("::" in place for place in config.args)
    )

    def runs(item):
        if item.get_closest_marker("full"):
            return False
        long = item.get_closest_marker("long") is not None
        return long == config.getoption("long") or bool(by_name)

    left_out = [item for item in items if not runs(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if runs(item)]


def pytest_collection_finish():
    """What is imported stays: the collector need not look at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Drops what a file compiled: thousands of programs slow down the garbage collector."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="module")
def x64():
    """Gives one test module 64-bit numbers and puts the flag back after it."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.fixture
def x32():
    """Gives one test the default 32-bit numbers, inside a module that asked for 64."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", False)
    yield
    jax.config.update("jax_enable_x64", before)
