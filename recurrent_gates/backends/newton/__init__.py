"""Recurrences with a diagonal Jacobian in O(log T) depth, for cells that declare one."""

from recurrent_gates.backends.newton.backend import chunk, report, segment, unsupported
from recurrent_gates.backends.newton.shooting import Report

__all__ = ["Report", "chunk", "report", "segment", "unsupported"]
