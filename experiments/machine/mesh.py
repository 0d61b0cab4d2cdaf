"""The devices of all processes, and who has which part of what is split over them.

They stand along three axes: ``data`` splits the rows of a batch, ``lanes`` the seeds and rates,
``vocab`` the tables of a softmax over words; of everything else each device has all. A function
that all of them run is one ``shard_map``; gradients are added by hand, once a step, outside the
time loop.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding, PartitionSpec

from experiments.settings.axes import AXES, DATA, LANES, VOCAB
from experiments.settings.errors import UserError
from recurrent_gates import target

WHOLE = PartitionSpec()
"""The spec of what every device has whole."""


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

    def is_none(x: Any) -> bool:
        return x is None

    leaves, structure = jax.tree.flatten(trees[0], is_leaf=is_none)
    leaf_axes = jax.tree.leaves(
        jax.tree.broadcast(axes, trees[0], is_leaf=is_none), is_leaf=is_none
    )
    leaf_lists = [jax.tree.leaves(tree, is_leaf=is_none) for tree in trees[1:]]
    values = [
        None if leaf is None else function(axis, leaf, *further_leaves)
        for axis, leaf, *further_leaves in zip(leaf_axes, leaves, *leaf_lists, strict=True)
    ]
    return jax.tree.unflatten(structure, values)


def later(axes: Any) -> Any:
    """The axes of trees that have one more leading axis."""
    return jax.tree.map(
        lambda axis: None if axis is None else axis + 1, axes, is_leaf=lambda axis: axis is None
    )


def split(axes: Any, over: str = DATA) -> Any:
    """The specs of trees that are split along an axis of each leaf.

    Args:
      axes: a tree of these axes, or a prefix of one; None: the leaf stays whole.
      over: the axis of devices.
    """

    def spec(axis: int | None) -> PartitionSpec:
        return PartitionSpec() if axis is None else PartitionSpec(*(None,) * axis, over)

    return jax.tree.map(spec, axes, is_leaf=lambda axis: axis is None)


def differing_axis(first: Any, second: Any) -> int | None:
    """The first axis along which two arrays or shapes have other lengths; None: none."""
    lengths = zip(first.shape, second.shape, strict=True)
    return next((axis for axis, (a, b) in enumerate(lengths) if a != b), None)


def probed_axes(shapes: Callable[[int], Any], size: int) -> Any:
    """The axes of trees whose length follows a number, such as that of the rows of a batch.

    Args:
      shapes: the tree's shapes for a number.
      size: that number.
    """
    return jax.tree.map(differing_axis, shapes(size), shapes(size + 1))


def check_axes(subject: str, tree: Any, axes: Any, rows: int) -> None:
    """Raises ``ValueError`` where a declared batch axis has another length than the batch."""

    def check(axis: int | None, leaf: Any) -> None:
        if axis is not None and (len(leaf.shape) <= axis or leaf.shape[axis] != rows):
            raise ValueError(
                f"{subject} say that axis {axis} is the batch of {rows} rows, but a leaf has the "
                f"shape {leaf.shape}."
            )

    map_axes(check, axes, tree)


class DeviceMesh:
    """The devices of a run.

    Args:
      batch_size: rows of the whole batch, over all processes.
      sizes: how many devices there are along each of ``AXES``; None: along ``data`` as many as
        divide the batch.

    Attributes:
      size: how many devices share a batch.
      lanes: how many share the lanes.
      parts: how many share the words.

    Raises:
      UserError: if there are fewer devices, or several processes of which not all devices would
        have something.
    """

    def __init__(self, batch_size: int, sizes: Mapping[str, int] | None = None) -> None:
        devices = target.devices()
        if sizes is None:
            size = max(n for n in range(1, len(devices) + 1) if batch_size % n == 0)
            self._check_all(size, f"--batch_size={batch_size} must be a multiple of")
            sizes = {LANES: 1, DATA: size, VOCAB: 1}
        count = math.prod(sizes.values())
        text = ",".join(f"{axis}:{sizes[axis]}" for axis in AXES if sizes[axis] > 1)
        if count > len(devices):
            hint = f"XLA_FLAGS=--xla_force_host_platform_device_count={count} makes so many."
            raise UserError(
                f"--mesh={text} needs {count} devices, and there are {len(devices)}"
                + (f"; on a CPU {hint}" if devices[0].platform == "cpu" else ".")
            )
        self._check_all(count, f"--mesh={text or 'data:1'} must use all of")
        self.size, self.lanes, self.parts = sizes[DATA], sizes[LANES], sizes[VOCAB]
        shape = [sizes[axis] for axis in AXES]
        self._mesh = jax.sharding.Mesh(np.array(devices[:count]).reshape(shape), AXES)
        self._gather = jax.jit(_same, out_shardings=NamedSharding(self._mesh, PartitionSpec()))

    def _check_all(self, count: int, requirement: str) -> None:
        devices, processes = len(jax.devices()), jax.process_count()
        if processes > 1 and count != devices:
            raise UserError(f"{requirement} the {devices} devices of the {processes} processes.")

    @property
    def platform(self) -> str:
        """``"cpu"``, ``"gpu"`` or ``"tpu"``."""
        return self._mesh.devices.flat[0].platform

    @property
    def own_devices(self) -> int:
        """How many of the devices are this process's."""
        return sum(
            device.process_index == jax.process_index() for device in self._mesh.devices.flat
        )

    # Inside a function that all devices run.

    def rows(self, total: int) -> Rows:
        """This device's rows; all of them where they cannot be split evenly."""
        if total % self.size:
            return Rows(0, total, total)
        share = total // self.size
        return Rows(jax.lax.axis_index(DATA) * share, share, total)

    def mean(self, tree: Any) -> Any:
        """The mean over the devices that share the batch."""
        return self._at_once(jax.lax.pmean, tree)

    def sum(self, tree: Any) -> Any:
        """The sum over them."""
        return self._at_once(jax.lax.psum, tree)

    def sum_of_parts(self, x: Any) -> Any:
        """The sum over the devices that share the words."""
        return x if self.parts == 1 else jax.lax.psum(x, VOCAB)

    def _at_once(self, reduce: Callable[[Any, str], Any], tree: Any) -> Any:
        """A tree reduced over devices; between processes that is one message, not one a leaf."""
        if self.size == 1:
            return tree  # XLA would copy all of it
        if jax.process_count() == 1:
            return reduce(tree, DATA)
        flat, unravel = ravel_pytree(tree)
        return unravel(reduce(flat, DATA))

    # Outside.

    def everywhere(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        """The function run by every device.

        Args:
          function: of arrays.
          in_specs: of each argument how its leaves are split, see ``split``; one entry for each.
          out_specs: the same of the value.
        """
        return jax.shard_map(
            function, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def place(self, tree: Any, specs: Any = WHOLE) -> Any:
        """A tree that the host has, split as its specs say, on the devices of all processes."""

        def put(spec: PartitionSpec, leaf: Any) -> jax.Array:
            sharding = NamedSharding(self._mesh, spec)
            if jax.process_count() == 1:
                return jax.device_put(leaf, sharding)
            if isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
                return leaf  # it is on the devices of all processes already
            array = np.asarray(leaf)
            return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

        return map_axes(put, specs, tree)

    def placed_shapes(self, tree: Any, specs: Any = WHOLE) -> Any:
        """The shapes of what ``place`` makes of a tree."""

        def shape(spec: PartitionSpec, leaf: Any) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(self._mesh, spec)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return map_axes(shape, specs, jax.eval_shape(_same, tree))

    def place_own(self, tree: Any, specs: Any, totals: Mapping[str, int]) -> Any:
        """A tree of which each process has what ``own`` says, on the devices.

        Args:
          tree: arrays.
          specs: how the whole is split.
          totals: the whole's length along each axis that splits it.
        """

        def put(spec: PartitionSpec, leaf: np.ndarray) -> jax.Array:
            names = {i: str(name) for i, name in enumerate(spec) if name is not None}
            shape = tuple(
                totals[names[i]] if i in names else length for i, length in enumerate(leaf.shape)
            )
            own_numbers = {i: self.own(name, totals[name]) for i, name in names.items()}

            def block(index: Any) -> np.ndarray:
                places = [slice(*span.indices(n)) for span, n in zip(index, shape, strict=True)]
                for i, numbers in own_numbers.items():
                    first = int(np.searchsorted(numbers, places[i].start))
                    places[i] = slice(first, first + places[i].stop - places[i].start)
                return leaf[tuple(places)]

            return jax.make_array_from_callback(shape, NamedSharding(self._mesh, spec), block)

        return map_axes(put, specs, tree)

    def own(self, axis: str, total: int) -> np.ndarray:
        """The numbers of what this process's devices have of so much that an axis splits."""
        size = self._mesh.shape[axis]
        if total % size:
            return np.arange(total)
        share = total // size
        own_places = {
            place[AXES.index(axis)]
            for place, device in np.ndenumerate(self._mesh.devices)
            if device.process_index == jax.process_index()
        }
        return np.concatenate(
            [np.arange(place * share, (place + 1) * share) for place in sorted(own_places)]
        )

    def fetch(self, tree: Any) -> Any:
        """A tree of the devices as NumPy arrays, whole, on every process; all of them call this."""
        if jax.process_count() == 1:
            return jax.device_get(tree)

        def full_array(leaf: jax.Array) -> np.ndarray:
            if not leaf.is_fully_replicated:
                leaf = self._gather(leaf)
            return np.asarray(leaf.addressable_data(0))

        return jax.tree.map(full_array, tree)


def _same(tree: Any) -> Any:
    return tree
