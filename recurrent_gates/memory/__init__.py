"""Cells with a memory beside the hidden state, over the same gates."""

from recurrent_gates.memory.dnc import DNC, DNCState
from recurrent_gates.memory.relational import RMC, RMCState
from recurrent_gates.memory.rma import RMA, RMAOutput, RMAState

__all__ = ["DNC", "RMA", "RMC", "DNCState", "RMAOutput", "RMAState", "RMCState"]
