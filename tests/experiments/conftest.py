"""Settings of the experiments' tests."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def standard_promotion():
    """optax's Adam mixes a Python float with an integer count, which strict promotion forbids."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(autouse=True, scope="session")
def shared_compilations(tmp_path_factory):
    """Most of these tests compile the same few programs: each of them once is enough."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compilations")),
        "jax_persistent_cache_min_compile_time_secs": 0.1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
