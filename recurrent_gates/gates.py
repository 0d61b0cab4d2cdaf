"""One gate mechanism as a small hashable value: how f and i come from pre-activations.

The nine mechanisms of *Improving the Gating Mechanism of Recurrent Neural Networks*
(UR-gates), and their relatives, are a few independent choices: the activation, how the bias
starts, whether the input gate is tied, and what modulates the gates. The same value drives
every gated cell.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from recurrent_gates import checks, initializers
from recurrent_gates.shapes import lead

_FROZEN = "frozen_b"


def refine(f: jax.Array, r: jax.Array) -> jax.Array:
    """The refine gate: g = f + f (1 - f) (2 r - 1) (UR-gates, eq. 12 and 16).

    Args:
      f: the gate to refine, in [0, 1], any shape.
      r: the refine gate, in [0, 1], same shape.

    Returns:
      g in [f^2, 1 - (1 - f)^2], same shape; refine(1 - f, 1 - r) = 1 - refine(f, r).

    Example:
      >>> [round(float(rg.refine(0.9, r)), 2) for r in (0.0, 0.5, 1.0)]
      [0.81, 0.9, 0.99]
    """
    return f + f * (1 - f) * (2 * r - 1)


def cumax(x: jax.Array) -> jax.Array:
    """cumsum(softmax(x)) over the last axis, in [0, 1] (UR-gates, B.4; Shen et al., 2018).

    Args:
      x: pre-activations ``[..., n]``.

    Returns:
      Non-decreasing activations ``[..., n]``, float32 at least.

    Raises:
      ValueError: if x is not a floating array.

    Note:
      Computed in float32 or wider and clipped: the sum rounds to above 1 (1.016 in bfloat16).
    """
    if not checks.is_array(x) or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"cumax takes a floating array, got {checks.described(x)}.")
    if x.dtype.itemsize < 4:
        x = x.astype(jnp.float32)
    return jnp.clip(jnp.cumsum(jax.nn.softmax(x, axis=-1), axis=-1), 0.0, 1.0)


@dataclasses.dataclass(frozen=True)
class Gate:
    """A gate mechanism: the forget and input gates (f, i) of a cell, as data.

    Attributes:
      activation: ``"sigmoid"`` or ``"cumax"``: of f and of a free i; with ``master`` of the
        master gates, the fine gates being plain sigmoids.
      bias: how the bias of f (of the master gates with ``master``) starts: ``"constant"``,
        ``"uniform"`` (UR-gates, eq. 9) or ``"chrono"`` (eq. 17).
      forget_bias: that constant; a number that f's linear bias starts at.
      tied: the input gate is 1 - f (1 - g where f is refined) and has no map of its own.
      refine: a refine gate, slot ``"r"``, turns f into g = refine(f, r).
      refine_input: a free input gate is refined by its own gate, slot ``"ri"``.
      master: master gates, slots ``"mf"`` and ``"mi"``, modulate f and i (eq. 19-23, 30-33).
      downsize: C, the number of neighbouring units that share a master gate.
      tmax: chrono's longest dependency in steps; ``None``: unknown timescale (B.3).
      bias_mode: what a drawn bias b becomes: ``"separate"`` (a trainable vector beside the
        linear maps' own, as in D.5), ``"folded"`` (into the linear bias's start) or
        ``"frozen"`` (a parameter that gets no gradient; see ``trainable_mask``).
      refine_bias: a refine gate starts at ``"negative"``, -b as Listing 2 prints, or ``"zero"``.

    Raises:
      ValueError: for a name that is not one of the above, for options that exclude each other,
        and for an option that is not its default and has no effect.

    Example:
      >>> gate = rg.GATES["ur"]
      >>> gate.slots(8)
      {'f': 8, 'r': 8}
      >>> pre = {slot: jnp.zeros((2, width)) for slot, width in gate.slots(8).items()}
      >>> f, i = gate(gate.init(jax.random.key(0), 8), pre)
      >>> f.shape, bool(jnp.allclose(f + i, 1.0))
      ((2, 8), True)

    Note:
      The paper's printed slips are implemented as they must be meant: eq. 36 refines the
      ordered gate of eq. 34 (it prints f for f~), and the square in the last lines of B.4
      belongs inside: 1 - (1 - f~)^2.
    """

    activation: str = "sigmoid"
    bias: str = "constant"
    forget_bias: float = 1.0
    tied: bool = False
    refine: bool = False
    refine_input: bool = False
    master: bool = False
    downsize: int = 1
    tmax: float | None = None
    bias_mode: str = "separate"
    refine_bias: str = "negative"

    def __post_init__(self) -> None:
        for field, allowed in (
            ("activation", ("sigmoid", "cumax")),
            ("bias", ("constant", "uniform", "chrono")),
            ("bias_mode", ("separate", "folded", "frozen")),
            ("refine_bias", ("negative", "zero")),
        ):
            value = getattr(self, field)
            if value not in allowed:
                raise ValueError(
                    f"Gate {field} must be one of {', '.join(allowed)}, got {value!r}."
                )
        for field in ("tied", "refine", "refine_input", "master"):
            checks.flag(f"Gate {field}", getattr(self, field))
        checks.numbers(self, "forget_bias")
        checks.whole_number("Gate downsize must be a whole number of units", self.downsize)
        if self.tmax is not None and (isinstance(self.tmax, str) or not 2 < self.tmax < math.inf):
            raise ValueError(f"Gate tmax must be above 2 and finite, got {self.tmax!r}.")
        if self.master and (self.tied or self.refine or self.refine_input):
            raise ValueError("A gate with master gates has free f and i that are not refined.")
        if self.refine_input and self.tied:
            raise ValueError("refine_input needs a free input gate: set tied=False.")
        if self.activation == "cumax" and self.bias != "constant":
            raise ValueError("A cumax gate starts at a constant bias; use bias='constant'.")
        if type(self) is Gate:  # a subclass may give an option a meaning of its own
            defaults = {field.name: field.default for field in dataclasses.fields(Gate)}
            self._refuse(name for name, value in defaults.items() if getattr(self, name) != value)

    def _refuse(self, options: Iterable[str]) -> None:
        """Raises ValueError for the first of these options that has no effect on this gate."""
        without_effect = self._without_effect()
        for name in options:
            if name in without_effect:
                raise ValueError(
                    f"Gate {name} = {getattr(self, name)!r} has no effect: {without_effect[name]}."
                )

    def _without_effect(self) -> dict[str, str]:
        """The options that nothing reads, each with the reason."""
        reasons = {}
        if self.master or self.activation == "cumax" or self.bias != "constant":
            start = "at its drawn bias" if self.bias != "constant" else "at 0"
            reasons["forget_bias"] = f"this forget gate starts {start}"
        if not self.master:
            reasons["downsize"] = "there are no master gates"
        if self.bias != "chrono":
            reasons["tmax"] = "the bias is not drawn by chrono"
        if self.bias == "constant":
            reasons["bias_mode"] = "no bias is drawn"
        if not (self.refine or self.refine_input):
            reasons["refine_bias"] = "there is no refine gate"
        elif self.bias == "constant" and self.refine_bias == "negative":
            reasons["refine_bias"] = "no bias is drawn"
        return reasons

    def tie(self) -> Gate:
        """The same gate on a convex update (GRU, JANET): i = 1 - f, masters stay untied."""
        if self.master:
            return self
        if self.refine_input and not self.refine:
            raise ValueError(
                "Gate refine_input=True has no effect where i is 1 - f: use refine=True."
            )
        start = self.refine_bias if self.refine else "negative"  # of the refine gate that is left
        return dataclasses.replace(self, tied=True, refine_input=False, refine_bias=start)

    def check(self, features: int) -> None:
        """Raises ValueError if the gate does not fit a cell of ``features`` units."""
        if self.master and features % self.downsize:
            raise ValueError(
                f"The gated units must be a multiple of the downsize factor C = {self.downsize}, "
                f"got {features}."
            )
        if self.bias == "uniform" and features < 3:
            raise ValueError(f"Uniform gates need a hidden size of at least 3, got {features}.")

    def slots(self, features: int) -> dict[str, int]:
        """Names and widths of the pre-activations that the gate reads."""
        self.check(features)
        slots = {"f": features}
        if not self.tied:
            slots["i"] = features
        if self.refine:
            slots["r"] = features
        if self.refine_input:
            slots["ri"] = features
        if self.master:
            slots["mf"] = slots["mi"] = features // self.downsize
        return slots

    @property
    def _signs(self) -> dict[str, float]:
        """The sign with which the drawn bias b enters each slot."""
        if self.master:
            return {"mf": 1.0, "mi": -1.0}  # eq. 32, 33
        signs = {"f": 1.0}
        if not self.tied:
            signs["i"] = -1.0  # eq. 18
        if self.refine_bias == "negative":  # Listing 2; each refine gate against its own gate
            if self.refine:
                signs["r"] = -1.0
            if self.refine_input:
                signs["ri"] = 1.0
        return signs

    def _draw(self, key: jax.Array, features: int, dtype: Any) -> jax.Array:
        shape = (features // self.downsize if self.master else features,)
        if self.bias == "uniform":
            return initializers.uniform_gate_bias(key, features, shape, dtype)
        return initializers.chrono_bias(key, shape, self.tmax, dtype)

    def init(self, key: jax.Array, features: int, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
        """The gate's own parameters: ``{"b": [F or F/C]}`` (``"frozen_b"`` if frozen) or ``{}``."""
        self.check(features)
        if self.bias == "constant" or self.bias_mode == "folded":
            return {}
        name = "b" if self.bias_mode == "separate" else _FROZEN
        return {name: self._draw(key, features, dtype)}

    def slot_bias(
        self, key: jax.Array, features: int, dtype: Any = jnp.float32
    ) -> dict[str, jax.Array]:
        """What is added to the start of the slots' linear biases: the constant, or a folded b."""
        if self.bias == "constant":
            # Fine gates under masters and ordered gates start at 0 (Table 1).
            plain = not self.master and self.activation == "sigmoid"
            return {"f": jnp.full((features,), self.forget_bias, dtype)} if plain else {}
        if self.bias_mode != "folded":
            return {}
        b = self._draw(key, features, dtype)
        return {slot: sign * b for slot, sign in self._signs.items()}

    def offsets(self, params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """What the gate's own parameters add to each slot's pre-activation."""
        if "b" in params:
            b = params["b"]
        elif _FROZEN in params:
            b = jax.lax.stop_gradient(params[_FROZEN])
        else:
            return {}
        return {slot: sign * b for slot, sign in self._signs.items()}

    def activate(self, pre: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """(f, i) from pre-activations that have the offsets already; see ``__call__``."""
        sigmoid = jax.nn.sigmoid
        if self.master:
            if self.activation == "cumax":
                mf, mi = cumax(pre["mf"]), 1 - cumax(pre["mi"])  # Eq. (19), (20)
            else:
                mf, mi = sigmoid(pre["mf"]), sigmoid(pre["mi"])  # Eq. (32), (33)
            mf, mi = self._widen(mf), self._widen(mi)
            w = mf * mi  # Eq. (21)
            f = sigmoid(pre["f"]) * w + (mf - w)  # Eq. (22)
            i = sigmoid(pre["i"]) * w + (mi - w)  # Eq. (23)
            return f, i
        ordered = self.activation == "cumax"
        f = cumax(pre["f"]) if ordered else sigmoid(pre["f"])  # Eq. (28), (34); (2), (10)
        if self.refine:
            f = refine(f, sigmoid(pre["r"]))  # Eq. (11), (12); (35), (36)
        if self.tied:
            return f, 1 - f  # Eq. (37)
        i = 1 - cumax(pre["i"]) if ordered else sigmoid(pre["i"])  # Eq. (29); (3)
        if self.refine_input:
            i = refine(i, sigmoid(pre["ri"]))
        return f, i

    def log_ratio(self, pre: Mapping[str, jax.Array]) -> jax.Array:
        """log(f / i) of a gate of sigmoids, also where f and i are both too small to be added.

        sigmoid(x) is exp(min(x, 0)) times a share of at least a half, so that one logarithm takes
        what is left of both. The factor by which a refine or a fine gate changes f and i counts as
        the root of the smallest number at least.
        """
        sigmoid = jax.nn.sigmoid

        def split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            size = jnp.abs(x)  # once, so that both parts have the slope of one side at 0
            return (x - size) / 2, 1 / (1 + jnp.exp(-size))

        def refined(slot: str, refine_slot: str) -> tuple[jax.Array, jax.Array]:
            low, share = split(pre[slot])
            f, r = sigmoid(pre[slot]), sigmoid(pre[refine_slot])
            return low, share * (f + 2 * r * (1 - f))  # Eq. (12): f (f + 2 r (1 - f))

        def modulated(master: str, other: str, fine: str) -> tuple[jax.Array, jax.Array]:
            low, share = map(self._widen, split(pre[master]))
            mi = self._widen(sigmoid(pre[other]))
            return low, share * (sigmoid(pre[fine]) * mi + (1 - mi))  # Eq. (22): mf (f mi + 1 - mi)

        if self.master:
            f, i = modulated("mf", "mi", "f"), modulated("mi", "mf", "i")
        else:
            f = refined("f", "r") if self.refine else split(pre["f"])
            i = refined("i", "ri") if self.refine_input else split(pre["i"])
        floor = math.sqrt(jnp.finfo(f[1].dtype).tiny)  # below it the slope may overflow
        return f[0] - i[0] + jnp.log(jnp.maximum(f[1], floor) / jnp.maximum(i[1], floor))

    @property
    def has_own_equations(self) -> bool:
        """Whether this is of a subclass that changes more than where biases start."""
        names = ("slots", "_signs", "tie", "offsets", "activate", "_widen", "__call__")
        return any(getattr(type(self), name) is not getattr(Gate, name) for name in names)

    def _widen(self, x: jax.Array) -> jax.Array:
        """[..., F/C] -> [..., F]: unit j reads master j // C."""
        if self.downsize == 1:
            return x
        wide = jnp.broadcast_to(x[..., None], (*x.shape, self.downsize))
        return wide.reshape(*x.shape[:-1], x.shape[-1] * self.downsize)

    def __call__(
        self, params: Mapping[str, jax.Array], pre: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """The effective forget and input gates.

        Args:
          params: the gate's own parameters, from ``init``.
          pre: the linear maps' outputs, ``{slot: [..., width]}`` for every name in ``slots``.

        Returns:
          (f, i), each ``[..., F]`` in [0, 1].
        """
        offsets = self.offsets(params)
        return self.activate(
            {s: p + lead(offsets[s], p) if s in offsets else p for s, p in pre.items()}
        )


def trainable_mask(params: Any) -> Any:
    """A tree of bools for optax.masked: False on frozen gate biases, True elsewhere.

    Args:
      params: any tree of parameters, a whole model's included; linen's, or an ``nnx.State``.

    Returns:
      The same tree with a bool in the place of each leaf.
    """
    # Anywhere in the path: an nnx.State has entries of its own below a parameter's name.
    return jax.tree_util.tree_map_with_path(
        lambda path, _: all(getattr(entry, "key", None) != _FROZEN for entry in path), params
    )


GATES: dict[str, Gate] = {
    "standard": Gate(),
    "c": Gate(bias="chrono"),
    "u": Gate(bias="uniform"),
    "o": Gate(activation="cumax"),
    "r": Gate(refine=True, tied=True),
    "ur": Gate(bias="uniform", refine=True, tied=True),
    "cr": Gate(bias="chrono", refine=True, tied=True),
    "or": Gate(activation="cumax", refine=True, tied=True),
    "om": Gate(activation="cumax", master=True),
    "um": Gate(bias="uniform", master=True),
    "cm": Gate(bias="chrono", master=True),
}
"""The mechanisms of UR-gates' Table 1 by the paper's letters; CR and CM are named in B.5."""
