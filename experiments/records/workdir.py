"""A run's directory: whose it is, what was measured, what came out."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import jax

from experiments.records.storage import cannot_write, no_writing, reason, written
from experiments.settings.cells import cells_own
from experiments.settings.config import Config, identity_defaults
from experiments.settings.errors import StorageError, UserError

Row = dict[str, Any]

_CONFIG = "config.json"
_REMEDY = "remove it, and the same command makes it again"  # of a summary
_NOT_YET = {"lock", "config.json.partial"}  # what a run leaves that could not even write its config


def holds_run(path: Path) -> bool:
    """Whether a directory is that of a run, be it one that ended before it wrote its config."""
    try:
        return (path / _CONFIG).is_file() or set(os.listdir(path)) <= _NOT_YET
    except OSError:  # no directory, or somebody else's
        return False


class EarlierVersionError(UserError):
    """A run that cannot go on: its states are not like those of this version."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"the run in {path} was begun by an earlier version of these experiments and cannot "
            "go on; choose another --workdir."
        )


class DamagedError(UserError):
    """A run that cannot go on: none of its checkpoints can be read."""

    def __init__(self, checkpoints: Path) -> None:
        super().__init__(
            f"every checkpoint in {checkpoints} is damaged; remove the workdir to start again."
        )


class Workdir:
    """The files of a run.

    ``config.json`` settings, and commit, versions and device of the start and, where they were
    others, of each continuation; ``metrics.jsonl`` a row for each evaluation, without clock
    values; ``timing.jsonl`` the clock values; ``summary.json``, once the run is finished;
    ``checkpoints/``, ``figures/`` and ``tensorboard/``.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metrics = self.path / "metrics.jsonl"
        self.timing = self.path / "timing.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self._lock: IO[str] | None = None

    def claim(self, config: Config) -> None:
        """Makes the directory this config's, for this process.

        Raises:
          UserError: if it cannot be written, is in use or belongs to another config.
        """
        self._check_ours(config)
        self._check_links()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / "lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"the workdir {self.path} is in use by another process.") from None
        except OSError as error:
            if no_writing(error):
                raise cannot_write(self.path, error) from None
            raise UserError(f"cannot write to the workdir {self.path}: {reason(error)}.") from None
        if not self._check_ours(config):  # another process may have been here before the lock
            self.write_json(_CONFIG, {**_settings(config), **_origin()})

    def in_use(self) -> bool:
        """Whether a process has the directory."""
        try:
            with (self.path / "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def add(self, row: Row) -> None:
        """Adds a row to ``metrics.jsonl``.

        Raises:
          StorageError: if it cannot be written; the file is as it was.
        """
        self.check_held()
        with written(self.metrics):
            append_row(self.metrics, row)

    def sync(self) -> None:
        """Puts the rows of ``metrics.jsonl`` on disk, as a checkpoint of their step needs them.

        Raises:
          StorageError: if that cannot be done.
        """
        self.check_held()
        with written(self.metrics), self.metrics.open("rb") as file:
            os.fsync(file.fileno())

    def check_held(self) -> None:
        """Raises ``StorageError`` if the directory that was claimed is no longer there."""
        try:
            unchanged = self._lock is not None and os.path.samestat(
                os.fstat(self._lock.fileno()), (self.path / "lock").stat()
            )
        except OSError:
            unchanged = False
        if not unchanged:
            raise StorageError(f"the workdir {self.path} was removed while the run was training.")

    def _check_links(self) -> None:
        """Raises ``UserError`` if a symbolic link in the directory leads out of it: through it a
        stranger's workdir would have other files written."""
        root = self.path.resolve()
        for folder, folders, names in os.walk(self.path):
            for entry in [Path(folder, name) for name in (*folders, *names)]:
                if entry.is_symlink() and not entry.resolve().is_relative_to(root):
                    raise UserError(
                        f"{entry} is a symbolic link that leaves the workdir; put what it leads to "
                        "in its place."
                    )

    def _check_ours(self, config: Config) -> bool:
        """Whether a run has begun here; False in a folder that is empty or not there.

        Raises:
          UserError: if the folder is not ours, or belongs to another config.
        """
        previous = self.read_json(_CONFIG)
        if previous is not None:
            self._check_same(previous, config)
            self.read_json("summary.json")  # before compute is spent
            _sort(self.timing, _is_timing)
            return True
        try:
            names = set(os.listdir(self.path))
        except FileNotFoundError:
            return False
        except OSError as error:
            raise UserError(f"cannot write to the workdir {self.path}: {reason(error)}.") from None
        if names - _NOT_YET:
            raise UserError(
                f"the folder {self.path} is not empty and has no config.json of a run; choose an "
                "empty or a new one as --workdir."
            )
        return False

    def go_on(self, config: Config, began: bool) -> str | None:
        """Records that the run is trained now, here, and towards these steps.

        The summary of a finished run that goes on is kept as ``summary-STEPS.json``.

        Args:
          config: of the run, with its steps to come.
          began: whether it has been trained before.

        Returns:
          A sentence if that was on other devices, another mesh or another backend, else None.
        """
        if (summary := self.read_json("summary.json")) is not None:
            path, archive = self.path / "summary.json", f"summary-{summary.get('steps')}.json"
            with written(path):
                os.replace(path, self.path / archive)
        previous = self.read_json(_CONFIG)
        old_settings = previous.get("config", {})
        backend = {"backend": old_settings.get("model", {}).get("backend")}
        current = {**_origin(), "backend": config.model.backend}
        origins: list[dict[str, Any]] = [
            {name: {**backend, **origin}.get(name) for name in current}
            for origin in (previous, *previous.get("continued", []))
        ]
        if not began:
            origins = [current]
        elif origins[-1] != current:
            origins.append(current)
        continuations = {"continued": origins[1:]} if origins[1:] else {}
        self.write_json(_CONFIG, {**_settings(config), **origins[0], **continuations})
        other_devices = {
            origin["device"]: None for origin in origins if origin["device"] != current["device"]
        }
        if other_devices:
            change = f"on {' and '.join(other_devices)} and goes on on {current['device']}"
            return f"this run was trained {change}: its last bits will differ."
        for flag, old, new in (
            ("mesh", old_settings.get("training", {}).get("mesh"), config.training.mesh),
            ("backend", origins[max(0, len(origins) - 2)]["backend"], config.model.backend),
        ):
            if began and old not in (None, new):
                change = f"with --{flag}={old} and goes on with --{flag}={new}"
                return f"this run was trained {change}: its last bits will differ."
        return None

    def summary(self) -> dict[str, Any] | None:
        """What a finished run leaves; None if it is not finished, or has gone on since.

        Raises:
          UserError: if it is damaged.
        """
        content = self.read_json("summary.json")
        rows = [row["step"] for row in read_rows(self.metrics)]
        if not content or not rows or content.get("steps") != rows[-1]:
            return None
        if not _is_summary(content):
            raise UserError(f"{self.path / 'summary.json'} is damaged; {_REMEDY}.")
        return content

    def steps(self) -> int:
        """How many steps the run is to have; 0 if it does not say."""
        document = self.read_json(_CONFIG)
        try:
            return int(document["config"]["training"]["steps"])
        except (KeyError, TypeError, ValueError):
            return 0

    def summary_of(self, steps: int) -> dict[str, Any] | None:
        """The summary, if the run was to have so many steps and is finished."""
        return self.summary() if self.steps() == steps else None

    def _trained(self) -> int:
        """How many steps the run has been trained for; 0 if nothing came of them that is kept."""
        names = [path.name for path in (self.path / "checkpoints").glob("*")]
        saved_steps = [int(name) for name in names if name.isdecimal()]
        if not saved_steps and not (self.path / "summary.json").exists():
            return 0
        return max([*saved_steps, *(row["step"] for row in read_rows(self.metrics))], default=0)

    def close(self) -> None:
        """Lets other processes have the directory."""
        if self._lock is not None:
            self._lock.close()

    def _check_same(self, previous: dict[str, Any], config: Config) -> None:
        old = previous.get("identity")
        continuations = previous.get("continued", [])
        origins = [previous, *continuations] if isinstance(continuations, list) else [None]
        complete = all(
            isinstance(origin, dict) and isinstance(origin.get("device"), str) for origin in origins
        )
        if not isinstance(old, dict) or not complete:
            raise UserError(
                f"{self.path / _CONFIG} was made by another version of these experiments; "
                "choose another --workdir."
            )
        new = config.identity()
        if old.get("task.name", new["task.name"]) != new["task.name"]:
            raise self._other_configuration("task.name", old, new)
        defaults = identity_defaults(config.task)  # an earlier version did not have them yet
        recorded_identity, old = (
            old,
            {name: defaults[name] for name in new if name in defaults} | old,
        )
        for name, value in cells_own(config.model).items():  # which one did not record as such
            key = f"model.{name}"
            if key in old and old[key] is None and new.get(key) is not None:
                old[key] = value
        differences = [name for name in {**new, **old} if old.get(name) != new.get(name)]
        lengths = {"training.steps"}  # which only some schedules record
        if {*recorded_identity} - lengths < {*new} - lengths and any(
            old.get(name) is None for name in {*differences} - lengths
        ):
            raise EarlierVersionError(self.path)  # it left more settings to the cell
        if differences == ["training.steps"]:
            raise UserError(
                f"the schedule of the run in {self.path} is made for {old['training.steps']} "
                "steps and cannot get another length; choose another --workdir."
            )
        if differences:
            name = min(differences, key=lambda name: name == "training.steps")
            raise self._other_configuration(name, old, new)
        if config.training.steps < (progress := self._trained()):
            raise UserError(
                f"the run in {self.path} has been trained for {progress} steps; --steps can only "
                "be raised."
            )

    def _other_configuration(self, name: str, old: Row, new: Row) -> UserError:
        """The error of a run that differs from this one in a setting."""
        part, _, setting = name.partition(".")
        label = part if setting == "name" else setting or name
        return UserError(
            f"the workdir {self.path} belongs to another configuration ({label} is "
            f"{old.get(name)} there and {new.get(name)} here); choose another --workdir."
        )

    def read_json(self, name: str) -> Any:
        """A file's content, an object; None if there is no such file.

        Raises:
          UserError: if it is damaged.
        """
        path = self.path / name
        try:
            content = json.loads(path.read_bytes().decode())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise UserError(f"{path} cannot be read: {reason(error)}.") from None
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            remedy = f"; {_REMEDY}" if name == "summary.json" else ""
            raise UserError(f"{path} is damaged: it is not a JSON object{remedy}.")
        return content

    def write_json(self, name: str, content: Any) -> None:
        """Writes a file whole or not at all.

        Raises:
          StorageError: if it cannot be written.
        """
        _replace(self.path / name, json.dumps(content, indent=2) + "\n")

    def lost_rows(self, due: Iterable[int]) -> list[int]:
        """Those of the steps whose row should be in ``metrics.jsonl`` and is not."""
        steps = {row["step"] for row in _sort(self.metrics, _is_evaluation)[0]}
        return [step for step in due if step not in steps]

    def keep_rows(self, last_step: int, say: Callable[[str], None]) -> None:
        """Drops the rows of ``metrics.jsonl`` after a step, and what is no row in both files.

        Args:
          last_step: of the last row to keep.
          say: is told of clock values that are lost.

        Raises:
          StorageError: if they cannot be written.
        """
        rows, _ = _sort(self.metrics, _is_evaluation)
        text = "".join(_line(row) for row in rows if row["step"] <= last_step)
        if not self.metrics.exists() or text.encode() != self.metrics.read_bytes():
            _replace(self.metrics, text)
        rows, damage = _sort(self.timing, _is_timing)
        if damage:
            say(
                f"warning: {self.timing} is damaged: {damage} of its lines are lost, and the "
                "seconds of training will be too few."
            )
            _replace(self.timing, "".join(map(_line, rows)))


def append_row(path: Path, row: Row) -> None:
    """Adds a row to a file of JSON lines; it outlives the process, but not yet the machine.

    Raises:
      OSError: if it cannot be written; the file is as it was.
    """
    with path.open("ab", buffering=0) as file:
        end = os.fstat(file.fileno()).st_size
        line = _line(row).encode()
        try:
            while line:
                line = line[file.write(line) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(file.fileno(), end)
            raise


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file of JSON lines, without lines that are damaged; none if there is no file.

    Raises:
      UserError: if it cannot be read.
    """
    yield from _sort(path, lambda row: True)[0]


def _line(row: Row) -> str:
    return json.dumps(row) + "\n"


def _sort(path: Path, is_good: Callable[[Row], bool]) -> tuple[list[Row], int]:
    """The good rows of a file of JSON lines, and how many lines are none."""
    try:
        lines = path.read_bytes().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return [], 0
    except OSError as error:
        raise UserError(f"{path} cannot be read: {reason(error)}.") from None
    rows = []
    for line in lines:
        try:
            row = json.loads(line.decode())
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and type(row.get("step")) is int and is_good(row):
            rows.append(row)
    return rows, len(lines) - len(rows)


def _is_summary(content: dict[str, Any]) -> bool:
    """Whether a finished run's file has the result of each lane."""
    try:
        lanes = [lane for metric in content["metrics"].values() for lane in metric["per_run"]]
        values = [lane["value"] for lane in lanes]
    except (KeyError, TypeError, AttributeError):
        return False
    return bool(values) and all(value is None or type(value) in (int, float) for value in values)


def _is_evaluation(row: Row) -> bool:
    """Whether a row has what the summary and the figure read."""
    lists = ("learning_rate", "train_loss", "diverged")
    tables = [value for value in row.values() if isinstance(value, dict)]
    return (
        type(row.get("examples")) is int
        and all(isinstance(row.get(name), list) for name in lists)
        and len(tables) == 1
        and all(isinstance(values, list) for values in tables[0].values())
    )


def _is_timing(row: Row) -> bool:
    return "seconds" in row and all(type(value) in (int, float) for value in row.values())


def _replace(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    partial_path = path.with_name(path.name + ".partial")
    with written(path):
        try:
            with partial_path.open("w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial_path, path)
        except OSError:
            with contextlib.suppress(OSError):
                partial_path.unlink()
            raise


def device_name() -> str:
    """The kind and number of the devices in use, such as ``"cpu x 2"``, and of the processes."""
    devices, processes = jax.devices(), jax.process_count()
    process_text = f" in {processes} processes" if processes > 1 else ""
    return f"{devices[0].device_kind} x {len(devices)}{process_text}"


def _settings(config: Config) -> dict[str, Any]:
    return {
        "protocol": config.protocol,
        "overrides": config.overrides,
        "config": config.resolved(),
        "identity": config.identity(),
    }


def _origin() -> dict[str, Any]:
    packages = ("recurrent_gates", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    versions: dict[str, str | None] = {}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {"commit": commit(), "versions": versions, "device": device_name()}


def commit() -> str | None:
    """The clone's commit, with ``-dirty`` if files differ from it; None outside of git.

    Nothing is written to the clone: git would refresh its index by the way, and a run that is
    killed then, or whose disk is full, would leave the index locked.
    """
    directory = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", *arguments]
        result = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=True)
        return result.stdout.strip()

    try:
        number = git("rev-parse", "HEAD")
        changes = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{number}-dirty" if changes else number
