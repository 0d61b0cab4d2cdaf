"""Weak scaling on paper: the formula by hand, and the sum that is timed."""

import pytest

from benchmarks import pods


def test_a_sum_by_hand():
    # 6 links of 100 GB/s each way; 7/8 of 3 GB twice, over half of them, as 2x2x2 has no rings.
    assert pods.sum_seconds(3e9, 8) == pytest.approx(2 * 7 / 8 * 3e9 / 300e9)
    assert pods.sum_seconds(3e9, 64) == pytest.approx(2 * 63 / 64 * 3e9 / 600e9)


def test_efficiency_by_hand():
    report = {
        "operations": 0.4 * 459e12 * 0.09,  # 90 ms at 40 %, 36 ms at the peak
        "bytes": 2765e9 * 0.03,  # 30 ms
        "collectives": {"all-reduce": {"bytes": 1e9}, "all-gather": {"bytes": 0.2e9}},
    }
    rows = pods.expected(report)
    # 1.2 GB: 2 * 7/8 * 1.2e9 / 300e9 = 7 ms; 90 / 97 and 36 / 43
    assert rows[0] == ["40 % of the peak", "8 (2x2x2)", "90.0", "7.0", "93 %"]
    assert rows[3][2:] == ["36.0", "7.0", "84 %"]


def test_a_report_is_asked_for(capsys, tmp_path):
    other = tmp_path / "other.json"
    other.write_text("[1]")
    for argv, end in (
        ([], "with --compile_for.\n"),
        ([f"--report={tmp_path / 'none.json'}"], "No such file or directory"),
        ([f"--report={other}"], f"and {other} is not: TypeError"),
    ):
        with pytest.raises(SystemExit) as ended:
            pods.main(["pods", *argv])
        assert ended.value.code == 2
        error = capsys.readouterr().err
        assert "--report=FILE must be what an experiment printed" in error and end in error
