"""A language model's step: our side against NumPy, the report, and a sentence without torch."""

import importlib.util
import itertools

import jax
import numpy as np
import pytest

from benchmarks import language
from tests import reference

SIZES = {"words": 30, "hidden": 6, "embedding": 5, "batch": 2, "window": 4}


@pytest.fixture(scope="module")
def our_side(tmp_path_factory):
    directory = tmp_path_factory.mktemp("text")
    language.write_text(directory, **{name: SIZES[name] for name in ("words", "batch", "window")})
    with jax.numpy_dtype_promotion("standard"):  # as a user has it; optax needs it
        side, params, tokens = language.our_side(SIZES, str(directory))
        return params, tokens, [side.steps(1), side.steps(2)], directory


def test_the_text_has_all_words(our_side):
    _, tokens, _, directory = our_side
    assert sorted(set(tokens.tolist())) == list(range(SIZES["words"]))
    assert len(tokens) == SIZES["batch"] * (SIZES["window"] * 60 + 1) + 1
    for name in ("valid", "test"):
        assert len((directory / f"{name}.txt").read_text().split()) <= 1000


def test_the_first_loss_is_that_of_the_model(our_side):
    """The mean over the first windows of -log softmax(W h + b) at the next word, by NumPy."""
    params, tokens, losses, _ = our_side
    batch, window = SIZES["batch"], SIZES["window"]
    rows = tokens[: len(tokens) // batch * batch].reshape(batch, -1).T
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    carry = (np.zeros((batch, SIZES["hidden"])),) * 2
    terms = []
    for now, after in itertools.pairwise(rows[: window + 1]):
        x = params["encoder"]["Embed_0"]["embedding"][now]
        carry = reference.lstm(params["recurrent"]["cell"], carry, x)
        logits = carry[1] @ params["softmax"]["table"].T + params["softmax"]["bias"]
        total = np.log(np.exp(logits).sum(-1))
        terms.append(total - logits[np.arange(batch), after])
    assert losses[0] == pytest.approx(np.mean(terms), rel=1e-6)
    assert losses[1] != losses[0]


def test_the_report_has_both_sides_and_their_ratio():
    seconds = {"median": 2.0, "low": 1.0, "high": 4.0}
    report = {
        "machine": {"device": "cpu x 1"},
        "sizes": SIZES,
        "steps": 5,
        "ours": {"devices": 1},
        "theirs": {"threads": 2},
        "times": {
            "ours": seconds,
            "theirs": {name: 3 * value for name, value in seconds.items()},
            "ratio": {"median": 3.0, "low": 2.5, "high": 3.5},
        },
    }
    lines = language.table(report).splitlines()
    assert lines[0].startswith("cpu x 1 (1 devices, 2 threads), float32: words 30, hidden 6")
    assert lines[-3:-2] + lines[-1:] == [
        "| torch | 7 | 3 | 13 |",
        "Ours is 3.00 (2.50-3.50) times as fast.",
    ]
    assert "| ours | 20 | 10 | 40 |" in lines


def test_what_cannot_be_is_a_sentence(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as end:
        language.main(["language"])
    assert end.value.code == 2
    assert "torch is not installed" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(SystemExit) as end:
        language.main(["language", "--batch_size=1"])
    assert "batch_size" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        language.main(["language", "--words=100", "--batch=1", "--window=1"])
    assert end.value.code == 2
    assert "--words must be fewer" in capsys.readouterr().err
