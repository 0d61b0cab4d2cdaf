"""Stays from files: what is read, the cache, the parts, and what is said of damaged files."""

import gzip
import math
import os
import re
import signal
import stat
import subprocess
import sys
from datetime import datetime, timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.datasets import mimic, stays
from experiments.datasets.measured import VARIABLES, Measured, Stays
from experiments.settings.errors import UserError
from tests.experiments.stay_files import csv_bytes, write_cinc, write_table
from tests.support import fuzzed

PLACE = {one.name: place for place, one in enumerate(VARIABLES)}
NAN = math.nan


@pytest.fixture(autouse=True)
def caches(monkeypatch, tmp_path):
    """A folder of caches of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches" / "recurrent_gates" / "stays"


def loaded(name, folder, stay="hospital"):
    """The stays, and what was said."""
    said = []
    return stays.load(name, str(folder), stay, said.append), said


def of_stay(read, number):
    """``{variable: {hours: value}}`` of what was measured."""
    own = slice(read.starts[number], read.starts[number + 1])
    table = {}
    for hours, values in zip(read.hours[own], read.values[own], strict=True):
        for variable, value in zip(VARIABLES, values, strict=True):
            if not np.isnan(value):
                table.setdefault(variable.name, {})[round(float(hours), 4)] = float(value)
    return table


def same(one, other):
    return all(
        a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True)
    )


# What is read.


def test_measurements_are_put_together_by_stay_and_time():
    measured = Measured()
    for stay, hours, variable, value in (
        (2, 5.0, 1, 80.0),
        (0, 1.5, 1, 70.0),
        (2, 0.5, 11, 7.4),
        (2, 5.0, 5, 99.0),  # too warm
        (0, 1.5, 1, 71.0),  # the last of two counts
        (0, 1.5, 9, 0.1),  # less oxygen than in air
    ):
        measured.add(stay, hours, variable, value)
    read = measured.together([True, False, True], [0, 1, 0])
    assert read.starts.tolist() == [0, 1, 1, 3]
    assert read.hours.tolist() == [1.5, 0.5, 5.0]
    expected = np.full((3, 12), NAN, np.float32)
    expected[0, [1, 9]] = 71, 0.21
    expected[1, 11] = 7.4
    expected[2, [1, 5]] = 80, 45
    np.testing.assert_array_equal(read.values, expected)
    assert read.clipped.tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0]


OUTCOMES = "RecordID,SAPS-I,SOFA,Length_of_stay,Survival,In-hospital_death\n"
RECORD = "Time,Parameter,Value\n"


def cinc(folder, changed=(), outcomes=""):
    """A dozen stays; the file of the record 3 ends with these rows."""
    records = folder / "set-a"
    records.mkdir(parents=True)
    lengths = [(record, 6 + record % 4) for record in range(1, 13)]
    rows = outcomes or "".join(f"{record},6,1,{days},-1,0\n" for record, days in lengths)
    (folder / "Outcomes-a.txt").write_text(OUTCOMES + rows)
    for record, _ in lengths:
        text = RECORD + f"00:00,RecordID,{record}\n00:07,HR,{60 + record}\n"
        (records / f"{record}.txt").write_text(text)
    with (records / "3.txt").open("a") as file:
        file.writelines(f"{row}\n" for row in changed)
    return folder


def test_cinc_record(tmp_path):
    rows = ["00:07,SaO2,97", "00:07,RespRate,18", "01:30,SysABP,120", "01:30,DiasABP,60"]
    rows += ["02:00,NISysABP,110", "02:00,NIDiasABP,55", "02:00,Temp,-17.8", "02:00,GCS,15"]
    rows += ["10:30,Lactate,2.5", "10:30,Urine,40", "10:30,FiO2,0.5", "48:00,Glucose,101"]
    rows += ["48:00,pH,735", "12:00,MAP,80", "12:00,Weight,70.5"]
    read, said = loaded("cinc2012", cinc(tmp_path, rows))
    assert of_stay(read, 2) == {
        "heart rate": {0.1167: 63},
        "oxygen saturation": {0.1167: 97},
        "respiratory rate": {0.1167: 18},
        "systolic blood pressure": {1.5: 120, 2: 110},
        "diastolic blood pressure": {1.5: 60, 2: 55},
        "temperature": {2: 25},
        "Glasgow coma scale": {2: 15},
        "perfusion": {10.5: 2.5},
        "urine output": {10.5: 40},
        "inspired oxygen": {10.5: 0.5},
        "glucose": {48: 101},
        "pH": {48: 8},
    }
    assert read.long_stay.tolist() == [(6 + record % 4) > 7 for record in range(1, 13)]
    assert (read.clipped[PLACE["temperature"]], read.clipped[PLACE["pH"]]) == (1, 1)
    assert said == [
        "the PhysioNet/CinC Challenge 2012: 12 stays, 6 of them long, 25 values at 16 times; 2 "
        "values lay out of range and are clipped."
    ]


def test_stays_of_unknown_length_are_left_out(tmp_path):
    read, _ = loaded("cinc2012", write_cinc(tmp_path / "data", 40))
    assert len(read.long_stay) == 40
    assert read.patients.tolist() == list(range(40))


BEGIN = datetime(2150, 1, 1, 8)
ADMISSIONS = ("ROW_ID", "SUBJECT_ID", "HADM_ID", "ADMITTIME", "DISCHTIME")
ICUSTAYS = ("ROW_ID", "SUBJECT_ID", "HADM_ID", "ICUSTAY_ID", "INTIME", "OUTTIME")
EVENTS = ("ROW_ID", "SUBJECT_ID", "HADM_ID", "ICUSTAY_ID", "ITEMID", "CHARTTIME", "VALUE")
EVENTS += ("VALUENUM", "VALUEUOM", "ERROR")
OUTPUTS = (*EVENTS[:4], "CHARTTIME", "ITEMID", "VALUE")


def time(hours):
    return str(BEGIN + timedelta(hours=hours))


def event(admission, item, hours, value, valuenum="", error=0):
    # Patient, admission and ICU stay have the numbers n, 100 + n and 200 + n.
    stay = (1, admission, 100 + admission, 200 + admission)
    return (*stay, item, time(hours), value, valuenum, "", error)


CHARTED = [
    event(1, 220045, 6, "80", 80),
    event(1, 211, 5, "70", 70),
    event(1, 211, 4.9, "200", 200),  # before intensive care
    event(1, 211, 53.1, "200", 200),  # after the 48 hours
    event(1, 211, 7, "190", 190, error=1),
    event(1, 678, 6, "98.6", 98.6),
    event(1, 223762, 7, "38", 38),
    event(1, 223835, 6, "40", 40),
    event(1, 2981, 7, "0.5", 0.5),
    event(1, 3348, 6, "Normal <3 secs"),
    event(1, 8377, 7, "Abnormal >3 secs"),
    event(1, 115, 8, "Comment"),
    event(1, 51, 6, "400", 400),
    event(1, 999, 6, "5", 5),  # of no interest
    event(1, 646, 6, ""),
    event(99, 211, 6, "66", 66),  # of no admission
    event(2, 211, 2, "90", 90),
]
VOIDED = [(1, 1, 101, 201, time(6), 40055, 120), (1, 1, 101, 201, time(6.5), 226559, 80)]


def write_mimic(folder, zipped=False, **changed):
    """Twelve admissions of the lengths 2, 3, ... days, one of a day, one without intensive care."""
    days = {n: n + 1 for n in range(1, 13)} | {13: 1}
    tables = {
        "ADMISSIONS": (
            ADMISSIONS,
            [(1, n, 100 + n, time(0), time(24 * d)) for n, d in days.items()],
        ),
        "ICUSTAYS": (
            ICUSTAYS,
            [(1, n, 100 + n, 200 + n, time(5), time(5 + 24 * d)) for n, d in days.items() if n > 2]
            + [(1, 1, 101, 301, time(30), ""), (1, 1, 101, 201, time(5), time(24 * 9))],
        ),
        "CHARTEVENTS": (EVENTS, CHARTED),
        "OUTPUTEVENTS": (OUTPUTS, VOIDED),
    } | changed
    for name, (title, rows) in tables.items():
        write_table(folder, name, title, rows, zipped)
    return folder


EXPECTED = {
    "heart rate": {0: 70, 1: 80},
    "temperature": {1: 37, 2: 38},
    "inspired oxygen": {1: 0.4, 2: 0.5},
    "perfusion": {1: 0, 2: 1},
    "systolic blood pressure": {1: 300},
    "urine output": {1: 120, 1.5: 80},
}


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("stay", ["hospital", "icu"])
def test_mimic(tmp_path, stay, zipped):
    read, _ = loaded("mimic3", write_mimic(tmp_path, zipped), stay)
    table = of_stay(read, 0)
    for name in EXPECTED:
        assert table[name] == pytest.approx(EXPECTED[name], rel=1e-6), name
    assert table.keys() == EXPECTED.keys()
    assert read.clipped.sum() == read.clipped[PLACE["systolic blood pressure"]] == 1
    if stay == "hospital":  # the one of a day is left out; without intensive care: from admission
        assert read.long_stay.tolist() == [n + 1 > 7 for n in range(1, 13)]
        assert of_stay(read, 1) == {"heart rate": {2: 90}}
    else:  # the one that is not known to have ended is left out
        assert read.long_stay.tolist() == [True] + [n + 1 > 7 for n in range(3, 13)]
        assert np.diff(read.starts)[1:].max() == 0


def test_the_demos_events_stand_in_for_both_tables(tmp_path):
    whole, _ = loaded("mimic3", write_mimic(tmp_path / "whole"))
    demo = write_mimic(tmp_path / "demo")
    for name in ("CHARTEVENTS", "OUTPUTEVENTS"):
        (demo / f"{name}.csv").unlink()
    title = ("subject_id", "hadm_id", "icustay_id", "charttime", "itemid", "value", "valueuom")
    rows = [(*row[1:4], row[5], row[4], row[6], "") for row in CHARTED if row[-1] == 0]
    rows += [(*row[1:4], row[4], row[5], row[6], "") for row in VOIDED]
    rows += [(1, 101, 201, time(6), 646, "see remark", "")]
    write_table(demo, "events", title, rows)
    read, _ = loaded("mimic3", demo)
    assert same(whole, read)


def test_no_item_is_of_two_variables():
    assert len(mimic.ITEMS) == sum(map(len, mimic._ITEMS))
    assert len(mimic._ITEMS) == len(VARIABLES) == 12


# Parts.


def test_sizes_are_the_papers():
    assert stays.sizes(53_211) == (43_000, 5_106, 5_105)
    assert stays.sizes(3_940) == (3_184, 378, 378)


def test_a_patients_stays_are_in_one_part_but_for_two():
    generator = np.random.default_rng(0)
    patients = generator.integers(0, 700, 1500).astype(np.int32)
    read = Stays(*(np.zeros(1),) * 3, np.zeros(1500, bool), patients, np.zeros(12))
    parts = stays.split(read)
    assert tuple(map(len, parts)) == stays.sizes(1500)
    assert sorted(np.concatenate(parts)) == list(range(1500))
    owners = [set(patients[part]) for part in parts]
    shared = [len(owners[a] & owners[b]) for a, b in ((0, 1), (1, 2), (0, 2))]
    assert sum(shared) <= 2
    assert any(np.diff(patients[parts[0]]) < 0)  # in no order


def test_dense_sequences_end_at_the_last_step(tmp_path):
    read, _ = loaded("cinc2012", write_cinc(tmp_path / "data", 40))
    parts = stays.split(read)
    scale = stays.Scale.of(read, parts[0])
    rows = np.concatenate([read.values[read.starts[n] : read.starts[n + 1]] for n in parts[0]])
    for name in ("heart rate", "pH"):
        column = rows[:, PLACE[name]].astype(float)
        np.testing.assert_allclose(scale.mean[PLACE[name]], np.nanmean(column), rtol=1e-6)
        np.testing.assert_allclose(scale.deviation[PLACE[name]], np.nanstd(column), rtol=1e-5)
    assert (scale.mean[0], scale.deviation[0]) == (0, 1)  # never measured
    inputs = stays.dense(read, parts[1], 6, scale)
    for row, number in enumerate(parts[1]):
        begin, end = read.starts[number : number + 2]
        count = min(6, end - begin)
        assert np.isnan(inputs[row, : 6 - count]).all()
        own = inputs[row, 6 - count :]
        np.testing.assert_allclose(own[:, -1], read.hours[begin : begin + count] / 48, rtol=1e-6)
        expected = (read.values[begin : begin + count] - scale.mean) / scale.deviation
        np.testing.assert_allclose(own[:, :-1], expected, rtol=1e-6)
    assert (np.diff(read.starts) > 6).any()


# The cache.


def test_what_was_read_is_kept_and_read_again(tmp_path, caches, monkeypatch):
    folder = cinc(tmp_path / "data")
    read, said = loaded("cinc2012", folder)
    (path,) = caches.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    content = path.read_bytes()
    assert b"pickle" not in content
    again, said_again = loaded("cinc2012", folder)
    assert same(read, again)
    assert (len(said), said_again) == (1, [])

    path.write_bytes(content[:-200])  # damaged: it is made anew, the same bits
    assert same(read, loaded("cinc2012", folder)[0])
    assert path.read_bytes() == content

    record = folder / "set-a" / "3.txt"  # other files are another cache
    record.write_text(record.read_text() + "05:00,HR,77\n")
    changed, _ = loaded("cinc2012", folder)
    assert len(changed.hours) == len(read.hours) + 1
    assert len(list(caches.iterdir())) == 2


KILLED = """
import os, signal
from experiments.datasets import measured, stays

def killed(owner, name, call):
    function, calls = getattr(owner, name), 0
    def counted(*arguments, **keywords):
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **keywords)
    setattr(owner, name, counted)

killed({owner}, {name!r}, {call})
stays.load("mimic3", {folder!r}, "hospital", print)
"""


@pytest.mark.parametrize(
    ("owner", "name", "call"), [("measured.Measured", "add", 3), ("os", "replace", 1)]
)
def test_killed_while_it_reads_or_writes_it_ends_with_the_same_bits(
    tmp_path, caches, monkeypatch, owner, name, call
):
    folder = write_mimic(tmp_path / "data")
    code = KILLED.format(owner=owner, name=name, call=call, folder=str(folder))
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (process.returncode, process.stdout) == (-signal.SIGKILL, b"")
    assert not list(caches.glob("*.npz"))
    loaded("mimic3", folder)
    (path,) = caches.glob("*.npz")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "undisturbed"))
    loaded("mimic3", folder)
    other = tmp_path / "undisturbed" / "recurrent_gates" / "stays" / path.name
    assert path.read_bytes() == other.read_bytes()


def test_a_damaged_table_leaves_no_cache(tmp_path, caches):
    folder = cinc(tmp_path / "data", ["25:00,HR,x"])
    with pytest.raises(UserError):
        loaded("cinc2012", folder)
    assert not caches.exists()


def test_a_cache_that_cannot_be_written_is_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot be kept in .*: Not a directory; XDG_CACHE_HOME"):
        loaded("cinc2012", cinc(tmp_path / "data"))


# Refusals.


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("1:00,HR,80", "its Time is not hours and minutes such as 07:30"),
        ("48:01,HR,80", "its Time is after the 48 hours"),
        ("01:00,HR,eighty", "its Value is no number"),
        ("01:00,HR,nan", "its Value is no number"),
        ("01:00,HR", "it has 2 entries, the title 3"),
        ('01:00,"HR,80', "here or soon after a quotation does not end"),
    ],
)
def test_a_bad_row_of_a_record(tmp_path, row, reason):
    with pytest.raises(UserError) as caught:
        loaded("cinc2012", cinc(tmp_path, [row]))
    assert str(caught.value) == f"{tmp_path / 'set-a' / '3.txt'}, row 4: {reason}."


@pytest.mark.parametrize(
    ("outcomes", "reason"),
    [
        ("1,6,1,5,-1,0\nx,6,1,5,-1,0\n", "row 3: its RecordID is no number of a stay"),
        ("1,6,1,5,-1,0\n../1,6,1,5,-1,0\n", "row 3: its RecordID is no number of a stay"),
        ("1,6,1,5,-1,0\n1,6,1,5,-1,0\n", "row 3: its RecordID came before"),
        ("1,6,1,,-1,0\n", "row 2: its Length_of_stay is no number"),
        ("77,6,1,5,-1,0\n", "77.txt: No such file"),
        ("1,6,1,5,-1,0\n2,6,1,5,-1,0\n", "has 2 stays, too few for three parts"),
    ],
)
def test_bad_outcomes(tmp_path, outcomes, reason):
    with pytest.raises(UserError, match=re.escape(reason)):
        loaded("cinc2012", cinc(tmp_path, outcomes=outcomes))


def test_missing_files(tmp_path):
    with pytest.raises(UserError, match=r"CinC Challenge 2012 is not in .*: put the folder set-a"):
        loaded("cinc2012", tmp_path)
    folder = write_mimic(tmp_path / "mimic")
    (folder / "OUTPUTEVENTS.csv").unlink()
    with pytest.raises(UserError, match=r"MIMIC-III is not in .*: put ADMISSIONS, ICUSTAYS, CHART"):
        loaded("mimic3", folder)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            {"CHARTEVENTS": (EVENTS[:5], [])},
            "row 1: there is no column CHARTTIME and no column VAL",
        ),
        ({"ADMISSIONS": (ADMISSIONS, [(1, 1, 101, "soon", time(9))])}, "its ADMITTIME is no time"),
        ({"ADMISSIONS": (ADMISSIONS, [(1, 1, "x", time(0), time(9))])}, "its identifiers are no"),
        (
            {"ADMISSIONS": (ADMISSIONS, [(1, 1, 101, time(0), time(99))] * 2)},
            "ADMISSIONS.csv is damaged: some HADM_ID are there twice",
        ),
        ({"ICUSTAYS": (ICUSTAYS, [(1, 1, 101, 201, "", "2150-13-01")])}, ""),
        (
            {"CHARTEVENTS": (EVENTS, [(*CHARTED[0][:5], "2150-01-01 99:00", "80", 80, "", 0)])},
            "row 2: its CHARTTIME is no time such as 2164-10-23 21:09:00",
        ),
        (
            {"CHARTEVENTS": (EVENTS, [(*CHARTED[0][:7], "many", "", 0)])},
            "row 2: its VALUENUM is no number",
        ),
    ],
)
def test_bad_tables_of_mimic(tmp_path, changed, reason):
    folder = write_mimic(tmp_path, **changed)
    if not reason:  # a stay in intensive care that has no beginning is none
        loaded("mimic3", folder)
        return
    with pytest.raises(UserError, match=re.escape(reason)):
        loaded("mimic3", folder)


@pytest.mark.parametrize("keep", [0.5, 0.9, 0.99])
def test_a_gzipped_table_that_is_cut_short(tmp_path, keep):
    folder = write_mimic(tmp_path, zipped=True)
    path = folder / "CHARTEVENTS.csv.gz"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(UserError, match=r"CHARTEVENTS\.csv\.gz, row \d+: the gzipped file is cut"):
        loaded("mimic3", folder)


SECRET = "Jane Doe 4711"


@pytest.mark.parametrize(
    "row",
    [
        (*CHARTED[0][:5], SECRET, "", 80, "", 0),
        (*CHARTED[0][:6], SECRET, SECRET, "", 0),
        (SECRET,),
    ],
)
def test_what_stands_in_a_bad_row_is_not_told(tmp_path, row):
    with pytest.raises(UserError, match=r"CHARTEVENTS\.csv, row 2: it") as caught:
        loaded("mimic3", write_mimic(tmp_path, CHARTEVENTS=(EVENTS, [row])))
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("row", [f"{SECRET},HR,80", f"01:00,HR,{SECRET}", SECRET])
def test_what_stands_in_a_bad_record_is_not_told(tmp_path, row):
    with pytest.raises(UserError, match=r"3\.txt, row 4: it") as caught:
        loaded("cinc2012", cinc(tmp_path, [row]))
    assert SECRET not in str(caught.value)


EDITS = st.lists(
    st.tuples(st.integers(0, 10**6), st.integers(0, 3), st.binary(max_size=6)),
    min_size=1,
    max_size=4,
)


def mutated(content, edits):
    """Bytes put in, taken out, replaced, or all of the rest cut off."""
    for place, kind, piece in edits:
        at = place % (len(content) + 1)
        rest = {0: content[at:], 1: content[at + len(piece) :], 2: b"", 3: content[at + 1 :]}[kind]
        content = content[:at] + (b"" if kind == 3 else piece) + rest
    return content


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """Folders whose files are changed and put back."""
    folder = tmp_path_factory.mktemp("healthy")
    cinc(folder / "cinc2012")
    write_mimic(folder / "mimic3")
    write_mimic(folder / "zipped" / "mimic3", zipped=True)
    return folder


FILES = {
    "cinc2012": ("cinc2012/Outcomes-a.txt", "cinc2012/set-a/3.txt"),
    "mimic3": (
        *(f"mimic3/{name}.csv" for name in ("ADMISSIONS", "ICUSTAYS", "CHARTEVENTS")),
        "zipped/mimic3/CHARTEVENTS.csv.gz",
    ),
}


@pytest.mark.parametrize("kind", FILES)
@fuzzed
@given(st.integers(0, 3), EDITS)
def test_any_file_is_stays_or_one_sentence(healthy, kind, which, edits):
    name = FILES[kind][which % len(FILES[kind])]
    path = healthy / name
    content = path.read_bytes()
    folder = healthy / "zipped" if name.startswith("zipped") else healthy
    try:
        path.write_bytes(mutated(content, edits))
        read = stays.SOURCES[kind].read(folder / kind, "hospital")
        assert len(read.starts) == len(read.long_stay) + 1
        assert np.isfinite(read.hours).all()
    except UserError as error:
        assert re.fullmatch(r"[^\n]*\.", str(error))
    finally:
        path.write_bytes(content)


def test_quotation_marks_and_cases_of_titles(tmp_path):
    folder = write_mimic(tmp_path)
    whole, _ = loaded("mimic3", folder)
    path = folder / "ADMISSIONS.csv"
    plain = path.read_text().replace('"', "").replace("ADMITTIME", "admittime")
    path.unlink()
    (folder / "ADMISSIONS.csv.gz").write_bytes(gzip.compress(plain.encode()))
    read, _ = loaded("mimic3", folder)
    assert same(whole, read)
    assert csv_bytes(("A",), [("b",)]) == b'"A"\n"b"\n'
    assert os.environ["XDG_CACHE_HOME"]
