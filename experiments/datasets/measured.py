"""What was measured in hospital stays: the variables, and the stays put together.

Letters: N stays, E times of measurement of all stays, V = 12 variables.
"""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

HOURS = 48.0  # that are read
LONG_DAYS = 7.0  # a stay above this is a long one


class Variable(NamedTuple):
    """A variable, and the range that its values are clipped to.

    Attributes:
      name: in full.
      unit: of its values.
      least, most: the range; what lies outside is a slip of the pen or of a sensor.
    """

    name: str
    unit: str
    least: float
    most: float


VARIABLES = (
    Variable("oxygen saturation", "%", 0, 100),
    Variable("heart rate", "1/min", 0, 300),
    Variable("respiratory rate", "1/min", 0, 100),
    Variable("systolic blood pressure", "mmHg", 0, 300),
    Variable("diastolic blood pressure", "mmHg", 0, 200),
    Variable("temperature", "degrees Celsius", 25, 45),
    Variable("Glasgow coma scale", "points", 3, 15),
    Variable("perfusion", "refill above 3 s (MIMIC), lactate in mmol/l (CinC)", 0, 30),
    Variable("urine output", "ml", 0, 3000),
    Variable("inspired oxygen", "fraction", 0.21, 1),
    Variable("glucose", "mg/dl", 0, 1000),
    Variable("pH", "", 6.5, 8),
)
"""The twelve of interpolation-prediction networks (Shukla & Marlin, 2019)."""


class Stays(NamedTuple):
    """Stays, ordered by an identifier that is left out.

    Attributes:
      starts: where the times of each stay begin, int64 ``[N + 1]``; it may have none.
      hours: float32 ``[E]``, since the stay's clock began, rising in each stay.
      values: float32 ``[E, V]``, NaN where there is none.
      long_stay: bool ``[N]``.
      patients: int32 ``[N]``: the number of the patient, in no relation to any identifier.
      clipped: how many values of each variable lay outside of its range, int64 ``[V]``.
    """

    starts: np.ndarray
    hours: np.ndarray
    values: np.ndarray
    long_stay: np.ndarray
    patients: np.ndarray
    clipped: np.ndarray


class Measured:
    """What was measured, value by value and in any order, in little memory."""

    def __init__(self) -> None:
        self._stay, self._variable = array.array("i"), array.array("b")
        self._hours, self._value = array.array("f"), array.array("f")

    def add(self, stay: int, hours: float, variable: int, value: float) -> None:
        """A value of a variable; of several at one time the last one is kept."""
        self._stay.append(stay)
        self._hours.append(hours)
        self._variable.append(variable)
        self._value.append(value)

    def together(self, long_stay: Sequence[bool], patients: Sequence[int]) -> Stays:
        """The stays; values out of range are clipped and counted."""
        stay = np.frombuffer(self._stay, np.int32)
        hours = np.frombuffer(self._hours, np.float32)
        variable = np.frombuffer(self._variable, np.int8)
        value = np.frombuffer(self._value, np.float32)
        lower_bounds = np.array([definition.least for definition in VARIABLES], np.float32)[
            variable
        ]
        upper_bounds = np.array([definition.most for definition in VARIABLES], np.float32)[variable]
        outliers = (value < lower_bounds) | (value > upper_bounds)
        clipped = np.bincount(variable[outliers], minlength=len(VARIABLES))
        value = np.clip(value, lower_bounds, upper_bounds)
        order = np.lexsort((hours, stay))
        first = np.ones(len(order), bool)
        first[1:] = (np.diff(stay[order]) != 0) | (np.diff(hours[order]) != 0)
        time = np.cumsum(first) - 1
        values = np.full((int(first.sum()), len(VARIABLES)), np.nan, np.float32)
        values[time, variable[order]] = value[order]
        counts = np.bincount(stay[order][first], minlength=len(long_stay))
        return Stays(
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            hours[order][first],
            values,
            np.array(long_stay, bool),
            np.array(patients, np.int32),
            clipped.astype(np.int64),
        )
