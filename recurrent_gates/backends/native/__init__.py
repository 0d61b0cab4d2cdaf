"""Loops over time in C++ for a CPU: LSTM, GRU, JANET and one-layer GATO; compiled at first use."""

from recurrent_gates.backends.native.backend import chunk, segment, unsupported

__all__ = ["chunk", "segment", "unsupported"]
