"""Loops over time in C++, for LSTM, GRU and JANET on a CPU; compiled where they run."""

from recurrent_gates.backends.native.backend import chunk, segment, unsupported

__all__ = ["chunk", "segment", "unsupported"]
