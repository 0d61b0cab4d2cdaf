"""Settings of the experiments' tests."""

import os
import signal
import types

import jax
import pytest
from matplotlib.figure import Figure

from experiments.machine import processes
from experiments.training import loop
from experiments.training.learner import Learner
from tests.support import run_as_main


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


@pytest.fixture(scope="module")
def learners():
    """Runs of one config share what is traced and compiled; the number of steps is an argument."""
    made = {}

    def learner(config):
        one = config.hash()
        if one not in made:
            made[one] = Learner(config)
        return made[one]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "Learner", learner)
        yield


@pytest.fixture(autouse=True)
def last_words(monkeypatch):
    """A process has its last words once, but each of these tests stands for one of its own."""
    always = types.SimpleNamespace(acquire=lambda blocking: True)
    monkeypatch.setattr(processes, "_last_words", always)


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved, in order; they are written, too."""
    figures = []
    save = Figure.savefig

    def keep(figure, *arguments, **options):
        figures.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


@pytest.fixture
def program(monkeypatch, capsys):
    """A module and flags -> exit code, standard output and standard error of that binary, in this
    process."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for name in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # put back afterwards

    def run(module, *argv):
        with pytest.raises(SystemExit) as ended:
            run_as_main(monkeypatch, module, argv)
        return (ended.value.code or 0, *capsys.readouterr())

    return run
