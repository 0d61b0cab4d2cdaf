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

    class Held:
        def __init__(self, function, arguments, devices):
            self._object = call(function, arguments, devices)
            self._answers = []

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def send(self, method, **arguments):
            self._answers.append((method, arguments))

        def answer(self):
            method, arguments = self._answers.pop(0)
            try:
                return getattr(self._object, method)(**arguments)
            except Exception as error:
                raise process.ProcessError(f"{type(error).__name__}: {error}") from error

        def ask(self, method, **arguments):
            self.send(method, **arguments)
            return self.answer()

    monkeypatch.setattr(process, "call", call)
    monkeypatch.setattr(process, "Held", Held)
    before = jax.config.jax_default_matmul_precision
    yield calls
    jax.config.update("jax_default_matmul_precision", before)
