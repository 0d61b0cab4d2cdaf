"""Any cell, reading a picture as it goes (Show, Attend and Tell: Xu et al., 2015).

Letters: T steps, N captions, B pictures (captions of a picture stand beside each other), L
regions of a picture, D features of a region, A units that compare, F features of the cell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from recurrent_gates import CarryFn, Cell

Field = str | int | None


class Attending(NamedTuple):
    """The carry of an ``AttendingCell``.

    Attributes:
      state: the inner cell's.
      query: the part of it that the attention asks with, ``[N, F]``.
      weights: where the last step looked, ``[N, L]``.
    """

    state: Any
    query: jax.Array
    weights: jax.Array


def field_of_state(state: Any, field: Field) -> jax.Array:
    """A field of a state by name or number, ``[N, F]``; the state itself, where that is one array,
    and a memory's slots in a row."""
    array = state
    if isinstance(state, tuple):
        array = getattr(state, field) if isinstance(field, str) else state[field or 0]
    return array if array.ndim == 2 else array.reshape(len(array), -1)


class AttendingCell(Cell):
    """A cell that reads, beside its input, a mean of the regions of a picture.

    Its parameters are made by the module around it, and what is the same for all steps goes in
    with them: ``{"cell": the inner cell's, "query": [F, A], "score": [A], "keys": [B, L, A],
    "regions": [B, L, D]}``.

    Attributes:
      cell: the inner cell.
      field: what of its state the attention asks with.
      regions: L.
    """

    cell: Cell
    field: Field
    regions: int

    @nn.nowrap
    def init_params(self, key: jax.Array, in_features: Any) -> dict[str, Any]:
        raise TypeError("the module around an AttendingCell makes its parameters.")

    @nn.nowrap
    def initial(self, batch_shape: Sequence[int]) -> Attending:
        state = self.cell.initial(batch_shape)
        weights = jnp.zeros((*batch_shape, self.regions), jnp.float32)
        return Attending(state, field_of_state(state, self.field), weights)

    @nn.nowrap
    def step(self, params: Mapping[str, Any], carry: Attending, z_t: jax.Array) -> Attending:
        keys = params["keys"]
        query = carry.query.astype(keys.dtype) @ params["query"]
        query = query.reshape(len(keys), -1, 1, query.shape[-1])  # [B, N/B, 1, A]
        # Xu et al., Eq. (4): e_ti = f_att(a_i, h_t-1), in the published code w . tanh(W a + U h).
        energies = jnp.tanh(keys[:, None] + query) @ params["score"]
        weights = jax.nn.softmax(energies, axis=-1)  # Eq. (5)
        weights = weights.reshape(len(z_t), -1).astype(jnp.float32)
        state = self.cell.step(params["cell"], carry.state, self._read(params, weights, z_t))
        return Attending(state, field_of_state(state, self.field), weights)

    @nn.nowrap
    def _read(self, params: Mapping[str, Any], weights: jax.Array, z_t: jax.Array) -> Any:
        """What the inner cell makes of a word and of where it looks."""
        regions = params["regions"]
        looks = weights.astype(regions.dtype).reshape(len(regions), -1, self.regions)
        context = looks @ regions  # Eq. (13): the expected region
        flat_context = context.reshape(-1, context.shape[-1])
        x = jnp.concatenate([z_t, flat_context.astype(z_t.dtype)], axis=-1)
        return self.cell.project(params["cell"], x)

    @nn.nowrap
    def emit(self, params: Mapping[str, Any], carry: Attending, z: jax.Array) -> Any:
        """``(y, weights)``."""
        projection = self._read(params, carry.weights, z)  # of most cells the dtype alone is used
        return self.cell.emit(params["cell"], carry.state, projection), carry.weights


@struct.dataclass
class OfState(CarryFn):
    """A carry function of the inner cell's state."""

    inner: Any = None

    @property
    def draws(self) -> bool:
        return self.inner.draws

    def before(self, noise_t: Any, carry: Attending) -> Attending:
        return carry._replace(state=self.inner.before(noise_t, carry.state))

    def after(self, noise_t: Any, prev: Attending, new: Attending) -> Attending:
        return new._replace(state=self.inner.after(noise_t, prev.state, new.state))


@struct.dataclass
class Query(CarryFn):
    """Takes the query from the state as it is at this place of the list of carry functions.

    After ``Detach`` the query is detached as well, which is h-detach's Algorithm 1: the step reads
    the state nowhere else. Before it the gradient still flows through the attention, as in
    h-detach's published code.
    """

    def before(self, noise_t: Any, carry: Attending) -> Attending:
        del noise_t
        return carry._replace(query=field_of_state(carry.state, self.field))


def around_state(
    carry_fns: Sequence[CarryFn], noise: Sequence[Any] | None, field: Field, detach_query: bool
) -> tuple[tuple[CarryFn, ...], tuple[Any, ...] | None]:
    """Carry functions of a cell, and their noise, for an ``AttendingCell`` around it.

    Args:
      carry_fns: of the inner cell's state.
      noise: one entry for each; None: none is drawn.
      field: what the attention asks with.
      detach_query: whether what acts before a step acts on the query as well.
    """
    fns: list[CarryFn] = [OfState(fn.p, fn.field, inner=fn) for fn in carry_fns]
    noises = None if noise is None else list(noise)
    place = len(fns) if detach_query else 0
    fns.insert(place, Query(0.0, field))
    if noises is not None:
        noises.insert(place, None)
    return tuple(fns), None if noises is None else tuple(noises)
