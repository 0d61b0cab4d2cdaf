"""Theory of gates: UR-gates' distributions of timescales, propositions and refine gate.

Evaluated in float64 by NumPy, exactly where there is a formula; nothing is drawn. Errors of the
paper are corrected: see each function's notes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from recurrent_gates.gates import GATES, Gate
from recurrent_gates.initializers import uniform_gate_bias

__all__ = [
    "EffectiveBand",
    "GradientBounds",
    "TimescaleLaw",
    "band",
    "chrono_drawn",
    "chrono_known",
    "chrono_unknown",
    "constant_bias",
    "cumax_gates",
    "distance",
    "effective_band",
    "effective_gate",
    "gate_gradient",
    "gate_law",
    "gradient_bounds",
    "master_gate_means",
    "pareto_fit",
    "refined",
    "tied_master_gates",
    "timescale_laws",
    "timescale_range",
    "uniform_gates",
]

Array = np.ndarray
Function = Callable[[Any], Array]

# ---------------------------------------------------------------------------------------
# Table 4: how the decay period D = 1 / (1 - f) is distributed at the start
# ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TimescaleLaw:
    """A distribution of decay periods.

    Attributes:
      name: how gates get it.
      density: what the density is proportional to.
      cdf: P(D <= x) for x of any shape, float64.
      quantile: the x with P(D <= x) = q, for q in [0, 1] of any shape, float64.
    """

    name: str
    density: str
    cdf: Function
    quantile: Function


def constant_bias(bias: float = 1.0) -> TimescaleLaw:
    """Table 4, row 1: a constant forget bias; all units have D = 1 + e^b.

    Args:
      bias: the forget gate's bias b.

    Returns:
      The law.
    """
    period = 1 + math.exp(bias)
    return TimescaleLaw(
        f"constant bias {bias:g}",
        "1{x = 1 + e^b}",
        lambda x: np.where(np.asarray(x, float) >= period, 1.0, 0.0),
        lambda q: np.full(np.shape(q), period),
    )


def chrono_known(tmax: float) -> TimescaleLaw:
    """Table 4, row 2: chrono initialisation, known timescale; D uniform on [2, tmax] (eq. 17).

    Args:
      tmax: the longest dependency in steps, above 2.

    Returns:
      The law.

    Raises:
      ValueError: if ``tmax`` is not above 2.
    """
    if not 2 < tmax < math.inf:
        raise ValueError(f"tmax must be above 2 and finite, got {tmax!r}.")
    return TimescaleLaw(
        f"chrono, tmax {tmax:g}",
        "1{2 <= x <= tmax}",
        lambda x: np.clip((np.asarray(x, float) - 2) / (tmax - 2), 0, 1),
        lambda q: 2 + (tmax - 2) * np.asarray(q, float),
    )


_TERMS = 1_000_000  # of the sum that normalises chrono's law, the rest being integrated


@functools.cache
def _chrono_terms() -> tuple[Array, float]:
    """Sums of 1 / (k log^2(k+1)) up to each k, and to infinity."""
    k = np.arange(1, _TERMS + 1, dtype=float)
    sums = np.cumsum(1 / (k * np.log(k + 1) ** 2))
    return sums, float(sums[-1] + 1 / math.log(_TERMS + 1))


def chrono_unknown(lower: float | None = None) -> TimescaleLaw:
    """Table 4, row 3: chrono initialisation, unknown timescale, density 1 / (x log^2 x).

    Args:
      lower: where the density begins. The table does not say; by default where its tail
        is that of the law that is drawn from (``chrono_drawn``), log(1.3434) / log(x).

    Returns:
      The law.
    """
    log_lower = math.log(lower) if lower is not None else 1 / _chrono_terms()[1]

    def cdf(x: Any) -> Array:
        x = np.maximum(np.asarray(x, float), math.exp(log_lower))
        return 1 - log_lower / np.log(x)

    def quantile(q: Any) -> Array:
        with np.errstate(divide="ignore", over="ignore"):
            return np.exp(log_lower / (1 - np.asarray(q, float)))

    return TimescaleLaw("chrono, unknown", "1 / (x log^2 x)", cdf, quantile)


def chrono_drawn() -> TimescaleLaw:
    """The discrete law behind row 3: D = 1 + T, P(T = k) ~ 1 / (k log^2(k + 1)) (B.3).

    Returns:
      The law.
    """
    sums, total = _chrono_terms()

    def cdf(x: Any) -> Array:
        k = np.floor(np.asarray(x, float) - 1).clip(0)
        table = np.concatenate([[0.0], sums / total])
        beyond = 1 - 1 / (total * np.log(np.maximum(k, _TERMS) + 1))
        return np.where(k <= _TERMS, table[np.minimum(k, _TERMS).astype(int)], beyond)

    def quantile(q: Any) -> Array:
        q = np.asarray(q, float)
        index = np.searchsorted(sums / total, q)
        with np.errstate(divide="ignore", over="ignore"):
            beyond = np.exp(1 / (total * (1 - q)))
        return np.where(index < _TERMS, index + 2.0, beyond)

    return TimescaleLaw("chrono, as drawn", "P(D = 1 + k) ~ 1 / (k log^2(k+1))", cdf, quantile)


def uniform_gates(features: int | None = None) -> TimescaleLaw:
    """Table 4, row 4: uniform gate initialisation, density x^-2, a Pareto law of shape 1.

    Args:
      features: d of U[1/d, 1 - 1/d], which bounds D by d / (d - 1) and d; None: its limit.

    Returns:
      The law.

    Raises:
      ValueError: if ``features`` is below 3.
    """
    if features is not None and features < 3:
        raise ValueError(f"Uniform gates need a hidden size of at least 3, got {features!r}.")
    edge = 0.0 if features is None else 1 / features

    def cdf(x: Any) -> Array:
        u = 1 - 1 / np.maximum(np.asarray(x, float), 1.0)
        return np.clip((u - edge) / (1 - 2 * edge), 0, 1)

    def quantile(q: Any) -> Array:
        with np.errstate(divide="ignore"):
            return 1 / (1 - (edge + (1 - 2 * edge) * np.asarray(q, float)))

    return TimescaleLaw("uniform", "1 / x^2", cdf, quantile)


def cumax_gates() -> TimescaleLaw:
    """Table 4, row 5: cumax with equal pre-activations, f_j = j / n; density x^-2 as n grows.

    Returns:
      The law.
    """
    return dataclasses.replace(uniform_gates(), name="cumax")


def refined(law: TimescaleLaw) -> TimescaleLaw:
    """The law of the effective gate where the refine gate starts at r = 1 - f (Listing 2).

    g = 2f - 3f^2 + 2f^3 is pulled to the middle: D of at most d becomes about d / 2. With
    ``refine_bias="zero"`` r is 1/2, g is f and the law is f's own.

    Args:
      law: that of f.

    Returns:
      The law.
    """

    def effective(f: Array) -> Array:
        return f * (2 + f * (2 * f - 3))

    def period_before(x: Any) -> Array:
        g = 1 - 1 / np.maximum(np.asarray(x, float), 1.0)
        low, high = np.zeros_like(g), np.ones_like(g)
        for _ in range(60):  # g rises with f
            middle = (low + high) / 2
            below = effective(middle) < g
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        with np.errstate(divide="ignore"):
            return 1 / (1 - high)

    def quantile(q: Any) -> Array:
        leak = 1 / law.quantile(q)  # 1 - f; 1 - g = (1 - f) (1 - f + 2 f^2), without cancelling
        with np.errstate(divide="ignore"):
            return 1 / (leak * (leak + 2 * (1 - leak) ** 2))

    return TimescaleLaw(
        f"{law.name}, refined",
        f"that of g, f having {law.density}",
        lambda x: law.cdf(period_before(x)),
        quantile,
    )


def timescale_laws(tmax: float = 100.0) -> tuple[TimescaleLaw, ...]:
    """The laws of UR-gates' Table 4: how decay periods start under each kind of gate.

    Args:
      tmax: that of row 2, chrono initialisation with a known timescale.

    Returns:
      Five laws, in the table's order.

    Example:
      >>> for law in rg.gate_theory.timescale_laws(tmax=100):
      ...     print(f"{law.name}: nine of ten units up to {law.quantile(0.9):.1f} steps")
      constant bias 1: nine of ten units up to 3.7 steps
      chrono, tmax 100: nine of ten units up to 90.2 steps
      chrono, unknown: nine of ten units up to 19.1 steps
      uniform: nine of ten units up to 10.0 steps
      cumax: nine of ten units up to 10.0 steps
    """
    return (
        constant_bias(),
        chrono_known(tmax),
        chrono_unknown(),
        uniform_gates(),
        cumax_gates(),
    )


def gate_law(gate: Gate, features: int) -> TimescaleLaw | None:
    """The law of the effective forget gate that a mechanism starts with.

    Args:
      gate: the mechanism.
      features: the hidden size.

    Returns:
      The law, or None with master gates, of whose products Table 4 says nothing.

    Example:
      >>> law = rg.gate_theory.gate_law(rg.GATES["u"], 256)
      >>> [round(float(law.quantile(q)), 1) for q in (0.5, 0.9, 1.0)]
      [2.0, 9.7, 256.0]
    """
    if gate.master:
        return None
    if gate.activation == "cumax":
        return cumax_gates()
    if gate.bias == "constant":
        return constant_bias(gate.forget_bias)
    if gate.bias == "uniform":
        law = uniform_gates(features)
    else:
        law = chrono_drawn() if gate.tmax is None else chrono_known(gate.tmax)
    return refined(law) if gate.refine and gate.refine_bias == "negative" else law


def distance(periods: Any, law: TimescaleLaw, slack: float = 1e-5) -> float:
    """The Kolmogorov-Smirnov distance of a sample of periods from a law.

    Periods may be off by the fraction ``slack``, so that a law with steps forgives rounding.

    Args:
      periods: the sample, any shape.
      law: the law.
      slack: a fraction of the periods.

    Returns:
      The distance, in [0, 1].
    """
    values, counts = np.unique(np.asarray(periods, float), return_counts=True)
    upto = np.cumsum(counts) / counts.sum()
    below = np.concatenate([[0.0], upto[:-1]])
    above_law = upto - law.cdf(values * (1 + slack))
    below_law = law.cdf(values * (1 - slack)) - below
    return float(max(above_law.max(), below_law.max(), 0.0))


# ---------------------------------------------------------------------------------------
# Propositions 1-4
# ---------------------------------------------------------------------------------------


def pareto_fit(key: jax.Array, features: int = 1024, draws: int = 100_000) -> dict[str, float]:
    """How well draws of uniform gate initialisation fit a Pareto law (UR-gates, Proposition 1).

    The paper calls density x^-2 "Pareto(alpha = 2)"; the shape of that law is alpha = 1.

    Args:
      key: PRNG key of the draws.
      features: d of U[1/d, 1 - 1/d].
      draws: how many biases are drawn.

    Returns:
      ``distance``: Kolmogorov-Smirnov, of sigmoid(b) from the law; ``shape``: alpha as the
      draws have it, minus the slope of log P(D > x) against log x, fitted for P in [0.01, 1].
    """
    b = np.asarray(uniform_gate_bias(key, features, (draws,)), float)
    periods = np.sort(1 + np.exp(b))
    survival = 1 - (np.arange(draws) + 0.5) / draws
    survival = 1 / features + (1 - 2 / features) * survival  # as if u were in [0, 1]
    selection = survival >= 0.01
    slope = np.polyfit(np.log(periods[selection]), np.log(survival[selection]), 1)[0]
    return {"distance": distance(periods, uniform_gates(features)), "shape": float(-slope)}


def timescale_range(f: Any) -> dict[str, Array]:
    """Where a refine gate can move a timescale D: into (D/2, D^2) (UR-gates, Proposition 2).

    Args:
      f: forget activations in (0, 1).

    Returns:
      ``period`` D, and ``shortest`` and ``longest``, the ends at r = 0 and r = 1.
    """
    f = np.asarray(f, float)
    return {
        "period": 1 / (1 - f),
        "shortest": 1 / (1 - effective_gate(f, 0.0)),
        "longest": 1 / (1 - f) ** 2,
    }


def master_gate_means(features: int = 1000) -> dict[str, float]:
    """The means of ON-LSTM's gates at the start (UR-gates, Proposition 3, corrected).

    The proposition says E[f^] = 5/6; its proof is of E[f^ + i^] = 5/6, f^ alone being 5/12.

    Args:
      features: the hidden size.

    Returns:
      Means over units of ``f``, ``i`` and ``sum`` with all pre-activations zero.
    """
    gate = GATES["om"]
    zeros = {slot: jnp.zeros((width,)) for slot, width in gate.slots(features).items()}
    f, i = (np.asarray(x, float) for x in gate.activate(zeros))
    return {"f": float(f.mean()), "i": float(i.mean()), "sum": float((f + i).mean())}


def tied_master_gates(master: Any, fine: Any) -> dict[str, Array]:
    """Tied, rescaled master gates beside the refine gate (UR-gates, Proposition 4, eq. 24-27).

    Args:
      master: the master forget gate, refined; in [0, 1].
      fine: the fine forget gate, which refines.

    Returns:
      ``master_gate``: f^ by eq. 26; ``refine_gate``: g by eq. 16. They are the same.
    """
    master, fine = np.asarray(master, float), np.asarray(fine, float)
    w = master * (1 - master)  # Eq. (24), (25)
    return {
        "master_gate": 2 * fine * w + (master - w),  # Eq. (26)
        "refine_gate": effective_gate(master, fine),
    }


# ---------------------------------------------------------------------------------------
# Figure 2: the refine gate in action
# ---------------------------------------------------------------------------------------


def band(f: Any) -> Array:
    """alpha(f) = f (1 - f), how far the refine gate can move f (Fig. 2a, section 2.3).

    Args:
      f: forget activations in [0, 1], any shape.

    Returns:
      alpha(f), float64.
    """
    f = np.asarray(f, float)
    return f * (1 - f)


def effective_gate(f: Any, r: Any) -> Array:
    """g = f + f (1 - f) (2 r - 1) (Fig. 2c, eq. 16), as ``recurrent_gates.refine``.

    Args:
      f: forget activations in [0, 1].
      r: refine activations in [0, 1], a shape that broadcasts against f's.

    Returns:
      g, float64.
    """
    f, r = np.asarray(f, float), np.asarray(r, float)
    return f + band(f) * (2 * r - 1)


class EffectiveBand(NamedTuple):
    """Where g can be, by the pre-activation of f (Fig. 2b).

    Attributes:
      f: sigmoid of the pre-activation.
      lower: f^2, g where r is 0.
      upper: 1 - (1 - f)^2, g where r is 1.
    """

    f: Array
    lower: Array
    upper: Array


def effective_band(x: Any) -> EffectiveBand:
    """f = sigmoid(x), and the curves f^2 (r = 0) and 1 - (1 - f)^2 (r = 1) around it.

    Args:
      x: pre-activations of f, any shape.

    Returns:
      The three curves, float64.
    """
    f = 0.5 * (1 + np.tanh(np.asarray(x, float) / 2))
    return EffectiveBand(f, effective_gate(f, 0.0), effective_gate(f, 1.0))


def gate_gradient(f: Any, r: Any) -> Array:
    """The size of g's gradient by the pre-activations of f and r (UR-gates, App. C).

    Args:
      f: forget activations in [0, 1].
      r: refine activations in [0, 1], a shape that broadcasts against f's.

    Returns:
      The norm of the two derivatives, float64.

    Note:
      App. C's first line for the derivative by f's pre-activation prints 2r(1-f) for
      2rf(1-f); what follows from it is right and is what is computed.
    """
    f, r = np.asarray(f, float), np.asarray(r, float)
    by_f = r + (1 - 2 * r) * f
    by_r = r * (1 - r)
    return 2 * f * (1 - f) * np.hypot(by_f, by_r)


class GradientBounds(NamedTuple):
    """How strong a gradient can be at a given activation g (Fig. 2d), all of g's shape.

    Attributes:
      lower: the least size of g's gradient over all f and r that give g.
      upper: the greatest.
      plain: g (1 - g), the gradient of a sigmoid gate at g.
      lower_ratio: lower / plain.
      upper_ratio: upper / plain.
    """

    lower: Array
    upper: Array
    plain: Array
    lower_ratio: Array
    upper_ratio: Array


def gradient_bounds(g: Any, points: int = 513) -> GradientBounds:
    """The least and greatest gradient of a refined gate at g, over r (Fig. 2d, App. C).

    Args:
      g: activations in (0, 1), ``[n]``.
      points: of a search over f, which at g runs from 1 - sqrt(1 - g) (r = 1) to sqrt(g); a
        second search of as many points follows around the best of the first.

    Returns:
      The bounds, and a plain sigmoid's gradient to hold them against.
    """
    g = np.asarray(g, float)
    low, high = g / (1 + np.sqrt(1 - g)), np.sqrt(g)  # 1 - sqrt(1 - g) without cancelling
    plain = g * (1 - g)

    def search(sign: float) -> Array:
        left, right = np.zeros_like(g), np.ones_like(g)
        for _ in range(2):
            share = np.linspace(left, right, points)  # [points, n]
            f = low + (high - low) * share
            r = np.clip((g - f**2) / (2 * f * (1 - f)), 0, 1)
            size = sign * gate_gradient(f, r)
            middle = np.take_along_axis(share, size.argmin(axis=0)[None], axis=0)[0]
            width = (right - left) / (points - 1)
            left, right = np.maximum(middle - width, 0), np.minimum(middle + width, 1)
        return sign * size.min(axis=0)

    lower, upper = search(1.0), search(-1.0)
    return GradientBounds(lower, upper, plain, lower / plain, upper / plain)
