"""The comparison of runs: its table, its curves, and the wishes that cannot be met."""

import json
from pathlib import Path

import matplotlib.figure
import numpy as np
import pytest

from experiments.adding.settings import ADDING
from experiments.command import flags
from experiments.compare import __main__ as binary
from experiments.compare import figure, table
from experiments.copy.settings import COPY
from experiments.figures import curves
from experiments.settings.errors import UserError
from experiments.settings.metrics import Metric
from experiments.settings.resolver import resolve
from experiments.training import loop
from tests.experiments.support import refusal

TASKS = {"adding": ADDING, "copy": COPY}


def workdir(
    path, task="adding", mse=((0.5,), (0.25,)), finished=True, protocol="small", **settings
):
    """A workdir as a run leaves it; a row of ``mse`` has the values of an evaluation's lanes."""
    lanes = len(mse[0])
    settings = {"cell": "gru", "hidden_size": 4, "seeds": lanes, "steps": len(mse) - 1} | settings
    config = resolve(TASKS[task], protocol, settings)
    path.mkdir(parents=True)
    recorded = {"protocol": protocol, "overrides": config.overrides, "config": config.resolved()}
    (path / "config.json").write_text(json.dumps(recorded | {"identity": config.identity()}))
    name = config.task.metrics[0].name
    rows = [
        {"step": step, "examples": 64 * step, "held_out": {name: list(values)}}
        for step, values in enumerate(mse)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    timing = [{"step": step, "seconds": 1.5} for step in range(len(mse))]
    (path / "timing.jsonl").write_text("".join(json.dumps(row) + "\n" for row in timing))
    if finished:
        per_run = [{"value": value} for value in mse[-1]]
        summary = {"metrics": {name: {"per_run": per_run}}, "recurrent_parameters": 1234}
        summary["steps"] = len(mse) - 1
        (path / "summary.json").write_text(json.dumps(summary))
    return path


@pytest.fixture
def three(tmp_path):
    """Three runs: three seeds of which one diverges, one seed, one that still trains."""
    seeds = [(0.5, 0.25, 1.0), (0.5, 0.125, None), (0.25, 0.0625, None)]
    return (
        workdir(tmp_path / "a", mse=seeds),
        workdir(tmp_path / "b", cell="gato", s_update="zero", mse=[(0.5,), (0.125,)]),
        workdir(tmp_path / "c", cell="gato", steps=9, finished=False),
    )


def test_the_table(three, tmp_path, capsys):
    text = table.run(three, "mean", tmp_path / "figure.png")
    gato = 2 * (2 * 4 + 32 * 4 + 33)
    assert text.splitlines() == [
        "| cell               | protocol | parameters | mse: mean [min, max] | seconds |",
        "| ------------------ | -------: | ---------: | -------------------: | ------: |",
        "| gru                |    small |      1,234 |       ∞ [0.0625, ∞]* |       4 |",
        "| gato s_update=zero |    small |      1,234 |               0.1250 |       3 |",
        f"| gato               |    small |        {gato} |     0.2500 at step 1 |       3 |",
    ]
    assert text in capsys.readouterr().out


def test_a_run_that_trains_on_devices_elsewhere_is_shown(tmp_path):
    run = workdir(tmp_path / "a", steps=9, finished=False, mesh="data:64")
    assert "0.2500 at step 1" in table.run([run], "mean", tmp_path / "figure.png")


def test_the_curves(three, tmp_path, drawn):
    path = tmp_path / "new" / "figure.png"
    table.run(three, "mean", path)
    assert path.read_bytes().startswith(b"\x89PNG")
    (axes,) = drawn[0].axes
    a, b, c, baseline = axes.lines
    assert [line.get_label() for line in (a, b, c)] == ["gru*", "gato s_update=zero", "gato"]
    np.testing.assert_array_equal(a.get_xdata(), [0, 64, 128])
    # A mean over seeds of which one has diverged is infinite.
    np.testing.assert_allclose(a.get_ydata(), [1.75 / 3, np.nan, np.nan], rtol=1e-12)
    np.testing.assert_array_equal(b.get_ydata(), [0.5, 0.125])
    np.testing.assert_array_equal(baseline.get_ydata(), [1 / 6, 1 / 6])
    (band,) = axes.collections  # a single seed has none
    corners = {tuple(corner) for corner in band.get_paths()[0].vertices.tolist()}
    assert corners == {(0, 0.25), (0, 1)}


def test_validation_is_called_so(tmp_path, drawn):
    """A finished run has been tested; of another one there is validation alone."""
    a, b = workdir(tmp_path / "a"), workdir(tmp_path / "b", cell="lstm", steps=9, finished=False)
    for path in (a / "metrics.jsonl", b / "metrics.jsonl"):
        path.write_text(path.read_text().replace("held_out", "validation"))
    text = table.run([a, b], "mean", tmp_path / "figure.png")
    results = [line.split("|")[4].strip() for line in text.splitlines()[2:]]
    assert results == ["0.2500", "0.2500 at step 1 (validation)"]
    assert drawn[0].axes[0].get_ylabel() == "validation mse"


@pytest.mark.parametrize("length", [5, 25, 45, 120])
def test_the_legend_is_within_the_figure(length, tmp_path, drawn):
    words = "lstm detach_prob=0.25 zoneout_c=0.5 clip_norm=0 " * 3
    labels = [f"{number} {words}"[:length] for number in range(5)]
    lines = [curves.Curve(name, np.arange(2), np.full((2, 1), 0.1)) for name in labels]
    metric = Metric("mse", False, 1 / 6, "baseline")
    figure.draw(lines, metric, "held-out", "mean", "title", tmp_path / "figure.png", print)
    (legend,) = drawn[0].legends
    assert [text.get_text() for text in legend.get_texts()] == labels
    box, page = legend.get_window_extent(), drawn[0].bbox
    assert page.x0 <= box.x0 < box.x1 <= page.x1
    assert page.y0 <= box.y0 < box.y1 <= page.y1


@pytest.mark.parametrize(("error", "top"), [(0.1, 1 / 3), (40.0, 41.0)])
def test_errors_far_above_the_baseline_are_drawn(error, top, tmp_path, drawn):
    table.run([workdir(tmp_path / "a", mse=[(41.0,), (error,)])], "mean", tmp_path / "figure.png")
    low, high = drawn[0].axes[0].get_ylim()
    assert low == 0
    assert top <= high * (1 + 1e-12) <= 1.1 * top


def test_bands():
    """A seed without a number is infinitely bad, on the side where that is."""
    nan = np.nan
    values = np.array([[1.0, 2.0, 6.0, 3.0, 8.0], [nan, 2.0, nan, 3.0, 1.0], [nan] * 5])
    for higher, lower, upper in ((False, 1, nan), (True, nan, 3)):
        np.testing.assert_array_equal(
            curves.band(values, "mean", higher),
            [[4, nan, nan], [1, lower, nan], [8, upper, nan]],
        )
    np.testing.assert_array_equal(
        curves.band(values, "median", False), [[3, 3, nan], [2, 2, nan], [6, nan, nan]]
    )
    np.testing.assert_array_equal(
        curves.band(values, "median", True), [[3, 1, nan], [2, nan, nan], [6, 2, nan]]
    )


def test_another_metric(tmp_path, drawn):
    a, b = workdir(tmp_path / "a"), workdir(tmp_path / "b", cell="lstm", steps=9, finished=False)
    for path, shift in ((a, 0), (b, 1)):
        rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        for row in rows:
            step = row["step"]
            row["held_out"]["loss"] = [10 + step + shift]
            row["train_loss"] = [20 + step + shift if step else None]
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = json.loads((a / "summary.json").read_text())
    summary["metrics"]["loss"] = {"per_run": [{"value": 7.0}]}
    (a / "summary.json").write_text(json.dumps(summary))

    def results(wanted):
        text = table.run([a, b], "mean", tmp_path / "figure.png", wanted).splitlines()
        cells = [line.split("|")[4].strip() for line in text]
        axes = drawn[-1].axes[0]
        ys = [line.get_ydata().tolist() for line in axes.lines[:2]]
        return cells[0], cells[2:], ys, axes.get_ylabel()

    assert results("loss") == (
        "loss: mean [min, max]",
        ["7.0000", "12.0000 at step 1"],
        [[10, 11], [11, 12]],
        "held-out loss",
    )
    assert results("train_loss") == (
        "training loss: mean [min, max]",
        ["21.0000", "22.0000 at step 1"],
        [[21], [22]],
        "training loss",
    )


def test_a_result_that_was_chosen_by_its_own_set_is_marked(tmp_path):
    seeds = [(0.0,), (0.75,)]
    best, last = (
        workdir(tmp_path / str(keep), task="copy", mse=seeds, keep_best=keep)
        for keep in (True, False)
    )
    text = table.run([best, last], "mean", tmp_path / "figure.png").splitlines()
    assert [line.split("|")[4].strip() for line in text[2:]] == ["0.7500 (best)", "0.7500"]


def test_a_run_that_has_only_begun(tmp_path):
    begun = workdir(tmp_path / "a", mse=[(0.5,)], steps=9, finished=False)
    assert "0.5000 at step 0" in table.run([begun], "mean", tmp_path / "figure.png")
    with pytest.raises(UserError, match="has no evaluation yet"):
        table.run([begun], "mean", tmp_path / "figure.png", "train_loss")
    with pytest.raises(UserError, match="--metric=bleu: adding has mse, loss and train_loss"):
        table.run([begun], "mean", tmp_path / "figure.png", "bleu")


def test_many_lines_differ():
    looks = [tuple(curves.line_style(index).values()) for index in range(24)]
    assert len(set(looks)) == 24


def test_accuracy_of_a_diverged_run(tmp_path):
    seeds = [(0.0, 0.0), (0.75, None)]
    a = workdir(tmp_path / "a", task="copy", mse=seeds)
    b = workdir(tmp_path / "b", task="copy", mse=[(0.0, 0.0), (0.5, 0.75)], length=9)
    text = table.run([a, b], "median", tmp_path / "figure.png")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert cells[0][3] == "copied_token_probability: mean [min, max]"
    assert [row[3] for row in cells[2:]] == ["- [-, 0.7500]*", "0.6250 [0.5000, 0.7500]"]
    assert [row[0] for row in cells[2:]] == ["gru", "gru length=9"]


def test_a_row_for_each_learning_rate(tmp_path):
    rates = {"learning_rates": (1e-2, 1e-3), "seeds": 2}
    lanes = [(0.5, 0.5, 0.5, 0.5), (0.5, 0.25, None, 0.125)]
    a = workdir(tmp_path / "a", mse=lanes, **rates)
    names, results = zip(
        *[
            (line.split("|")[1].strip(), line.split("|")[4].strip())
            for line in table.run([a], "mean", tmp_path / "figure.png").splitlines()[2:]
        ],
        strict=True,
    )
    assert names == ("gru learning_rate=0.01", "gru learning_rate=0.001")
    assert results == ("0.3750 [0.2500, 0.5000]", "∞ [0.1250, ∞]*")


def names_of(*workdirs, path):
    """The first column of the table."""
    lines = table.run(workdirs, "mean", path).splitlines()[2:]
    return [line.split("|")[1].strip() for line in lines]


def test_runs_that_are_the_same_have_their_directories(tmp_path):
    a, b = workdir(tmp_path / "a"), workdir(tmp_path / "b", steps=9, finished=False)
    other = workdir(tmp_path / "c", cell="gato")
    assert names_of(a, b, other, path=tmp_path / "x.png") == ["gru in a", "gru in b", "gato"]


def test_as_much_of_the_directories_as_tells_them_apart(tmp_path, monkeypatch):
    places = ("one/a", "two/a", "two/b", "two/c/a")
    runs = [workdir(tmp_path / place) for place in places]
    names = names_of(*runs, path=tmp_path / "x.png")
    assert names == ["gru in one/a", "gru in two/a", "gru in b", "gru in c/a"]
    monkeypatch.chdir(tmp_path / "one" / "a")  # where a relative path has no name
    (tmp_path / "one" / "b").symlink_to(tmp_path / "two" / "b")
    dot, dots = (Path(place) for place in (".", "../../two/a"))
    assert names_of(dot, dots, path=tmp_path / "x.png") == ["gru in one/a", "gru in two/a"]


def test_what_two_protocols_share_is_told_apart_by_them(tmp_path, drawn):
    settings = {"learning_rates": (1e-3,)}
    runs = [
        workdir(tmp_path / "1" / "a", **settings),
        workdir(tmp_path / "2" / "a", protocol="ur", **settings),
        workdir(tmp_path / "3" / "a", protocol="ur", **settings),
    ]
    assert names_of(*runs, path=tmp_path / "x.png") == ["gru", "gru in 2/a", "gru in 3/a"]
    legend = [text.get_text() for text in drawn[0].legends[0].texts]
    assert legend == ["gru (small)", "gru in 2/a (ur)", "gru in 3/a (ur)"]


def test_numbers_that_are_almost_the_same_have_their_own_names(tmp_path):
    rates = {"learning_rates": (1e-3, 1.0000001e-3)}
    a = workdir(tmp_path / "a", mse=[(0.5, 0.5), (0.5, 0.25)], seeds=1, **rates)
    assert names_of(a, path=tmp_path / "x.png") == [
        *("gru learning_rate=0.001", "gru learning_rate=0.0010000001")
    ]


def test_a_real_run(tmp_path, drawn, capsys):
    settings = {"cell": "rnn", "hidden_size": 2, "length": 2, "held_out_sequences": 4}
    config = resolve(ADDING, "small", settings | {"batch_size": 2, "steps": 1})
    summary = loop.run(config, tmp_path / "run")
    capsys.readouterr()
    table.run([tmp_path / "run"], "median", tmp_path / "figure.png")
    printed = capsys.readouterr().out
    row = [cell.strip() for cell in printed.splitlines()[2].split("|")[1:-1]]
    value = summary["metrics"]["mse"]["mean"]
    parameters = f"{2 * (2 + 2 + 2)}"  # two bias vectors, as torch has
    assert row == ["rnn", "small", parameters, f"{value:.4f}", f"{summary['seconds']:.0f}"]
    assert drawn[-1].axes[0].lines[0].get_ydata()[-1] == value


def refused(*workdirs):
    return refusal(table.run, workdirs, "mean", workdirs[0] / "figure.png")


def test_what_cannot_be_compared(tmp_path):
    a, b = workdir(tmp_path / "a"), workdir(tmp_path / "b", task="copy")
    assert refused(a, b) == "these runs are of different tasks: adding and copy."
    c = workdir(tmp_path / "c", task="copy", headline="accuracy")
    metrics = "copied_token_probability and accuracy"
    assert refused(b, c) == f"these runs have different metrics: {metrics}."
    assert refused(a, tmp_path) == f"{tmp_path} is not a workdir: it has no config.json."
    with pytest.raises(UserError, match=r"the figure .*x\.foo cannot be written: .*foo"):
        table.run([a], "mean", tmp_path / "x.foo")
    (a / "metrics.jsonl").unlink()
    assert refused(a) == f"the run in {a} has no evaluation yet."
    (a / "config.json").write_text("{")
    assert refused(a) == f"{a / 'config.json'} is damaged: it is not a JSON object."


def start(*argv):
    given, arguments = flags.parse_with_arguments(["compare", *argv], binary.define)
    binary.begin({**given, "arguments": arguments})


def test_the_command_line(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(table, "run", lambda *arguments: calls.append(arguments))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made").mkdir()
    start("a", "--style=median", "b", "--figure=x/y.png", "--metric=loss")
    start("a")
    workdirs, *others = calls[0]
    assert [str(path) for path in workdirs] == ["a", "b"]
    assert others == ["median", Path("x/y.png"), "loss"]
    assert calls[1][1:] == ("mean", Path("runs/comparison.png"), None)


@pytest.mark.parametrize(
    ("higher", "values", "top"),
    [(True, [0.1, 0.9], 1.03), (True, [3.0, 8.0], 8.24), (False, [0.1, 5.0], 0.4)],
)
def test_the_axis_has_all_of_an_accuracy_and_of_a_return(higher, values, top):
    axes = matplotlib.figure.Figure().subplots()
    curve = curves.Curve("lstm", np.array([0, 1]), np.array(values)[:, None])
    axes.plot(curve.x, curve.values)
    curves.limit(axes, Metric("score", higher, 0.2, "chance"), [curve])
    assert axes.get_ylim() == pytest.approx((0, top))


@pytest.mark.parametrize(
    ("place", "path"),
    [
        ("made", "made/comparison.png"),
        ("made/", "made/comparison.png"),
        ("new/", "new/comparison.png"),
        ("new", "new.png"),
        ("new/curve.pdf", "new/curve.pdf"),
    ],
)
def test_where_the_figure_goes(place, path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made").mkdir()
    start(str(workdir(tmp_path / "a")), f"--figure={place}")
    assert f"\nfigure: {path}\n" in capsys.readouterr().out
    assert (tmp_path / path).stat().st_size > 5000


BAD = {
    "": "Name at least one workdir",
    "a --style=mode": "--style=mode: it must be one of mean, median",
    "a b a": "a is named twice",
    "a b/../a/": "is named twice",
    "a --figure=": "--figure= has no value",
}


@pytest.mark.parametrize("wish", BAD)
def test_bad_wishes_get_one_sentence(wish, monkeypatch):
    monkeypatch.setattr(table, "run", pytest.fail)
    assert BAD[wish] in refusal(start, *wish.split())


def test_exit_codes(tmp_path, program):
    code, out, err = program("experiments.compare", str(tmp_path))
    sentence = f"{tmp_path} is not a workdir: it has no config.json."
    assert (code, out, err) == (2, "", f"experiments.compare: {sentence}\n")
    code, out, err = program("experiments.compare", "--stile=mean", "a")
    assert (code, out) == (2, "")
    assert err == "experiments.compare: There is no flag --stile; did you mean --style?\n"
    code, out, err = program("experiments.compare", "--help")
    assert (code, err) == (0, "")
    for text in ("DIR [DIR ...]", "\n  --style=mean|median", "\n  --figure=FIGURE"):
        assert text in out
