"""What the papers claim, and what our runs say of it."""

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

DOCUMENTS = ("GATO", "UR-gates", "h-detach", "Lecture")
SETTLED = ("holds", "holds only under", "contradicted")
VERDICTS = (*SETTLED, "undecided", "not run")
ENOUGH = 3  # seeds that a verdict needs
LEANINGS = ("with the paper", "against it", "neither")
_CITATION = re.compile(r"\{([^{}]*)\}")


class _Row(Protocol):
    @property
    def seeds(self) -> list[int]: ...
    @property
    def n(self) -> str: ...
    @property
    def finished(self) -> bool: ...
    @property
    def steps(self) -> list[int]: ...
    @property
    def budgets(self) -> list[str]: ...
    def statistics(self, metric: Metric, *, spread: bool = True) -> str: ...


Select = Callable[[str, Mapping[str, Any]], tuple[Results, _Row]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim of a table, a figure or a theorem.

    The texts of ``ours`` and ``because`` cite other rows: ``{FILE flag=value ...}`` stands for the
    ``mean [min, max]`` of that row, ``{flag=value ...}`` for that of this claim's own row with
    other values of these flags; with ``mean`` as the first word, for the mean only. The number of
    seeds follows where it is below ``ENOUGH``, and the step of a row that is unfinished.

    Attributes:
      document: one of ``DOCUMENTS``.
      place: in it.
      claim: in a few words.
      paper: what it prints, where it prints a number.
      verdict: one of ``VERDICTS``.
      because: the condition under which it holds, why it is undecided or was not run.
      leaning: of an undecided claim, what the means of our runs suggest: one of ``LEANINGS``.
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
    leaning: str = ""
    size: str = ""
    results: dict[str, Any] = dataclasses.field(default_factory=dict)
    of: str = ""
    ours: str = ""
    evidence: str = ""

    @property
    def flags(self) -> dict[str, Any]:
        """The flags by which ``results`` selects its row."""
        return {name: value for name, value in self.results.items() if name != "file"}


def read(path: Path) -> list[Claim]:
    """The claims in a file.

    Raises:
      UserError: if it cannot be read, or a claim is not whole.
    """
    try:
        claims = [Claim(**entry) for entry in tomllib.loads(path.read_text())["claim"]]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a file of claims: {error!r}.") from None
    for claim in claims:
        _check(claim)
    return claims


def _check(claim: Claim) -> None:
    place = _place(claim)
    if claim.document not in DOCUMENTS:
        raise UserError(f"{place} has a document that must be one of {', '.join(DOCUMENTS)}.")
    if claim.verdict not in VERDICTS:
        raise UserError(f"{place} has a verdict that must be one of {', '.join(VERDICTS)}.")
    has_support = bool(claim.results or claim.evidence)
    if has_support == (claim.verdict == "not run"):
        raise UserError(f"{place} needs results or evidence, unless it was not run: then neither.")
    is_tested = claim.evidence.startswith("tests/")
    if claim.verdict in SETTLED and not (claim.results or is_tested):
        raise UserError(f"{place} is settled by runs and must name their row in results.")
    if claim.verdict in ("holds only under", "not run") and not claim.because:
        raise UserError(f'{place} is "{claim.verdict}" and must say because of what.')
    if claim.verdict == "undecided" and claim.leaning not in LEANINGS:
        raise UserError(f"{place} is undecided: its leaning must be one of {', '.join(LEANINGS)}.")
    if claim.verdict != "undecided" and claim.leaning:
        raise UserError(f'{place} is "{claim.verdict}" and has a leaning: leave it out.')


def _place(claim: Claim) -> str:
    return f"the claim of {claim.document}, {claim.place},"


def markdown(claims: Sequence[Claim], select: Select) -> str:
    """A table of the claims of each document.

    Args:
      claims: to be shown.
      select: gives a file's results and its one row with these settings.

    Raises:
      UserError: if a verdict says more than its runs and those that it cites do: fewer than
        ``ENOUGH`` seeds, or unfinished ones, leave a claim undecided; or if a citation is not of
        one row.
    """
    parts = []
    head = ["claim", "where", "paper", "ours: mean [min, max], n", "size of ours", "verdict"]
    for document in DOCUMENTS:
        rows = [_cells(claim, select) for claim in claims if claim.document == document]
        if rows:
            parts += [f"## {document}", tables.of_prose(head, rows)]
    return "\n\n".join(parts)


def tally(claims: Sequence[Claim]) -> str:
    """A table of how many claims have which verdict, the undecided ones by leaning.

    Its rows are the experiments of each document, and mathematics.
    """
    tested_claims = [claim for claim in claims if claim.evidence.startswith("tests/")]
    groups = {
        f"experiments of {document}": [
            claim for claim in claims if claim.document == document and claim not in tested_claims
        ]
        for document in DOCUMENTS
    }
    groups["mathematics, shown by tests"] = tested_claims
    head = [*SETTLED, *(_verdict("undecided", leaning) for leaning in LEANINGS), "not run"]
    body = []
    for name, group in groups.items():
        counts = collections.Counter(_verdict(claim.verdict, claim.leaning) for claim in group)
        if group:
            body.append([name, *(str(counts[verdict]) for verdict in head)])
    return tables.markdown(["claims", *head], body)


def _verdict(verdict: str, leaning: str) -> str:
    return f"{verdict}, so far {leaning}" if leaning else verdict


def unsettled(row: _Row) -> list[str]:
    """Why its runs leave a claim undecided."""
    reasons = []
    if len(set(row.seeds)) < ENOUGH:
        reasons.append(f"n = {row.n}")
    if not row.finished:
        reasons.append(f"unfinished at step {row.steps[-1]:,}")
    if len(row.budgets) > 1:
        reasons.append(f"budgets of {' and '.join(row.budgets)}")
    return reasons


def _selected(
    claim: Claim, select: Select, file: str, flags: Mapping[str, Any]
) -> tuple[Results, _Row, list[str]]:
    """A file's results, its one row with these flags, and why that leaves a claim undecided."""
    try:
        results, row = select(file, flags)
    except UserError as error:
        raise UserError(f"{_place(claim)} cites what is not there. {error}") from None
    reasons = unsettled(row)
    if reasons and claim.verdict in SETTLED:
        words = " ".join([file, *(f"{name}={value}" for name, value in flags.items())])
        raise UserError(
            f'{_place(claim)} cannot be "{claim.verdict}", but undecided, with {words} '
            f"({', '.join(reasons)})."
        )
    return results, row, reasons


def _cited(claim: Claim, text: str, select: Select) -> str:
    """The text with the numbers of the rows that it cites."""

    def cite(match: re.Match[str]) -> str:
        words = match[1].split()
        mean = words[:1] == ["mean"]
        words = words[1:] if mean else words
        if words and "=" not in words[0]:
            file, flags = words.pop(0), {}
        elif claim.results:
            file, flags = claim.results["file"], claim.flags
        else:
            raise UserError(f"{_place(claim)} cites {match[0]}, but has no row of its own.")
        changes = dict(word.split("=", 1) for word in words if "=" in word)
        if len(changes) < len(words):
            raise UserError(
                f"{_place(claim)} cites {match[0]}, whose flags must be name=value, each once."
            )
        results, row, reasons = _selected(claim, select, file, {**flags, **changes})
        values = row.statistics(results.metric, spread=not mean)
        return f"{values} ({', '.join(reasons)})" if reasons else values

    result = _CITATION.sub(cite, text)
    if "{" in result or "}" in result:
        raise UserError(f"{_place(claim)} has a brace without the other of its pair: {text!r}.")
    return result


def _cells(claim: Claim, select: Select) -> list[str]:
    ours = _cited(claim, claim.ours, select)
    verdict = _verdict(claim.verdict, claim.leaning)
    explanation = _cited(claim, claim.because, select)
    reasons: list[str] = []
    if claim.results:
        results, row, reasons = _selected(claim, select, claim.results["file"], claim.flags)
        name = results.metric.name.replace("_", " ")
        label = f"{claim.of}: {name}" if claim.of else name
        values = f"{label} {row.statistics(results.metric)}, n = {row.n}"
        ours = f"{values}; {ours}" if ours else values
    if claim.evidence:
        link = f"[{Path(claim.evidence).name}](../{claim.evidence})"
        ours = f"{ours} ({link})" if ours else link
    if verdict == "holds only under":
        verdict = f"{verdict} {explanation}"
    else:
        reasons += [explanation] if explanation else []
        if claim.verdict == "undecided" and not reasons:
            raise UserError(f"{_place(claim)} is undecided: say why, because.")
        verdict += f" ({'; '.join(reasons)})" if reasons else ""
    return [
        claim.claim,
        claim.place,
        claim.paper or "-",
        ours or "-",
        claim.size or "-",
        f"**{verdict}**",
    ]
