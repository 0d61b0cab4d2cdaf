"""Runs as small data: settings, scores of the seeds, a thin learning curve, where it comes from."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.command import tables
from experiments.compare import table
from experiments.copy.settings import CopySettings
from experiments.records.reporting import say
from experiments.records.workdir import Workdir
from experiments.settings.config import Config, digest
from experiments.settings.errors import UserError
from experiments.settings.fields import shown_value
from experiments.settings.metrics import Metric

TRANSFER = "transfer.json"  # what transfer copy leaves
POINTS = 50  # of a learning curve, about
_SWEPT = ("seed", "seeds", "learning_rates", "steps", "epochs")  # they make no row of their own
_PLACES = ("data_dir", "backend", "mesh")  # where a run has its data and its arrays
_NAME = re.compile(r"[a-z0-9_]+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """A run with one of its learning rates; plain JSON.

    Attributes:
      settings: its flags but for seeds, rates and steps, with the protocol and the cell.
      seeds: of its lanes.
      values: the score of each, None for one that diverged.
      scored_on: the set that it is of.
      step: how many updates there have been.
      finished: whether that is all of them.
      command: that makes it.
      device: that it was made on.
      revision: of this repository at its start, as ``git describe`` says; None: not recorded.
      continued: commit, device and backend of each later start that differed from the one before.
      identity: digest of all settings in effect but for those left out of ``settings``; None: not
        recorded.
      rate: its learning rate; None: that of the protocol.
      watched: what the rate is chosen by, a value for each seed.
      curve: ``{"step": [n], "value": [[score of each seed], ...]}``, or empty.
      parameters: of the recurrent layer.
      seconds: of training, all rates of the run together.
      note: what else is to be known.
    """

    settings: dict[str, Any]
    seeds: list[int]
    values: list[float | None]
    scored_on: str
    step: int
    finished: bool
    command: str
    device: str
    revision: str | None = None
    continued: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    identity: str | None = None
    rate: float | None = None
    watched: list[float | None] | None = None
    curve: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    parameters: int | None = None
    seconds: float | None = None
    note: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        """What is the same of a run that has gone on, and of no other."""
        identity = self.identity or json.dumps(self.settings, sort_keys=True)
        return identity, self.rate, tuple(self.seeds), self.revision


@dataclasses.dataclass(frozen=True)
class Results:
    """A file of results.

    Attributes:
      experiment: the name of the binary.
      metric: what is scored.
      runs: of that binary.
    """

    experiment: str
    metric: Metric
    runs: list[Record]


def read(path: Path) -> Results:
    """The results in a file.

    Raises:
      UserError: if it cannot be read or is damaged.
    """
    try:
        content = json.loads(path.read_text())
        metric = Metric(**content["metric"])
        runs = [Record(**entry) for entry in content["runs"]]
        return Results(content["experiment"], metric, runs)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a file of results: {error!r}.") from None


def write(path: Path, results: Results) -> None:
    """Writes a file of results, a line for each field of each run; the bytes are those of the data.

    Raises:
      UserError: if it cannot be written.
    """
    runs = sorted(results.runs, key=_order)
    content = ",\n".join(_lines(dataclasses.asdict(run)) for run in runs)
    head = {"experiment": results.experiment, "metric": results.metric._asdict()}
    first = ",\n".join(f'"{name}": {_json(value)}' for name, value in head.items())
    tables.write(path, f'{{\n{first},\n"runs": [\n{content}\n]\n}}\n')


def _order(run: Record) -> tuple[Any, ...]:
    settings = {name: shown_value(value) for name, value in sorted(run.settings.items())}
    cell = settings.pop("cell", "")
    return cell, list(settings.items()), run.rate or 0.0, run.seeds, str(run.revision)


def _lines(record: Mapping[str, Any]) -> str:
    fields = {name: value for name, value in record.items() if value not in (None, [], {}, "")}
    return " {\n" + ",\n".join(f'  "{n}": {_json(value)}' for n, value in fields.items()) + "\n }"


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def add(workdirs: Sequence[Path], directory: Path, name: str, unfinished: bool = False) -> None:
    """Puts runs into a file of results; one that has gone on takes the place of its earlier self.

    Args:
      workdirs: of runs, or directories that hold workdirs.
      directory: of the files.
      name: of the file, without ``.json``.
      unfinished: whether to take runs that are not finished.

    Raises:
      UserError: if there is no run, one is not finished, or the file is of another experiment or
        has a run with other scores, or more steps, under the same settings.
    """
    if not _NAME.fullmatch(name):
        raise UserError(f"--to={name}: the name is of small letters, digits and underscores.")
    places = [place for workdir in workdirs for place in _places(workdir)]
    path = directory / f"{name}.json"
    results = read(path) if path.exists() else None
    count = 0
    for place in places:
        place_results = (
            transfer_results(place) if place.name == TRANSFER else _run_results(place, unfinished)
        )
        if results is None:
            results = dataclasses.replace(place_results, runs=[])
        place_name = (place_results.experiment, place_results.metric.name)
        if (results.experiment, results.metric.name) != place_name:
            raise UserError(
                f"{path} is of {results.experiment} and its {results.metric.name}, and {place} of "
                f"{place_name[0]} and its {place_name[1]}; choose another --to."
            )
        for run in place_results.runs:
            _put(results.runs, run, path)
            count += 1
    assert results is not None
    write(path, results)
    say(f"{path}: {count} of its {len(results.runs)} results are of these runs")


def _run_results(workdir: Path, unfinished: bool) -> Results:
    """The results of the run in a workdir, one for each learning rate."""
    entries = table.read(workdir)
    first = entries[0]
    if not first.finished and not unfinished:
        raise UserError(
            f"the run in {workdir} is not finished, but at step {first.rows[-1]['step']}: go on "
            "with it, or give --unfinished."
        )
    return Results(first.config.task.name, first.metric, [record(entry) for entry in entries])


def _put(runs: list[Record], new: Record, path: Path) -> None:
    for place, old in enumerate(runs):
        if old.key != new.key:
            continue
        if old.step > new.step:
            raise UserError(
                f"{path} has the run of seed {new.seeds[0]} of {new.command} at step {old.step} "
                f"already, and this one is at step {new.step}."
            )
        if old.step == new.step and old.finished and old.values != new.values:
            raise UserError(
                f"{path} has other scores of {new.command} at step {old.step}: remove them first."
            )
        runs[place] = new
        return
    runs.append(new)


def _places(directory: Path) -> Iterator[Path]:
    """A workdir, those in a directory such as a sweep's, or what transfer copy left."""
    if (directory / "config.json").is_file():
        yield directory
        return
    if (directory / TRANSFER).is_file():
        yield directory / TRANSFER
        return
    workdirs = sorted(path.parent for path in directory.glob("*/config.json"))
    if not workdirs:
        raise UserError(f"{directory} is no workdir, and holds none: there is no config.json.")
    yield from workdirs


def record(entry: table.Entry) -> Record:
    """A run with one learning rate, as it is kept."""
    config, work = entry.config, Workdir(entry.workdir)
    document = work.read_json("config.json")
    lanes = config.training.lanes_by_rate[entry.rate]
    summary = work.summary() or {}
    return Record(
        settings={
            "cell": config.model.cell,
            "protocol": config.protocol,
            **_shared(config.overrides),
        },
        seeds=[seed for seed, _ in config.training.lanes[lanes]],
        values=[_rounded(value) for value in entry.values],
        scored_on=summary.get("scored_on", entry.watched),
        step=entry.rows[-1]["step"],
        finished=entry.finished,
        command=command(config.task.name, config.protocol, config.overrides),
        device=document["device"],
        revision=document.get("commit"),
        continued=_continuations(document),
        identity=row_digest(_identity(config, document), config.task),
        rate=entry.rate,
        watched=_watched(entry, summary, lanes),
        curve=_thin(entry),
        parameters=entry.parameters,
        seconds=round(entry.seconds),
    )


def _continuations(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    names = ("commit", "device", "backend")
    origins = [document, *document.get("continued", [])]
    starts = [{name: origin[name] for name in names if origin.get(name)} for origin in origins]
    return [later for earlier, later in itertools.pairwise(starts) if later != earlier]


def _identity(config: Config, document: Mapping[str, Any]) -> dict[str, Any]:
    """What changes the mathematics of a run; a text that nothing else names, the user's own or
    Python's of some version, is told by the digest that the run recorded, and so is a cell of the
    user's own."""
    identity = config.identity_without_data()
    if identity.get("task.dataset") in ("own", "topics"):
        identity["task.content"] = document["identity"].get("task.content")
    if "model.cell_source" in identity:
        identity["model.cell_source"] = document["identity"].get("model.cell_source")
    return identity


def transfer_results(path: Path) -> Results:
    """The results of transfer copy's ``transfer.json``: a record for each run and delay.

    Raises:
      UserError: if it is damaged, or of a version that did not say what runs it is of.
    """
    try:
        content = json.loads(path.read_text())
        return Results(
            "transfer_copy",
            Metric("accuracy", True, _chance(content), "chance"),
            [
                _transferred(entry, int(delay), values)
                for entry in content.values()
                for delay, values in entry["accuracy"].items()
            ],
        )
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration):
        raise UserError(
            f"{path} is damaged or of an earlier version: transfer copy's command makes it again."
        ) from None


def _chance(content: Mapping[str, Any]) -> float:
    """The accuracy of guessing in a ``transfer.json``."""
    return 1 / next(iter(content.values()))["run"]["identity"]["task.symbols"]


def _transferred(entry: Mapping[str, Any], delay: int, values: list[float | None]) -> Record:
    run, lanes = entry["run"], entry["lanes"]
    overrides = {n: tuple(v) if isinstance(v, list) else v for n, v in run["overrides"].items()}
    return Record(
        settings={
            "cell": run["cell"],
            "protocol": run["protocol"],
            **_shared(overrides),
            "delay": delay,
        },
        seeds=[seed for seed, _ in lanes],
        values=[_rounded(value) for value in values],
        scored_on=f"{run['sequences']} fresh sequences",
        step=run["steps"],
        finished=True,
        command=command("transfer_copy", run["protocol"], overrides),  # trains and evaluates
        device=run["device"],
        revision=run["commit"],
        identity=row_digest({**run["identity"], "delay": delay}, CopySettings),
        rate=lanes[0][1],
    )


def _shared(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of a run that all seeds and rates of its row share."""
    return {
        name.rstrip("_"): _plain(value)
        for name, value in overrides.items()
        if name not in (*_SWEPT, "cell", *_PLACES)
    }


def command(name: str, protocol: str, overrides: Mapping[str, Any]) -> str:
    """The command line of a run, without what says where it runs and where its data are."""
    flags = [
        f"--{flag.rstrip('_')}={_flag(value)}"
        for flag, value in overrides.items()
        if flag not in _PLACES
    ]
    return " ".join(["python", "-m", f"experiments.{name}", f"--protocol={protocol}", *flags])


def row_digest(identity: Mapping[str, Any], task: Any) -> str:
    """8 hexadecimal digits of what changes the mathematics of a run but for its seeds and rates.

    What follows the seed, the ``seeded`` settings of a task that is no class, is left out with it.

    Args:
      identity: ``{"part.name": value}``.
      task: the task's settings or their class.
    """
    excluded_names = {"training.seed", "training.seeds", "training.learning_rates"}
    seeded_names = () if isinstance(task, type) else getattr(task, "seeded", ())
    for name in seeded_names:
        if identity.get(f"task.{name}") == identity["training.seed"]:
            excluded_names.add(f"task.{name}")
    settings = {name: value for name, value in identity.items() if name not in excluded_names}
    return digest(settings, task)


def _flag(value: Any) -> str:
    """A value as one writes it, with every digit."""
    if isinstance(value, tuple):
        return ",".join(map(_flag, value)) or "none"
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    return str(value).lower() if isinstance(value, bool) else str(value)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _watched(
    entry: table.Entry, summary: Mapping[str, Any], lanes: slice
) -> list[float | None] | None:
    """The scores that a rate may be chosen by: never those of a test set. A task of fresh sequences
    has no other set than the one that is reported; there they are the values themselves."""
    if entry.config.training.reports_best and summary.get("scored_on") == entry.watched:
        return [_rounded(value) for value in entry.values]
    if best := summary.get(entry.watched, {}).get(entry.metric.name):
        return [_rounded(lane["value"]) for lane in best["per_run"]][lanes]
    return [_rounded(value) for value in entry.curve[-1]]


def _thin(entry: table.Entry) -> dict[str, list[Any]]:
    """At most some ``POINTS`` points of the curve, the first and the last among them."""
    count = len(entry.rows)
    places = np.unique(np.linspace(0, count - 1, min(count, POINTS)).round().astype(int))
    return {
        "step": [entry.rows[place]["step"] for place in places],
        "value": [[_rounded(value) for value in entry.curve[place]] for place in places],
    }
