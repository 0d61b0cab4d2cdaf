"""Gradients through time, and gates, of any cell with any parameters. Computes, draws nothing.

One step's Jacobian is d carry_t / d carry_{t-1} over all floating fields of the carry side by
side; products of them are d carry_T / d carry_t. A path is blocked as training would block it:
by ``Detach(p=1)`` on a field at every step, so with h blocked an LSTM's step is h-detach's A_t
and with c blocked its B_t (h-detach, Theorem 1).

Letters are those of ``base.py``; N is the width of the whole carry. Inputs are one sequence
``[T, D]`` or a batch ``[T, *batch, D]``; examples of a batch must not interact. Norms over long
gaps leave the range of any float, so they are returned as log10; -inf is a norm of zero.
"""

from recurrent_gates.analysis.bounds import (
    LecturePaths,
    SingularBounds,
    alignment,
    lecture_paths,
    singular_bounds,
)
from recurrent_gates.analysis.convergence import newton_report
from recurrent_gates.analysis.gates import (
    gate_activations,
    gate_means,
    histogram,
    initial_timescales,
    timescales,
)
from recurrent_gates.analysis.jacobians import (
    ALL,
    Jacobian,
    gap_norms,
    gradient_paths,
    state_jacobians,
    step_jacobians,
)
from recurrent_gates.analysis.trajectories import (
    Field,
    Trajectory,
    carry_dtype,
    field_names,
    largest_state,
    trajectory,
)

__all__ = [
    "ALL",
    "Field",
    "Jacobian",
    "LecturePaths",
    "SingularBounds",
    "Trajectory",
    "alignment",
    "carry_dtype",
    "field_names",
    "gap_norms",
    "gate_activations",
    "gate_means",
    "gradient_paths",
    "histogram",
    "initial_timescales",
    "largest_state",
    "lecture_paths",
    "newton_report",
    "singular_bounds",
    "state_jacobians",
    "step_jacobians",
    "timescales",
    "trajectory",
]
