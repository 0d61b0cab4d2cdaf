"""The comparisons: values before times, ratios pair by pair, and what is written down."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import rnn

import recurrent_gates as rg
from benchmarks import floor, ours, pair, peers, process, speed
from benchmarks.work import Contender, MismatchError, Size, check_equal, make

SIZE = Size(2, 5, 3, 4)
TOLERANCE = 1e-5  # of float32: sums of some tens of terms


# What is compared


@pytest.mark.parametrize("text", ["lstm", "gato1/scan", "lstm/fused+detach0.25*3"])
def test_a_contender_is_what_it_is_written(text):
    assert str(Contender.parse(text)) == text


def test_a_contender_has_every_part():
    assert Contender.parse("ur_lstm/scan+detach0.5*3") == Contender("ur_lstm", "scan", 0.5, 3)


@pytest.mark.parametrize("text", ["lstn", "lstm+detach", "lstm/none", "lstm*"])
def test_a_wrong_contender_is_refused(text):
    with pytest.raises(ValueError):
        Contender.parse(text)


@pytest.mark.parametrize("text", ["1,2,3", "1,2,3,0", "1,2,3,x", "1,2,3,4,5", ""])
def test_a_wrong_size_is_refused(text):
    with pytest.raises(ValueError, match="four positive numbers"):
        speed.parse_sizes(text)


@pytest.mark.parametrize(
    "contender, other, expected",
    [
        ("lstm", "torch", "torch.lstm"),
        ("gru/scan", "flax", "flax.gru"),
        ("gru", "haiku", "haiku.gru"),
        ("gru+detach0.5", "haiku", None),
        ("ur_lstm", "torch", "torch.lstm"),
        ("ur_lstm", "flax", None),
        ("lstm+detach0.5", "torch", "torch.lstm"),  # forward and backward are not the same work
        ("lstm+detach0.5", "flax", None),
        ("lstm*3", "torch", None),
        ("lstm+detach0.5*3", "lstm", "lstm*3"),
        ("lstm+detach0.5", "scan", "lstm/scan+detach0.5"),
        ("lstm/scan", "scan", None),
        ("lstm", "lstm", None),
    ],
)
def test_the_other_side(contender, other, expected):
    assert speed.opponent(Contender.parse(contender), other) == expected


def test_flags_replace_their_part_of_the_plan():
    nothing = {"cells": None, "sizes": None, "peers": None}
    rows = speed.plan(nothing, "cpu")
    assert speed.Comparison("gru", "torch.gru", Size(50, 784, 1, 512)) in rows
    assert speed.Comparison("lstm+detach0.5*3", "lstm*3", Size(32, 520, 10, 256)) in rows
    assert speed.Comparison("gato2", "torch.lstm", Size(64, 750, 2, 512)) in rows
    gpu = speed.plan(nothing, "gpu")
    assert speed.Comparison("gato2", "gato2/newton", Size(1, 65536, 4, 512)) in gpu
    few = speed.plan({"cells": "gru", "sizes": "1,2,3,4", "peers": "torch,scan"}, "cpu")
    assert few == [
        ("gru", "torch.gru", Size(1, 2, 3, 4)),
        ("gru", "gru/scan", Size(1, 2, 3, 4)),
    ]


# Values


@pytest.mark.parametrize("text", ["lstm", "gru", "ur_lstm+detach0.5", "gato2", "gru*2"])
@pytest.mark.long
def test_our_side_computes_what_the_scan_does(text):
    contender = Contender.parse(text)
    pair.check(text, ours.side(contender, SIZE, "float32"), contender, SIZE, "float32", 1e-5)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_flax_computes_what_we_do(cell):
    contender = Contender(cell)
    side = peers.flax_side(contender, SIZE, "float32")
    pair.check(cell, side, contender, SIZE, "float32", TOLERANCE)


def test_jax_is_given_its_layout(monkeypatch):
    """cuDNN needs a GPU; JAX's reference reads the same packed weights on any machine."""

    def lstm(x, h, c, weights, lengths, *sizes):
        return rnn.lstm_ref(x, h, c, *rnn.unpack_lstm_weights(weights, *shape), lengths, *sizes)

    shape = (SIZE.inputs, SIZE.features, 1, False)
    monkeypatch.setattr(rnn, "lstm", lstm)
    contender = Contender("lstm")
    side = peers.jax_side(contender, SIZE, "float32")
    pair.check("jax", side, contender, SIZE, "float32", TOLERANCE)


def side_that(change):
    """A side whose recurrence is ours but for a change of (params, xs, carry)."""
    contender = Contender("lstm", "scan")
    run = ours.recurrence(contender, SIZE, "float32")

    def changed(params, xs, carry, noise):
        return run(*change(params, xs, carry), noise)

    return ours.compiled_side(changed, make(contender, SIZE))


@pytest.mark.parametrize(
    "change, where",
    [
        (lambda p, x, c: (p, 1.001 * x, c), r"forward is off by"),
        (lambda p, x, c: (p, x, jax.lax.stop_gradient(c)), r"gradient.carry.c is off by"),
        (lambda p, x, c: (p, jax.lax.stop_gradient(x), c), r"gradient.xs is off by"),
        (
            lambda p, x, c: ({**p, "bias": jax.lax.stop_gradient(p["bias"])}, x, c),
            r"gradient.params\['bias'\]\['f'\] is off by",
        ),
        (lambda p, x, c: (p, x * jnp.nan, c), r"forward is off by nan"),
    ],
)
def test_a_side_that_computes_something_else_is_refused(change, where):
    with pytest.raises(MismatchError, match=where):
        pair.check("it", side_that(change), Contender("lstm"), SIZE, "float32", TOLERANCE)


def test_what_is_missing_or_of_another_shape_is_refused():
    with pytest.raises(MismatchError, match=r"x\['b'\] is missing"):
        check_equal("x", {"a": 1.0}, {"a": 1.0, "b": 2.0}, TOLERANCE)
    with pytest.raises(MismatchError, match=r"x\['a'\] has shape \(1,\), not \(2,\)"):
        check_equal("x", {"a": jnp.ones(1)}, {"a": jnp.ones(2)}, TOLERANCE)


# Times


def test_a_call_after_a_pause_is_not_counted(monkeypatch):
    now, calls = [100.0], []

    def run():
        calls.append(now[0])
        now[0] += 5.0 if len(calls) in (1, 3) else 2.0

    monkeypatch.setattr(pair.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(pair.time, "sleep", lambda seconds: None)
    sides = pair.Sides(SIZE, "float32", tf32=False)
    sides._side = ours.Side(run, run, lambda ys: ys, lambda gradients: gradients, {})
    assert sides.seconds("forward") == 2.0
    now[0] += 1.5
    assert sides.seconds("forward") == 2.0
    now[0] += 0.05
    assert sides.seconds("forward") == 2.0
    assert len(calls) == 5


def test_ratios_are_of_neighbours_and_sides_take_turns_to_begin():
    order = []
    times = {"ours": iter([9.0, 1.0, 2.0, 4.0]), "theirs": iter([9.0, 3.0, 4.0, 6.0])}

    def timer(name):
        order.append(name)
        return next(times[name])

    found = pair.interleave("ours", "theirs", 3, timer)
    assert order == ["ours", "theirs"] * 2 + ["theirs", "ours"] + ["ours", "theirs"]
    # The first of each is not counted; the ratios are 3/1, 4/2, 6/4, not the medians' 4/2.
    assert found["ratio"] == pytest.approx({"median": 2.0, "low": 1.75, "high": 2.5})
    assert found["ours"]["median"] == 2.0 and found["theirs"]["median"] == 4.0
    assert found["ratio_ours_first"] == 2.25 and found["ratio_theirs_first"] == 2.0


@pytest.mark.parametrize(
    ("size", "devices"),
    [
        (Size(48, 100, 100, 100), 4),
        (Size(47, 100, 100, 100), 1),  # is divided by none
        (Size(36, 100, 100, 100), 3),  # 9 rows each would be too few
        (Size(22, 500, 100, 100), 1),
        (Size(48, 10, 100, 100), 1),  # 2.3e8 operations
        (Size(48, 62, 300, 300), 2),  # for three devices there are 992 rows of all steps each
        (Size(40, 3, 289, 1014), 1),
    ],
)
def test_devices_share_a_batch_where_each_has_rows_and_work(monkeypatch, size, devices):
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    assert ours.devices_of(Contender("lstm"), size) == devices


# The floor


def test_operations_of_an_lstm():
    # Per row and gate: W x is 2 * D, U h is 2 * F; three forms of each product, four gates of F.
    steps, D, F = 2 * 5, 3, 4
    expected = steps * 3 * 4 * F * (2 * D + 2 * F)
    assert floor.count(Contender("lstm"), SIZE)["operations"] == expected
    detached = floor.count(Contender("lstm", detach=0.5, lanes=2), SIZE)["operations"]
    assert detached == 2 * (expected - 0.5 * steps * 4 * F * 2 * F)


def test_operations_of_linear_recurrences():
    # A minGRU has two kernels of D x F and no other product. An LRU has, in real numbers, two
    # kernels of D x F and two of F x F to its outputs, and its inputs pass it by in one of D x F.
    steps, D, F = 2 * 5, 3, 4
    assert floor.count(Contender("mingru"), SIZE)["operations"] == steps * 3 * 2 * 2 * D * F
    expected = steps * 3 * 2 * (2 * D * F + 2 * F * F + D * F)
    assert floor.count(Contender("lru"), SIZE)["operations"] == expected


def test_bytes_of_gato_do_not_grow_with_the_hidden_layer():
    def rows(cell):
        params = jax.eval_shape(
            lambda key: rg.CELLS[cell](4).init_params(key, 3), jax.random.key(0)
        )
        weights = sum(leaf.size for leaf in jax.tree.leaves(params))
        return floor.count(Contender(cell), SIZE)["bytes"] - 4 * 3 * weights

    # x, f's two pre-activations, r, s, y; back: these and y's cotangent, 2 * 2J, x twice and d x.
    J, D = 2, 3
    assert rows("gato1") == 4 * 10 * ((D + 2 * J + 2 * J + 4) + (2 * J + 2 * J + 4) + 4 * J + 3 * D)
    assert rows("gato2") == rows("gato1")


def test_rates_are_positive(in_process):
    assert all(rate > 0 for rate in floor.rates(scale=8).values())


# The program


@pytest.mark.long
def test_the_program_writes_what_it_measured(in_process, tmp_path, capsys):
    argv = ["speed", "--cells=gru", "--sizes=2,5,3,4", "--peers=flax,torch,scan,newton,ur_lstm"]
    missing = {"platform": "cpu", "device": "cpu x 1", "versions": {"jax": "1"}}
    missing["missing"] = {"torch": "torch is not installed"}
    pair_machine, pair.machine = pair.machine, lambda **settings: missing
    try:
        status = speed.main([*argv, "--repeats=2", f"--out={tmp_path}"])
    finally:
        pair.machine = pair_machine
    assert status == 0
    report = json.loads((tmp_path / "speed.json").read_text())
    rows = {row["other"]: row for row in report["rows"]}
    assert list(rows) == ["flax.gru", "gru/scan", "ur_lstm"]
    assert [row["same_equations"] for row in rows.values()] == [True, True, False]
    assert report["left_out"][0] == "torch: torch is not installed"
    assert "GRU does not say that its recurrent Jacobian is diagonal" in report["left_out"][1]
    assert report["settings"]["repeats"] == 2 and not report.get("failed")
    for row in rows.values():
        assert row["size"] == {"batch": 2, "steps": 5, "inputs": 3, "features": 4}
        assert all(0 <= row[side]["error"] < row[side]["tolerance"] for side in ("ours", "theirs"))
        train = row["train"]
        assert train["ratio"]["low"] <= train["ratio"]["median"] <= train["ratio"]["high"]
        assert row["ours"]["temporary_bytes"] > 0 and row["ours"]["compile_seconds"] > 0
    printed = capsys.readouterr().out
    assert (tmp_path / "speed.md").read_text() == printed
    assert printed.count("| 2, 5, 3, 4 | `gru` |") == 3
    assert "`ur_lstm` (another model)" in printed and "Left out: torch" in printed
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_a_mismatch_fails_the_program(in_process, tmp_path, capsys, monkeypatch):
    wrong = peers.PEERS["flax"]._replace(
        build=lambda *arguments: side_that(lambda p, x, c: (p, -x, c))
    )
    monkeypatch.setitem(peers.PEERS, "flax", wrong)
    argv = ["speed", "--cells=lstm", "--sizes=2,5,3,4", "--peers=flax", f"--out={tmp_path}"]
    assert speed.main(argv) == 1
    report = json.loads((tmp_path / "speed.json").read_text())
    assert not report["rows"]
    assert "MismatchError: flax.lstm forward is off by" in report["failed"][0]
    assert "FAILED: lstm beside flax.lstm" in capsys.readouterr().out


def test_a_floor_is_the_larger_of_two_times():
    row = {"work": {"operations": 4e9, "bytes": 1e6}, "train": {"ours": {"median": 6.0}}}
    slow, fast = {"operations_per_second": 2e9}, {"bytes_per_second": 1e9}
    cells = speed.speed_report.floor_cells(row, {**slow, **fast})
    assert cells == ["4.0", "1", "2,000.0", "3.0"]
    cells = speed.speed_report.floor_cells(row, {**slow, "bytes_per_second": 2.5e5})
    assert cells == ["4.0", "1", "4,000.0 (bytes)", "1.5"]


@pytest.mark.parametrize(
    "flag, sentence",
    [
        ("--cells=lstn", "There is no cell 'lstn'"),
        ("--sizes=1,2,3", "A size is B,T,D,F"),
        ("--repeats=0", "repeats"),
        ("--size=1,2,3,4", "Unknown command line flag 'size'"),
        ("--cells=mingru --peers=memax", "no row: none of memax runs a cell that is asked for"),
        ("more", "There is no argument 'more'"),
        ("--random=0", "random"),
        ("--draw=1", "--draw has no effect without --random"),
        ("--random=1 --sizes=1,2,3,4", "--sizes has no effect with --random"),
        ("--random=1 --cells=lstm*4", "--random runs one lane, as the peers do, got lstm*4"),
        ("--random=1 --peers=flax,scan", "got scan"),
        ("--random=1 --cells=lstn", "There is no cell 'lstn'"),
    ],
)
def test_a_wrong_flag_ends_with_a_sentence(in_process, capsys, flag, sentence):
    with pytest.raises(SystemExit) as end:
        speed.main(["speed", *flag.split()])
    assert end.value.code == 2
    assert sentence in capsys.readouterr().err


def test_help_lists_the_flags(capsys):
    with pytest.raises(SystemExit) as end:
        speed.main(["speed", "--help"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    for flag in ("cells", "sizes", "peers", "repeats", "floor", "tf32", "devices", "out"):
        assert f"--{flag} (default" in printed


@pytest.mark.long
def test_a_process_has_its_devices_and_its_errors_have_a_sentence():
    machine = process.call("benchmarks.pair.machine", {}, 3)
    assert machine["platform"] == "cpu" and machine["device"].endswith("x 3")
    assert machine["missing"]["jax"] == "it needs an NVIDIA GPU"
    with pytest.raises(process.ProcessError, match="KeyError: 'no'"):
        process.call("benchmarks.pair.Sides", {"size": SIZE, "dtype": "no", "tf32": False}, 1)


@pytest.mark.long
def test_an_object_is_held_and_what_it_dies_of_is_said():
    with process.Held("tests.benchmarks.test_speed.Counter", {"start": 3}, 1) as held:
        held.send("more", by=4)
        held.send("more", by=1)
        assert held.answer() == 7 and held.answer() == 8
        assert held.ask("devices") == 1
        with pytest.raises(process.ProcessError, match="ZeroDivisionError: division by zero"):
            held.ask("fail")


class Counter:
    def __init__(self, start):
        self.count = start

    def more(self, by):
        print("frameworks print what they like")
        self.count += by
        return self.count

    def devices(self):
        return jax.device_count()

    def fail(self):
        return 1 / 0


def test_a_turn_is_one_long_call_or_the_median_of_short_ones():
    times = iter([0.2])
    assert pair.turn(lambda: None, lambda run: next(times)) == 0.2
    times = iter([0.02, 0.5, 0.01, 0.03])  # 1 + 2 calls follow the first
    assert pair.turn(lambda: None, lambda run: next(times)) == 0.03
    times = iter([1e-5, *range(20)])
    assert pair.turn(lambda: None, lambda run: next(times)) == 9.5


def test_a_side_is_named_with_a_point_or_without():
    assert pair.named("haiku.gru") == Contender("gru", form="reset before")
    assert pair.named("lstm/scan+detach0.5") == Contender("lstm", "scan", 0.5)
    assert pair.peer_of("torch.lstm") == "torch" and pair.peer_of("lstm+detach0.5") == ""
