"""Comparisons run in this process, and leave its settings as they were."""

import importlib

import jax
import pytest

from benchmarks import process


@pytest.fixture
def in_process(monkeypatch):
    """Measurements without processes of their own; the list collects (function, arguments)."""
    calls = []

    def call(function, arguments, devices):
        calls.append((function, arguments, devices))
        module, _, name = function.rpartition(".")
        try:
            return getattr(importlib.import_module(module), name)(**arguments)
        except Exception as error:
            raise process.ProcessError(f"{type(error).__name__}: {error}") from error

    monkeypatch.setattr(process, "call", call)
    before = jax.config.jax_default_matmul_precision
    yield calls
    jax.config.update("jax_default_matmul_precision", before)
