"""How ``--mesh`` names the axes of devices that a run is split over."""

from __future__ import annotations

import re

from experiments.settings.errors import UserError

LANES, DATA, VOCAB = "lanes", "data", "vocab"
AXES = (LANES, DATA, VOCAB)
"""From the devices that speak least with each other to those that speak most."""

_AUTO = "auto"
_ENTRY = re.compile(r"([a-z]+):([1-9][0-9]{0,5})")


def axes_of(mesh: str) -> dict[str, int] | None:
    """How many devices there are along each of ``AXES``; None: as the devices and the batch allow.

    Args:
      mesh: ``"auto"``, or axes and numbers such as ``"lanes:4,data:2"``.

    Raises:
      UserError: if it is neither.
    """
    if mesh == _AUTO:
        return None
    sizes = dict.fromkeys(AXES, 1)
    names = set()
    for entry in mesh.split(","):
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise UserError(
                f"--mesh must be auto, or axes with their numbers of devices such as data:8 or "
                f"lanes:4,data:2, got {mesh}."
            )
        axis, size = match.groups()
        if axis not in AXES:
            raise UserError(f"--mesh={mesh}: there is no axis {axis}, there are {_listed(AXES)}.")
        if axis in names:
            raise UserError(f"--mesh={mesh} names the axis {axis} twice.")
        names.add(axis)
        sizes[axis] = int(size)
    return sizes


def check_shares(mesh: str, batch_size: int, lanes: int, *, words: bool) -> None:
    """Raises ``UserError`` where what an axis splits has no equal parts.

    Args:
      mesh: the setting.
      batch_size: what ``data`` splits.
      lanes: what ``lanes`` splits.
      words: whether the task has tables that ``vocab`` splits.
    """
    if (sizes := axes_of(mesh)) is None:
        return
    if batch_size % sizes[DATA]:
        raise UserError(
            f"--mesh={mesh}: --batch_size={batch_size} is not a multiple of {sizes[DATA]}."
        )
    if lanes % sizes[LANES]:
        raise UserError(
            f"--mesh={mesh}: the number of seeds times learning rates, {lanes}, is not a multiple "
            f"of {sizes[LANES]}."
        )
    if sizes[VOCAB] > 1 and not words:
        raise UserError(
            f"--mesh={mesh}: vocab splits the tables of a softmax over words, and only those of "
            "language_model can be split."
        )


def _listed(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"
