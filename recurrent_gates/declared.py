"""What a cell may declare of its step for the sake of speed: its products, its sums.

A step that is declared is cut where a faster backend wants it cut. ``Products`` are the matrix
products of what feeds back, apart from the update made of them: their inputs and cotangents can be
collected, and the weights' gradients formed outside the loop. ``Sums`` are fields that never feed
back: they can leave the loop altogether.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from recurrent_gates import target
from recurrent_gates.shapes import lead

Params = Mapping[str, Any]
Carry = Any
Slots = Mapping[str, jax.Array]
Product = Callable[[str, jax.Array], jax.Array]

RULES = ("add", "replace", "zero")


def _itself(z: Any) -> Any:
    return z


def _no_biases(params: Params) -> Slots:
    del params
    return {}


@dataclasses.dataclass(frozen=True)
class Products:
    """The recurrent products of a step by name (slot), and the update made of them.

    ``update`` is handed ``product(slot, x)`` = U x + b + z: U is the slot's weight, b its bias and
    z the input of that name, where there are such. Each slot is asked for at most once. An input
    of another name is for ``update`` to read by itself.

    Attributes:
      weights: params -> {slot: U}. A matrix ``[F, width]`` is multiplied by; so is, head by head,
        a block-diagonal one, given as its N blocks ``[N, F/N, width/N]``; a vector ``[width]``
        multiplies unit by unit, x ``[..., F]`` being repeated where width is a multiple of F.
      update: (carry, inputs, product) -> the next carry; it reads no parameters but through
        ``product``, and leaves summed fields as they are.
      inputs: z -> {name: array ``[..., width]``}, what the loop reads of the projection; default:
        z itself.
      biases: params -> {slot: ``[width]``}, biases that belong to the products, not to z.
    """

    weights: Callable[[Params], Slots]
    update: Callable[[Carry, Slots, Product], Carry]
    inputs: Callable[[Any], Slots] = _itself
    biases: Callable[[Params], Slots] = _no_biases


@dataclasses.dataclass(frozen=True)
class Sums:
    """Fields of the carry that never feed back, and what is added to them.

    Attributes:
      fields: their names; the carry is a NamedTuple.
      increment: (params, carry_tm1, z) -> {field: array}, pointwise in time; it reads no summed
        field.
      recur: (params, carry, z_t) -> the carry with the other fields one step on and the summed
        ones as they are; it reads no summed field. None: it is made of the cell's ``products``.
      rule: ``"add"``: the increment is added; ``"replace"``: it is the new value; ``"zero"``: the
        new value is zero.
      bound: (field, total) -> the total brought back into its range, a period for one, so that
        bound(bound(a) + b) is bound(a + b); None: as it is.

    Raises:
      ValueError: if the rule is none of the three.
    """

    fields: tuple[str, ...]
    increment: Callable[[Params, Carry, Any], Slots]
    recur: Callable[[Params, Carry, Any], Carry] | None = None
    rule: str = "add"
    bound: Callable[[str, jax.Array], jax.Array] | None = None

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"The rule of Sums is {', '.join(RULES)}, not {self.rule!r}.")

    def bounded(self, carry: Carry) -> Carry:
        """A carry whose summed fields are brought back into their range."""
        if self.bound is None:
            return carry
        totals = {field: self.bound(field, getattr(carry, field)) for field in self.fields}
        return carry._replace(**totals)

    def add(self, carry: Carry, added: Slots) -> Carry:
        """The summed fields one step on, by their increments; the others as they are."""
        old = {field: getattr(carry, field) for field in self.fields}
        if self.rule == "zero":
            return carry._replace(**jax.tree.map(jnp.zeros_like, old))
        if self.rule == "replace":
            return self.bounded(carry._replace(**{field: added[field] for field in old}))
        return self.bounded(carry._replace(**{f: value + added[f] for f, value in old.items()}))


def outdated(cell: Any, *names: str) -> str | None:
    """Why what a cell declares under these names is not of its step, in one sentence; None: it is.

    What a class declares describes its own step, and no other that a subclass defines.
    """
    for name in names:
        if getattr(cell, name) and (owners := redefined(cell, "step", name)):
            return (
                f"{owners[0].__name__} defines a step of its own and inherits the {name} of "
                f"{owners[1].__name__}: define {name} as well."
            )
    return None


def redefined(value: Any, method: str, name: str) -> tuple[type, type] | None:
    """The class of a method and the class of a name, if Python looks in the first one first.

    That is a subclass of the second, or a mixin before it.
    """
    classes = type(value).__mro__
    first, second = (
        next(i for i, cls in enumerate(classes) if attribute in vars(cls))
        for attribute in (method, name)
    )
    return (classes[first], classes[second]) if first < second else None


def summed_fields(cell: Any) -> tuple[str, ...]:
    """The fields of a cell's carry that never feed back."""
    return () if cell.sums is None or outdated(cell, "sums") else cell.sums.fields


# ---------------------------------------------------------------------------------------
# Products of weights by slot
# ---------------------------------------------------------------------------------------


class Weights(NamedTuple):
    """The weights of recurrent products: matrices and vectors by slot, and biases.

    A matrix is ``[F, width]`` or the blocks of a block-diagonal one, ``[N, F/N, width/N]``.
    """

    matrices: Slots
    vectors: Slots
    biases: Slots


def recurrent_weights(products: Products, params: Params) -> Weights:
    """The declared weights by their kind.

    Raises:
      ValueError: if one is neither a matrix nor its blocks nor a vector.
    """
    weights = products.weights(params)
    for slot, weight in weights.items():
        if weight.ndim not in (1, 2, 3):
            raise ValueError(
                "A recurrent weight is a matrix [F, width], its blocks [N, F/N, width/N] or a "
                f"vector [width]; {slot!r} has shape {weight.shape}."
            )
    return Weights(
        {slot: weight for slot, weight in weights.items() if weight.ndim > 1},
        {slot: weight for slot, weight in weights.items() if weight.ndim == 1},
        dict(products.biases(params)),
    )


def product_of(weights: Weights, slot: str, x: jax.Array, dtype: Any) -> jax.Array:
    """A slot's recurrent product, its own bias included, without the input's part.

    Args:
      weights: of all slots; vectors and biases may be ``[1, width]``.
      slot: which of them.
      x: what it reads, ``[..., F]``.
      dtype: that a matrix and x are multiplied in; a vector has the dtype of x.

    Returns:
      ``[..., width]``, float32 at least where x is.
    """
    if slot in weights.matrices:
        return with_bias(weights, slot, matrix_product(x, weights.matrices[slot], dtype))
    return with_bias(weights, slot, unit_product(x, weights.vectors[slot]))


def with_bias(weights: Weights, slot: str, out: jax.Array) -> jax.Array:
    """A product with the slot's own bias, where it has one."""
    if slot in weights.biases:
        out = out + lead(weights.biases[slot].astype(out.dtype), out)
    return out


def matrix_product(x: jax.Array, kernel: jax.Array, dtype: Any) -> jax.Array:
    """x times a kernel in ``dtype``, summed in float32 at least; head by head with its blocks."""
    x, kernel, sums = x.astype(dtype), kernel.astype(dtype), state_dtype(dtype)
    if kernel.ndim == 2:
        return jnp.matmul(x, kernel, preferred_element_type=sums)
    if x.shape[-1] != kernel.shape[0] * kernel.shape[1]:
        raise ValueError(
            f"Blocks of shape {kernel.shape} multiply {kernel.shape[0] * kernel.shape[1]} "
            f"features, got {x.shape[-1]}."
        )
    heads = x.reshape(*x.shape[:-1], *kernel.shape[:2])
    product = _compiled_block_product if target.platform() == "cpu" else _block_product
    out = product(heads, kernel, sums)
    return out.reshape(*x.shape[:-1], kernel.shape[0] * kernel.shape[2])


def _block_product(heads: jax.Array, kernel: jax.Array, sums: Any) -> jax.Array:
    return jnp.einsum("...nf,nfw->...nw", heads, kernel, preferred_element_type=sums)


# By itself, outside of a program, XLA's CPU backend has no such product of narrow numbers.
_compiled_block_product = jax.jit(_block_product, static_argnums=2)


def unit_product(x: jax.Array, vector: jax.Array) -> jax.Array:
    """A vector times x unit by unit, x being repeated to the vector's width."""
    vector = vector.astype(x.dtype)
    repeats = vector.shape[-1] // x.shape[-1]
    if repeats > 1:
        wide = jnp.broadcast_to(x[..., None, :], (*x.shape[:-1], repeats, x.shape[-1]))
        x = wide.reshape(*x.shape[:-1], vector.shape[-1])
    return lead(vector, x) * x


def state_dtype(dtype: Any) -> Any:
    """The dtype of carries beside parameters or products of ``dtype``: float32 at least."""
    return jnp.dtype(dtype) if jnp.dtype(dtype).itemsize > 4 else jnp.dtype(jnp.float32)


def inputs_dtype(inputs: Slots) -> Any:
    """The dtype of matrix products: the widest floating-point one of a loop's inputs.

    It does not depend on their order, which a transformation sorts; integers do not count, which
    ``update`` reads by themselves.
    """
    dtypes = [value.dtype for value in inputs.values() if is_inexact(value)]
    return max(dtypes, key=_width, default=jnp.dtype(jnp.float32))


def is_inexact(value: Any) -> bool:
    """Whether an array holds floating-point or complex numbers, which have gradients."""
    return jnp.issubdtype(value.dtype, jnp.inexact)


def _width(dtype: Any) -> tuple[bool, int, str]:
    return jnp.issubdtype(dtype, jnp.complexfloating), dtype.itemsize, dtype.name


def pre_activations(
    product: Callable[[str, jax.Array, Any], jax.Array],
    inputs: Slots,
    separate: Sequence[str] = (),
) -> Product:
    """Joins products and inputs: (slot, x) -> product(slot, x, dtype) + inputs[slot].

    The inputs of ``separate`` slots stay apart.
    """
    dtype = inputs_dtype(inputs)

    def joined(slot: str, x: jax.Array) -> jax.Array:
        out = product(slot, x, dtype)
        if slot in inputs and slot not in separate:
            out = out + inputs[slot].astype(out.dtype)
        return out

    return joined
