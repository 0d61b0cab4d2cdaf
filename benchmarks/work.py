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
    make_lane = functools.partial(_make_lane, contender, size, dtype)
    if contender.lanes == 1:
        return jax.jit(make_lane)(0)
    return jax.jit(jax.vmap(make_lane))(jnp.arange(contender.lanes))


def forget() -> None:
    """Lets go of the arrays that ``make`` has kept."""
    _make.cache_clear()


def _make_lane(contender: Contender, size: Size, dtype: str, seed: Any) -> Arrays:
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), seed), 6)
    cell = contender.build(size.features, dtype)

    def near(key: jax.Array, tree: Any, *, matrices: bool) -> Any:
        """The tree moved a little, so that no bias and no state is zero."""
        leaves, structure = jax.tree.flatten(tree)
        leaf_keys = jax.random.split(key, len(leaves))
        moved = [
            leaf + 0.1 * jax.random.normal(k, leaf.shape, leaf.dtype)
            if matrices or leaf.ndim < 2
            else leaf
            for k, leaf in zip(leaf_keys, leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, moved)

    shape = (size.steps, size.batch)
    xs = jax.random.normal(keys[0], (*shape, size.inputs), DTYPES[dtype])
    emitted = getattr(cell, "emitted_features", size.features)
    cotangent = jax.random.normal(keys[1], (*shape, emitted), DTYPES[dtype])
    start = cell.initial((size.batch,))
    carry = near(keys[4], start, matrices=True)
    if isinstance(cell, rg.DNC):  # weights are no numbers of any size; equal usage leaves a choice
        usage = jax.random.uniform(keys[4], start.usage.shape)
        carry = start._replace(c=carry.c, h=carry.h, memory=carry.memory, usage=usage)
    return Arrays(
        params=near(keys[2], cell.init_params(keys[3], size.inputs), matrices=False),
        xs=xs,
        carry=carry,
        cotangent=cotangent,
        noise=rg.draw_noise(contender.carry_fns(), keys[5], size.steps, (size.batch,)),
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
    got = dict(jax.tree_util.tree_leaves_with_path(actual))
    for path, b in jax.tree_util.tree_leaves_with_path(expected):
        where = f"{name}{jax.tree_util.keystr(path)}"
        if path not in got:
            raise MismatchError(f"{where} is missing.")
        a, b = (np.asarray(array, np.float64) for array in (got[path], b))
        if a.shape != b.shape:
            raise MismatchError(f"{where} has shape {a.shape}, not {b.shape}.")
        error = float(np.linalg.norm((a - b).ravel()) / (np.linalg.norm(b.ravel()) or 1.0))
        if not error < tolerance:  # NaN is not below
            raise MismatchError(f"{where} is off by {error:.1e}, not below {tolerance:.0e}.")
        largest = max(largest, error)
    return largest
