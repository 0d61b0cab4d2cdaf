"""The training step of every binary, compiled for TPUs: `make test-tpu`; see `test_compile.py`.

Each is compiled for one kind of chip, in turn, and with ``--full`` for every topology. What is
printed is the table of docs/TPU.md.
"""

import itertools

import jax

from experiments.catalog import EXPERIMENTS
from experiments.settings.resolver import resolve
from experiments.training import ahead

TOPOLOGIES = ("v4:2x2x1", "v5e:2x2", "v5e:4x4", "v5p:2x2x1", "v6e:2x2")
# As published, where the size is one for a TPU: (binary, protocol, settings).
PUBLISHED = [
    ("copy", "gato", {}),
    ("pixels", "ur", {}),
    ("language_model", "gato", {"dataset": "ptb"}),
    ("language_model", "ur", {"dataset": "wikitext103"}),
    ("execute", "ur", {}),
]
CASES = [(one.name, "small", {}) for one in EXPERIMENTS] + PUBLISHED


def pytest_generate_tests(metafunc):
    if "topology" in metafunc.fixturenames:
        pairs = list(itertools.product(CASES, TOPOLOGIES))
        if not metafunc.config.getoption("full"):
            pairs = [(case, TOPOLOGIES[n % len(TOPOLOGIES)]) for n, case in enumerate(CASES)]
        rows = [(*case, topology) for case, topology in pairs]
        ids = ["-".join([row[0], row[1], row[3]]) for row in rows]
        metafunc.parametrize(("binary", "protocol", "settings", "topology"), rows, ids=ids)


def test_a_binarys_step_compiles(binary, protocol, settings, topology):
    (experiment,) = [one for one in EXPERIMENTS if one.name == binary]
    with jax.numpy_dtype_promotion("standard"):  # as a user has it; optax needs it
        said = ahead.report(resolve(experiment, protocol, settings), topology)
    row = f"| {binary} {protocol} | {topology} | {said['devices']} | "
    if not said["fits"]:  # as published, it may be for more chips; see --mesh
        assert "exceeds available HBM" in said["needs"]
        print(f"{row}does not fit | | {said['operations'] / 1e9:,.2f} | |")
        return
    assert said["chip"].startswith("TPU")
    assert said["operations"] > 0
    if said["devices"] > 1:  # gradients are added up once a step
        assert said["collectives"]["all-reduce"]["count"] >= 1
    print(
        f"{row}{said['memory_bytes'] / 1e6:,.1f} | {said['temporary_bytes'] / 1e6:,.1f} | "
        f"{said['operations'] / 1e9:,.2f} | {said['seconds']} |"
    )
