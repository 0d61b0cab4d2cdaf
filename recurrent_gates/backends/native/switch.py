"""One operation in two forms, of which the lowering takes one: native on one CPU device, or in JAX.

Where a program is traced it is not known on how many devices it will run, under which
transformation, or whether it is to be exported. Where it is lowered, it is.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


class Operation(Protocol):
    """Hashable and static: both forms take the same arrays and make the same ones."""

    def native(self, *arrays: jax.Array) -> list[jax.Array]:
        """By kernels, which see all of a batch and exist on this machine alone."""

    def portable(self, *arrays: jax.Array) -> list[jax.Array]:
        """In JAX: under ``vmap``, for other devices, over several of them, and to be exported."""


def run(operation: Operation, *arrays: jax.Array) -> list[jax.Array]:
    """What an operation makes of arrays."""
    return _switch.bind(*arrays, operation=operation)


_switch = Primitive("recurrent_gates_native")
_switch.multiple_results = True


@functools.partial(jax.jit, static_argnums=0)
def _compiled(operation: Operation, *arrays: jax.Array) -> list[jax.Array]:
    return run(operation, *arrays)


@_switch.def_impl
def _run_now(*arrays: jax.Array, operation: Operation) -> list[jax.Array]:
    with jax.disable_jit(False):  # else this would call itself
        return _compiled(operation, *arrays)


@_switch.def_abstract_eval
def _shapes(*arrays: Any, operation: Operation) -> list[Any]:
    # The native form is traced in a tenth of the time, but its results' types know of no mesh.
    meshes = jax.sharding.get_abstract_mesh(), *(array.sharding.mesh for array in arrays)
    on_mesh = not all(mesh.empty for mesh in meshes)
    form = operation.portable if on_mesh else operation.native
    return list(jax.make_jaxpr(form)(*arrays).out_avals)


def _batched(
    arrays: tuple[jax.Array, ...], axes: tuple[int | None, ...], *, operation: Operation
) -> tuple[list[jax.Array], list[int]]:
    outputs = jax.vmap(operation.portable, in_axes=axes)(*arrays)
    return outputs, [0] * len(outputs)


batching.primitive_batchers[_switch] = _batched


def _derivative(
    arrays: tuple[jax.Array, ...], tangents: tuple[Any, ...], *, operation: Operation
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Of an operation in a backward pass, for derivatives of second order."""
    outputs: tuple[list[jax.Array], list[jax.Array]] = jax.jvp(
        operation.portable, arrays, tuple(map(ad.instantiate_zeros, tangents))
    )
    return outputs


ad.primitive_jvps[_switch] = _derivative


def _lowered(context: Any, *arrays: Any, operation: Operation) -> Any:
    form = operation.native if _is_for_one_device(context) else operation.portable
    return mlir.lower_fun(form, multiple_results=True)(context, *arrays)


def _lowered_in_jax(context: Any, *arrays: Any, operation: Operation) -> Any:
    return mlir.lower_fun(operation.portable, multiple_results=True)(context, *arrays)


mlir.register_lowering(_switch, _lowered_in_jax)
mlir.register_lowering(_switch, _lowered, platform="cpu")


def _is_for_one_device(context: Any) -> bool:
    """Whether each device runs this by itself, here: alone, or in a shard_map over all axes."""
    module = context.module_context
    if module.lowering_parameters.for_export:
        return False
    axes = module.axis_context
    if hasattr(axes, "num_devices"):
        return axes.num_devices == 1
    return set(axes.manual_axes) == set(axes.mesh.axis_names)
