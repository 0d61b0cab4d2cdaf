"""Whose run a workdir is: which settings make it another run, and what older ones meant."""

import contextlib
import json

import pytest

from experiments.command import runs
from experiments.copy.settings import COPY
from experiments.forgetting.settings import FORGETTING
from experiments.records.workdir import Workdir
from experiments.settings.errors import UserError
from experiments.settings.resolver import resolve
from experiments.training import loop
from tests.experiments.support import one_sentence, tiny

pytestmark = pytest.mark.usefixtures("learners")


def claim(path, **settings):
    """As a run does at its start and its end."""
    with contextlib.closing(Workdir(path)) as work:
        work.claim(tiny(**settings))


def test_a_setting_that_an_older_config_lacks_had_its_default(tmp_path):
    claim(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["identity"]["training.schedule"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    claim(tmp_path)
    with pytest.raises(UserError, match=r"\(schedule is constant there and warmup here\)"):
        claim(tmp_path, schedule="warmup", warmup_steps=1)


def test_another_schedule_is_told_by_its_name(tmp_path):
    """The identity has the number of steps only where the schedule depends on it."""
    with contextlib.closing(Workdir(tmp_path)) as work:
        work.claim(tiny())
    sentence = r"\(schedule is constant there and cosine here\)"
    with contextlib.closing(Workdir(tmp_path)) as work, pytest.raises(UserError, match=sentence):
        work.claim(tiny(schedule="cosine"))


def test_another_task_is_told_by_its_name(tmp_path):
    with contextlib.closing(Workdir(tmp_path)) as work:
        work.claim(tiny())
    sentence = r"another configuration \(task is copy there and forgetting here\); choose another"
    with contextlib.closing(Workdir(tmp_path)) as work, pytest.raises(UserError, match=sentence):
        work.claim(resolve(FORGETTING, "small", {}))


def test_a_run_of_a_cell_that_has_changed_is_read_with_a_warning(tmp_path, monkeypatch, capsys):
    """Its parameters may be those of another step."""
    monkeypatch.syspath_prepend(tmp_path)
    program = "import recurrent_gates as rg\n\n\nclass Own(rg.LSTM):\n    factor = {}\n"
    (tmp_path / "own_changed.py").write_text(program.format(1))
    loop.run(tiny(cell="own_changed:Own"), tmp_path / "run")
    assert runs.finished(tmp_path / "run", [COPY]).config.model.cell == "own_changed:Own"
    assert "warning" not in capsys.readouterr().out
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    for identity, warned in (
        ({**record["identity"], "model.cell_source": "01234567"}, True),
        ({**record["identity"], "model.cell_source": None}, False),
        ([], False),
    ):
        changed = json.dumps({**record, "identity": identity})
        (tmp_path / "run" / "config.json").write_text(changed)
        runs.finished(tmp_path / "run", [COPY])
        warning = "warning: the source of own_changed:Own is not that which the run in"
        assert (warning in capsys.readouterr().out) is warned


def test_a_run_that_left_its_forget_bias_to_an_r_gate_goes_on(tmp_path):
    """An earlier version recorded null for the cell's own 1; of a plain gate it is no number."""
    for cell, goes_on in (("r_lstm", True), ("lstm", False)):
        path = tmp_path / cell
        with contextlib.closing(Workdir(path)) as work:
            work.claim(tiny(cell=cell))
        recorded = json.loads((path / "config.json").read_text())
        assert recorded["identity"]["model.forget_bias"] == (1 if goes_on else 0)
        recorded["identity"]["model.forget_bias"] = None
        (path / "config.json").write_text(json.dumps(recorded))
        with contextlib.closing(Workdir(path)) as work:
            if goes_on:
                work.claim(tiny(cell=cell))
            with pytest.raises(UserError, match=r"forget_bias is \S+ there and 2\.0 here") as error:
                work.claim(tiny(cell=cell, forget_bias=2.0))
            assert one_sentence(error)
    refused = pytest.raises(UserError, match=r"forget_bias is None there and 0\.0 here")
    with contextlib.closing(Workdir(tmp_path / "lstm")) as work, refused:
        work.claim(tiny(cell="lstm"))


@pytest.mark.parametrize("cell", ["lstm", "r_lstm", "ur_lstm"])
def test_a_run_whose_task_decides_the_biases_goes_on(cell, tmp_path):
    config = resolve(FORGETTING, "small", {"cell": cell})
    for _ in range(2):
        with contextlib.closing(Workdir(tmp_path)) as work:
            work.claim(config)


def test_a_copy_run_of_h_detach_that_kept_the_first_of_equals_is_refused_or_goes_on(tmp_path):
    """Before there was ``ties`` every run kept the first."""
    settings = {"hidden_size": 6, "steps": 4, "detach_prob": 0.0}
    config = resolve(COPY, "hdetach", settings)
    with contextlib.closing(Workdir(tmp_path)) as work:
        work.claim(config)
    recorded = json.loads((tmp_path / "config.json").read_text())
    del recorded["identity"]["training.ties"]
    (tmp_path / "config.json").write_text(json.dumps(recorded))
    refused = pytest.raises(UserError, match="ties is first there and last here")
    with contextlib.closing(Workdir(tmp_path)) as work, refused:
        work.claim(config)
    with contextlib.closing(Workdir(tmp_path)) as work:
        work.claim(resolve(COPY, "hdetach", settings | {"ties": "first"}))
