"""What the tests of the experiments share: tiny configs, states on disk, binaries as processes."""

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from absl.flags import Error

from experiments.copy.settings import COPY
from experiments.settings.errors import UserError
from experiments.settings.resolver import resolve
from recurrent_gates.backends.native import library

ROOT = Path(__file__).parents[2]
COMPILED = tempfile.mkdtemp()  # programs that the binaries compile, instead of the user's cache
atexit.register(shutil.rmtree, COMPILED, ignore_errors=True)

TINY = {
    "cell": "gru",
    "hidden_size": 6,
    "tokens": 3,
    "symbols": 10,
    "length": 4,
    "held_out_sequences": 40,
    "embedding": 3,
    "decoder": (16,),
    "batch_size": 8,
    "learning_rates": (1e-2,),
    "steps": 4,
    "eval_every": 2,
}


def tiny(**settings):
    """A config that trains in no time."""
    return resolve(COPY, "small", TINY | settings)


def leaves(workdir, step):
    """The arrays of a checkpoint by name."""
    path = Path(workdir).absolute() / "checkpoints" / str(step) / "default"
    with ocp.StandardCheckpointer() as checkpointer:
        return {name: np.asarray(x) for name, x in checkpointer.restore(path)["state"].items()}


def assert_same_bits(actual, expected):
    """Two checkpoints hold the same names and bits."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].tobytes() == value.tobytes(), name


def assert_drawn(counts, probabilities, draws):
    """How often each outcome came in independent draws is within five standard errors of what is
    expected."""
    p = np.asarray(probabilities, float)
    errors = np.abs(np.asarray(counts) / draws - p) / np.sqrt(p * (1 - p) / draws)
    assert errors.max() < 5, errors


def refusal(function, *arguments):
    """The one line with which a function refuses its arguments."""
    with pytest.raises((Error, UserError)) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def own_caches(monkeypatch, folder):
    """Caches that are empty but for the kernels, which take seconds to compile."""
    own = folder / "recurrent_gates"
    own.mkdir(parents=True)
    for kernels in library._directory().glob("*.so"):
        (own / kernels.name).symlink_to(kernels)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))


def command(*flags, module="experiments.copy"):
    """A command line of a binary."""
    return [sys.executable, "-m", module, *flags]


def environment(devices=1):
    """The environment of a process that sees so many CPU devices."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags,
        "JAX_COMPILATION_CACHE_DIR": COMPILED,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def run_binary(*flags, module="experiments.copy", devices=1):
    """Runs a binary to its end."""
    return _run(command(*flags, module=module), devices)


def run_source(source, devices=1):
    """Runs a program of Python to its end."""
    return _run([sys.executable, "-c", source], devices)


def _run(command, devices):
    return subprocess.run(
        command, cwd=ROOT, env=environment(devices), capture_output=True, text=True, check=False
    )


def one_sentence(error):
    """Whether what was raised says one sentence."""
    text = str(error.value)
    return "\n" not in text and text.endswith(".")
