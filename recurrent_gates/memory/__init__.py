"""Cells with a memory beside the hidden state, over the same gates."""

from recurrent_gates.memory.relational import RMC, RMCState

__all__ = ["RMC", "RMCState"]
