"""What the papers claim, and what our runs say of it: the first screen of the page."""

from __future__ import annotations

import collections
import dataclasses
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from experiments.command import tables
from experiments.results.records import Results
from experiments.settings.errors import UserError
from experiments.settings.metrics import Metric

DOCUMENTS = ("GATO", "UR-gates", "h-detach", "lecture")
SETTLED = ("holds", "holds only under", "contradicted")
VERDICTS = (*SETTLED, "undecided", "not run")
ENOUGH = 3  # seeds that a verdict needs
_ROW = re.compile(r"\{([^{}]*)\}")


class _Row(Protocol):
    @property
    def seeds(self) -> list[int]: ...
    @property
    def n(self) -> str: ...
    @property
    def finished(self) -> bool: ...
    @property
    def steps(self) -> list[int]: ...
    def statistics(self, metric: Metric) -> str: ...


Select = Callable[[str, Mapping[str, Any]], tuple[Results, _Row]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim of a table, a figure or a theorem.

    The texts of ``ours`` and ``because`` cite other rows: ``{FILE flag=value ...}`` stands for the
    ``mean [min, max]`` of that row, ``{flag=value ...}`` for that of this claim's own row with
    other values of these flags; ``mean`` as the first word leaves the mean alone. With fewer than
    ``ENOUGH`` seeds their number follows.

    Attributes:
      document: one of ``DOCUMENTS``.
      place: in it.
      claim: in a few words.
      paper: what it prints, where it prints a number.
      verdict: one of ``VERDICTS``.
      because: the condition under which it holds, why it is undecided or was not run.
      size: of ours against the paper's.
      results: ``{"file", flag: value, ...}``: the row of a file of results that is ours.
      of: what ours is a score of, where the claim does not say it.
      ours: more of ours, or what it is where that is no score of runs.
      evidence: the file of tests, or of numbers, that shows it.
    """

    document: str
    place: str
    claim: str
    verdict: str
    paper: str = ""
    because: str = ""
    size: str = ""
    results: dict[str, Any] = dataclasses.field(default_factory=dict)
    of: str = ""
    ours: str = ""
    evidence: str = ""


def read(path: Path) -> list[Claim]:
    """The claims in a file.

    Raises:
      UserError: if it cannot be read, or a claim is not whole.
    """
    try:
        claims = [Claim(**one) for one in tomllib.loads(path.read_text())["claim"]]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a file of claims: {error!r}.") from None
    for one in claims:
        _check(one)
    return claims


def _check(one: Claim) -> None:
    place = _place(one)
    if one.document not in DOCUMENTS:
        raise UserError(f"{place} has a document that must be one of {', '.join(DOCUMENTS)}.")
    if one.verdict not in VERDICTS:
        raise UserError(f"{place} has a verdict that must be one of {', '.join(VERDICTS)}.")
    shown = bool(one.results or one.evidence)
    if shown == (one.verdict == "not run"):
        raise UserError(f"{place} needs results or evidence, unless it was not run: then neither.")
    if one.verdict in ("holds only under", "not run") and not one.because:
        raise UserError(f'{place} is "{one.verdict}" and must say because of what.')


def _place(one: Claim) -> str:
    return f"the claim of {one.document}, {one.place},"


def markdown(claims: Sequence[Claim], select: Select) -> str:
    """How many claims have which verdict, then a table of the claims of each document.

    Args:
      claims: to be shown.
      select: gives a file's results and its one row with these settings.

    Raises:
      UserError: if a verdict says more than its runs and those that it cites do: fewer than
        ``ENOUGH`` seeds, or unfinished ones, leave a claim undecided; or if a cited row is not one.
    """
    tested = [one for one in claims if one.evidence.startswith("tests/")]
    trained = [one for one in claims if one not in tested]
    parts = [
        f"Of {len(group)} claims {about}: {_counts(group)}."
        for group, about in (
            (tested, "of mathematics, shown by tests"),
            (trained, "of experiments"),
        )
        if group
    ]
    head = ["claim", "where", "paper", "ours: mean [min, max], n", "size of ours", "verdict"]
    for document in DOCUMENTS:
        rows = [_cells(one, select) for one in claims if one.document == document]
        if rows:
            parts += [f"## {document}", tables.of_prose(head, rows)]
    return "\n\n".join(parts)


def _counts(claims: Sequence[Claim]) -> str:
    counts = collections.Counter(one.verdict for one in claims)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])


def _unsettled(row: _Row) -> list[str]:
    """Why its runs leave a claim undecided."""
    reasons = []
    if len(set(row.seeds)) < ENOUGH:
        reasons.append(f"n = {row.n}")
    if not row.finished:
        reasons.append(f"step {row.steps[-1]:,}, unfinished")
    return reasons


def _selected(one: Claim, select: Select, file: str, selection: Mapping[str, Any]) -> Any:
    """A file's results, its one row with these settings, and why that leaves a claim undecided."""
    results, row = select(file, selection)
    reasons = _unsettled(row)
    if reasons and one.verdict in SETTLED:
        words = " ".join([file, *(f"{name}={value}" for name, value in selection.items())])
        raise UserError(
            f'{_place(one)} cannot be "{one.verdict}" with {" and ".join(reasons)} of {words}: it '
            "is undecided."
        )
    return results, row, reasons


def _cited(one: Claim, text: str, select: Select) -> str:
    """The text with the rows that it cites."""

    def cite(match: re.Match[str]) -> str:
        words = match[1].split()
        mean = words[:1] == ["mean"]
        words = words[mean:]
        own = {name: value for name, value in one.results.items() if name != "file"}
        if words and "=" not in words[0]:
            file, own = words.pop(0), {}
        elif one.results:
            file = one.results["file"]
        else:
            raise UserError(f"{_place(one)} cites {match[0]}, but has no row of its own.")
        if not all("=" in word for word in words):
            raise UserError(f"{_place(one)} cites {match[0]}, where flags must be name=value.")
        flags = dict(word.split("=", 1) for word in words)
        results, row, reasons = _selected(one, select, file, {**own, **flags})
        values = row.statistics(results.metric)
        values = values.split(" [")[0] if mean else values
        return ", ".join([values, *reasons])

    return _ROW.sub(cite, text)


def _cells(one: Claim, select: Select) -> list[str]:
    ours, verdict = _cited(one, one.ours, select), one.verdict
    because = _cited(one, one.because, select)
    reasons = []
    if one.results:
        selection = {name: value for name, value in one.results.items() if name != "file"}
        results, row, reasons = _selected(one, select, one.results["file"], selection)
        name = results.metric.name.replace("_", " ")
        label = f"{one.of}: {name}" if one.of else name
        values = f"{label} {row.statistics(results.metric)}, n = {row.n}"
        ours = f"{values}; {ours}" if ours else values
    if one.evidence:
        link = f"[{Path(one.evidence).name}](../{one.evidence})"
        ours = f"{ours} ({link})" if ours else link
    if verdict == "holds only under":
        verdict = f"{verdict} {because}"
    else:
        reasons += [because] if because else []
        if verdict == "undecided" and not reasons:
            raise UserError(f"{_place(one)} is undecided: say why, because.")
        verdict += f" ({'; '.join(reasons)})" if reasons else ""
    return [one.claim, one.place, one.paper or "-", ours or "-", one.size or "-", f"**{verdict}**"]
