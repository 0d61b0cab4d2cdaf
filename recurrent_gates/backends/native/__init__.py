"""Loops over time in C++ for a CPU: LSTM, GRU, JANET and GATO; compiled at first use."""

from recurrent_gates.backends.native.backend import chunk, is_for_step, segment, unsupported

__all__ = ["chunk", "is_for_step", "segment", "unsupported"]
