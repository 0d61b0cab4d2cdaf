"""What may happen to a carry around a step: detach, damp, zone out.

A carry function is a frozen pytree with its probability as an array leaf (so it can be
vmapped and changed without recompiling) and its field as a static name. It acts in two
places: ``before`` changes what the step reads, ``after`` what is kept and emitted. A cell
knows none of them, so they combine with every cell. Randomness comes from ``draw``, by
absolute time, so that backends, unrolling, rematerialisation and direction cannot change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from recurrent_gates import checks
from recurrent_gates.shapes import expand

_THREEFRY = "threefry2x32"

Carry = Any
Noise = Any
C = TypeVar("C")


def get_field(carry: Carry, field: str | int | None) -> jax.Array:
    """A field of a carry: by name (NamedTuple), by index (tuple) or None (bare array).

    Raises:
      ValueError: if the carry is none of these, or has no such field; the sentence lists those it
        has.
    """
    if not isinstance(carry, tuple) and not checks.is_array(carry):
        raise ValueError(
            "Carry functions are for a NamedTuple, a tuple or one array, got "
            f"{checks.described(carry)}."
        )
    if field is None:
        if isinstance(carry, tuple):
            raise ValueError(f"field=None is for a carry that is one array, got {_fields(carry)}.")
        return carry
    if isinstance(field, int):
        if not isinstance(carry, tuple) or not -len(carry) <= field < len(carry):
            raise ValueError(f"The carry has no field {field}; it has {_fields(carry)}.")
        return carry[field]
    if field not in getattr(carry, "_fields", ()):
        raise ValueError(f"The carry has no field {field!r}; it has {_fields(carry)}.")
    return getattr(carry, field)


def set_field(carry: C, field: str | int | None, value: jax.Array) -> C:
    """A copy of the carry with one field replaced; fields as in ``get_field``."""
    if field is None:
        return value  # type: ignore[return-value]
    if isinstance(field, int):
        values = list(carry)  # type: ignore[call-overload]
        values[field] = value
        by_name = hasattr(carry, "_fields")
        return type(carry)(*values) if by_name else type(carry)(values)  # type: ignore[call-arg]
    return carry._replace(**{field: value})  # type: ignore[attr-defined]


def _fields(carry: Carry) -> str:
    if hasattr(carry, "_fields"):
        return "fields " + ", ".join(carry._fields)
    if isinstance(carry, tuple):
        return f"{len(carry)} fields, by index"
    return "one array, field None"


@struct.dataclass
class CarryFn:
    """Base of carry functions; a subclass overrides ``draw``, ``before`` or ``after``.

    What faster backends may rely on it says itself: ``elementwise``, ``changes_values``,
    ``chooses`` and ``detached``. What they say here holds of any function; nor does a subclass
    of ``Detach``, ``Damp`` or ``Zoneout`` inherit their promises, since it may break them.

    Attributes:
      p: a probability, a scalar array leaf; it gets no gradient under ``unroll``, nor do other
        leaves of a subclass, nor the noise.
      field: which field of the carry it acts on; see ``get_field``.

    Raises:
      ValueError: if ``p`` is a plain number outside [0, 1].
    """

    p: Any
    field: str | int | None = struct.field(pytree_node=False, default="h")

    def __post_init__(self) -> None:
        # Only plain numbers can be checked: under a transformation p is a tracer.
        plain = isinstance(self.p, (bool, int, float, np.integer, np.floating))
        if isinstance(self.p, str) or (plain and not 0 <= self.p <= 1):
            raise ValueError(
                f"{type(self).__name__} needs a probability in [0, 1], got p = {self.p!r}."
            )

    @property
    def draws(self) -> bool:
        """Whether the function is random, and so needs a key or noise."""
        return False

    @property
    def elementwise(self) -> bool:
        """Whether unit j of its field comes from unit j alone, the same way for all units.

        It promises as well that other fields are neither read nor changed.
        """
        return False

    @property
    def changes_values(self) -> bool:
        """Whether it changes values; False for what acts on gradients alone."""
        return True

    @property
    def chooses(self) -> bool:
        """Whether ``after``, where there is noise, takes each unit from the old or the new carry.

        It promises as well that a bool mask of the units that stay old may be its noise.
        """
        return False

    def detached(self, noise_t: Noise) -> jax.Array | None:
        """Bool, where the step's gradient through its field is zero; None if it does not say."""
        del noise_t
        return None

    def draw(self, key: jax.Array, steps: int, batch_shape: Sequence[int]) -> Noise:
        """The noise of all steps.

        Args:
          key: PRNG key.
          steps: T.
          batch_shape: the batch dims.

        Returns:
          An array with leading axis T, of which ``before`` and ``after`` get a step's entry, or
          None for no noise.
        """
        del key, steps, batch_shape
        return None

    def before(self, noise_t: Noise, carry: Carry) -> Carry:
        """The carry that the step reads.

        Args:
          noise_t: the step's noise; None without any, or under ``deterministic``.
          carry: the carry before the step.

        Returns:
          A carry of the same structure, shapes and dtypes.
        """
        del noise_t
        return carry

    def after(self, noise_t: Noise, prev: Carry, new: Carry) -> Carry:
        """The carry that is kept and emitted.

        Args:
          noise_t: as in ``before``.
          prev: the carry before the step, untouched by any ``before``.
          new: the carry after it.

        Returns:
          A carry of the same structure, shapes and dtypes.
        """
        del noise_t, prev
        return new


# Both are the identity on values, bit for bit. What they do to a gradient they do to the gradient
# of a gradient, too, as lax.stop_gradient does.


def stop_gradient_where(mask: jax.Array, x: jax.Array) -> jax.Array:
    """x; its gradient is stopped where the mask is True."""
    return jnp.where(mask, jax.lax.stop_gradient(x), x)


@jax.custom_jvp
def scale_gradient(x: jax.Array, scale: jax.Array) -> jax.Array:
    """x; its gradient is multiplied by scale, and by 0 it is 0, also where it is not finite."""
    del scale
    return x


@scale_gradient.defjvp
def scale_gradient_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    x, x_dot, scale = primals[0], tangents[0], jax.lax.stop_gradient(primals[1])
    # JAX takes second derivatives of what is returned here, as it is written: x by its value,
    # scale * x by its derivative.
    finite = jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))
    zero = jax.lax.stop_gradient(finite) - finite  # whose derivative is -1
    primal = jax.lax.stop_gradient(x) - jnp.where(scale == 0, jnp.zeros_like(x), scale * zero)
    return primal, jnp.where(scale == 0, jnp.zeros_like(x_dot), scale * x_dot)


@struct.dataclass
class Detach(CarryFn):
    """h-detach: stop the gradient through a field at random steps (h-detach, Algorithm 1).

    The forward pass keeps every bit and the emitted state keeps its gradient (line 9); only
    what the next step reads is detached. c-detach (section 3.5) is ``field="c"``.

    Attributes:
      p: probability of DETACHING at a step, as in Algorithm 1 and the published code.
      field: the detached field.
      per_example: draw for each example instead of once a step for the whole batch.

    Note:
      The paper's text and theorems use p for the probability of keeping.
    """

    per_example: bool = struct.field(pytree_node=False, default=False)

    @property
    def draws(self) -> bool:
        return True

    @property
    def elementwise(self) -> bool:
        return type(self) is Detach

    @property
    def changes_values(self) -> bool:
        return type(self) is not Detach

    def detached(self, noise_t: jax.Array | None) -> jax.Array | None:
        return noise_t.astype(bool) if type(self) is Detach and noise_t is not None else None

    def draw(self, key: jax.Array, steps: int, batch_shape: Sequence[int]) -> jax.Array:
        """Bool ``[T]``, or ``[T, *batch]`` per example; True detaches."""
        shape = (steps, *batch_shape) if self.per_example else (steps,)
        return jax.random.uniform(key, shape, jnp.float32) < jnp.asarray(self.p, jnp.float32)

    def before(self, noise_t: jax.Array | None, carry: Carry) -> Carry:
        if noise_t is None:
            return carry
        value = get_field(carry, self.field)
        mask = expand(noise_t.astype(bool), value)
        return set_field(carry, self.field, stop_gradient_where(mask, value))


@struct.dataclass
class Damp(CarryFn):
    """The exact expectation of ``Detach``: gradient times 1 - p (h-detach, Corollary 1).

    Attributes:
      p: the probability of detaching whose expectation this is.
      field: the damped field.

    Note:
      Theorem 2 and Corollary 1 print p in the place of 1 - p: theirs is that of keeping.
    """

    @property
    def elementwise(self) -> bool:
        return type(self) is Damp

    @property
    def changes_values(self) -> bool:
        return type(self) is not Damp

    def before(self, noise_t: Noise, carry: Carry) -> Carry:
        del noise_t
        value = get_field(carry, self.field)
        scale = 1 - jnp.asarray(self.p, value.dtype)
        return set_field(carry, self.field, scale_gradient(value, scale))


@struct.dataclass
class Zoneout(CarryFn):
    """Zoneout: each unit keeps its old value with probability p (Krueger et al., 2016).

    Without noise (``deterministic``) the new state is the mean, p * old + (1 - p) * new.
    UR-gates D.2 uses p = 0.5 on c and 0.05 on h (LSTM), 0.1 on h (GRU).

    Attributes:
      p: probability of KEEPING the old value.
      field: the field that is zoned out.
    """

    @property
    def draws(self) -> bool:
        return True

    @property
    def elementwise(self) -> bool:
        return type(self) is Zoneout

    @property
    def chooses(self) -> bool:
        return type(self) is Zoneout

    def draw(self, key: jax.Array, steps: int, batch_shape: Sequence[int]) -> jax.Array:
        """A PRNG key per step and example, ``[T, *batch]``; ``after`` draws the units' masks.

        Keys take less memory than masks, and stay right when the batch is sharded.
        """
        return jax.random.split(key, (steps, *batch_shape))

    def after(self, noise_t: jax.Array | None, prev: Carry, new: Carry) -> Carry:
        """Keeps old values where the mask is True.

        Args:
          noise_t: keys ``[*batch]``, or a bool mask ``[*batch]`` or ``[*batch, F]``: its axes are
            the field's first ones, and of their sizes or of size 1. None: the mean.
          prev: the carry before the step.
          new: the carry after it.

        Returns:
          The new carry with its field zoned out.

        Raises:
          ValueError: if a mask has other axes, or if the field, whose mean is asked for, holds
            integers.
        """
        old, fresh = get_field(prev, self.field), get_field(new, self.field)
        if noise_t is None:
            if not jnp.issubdtype(fresh.dtype, jnp.inexact):
                raise ValueError(
                    f"Zoneout has no mean of integers, and field {self.field!r} holds "
                    f"{fresh.dtype}: draw its masks with a key or noise."
                )
            p = jax.lax.stop_gradient(jnp.asarray(self.p, fresh.dtype))
            mixture = p * old + (1 - p) * fresh
        else:
            if jnp.issubdtype(noise_t.dtype, jax.dtypes.prng_key):
                noise_t = self._mask(noise_t, fresh.shape[noise_t.ndim :])
            pairs = zip(noise_t.shape, fresh.shape, strict=False)
            if noise_t.ndim > fresh.ndim or any(size not in (1, like) for size, like in pairs):
                raise ValueError(
                    f"A mask of Zoneout has the first axes of its field, [*batch] or [*batch, F]: "
                    f"field {self.field!r} has shape {fresh.shape}, and the mask {noise_t.shape}."
                )
            mixture = jnp.where(expand(noise_t.astype(bool), fresh), old, fresh)
        return set_field(new, self.field, mixture)

    def _mask(self, keys: jax.Array, unit_shape: tuple[int, ...]) -> jax.Array:
        p = jnp.asarray(self.p, jnp.float32)
        draw = jax.vmap(lambda key: jax.random.uniform(key, unit_shape, jnp.float32) < p)
        return draw(keys.reshape(-1)).reshape(*keys.shape, *unit_shape)


def draw_noise(
    carry_fns: Sequence[CarryFn],
    key: jax.Array | None,
    steps: int,
    batch_shape: Sequence[int],
) -> tuple[Noise, ...]:
    """The noise of a list of carry functions: one entry each, None where none is drawn.

    Args:
      carry_fns: the functions, applied left to right.
      key: PRNG key; each function draws from ``fold_in(key, its index)``.
      steps: T, the length of the sequence.
      batch_shape: the batch dims.

    Returns:
      What ``unroll`` takes as ``noise``, each entry with leading axis T.

    Raises:
      ValueError: if a function draws and ``key`` is None.
    """
    carry_fns = checks.carry_fns(carry_fns, CarryFn)
    if key is not None:
        checks.key("key", key)
        if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):  # Zoneout tells keys from masks
            key = jax.random.wrap_key_data(key)
        key = _threefry(key)
    noise: list[Noise] = []
    for index, fn in enumerate(carry_fns):
        if not fn.draws:
            noise.append(None)
        elif key is None:
            raise ValueError(
                f"{type(fn).__name__} draws random numbers: pass key=..., noise=... or "
                "deterministic=True (in a Flax layer: rngs={'carry': key} or deterministic=True)."
            )
        else:
            noise.append(fn.draw(jax.random.fold_in(key, index), steps, batch_shape))
    return tuple(noise)


def _threefry(key: jax.Array) -> jax.Array:
    """A threefry key made from another key: under ``vmap``, what an rbg key draws depends on what
    else is drawn there, and so on the backend."""
    if jax.random.key_impl(key) == _THREEFRY:
        return key
    first, *rest = jnp.moveaxis(jax.random.key_data(key), -1, 0)
    out = jax.random.key(first, impl=_THREEFRY)
    for word in rest:
        out = jax.random.fold_in(out, word)
    return out


def without_gradient(tree: Any) -> Any:
    """Carry functions or noise whose arrays get no gradient, under any backend; numbers stay."""
    is_array = checks.is_array
    return jax.tree.map(lambda a: jax.lax.stop_gradient(a) if is_array(a) else a, tree)


def apply_before(carry_fns: Sequence[CarryFn], noise_t: Sequence[Noise], carry: Carry) -> Carry:
    """Applies the ``before`` functions, left to right."""
    for fn, n in zip(carry_fns, noise_t, strict=True):
        carry = fn.before(n, carry)
    return carry


def apply_after(
    carry_fns: Sequence[CarryFn], noise_t: Sequence[Noise], prev: Carry, new: Carry
) -> Carry:
    """Applies the ``after`` functions, left to right."""
    for fn, n in zip(carry_fns, noise_t, strict=True):
        new = fn.after(n, prev, new)
    return new
