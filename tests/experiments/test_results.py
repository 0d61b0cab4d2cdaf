"""Results as data: what is kept of a run, what is refused, and the page that is made of them."""

import contextlib
import dataclasses
import json
import re
import shlex
import tomllib
from unittest import mock

import numpy as np
import pytest
from absl.flags import Error

from experiments.captioning.settings import CAPTIONING
from experiments.command import flags
from experiments.copy.settings import COPY
from experiments.language_model.settings import LANGUAGE_MODEL
from experiments.records.workdir import Workdir, append_row
from experiments.results import __main__ as binary
from experiments.results import figure, page, records, sweeps
from experiments.settings.errors import UserError
from experiments.settings.metrics import Metric
from experiments.settings.resolver import resolve
from experiments.sweep import plan
from experiments.transfer_copy.settings import TRANSFER_COPY
from tests.experiments.support import ROOT, tiny

RESULTS = ROOT / "docs" / "results"
METRIC = "copied_token_probability"


def written(path, config, values, step=4, finished=True, every=2):
    """A workdir of a run with such scores, without training."""
    lanes = config.training.lanes
    assert len(values) == len(lanes)
    with contextlib.closing(Workdir(path)) as work:
        work.claim(config)
        for at in range(0, step + 1, every):
            scores = {METRIC: [0.1 + at / 100 + i / 1000 for i in range(len(lanes))]}
            row = {"step": at, "examples": 8 * at, "learning_rate": [], "train_loss": []}
            append_row(work.metrics, {**row, "diverged": [], "held_out": scores})
        append_row(work.timing, {"step": step, "seconds": 3.4, "steps": step})
        if finished:
            per_run = [
                {"seed": seed, "learning_rate": rate, "value": value, "diverged": value is None}
                for (seed, rate), value in zip(lanes, values, strict=True)
            ]
            summary = {"steps": step, "scored_on": "held_out", "recurrent_parameters": 234}
            work.write_json("summary.json", {**summary, "metrics": {METRIC: {"per_run": per_run}}})
    return path


def kept(directory, name="copy"):
    return records.read(directory / f"{name}.json").runs


# What is kept of a run.


def test_a_run_is_kept_with_all_that_it_takes_to_make_it_again(tmp_path):
    config = tiny(seeds=2, learning_rates=(0.01, 0.1234567), keep_best=True, decoder=(4, 3))
    workdir = written(tmp_path / "run", config, [0.25, 0.75, 0.5, None])
    records.add([workdir], tmp_path, "copy")
    one, other = kept(tmp_path)
    assert (one.rate, one.seeds, one.values) == (0.01, [0, 1], [0.25, 0.75])
    assert (other.rate, other.seeds, other.values) == (0.1234567, [0, 1], [0.5, None])
    assert (one.step, one.finished, one.scored_on, one.seconds) == (4, True, "held_out", 3)
    assert one.parameters == 234
    recorded = json.loads((workdir / "config.json").read_text())
    assert (one.device, one.revision) == (recorded["device"], recorded["commit"])
    assert one.settings["cell"] == "gru"
    assert one.settings["decoder"] == [4, 3]
    assert not {"seed", "seeds", "learning_rates", "steps"} & set(one.settings)
    assert one.curve["step"] == [0, 2, 4]
    assert one.watched == one.values  # of the best parameters, not of the last
    assert other.curve["value"][1] == pytest.approx([0.122, 0.123])

    words = shlex.split(one.command)
    assert words[:3] == ["python", "-m", "experiments.copy"]
    parsed = flags.parse(words[2:], lambda values: flags.define_experiment(COPY, values))
    request = flags.request(COPY, parsed)
    assert resolve(COPY, request.protocol, request.settings).identity() == config.identity()


def test_a_long_curve_is_thin_and_has_both_ends(tmp_path):
    workdir = written(tmp_path / "run", tiny(eval_every=1, steps=400), [0.5], step=400, every=1)
    records.add([workdir], tmp_path, "copy")
    (one,) = kept(tmp_path)
    assert one.curve["step"][0] == 0
    assert one.curve["step"][-1] == 400
    assert 40 <= len(one.curve["step"]) <= records.POINTS
    for step, (value,) in zip(one.curve["step"], one.curve["value"], strict=True):
        assert value == pytest.approx(0.1 + step / 100)


def test_a_directory_of_runs_is_each_of_them(tmp_path):
    for seed in (0, 1):
        written(tmp_path / "sweep" / f"{seed}", tiny(seed=seed), [0.5 + seed / 10])
    records.add([tmp_path / "sweep"], tmp_path, "copy")
    assert [(one.seeds, one.values) for one in kept(tmp_path)] == [([0], [0.5]), ([1], [0.6])]
    assert [one.watched for one in kept(tmp_path)] == [[pytest.approx(0.14)]] * 2  # the last
    (row,) = page.rows(records.read(tmp_path / "copy.json"), {})
    assert (row.values, row.finished, row.steps) == ([0.5, 0.6], True, [4])


# What is refused, and what takes the place of what.


def test_a_run_that_is_not_finished_is_kept_only_when_asked(tmp_path):
    workdir = written(tmp_path / "run", tiny(steps=9), [0.5], finished=False)
    with pytest.raises(UserError, match=r"is not finished, but at step 4: go on with it, or give"):
        records.add([workdir], tmp_path, "copy")
    assert not (tmp_path / "copy.json").exists()
    records.add([workdir], tmp_path, "copy", unfinished=True)
    (one,) = kept(tmp_path)
    assert (one.finished, one.step, one.values) == (False, 4, [pytest.approx(0.14)])


def test_a_run_that_has_gone_on_takes_its_own_place_and_no_other(tmp_path):
    def put(name, config, value, **more):
        records.add([written(tmp_path / name, config, [value], **more)], tmp_path, "copy", True)

    put("short", tiny(), 0.5)
    put("other", tiny(hidden_size=5), 0.3)
    put("seed", tiny(seed=1), 0.4)
    put("long", tiny(steps=6), 0.9, step=6)
    values = {(one.settings["hidden_size"], *one.seeds): one.values for one in kept(tmp_path)}
    assert values == {(6, 0): [0.9], (5, 0): [0.3], (6, 1): [0.4]}
    before = (tmp_path / "copy.json").read_bytes()
    put("again", tiny(steps=6), 0.9, step=6)
    assert (tmp_path / "copy.json").read_bytes() == before
    for name, value, step, sentence in (
        ("shorter", 0.5, 4, "at step 6 already, and this one is at step 4"),
        ("changed", 0.8, 6, "has other scores of .* at step 6: remove them first"),
    ):
        with pytest.raises(UserError, match=sentence) as error:
            put(name, tiny(steps=6), value, step=step)
        assert "\n" not in str(error.value)
        assert (tmp_path / "copy.json").read_bytes() == before


def test_a_setting_that_no_flag_names_makes_another_row(tmp_path):
    """A protocol's value may change from one revision to the next."""
    written(tmp_path / "a", tiny(), [0.5])
    written(tmp_path / "b", tiny(), [0.7])
    recorded = json.loads((tmp_path / "b" / "config.json").read_text())
    recorded["config"]["training"]["clip_norm"] = 7.0
    (tmp_path / "b" / "config.json").write_text(json.dumps(recorded))
    records.add([tmp_path / "a", tmp_path / "b"], tmp_path, "copy")
    rows = page.rows(records.read(tmp_path / "copy.json"), {})
    assert sorted(row.values for row in rows) == [[0.5], [0.7]]


def test_a_file_is_of_one_experiment(tmp_path):
    records.add([written(tmp_path / "run", tiny(), [0.5])], tmp_path, "copy")
    results = records.read(tmp_path / "copy.json")
    records.write(tmp_path / "copy.json", dataclasses.replace(results, experiment="adding"))
    with pytest.raises(UserError, match=r"is of adding and its .*; choose another --to"):
        records.add([tmp_path / "run"], tmp_path, "copy")


BAD = {
    "runs": "--to=NAME says which file of results the runs are for.",
    "--to=a": "--to=a needs workdirs, such as runs/sweep/adding.",
    "--to=A/b runs": "--to=A/b: the name is of small letters, digits and underscores.",
    "--directory=nowhere": "there is no directory nowhere: start from the clone's root.",
    "--to=a nowhere": "nowhere is no workdir, and holds none: there is no config.json.",
    "--of=a": "There is no flag --of; see --help.",
}


@pytest.mark.parametrize("wish", BAD)
def test_bad_wishes_get_one_sentence(wish, tmp_path):
    argv = wish.split()
    argv += [] if "--directory" in wish else [f"--directory={tmp_path}"]
    with pytest.raises((UserError, Error)) as error:
        values, rest = flags.parse_with_arguments(["results", *argv], binary.define)
        binary.begin({**values, "arguments": rest})
    assert str(error.value).startswith(BAD[wish])
    assert "\n" not in str(error.value)


# The page.


def one_record(values, rate=None, watched=None, finished=True, seed=0, **settings):
    return records.Record(
        settings={"cell": "gru", **settings},
        seeds=[seed + place for place in range(len(values))],
        values=values,
        scored_on="held_out",
        step=10,
        finished=finished,
        command="python -m experiments.copy",
        device="cpu x 2",
        rate=rate,
        watched=watched,
        curve={"step": [0, 10], "value": [[0.0] * len(values), values]},
    )


def pages(directory, runs, prose, higher=True):
    metric = Metric("score", higher, 0.5, "chance")
    records.write(directory / "some.json", records.Results("copy", metric, runs))
    (directory / "1_some.md").write_text(prose)
    return page.text(directory)


def cells(text):
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


@pytest.mark.parametrize(("higher", "best"), [(True, 0.1), (False, 0.9)])
def test_the_rate_is_chosen_by_what_was_watched_and_not_by_the_result(tmp_path, higher, best):
    runs = [
        one_record([0.9], rate=1e-2, watched=[0.2]),
        one_record([0.1], rate=1e-3, watched=[0.3]),
    ]
    table = cells(pages(tmp_path, runs, "{runs some}", higher))
    assert table[2][:3] == [f"gru rate={0.001 if higher else 0.01:g} of 2", f"{best:.4f}", "1"]
    diverged = [one_record([0.8], rate=1.0, watched=[None]), *runs]
    assert cells(pages(tmp_path, diverged, "{runs some}", higher))[2][1] == f"{best:.4f}"


def test_the_choice_of_a_rate_counts_a_seed_once(tmp_path):
    twice = [one_record([0.9], rate=1e-2, watched=[watched]) for watched in (0.2, 0.2)]
    once = one_record([0.9], rate=1e-2, watched=[0.8], seed=1)  # 0.5 in the mean of two seeds
    runs = [*twice, once, one_record([0.1, 0.1], rate=1e-3, watched=[0.45, 0.45])]
    table = cells(pages(tmp_path, runs, "{runs some}"))
    assert table[2][0] == "gru rate=0.01 of 2"


def test_a_row_is_all_seeds_of_a_setting(tmp_path):
    runs = [
        *[one_record([value], seed=seed, length=3) for seed, value in enumerate((0.1, 0.2, 0.6))],
        one_record([0.5, None], length=4, finished=False),
    ]
    table = cells(pages(tmp_path, runs, "{runs some}\n\nText.\n\n{curve some 0 10}\n"))
    assert table[2][:4] == ["gru length=3", "0.3000 [0.1000, 0.6000]", "3", "10"]
    assert table[3][:4] == ["gru length=4", "- [-, 0.5000]*", "2", "10, unfinished"]
    assert table[4][1:] == ["0", "10"]
    assert table[6] == ["gru length=3", "0.0000 [0.0000, 0.0000]", "0.3000 [0.1000, 0.6000]"]
    only = cells(pages(tmp_path, runs, "{runs some length=3}"))
    assert [row[0] for row in only[2:]] == ["gru"]


def test_rows_go_by_cell_and_then_by_the_size_of_their_numbers(tmp_path):
    settings = [("gru", 100), ("gru", 30), ("gru", 4), ("gato2", 4), ("gato10", 4)]
    runs = [one_record([0.1], cell=cell, length=length) for cell, length in settings]
    table = cells(pages(tmp_path, runs, "{runs some}"))
    assert [row[0] for row in table[2:]] == [
        "gato2 length=4", "gato10 length=4", "gru length=4", "gru length=30", "gru length=100",
    ]  # fmt: skip
    runs = [one_record([0.1], rate=1e-3, weight=weight) for weight in (2.0, 1e-05, 0.5)]
    table = cells(pages(tmp_path, runs, "{runs some}"))
    assert [row[0] for row in table[2:]] == ["gru weight=1e-05", "gru weight=0.5", "gru weight=2"]


@pytest.mark.parametrize(
    ("prose", "sentence"),
    [
        ("{sums some}", "must begin with one of tally, claims, runs, curve, figure, numbers"),
        ("{runs}", "names no table"),
        ("{sweeps some}", "names no table"),
        ("{runs none}", "none.json cannot be read"),
        ("{runs some cell=lstm}", "some.json has no run with cell=lstm"),
        ("{figure some length=8}", "some.json has no learning curve with length=8"),
        ("{figure some against=length}", "a run whose length is no number, or not given"),
    ],
)
def test_a_table_that_cannot_be_made_is_refused(tmp_path, prose, sentence):
    with pytest.raises(UserError, match=sentence) as error:
        bare = dataclasses.replace(one_record([0.4], length=8), curve={})
        pages(tmp_path, [one_record([0.5]), bare], prose)
    assert "\n" not in str(error.value)


def test_a_figure_has_the_curves_of_all_seeds(tmp_path, monkeypatch):
    other = dataclasses.replace(
        one_record([0.6, None], seed=1), curve={"step": [0, 5, 10], "value": [[1, 2]] * 3}
    )
    bare = dataclasses.replace(one_record([0.9], cell="gato"), curve={})
    prose = "{figure some}\n\n{runs some}"
    text = pages(tmp_path, [one_record([0.2]), other, bare], prose)
    assert "![score: some](images/results/some.png)" in text
    (one,) = page.figures(tmp_path)
    draw_curves = mock.Mock(side_effect=figure.draw_curves)
    monkeypatch.setattr(figure, "draw_curves", draw_curves)
    figure.draw(one, tmp_path / one.file)
    (curve,) = draw_curves.call_args.args[1]
    # One run has kept steps 0 and 10, the other 5 as well.
    assert (curve.label, list(curve.x)) == ("gru", [0, 5, 10])
    np.testing.assert_allclose(curve.values, [[0.0, 1, 2], [0.1, 1, 2], [0.2, 1, 2]])
    assert figure.is_of(tmp_path / one.file, one)
    pages(tmp_path, [one_record([0.3]), other, bare], prose)
    (changed,) = page.figures(tmp_path)
    assert not figure.is_of(tmp_path / one.file, changed)
    assert not figure.is_of(tmp_path / "none.png", one)


def test_a_figure_against_a_setting_has_the_scores_of_all_seeds(tmp_path, monkeypatch):
    runs = [
        one_record([0.2, 0.4], length=30, rate=1e-3, watched=[0.8, 0.8]),
        one_record([0.1, 0.3], length=30, rate=2e-3, watched=[0.7, 0.7]),
        one_record([0.0, 0.1], length=4, rate=1e-3, watched=[0.2, 0.2]),
        one_record(
            [0.1, 0.5], length=4, rate=2e-3, watched=[0.3, 0.3]
        ),  # the best rate of its row, not of the line
        one_record([0.6, None], cell="gato", length=4),
    ]
    prose = "{figure some against=length}"
    assert "images/results/some_against_length.png" in pages(tmp_path, runs, prose)
    (one,) = page.figures(tmp_path)
    draw_curves = mock.Mock(side_effect=figure.draw_curves)
    monkeypatch.setattr(figure, "draw_curves", draw_curves)
    figure.draw(one, tmp_path / one.file)
    curves = {curve.label: curve for curve in draw_curves.call_args.args[1]}
    assert list(curves) == ["gato", "gru"]
    assert list(curves["gru"].x) == [4, 30] and list(curves["gato"].x) == [4]
    np.testing.assert_array_equal(curves["gru"].values, [[0.1, 0.5], [0.2, 0.4]])
    np.testing.assert_array_equal(curves["gato"].values, [[0.6, np.nan]])
    assert figure.is_of(tmp_path / one.file, one)
    pages(tmp_path, [one_record([0.3, 0.4], length=30), *runs[2:]], prose)
    (changed,) = page.figures(tmp_path)
    assert not figure.is_of(tmp_path / one.file, changed)
    with pytest.raises(UserError, match="has gru with different numbers of seeds"):
        pages(tmp_path, [one_record([0.3], length=30), *runs[2:]], prose)


def test_runs_whose_data_have_no_known_size_are_told():
    """They are in no sweep of the page, which is made without data."""
    assert sweeps._dataset(CAPTIONING, {"protocol": "hdetach"}) == "coco"
    assert sweeps._dataset(LANGUAGE_MODEL, {"dataset": "own"}) in sweeps._UNKNOWN_SIZES
    assert sweeps._dataset(COPY, {}) is None


def test_an_unfinished_run_of_a_finished_seed_is_left_out(tmp_path):
    again = dataclasses.replace(one_record([0.1], finished=False), revision="0123abc")
    other = one_record([0.9], seed=1, finished=False)
    (row,) = cells(pages(tmp_path, [one_record([0.5]), again], "{runs some}"))[2:]
    assert row[1:4] == ["0.5000", "1", "10"]
    (row,) = cells(pages(tmp_path, [one_record([0.5]), again, other], "{runs some}"))[2:]
    assert row[1:4] == ["0.7000 [0.5000, 0.9000]", "2", "10, unfinished"]


def test_the_sweeps_say_which_of_their_runs_are_finished(tmp_path):
    sweeps = tmp_path / "sweeps"
    sweeps.mkdir()
    common = '# Does it learn?\n# And which?\nbinary = "copy"\n[settings]\ndata_dir = "data"\n'
    grid = '[grid]\ncell = ["gru"]\nseed = [0, 1]\nlearning_rate = [1e-2]\ndetach_prob = [0.0]\n'
    (sweeps / "all.toml").write_text(common + grid)
    grid = 'protocol = "ur"\n[grid]\ncell = ["gru", "lstm"]\nkeep_best = [true, false]\n'
    (sweeps / "part.toml").write_text(common + grid)
    commands = [  # the first spells out a default and has both seeds
        "copy --protocol=small --cell=gru --seeds=2 --length=20 --learning_rates=0.01",
        "copy --protocol=ur --keep_best=true --cell=gru",
        "copy --protocol=ur --keep_best=false --cell=gru --seed=1",
        "copy --protocol=ur --keep_best=false --cell=gru --steps=7",
        "copy --protocol=small --cell=lstm --keep_best=true",
        "copy --protocol=ur --cell=lstm --keep_best=true",
    ]
    runs = [
        dataclasses.replace(
            one_record([0.5, 0.6] if "seeds=2" in command else [0.5], number=n),
            seeds=[0, 1] if "seeds=2" in command else [int("seed=1" in command)],
            command=f"python -m experiments.{command}",
            finished=n < len(commands) - 1,
        )
        for n, command in enumerate(commands)
    ]
    question, results = "Does it learn? And which?", "[some.json](results/some.json)"
    assert cells(pages(tmp_path, runs, "{sweeps}"))[2:] == [
        ["[part.toml](results/sweeps/part.toml)", question, "1 of 4", results],
        ["[all.toml](results/sweeps/all.toml)", question, "2 of 2", results],
    ]
    half = [dataclasses.replace(runs[0], seeds=[1], values=[0.5]), *runs[1:]]
    assert cells(pages(tmp_path, half, "{sweeps}"))[2][2] == "1 of 2"
    own = dataclasses.replace(runs[0], command="python -m x --cell=absent:Cell")
    pages(tmp_path, [own], "{sweeps}")  # its module may be elsewhere
    with pytest.raises(UserError, match=r"some.json: .*'cell': 'gro'"):
        pages(
            tmp_path, [dataclasses.replace(runs[0], command="python -m x --cell=gro")], "{sweeps}"
        )
    (sweeps / "part.toml").write_text(f"# Why?\n{grid.partition(chr(10))[2]}")
    with pytest.raises(UserError, match=r'part.toml: binary = "..." must be one of'):
        pages(tmp_path, runs, "{sweeps}")
    (sweeps / "part.toml").write_text(common[common.index("binary") :] + grid)
    with pytest.raises(UserError, match="must begin with a comment that says what"):
        pages(tmp_path, runs, "{sweeps}")


# Those of this repository.


def test_the_page_is_what_the_data_give():
    assert page.text(RESULTS) == (ROOT / "docs" / "RESULTS.md").read_text()


def test_the_figures_are_what_the_data_give():
    images = ROOT / "docs" / "images" / "results"
    figures = list(page.figures(RESULTS))
    stale = [one.file for one in figures if not figure.is_of(images / one.file, one)]
    assert not stale, "python -m experiments.results draws them"
    assert {path.name for path in images.iterdir()} == {one.file for one in figures}


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_the_files_of_results_are_whole(path, tmp_path):
    results = records.read(path)
    records.write(tmp_path / path.name, results)
    assert (tmp_path / path.name).read_bytes() == path.read_bytes()
    prose = "".join(section.read_text() for section in RESULTS.glob("*.md"))
    assert re.search(rf"^\{{runs {path.stem}\b", prose, re.MULTILINE), "the page does not show it"
    for one in results.runs:
        assert one.command.startswith(f"python -m experiments.{results.experiment} --"), one
        assert len(one.values) == len(one.seeds)
        assert one.device
        assert one.revision or one.note, "where is it from?"
        assert all(len(values) == len(one.values) for values in one.curve.get("value", []))


@pytest.mark.parametrize("name", ["papers", "measurements"])
def test_every_table_of_numbers_is_shown_and_rectangular(name):
    prose = "".join(section.read_text() for section in RESULTS.glob("*.md"))
    for label, table in tomllib.loads((RESULTS / f"{name}.toml").read_text())["table"].items():
        assert f"{{numbers {label}}}" in prose, label
        assert {len(row) for row in table["rows"]} == {len(table["head"])}, label
        assert table["source"].endswith("."), label


@pytest.mark.parametrize("path", sorted((RESULTS / "sweeps").glob("*.toml")), ids=lambda p: p.stem)
def test_a_sweep_that_waits_can_be_read(path, tmp_path):
    """Without the files of its data, of which the published sizes are known."""
    sweep = tmp_path / path.name
    sweep.write_text(path.read_text().replace('data_dir = "data"\n', ""))
    assert plan.read(sweep, tmp_path)


def test_transfer_is_kept_for_each_delay(tmp_path):
    config = resolve(TRANSFER_COPY, "small", {"seeds": 2, "detach_prob": 0.25})
    run = {"cell": "lstm", "protocol": "small", "overrides": config.overrides, "steps": 25_000}
    run |= {"identity": config.identity(), "sequences": 5000, "device": "cpu x 1", "commit": "a"}
    lanes = [[seed, rate] for seed, rate in config.training.lanes]
    accuracy = {"20": [0.9, 1.0], "40": [0.5, None]}
    one = {"trained_at": 20, "run": run, "lanes": lanes, "accuracy": accuracy}
    (tmp_path / "transfer.json").write_text(json.dumps({"detach-0.25": one}))
    records.add([tmp_path], tmp_path, "delays")
    results = records.read(tmp_path / "delays.json")
    assert (results.experiment, results.metric.baseline) == ("transfer_copy", 0.125)
    rows = {row.label: row.values for row in page.rows(results, {})}
    assert rows == {"lstm delay=20": [0.9, 1.0], "lstm delay=40": [0.5, None]}
    assert {one.command for one in results.runs} == {
        "python -m experiments.transfer_copy --protocol=small --seeds=2 --detach_prob=0.25"
    }
    (tmp_path / "transfer.json").write_text(json.dumps({"detach-0.25": {**one, "run": None}}))
    with pytest.raises(UserError, match="is damaged or of an earlier version"):
        records.add([tmp_path], tmp_path, "delays")
