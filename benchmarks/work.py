"""What is computed in a comparison: a cell, a size and the arrays that both sides are given."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import recurrent_gates as rg

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def _identity(x: jax.Array) -> jax.Array:
    return x


FORMS: dict[str, dict[str, Any]] = {
    "reset before": {"reset": "before"},  # a GRU's, as Cho et al. print it
    "plain output": {"output_activation": _identity},  # an LSTM's h = o * c
}
"""Other equations of a cell, that a peer has: the settings that make it so."""


class Size(NamedTuple):
    """B, T, D and F."""

    batch: int
    steps: int
    inputs: int
    features: int


@dataclasses.dataclass(frozen=True)
class Contender:
    """One of our cells and how it is run; written ``cell[/backend][+detachP][*lanes]``.

    Attributes:
      cell: a name in ``CELLS``.
      backend: how the recurrence is computed.
      detach: the probability of h-detach, one draw a step for the whole batch.
      lanes: independent copies (seeds) under one vmap; 1 is without vmap.
      form: a name in ``FORMS``, for other equations; it is a peer's and never written.
    """

    cell: str
    backend: str = "auto"
    detach: float = 0.0
    lanes: int = 1
    form: str = ""

    @classmethod
    def parse(cls, text: str) -> Contender:
        """The contender that a text such as ``"lstm/fused+detach0.5*3"`` names.

        Raises:
          ValueError: if the text or a name in it cannot be.
        """
        match = re.fullmatch(
            r"(?P<cell>\w+)(/(?P<backend>\w+))?(\+detach(?P<detach>[\d.]+))?(\*(?P<lanes>\d+))?",
            text,
        )
        if match is None:
            raise ValueError(f"A cell is written cell[/backend][+detachP][*lanes], got {text!r}.")
        if match["cell"] not in rg.CELLS:
            raise ValueError(f"There is no cell {match['cell']!r}; see recurrent_gates.CELLS.")
        return cls(
            match["cell"],
            rg.Backend(match["backend"] or "auto").value,
            float(match["detach"] or 0),
            int(match["lanes"] or 1),
        )

    def __str__(self) -> str:
        backend = "" if self.backend == "auto" else f"/{self.backend}"
        detach = f"+detach{self.detach:g}" if self.detach else ""
        lanes = f"*{self.lanes}" if self.lanes > 1 else ""
        return f"{self.cell}{backend}{detach}{lanes}"

    def build(self, features: int, dtype: str = "float32") -> rg.Cell:
        """The cell; plain LSTM and GRU have two bias vectors, as torch has them."""
        settings: dict[str, Any] = {"dtype": DTYPES[dtype]}
        if self.cell in ("lstm", "gru"):
            settings["bias_vectors"] = 2
        settings |= FORMS.get(self.form, {})
        return rg.CELLS[self.cell](features, **settings)

    def carry_fns(self) -> tuple[rg.CarryFn, ...]:
        """What acts on the carry."""
        if not self.detach:
            return ()
        field = "r" if self.cell.startswith("gato") else "h"
        return (rg.Detach(jnp.float32(self.detach), field),)


class Arrays(NamedTuple):
    """The inputs of a train step; with several lanes every leaf has a leading axis.

    Attributes:
      params: the cell's parameters, float32.
      xs: ``[T, B, D]``.
      carry: the initial carry, leaves ``[B, ...]``.
      cotangent: of the outputs, ``[T, B, F]``.
      noise: of the carry functions, leaves ``[T, ...]``.
    """

    params: Any
    xs: Any
    carry: Any
    cotangent: Any
    noise: Any


class Gradients(NamedTuple):
    """Cotangents of a train step's inputs, as in ``Arrays``."""

    params: Any
    xs: Any
    carry: Any


def make(contender: Contender, size: Size, dtype: str = "float32") -> Arrays:
    """The arrays of a contender, the same for every backend and for a peer of the same cell."""
    return _make(dataclasses.replace(contender, backend="auto"), size, dtype)


@functools.cache
def _make(contender: Contender, size: Size, dtype: str) -> Arrays:
    lanes = [_make_lane(contender, size, dtype, seed) for seed in range(contender.lanes)]
    return (
        lanes[0]
        if contender.lanes == 1
        else jax.tree.map(lambda *leaves: jnp.stack(leaves), *lanes)
    )


def forget() -> None:
    """Lets go of the arrays that ``make`` has kept."""
    _make.cache_clear()


def _make_lane(contender: Contender, size: Size, dtype: str, seed: int) -> Arrays:
    """The arrays of a lane. NumPy draws most of them: each of JAX's draws would be compiled."""
    rng = np.random.default_rng(seed)
    init_key, noise_key = jax.random.split(jax.random.key(seed))
    cell = contender.build(size.features, dtype)

    def normal(shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)

    def near(tree: Any, *, matrices: bool) -> Any:
        """The tree moved a little, so that no bias and no state is zero."""

        def moved(leaf: jax.Array) -> jax.Array:
            if leaf.ndim >= 2 and not matrices:
                return leaf
            return leaf + 0.1 * normal(leaf.shape, leaf.dtype)

        return jax.tree.map(moved, tree)

    shape = (size.steps, size.batch)
    output_size = getattr(cell, "emitted_features", size.features)
    start = cell.initial((size.batch,))
    carry = near(start, matrices=True)
    if isinstance(cell, rg.DNC):  # weights are no numbers of any size; equal usage leaves a choice
        usage = jnp.asarray(rng.random(start.usage.shape, np.float32), start.usage.dtype)
        carry = start._replace(c=carry.c, h=carry.h, memory=carry.memory, usage=usage)
    init = jax.jit(functools.partial(cell.init_params, in_features=size.inputs))
    return Arrays(
        params=near(init(init_key), matrices=False),
        xs=normal((*shape, size.inputs), DTYPES[dtype]),
        carry=carry,
        cotangent=normal((*shape, output_size), DTYPES[dtype]),
        noise=rg.draw_noise(contender.carry_fns(), noise_key, size.steps, (size.batch,)),
    )


class MismatchError(Exception):
    """Two sides do not compute the same numbers."""


def check_equal(name: str, actual: Any, expected: Any, tolerance: float) -> float:
    """The largest relative error ||a - b|| / ||b|| over the arrays of two trees.

    In Euclidean norms, since a ReLU whose input is zero but for rounding is on in one program and
    off in another, which shows in single elements. One wrong row of n is an error of about
    n ** -0.5, which float32's tolerance sees and bfloat16's does not.

    Raises:
      MismatchError: if it is not below the tolerance, or a value is not finite; the sentence names
        the array.
    """
    largest = 0.0
    arrays = dict(jax.tree_util.tree_leaves_with_path(actual))
    for path, b in jax.tree_util.tree_leaves_with_path(expected):
        label = f"{name}{jax.tree_util.keystr(path)}"
        if path not in arrays:
            raise MismatchError(f"{label} is missing.")
        a, b = (np.asarray(array, np.float64) for array in (arrays[path], b))
        if a.shape != b.shape:
            raise MismatchError(f"{label} has shape {a.shape}, not {b.shape}.")
        error = float(np.linalg.norm((a - b).ravel()) / (np.linalg.norm(b.ravel()) or 1.0))
        if not error < tolerance:  # NaN is not below
            raise MismatchError(f"{label} is off by {error:.1e}, not below {tolerance:.0e}.")
        largest = max(largest, error)
    return largest
