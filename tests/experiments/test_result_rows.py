"""Which runs make one row of the page of results, and which row tells of them."""

import dataclasses
import json

import pytest

from experiments.catalog import EXPERIMENTS
from experiments.command import tables
from experiments.pixels.settings import PIXELS
from experiments.results import claims, page, records
from experiments.settings import config
from experiments.settings.errors import UserError
from experiments.settings.resolver import resolve
from experiments.sweep import plan
from tests.experiments.support import TINY, tiny
from tests.experiments.test_results import RESULTS, cells, kept, one_record, written

METRIC = records.Metric("score", True, 0.0, "chance")


def _digest(**settings):
    run = tiny(**settings)
    return records.row_digest(run.identity(), run.task)


def _rows(runs, **selection):
    return page.rows(records.Results("copy", METRIC, runs), selection)


def test_the_digest_of_a_row_leaves_seeds_and_rates_out():
    digest = _digest()
    assert digest == _digest(seed=3, learning_rates=(1.0,))
    assert digest != _digest(hidden_size=TINY["batch_size"])


def test_seeds_with_a_permutation_of_their_own_are_of_one_row():
    """h-detach's pMNIST: the order of the pixels follows the seed."""

    def digest(**settings):
        run = resolve(PIXELS, "hdetach", {"data_dir": "none", **settings})
        return records.row_digest(run.identity_without_data(), run.task)

    pmnist = [digest(dataset="pmnist", seed=seed) for seed in range(3)]
    assert len(set(pmnist)) == 1
    assert digest(dataset="pmnist", permutation_seed=7) != pmnist[0]
    assert digest(dataset="pmnist", permutation_seed=7, seed=1) != pmnist[0]
    assert digest(dataset="smnist") == digest(dataset="smnist", seed=1) != pmnist[0]
    run = resolve(PIXELS, "hdetach", {"dataset": "pmnist", "data_dir": "none"})
    assert records.row_digest(run.identity_without_data(), type(run.task)) != pmnist[0]


def test_a_newer_setting_leaves_rows_together(monkeypatch):
    """A record of before it existed is of the same row as one of after."""
    before = tiny().identity()
    monkeypatch.setattr(config, "_NEWER", ("model.new",))
    defaults = {"model.new": 3}
    monkeypatch.setattr(config, "identity_defaults", lambda task: defaults)
    digest = records.row_digest(before, tiny().task)
    assert records.row_digest({**before, "model.new": 3}, tiny().task) == digest
    assert records.row_digest({**before, "model.new": 4}, tiny().task) != digest


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_records_are_of_what_their_commands_mean(path):
    """Otherwise a new run of the same command makes a second row beside them: a setting that is
    new belongs to the newer ones of ``experiments/settings/config.py``."""
    results = records.read(path)
    experiment = next(e for e in EXPERIMENTS if e.name == results.experiment)
    for run in results.runs:
        if run.identity is not None:
            words = [word.removeprefix("--").partition("=") for word in run.command.split()[3:]]
            settings = plan.configured(experiment, {name: value for name, _, value in words})
            identity = settings.identity_without_data()
            if experiment.name == "transfer_copy":
                identity |= {"delay": run.settings["delay"]}
            assert records.row_digest(identity, settings.task) == run.identity, run.command


def test_without_scores_to_choose_by_each_rate_has_a_row():
    runs = [
        one_record([score], rate=rate, seed=seed, watched=[score])
        for rate, scores in ((1e-3, (0.2, 0.4)), (1e-2, (0.3, 0.9)))
        for seed, score in enumerate(scores)
    ]
    assert {row.label: row.values for row in _rows(runs)} == {
        "gru rate=0.001": [0.2, 0.4], "gru rate=0.01": [0.3, 0.9]
    }  # fmt: skip
    assert [row.values for row in _rows(runs, rate=0.01)] == [[0.3, 0.9]]
    runs[0] = dataclasses.replace(runs[0], watched=None)
    assert len(_rows(runs)) == 2


def test_a_rate_that_diverged_leaves_the_choice_to_validation():
    runs = [
        one_record([0.8], rate=1e-3, watched=[0.81]),
        one_record([None], rate=1e-1, watched=[None]),
    ]
    (row,) = _rows(runs)
    assert (row.label, row.values) == ("gru rate=0.001 of 2", [0.8])


def test_a_figure_keeps_rates_apart_that_are_not_chosen(tmp_path):
    runs = [
        one_record([score], rate=rate, length=length, watched=[score])
        for rate, score in ((1e-3, 0.2), (1e-2, 0.3))
        for length in (4, 30)
    ]
    records.write(tmp_path / "some.json", records.Results("copy", METRIC, runs))
    (tmp_path / "1.md").write_text("{figure some against=length}")
    (figure,) = page.figures(tmp_path)
    assert [label for label, _ in figure.rows] == ["gru rate=0.001", "gru rate=0.01"]


def test_a_rate_that_lacks_seeds_is_not_chosen():
    runs = [one_record([0.5], rate=1e-3, seed=seed, watched=[0.4]) for seed in (0, 1)]
    runs.append(one_record([0.9], rate=1e-2, watched=[0.8]))
    (row,) = _rows(runs)
    assert (row.label, row.values) == ("gru rate=0.001 of 2", [0.5, 0.5])


def test_runs_of_other_budgets_settle_nothing():
    runs = [one_record([0.5], seed=seed) for seed in (0, 1, 2)]
    (row,) = _rows(runs)
    assert claims.unsettled(row) == []
    (row,) = _rows([*runs[:2], dataclasses.replace(runs[2], step=3)])  # which ended early
    assert claims.unsettled(row) == []
    shorter = dataclasses.replace(runs[2], command=f"{runs[2].command} --steps=3")
    (row,) = _rows([*runs[:2], shorter])
    assert claims.unsettled(row) == ["budgets of --steps=3 and the protocol's"]


@pytest.mark.parametrize(
    ("commands", "budgets"),
    [
        (["copy --steps=3000", "copy"], 1),
        (["copy --steps=+3000", "copy --steps=3000", "copy --protocol=small"], 1),
        (["copy --steps=3000", "copy --protocol=ur"], 2),
        (["pixels --epochs=2 --batch_size=100", "pixels --steps=24 --batch_size=100"], 1),
        (["copy --steps=3000 --stepz=3", "copy"], 2),  # no such flag today: as it stands
        (["copy --steps=3000", "copy --protocol=none"], 2),
        (["nothing --steps=3000", "nothing"], 2),
        (["language_model --dataset=own --steps=9", "language_model --dataset=own"], 2),
    ],
)
def test_budgets_are_what_commands_mean(commands, budgets):
    runs = [
        dataclasses.replace(one_record([0.5], seed=seed), command=f"python -m experiments.{words}")
        for seed, words in enumerate(commands)
    ]
    (row,) = _rows(runs)
    assert len(row.budgets) == budgets


def test_a_table_counts_runs_without_a_clean_revision(tmp_path):
    runs = [
        dataclasses.replace(one_record([0.5], seed=seed), revision=revision)
        for seed, revision in enumerate(("0123abc", "0123abc-dirty", None))
    ]
    records.write(tmp_path / "some.json", records.Results("copy", METRIC, runs))
    (tmp_path / "1.md").write_text("{runs some}")
    assert "(2 of 3 without a clean revision)" in page.text(tmp_path)
    records.write(tmp_path / "some.json", records.Results("copy", METRIC, runs[:1]))
    assert "without" not in page.text(tmp_path)
    # A later start in a copy without git: a record leaves out what is not known.
    runs[0] = dataclasses.replace(runs[0], continued=[{"device": "another"}])
    records.write(tmp_path / "some.json", records.Results("copy", METRIC, runs[:1]))
    assert "(1 of 1 without a clean revision)" in page.text(tmp_path)


def test_a_curve_has_the_mean_of_all_seeds_or_none(tmp_path):
    """Their thin curves may keep other steps, and one may have ended early."""
    longer = {"step": [0, 5, 10, 15], "value": [[0.0], [0.2], [0.4], [0.6]]}
    runs = [one_record([0.6]), dataclasses.replace(one_record([0.6], seed=1), curve=longer)]
    records.write(tmp_path / "some.json", records.Results("copy", METRIC, runs))
    (tmp_path / "1.md").write_text("{curve some 0 5 10 15}")
    (row,) = cells(page.text(tmp_path))[2:]
    assert row == ["gru", "0.0000 [0.0000, 0.0000]", "", "0.5000 [0.4000, 0.6000]", ""]


def test_a_record_tells_who_went_on_with_the_run(tmp_path):
    workdir = written(tmp_path / "run", tiny(), [0.25])
    document = json.loads((workdir / "config.json").read_text())
    later = {"commit": "0123abc", "device": "another", "versions": {}}
    again = {**later, "versions": {"jax": "1"}}
    (workdir / "config.json").write_text(json.dumps({**document, "continued": [later, again]}))
    records.add([workdir], tmp_path, "copy")
    (run,) = kept(tmp_path)
    assert run.revision == document["commit"]
    assert run.continued == [{"commit": "0123abc", "device": "another"}]


def test_two_processes_write_a_report_at_once(tmp_path, monkeypatch):
    """Each has a file of its own until that is whole."""
    report = tmp_path / "table.md"
    monkeypatch.setattr(tables.os, "getpid", lambda: 1)
    replace = tables.os.replace

    def interrupted(partial, path):
        monkeypatch.setattr(tables.os, "replace", replace)
        monkeypatch.setattr(tables.os, "getpid", lambda: 2)
        tables.write(report, "other")
        replace(partial, path)

    monkeypatch.setattr(tables.os, "replace", interrupted)
    tables.write(report, "one")
    assert report.read_text() == "one"
    assert list(tmp_path.iterdir()) == [report]
    (tmp_path / "table.md.77.partial").touch()  # killed while it wrote it
    tables.claim(tmp_path, ("table.md",))


def test_a_table_of_numbers_cites_runs(tmp_path):
    runs = [one_record([score], seed=seed) for seed, score in enumerate((0.1, 0.4))]
    records.write(tmp_path / "some.json", records.Results("copy", METRIC, runs))
    (tmp_path / "papers.toml").write_text("")
    table = (
        '[table.ours]\nhead = ["a", "b"]\nrows = [["it", "{some cell=%s} here"]]\nsource = "."\n'
    )
    (tmp_path / "measurements.toml").write_text(table % "gru")
    (tmp_path / "1.md").write_text("{numbers ours}")
    assert "| it  | 0.2500 [0.1000, 0.4000] here |" in page.text(tmp_path)
    (tmp_path / "measurements.toml").write_text(table % "lstm")
    with pytest.raises(UserError, match=r"some.json has 0 rows with \{'cell': 'lstm'\}, not one"):
        page.text(tmp_path)


def test_the_page_takes_no_other_files_place(tmp_path, program):
    directory, path = tmp_path / "data", tmp_path / "RESULTS.md"
    directory.mkdir()
    (directory / "1.md").write_text("Prose.")
    path.write_text("# My notes\n")
    workdir = written(tmp_path / "run", tiny(), [0.5])
    wish = ("experiments.results", "--to=some", f"--directory={directory}", str(workdir))
    code, _, said = program(*wish)
    assert (code, said.count("\n")) == (2, 1)
    assert f"{path} is no page of results, and would be overwritten: move it away" in said
    assert path.read_text() == "# My notes\n" and not (directory / "some.json").exists()
    path.unlink()
    assert program(*wish)[0] == 0
    (directory / "1.md").write_text("Other prose.")
    assert program(*wish)[0] == 0  # in the place of its own
    assert path.read_text().endswith("-->\n\nOther prose.\n")
    assert len(kept(directory, "some")) == 1
    path.unlink()
    path.mkdir()
    assert "RESULTS.md cannot be read: Is a directory." in program(*wish)[2]
