"""The devices of all processes, and who has which rows of a batch.

The batch is split over the devices; every device holds all parameters. A function that all of
them run is one ``shard_map``; gradients are added by hand, once a step, outside the time loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding, PartitionSpec

from experiments.settings.errors import UserError
from recurrent_gates import target

AXIS = "batch"


@dataclasses.dataclass(frozen=True)
class Rows:
    """Some neighbouring rows of a batch, such as those of one device.

    Attributes:
      first: the first one's number.
      count: how many.
      total: how many rows the batch has.
    """

    first: Any
    count: int
    total: int

    @property
    def numbers(self) -> jax.Array:
        """The numbers of the rows, int32 ``[count]``: what is drawn by them is the same on any
        number of devices."""
        return jnp.asarray(self.first, jnp.int32) + jnp.arange(self.count, dtype=jnp.int32)

    def of(self, tree: Any, axes: Any) -> Any:
        """These rows of a tree that has all of them.

        Args:
          tree: arrays.
          axes: the batch axis of each leaf, or a prefix; None: the leaf stays whole.
        """
        if self.count == self.total:
            return tree

        def rows(axis: int | None, leaf: jax.Array) -> jax.Array:
            if axis is None:
                return leaf
            return jax.lax.dynamic_slice_in_dim(leaf, self.first, self.count, axis=axis)

        return map_axes(rows, axes, tree)


def map_axes(function: Callable[..., Any], axes: Any, *trees: Any) -> Any:
    """``function(axis, *leaves)`` over trees whose axes are given by a prefix."""

    def none(x: Any) -> bool:
        return x is None

    leaves, structure = jax.tree.flatten(trees[0], is_leaf=none)
    spread = jax.tree.leaves(jax.tree.broadcast(axes, trees[0], is_leaf=none), is_leaf=none)
    others = [jax.tree.leaves(tree, is_leaf=none) for tree in trees[1:]]
    values = [
        None if leaf is None else function(axis, leaf, *more)
        for axis, leaf, *more in zip(spread, leaves, *others, strict=True)
    ]
    return jax.tree.unflatten(structure, values)


def later(axes: Any) -> Any:
    """The axes of trees that have one more leading axis."""
    return jax.tree.map(
        lambda axis: None if axis is None else axis + 1, axes, is_leaf=lambda axis: axis is None
    )


def probed_axes(shapes: Callable[[int], Any], size: int) -> Any:
    """The batch axes of trees that the library makes: those whose length follows the batch's.

    Args:
      shapes: the tree's shapes for a number of rows.
      size: that number.
    """

    def axis(one: Any, other: Any) -> int | None:
        differing = [
            i for i, (a, b) in enumerate(zip(one.shape, other.shape, strict=True)) if a != b
        ]
        return differing[0] if differing else None

    return jax.tree.map(axis, shapes(size), shapes(size + 1))


def check_axes(what: str, tree: Any, axes: Any, rows: int) -> None:
    """Raises ``ValueError`` where a declared batch axis has another length than the batch."""

    def check(axis: int | None, leaf: Any) -> None:
        if axis is not None and (len(leaf.shape) <= axis or leaf.shape[axis] != rows):
            raise ValueError(
                f"{what} say that axis {axis} is the batch of {rows} rows, but a leaf has the "
                f"shape {leaf.shape}."
            )

    map_axes(check, axes, tree)


class DeviceMesh:
    """The devices that share a batch: as many as divide it.

    Args:
      batch_size: rows of the whole batch, over all processes.

    Raises:
      UserError: if there are several processes and not all of their devices can have rows.
    """

    def __init__(self, batch_size: int) -> None:
        devices = target.devices()
        size = max(n for n in range(1, len(devices) + 1) if batch_size % n == 0)
        if jax.process_count() > 1 and size != len(devices):
            raise UserError(
                f"--batch_size={batch_size} must be a multiple of the {len(devices)} devices of "
                f"the {jax.process_count()} processes."
            )
        self._mesh = jax.sharding.Mesh(np.array(devices[:size]), (AXIS,))
        self._gather = jax.jit(_same, out_shardings=NamedSharding(self._mesh, PartitionSpec()))
        self.size = size

    @property
    def platform(self) -> str:
        """``"cpu"``, ``"gpu"`` or ``"tpu"``."""
        return self._mesh.devices.flat[0].platform

    # Inside a function that all devices run.

    def rows(self, total: int) -> Rows:
        """This device's rows; all of them where they cannot be split evenly."""
        if total % self.size:
            return Rows(0, total, total)
        share = total // self.size
        return Rows(jax.lax.axis_index(AXIS) * share, share, total)

    def mean(self, tree: Any) -> Any:
        """The mean over devices."""
        return self._at_once(jax.lax.pmean, tree)

    def sum(self, tree: Any) -> Any:
        """The sum over devices."""
        return self._at_once(jax.lax.psum, tree)

    def _at_once(self, reduce: Callable[[Any, str], Any], tree: Any) -> Any:
        """A tree reduced over devices; between processes that is one message, not one a leaf."""
        if self.size == 1:
            return tree  # XLA would copy all of it
        if jax.process_count() == 1:
            return reduce(tree, AXIS)
        flat, unravel = ravel_pytree(tree)
        return unravel(reduce(flat, AXIS))

    # Outside.

    def everywhere(
        self, function: Callable[..., Any], in_axes: Any = None, out_axes: Any = None
    ) -> Callable[..., Any]:
        """The function run by every device.

        Args:
          function: of arrays.
          in_axes: of each argument the batch axis of its leaves, None for a tree that every
            device has whole; one entry for each argument.
          out_axes: the same of the value.
        """
        return jax.shard_map(
            function,
            mesh=self._mesh,
            in_specs=self._specs(in_axes),
            out_specs=self._specs(out_axes),
            check_vma=False,
        )

    def place(self, tree: Any, axes: Any = None) -> Any:
        """A tree that the host has, split along its batch axes, on the devices of all processes."""

        def put(axis: int | None, leaf: Any) -> jax.Array:
            sharding = NamedSharding(self._mesh, _spec(axis))
            if jax.process_count() == 1:
                return jax.device_put(leaf, sharding)
            if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
                return leaf  # it is on the devices of all processes already
            whole = np.asarray(leaf)
            return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

        return map_axes(put, axes, tree)

    def placed_shapes(self, tree: Any, axes: Any = None) -> Any:
        """The shapes of what ``place`` makes of a tree."""

        def placed(axis: int | None, leaf: Any) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(self._mesh, _spec(axis))
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return map_axes(placed, axes, jax.eval_shape(_same, tree))

    def place_own(self, tree: Any, axes: Any) -> Any:
        """A tree of which each process has its own rows, on the devices."""

        def put(axis: int | None, leaf: np.ndarray) -> jax.Array:
            return jax.make_array_from_process_local_data(
                NamedSharding(self._mesh, _spec(axis)), leaf
            )

        return map_axes(put, axes, tree)

    def own_rows(self, total: int) -> np.ndarray:
        """The numbers of the rows that this process reads."""
        if total % self.size:
            return np.arange(total)
        share = total // self.size
        mine = [
            place
            for place, device in enumerate(self._mesh.devices.flat)
            if device.process_index == jax.process_index()
        ]
        return np.concatenate([np.arange(place * share, (place + 1) * share) for place in mine])

    def fetch(self, tree: Any) -> Any:
        """A tree of the devices as NumPy arrays, whole, on every process; all of them call this."""
        if jax.process_count() == 1:
            return jax.device_get(tree)

        def whole(leaf: jax.Array) -> np.ndarray:
            if not leaf.is_fully_replicated:
                leaf = self._gather(leaf)
            return np.asarray(leaf.addressable_data(0))

        return jax.tree.map(whole, tree)

    def _specs(self, axes: Any) -> Any:
        return jax.tree.map(_spec, axes, is_leaf=lambda axis: axis is None)


def _same(tree: Any) -> Any:
    return tree


def _spec(axis: int | None) -> PartitionSpec:
    return PartitionSpec() if axis is None else PartitionSpec(*(None,) * axis, AXIS)
