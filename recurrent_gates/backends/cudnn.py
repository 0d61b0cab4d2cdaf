"""cuDNN's LSTM through ``jax.experimental.rnn``, for the plain LSTM on an NVIDIA GPU.

cuDNN computes c = sigmoid(f) * c + sigmoid(i) * tanh(u), h = sigmoid(o) * tanh(c) (h-detach, eq.
1-2) over sequences of any lengths and returns every h but only the last c; whatever acts between
two steps, or asks for every c, needs another backend. Layers and directions are calls of their own.
Products use TF32 as XLA's own on a GPU do: unless ``jax_default_matmul_precision`` forbids it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jax.experimental import rnn
from jax.experimental.layout import Layout, with_layout_constraint

from recurrent_gates import target
from recurrent_gates.cells import LSTM, LSTMState
from recurrent_gates.declared import Params
from recurrent_gates.scan import Loop, Segment, select, with_zeros

_SLOTS = ("i", "f", "u", "o")  # cuDNN's order, as torch's
_PRECISIONS = (None, "high", "highest", "float32", "tensorfloat32")


def unsupported(loop: Loop) -> str | None:
    """Why this backend does not serve a loop, in one sentence; None if it does."""
    cell, stream = loop.settings.cell, loop.stream
    if type(cell) is not LSTM:
        return f"{type(cell).__name__} is not the plain LSTM."
    gate = cell.gate
    if not cell.forget_gate or set(gate.slots(cell.features)) != {"f", "i"}:
        return "cuDNN's LSTM has a forget and a free input gate and no other."
    if gate.has_own_equations or gate.activation != "sigmoid":
        return "cuDNN's LSTM has plain sigmoid gates."
    if (cell.activation, cell.output_activation) != (jnp.tanh,) * 2:
        return "cuDNN's LSTM has tanh in the candidate and in the output."
    if cell.heads > 1:
        return "cuDNN's LSTM has no heads."
    if loop.carry_fns:
        return "cuDNN lets nothing act on the carry between two steps."
    if stream.valid is not None and not loop.settings.by_lengths:
        return "cuDNN takes lengths, and no other masks."
    if stream.resets is not None:
        return "cuDNN takes no resets."
    if loop.settings.keep_carries:
        return "cuDNN returns the last c alone, not all carries."
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(loop.xs)]
    if len(shapes) != 1 or len(shapes[0]) != 3:
        return f"inputs must be [T, B, D], got shape {', '.join(map(str, shapes))}."
    arrays = jax.tree.leaves((loop.params, loop.xs, loop.carry))
    dtypes = {jnp.dtype(a.dtype) for a in arrays} | {jnp.dtype(cell.dtype or jnp.float32)}
    if dtypes != {jnp.dtype(jnp.float32)}:
        return f"cuDNN's LSTM is float32, got {', '.join(sorted(d.name for d in dtypes))}."
    config: Any = jax.config
    if config.jax_default_matmul_precision not in _PRECISIONS:
        return f"it has no precision {config.jax_default_matmul_precision!r}."
    return None if _has_cuda() else "it needs an NVIDIA GPU."


def _has_cuda() -> bool:
    """Whether the default devices are NVIDIA's."""
    return "cuda" in target.devices()[0].client.platform_version.lower()


def chunk(loop: Loop) -> int | None:
    """The steps per rematerialised chunk that this backend wants: none."""
    del loop
    return None


def segment(loop: Loop) -> Segment:
    """A stretch of time; same contract as ``scan_segment``."""
    cell, carry, valid = loop.settings.cell, loop.carry, loop.stream.valid
    assert isinstance(cell, LSTM)
    steps, batch = loop.lead
    if valid is None:
        lengths = jnp.full((batch,), steps, jnp.int32)
    else:
        lengths = jnp.sum(valid, axis=0, dtype=jnp.int32)
    xs = _backwards(loop.xs, lengths) if loop.settings.reverse else loop.xs
    # cuDNN has no sequence of no step: one of one step is run, and nothing of it is kept.
    ys, h, c = _lstm(pack(cell, loop.params), xs, carry.h, carry.c, jnp.maximum(lengths, 1))
    ys = _backwards(ys, lengths) if loop.settings.reverse else ys
    last = LSTMState(c, h)
    if valid is not None:
        last = select(lengths == 0, carry, last)
    return Segment(last, with_zeros(valid, ys), None)


def _backwards(x: jax.Array, lengths: jax.Array) -> jax.Array:
    """``[T, B, n]`` with the first steps of each example, by its length, in reverse order."""
    steps = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
    index = jnp.where(steps < lengths[None], lengths[None] - 1 - steps, steps)
    return jnp.take_along_axis(x, index[..., None], axis=0)


def pack(cell: LSTM, params: Params) -> jax.Array:
    """Parameters as cuDNN's one vector: W_ih ``[4F, D]``, W_hh ``[4F, F]``, b_ih, b_hh ``[4F]``.

    The first bias holds all biases, a gate's own included; the second is zeros.
    """
    second, offsets = params.get("recurrent_bias", {}), cell.gate.offsets(params.get("gate", {}))

    def bias(slot: str) -> jax.Array:
        terms = [biases[slot] for biases in (second, offsets) if slot in biases]
        return sum(terms, start=params["bias"][slot])

    pieces = [
        params[role][slot].T.ravel() for role in ("kernel", "recurrent_kernel") for slot in _SLOTS
    ]
    pieces += [bias(slot) for slot in _SLOTS]
    return jnp.concatenate([*pieces, jnp.zeros_like(pieces[-1], shape=4 * cell.features)])


# Lanes of a vmap run one after the other: the primitives of jax.experimental.rnn have no rule for
# batching. That wrapper has none for gradients, so both passes are wrapped, inside a custom_vjp.


@jax.custom_vjp
def _lstm(
    weights: jax.Array, xs: jax.Array, h: jax.Array, c: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Weights, xs ``[T, B, D]``, h and c ``[B, F]``, lengths ``[B]`` from 1 -> ys ``[T, B, F]`` and
    the last h and c."""
    out, _ = _forward(weights, xs, h, c, lengths)
    return out


@sequential_vmap
def _forward(
    weights: jax.Array, xs: jax.Array, h: jax.Array, c: jax.Array, lengths: jax.Array
) -> tuple[Any, Any]:
    arrays = _in_order((jnp.swapaxes(xs, 0, 1), h[None], c[None], weights, lengths))
    arguments = [*arrays, *_sizes(xs, h)]
    (ys, last_h, last_c), residuals = _in_order(rnn.lstm_fwd(*arguments))
    return (jnp.swapaxes(ys, 0, 1), last_h[0], last_c[0]), residuals


@sequential_vmap
def _backward(residuals: Any, cotangents: tuple[jax.Array, jax.Array, jax.Array]) -> tuple:
    d_ys, d_h, d_c = cotangents
    xs, h, *_ = residuals
    arrays = _in_order((residuals, (jnp.swapaxes(d_ys, 0, 1), d_h[None], d_c[None])))
    *gradients, _ = rnn.lstm_bwd(*_sizes(xs, h), *arrays)
    d_xs, d_h, d_c, d_weights = _in_order(gradients)
    return d_weights, jnp.swapaxes(d_xs, 0, 1), d_h[0], d_c[0]


def _pullback(residuals: Any, cotangents: tuple[jax.Array, jax.Array, jax.Array]) -> tuple:
    return (*_backward(residuals, cotangents), None)  # lengths have no gradient


_lstm.defvjp(_forward, _pullback)


def _in_order(tree: Any) -> Any:
    """The same arrays, each in memory of its own where the last axis is contiguous.

    jax.experimental.rnn does not tell XLA that cuDNN reads and writes them so, and XLA hands over a
    transposed array as it lies. In a loop over lanes it has cuDNN write into the stacked gradients
    themselves, whose memory cuDNN adds to.
    """
    ordered = jax.tree.map(lambda x: with_layout_constraint(x, Layout(tuple(range(x.ndim)))), tree)
    return jax.lax.optimization_barrier(ordered)


def _sizes(xs: jax.Array, h: jax.Array) -> tuple[int, int, int, float, bool, None]:
    """Static arguments: D, F, layers, dropout, bidirectional, precision (the default's)."""
    return xs.shape[-1], h.shape[-1], 1, 0.0, False, None
