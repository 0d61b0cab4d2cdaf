"""The scaling program: its points, its slopes and what it writes."""

import json

import pytest

from benchmarks import scaling
from benchmarks.work import Size


def test_a_slope_is_the_exponent():
    values = [2, 4, 16, 64]
    assert scaling.slope(values, [3 * v**1.5 for v in values]) == pytest.approx(1.5)


def test_a_point_changes_one_number():
    base = scaling.BASE
    point = scaling.Point("lstm", "features", 32)
    assert point.arguments() == {"contender": "lstm", "size": base._replace(features=32)}
    point = scaling.Point("lstm", "seeds", 4)
    assert point.arguments() == {"contender": "lstm*4", "size": base}
    assert scaling.Point("lstm", "seeds", 1).arguments()["contender"] == "lstm"


@pytest.mark.long
def test_the_program_writes_points_and_slopes(in_process, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(scaling, "BASE", Size(2, 5, 3, 4))
    monkeypatch.setattr(scaling, "SWEEPS", {"steps": (4, 16), "seeds": (1, 2)})
    argv = ["scaling", "--cells=gru", "--sweeps=steps,seeds", "--repeats=1", f"--out={tmp_path}"]
    assert scaling.main([*argv, "--max_t=128"]) == 0
    sizes = [tuple(arguments["size"]) for _, arguments, _ in in_process]
    assert sizes == [(2, 4, 3, 4), (2, 16, 3, 4), (2, 5, 3, 4), (2, 5, 3, 4)]
    assert [arguments["contender"] for _, arguments, _ in in_process][2:] == ["gru", "gru*2"]
    report = json.loads((tmp_path / "scaling.json").read_text())
    rows = {(row["sweep"], row["value"]): row for row in report["rows"]}
    memory = [rows["steps", value]["temporary_bytes"] for value in (4, 16)]
    assert memory[0] < memory[1]
    assert all(row["seconds"] > 0 and row["compile_seconds"] > 0 for row in rows.values())
    printed = capsys.readouterr().out
    assert (tmp_path / "scaling.md").read_text() == printed
    of_memory = scaling.slope((4, 16), memory)
    (line,) = [line for line in printed.splitlines() if "| T | 4 - 16 |" in line]
    assert line.split(" | ")[4] == f"{of_memory:.2f}"
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("flag", ["--sweeps=time", "--cells=lstm*3", "--cells=no", "--max_t=1"])
def test_a_wrong_flag_ends_with_a_sentence(in_process, flag, capsys):
    with pytest.raises(SystemExit) as end:
        scaling.main(["scaling", flag])
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("benchmarks.scaling: ")
    assert not in_process
