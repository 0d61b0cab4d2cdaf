"""Random sizes: what is drawn, whom ours is beside, and what becomes of a row that is slow."""

import functools
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
@pytest.mark.parametrize(
    ("name", "cell"),
    [*itertools.product(("haiku", "equinox", "memax"), ("lstm", "gru")), ("memax", "lru")],
)
def test_optional_peers_compute_what_we_do(name, cell):
    peer = peers.PEERS[name]
    theirs = peer.contender(cell)
    side = peer.build(theirs, SIZE, "float32")
    pair.check(name, side, theirs, SIZE, "float32", TOLERANCE)


@pytest.mark.parametrize(("cell", "form"), [("gru", "reset before"), ("lstm", "plain output")])
@pytest.mark.long
def test_a_form_has_other_equations(cell, form):
    plain, other = Contender(cell), Contender(cell, form=form)
    assert str(plain) == str(other)
    with pytest.raises(Exception, match="forward is off by"):
        side = ours.side(other, SIZE, "float32")
        pair.check("other", side, plain, SIZE, "float32", TOLERANCE)


def test_runs_take_turns_and_the_best_peer_is_that_of_the_smallest_median():
    order, clock = [], itertools.count()

    def run(name):
        order.append(name)
        return {"ours": 9.0, "a": 1.0, "b": 2.0, "slow": 2.5}[name] + next(clock)

    runs = {name: functools.partial(run, name) for name in ("ours", "a", "b", "slow")}
    times = draws.in_turn(runs, 2)  # the first round: 9, 2, 4, 5.5, of which 2 is the least
    assert order == ["ours", "a", "b", "slow", "ours", "a", "b", "a", "b", "ours"]
    assert times == {"ours": [13.0, 18.0], "a": [6.0, 8.0], "b": [8.0, 10.0], "slow": [5.5]}
    said = draws.beside_best({"ours": [2.0, 4.0, 4.0], "a": [9.0, 9.0, 9.0], "b": [8.0, 2.0, 4.0]})
    assert said["best"] == "b" and said["seconds"] == {"ours": 4.0, "a": 9.0, "b": 4.0}
    assert said["ratio"] == pair.summary([4.0, 0.5, 1.0])


class Sides:
    """Sides that say what they were asked, and take what a list says."""

    def __init__(self, size, devices):
        self.size, self.devices, self.asked = size, devices, []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.asked.append("closed")

    def send(self, method, **arguments):
        self.asked.append(arguments["name"])

    def answer(self):
        if self.asked[-1] == "torch.gru":
            raise process.ProcessError("MismatchError: torch.gru forward is off by 1.")
        return {"device": "cpu x 1", "compile_seconds": 1.0}

    def ask(self, method, *, kind):
        self.asked.append(kind)
        calls = self.asked.count(kind)
        if self.asked[0] == "lstm":
            return {"forward": 1.0, "train": 2.0}[kind]
        # flax is the faster of both, at first faster than ours as well
        if self.asked[0] == "flax.lstm":
            return {"forward": 0.9 if calls < 5 else 1.2, "train": 4.0}[kind]
        return {"forward": 1.1, "train": 5.0}[kind]


class Equal(Sides):
    """Sides that are equally fast."""

    def answer(self):
        return {"device": "cpu x 1", "compile_seconds": 1.0}

    def ask(self, method, *, kind):
        return 1.0


def test_a_draw_that_was_stopped_goes_on(monkeypatch, tmp_path, capsys):
    made = []
    machine = {"platform": "cpu", "device": "cpu x 1", "versions": {"jax": "1"}, "missing": {}}
    monkeypatch.setattr(process, "call", lambda *_: machine)
    monkeypatch.setattr(
        pair, "hold", lambda size, devices, **_: made.append(size) or Equal(size, devices)
    )

    def run(*more, count=3):
        flags = ["--draw=5", "--cells=lstm,gru", "--peers=torch", "--devices=2", *more]
        made.clear()
        try:
            return speed.main(["speed", f"--random={count}", *flags, f"--out={tmp_path / 'out'}"])
        except SystemExit:
            return capsys.readouterr().err

    def rows():
        return json.loads((tmp_path / "out" / "random.json").read_text())["rows"]

    assert "--resume: there is no" in run("--resume")
    assert run() == 0
    whole, sizes = rows(), draws.sizes(3, 5)
    report = json.loads((tmp_path / "out" / "random.json").read_text())
    report["rows"] = whole[:3]  # of the second size one cell is missing
    (tmp_path / "out" / "random.json").write_text(json.dumps(report))
    assert run("--resume") == 0
    assert made == [sizes[1]] * 2 + [sizes[2]] * 2
    assert rows() == whole
    assert run("--resume", count=4) == 0
    assert made == [draws.sizes(4, 5)[3]] * 2
    assert "repeats differs" in run("--resume", "--repeats=3")


def test_a_row_below_is_measured_again(monkeypatch, tmp_path, capsys):
    made = []
    missing = {name: f"{name} is not installed" for name in peers.PEERS if name != "flax"}
    del missing["torch"]
    machine = {"platform": "cpu", "device": "cpu x 1", "versions": {"jax": "1"}}

    def call(function, arguments, devices):
        if function.endswith("rates"):
            return {"operations_per_second": 1e9, "bytes_per_second": 1e12}
        return machine | {"missing": missing}

    def hold(size, devices, **settings):
        assert settings == {"dtype": "float32", "tf32": False}
        made.append(Sides(size, devices))
        return made[-1]

    monkeypatch.setattr(process, "call", call)
    monkeypatch.setattr(pair, "hold", hold)
    monkeypatch.setattr(draws, "DOMINATED", 1)
    flags = ["--random=2", "--draw=5", "--cells=lstm,gru", "--repeats=3", "--devices=2", "--floor"]
    assert speed.main(["speed", *flags, f"--out={tmp_path}"]) == 1
    report = json.loads((tmp_path / "random.json").read_text())
    sizes = draws.sizes(2, 5)
    assert [side.devices for side in made] == [1, 1, 1, 2, 1, 1]  # peers have one device
    assert [side.size for side in made] == [sizes[0]] * 3 + [sizes[1]] * 3
    # A round that does not count, three that do; of forward nine more of all sides, after one that
    # does not count.
    ours_, torch, flax = (side.asked for side in made[:3])
    forward = ["forward"] * 4
    assert ours_ == ["lstm", *forward, *["train"] * 4, *["forward"] * 10, "gru", "closed"]
    assert torch[:19] == ["torch.lstm", *forward, *["train"] * 4, *["forward"] * 10]
    assert torch[19:] == ["torch.gru", "closed"]
    assert flax[:19] == ["flax.lstm", *forward, *["train"] * 4, *["forward"] * 10]
    first, _ = report["rows"]
    assert [row["devices"] for row in report["rows"]] == [1, 2]
    assert first["forward"]["ratio"]["median"] == 1.1 and first["forward"]["best"] == "torch.lstm"
    assert first["forward"]["seconds"] == {"ours": 1.0, "torch.lstm": 1.1, "flax.lstm": 1.2}
    assert first["train"]["best"] == "flax.lstm" and first["train"]["ratio"]["median"] == 2.0
    assert "forward: first 0.90 (0.90-0.90) beside flax.lstm, then 1.10" in report["again"][0]
    assert len(report["failed"]) == 2 and "torch.gru forward is off by 1." in report["failed"][0]
    assert (tmp_path / "random.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "| `lstm` | train | 2 | 2.00 | 2.00 |" in printed
    assert "Left out: haiku: haiku is not installed" in printed and "FAILED: gru at" in printed
    least = floor.count(Contender("lstm"), sizes[0])["operations"] / 1e9
    assert f"| {1e3 * least:,.1f} | {2 / least:.2f} | {5 / least:.2f} |" in printed


@pytest.mark.long
def test_a_row_is_measured(in_process):
    held = {name: pair.hold(SIZE, 1, dtype="float32", tf32=False) for name in ("ours", "flax")}
    row, again = draws.measure("ur_lstm", ["flax.lstm"], SIZE, held, 2)
    assert row["contender"] == "ur_lstm" and row["size"] == SIZE._asdict()
    for kind in pair.KINDS:
        assert row[kind]["best"] == "flax.lstm" and row[kind]["ratio"]["low"] > 0
    assert all(line.split()[0] in pair.KINDS for line in again)
