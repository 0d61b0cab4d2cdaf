"""Steps of copy and pixels: our side against NumPy, the report, and sentences."""

import importlib.util

import jax
import numpy as np
import pytest

from benchmarks import sequences, training
from benchmarks.work import MismatchError
from experiments import datasets
from tests import reference

SETTINGS = {
    "copy": {"tokens": 4, "length": 3, "held_out_sequences": 5},
    "pixels": {"dataset": "digits"},
}


@pytest.mark.parametrize("experiment", SETTINGS)
@pytest.mark.long
def test_the_first_loss_is_that_of_the_model_on_the_first_batch(experiment):
    """The mean of -log softmax(W h + b) at the targets, by NumPy."""
    settings = {"hidden_size": 6, "batch_size": 4, **SETTINGS[experiment]}
    with jax.numpy_dtype_promotion("standard"):  # as a user has it; optax needs it
        side, params, batches = sequences.our_side(experiment, 0.25, settings)
        losses = [side.steps(1), side.steps(1)]
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    last = params["decoder"]["Dense_0"]
    for xs, targets in batches[:1]:
        carry, logits = (np.zeros((4, 6)),) * 2, []
        for x in xs:
            carry = reference.lstm(params["recurrent"]["cell"], carry, x)
            logits.append(carry[1] @ last["kernel"] + last["bias"])
        logits = np.array(logits)[-1:] if experiment == "pixels" else np.array(logits)
        targets = targets.reshape(logits.shape[:2])
        of_target = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
        expected = (np.log(np.exp(logits).sum(-1)) - of_target).mean()
    assert losses[0] == pytest.approx(expected, rel=1e-6)
    assert losses[1] != losses[0]


def test_random_images_are_read_as_mnist(tmp_path):
    sequences.write_images(tmp_path)
    images = datasets.load("mnist", str(tmp_path))
    assert [len(images.train_labels), len(images.test_labels)] == [60_000, 10_000]
    assert 120 < images.train_images.mean() < 135


def test_losses_that_differ_are_refused():
    ours = training.Trainer(lambda count: 1.0, {})
    same = training.Trainer(lambda count: 1.000001, {})
    other = training.Trainer(lambda count: 1.001, {})
    assert training.check_losses(ours, same, 2) == [(1.0, 1.000001)] * 2
    with pytest.raises(MismatchError, match=r"losses of step 0 are 1.0 and 1.001"):
        training.check_losses(ours, other, 2)


def test_the_report_has_a_row_for_each_comparison():
    seconds = {"median": 2.0, "low": 1.0, "high": 4.0}
    times = {
        "ours": seconds,
        "theirs": {name: 3 * value for name, value in seconds.items()},
        "ratio": {"median": 3.0, "low": 2.5, "high": 3.5},
    }
    rows = [
        {"experiment": "copy", "detach_prob": share, "steps": 12, "times": times}
        for share in (0.0, 0.25)
    ]
    lines = sequences.table({"machine": {"device": "cpu x 1"}, "rows": rows}).splitlines()
    assert lines[0] == "cpu x 1, float32"
    assert lines[-2:] == [
        "| copy | plain | nn.LSTM | 6.0 | 2.0 | 3.00 (2.50-3.50) |",
        "| copy | h-detach 0.25 | nn.LSTMCell in a loop | 6.0 | 2.0 | 3.00 (2.50-3.50) |",
    ]


@pytest.mark.parametrize(
    ("argv", "torch", "sentence"),
    [
        ([], None, "torch is not installed"),
        (["--experiments=copy,text"], object(), "'text' is neither copy nor pixels"),
    ],
)
def test_what_cannot_be_is_a_sentence(argv, torch, sentence, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: torch)
    with pytest.raises(SystemExit) as end:
        sequences.main(["sequences", *argv])
    assert end.value.code == 2
    assert sentence in capsys.readouterr().err
