"""The program that counts environment steps: every way is timed, a wrong flag is a sentence."""

import re

import jax
import pytest

from benchmarks import agents


@pytest.mark.long
def test_every_way_is_timed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(agents, "_WINDOW", 3)
    monkeypatch.setattr(agents, "CHALLENGES", {"maze": {"challenge": "t_maze", "length": 2}})
    argv = ["agents", "--batch_size=2", "--repeats=2", "--devices=1", f"--out={tmp_path}"]
    with jax.numpy_dtype_promotion("standard"):  # as a user has it; optax needs it
        agents.main(argv)
    printed = capsys.readouterr().out
    assert (tmp_path / "agents.md").read_text() == printed
    *_, row = printed.splitlines()
    name, *rates = (cell.strip() for cell in row.strip("|").split("|"))
    assert name == "maze"
    assert len(rates) == 3
    for rate in rates:
        middle, least, most = (int(x.replace(",", "")) for x in re.findall(r"[\d,]+", rate))
        assert 0 < least <= middle <= most


def test_devices_that_are_not_there_are_a_sentence(capsys):
    with pytest.raises(SystemExit) as end:
        agents.main(["agents", "--devices=99"])
    assert end.value.code == 2
    assert "not --devices=99" in capsys.readouterr().err
