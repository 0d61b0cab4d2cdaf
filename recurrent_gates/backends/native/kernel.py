"""What kernels have in common: calls, threads, masks, and the cotangents of the inputs."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from recurrent_gates import target
from recurrent_gates.backends.native import library, switch
from recurrent_gates.base import Cell
from recurrent_gates.carry import (
    CarryFn,
    Damp,
    get_field,
    scale_gradient,
    set_field,
)
from recurrent_gates.declared import Carry, Params
from recurrent_gates.scan import Loop, Settings, Stream


class Masks(NamedTuple):
    """Which steps of a loop keep the carry, and which first take another.

    Attributes:
      valid: bool ``[T, B]``, or None for all.
      resets: bool ``[T, B]``, or None for none.
      reset_carry: the carry that a reset takes; None where there are no resets.
    """

    valid: jax.Array | None
    resets: jax.Array | None
    reset_carry: Carry | None

    @classmethod
    def of(cls, loop: Loop) -> Masks:
        resets = loop.stream.resets
        return cls(loop.stream.valid, resets, None if resets is None else loop.reset_carry)

    @property
    def kind(self) -> int:
        """0: none; 1: flags by row; 2: flags and the carry of resets."""
        return 2 if self.resets is not None else int(self.valid is not None)

    @property
    def flags(self) -> list[jax.Array]:
        """By row 1 where it is not valid, plus 2 where it is reset; none for none."""
        flags = []
        if self.valid is not None:
            flags.append(1 - self.valid.astype(jnp.int32))
        if self.resets is not None:
            flags.append(2 * self.resets.astype(jnp.int32))
        return [functools.reduce(jnp.add, flags)] if flags else []

    def stream(self, noise: tuple[jax.Array, ...] = ()) -> Stream:
        """For the portable form."""
        return Stream(self.valid, self.resets, noise)


NO_MASKS = Masks(None, None, None)


@dataclasses.dataclass(frozen=True)
class Kernel(abc.ABC):
    """A kernel of a cell; what all have in common.

    Attributes:
      cell: the cell.
      tree: the structure of the arrays that it reads, flattened.
      reverse: whether time runs backwards.
      threads: of each device.
    """

    cell: Cell
    tree: Any
    reverse: bool
    threads: int

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Of the cell's kernels in ``library.KERNELS``."""

    @property
    @abc.abstractmethod
    def field(self) -> str:
        """Of the carry, what feeds back."""

    def _call(
        self,
        function: str,
        shapes: Sequence[tuple[int, ...]],
        operands: Sequence[jax.Array],
        aliases: dict[int, int] | None = None,
        **attributes: int,
    ) -> Sequence[jax.Array]:
        """Runs a kernel."""
        numbers = {"reverse": self.reverse, "threads": self.threads, **attributes}
        return call(self.name, function, shapes, operands, aliases, **numbers)

    def _loop(
        self,
        params: Any,
        xs: Any,
        carry: Carry,
        scale: jax.Array | None,
        masks: Masks = NO_MASKS,
    ) -> Loop:
        """The loop in JAX, for the portable form.

        Args:
          params, xs, carry, masks: its arrays.
          scale: of ``gradient_scale``.
        """
        settings = Settings(self.cell, batch_dims=1, reverse=self.reverse)
        reset_carry = carry if masks.reset_carry is None else masks.reset_carry
        fns, noise = ((), ()) if scale is None else ((Scale(0.0, field=self.field),), (scale,))
        return Loop(settings, params, xs, carry, reset_carry, fns, masks.stream(noise))


@dataclasses.dataclass(frozen=True)
class InputCotangents(Kernel):
    """(cotangents of the pre-activations, kernels by slot) -> those of xs."""

    @classmethod
    def of(cls, cell: Cell, d_pre: jax.Array, kernels: Sequence[jax.Array]) -> jax.Array:
        leaves, tree = jax.tree.flatten((d_pre, [*kernels]))
        # Each step's stand alone, so that time has no direction.
        return switch.run(cls(cell, tree, False, threads()), *leaves)[0]

    def native(self, *leaves: jax.Array) -> list[jax.Array]:
        d_pre, kernels = jax.tree.unflatten(self.tree, leaves)
        shape = (*d_pre.shape[:2], len(kernels[0]))
        return [*self._call("inputs", [shape], [d_pre, *kernels])]

    def portable(self, *leaves: jax.Array) -> list[jax.Array]:
        d_pre, kernels = jax.tree.unflatten(self.tree, leaves)
        return [d_pre @ jnp.concatenate(kernels, axis=-1).T]


def call(
    name: str,
    function: str,
    shapes: Sequence[tuple[int, ...]],
    operands: Sequence[jax.Array],
    aliases: dict[int, int] | None = None,
    **attributes: int,
) -> Sequence[jax.Array]:
    """Runs a function of a library.

    Args:
      name: of the library, in ``library.KERNELS``.
      function: its name.
      shapes: of what it makes, in float32.
      operands: what it reads.
      aliases: which operand's memory a result takes, by their places.
      attributes: what else it reads, by name.
    """
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    kernel = jax.ffi.ffi_call(library.target(name, function), results, input_output_aliases=aliases)
    return kernel(*operands, **{name: np.int64(n) for name, n in attributes.items()})


def loop_of_cotangents(
    loop: Loop, params: Params, xs: jax.Array, carry: Carry, reset_carry: Carry | None = None
) -> tuple[Loop]:
    """What the backward rule of a function of a loop returns; no reset carry stands for zeros."""
    if reset_carry is None:
        reset_carry = jax.tree.map(jnp.zeros_like, loop.reset_carry)
    d = loop.replace(params=params, xs=xs, carry=carry, reset_carry=reset_carry)
    return (d.replace(carry_fns=None, stream=None),)


def threads() -> int:
    """How many cores a device may use: all, unless others do the same at the same time."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.are_all_axes_manual:  # of a shard_map
        return max(1, target.cores() // min(mesh.size, jax.local_device_count()))
    return target.cores()


def gradient_scale(loop: Loop) -> jax.Array | None:
    """What the gradient of what feeds back is multiplied by before each step, ``[T]``.

    None where there are no carry functions: then by nothing.
    """
    if not loop.carry_fns:
        return None
    scale = jnp.ones((loop.steps,), jnp.float32)
    for fn, noise in zip(loop.carry_fns, loop.stream.noise, strict=True):
        if type(fn) is Damp:
            scale = scale * (1 - jnp.asarray(fn.p, jnp.float32))
        elif noise is not None:
            scale = jnp.where(noise.astype(bool), 0.0, scale)
    return jax.lax.stop_gradient(scale)


@struct.dataclass
class Scale(CarryFn):
    """The gradient of a field times a number that each step is given as noise."""

    def before(self, noise_t: jax.Array, carry: Carry) -> Carry:
        return set_field(carry, self.field, scale_gradient(get_field(carry, self.field), noise_t))


def scaled_steps(values: jax.Array, scale: jax.Array | None) -> jax.Array:
    """What steps read of a field, ``[T, B, F]``, with the gradient that ``Scale`` leaves of it."""
    return values if scale is None else scale_gradient(values, scale[:, None, None])
