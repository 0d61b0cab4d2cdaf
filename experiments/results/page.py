"""``docs/RESULTS.md``: prose with tables that are made from the files of results.

The page is the files ``*.md`` of ``docs/results`` in the order of their names. A line of its own in
braces is a table:

``{tally}``
    how many claims of ``papers.toml`` have which verdict;
``{claims}``
    the claims, a table for each document;
``{runs NAME [flag=value ...]}``
    the runs of ``NAME.json`` with these settings, a row for all seeds of one setting;
``{curve NAME STEP [STEP ...]}``
    their scores after so many steps, where every seed has one;
``{figure NAME [flag=value ...]}``
    their learning curves, drawn into ``docs/images/results``;
``{numbers NAME}``
    a table of ``papers.toml`` or of ``measurements.toml``, as it stands there;
``{sweeps}``
    what each sweep asks, and how many of its runs are among the results.
"""

from __future__ import annotations

import functools
import inspect
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.command import tables
from experiments.compare.table import statistics
from experiments.results import claims, sweeps
from experiments.results.figure import Figure
from experiments.results.records import Record, Results, read
from experiments.settings.errors import UserError
from experiments.settings.metrics import Metric

_TABLE = re.compile(r"^\{(.*)\}$", re.MULTILINE)
_REVISION = re.compile(r"[0-9a-f]{7,40}")
_CITATION = re.compile(r"\{([^{}]*)\}")
_NUMBER = re.compile(r"(\d+\.?\d*(?:e-?\d+)?)")
_NOTE = "<!-- Made by `python -m experiments.results` from docs/results: change it there. -->"


class Row(NamedTuple):
    """All seeds of one setting, with the rate that was best on what was watched.

    Attributes:
      label: the settings in which it differs from the file's other rows.
      runs: of its seeds.
    """

    label: str
    runs: tuple[Record, ...]

    @property
    def values(self) -> list[float | None]:
        """The score of each run of a seed."""
        return [value for run in self.runs for value in run.values]

    @property
    def seeds(self) -> list[int]:
        """The seed of each of these."""
        return [seed for run in self.runs for seed in run.seeds]

    def statistics(self, metric: Metric, *, spread: bool = True) -> str:
        """``mean [min, max]``, or the mean: a seed that several revisions ran counts once there."""
        return statistics(self.values, metric, _weights(self.seeds), spread=spread)

    @property
    def n(self) -> str:
        """How many seeds there are, and how many runs where these are more."""
        seeds, runs = len(set(self.seeds)), len(self.seeds)
        return f"{seeds}" if seeds == runs else f"{seeds} ({runs} runs)"

    @property
    def finished(self) -> bool:
        """Whether all of its runs are."""
        return all(run.finished for run in self.runs)

    @property
    def budgets(self) -> list[str]:
        """The lengths that their commands ask for; the same one in two spellings is one."""
        lengths: dict[str, str] = {}
        for run in self.runs:
            words = re.findall(r"--(?:steps|epochs)=\S+", run.command)
            lengths.setdefault(" ".join(words) or "the protocol's", run.command)
        if len(lengths) == 1:
            return list(lengths)
        by_steps = {sweeps.steps(command) or text: text for text, command in lengths.items()}
        return sorted(by_steps.values())

    @property
    def steps(self) -> list[int]:
        """The numbers of updates of its runs."""
        return sorted({run.step for run in self.runs})


def check_place(path: Path) -> None:
    """Raises ``UserError`` if there is a file that is no page of results, and would be lost.

    Args:
      path: where the page is to be written.
    """
    try:
        is_page = path.read_bytes().startswith(_NOTE.encode())
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    if not is_page:
        raise UserError(
            f"{path} is no page of results, and would be overwritten: move it away, or choose "
            "another --directory."
        )


def text(directory: Path) -> str:
    """The page, the same bytes for the same files.

    Args:
      directory: ``docs/results``.

    Raises:
      UserError: if a file is damaged, or one of the page's tables cannot be made.
    """
    sections = sorted(directory.glob("*.md"))
    if not sections:
        raise UserError(f"{directory} has no section of the page, such as 1_copy.md.")
    parts = [_NOTE]
    for section in sections:

        def table(match: re.Match[str], section: Path = section) -> str:
            return _table(directory, section, match[1].split())

        parts.append(_TABLE.sub(table, section.read_text().strip()))
    return "\n\n".join(parts) + "\n"


def figures(directory: Path) -> Iterator[Figure]:
    """The page's figures, in its order.

    Args:
      directory: ``docs/results``.

    Raises:
      UserError: as ``text``.
    """
    for section in sorted(directory.glob("*.md")):
        for line in _TABLE.findall(section.read_text()):
            word, *words = line.split()
            if word == "figure":
                yield _figure_of(directory, *words)


def _figure_of(directory: Path, name: str, *words: str) -> Figure:
    results = read(directory / f"{name}.json")
    axis_settings = [word.removeprefix("against=") for word in words if word.startswith("against=")]
    if axis_settings:
        return _figure_against(results, axis_settings[0], name, *words)
    lines = []
    for row in _matching_rows(name, results, words):
        if runs := tuple(run for run in row.runs if len(run.curve.get("step", [])) > 1):
            lines.append((row.label, runs))
    if not lines:
        raise UserError(f"{name}.json has no learning curve with {' '.join(words)}.")
    return Figure(" ".join([name, *words]), results.metric, tuple(lines))


def _figure_against(results: Results, setting: str, name: str, *words: str) -> Figure:
    selection = [word for word in words if not word.startswith("against=")]
    lines: dict[str, tuple[Record, ...]] = {}
    counts: dict[str, set[int]] = {}
    for row in _matching_rows(name, results, selection):
        if not isinstance(row.runs[0].settings.get(setting), int | float):
            raise UserError(f"{name}.json has a run whose {setting} is no number, or not given.")
        # Which rate is best may differ along a line.
        words_of_row = re.sub(r" rate=\S+ of \d+$", "", row.label).split()
        label = " ".join(word for word in words_of_row if not word.startswith(f"{setting}="))
        lines[label] = lines.get(label, ()) + row.runs
        counts.setdefault(label, set()).add(len(row.values))
    for label, seeds in counts.items():
        if len(seeds) > 1:
            raise UserError(f"{name}.json has {label} with different numbers of seeds.")
    return Figure(" ".join([name, *words]), results.metric, tuple(lines.items()), setting)


def _figure(directory: Path, name: str, *words: str) -> str:
    figure = _figure_of(directory, name, *words)
    return f"![{figure.metric.name}: {figure.name}](images/results/{figure.file})"


def _table(directory: Path, section: Path, words: Sequence[str]) -> str:
    makers: Mapping[str, Callable[..., str]] = {
        "tally": _tally,
        "claims": _claims,
        "runs": _runs,
        "curve": _curve,
        "figure": _figure,
        "numbers": _numbers,
        "sweeps": sweeps.markdown,
    }
    if not words or words[0] not in makers:
        raise UserError(
            f"{section}: {{{' '.join(words)}}} must begin with one of {', '.join(makers)}."
        )
    make = makers[words[0]]
    try:
        inspect.signature(make).bind(directory, *words[1:])
    except TypeError:
        raise UserError(f"{section}: {{{' '.join(words)}}} names no table.") from None
    return make(directory, *words[1:])


def _tally(directory: Path) -> str:
    return claims.tally(claims.read(directory / "papers.toml"))


def _claims(directory: Path) -> str:
    select = functools.partial(_selected, directory)
    return claims.markdown(claims.read(directory / "papers.toml"), select)


def _selected(directory: Path, name: str, selection: Mapping[str, Any]) -> tuple[Results, Row]:
    results = read(directory / f"{name}.json")
    matches = rows(results, selection)
    if len(matches) != 1:
        raise UserError(f"{name}.json has {len(matches)} rows with {dict(selection)}, not one.")
    return results, matches[0]


def _runs(directory: Path, name: str, *words: str) -> str:
    results = read(directory / f"{name}.json")
    metric = results.metric
    direction = "more" if metric.higher_is_better else "less"
    head = ["cell and settings", f"{metric.name}: mean [min, max]", "n", "steps", "s", "parameters"]
    body = []
    for row in _matching_rows(name, results, words):
        seconds = [run.seconds for run in row.runs if run.seconds is not None]
        steps = "-".join(f"{step:,}" for step in (row.steps[0], row.steps[-1])[: len(row.steps)])
        body.append(
            [
                row.label,
                row.statistics(metric),
                row.n,
                steps + ("" if row.finished else ", unfinished"),
                f"{sum(seconds):,.0f}" if seconds else "",
                _alternatives({f"{run.parameters:,}" for run in row.runs if run.parameters}),
            ]
        )
    source = (
        f"{direction} is better; {metric.baseline_name} {metric.baseline:.4g}; each run's command, "
        f"device and revision: [results/{name}.json](results/{name}.json)"
    )
    shown_runs = [run for row in _matching_rows(name, results, words) for run in row.runs]
    unrecorded = sum(not _is_clean(run) for run in shown_runs)
    if unrecorded:
        source += f" ({unrecorded} of {len(shown_runs)} without a clean revision)"
    return f"{tables.markdown(head, body)}\n\n{source[0].upper()}{source[1:]}."


def _is_clean(run: Record) -> bool:
    """Whether commits say what trained it, from its start to its end."""
    commits = [run.revision, *(origin.get("commit") for origin in run.continued)]
    return all(_REVISION.fullmatch(commit or "") for commit in commits)


def _curve(directory: Path, name: str, *words: str) -> str:
    steps = [int(word.replace(",", "")) for word in words if "=" not in word]
    results = read(directory / f"{name}.json")
    head = [f"{results.metric.name} after so many steps", *(f"{step:,}" for step in steps)]
    body = []
    for row in _matching_rows(name, results, [word for word in words if "=" in word]):
        points = [_scores_at(row, step) for step in steps]
        body.append(
            [
                row.label,
                *(statistics(v, results.metric, _weights(s)) if v else "" for v, s in points),
            ]
        )
    return tables.markdown(head, body)


def _scores_at(row: Row, step: int) -> tuple[list[float | None], list[int]]:
    """Scores after so many steps, and the seed of each; none unless every seed has that step: it
    may have been left out of a thin curve, or a run may have ended before."""
    pairs = [
        pair
        for run in row.runs
        for curve_step, values in zip(
            run.curve.get("step", []), run.curve.get("value", []), strict=True
        )
        if curve_step == step
        for pair in zip(values, run.seeds, strict=True)
    ]
    if {seed for _, seed in pairs} != set(row.seeds):
        return [], []
    return [value for value, _ in pairs], [seed for _, seed in pairs]


def _weights(seeds: Sequence[int]) -> list[float]:
    """Those of runs, so that each seed counts once."""
    return [1 / seeds.count(seed) for seed in seeds]


def _numbers(directory: Path, name: str) -> str:
    for file in ("papers.toml", "measurements.toml"):
        table = tomllib.loads((directory / file).read_text()).get("table", {}).get(name)
        if table is not None:
            cite = functools.partial(_cited, directory)
            body = [[_CITATION.sub(cite, str(cell)) for cell in row] for row in table["rows"]]
            return f"{tables.markdown(table['head'], body)}\n\n{table['source']}"
    raise UserError(f"{directory}: neither papers.toml nor measurements.toml has a table {name}.")


def _cited(directory: Path, match: re.Match[str]) -> str:
    """``{file flag=value ...}`` as the scores of that row."""
    name, *words = match[1].split() or [""]
    results, row = _selected(directory, name, dict(word.partition("=")[::2] for word in words))
    return row.statistics(results.metric)


def _matching_rows(name: str, results: Results, words: Sequence[str]) -> list[Row]:
    selection = dict(word.split("=", 1) for word in words)
    matches = rows(results, selection)
    if not matches:
        raise UserError(f"{name}.json has no run with {' '.join(words)}.")
    return matches


def rows(results: Results, selection: Mapping[str, Any]) -> list[Row]:
    """A row for each setting with the selected values, by label; its numbers go by their size.

    Of several learning rates the best one stands for all if the scores that it is chosen by are not
    those that are reported; otherwise each has a row.

    Args:
      results: of one file.
      selection: flags and their values, ``"none"`` for one that was not given; or ``rate``.
    """
    matches = [
        run
        for run in results.runs
        if all(
            _value_text(_selectable(run).get(name, "none")) == _value_text(value)
            for name, value in selection.items()
        )
    ]
    groups: dict[tuple[Any, ...], dict[float | None, list[Record]]] = {}
    for run in matches:
        key = (run.identity, *sorted((n, _value_text(value)) for n, value in run.settings.items()))
        groups.setdefault(key, {}).setdefault(run.rate, []).append(run)
    differing = _differing([next(iter(rates.values()))[0] for rates in groups.values()])
    table_rows = [row for rates in groups.values() for row in _rows(rates, differing, results)]
    return sorted(table_rows, key=lambda row: _by_size(row.label))


def _selectable(run: Record) -> dict[str, Any]:
    return run.settings if run.rate is None else {"rate": run.rate, **run.settings}


def _by_size(label: str) -> list[str | float]:
    """Texts and numbers in turn, so that 30 comes before 100."""
    parts = _NUMBER.split(label)
    return [float(part) if index % 2 else part for index, part in enumerate(parts)]


def _differing(runs: Sequence[Record]) -> list[str]:
    names = dict.fromkeys(name for run in runs for name in run.settings)
    return [
        n for n in names if n == "cell" or len({_value_text(r.settings.get(n)) for r in runs}) > 1
    ]


def _rows(
    rates: Mapping[float | None, list[Record]], differing: Sequence[str], results: Results
) -> list[Row]:
    """The row of the best rate, or one of each where no other scores tell which is best."""
    runs = [run for rate_runs in rates.values() for run in rate_runs]
    if len(rates) == 1:
        return [_row(runs, differing)]
    scored_runs = [run for run in runs if run.values != [None] * len(run.values)]
    is_separate = any(run.watched != run.values for run in scored_runs)
    if not is_separate or any(run.watched is None for run in runs):
        return [_row(rates[rate], differing, f"rate={rate:g}") for rate in rates]
    sign = 1 if results.metric.higher_is_better else -1

    def score(rate: float | None) -> tuple[int, float]:
        """A rate with fewer seeds is not chosen: the missing ones may have failed."""
        seeds = [seed for run in rates[rate] for seed in run.seeds]
        scores = [value for run in rates[rate] for value in run.watched or ()]
        signed_scores = [-np.inf if value is None else sign * value for value in scores]
        return len(set(seeds)), float(np.average(signed_scores, weights=_weights(seeds)))

    best = max(rates, key=score)
    return [_row(rates[best], differing, f"rate={best:g} of {len(rates)}")]


def _row(runs: Sequence[Record], differing: Sequence[str], rate: str = "") -> Row:
    settings = runs[0].settings
    words = [
        _value_text(settings[n]) if n == "cell" else f"{n}={_value_text(settings[n])}"
        for n in differing
        if n in settings
    ]
    finished_seeds = {seed for run in runs if run.finished for seed in run.seeds}
    # An unfinished run of a seed that another revision has finished says nothing more.
    row_runs = [run for run in runs if run.finished or not finished_seeds.issuperset(run.seeds)]
    return Row(" ".join([*words, rate]).strip(), tuple(row_runs))


def _value_text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_value_text, value))
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _alternatives(texts: set[str]) -> str:
    return " or ".join(sorted(texts))
