"""What a run leaves behind, and what it makes of it when it is damaged or cannot be written."""

import contextlib
import errno
import functools
import json
import os
import pickle
import re
import resource
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from experiments.command import tables
from experiments.records import checkpoints as records_checkpoints
from experiments.records import reporting, storage, workdir
from experiments.records.storage import Patience, Storage, written
from experiments.records.workdir import EarlierVersionError, Workdir, append_row, read_rows
from experiments.settings.errors import StorageError, UserError
from experiments.training import loop
from tests.experiments.support import assert_same_bits, leaves, one_sentence, tiny

pytestmark = pytest.mark.usefixtures("learners")


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    """Runs draw no figure; where one is the point, ``monkeypatch.undo`` brings it back."""
    monkeypatch.setattr(loop.learning_curve, "draw", lambda *args: None)


@pytest.fixture(scope="module")
def whole(learners, tmp_path_factory):
    """A finished run with a checkpoint of each evaluation, of steps 0, 2 and 4."""
    path = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_CHECKPOINT_SECONDS", -1.0)
        loop.run(tiny(), path)
    return path


@pytest.fixture
def run(whole, tmp_path):
    """A copy of it to break."""
    return shutil.copytree(whole, tmp_path / "run")


def only(run, *steps):
    """Leaves the checkpoints of these steps."""
    for path in (run / "checkpoints").iterdir():
        if int(path.name) not in steps:
            shutil.rmtree(path)


def lines(run, name="metrics.jsonl"):
    return (run / name).read_bytes().splitlines(keepends=True)


def test_a_folder_of_others_is_refused(tmp_path):
    (tmp_path / "letter.txt").write_text("mine")
    with pytest.raises(UserError, match=r"is not empty and has no config\.json of a run") as error:
        loop.run(tiny(), tmp_path)
    assert one_sentence(error)
    assert os.listdir(tmp_path) == ["letter.txt"]
    with pytest.raises(UserError, match=r"cannot write to the workdir .*: Not a"):
        loop.run(tiny(), tmp_path / "letter.txt")
    for json_of_others in ({"model_type": "bert"}, {"identity": 3}, {"identity": {}, "device": 1}):
        (tmp_path / "config.json").write_text(json.dumps(json_of_others))
        with pytest.raises(UserError, match=r"config\.json was made by another version"):
            loop.run(tiny(), tmp_path)
        assert sorted(os.listdir(tmp_path)) == ["config.json", "letter.txt"]


def test_an_empty_folder_and_one_whose_config_found_no_room_are_taken(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    for name in ("lock", "config.json.partial"):
        (tmp_path / "full" / name).touch()
    for name in ("empty", "full", "missing/parents"):
        with contextlib.closing(Workdir(tmp_path / name)) as work:
            work.claim(tiny())
        assert (tmp_path / name / "config.json").exists()


@pytest.mark.parametrize("name", ["config.json", "summary.json"])
@pytest.mark.parametrize("content", [b"\xff{}", b"[1]", b"3", b"[" * 100_000, None])
def test_a_json_file_that_is_none_is_named(run, name, content):
    (run / name).unlink()
    if content is None:
        (run / name).mkdir()
    else:
        (run / name).write_bytes(content)
    with pytest.raises(
        UserError, match=f"{name} (is damaged: it is not|cannot be read: )"
    ) as error:
        loop.run(tiny(), run)
    assert one_sentence(error)


@pytest.mark.parametrize("name", ["metrics.jsonl", "timing.jsonl"])
def test_a_directory_in_the_place_of_rows_is_named(run, name):
    (run / name).unlink()
    (run / name).mkdir()
    with pytest.raises(UserError, match=rf"{name} cannot be read: Is a directory\."):
        loop.run(tiny(), run)


@pytest.mark.parametrize(
    "content",
    [
        "",
        '{"steps": 4, "metrics": []}',
        '{"steps": 4, "metrics": {}}',
        '{"steps": 4, "metrics": {"accuracy": {"per_run": [{"value": "0.5"}]}}}',
    ],
)
def test_a_summary_without_results_is_named(run, content):
    (run / "summary.json").write_text(content)
    with pytest.raises(UserError, match=r"summary\.json is damaged.*; remove it, and the same"):
        loop.run(tiny(), run)
    with pytest.raises(UserError, match=r"summary\.json is damaged.*; remove it, and the same"):
        Workdir(run).summary()


def bad_line(run):
    rows = lines(run)
    (run / "metrics.jsonl").write_bytes(rows[0] + b"\xff" + rows[1] + rows[2])


def cut_in_the_middle(run):
    rows = lines(run)
    (run / "metrics.jsonl").write_bytes(rows[0] + rows[1][:-9])


def another_shape(run):
    rows = lines(run)
    (run / "metrics.jsonl").write_bytes(rows[0] + b'{"step": 2}\n[2]\n' + rows[2])


@pytest.mark.parametrize("damage", [bad_line, cut_in_the_middle, another_shape])
def test_lost_rows_are_made_again_from_a_checkpoint_before_them(whole, run, damage, capsys):
    damage(run)
    loop.run(tiny(), run)
    said = capsys.readouterr().out
    assert f"warning: {run}/metrics.jsonl is damaged: its rows after step 0 are made again." in said
    assert "going on from step" not in said
    assert lines(run) == lines(whole)
    assert_same_bits(leaves(run, 4), leaves(whole, 4))


def test_lost_rows_without_such_a_checkpoint_are_counted(whole, run, capsys):
    bad_line(run)
    only(run, 4)
    loop.run(tiny(), run)
    assert (
        f"warning: {run}/metrics.jsonl is damaged: 1 of its rows, the first one that of step 2, "
        "are lost, and no checkpoint is before them."
    ) in capsys.readouterr().out
    assert lines(run) == [lines(whole)[0], lines(whole)[2]]


def test_the_row_before_the_first_step_counts_as_lost_too(whole, run, capsys):
    (run / "metrics.jsonl").write_bytes(b"".join(lines(run)[1:]))
    only(run, 4)
    loop.run(tiny(), run)
    assert "is damaged: 1 of its rows, the first one that of step 0," in capsys.readouterr().out
    assert lines(run) == lines(whole)[1:]


def test_a_last_row_that_is_lost_is_scored_again_and_changes_nothing(whole, run, capsys):
    (run / "metrics.jsonl").write_bytes(b"".join(lines(run)[:2]) + b"\n")
    (run / "summary.json").unlink()
    only(run, 4)
    loop.run(tiny(), run)
    assert "the first one that of step 4" in capsys.readouterr().out
    again, before = json.loads(lines(run)[2]), json.loads(lines(whole)[2])
    assert again == before | {"train_loss": [None]}
    assert_same_bits(leaves(run, 4), leaves(whole, 4))


def test_damaged_clock_values_are_said_and_the_others_kept(run, capsys):
    before = lines(run, "timing.jsonl")
    (run / "timing.jsonl").write_bytes(before[0] + b'\xff\n{"step": 2}\n7\n' + before[2])
    loop.run(tiny(), run)
    assert "timing.jsonl is damaged: 3 of its lines are lost" in capsys.readouterr().out
    assert lines(run, "timing.jsonl") == [before[0], before[2]]


def test_a_row_that_finds_no_room_leaves_no_part(tmp_path):
    path = tmp_path / "rows"
    append_row(path, {"step": 0})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (15, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            append_row(path, {"step": 1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == b'{"step": 0}\n'


_WRITERS = {
    "metrics.jsonl": (workdir, "append_row"),
    "timing.jsonl": (reporting, "append_row"),
    "tensorboard": (reporting.TensorBoard, "write"),
    "checkpoints/4": (records_checkpoints, "_digests"),
    "figures": (loop.learning_curve, "draw"),
    "summary.json": (workdir, "_replace"),
}


@pytest.mark.parametrize(
    ("file", "number"),
    [(file, errno.ENOSPC) for file in _WRITERS]
    + [("metrics.jsonl", number) for number in (errno.EDQUOT, errno.EFBIG, errno.EROFS)]
    + [("timing.jsonl", errno.EROFS), ("figures", errno.EFBIG)]
    + [("metrics.jsonl", errno.EACCES), ("checkpoints/4", errno.EACCES)],
)
def test_a_run_goes_on_once_there_is_room(whole, tmp_path, file, number, monkeypatch):
    """Whatever is the first that cannot be written."""
    run = tmp_path / "new"
    owner, name = _WRITERS[file]
    before = getattr(owner, name)

    def fail(*args, **kwargs):
        if file == "summary.json" and args[0].name != file:
            return before(*args)
        with written(run / file) if file == "summary.json" else contextlib.nullcontext():
            raise OSError(number, "")

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises(StorageError) as error:
            loop.run(tiny(), run)
    assert str(error.value).startswith(f"cannot write {run / file}")
    assert os.strerror(number) in str(error.value)
    assert one_sentence(error)
    loop.run(tiny(), run)
    assert lines(run) == lines(whole)
    assert_same_bits(leaves(run, 4), leaves(whole, 4))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_run_that_waits_for_room_goes_on_with_the_same_bits(
    whole, tmp_path, number, monkeypatch, capsys
):
    """Every file in turn finds no room, twice."""
    refusals = dict.fromkeys(_WRITERS, 2)
    waits = []
    monkeypatch.setattr(storage.time, "sleep", waits.append)

    def refuse_twice(file, before):
        def write(*args, **kwargs):
            summary = file == "summary.json"
            if refusals[file] and not (summary and args[0].name != file):
                refusals[file] -= 1
                with written(args[0]) if summary else contextlib.nullcontext():
                    raise OSError(number, "")
            return before(*args, **kwargs)

        return write

    with monkeypatch.context() as patch:
        for file, (owner, name) in _WRITERS.items():
            patch.setattr(owner, name, refuse_twice(file, getattr(owner, name)))
        loop.run(tiny(), tmp_path / "new", storage=Storage(waits=True))
    said = capsys.readouterr().out
    assert not any(refusals.values())
    assert len(waits) == 2 * len(refusals)
    assert said.count("; waiting for room, and SIGTERM ends the run.") == len(refusals)
    assert said.count("there is room again; going on.") == len(refusals)
    assert lines(tmp_path / "new") == lines(whole)
    assert len(lines(tmp_path / "new", "timing.jsonl")) == 3
    assert_same_bits(leaves(tmp_path / "new", 4), leaves(whole, 4))


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EFBIG])
def test_nothing_but_room_is_waited_for(number):
    patience = Patience(True, print, lambda: False)
    with pytest.raises(StorageError, match=os.strerror(number)):
        patience(functools.partial(_raise, OSError(number, "")))


def _raise(error):
    with written(workdir.Path("x")):
        raise error


def test_a_run_that_waits_for_room_can_be_stopped(monkeypatch):
    waits = []
    monkeypatch.setattr(storage.time, "sleep", waits.append)
    patience = Patience(True, print, lambda: len(waits) == 3)
    with pytest.raises(StorageError, match="No space left on device"):
        patience(functools.partial(_raise, OSError(errno.ENOSPC, "")))
    assert len(waits) == 3


def test_a_workdir_with_a_link_that_leaves_it_is_refused(run, tmp_path):
    """As a stranger's may have: through it other files would be written."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "1").mkdir()
    for name, target in (
        ("config.json.partial", precious),
        ("lock", precious),
        ("timing.jsonl", precious),
        ("checkpoints/4/default/d", tmp_path / "folder"),
        ("checkpoints", tmp_path / "folder"),
    ):
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        path.symlink_to(os.path.relpath(target, path.parent))
        with pytest.raises(UserError, match=f"{name} is a symbolic link that leaves the") as error:
            loop.run(tiny(steps=6), run)
        assert one_sentence(error)
        path.unlink()
    assert precious.read_text() == "mine"
    assert os.listdir(tmp_path / "folder") == ["1"]


def test_a_workdir_of_pickles_runs_none(run, tmp_path):
    """All of its files but the settings, then these, too."""

    class Touch:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    content, files = pickle.dumps(Touch()), [path for path in run.rglob("*") if path.is_file()]
    for keeps in ("config.json", ""):
        for path in files:
            if path.name != keeps:
                path.write_bytes(content)
        with pytest.raises(UserError) as error:
            loop.run(tiny(), run)
        assert one_sentence(error)
    assert not (tmp_path / "ran").exists()
    pickle.loads(content)
    assert (tmp_path / "ran").exists()


def test_a_clock_that_is_set_back_changes_nothing(whole, run, monkeypatch):
    only(run, 0)
    monkeypatch.setattr(time, "time", lambda: 1e9)  # in 2001
    for path in run.rglob("*"):
        os.utime(path, (4e9, 4e9))  # what is there comes from the future
    loop.run(tiny(), run)
    assert lines(run) == lines(whole)
    assert_same_bits(leaves(run, 4), leaves(whole, 4))
    assert len(os.listdir(run / "tensorboard")) == 2


def test_settings_that_were_edited_in_the_workdir_are_refused(run):
    config = json.loads((run / "config.json").read_text())
    config["identity"]["training.learning_rates"] = [0.5]
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UserError, match=r"learning_rates is \[0.5\] there and \[0.01\] here"
    ) as error:
        loop.run(tiny(), run)
    assert one_sentence(error)


@pytest.mark.parametrize(
    ("owner", "name", "file"),
    [
        (reporting, "append_row", "timing.jsonl"),
        (reporting.TensorBoard, "open", "tensorboard"),
        (reporting.TensorBoard, "write", "tensorboard"),
        (loop.learning_curve, "draw", "figures"),
    ],
)
def test_a_run_goes_on_without_what_it_does_not_need(
    whole, tmp_path, owner, name, file, monkeypatch, capsys
):
    def fail(*args, **kwargs):
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(owner, name, fail)
    assert loop.run(tiny(), tmp_path / "new") is not None
    assert (
        capsys.readouterr().out.count(
            f"warning: cannot write {tmp_path / 'new' / file}: Permission denied; the run goes on"
        )
        == 1
    )
    assert lines(tmp_path / "new") == lines(whole)


@pytest.mark.parametrize("again", [False, True])
def test_a_workdir_that_was_removed_is_not_begun_anew(tmp_path, again, monkeypatch):
    """Nor does a run write into the place of another."""
    path = tmp_path / "run"

    def remove(self, step):
        shutil.rmtree(path, ignore_errors=True)
        if again:
            path.mkdir(exist_ok=True)
            (path / "lock").touch()

    monkeypatch.setattr(reporting.Report, "advance", remove)
    with pytest.raises(StorageError, match="was removed while the run was training") as error:
        loop.run(tiny(), path)
    assert one_sentence(error)
    assert (os.listdir(path) == ["lock"]) if again else not path.exists()


def made_by_an_earlier_version(run):
    """Its checkpoints had other leaves, and no table of contents."""
    for path in (run / "checkpoints").glob("*/contents.json"):
        path.unlink()


def test_a_run_of_an_earlier_version_is_read_and_does_not_go_on(run, capsys):
    made_by_an_earlier_version(run)
    summary = json.loads((run / "summary.json").read_text())
    assert loop.run(tiny(), run) == summary
    assert "held-out copied_token_probability" in capsys.readouterr().out
    with pytest.raises(EarlierVersionError, match=r"begun by an earlier version .* choose another"):
        loop.run(tiny(steps=6), run)
    assert json.loads((run / "summary.json").read_text()) == summary
    config = json.loads((run / "config.json").read_text())
    config["identity"]["model.forget_bias"] = "0.5"
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"forget_bias is 0\.5 there"):
        loop.run(tiny(), run)
    config["identity"] |= {"model.forget_bias": 0, "model.bias_vectors": None}  # the cell's then
    del config["identity"]["training.schedule"]
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(EarlierVersionError):
        loop.run(tiny(), run)


def test_a_finished_run_that_is_asked_for_again_writes_nothing(run):
    """So a full disk is no matter."""
    names = ("metrics.jsonl", "summary.json", "config.json")
    before = {name: (run / name).stat() for name in names}
    loop.run(tiny(), run)
    for name, stat in before.items():
        now = (run / name).stat()
        assert (now.st_ino, now.st_mtime_ns) == (stat.st_ino, stat.st_mtime_ns), name


def test_a_kill_between_an_evaluation_and_its_checkpoint_changes_nothing(
    whole, tmp_path, monkeypatch
):
    class KilledError(Exception):
        pass

    seconds = iter([-1.0, 1e9])
    add = Workdir.add

    def killed_after_the_second(self, row):
        add(self, row)
        monkeypatch.setattr(loop, "_CHECKPOINT_SECONDS", next(seconds))
        if row["step"] == 2:
            raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(Workdir, "add", killed_after_the_second)
        with pytest.raises(KilledError):
            loop.run(tiny(), tmp_path)
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [0, 2]
    loop.run(tiny(), tmp_path)
    assert lines(tmp_path) == lines(whole)
    assert_same_bits(leaves(tmp_path, 4), leaves(whole, 4))


def test_a_folder_of_others_takes_no_runs(tmp_path):
    (tmp_path / "lstm").mkdir()
    (tmp_path / "report.md").write_text("ours")
    (tmp_path / "table.md.partial").touch()  # killed while it wrote it
    tables.claim(tmp_path, ("lstm", "report.*", "table.md"))
    (tmp_path / "table.md.partial").unlink()
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "lock").touch()  # killed before it wrote its config
    tables.claim(tmp_path, ("lstm", "report.*"))
    (tmp_path / "begun" / "letter").touch()
    with pytest.raises(UserError, match="holds begun, which is no run of this kind"):
        tables.claim(tmp_path, ("lstm", "report.*"))
    (tmp_path / "begun" / "letter").unlink()
    (tmp_path / "precious.txt").write_text("theirs")
    with pytest.raises(UserError, match=r"holds precious\.txt, which is no run of this kind"):
        tables.claim(tmp_path, ("lstm", "report.*"))


def test_a_table_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def full(path, content):
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UserError, match=r"^cannot write .*table\.md: No space left on device\.$"):
        tables.write(tmp_path / "table.md", "| |")
    assert list(tmp_path.iterdir()) == []


def test_the_commit_is_read_without_writing_to_the_clone(tmp_path, monkeypatch):
    """Git would refresh its index, under a lock, where a file is as it was but newer."""
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("text")
    for arguments in (["init"], ["add", "."], [*who, "commit", "--message=first"]):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True, capture_output=True)
    os.utime(tmp_path / "file", (1e9, 1e9))
    index = (tmp_path / ".git" / "index").read_bytes()
    monkeypatch.setattr(workdir, "__file__", str(tmp_path / "module.py"))
    assert re.fullmatch("[0-9a-f]{40}", workdir.commit())
    assert (tmp_path / ".git" / "index").read_bytes() == index
    (tmp_path / "file").write_text("another")
    assert workdir.commit().endswith("-dirty")
