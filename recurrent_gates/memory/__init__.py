"""Cells with a memory beside the hidden state, over the same gates."""

from recurrent_gates.memory.dnc import DNC, DNCState
from recurrent_gates.memory.relational import RMC, RMCState

__all__ = ["DNC", "RMC", "DNCState", "RMCState"]
