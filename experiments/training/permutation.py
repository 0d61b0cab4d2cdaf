"""Some values of a random permutation, without forming the rest."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from experiments.settings.errors import UserError

_ROUNDS = 16


def permuted(key: jax.Array, indices: jax.Array, count: int) -> jax.Array:
    """The values of a random permutation of ``range(count)`` at some indices.

    A Feistel network on numbers of as many bits as ``count - 1``, applied again to what falls
    outside the range (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains", cycle
    walking). Sorting random numbers would take the time of all ``count`` values for each batch.
    It is pseudo-random: of ten values or fewer some permutations are likelier than others.

    Args:
      key: decides the permutation.
      indices: int ``[...]``, each at least 0 and below ``count``; with others it may not return.
      count: at least 1, at most ``2**32``.

    Returns:
      uint32 ``[...]``, below ``count``; different for different indices.
    """
    bits = (count - 1).bit_length()
    low, high = bits // 2, bits - bits // 2
    low_mask, high_mask = (jnp.uint32((1 << width) - 1) for width in (low, high))
    keys = jax.random.bits(key, (_ROUNDS,), jnp.uint32)

    def network(x: jax.Array) -> jax.Array:
        left, right = x >> low, x & low_mask
        for first in range(0, _ROUNDS, 2):
            left ^= _mixed(right ^ keys[first]) & high_mask
            right ^= _mixed(left ^ keys[first + 1]) & low_mask
        return left << low | right

    def walk(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, outside = state
        x = jnp.where(outside, network(x), x)
        return x, x > jnp.uint32(count - 1)

    start = indices.astype(jnp.uint32), jnp.full(indices.shape, True)
    return jax.lax.while_loop(lambda state: state[1].any(), walk, start)[0]


def batch_of_epoch(key: jax.Array, step: jax.Array, size: int, count: int) -> jax.Array:
    """Which of ``count`` examples a step's batch has.

    Each epoch goes through them in another random order; the last ones of that order, which would
    be a smaller batch, are left out.

    Args:
      key: decides the order of every epoch.
      step: int, from 0.
      size: examples in a batch, at most ``count``.
      count: examples in all.

    Returns:
      uint32 ``[size]``, below ``count``; different ones, also from those of the epoch's other
      batches.

    Raises:
      UserError: if a batch has more examples than there are.
    """
    if size > count:
        raise UserError(f"--batch_size={size} is more than the {count} training examples.")
    per_epoch = count // size
    first = step % per_epoch * size
    places = first + jnp.arange(size, dtype=first.dtype)
    return permuted(jax.random.fold_in(key, step // per_epoch), places, count)


def _mixed(x: jax.Array) -> jax.Array:
    """uint32 -> uint32; every bit of the result depends on all of x (MurmurHash3's finaliser)."""
    x = (x ^ x >> 16) * jnp.uint32(0x85EBCA6B)
    x = (x ^ x >> 13) * jnp.uint32(0xC2B2AE35)
    return x ^ x >> 16
