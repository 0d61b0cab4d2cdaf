"""A run's directory: whose it is, what was measured, what came out."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import jax

from experiments.config import Config, UserError

Row = dict[str, Any]


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
        self._lock: IO[str] | None = None

    def claim(self, config: Config) -> None:
        """Makes the directory this config's, for this process.

        Raises:
          UserError: if it cannot be written, is in use or belongs to another config.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / "lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"the workdir {self.path} is in use by another process.") from None
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"cannot write to the workdir {self.path}: {reason}.") from None
        before = self.read_json("config.json")
        if before is None:
            self.write_json("config.json", {**_settings(config), **_origin()})
        else:
            self._check_same(before, config)

    def go_on(self, config: Config, began: bool) -> str | None:
        """Records that the run is trained now, here, and towards these steps.

        The summary of a finished run that goes on is kept as ``summary-STEPS.json``.

        Args:
          config: of the run, with its steps to come.
          began: whether it has been trained before.

        Returns:
          A sentence if that was on other devices, else None.
        """
        if (summary := self.read_json("summary.json")) is not None:
            old = self.path / f"summary-{summary['steps']}.json"
            os.replace(self.path / "summary.json", old)
        before, now = self.read_json("config.json"), _origin()
        origins = [{name: before.get(name) for name in now}, *before.get("continued", [])]
        if not began:
            origins = [now]
        elif origins[-1] != now:
            origins.append(now)
        continued = {"continued": origins[1:]} if origins[1:] else {}
        self.write_json("config.json", {**_settings(config), **origins[0], **continued})
        others = {origin["device"]: None for origin in origins if origin["device"] != now["device"]}
        if not others:
            return None
        return (
            f"this run was trained on {' and '.join(others)} and goes on on {now['device']}: "
            "its last bits will differ."
        )

    def summary(self) -> dict[str, Any] | None:
        """What a finished run leaves; None if it is not finished, or has gone on since."""
        found = self.read_json("summary.json")
        rows = [row["step"] for row in read_rows(self.metrics)]
        return found if found is not None and rows and found["steps"] == rows[-1] else None

    def _trained(self) -> int:
        """How many steps the run has been trained for, as far as that is kept."""
        steps = [row["step"] for row in read_rows(self.metrics)]
        for path in (self.path / "checkpoints").glob("*"):
            steps += [int(path.name)] if path.name.isdecimal() else []
        return max(steps, default=0)

    def close(self) -> None:
        """Lets other processes have the directory."""
        if self._lock is not None:
            self._lock.close()

    def _check_same(self, before: dict[str, Any], config: Config) -> None:
        try:
            old = dict(before["identity"])
        except (KeyError, TypeError, ValueError):
            raise UserError(
                f"{self.path / 'config.json'} was made by another version of these experiments; "
                "choose another --workdir."
            ) from None
        new = config.identity()
        different = [name for name in {**new, **old} if old.get(name) != new.get(name)]
        if different == ["training.steps"]:
            raise UserError(
                f"the schedule of the run in {self.path} is made for {old['training.steps']} "
                "steps and cannot get another length; choose another --workdir."
            )
        if different:
            name = different[0]
            raise UserError(
                f"the workdir {self.path} belongs to another configuration "
                f"({name.split('.')[1]} is {old.get(name)} there and {new.get(name)} here); "
                "choose another --workdir."
            )
        if config.training.steps < (trained := self._trained()):
            raise UserError(
                f"the run in {self.path} has been trained for {trained} steps; --steps can only "
                "be raised."
            )

    def read_json(self, name: str) -> Any:
        """A file's content; None if there is no such file.

        Raises:
          UserError: if it is not JSON.
        """
        path = self.path / name
        try:
            return json.loads(path.read_text())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}.") from None
        except ValueError:
            raise UserError(f"{path} is damaged: it is not JSON.") from None

    def write_json(self, name: str, content: Any) -> None:
        """Writes a file whole or not at all."""
        path = self.path / name
        part = path.with_name(name + ".part")
        part.write_text(json.dumps(content, indent=2) + "\n")
        os.replace(part, path)

    def keep_rows(self, last_step: int) -> None:
        """Drops the rows of ``metrics.jsonl`` after a step, and a row that was cut short."""
        rows = [row for row in read_rows(self.metrics) if row["step"] <= last_step]
        part = self.metrics.with_name("metrics.jsonl.part")
        part.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.replace(part, self.metrics)


def append_row(path: Path, row: Row) -> None:
    """Adds a row to a file of JSON lines, on disk before it returns."""
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file of JSON lines, up to one that was cut short; none if there is no file."""
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return


def device_name() -> str:
    """The kind and number of the devices in use, such as ``"cpu x 2"``."""
    devices = jax.devices()
    return f"{devices[0].device_kind} x {len(devices)}"


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
    return {"commit": _commit(), "versions": versions, "device": device_name()}


def _commit() -> str | None:
    """The clone's commit, with ``-dirty`` if files differ from it; None outside of git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
