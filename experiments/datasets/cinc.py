"""PhysioNet/CinC Challenge 2012, set A: a file for each stay, and the outcomes.

The twelve variables are those of interpolation-prediction networks, but for capillary refill,
which was not recorded; lactate, which tells of perfusion, too, stands in its place. Arterial and
cuff pressures are one variable; of both at one time the one that the file has last is kept.
"""

from __future__ import annotations

import re
from pathlib import Path

from experiments.datasets.measured import HOURS, LONG_DAYS, Measured, Stays
from experiments.datasets.tables import bad_row, number, table

OUTCOMES = "Outcomes-a.txt"
RECORDS = "set-a"

PARAMETERS = {
    name: place
    for place, names in enumerate(
        (
            ("SaO2",),
            ("HR",),
            ("RespRate",),
            ("SysABP", "NISysABP"),
            ("DiasABP", "NIDiasABP"),
            ("Temp",),
            ("GCS",),
            ("Lactate",),
            ("Urine",),
            ("FiO2",),
            ("Glucose",),
            ("pH",),
        )
    )
    for name in names
}
"""The variable of each parameter."""

_TIME = re.compile(r"([0-9]{2}):([0-5][0-9])")
_IDENTIFIER = re.compile(r"[0-9]{1,9}")


def files(folder: Path) -> list[Path]:
    """The outcomes and all records; none if either is missing."""
    records = sorted((folder / RECORDS).glob("*.txt"))
    outcomes = folder / OUTCOMES
    return [outcomes, *records] if outcomes.is_file() and records else []


def read(folder: Path) -> Stays:
    """The stays whose length is known, in the order of their numbers.

    Raises:
      UserError: if a file is missing or damaged, with the file and the row.
    """
    path = folder / OUTCOMES
    days: dict[int, float] = {}
    for row, (record, length) in table(path, ("RECORDID", "LENGTH_OF_STAY")):
        if not _IDENTIFIER.fullmatch(record):
            raise bad_row(path, row, "its RecordID is no number of a stay")
        if int(record) in days:
            raise bad_row(path, row, "its RecordID came before")
        days[int(record)] = number(path, row, "Length_of_stay", length)
    identifiers = sorted(identifier for identifier in days if days[identifier] >= 0)  # -1: unknown
    measurements = Measured()
    for stay, identifier in enumerate(identifiers):
        _record(folder / RECORDS / f"{identifier}.txt", stay, measurements)
    return measurements.together(
        [days[identifier] > LONG_DAYS for identifier in identifiers], range(len(identifiers))
    )


def _record(path: Path, stay: int, measurements: Measured) -> None:
    for row, (time, parameter, text) in table(path, ("TIME", "PARAMETER", "VALUE")):
        variable = PARAMETERS.get(parameter)
        if variable is None:
            continue
        match = _TIME.fullmatch(time)
        if match is None:
            raise bad_row(path, row, "its Time is not hours and minutes such as 07:30")
        hours = int(match[1]) + int(match[2]) / 60
        if hours > HOURS:
            raise bad_row(path, row, "its Time is after the 48 hours")
        measurements.add(stay, hours, variable, number(path, row, "Value", text))
