"""Every file in ``examples/`` runs; each asserts what it shows."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# These register types with JAX for the whole process, so each gets a process of its own.
ALONE = {"export_step.py", "nnx_export_step.py"}
LONGEST = 60  # lines


def run(path):
    """Runs an example in this process. optax's Adam is written for standard promotion."""
    with jax.numpy_dtype_promotion("standard"):
        runpy.run_path(str(path), run_name="__main__")


def run_alone(path):
    """Runs an example in a process of its own; warnings are errors there too."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout, end="")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.long
def test_example_runs_and_says_one_thing(path, capsys):
    (run_alone if path.name in ALONE else run)(path)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1, lines


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short_and_checks_itself(path):
    text = path.read_text()
    assert len(text.splitlines()) <= LONGEST
    assert "\nassert " in text
    assert text.startswith('"""')


def test_every_promised_use_has_an_example():
    uses = {
        " nn.RNN(": "flax_rnn",
        "nn.Bidirectional(": "flax_bidirectional",
        "nn.scan(": "flax_scan",
        "optax.apply_updates(": "pure_functions",
        "check_cell(": "own_cell",
        'CELLS["ur_lstm"]': "own_flax_model",
        "export.export(": "export_step",
        "FlaxCell(": "foreign_cell",
        "from_torch(": "torch_weights",
    }
    nnx_uses = {
        "nnx.RNN(cell)": "nnx_rnn",
        "nnx.Bidirectional(": "nnx_bidirectional",
        "nnx.scan(": "nnx_scan",
        "nnx.split(": "nnx_pure_functions",
        "nnx.vmap(": "nnx_own_cell",
        "nnx.Optimizer(": "nnx_own_model",
        "export.export(": "nnx_export_step",
        "FlaxCell(": "nnx_foreign_cell",
        "load_linen(": "nnx_torch_weights",
    }
    texts = {path.stem: path.read_text() for path in EXAMPLES}
    assert texts.keys() == {*uses.values(), *nnx_uses.values()}
    assert len(uses) == len(nnx_uses)  # each in linen, or without Flax, and in NNX
    for use, name in [*uses.items(), *nnx_uses.items()]:
        assert use in texts[name], f"examples/{name}.py does not show {use}"
