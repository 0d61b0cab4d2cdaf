"""Checkpoints by themselves: replaced, killed, tidied, damaged."""

import asyncio
import contextlib
import errno
import gc
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from experiments.records.checkpoints import Checkpoints, _Loop
from experiments.settings.errors import StorageError, UserError

STATE = {"a": np.arange(4.0), "b": np.int32(3)}
OTHER = {"a": np.arange(4.0) + 1, "b": np.int32(4)}


@pytest.fixture
def saved(tmp_path):
    """Checkpoints with one of step 7."""
    with contextlib.closing(Checkpoints(tmp_path / "checkpoints")) as checkpoints:
        checkpoints.save(7, STATE)
        yield checkpoints


def same(state, expected):
    return state is not None and all(np.array_equal(state[name], expected[name]) for name in STATE)


def test_a_checkpoint_is_replaced_once_the_new_one_is_there(saved, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        assert same(saved.read(7, STATE), STATE)
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(saved._orbax, "save", fail)
        with pytest.raises(StorageError, match=r"cannot write .*/7: No space left on device;"):
            saved.save(7, OTHER)
    assert os.listdir(tmp_path / "checkpoints") == ["7"]
    assert same(saved.read(7, STATE), STATE)
    saved.save(7, OTHER)
    assert os.listdir(tmp_path / "checkpoints") == ["7"]
    assert same(saved.read(7, STATE), OTHER)


def test_a_kill_while_a_checkpoint_is_replaced_loses_none(saved, tmp_path):
    directory = tmp_path / "checkpoints"
    (directory / "7").rename(directory / "7.old")
    assert saved.restore(STATE, print)[0] == 7
    shutil.copytree(directory / "7", directory / "7.old")  # killed a little later
    assert saved.restore(STATE, print)[0] == 7
    assert os.listdir(directory) == ["7"]


def test_a_checkpoint_stays_until_the_new_one_is_in_its_place(saved, tmp_path, monkeypatch):
    """Whatever ends the process between two renames."""
    rename = Path.rename

    def fail(path, target):
        if path.name == "7.new":
            raise OSError(errno.EIO, "no")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        with pytest.raises(StorageError, match=r"cannot write .*/7: "):
            saved.save(7, OTHER)
        assert os.listdir(tmp_path / "checkpoints") == ["7.old"]
        # Tried again: until the new one is written, the old one is not given up.
        with pytest.raises(StorageError, match=r"cannot write .*/7: "):
            saved.save(7, OTHER)
    step, state = saved.restore(STATE, print)
    assert (step, same(state, STATE)) == (7, True)
    assert os.listdir(tmp_path / "checkpoints") == ["7"]


def test_a_kill_while_a_checkpoint_is_removed_leaves_no_half_of_it(saved, tmp_path, monkeypatch):
    """Neither of one that is superfluous nor of one that a run goes back from."""
    directory = tmp_path / "checkpoints"

    def killed(path, **kwargs):
        if path.suffix == ".gone":
            next(path.rglob("contents.json")).unlink()
            raise KeyboardInterrupt

    with (
        contextlib.closing(Checkpoints(directory, keep=1)) as checkpoints,
        monkeypatch.context() as m,
    ):
        m.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(8, OTHER)
        assert saved.steps == [8]
    saved.save(9, STATE)
    with monkeypatch.context() as m:
        m.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            saved.restore(STATE, print, lambda step, state: step == 8)
    assert saved.steps == [8]
    assert same(saved.restore(STATE, print)[1], OTHER)
    assert os.listdir(directory) == ["8"]


def test_what_a_killed_save_left_is_removed(saved, tmp_path):
    directory = tmp_path / "checkpoints"
    for name in ("9.new", "8.orbax-checkpoint-tmp", "8.orbax-checkpoint-tmp-17"):
        (directory / name / "default").mkdir(parents=True)
    (directory / "notes").mkdir()
    assert saved.last_step == 7
    assert same(saved.read(7, STATE), STATE)
    assert len(os.listdir(directory)) == 5  # to read is not to claim
    assert saved.restore(STATE, print)[0] == 7
    assert sorted(os.listdir(directory)) == ["7", "notes"]


@pytest.mark.parametrize("keep", [None, 1, 2])
def test_the_last_checkpoints_are_kept(keep, tmp_path):
    asked = () if keep is None else (keep,)
    with contextlib.closing(Checkpoints(tmp_path, *asked)) as checkpoints:
        for step in (7, 8, 9, 10):
            checkpoints.save(step, STATE)
        assert checkpoints.steps == [8, 9, 10][-(keep or 3) :]


def test_a_flipped_byte_in_any_file_is_named_and_the_state_before_used(saved, tmp_path):
    saved.save(8, OTHER)
    directory = tmp_path / "checkpoints"
    kept = shutil.copytree(directory / "8", tmp_path / "whole")
    files = sorted(path.relative_to(kept) for path in kept.rglob("*") if path.is_file())
    assert len(files) > 3
    assert {"contents.json", "_METADATA"} <= {path.name for path in files}
    for name in files:
        content = bytearray((kept / name).read_bytes())
        for at in {0, len(content) // 2, len(content) - 1}:
            damaged = content.copy()
            damaged[at] ^= 0x55
            shutil.rmtree(directory / "8", ignore_errors=True)
            shutil.copytree(kept, directory / "8")
            (directory / "8" / name).write_bytes(damaged)
            said = []
            step, state = saved.restore(STATE, said.append)
            assert (step, same(state, STATE)) == (7, True), (name, at)
            assert said == [
                f"warning: the checkpoint {directory}/8 is damaged; going on from step 7."
            ]


def test_flipped_shapes_are_damage_and_no_earlier_version(saved, tmp_path):
    path = tmp_path / "checkpoints" / "7" / "contents.json"
    content = json.loads(path.read_text())
    path.write_text(path.read_text().replace("float64", "float61"))
    with pytest.raises(UserError, match=r"every checkpoint in .* is damaged; remove the workdir"):
        saved.restore(STATE, print)
    del content["digest"]  # earlier versions wrote none
    path.write_text(json.dumps(content))
    assert same(saved.read(7, STATE), STATE)


@pytest.mark.parametrize("name", ["8", "8/default", "8/default/_METADATA"])
def test_a_link_in_a_checkpoint_is_not_followed(saved, tmp_path, name):
    """To what is the same, but not ours; nor is it removed with the checkpoint."""
    saved.save(8, OTHER)
    path, elsewhere = tmp_path / "checkpoints" / name, tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert saved.read(8, STATE) is None
    said = []
    assert saved.restore(STATE, said.append)[0] == 7
    assert len(said) == 1
    assert elsewhere.exists()
    assert os.listdir(tmp_path / "checkpoints") == ["7"]


def test_orbax_says_nothing_of_damage(saved, tmp_path, capfd):
    saved.save(8, OTHER)
    damaged = tmp_path / "checkpoints" / "8"
    for path in damaged.rglob("*"):
        if path.is_file() and path.name != "contents.json":
            path.write_bytes(path.read_bytes()[:-1])
    said = []
    step, state = saved.restore(STATE, said.append)
    assert (step, same(state, STATE)) == (7, True)
    assert said == [
        f"warning: the checkpoint {tmp_path}/checkpoints/8 is damaged; going on from step 7."
    ]
    assert capfd.readouterr() == ("", "")


def test_whole_files_of_another_state_are_damage_too(saved, tmp_path):
    """Which Orbax would read."""
    saved.save(8, OTHER)
    seven, eight = (tmp_path / "checkpoints" / name / "default" for name in "78")
    shutil.rmtree(seven)
    shutil.copytree(eight, seven)
    assert saved.read(7, STATE) is None
    assert same(saved.read(8, STATE), OTHER)


def test_only_the_first_of_several_errors_is_said(caplog):
    """Of arrays that are written at once, whenever the others' tasks are collected."""

    async def fails():
        raise OSError(errno.EFBIG, "File too large")

    async def first_of_two():
        second = asyncio.ensure_future(fails())
        await asyncio.sleep(0)
        assert second.done()
        await fails()

    with contextlib.closing(_Loop()) as loop, pytest.raises(OSError, match="too large"):
        loop.run_until_complete(first_of_two())
    gc.collect()
    assert not caplog.records


def test_writes_end_before_their_loop_is_closed(tmp_path):
    """Their directory is removed then; nothing may put it back."""

    async def writes():
        await asyncio.sleep(0.05)
        (tmp_path / "late").touch()

    async def fails_beside_a_write():
        writing.append(asyncio.ensure_future(writes()))
        await asyncio.sleep(0)
        raise OSError(errno.EFBIG, "File too large")

    writing = []
    with contextlib.closing(_Loop()) as loop, pytest.raises(OSError, match="too large"):
        loop.run_until_complete(fails_beside_a_write())
    assert writing[0].done() and loop.is_closed()
    assert os.listdir(tmp_path) == ["late"]
