"""The training step of every binary, compiled for TPUs: `make test-tpu`; see `test_compile.py`.

Each is compiled for one kind of chip, in turn, and with ``--full`` for every topology. What is
compiled is that of ``python -m tests.tpu.table``, which prints the table of docs/TPU.md.
"""

import itertools

import jax

from tests.tpu.table import CASES, TOPOLOGIES, cell, report


def pytest_generate_tests(metafunc):
    if "topology" in metafunc.fixturenames:
        pairs = list(itertools.product(CASES, TOPOLOGIES))
        if not metafunc.config.getoption("full"):
            pairs = [(case, TOPOLOGIES[n % len(TOPOLOGIES)]) for n, case in enumerate(CASES)]
        ids = ["-".join([*case[:2], topology]) for case, topology in pairs]
        metafunc.parametrize(("case", "topology"), pairs, ids=ids)


def test_a_binarys_step_compiles(case, topology):
    with jax.numpy_dtype_promotion("standard"):  # as a user has it; optax needs it
        said = report(case, topology)
    print(*case[:2], topology, cell(said), said, sep="; ")
    assert said["chip"].startswith("TPU")
    assert said["operations"] > 0
    if not said["fits"]:  # as published, it may be for more chips
        assert "exceeds available HBM" in said["needs"]
        return
    if said["devices"] > 1:  # gradients are added up once a step
        assert said["collectives"]["all-reduce"]["count"] >= 1
