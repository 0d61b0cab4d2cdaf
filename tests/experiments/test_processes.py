"""Several processes that train together, over loopback: two of four devices each."""

import contextlib
import json
import os
import signal
import socket
import types

import numpy as np
import pytest

from experiments.command import main
from experiments.machine import processes
from experiments.settings.errors import UserError
from tests.experiments import groups
from tests.experiments.support import assert_same_bits, leaves, tiny

GONE = groups.gone()


def pair(*flags, **variables):
    """Two processes of four devices to their ends."""
    return groups.trained(2, *flags, devices=4, **variables)


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """The directory of the checks, how the pair ended, and how the single process did."""
    directory = tmp_path_factory.mktemp("checks")
    ended = pair(CHECKS=str(directory))
    alone = groups.start(CHECKS=str(directory))
    return directory, ended, (*alone.communicate(), alone.returncode)


def arrays(directory, layout):
    with np.load(directory / f"{layout}.npz") as file:
        return dict(file)


@pytest.mark.parametrize("layout", ["eight", "one"])
@pytest.mark.long
def test_two_processes_train_as_one(checked, layout):
    """Gradients of a step, losses and states of many, with three lanes and a state that streams."""
    directory, _, (_, err, code) = checked
    assert code == 0, err
    two, one = arrays(directory, "pair0"), arrays(directory, layout)
    assert two.keys() == one.keys()
    for dtype, steps, losses, rest in (
        ("float32", (20, 3), 1e-4, 1e-5),
        ("float64", (200,), 1e-8, 1e-8),
    ):
        name = f"{dtype}.losses"
        assert two[name].shape == steps
        np.testing.assert_allclose(two[name], one[name], rtol=losses)
        for name in two:
            if name.startswith((f"{dtype}.first", f"{dtype}.last")):
                scale = np.abs(one[name]).max()
                np.testing.assert_allclose(two[name], one[name], rtol=0, atol=rest * scale)
    kernel = "recurrent.cell.kernel.h"
    # Adam's first moment after one step is a tenth of the gradient.
    assert np.abs(two[f"float32.first.optimizer.0.mu.{kernel}"]).max() > 0.01
    moved = two[f"float32.last.params.{kernel}"] - two[f"float32.first.params.{kernel}"]
    assert np.abs(moved).max() > 0.1
    assert two["float32.last.stream.h"].shape == (3, 8, 4)
    kinds = {two[name].dtype.name for name in two if name.startswith("float64.last.params")}
    assert kinds == {"float64"}


@pytest.mark.long
def test_both_processes_hold_the_same_state(checked):
    directory, _, _ = checked
    assert_same_bits(arrays(directory, "pair1"), arrays(directory, "pair0"))


@pytest.mark.long
def test_the_first_process_alone_writes_and_speaks(checked):
    directory, ((_, said, _), (_, silence, _)), _ = checked
    assert silence == ""
    assert said.count("step 16/16: loss ") == 2
    assert "Gloo" not in said
    assert "on cpu x 8 in 2 processes" in said
    assert sorted(path.name for path in directory.iterdir() if path.is_dir()) == [
        "asked",
        "on_1",
        "on_2",
        "whole",
    ]


@pytest.mark.long
def test_each_process_reads_its_own_rows_and_seeds(checked):
    directory, _, _ = checked
    rows = [np.load(directory / f"rows{number}.npy").tolist() for number in range(2)]
    assert rows == [[0, 1, 2, 3], [4, 5, 6, 7]]
    seeds = [np.load(directory / f"seeds{number}.npy").tolist() for number in range(2)]
    assert seeds == [[0, 1], [2, 3]]  # lanes:4,data:2


@pytest.mark.long
def test_a_batch_that_the_devices_cannot_share_is_refused(checked):
    directory, _, _ = checked
    for number in range(2):
        assert (directory / f"refused{number}").read_text() == (
            "--batch_size=12 must be a multiple of the 8 devices of the 2 processes."
        )


@pytest.mark.long
def test_a_signal_to_one_process_stops_both(checked):
    """And they go on to the same bits; the drivers see that both were stopped."""
    directory, ((_, said, _), _), _ = checked
    assert said.count("; the same command goes on from there") == 1
    assert said.count("going on from step ") == 1
    assert_same_bits(leaves(directory / "asked", 16), leaves(directory / "whole", 16))
    rows = [(directory / name / "metrics.jsonl").read_bytes() for name in ("asked", "whole")]
    assert rows[0] == rows[1]


@pytest.mark.long
def test_a_workdir_that_the_first_process_refuses_ends_both(checked):
    _, ((code, _, err), (other_code, _, other_err)), _ = checked
    assert (code, other_code) == (2, 1)
    assert "belongs to another configuration (seed is 0 there and 7 here)" in err
    assert err.count("\n") == 1
    assert other_err == GONE


@pytest.mark.parametrize("few", [1, 2])
@pytest.mark.long
def test_a_checkpoint_of_two_processes_goes_on_in_one(checked, few):
    directory, _, (said, _, _) = checked
    assert f"cpu x 8 in 2 processes and goes on on cpu x {few}: its last bits" in said
    config = json.loads((directory / f"on_{few}" / "config.json").read_text())
    assert [later["device"] for later in config["continued"]] == [f"cpu x {few}"]
    rows = (directory / f"on_{few}" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [0, 4, 8, 12, 16, 20]


@pytest.mark.long
def test_few_devices_go_on_alike(checked):
    directory, _, _ = checked
    two, one = (leaves(directory / name, 20) for name in ("on_2", "on_1"))
    for name, value in one.items():
        np.testing.assert_allclose(two[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.long
def test_a_killed_process_ends_the_other_and_both_go_on(checked, tmp_path):
    """First the one that writes is killed, then the other one; SLURM starts them again."""
    directory, _, _ = checked
    flags = ("--seeds=4", "--mesh=lanes:4,data:2", f"--workdir={tmp_path}")
    for victim, step in ((0, 13), (1, 15)):
        ended = pair(*flags, DIE=f"{victim}:{step}")
        code, _, err = ended[1 - victim]
        assert ended[victim][0] == -signal.SIGKILL
        assert (code, err) == (1, GONE)
        assert not os.path.exists(tmp_path / "summary.json")
    for code, _, err in pair(*flags, told=groups.slurm):
        assert (code, err) == (0, "")
    assert_same_bits(leaves(tmp_path, 16), leaves(directory / "whole", 16))
    rows = [(path / "metrics.jsonl").read_bytes() for path in (tmp_path, directory / "whole")]
    assert rows[0] == rows[1]


def test_the_last_words_are_said_before_the_end(monkeypatch):
    """Who comes second waits for the thread that has them, which ends the process."""
    slept, ended = [], []
    taken = types.SimpleNamespace(acquire=lambda blocking: False)
    monkeypatch.setattr(processes, "_last_words", taken)
    monkeypatch.setattr(processes, "_own_id", 1)
    monkeypatch.setattr(processes.time, "sleep", slept.append)
    monkeypatch.setattr(processes.os, "_exit", ended.append)
    processes.leave(1, "a sentence")
    assert (slept, ended) == ([2 * processes._LINGER_SECONDS], [1])


def test_processes_with_other_settings_are_refused(monkeypatch):
    """Each of them says it, also where the sizes are the same."""
    processes.check_alike("alone")
    other = np.array(8 * [7], np.uint32)
    for rows, sentence in (
        (lambda own: [own, own], None),
        (lambda own: [own, own, other], "process 2 has other settings than process 0"),
        (lambda own: [other, own], "process 1 has other settings than process 0"),
    ):
        monkeypatch.setattr(processes.jax, "process_count", lambda: 2)
        monkeypatch.setattr(
            processes.multihost_utils,
            "process_allgather",
            lambda own, rows=rows: np.stack(rows(own)),
        )
        with pytest.raises(UserError, match=sentence) if sentence else contextlib.nullcontext():
            processes.check_alike("settings")


def test_addresses_that_cannot_be():
    for address in ("localhost", ":1234", "localhost:x", "localhost:0", "localhost:65536", "a:²"):
        with pytest.raises(UserError, match=f"must be HOST:PORT, got {address}"):
            processes.join("streaming", address, 2, 1)
    with socket.create_server(("", 0)) as taken:
        address = f"localhost:{taken.getsockname()[1]}"
        with pytest.raises(UserError, match=f"={address} cannot be: Address already in use"):
            processes.join("streaming", address, 2, 0)


@pytest.mark.parametrize(
    ("variables", "chips", "joins"),
    [
        ({}, False, False),
        (groups.slurm(1234, 2, 1)[1], False, True),
        (groups.slurm(1234, 1, 0)[1], False, False),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, False, False),  # no step
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, True, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, True, False),
        ({"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}, True, True),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, False, False),
        ({}, True, True),  # the TPU VM's metadata say how many there are
        ({"JAX_PLATFORMS": "cpu"}, True, False),
    ],
)
def test_what_a_cluster_has_started_joins(monkeypatch, variables, chips, joins):
    """A laptop, one task of SLURM and a host with all of a GKE pod's chips join nobody."""
    for name in [*os.environ]:
        if name.startswith(("SLURM_", "TPU_", "MEGASCALE_")) or name == "JAX_PLATFORMS":
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: chips or None)
    monkeypatch.setattr("glob.glob", lambda pattern: ["/dev/accel0"] * chips)
    joined = []
    monkeypatch.setattr(processes, "join", lambda name, **more: joined.append((name, more)))
    main.join_processes("streaming", {})
    assert joined == [("streaming", {})] * joins
    main.join_processes("streaming", {"distributed": "off"})
    main.join_processes("streaming", {"compile_for": "v5e:4x4"})
    assert len(joined) == joins


def test_float64_needs_64_bits():
    with pytest.raises(UserError, match="--dtype=float64 needs the environment variable JAX_EN"):
        tiny(dtype="float64")
