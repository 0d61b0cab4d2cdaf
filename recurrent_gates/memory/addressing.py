"""Where the DNC writes and reads (Graves et al., 2016, Methods), one step at a time.

Letters: N slots of W units, R read heads, V write heads; all arrays may have leading batch dims.
Weights over slots are in [0, 1] and sum to 1 at most.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_EPSILON = 1e-6  # as in the authors' code


def content_weights(memory: jax.Array, keys: jax.Array, strengths: jax.Array) -> jax.Array:
    """Softmax over the slots of strength times cosine similarity: C(M, k, beta).

    Args:
      memory: ``[..., N, W]``.
      keys: ``[..., heads, W]``.
      strengths: ``[..., heads]``, at least 0.

    Returns:
      ``[..., heads, N]``.
    """
    similar = jnp.einsum("...hw,...nw->...hn", keys, memory)
    lengths = _norm(keys)[..., :, None] * _norm(memory)[..., None, :]
    return jax.nn.softmax(strengths[..., None] * similar / (lengths + _EPSILON), axis=-1)


def _norm(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(x), axis=-1) + _EPSILON)


def next_usage(
    usage: jax.Array, write_weights: jax.Array, free_gates: jax.Array, read_weights: jax.Array
) -> jax.Array:
    """What is in use after the last step's writes, and after its reads have freed some: u_t.

    Args:
      usage: ``[..., N]`` of the step before, as are the weights.
      write_weights: ``[..., V, N]``; as in the authors' code no gradient goes through them here.
      free_gates: ``[..., R]`` in [0, 1].
      read_weights: ``[..., R, N]``.

    Returns:
      ``[..., N]`` in [0, 1].
    """
    writing = 1 - jnp.prod(1 - jax.lax.stop_gradient(write_weights), axis=-2)
    retention = jnp.prod(1 - free_gates[..., None] * read_weights, axis=-2)  # psi_t
    return (usage + (1 - usage) * writing) * retention


def allocation_weights(usage: jax.Array) -> jax.Array:
    """The least used slot first: a_t, over slots that are ranked by their usage ``[..., N]``.

    a[i] = (1 - u[i]) times the product of u[j] over all j before i, of equals the first. The
    product is that of the sorted list, without a sort: a sum of logarithms under a mask.
    """
    usage = _EPSILON + (1 - _EPSILON) * usage
    u_i, u_j = usage[..., :, None], usage[..., None, :]
    shape, axis = (*usage.shape, usage.shape[-1]), usage.ndim
    i, j = (jax.lax.broadcasted_iota(jnp.int32, shape, axis - n) for n in (1, 0))
    order = (u_j < u_i) | ((u_j == u_i) & (j < i))
    product = jnp.exp(jnp.sum(jnp.where(order, jnp.log(u_j), 0.0), axis=-1))
    return (1 - usage) * product


def write_weights(
    usage: jax.Array, content: jax.Array, allocation_gates: jax.Array, write_gates: jax.Array
) -> jax.Array:
    """Where each head writes: to what it names, or to what is free: w_t.

    A further head sees what those before it are about to use.

    Args:
      usage: ``[..., N]``.
      content: ``[..., V, N]``.
      allocation_gates: ``[..., V]`` in [0, 1].
      write_gates: ``[..., V]`` in [0, 1].

    Returns:
      ``[..., V, N]``.
    """
    allocated = []
    for head in range(content.shape[-2]):
        free = allocation_weights(usage)
        allocated.append(free)
        share = (allocation_gates[..., head] * write_gates[..., head])[..., None]
        usage = usage + (1 - usage) * share * free
    gate = allocation_gates[..., None]
    mixed = gate * jnp.stack(allocated, axis=-2) + (1 - gate) * content
    return write_gates[..., None] * mixed


def next_memory(
    memory: jax.Array, weights: jax.Array, erase: jax.Array, write: jax.Array
) -> jax.Array:
    """M_t = M_tm1 * (1 - w e^T) + w v^T, all heads at once.

    Args:
      memory: ``[..., N, W]``.
      weights: ``[..., V, N]``.
      erase: ``[..., V, W]`` in [0, 1].
      write: ``[..., V, W]``.
    """
    retention = jnp.prod(1 - _outer(weights, erase), axis=-3)
    return memory * retention + jnp.einsum("...vn,...vw->...nw", weights, write)


def next_link(link: jax.Array, precedence: jax.Array, weights: jax.Array) -> jax.Array:
    """L_t[i, j]: how far slot i was written right after slot j.

    Args:
      link: ``[..., V, N, N]`` of the step before.
      precedence: ``[..., V, N]`` of the step before.
      weights: ``[..., V, N]``, where this step writes.

    Returns:
      ``[..., V, N, N]``, zero on the diagonal.
    """
    w_i, w_j = weights[..., :, None], weights[..., None, :]
    new = (1 - w_i - w_j) * link + _outer(weights, precedence)
    off_diagonal = 1 - jnp.eye(link.shape[-1], dtype=link.dtype)
    return new * off_diagonal.reshape((1,) * (link.ndim - 2) + off_diagonal.shape)


def next_precedence(precedence: jax.Array, weights: jax.Array) -> jax.Array:
    """p_t: how far a slot was the last one written, ``[..., V, N]``."""
    return (1 - jnp.sum(weights, axis=-1, keepdims=True)) * precedence + weights


def read_weights(
    link: jax.Array, previous: jax.Array, content: jax.Array, modes: jax.Array
) -> jax.Array:
    """Where each head reads: back or on along the order of writing, or what it names: w_t.

    Args:
      link: ``[..., V, N, N]``.
      previous: ``[..., R, N]``, where the step before read.
      content: ``[..., R, N]``.
      modes: ``[..., R, 2 V + 1]``, which sum to 1: back and on for each write head, then content.

    Returns:
      ``[..., R, N]``.
    """
    heads = link.shape[-3]
    backward = jnp.einsum("...vij,...ri->...rvj", link, previous)
    forward = jnp.einsum("...vij,...rj->...rvi", link, previous)
    directions = jnp.concatenate([backward, forward], axis=-2)
    shifts = jnp.einsum("...rv,...rvn->...rn", modes[..., : 2 * heads], directions)
    return shifts + modes[..., -1:] * content


def _outer(a: jax.Array, b: jax.Array) -> jax.Array:
    """a b^T; its gradients are products, of which XLA makes faster CPU code than of sums."""
    return jnp.einsum("...i,...j->...ij", a, b)
