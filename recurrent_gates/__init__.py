"""Gated recurrent cells for JAX and Flax.

``CELLS`` maps names to cells, ``unroll`` runs a cell over a sequence, ``RNN`` and ``Stack`` are
Flax layers. Shapes: T time, B batch, D input features, F cell features, J = F/2 pairs of GATO.
``unroll`` is time-major, ``[T, B, D]``; the layers are batch-major. Order is always
``(carry, x) -> (carry, y)``.

The modules ``analysis``, ``desiderata``, ``gate_theory``, ``nnx`` and ``testing`` are imported on
first use.

References: GATO is "Gates are not the only option" (Goldstein et al., 2019), UR-gates "Improving
the gating mechanism of recurrent neural networks" (Gu et al., 2020, arXiv 1910.09890), h-detach
"h-detach: modifying the LSTM gradient towards better optimization" (Kanuparthi et al., 2019, arXiv
1810.03023), the lecture M. Khapra's CS7015, no. 14, of IIT Madras.
"""

import importlib
import types
import typing

from recurrent_gates.base import Cell, HiddenState, SlotCell, linear_project
from recurrent_gates.carry import CarryFn, Damp, Detach, Zoneout, draw_noise
from recurrent_gates.cells import (
    GRU,
    JANET,
    LSTM,
    Elman,
    FlaxCell,
    LSTMState,
    count_parameters,
    elman_step,
    gru_step,
    lstm_step,
)
from recurrent_gates.declared import Products, Sums
from recurrent_gates.gates import GATES, Gate, cumax, refine, trainable_mask
from recurrent_gates.gato import (
    GATO,
    GatedDecay,
    GATOMap,
    GATOState,
    OneLayer,
    SlotMap,
    TwoLayer,
    gato_step,
)
from recurrent_gates.gru_d import GRUD, gru_d_inputs, gru_d_project, gru_d_step
from recurrent_gates.initializers import chrono_bias, uniform_gate_bias
from recurrent_gates.interop import from_torch, to_torch
from recurrent_gates.layers import RNN, Stack
from recurrent_gates.linear import LRU, RGLRU, LRUState, MinGRU, MinLSTM
from recurrent_gates.memory import DNC, RMA, RMC, DNCState, RMAOutput, RMAState, RMCState
from recurrent_gates.registry import CELLS, UnknownCellError
from recurrent_gates.scan import Backend, unroll
from recurrent_gates.serving import Stepper, stepper
from recurrent_gates.slstm import SLSTM, SLSTMState, slstm_step
from recurrent_gates.version import __version__

if typing.TYPE_CHECKING:  # for editors and type checkers, which do not see __getattr__'s names
    from recurrent_gates import (  # noqa: F401
        analysis,
        desiderata,
        gate_theory,
        initializers,
        interop,
        nnx,
        target,
        testing,
    )

__all__ = [
    "CELLS",
    "DNC",
    "GATES",
    "GATO",
    "GRU",
    "GRUD",
    "JANET",
    "LRU",
    "LSTM",
    "RGLRU",
    "RMA",
    "RMC",
    "RNN",
    "SLSTM",
    "Backend",
    "CarryFn",
    "Cell",
    "DNCState",
    "Damp",
    "Detach",
    "Elman",
    "FlaxCell",
    "GATOMap",
    "GATOState",
    "Gate",
    "GatedDecay",
    "HiddenState",
    "LRUState",
    "LSTMState",
    "MinGRU",
    "MinLSTM",
    "OneLayer",
    "Products",
    "RMAOutput",
    "RMAState",
    "RMCState",
    "SLSTMState",
    "SlotCell",
    "SlotMap",
    "Stack",
    "Stepper",
    "Sums",
    "TwoLayer",
    "UnknownCellError",
    "Zoneout",
    "__version__",
    "chrono_bias",
    "count_parameters",
    "cumax",
    "draw_noise",
    "elman_step",
    "from_torch",
    "gato_step",
    "gru_d_inputs",
    "gru_d_project",
    "gru_d_step",
    "gru_step",
    "linear_project",
    "lstm_step",
    "refine",
    "slstm_step",
    "stepper",
    "to_torch",
    "trainable_mask",
    "uniform_gate_bias",
    "unroll",
]

_MODULES = (
    "analysis",
    "desiderata",
    "gate_theory",
    "initializers",
    "interop",
    "nnx",
    "target",
    "testing",
)


def __getattr__(name: str) -> types.ModuleType:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
