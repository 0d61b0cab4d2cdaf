"""The sentences for files that cannot be read."""

from __future__ import annotations

from pathlib import Path

from experiments.settings.errors import UserError


def damaged(path: Path, offset: int, reason: str) -> UserError:
    """A file that is not what was published, from this byte of its (unzipped) content on."""
    return UserError(f"{path} is damaged at byte {offset}: {reason}.")


def unreadable(path: Path, error: OSError) -> UserError:
    """A file that the system does not give."""
    return UserError(f"cannot read {path}: {error.strerror or error}.")
