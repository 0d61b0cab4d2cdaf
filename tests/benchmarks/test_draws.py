"""Random sizes: what is drawn, whom ours is beside, and what becomes of a row that is slow."""

import itertools
import json

import numpy as np
import pytest

from benchmarks import draws, floor, ours, pair, peers, process, speed
from benchmarks.work import Contender, Size
from tests.benchmarks.test_speed import SIZE, TOLERANCE


def operations(contender, size):
    """Three passes of four gates; what is pointwise comes on top."""
    return {"operations": 24 * size.batch * size.steps * size.features * sum(size[2:])}


def test_sizes_are_log_uniform_and_of_few_operations(monkeypatch):
    exact = floor.count(Contender("lstm"), SIZE)["operations"]
    assert exact == pytest.approx(operations(None, SIZE)["operations"], rel=0.1)
    monkeypatch.setattr(floor, "count", operations)
    drawn = draws.sizes(400, 3)
    assert drawn[:7] == draws.sizes(7, 3) != draws.sizes(7, 4)
    for name, numbers in zip(Size._fields, np.array(drawn).T, strict=True):
        low, high = draws.RANGES[name]
        assert low <= numbers.min() and numbers.max() <= high
        share = np.mean(numbers <= np.sqrt(low * high))  # a half, and more: the largest are refused
        assert 0.45 < share < 0.75
    assert max(operations(None, size)["operations"] for size in drawn) <= 2e11
    devices = [n for *_, n in draws.rows("lstm,gru", 4, 3, 2)]
    assert devices == [1, 1, 2, 2, 1, 1, 2, 2]


def test_a_peer_without_the_cell_runs_its_lstm():
    names = ["torch", "haiku", "memax"]
    assert draws.opponents(Contender("gru"), names) == ["torch.gru", "haiku.gru", "memax.gru"]
    for cell in ("ur_lstm", "gato1"):
        assert draws.opponents(Contender(cell), names) == [f"{name}.lstm" for name in names]


@pytest.mark.extras
@pytest.mark.parametrize("name", ["haiku", "equinox", "memax"])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_optional_peers_compute_what_we_do(name, cell):
    peer = peers.PEERS[name]
    theirs = peer.contender(cell)
    side = peer.build(theirs, SIZE, "float32")
    pair.check(name, side, theirs, SIZE, "float32", TOLERANCE)


@pytest.mark.parametrize(("cell", "form"), [("gru", "reset before"), ("lstm", "plain output")])
def test_a_form_has_other_equations(cell, form):
    plain, other = Contender(cell), Contender(cell, form=form)
    assert str(plain) == str(other)
    with pytest.raises(Exception, match="forward is off by"):
        side = ours.side(other, SIZE, "float32")
        pair.check("other", side, plain, SIZE, "float32", TOLERANCE)


def test_runs_take_turns_and_the_best_peer_is_that_of_the_smallest_median():
    order, clock = [], itertools.count()

    def timer(run):
        run()
        return 1.0 + next(clock)

    runs = {name: lambda name=name: order.append(name) for name in ("ours", "a", "b")}
    times = draws.in_turn(runs, 2, timer)
    assert order == ["ours", "a", "b", "ours", "a", "b", "a", "b", "ours"]
    assert times == {"ours": [4.0, 9.0], "a": [5.0, 7.0], "b": [6.0, 8.0]}
    said = draws.beside_best({"ours": [2.0, 4.0, 4.0], "a": [9.0, 9.0, 9.0], "b": [8.0, 2.0, 4.0]})
    assert said["best"] == "b" and said["seconds"] == {"ours": 4.0, "a": 9.0, "b": 4.0}
    assert said["ratio"] == pair.summary([4.0, 0.5, 1.0])


def timed(best, ratio):
    seconds = {"ours": 1.0, best: ratio}
    return {"best": best, "ratio": dict(median=ratio, low=ratio, high=ratio), "seconds": seconds}


def test_a_row_below_is_measured_again_alone(monkeypatch, tmp_path, capsys):
    calls = []

    def call(function, arguments, devices):
        if function.endswith("machine"):
            missing = {name: f"{name} is not installed" for name in peers.PEERS if name != "flax"}
            del missing["torch"]
            versions = {"jax": "1"}
            return {
                "platform": "cpu",
                "device": "cpu x 1",
                "versions": versions,
                "missing": missing,
            }
        calls.append((arguments["others"], arguments["repeats"], devices))
        if len(calls) == 4:
            raise process.ProcessError("MismatchError: torch.lstm forward is off by 1.")
        first = len(arguments["others"]) > 1
        return {
            "contender": arguments["contender"],
            "size": Size(*arguments["size"])._asdict(),
            "operations": 1e9,
            "forward": timed("flax.lstm", 0.9 if first and len(calls) == 1 else 1.2),
            "train": timed("torch.lstm" if first else arguments["others"][0], 2.0),
        }

    monkeypatch.setattr(process, "call", call)
    flags = ["--random=3", "--draw=5", "--cells=lstm", "--repeats=4", "--devices=2"]
    assert speed.main(["speed", *flags, f"--out={tmp_path}"]) == 1
    both = ["torch.lstm", "flax.lstm"]
    assert calls == [(both, 4, 1), (["flax.lstm"], 12, 1), (both, 4, 2), (both, 4, 1)]
    report = json.loads((tmp_path / "random.json").read_text())
    assert [row["devices"] for row in report["rows"]] == [1, 2]
    assert report["rows"][0]["forward"]["ratio"]["median"] == 1.2
    assert report["rows"][0]["train"]["best"] == "torch.lstm"  # was not below
    assert "first 0.90 (0.90-0.90), then 1.20" in report["again"][0]
    assert "torch.lstm forward is off by 1." in report["failed"][0]
    assert (tmp_path / "random.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "| `lstm` | train | 2 | 2.00 | 2.00 |" in printed
    assert "Left out: haiku: haiku is not installed" in printed and "FAILED: lstm at" in printed


def test_a_row_is_measured(in_process):
    row = draws.measure("ur_lstm", ["flax.lstm"], SIZE, dtype="float32", tf32=False, repeats=2)
    assert row["contender"] == "ur_lstm" and row["size"] == SIZE._asdict()
    for kind in draws.KINDS:
        assert row[kind]["best"] == "flax.lstm" and row[kind]["ratio"]["low"] > 0
