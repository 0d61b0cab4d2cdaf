"""MIMIC-III from its raw tables, read row by row: the events are 33 GB.

The twelve variables are those of interpolation-prediction networks (Shukla & Marlin, 2019) by the
items of their published code; urine is by those of MIMIC's own published concepts, which know
MetaVision's, too. A stay's clock begins when the patient first comes to intensive care, where
the events are charted, or at admission for those who never do. In that code it begins with the
first measurement.

The demo's stand-in ``events.csv``, which has the events of all tables, is read in the place of
CHARTEVENTS and OUTPUTEVENTS.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from experiments.datasets.measured import HOURS, LONG_DAYS, Measured, Stays
from experiments.datasets.tables import bad_row, moment, number, table
from experiments.settings.errors import UserError

_SHORTEST_DAYS = HOURS / 24  # a stay that ends before is left out
_FAHRENHEIT = (678, 223761)
_REFILL = 7  # the variable whose values are words
_OXYGEN = 9  # the variable that is in percent or in parts of one

_ITEMS = (
    (646, 220277),
    (211, 220045),
    (615, 618, 220210, 224690),
    (51, 442, 455, 6701, 220050, 220179),
    (8368, 8440, 8441, 8555, 220051, 220180),
    (676, 223762, *_FAHRENHEIT),
    (198, 226755, 227013),
    (115, 3348, 8377, 223951, 224308),
    (
        *(40055, 40056, 40057, 40065, 40069, 40085, 40086, 40094, 40096, 40405, 40428, 40473),
        *(40651, 40715, 43175, 226557, 226558, 226559, 226560, 226561, 226563, 226564, 226565),
        *(226567, 226584),
    ),
    (2981, 3420, 3422, 223835),
    (807, 811, 1529, 3744, 3745, 220621, 225664, 226537),
    (780, 860, 1126, 1673, 3839, 4202, 4753, 6003, 220274, 220734, 223830, 228243),
)
ITEMS = {str(item): place for place, items in enumerate(_ITEMS) for item in items}
"""The variable of each item."""

_EVENT_TABLES = ("CHARTEVENTS", "OUTPUTEVENTS")
_STAND_IN = "events"


def files(folder: Path) -> list[Path]:
    """ADMISSIONS, ICUSTAYS and the tables of events; none if one is missing."""
    events = [_path(folder, name) for name in _EVENT_TABLES]
    if None in events and (stand_in := _path(folder, _STAND_IN)):
        events = [stand_in]
    paths = [_path(folder, name) for name in ("ADMISSIONS", "ICUSTAYS")] + events
    present = [path for path in paths if path is not None]
    return present if len(present) == len(paths) else []


def _path(folder: Path, name: str) -> Path | None:
    paths = (folder / f"{name}.csv", folder / f"{name}.csv.gz")
    return next((path for path in paths if path.is_file()), None)


class _Stay(NamedTuple):
    """A stay: its patient, its identifier, when its clock begins, and its length in days."""

    patient: int
    identifier: str
    start: datetime
    days: float


def read(folder: Path, stay: str) -> Stays:
    """The stays of 48 hours and more.

    Args:
      folder: with the tables.
      stay: ``"hospital"``, of an admission, or ``"icu"``.

    Raises:
      UserError: if a table cannot be read or is damaged, with the file and the row.
    """
    admissions, icu_stays, *events = files(folder)
    stays = _admissions(admissions, icu_stays) if stay == "hospital" else _icu_stays(icu_stays)
    stays = sorted(entry for entry in stays if entry.days >= _SHORTEST_DAYS)
    key = "HADM_ID" if stay == "hospital" else "ICUSTAY_ID"
    starts = {entry.identifier: (index, entry.start) for index, entry in enumerate(stays)}
    if len(starts) < len(stays):
        path = admissions if stay == "hospital" else icu_stays
        raise UserError(f"{path} is damaged: some {key} are there twice.")
    measurements = Measured()
    for path in events:
        _events(path, key, starts, measurements)
    numbers = {
        patient: index for index, patient in enumerate(sorted({entry.patient for entry in stays}))
    }
    return measurements.together(
        [entry.days > LONG_DAYS for entry in stays], [numbers[entry.patient] for entry in stays]
    )


def _admissions(admissions: Path, icu_stays: Path) -> list[_Stay]:
    first_starts: dict[str, datetime] = {}
    columns: Sequence[str] = ("HADM_ID", "INTIME")
    for row, (identifier, arrival) in table(icu_stays, columns):
        if arrival:
            start = moment(icu_stays, row, "INTIME", arrival)
            first_starts[identifier] = min(start, first_starts.get(identifier, start))
    stays = []
    columns = ("SUBJECT_ID", "HADM_ID", "ADMITTIME", "DISCHTIME")
    for row, (patient, identifier, arrival, departure) in table(admissions, columns):
        stay = _stay(
            admissions, row, patient, identifier, (columns[2], arrival), (columns[3], departure)
        )
        stays.append(stay._replace(start=first_starts.get(identifier, stay.start)))
    return stays


def _icu_stays(icu_stays: Path) -> list[_Stay]:
    columns = ("SUBJECT_ID", "ICUSTAY_ID", "INTIME", "OUTTIME")
    return [
        _stay(icu_stays, row, patient, identifier, (columns[2], arrival), (columns[3], departure))
        for row, (patient, identifier, arrival, departure) in table(icu_stays, columns)
        if arrival and departure  # a few are not known to have ended
    ]


def _stay(
    path: Path,
    row: int,
    patient: str,
    identifier: str,
    arrival: tuple[str, str],
    departure: tuple[str, str],
) -> _Stay:
    if not (patient.isdecimal() and identifier.isdecimal()):
        raise bad_row(path, row, "its identifiers are no numbers")
    start, end = moment(path, row, *arrival), moment(path, row, *departure)
    return _Stay(int(patient), identifier, start, (end - start).total_seconds() / 86_400)


def _events(
    path: Path, key: str, starts: dict[str, tuple[int, datetime]], measurements: Measured
) -> None:
    """Adds what a table of events has of stays and items that are wanted."""
    columns = (key, "ITEMID", "CHARTTIME", "VALUE")
    for row, (identifier, item, time, text, numeric, error) in table(
        path, columns, ("VALUENUM", "ERROR")
    ):
        variable = ITEMS.get(item)
        if variable is None or identifier not in starts or not (numeric or text) or error == "1":
            continue
        stay, start = starts[identifier]
        hours = (moment(path, row, "CHARTTIME", time) - start).total_seconds() / 3600
        if not 0 <= hours <= HOURS:
            continue
        value = _refill(text) if variable == _REFILL else _numeric(path, row, numeric, text)
        if value is None:
            continue
        if int(item) in _FAHRENHEIT:
            value = (value - 32) / 1.8
        elif variable == _OXYGEN and value > 1:
            value /= 100
        measurements.add(stay, hours, variable, value)


def _numeric(path: Path, row: int, numeric: str, text: str) -> float | None:
    """VALUENUM; where there is none VALUE, which may be a remark instead of a number."""
    if numeric:
        return number(path, row, "VALUENUM", numeric)
    try:
        return number(path, row, "VALUE", text)
    except UserError:
        return None


def _refill(text: str) -> float | None:
    """Whether capillary refill takes above three seconds; the words differ between systems."""
    words = text.lower()
    if "abnormal" in words or "delayed" in words:
        return 1.0
    return 0.0 if "normal" in words or "brisk" in words else None
