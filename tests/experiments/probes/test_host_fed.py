"""Rows that the host reads: each of them once, by the process that trains on it."""

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from experiments.machine.mesh import DeviceMesh
from experiments.settings.axes import DATA
from experiments.training.feed import CHUNK, Feed
from tests.experiments.probes import support
from tests.experiments.probes.host_fed import HostFedTask, Rows

pytestmark = pytest.mark.long

STEPS = CHUNK + 3


@pytest.fixture(scope="module")
def reads(tmp_path_factory):
    """What an undisturbed run reads, and what one reads that was stopped after five steps."""
    config = support.config(HostFedTask(), seeds=2, learning_rates=(0.1, 0.01), steps=STEPS)
    workdir, logs = tmp_path_factory.mktemp("runs"), []
    for directory, stop in (("whole", None), ("stopped", support.StopAfter(5)), ("stopped", None)):
        rows = Rows()
        with mock.patch.object(HostFedTask, "data", lambda self, rows=rows: rows):
            support.run(config, workdir / directory, stop)
        logs.append(rows.reads)
    whole, _, resumed = logs
    return whole, resumed


def test_every_row_is_read_once(reads):
    """Two learning rates share what a seed reads."""
    expected = [(seed, step, tuple(range(8))) for step in range(STEPS) for seed in (0, 1)]
    assert reads[0] == expected


def test_what_was_trained_on_is_not_read_again(reads):
    assert reads[1] == [read for read in reads[0] if read[1] >= 5]


def test_lanes_get_the_windows_of_their_seeds():
    rows, numbers = Rows(), np.array([3, 4, 5])
    feed = Feed(rows, [4, 6, 4], numbers, steps=20)
    windows = feed.take(9, 12)
    feed.close()
    for lane, seed in enumerate((4, 6, 4)):
        for place, step in enumerate([9, 10, 11] + [11] * (CHUNK - 3)):
            expected = rows.read(seed, step, numbers)
            for name, value in expected.items():
                np.testing.assert_array_equal(windows[name][lane, place], value)


def test_a_process_reads_its_own_rows_alone():
    mesh = DeviceMesh(12)
    own = []
    for process in (0, 1):
        devices = np.array([SimpleNamespace(process_index=index) for index in (0, 0, 1)])
        devices, shape = devices[None, :, None], {DATA: 3}
        with (
            mock.patch.object(mesh, "_mesh", SimpleNamespace(devices=devices, shape=shape)),
            mock.patch("jax.process_index", lambda process=process: process),
        ):
            own.append(mesh.own(DATA, 12).tolist())
    assert own == [list(range(8)), list(range(8, 12))]
