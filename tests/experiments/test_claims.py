"""What the papers claim: verdicts, leanings and citations, and those of this repository."""

import dataclasses
import re

import pytest

from experiments.results import claims
from experiments.settings.errors import UserError
from tests.experiments.support import ROOT
from tests.experiments.test_results import RESULTS, cells, one_record, pages

CLAIM = """
[[claim]]
document = "GATO"
place = "Figure 1"
claim = "it learns"
verdict = "holds"
results = { file = "some", cell = "gru" }
"""


def verdict(directory, values, claim=CLAIM, **more):
    (directory / "papers.toml").write_text(claim)
    return cells(pages(directory, [one_record(values, **more)], "{claims}"))[2][-1]


def test_a_verdict_needs_three_finished_seeds(tmp_path):
    assert verdict(tmp_path, [0.5, 0.6, 0.7]) == "**holds**"
    with pytest.raises(UserError, match=r'"holds", but undecided, with some cell=gru \(n = 2\)'):
        verdict(tmp_path, [0.5, 0.6])
    with pytest.raises(UserError, match=r"with some cell=gru \(unfinished at step 10\)"):
        verdict(tmp_path, [0.5, 0.6, 0.7], finished=False)
    undecided = CLAIM.replace("holds", "undecided") + 'leaning = "against it"\n'
    assert verdict(tmp_path, [0.5], undecided) == "**undecided, so far against it (n = 1)**"
    with pytest.raises(UserError, match="is undecided: say why"):
        verdict(tmp_path, [0.5, 0.6, 0.7], undecided)
    because = undecided + 'because = "one encoding"\n'
    assert verdict(tmp_path, [0.5], because) == (
        "**undecided, so far against it (n = 1; one encoding)**"
    )


def test_a_leaning_is_of_an_undecided_claim(tmp_path):
    undecided = CLAIM.replace("holds", "undecided")
    for more in ("", 'leaning = "yes"\n'):
        with pytest.raises(UserError, match="leaning must be one of with the paper, against it, n"):
            verdict(tmp_path, [0.5], undecided + more)
    with pytest.raises(UserError, match='is "holds" and has a leaning: leave it out'):
        verdict(tmp_path, [0.5, 0.6, 0.7], CLAIM + 'leaning = "neither"\n')


def test_the_tally_counts_verdicts_by_document_and_leaning(tmp_path):
    undecided = CLAIM.replace("holds", "undecided")
    claims = [
        CLAIM,
        undecided + 'leaning = "with the paper"\nbecause = "ours"\n',
        undecided.replace("GATO", "UR-gates") + 'leaning = "neither"\nbecause = "ours"\n',
        CLAIM[: CLAIM.index("results")] + 'evidence = "tests/test_gato.py"\n',
    ]
    (tmp_path / "papers.toml").write_text("".join(claims))
    head, _, *body = cells(pages(tmp_path, [one_record([0.5, 0.6, 0.7])], "{tally}"))
    counts = {row[0]: dict(zip(head[1:], map(int, row[1:]), strict=True)) for row in body}
    nonzero = {name: {k: n for k, n in row.items() if n} for name, row in counts.items()}
    assert nonzero == {
        "experiments of GATO": {"holds": 1, "undecided, so far with the paper": 1},
        "experiments of UR-gates": {"undecided, so far neither": 1},
        "mathematics, shown by tests": {"holds": 1},
    }


def test_a_claim_cites_other_rows_with_what_they_lack(tmp_path):
    runs = [
        one_record([0.5, 0.6, 0.7], length=30),
        one_record([0.1, 0.2, 0.6], cell="lstm", length=30),
        one_record([0.3, 0.8], length=60),
        one_record([0.3, None], length=90, finished=False),
    ]
    claim = CLAIM.replace('cell = "gru"', 'cell = "gru", length = 30')

    def shown(verdict, ours):
        text = claim.replace("holds", verdict) + f'ours = "{ours}"\nbecause = "it is ours"\n'
        text += 'leaning = "neither"\n' if verdict == "undecided" else ""
        (tmp_path / "papers.toml").write_text(text)
        return cells(pages(tmp_path, runs, "{claims}"))[2][3]

    own = "score 0.6000 [0.5000, 0.7000], n = 3; "
    cited = "the LSTM {cell=lstm}, {mean cell=lstm} or {some cell=lstm}"
    assert shown("holds", cited) == (
        own + "the LSTM 0.3000 [0.1000, 0.6000], 0.3000 or 0.3000 [0.1000, 0.6000]"
    )
    assert shown("undecided", "twice {length=60}") == own + "twice 0.5500 [0.3000, 0.8000] (n = 2)"
    with pytest.raises(UserError, match=r"with some cell=gru length=60 \(n = 2\)"):
        shown("holds", "twice {mean length=60}")
    with pytest.raises(UserError, match=r"Figure 1, cites what is not there\. .*json has 0 rows"):
        shown("undecided", "{cell=gato}")
    for text in ("{some cell}", "{cell=gru cell=lstm}"):
        with pytest.raises(UserError, match=r"whose flags must be name=value, each once"):
            shown("undecided", text)
    for text in ("{cell=gru", "cell=gru}"):
        with pytest.raises(UserError, match="has a brace without the other of its pair"):
            shown("undecided", text)
    assert shown("undecided", "{mean length=90}").endswith("-* (n = 2, unfinished at step 10)")
    claim = claim[: claim.index("results")] + 'evidence = "FILE"\n'
    for file in ("docs/results/some.json", "docs/results/some.toml"):
        claim = claim.replace("FILE", file)
        with pytest.raises(UserError, match="is settled by runs and must name their row in res"):
            shown("holds", "")
        claim = claim.replace(file, "FILE")
    claim = claim.replace("FILE", "tests/test_gato.py")
    with pytest.raises(UserError, match=r"cites \{cell=gru\}, but has no row of its own"):
        shown("holds", "{cell=gru}")


def test_a_seed_that_two_revisions_ran_is_one_seed(tmp_path):
    (tmp_path / "papers.toml").write_text(CLAIM)
    runs = [one_record([0.5, 0.6]), dataclasses.replace(one_record([0.7]), revision="0123abc")]
    with pytest.raises(UserError, match=r"some cell=gru \(n = 2 \(3 runs\)\)"):
        pages(tmp_path, runs, "{claims}")
    undecided = CLAIM.replace("holds", "undecided") + 'of = "gates"\nours = "others less"\n'
    undecided += 'leaning = "neither"\n'
    (tmp_path / "papers.toml").write_text(undecided)
    first_again = dataclasses.replace(one_record([0.2]), revision="0123abc")
    shown = cells(pages(tmp_path, [runs[0], first_again], "{claims}"))[2]
    # Seed 0 has 0.5 and 0.2, seed 1 has 0.6.
    assert shown[3] == "gates: score 0.4750 [0.2000, 0.6000], n = 2 (3 runs); others less"
    assert cells(pages(tmp_path, [runs[0], first_again], "{runs some}"))[2][1:3] == [
        "0.4750 [0.2000, 0.6000]",
        "2 (3 runs)",
    ]
    curve = cells(pages(tmp_path, [runs[0], first_again], "{curve some 10}"))[2]
    assert curve[1] == "0.4750 [0.2000, 0.6000]"


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('"holds"', '"true"', "has a verdict that must be one of holds, holds only under"),
        ('"holds"', '"holds only under"', "must say because of what"),
        ('"holds"', '"not run"', "needs results or evidence, unless it was not run"),
        ("results =", "result =", "is not a file of claims"),
        ('"gru"', '"lstm"', "some.json has 0 rows with"),
        ("GATO", "LSTM", "has a document that must be one of GATO"),
    ],
)
def test_a_claim_that_is_not_whole_is_refused(tmp_path, old, new, sentence):
    with pytest.raises(UserError, match=sentence) as error:
        verdict(tmp_path, [0.5, 0.6, 0.7], CLAIM.replace(old, new))
    assert "\n" not in str(error.value)


NAMED = {
    "GATO": "Figure 1, Figure 2, Table 1, Table 2, Appendix A, Appendix E",
    "UR-gates": "Table 1, Table 2, Table 3, Table 4, Table 6a, Figure 2, Figure 3, Figure 4, "
    "Figure 5, Figure 6, Figure 7, Figure 8, Figure 9, Figure 10, Figure 11, Proposition 1, "
    "Proposition 2, Proposition 3, Proposition 4",
    "h-detach": "Theorem 1, Theorem 2, Corollary 1, Figure 2, Figure 3, Figure 4, Figure 5, "
    "Figure 6, Figure 7, Figure 8, Table 1, Table 2, Table 3",
    "Lecture": "vanishing and exploding, clipping",
}


@pytest.mark.parametrize("document", NAMED)
def test_every_table_figure_and_theorem_has_a_verdict(document):
    """Figure 1 of UR-gates and of h-detach are drawings of the cell."""
    places = [one.place for one in claims.read(RESULTS / "papers.toml") if one.document == document]
    numbers = set()
    for place in places:
        numbers.add(place)
        for kind, several in re.findall(
            r"(Figure|Table)s ([\da-z]+(?:(?:, | and )[\da-z]+)*)", place
        ):
            numbers |= {f"{kind} {number}" for number in re.split(r", | and ", several)}
    text = "; ".join(numbers)
    for name in NAMED[document].split(", "):
        assert re.search(rf"{name}\b", text), name


def test_the_evidence_of_a_claim_is_there():
    for one in claims.read(RESULTS / "papers.toml"):
        assert not one.evidence or (ROOT / one.evidence).is_file(), one
