"""Recurrences as Pallas kernels, for TPUs and NVIDIA GPUs."""

from recurrent_gates.backends.pallas.backend import chunk, segment, unsupported

__all__ = ["chunk", "segment", "unsupported"]
