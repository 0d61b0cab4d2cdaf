"""The driver over time: project, loop, emit; masks, resets, rematerialisation, backends.

Everything here is time-major: T time, then any batch dims. One step is

    c = where(reset, reset_carry, c);  n = after(c, step(before(c)));
    c = where(valid, n, c);      y = where(valid, emit(c), 0).

The ``scan`` backend is that definition. Every other backend matches it in value and gradient,
or raises with the reason; none falls back quietly.
"""

from __future__ import annotations

import enum
import functools
import importlib
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.ad_checkpoint import checkpoint_name

from recurrent_gates import checks, target
from recurrent_gates.base import Cell
from recurrent_gates.carry import (
    CarryFn,
    Noise,
    apply_after,
    apply_before,
    draw_noise,
    without_gradient,
)
from recurrent_gates.declared import Carry, Params
from recurrent_gates.shapes import all_varying, byte_count, expand, is_symbolic, leading_axes

_LOGGER = logging.getLogger("recurrent_gates")


class Backend(enum.Enum):
    """How a recurrence is computed; each backend is held to ``SCAN`` by tests.

    Where one is asked for, its value does as well: the name in small letters, a string.

    Attributes:
      AUTO: ``NATIVE``, ``FUSED`` or ``PARALLEL``, the first that serves the request, else ``SCAN``;
        logs its choice once.
      SCAN: ``jax.lax.scan`` over the cell's step: the definition.
      NATIVE: kernels in C++ for a CPU, compiled where they run: LSTM, GRU, JANET and GATO.
      FUSED: a hand-written backward pass, for cells that name their recurrent products.
      PARALLEL: all steps at once, for linear recurrences.
      NEWTON: all steps at once, for diagonal recurrences.
      PALLAS: one kernel over time in each direction, on TPUs and NVIDIA GPUs.
      CUDNN: NVIDIA's own kernels, for the plain LSTM.
    """

    AUTO = "auto"
    SCAN = "scan"
    NATIVE = "native"
    FUSED = "fused"
    PARALLEL = "parallel"
    NEWTON = "newton"
    PALLAS = "pallas"
    CUDNN = "cudnn"


# What auto tries, in this order, before it takes the scan.
_FASTEST_FIRST = (Backend.NATIVE, Backend.FUSED, Backend.PARALLEL)

# A step on a GPU is a few programs, each of which takes microseconds to start. An iteration of
# several steps stores what they hand out by one program, and may join steps without products.
_GPU_UNROLL = 8

# Bytes. Carries that take less, of all steps together, are kept whatever the cell: to form them
# again would cost a third more time for little.
_LARGE = 2**25
# The same for cells whose steps are formed again one by one: chunks of them save nothing else.
_LARGE_OF_STEPS = 2**26
_LARGER = 4  # times what a step reads and hands out: of an LSTM that projects nothing it is 2


class Stream(NamedTuple):
    """What happens at each step besides the input; leaves have leading axis T, or are None."""

    valid: jax.Array | None = None
    resets: jax.Array | None = None
    noise: tuple[Noise, ...] = ()


class Settings(NamedTuple):
    """The static side of a recurrence: hashable, part of a ``Loop``'s structure, never a closure.

    Attributes:
      cell: the cell.
      batch_dims: how many axes the batch has.
      reverse: whether time runs backwards.
      unroll: steps per iteration of the loop.
      keep_carries: whether the carries of all steps are asked for.
      keep: whether chunks keep for the backward pass what a backend has marked with
        ``mark_residuals``; the rest of a chunk is always computed again.
      remat_steps: whether ``scan_segment`` keeps for the backward pass the carries alone and what
        is marked with ``mark_residuals``, and computes the rest of each step again.
      by_lengths: whether the valid steps of each example are its first.
    """

    cell: Cell
    batch_dims: int
    reverse: bool = False
    unroll: int = 1
    keep_carries: bool = False
    keep: bool = False
    remat_steps: bool = False
    by_lengths: bool = False


class Loop(struct.PyTreeNode):
    """A recurrence over a stretch of time: all that runs it, as one tree.

    Attributes:
      settings: the static side.
      params: the cell's parameters, or of them what the loop reads.
      xs: inputs, leaves ``[T, *batch, ...]``.
      carry: the carry before the first step.
      reset_carry: the carry that a reset takes.
      carry_fns: what happens to the carry around each step, left to right.
      stream: masks and noise by step.
    """

    settings: Settings = struct.field(pytree_node=False)
    params: Any
    xs: Any
    carry: Carry
    reset_carry: Carry
    carry_fns: tuple[CarryFn, ...] = ()
    stream: Stream = Stream()

    @property
    def lead(self) -> tuple[int, ...]:
        """(T, *batch)."""
        return jax.tree.leaves(self.xs)[0].shape[: 1 + self.settings.batch_dims]

    @property
    def steps(self) -> int:
        """T."""
        return self.lead[0]

    @property
    def symbolic(self) -> bool:
        """Whether sizes are those of ``jax.export`` that cannot be compared with a number."""
        return is_symbolic((self.xs, self.carry))

    def advance(self, step: Callable[[Carry], Carry], carry: Carry, stream_t: Stream) -> Carry:
        """One step of this loop around a cell's step; ``stream_t`` is its stream at one time."""
        return advance(step, carry, self.reset_carry, self.carry_fns, stream_t)


class Segment(NamedTuple):
    """What a backend makes of a loop: the last carry, outputs, all carries if asked for."""

    carry: Carry
    ys: Any
    carries: Carry | None


class Form(Protocol):
    """What the module of a backend offers: another form of ``scan_segment``, as exact as it."""

    def unsupported(self, loop: Loop) -> str | None:
        """Why this form does not serve a loop, in one sentence; None if it does."""

    def chunk(self, loop: Loop) -> int | None:
        """The steps per rematerialised chunk that it wants; None for no chunks."""

    def segment(self, loop: Loop) -> Segment:
        """Runs a loop that it serves."""


_RESIDUALS = "recurrent_gates.kept"


def mark_residuals(tree: Any) -> Any:
    """Marks arrays that a chunk had better keep than compute again."""
    return checkpoint_name(tree, _RESIDUALS)


def select(mask: jax.Array | None, on_true: Carry, on_false: Carry) -> Carry:
    """Per example where(mask, on_true, on_false) over a carry; no mask is on_false."""
    if mask is None:
        return on_false
    return jax.tree.map(lambda a, b: jnp.where(expand(mask, b), a, b), on_true, on_false)


def advance(
    step: Callable[[Carry], Carry],
    carry: Carry,
    reset_carry: Carry,
    carry_fns: Sequence[CarryFn],
    stream_t: Stream,
) -> Carry:
    """One step of the driver around a cell's step; ``stream_t`` is a stream at one time."""
    carry = select(stream_t.resets, reset_carry, carry)
    new = step(apply_before(carry_fns, stream_t.noise, carry))
    new = apply_after(carry_fns, stream_t.noise, carry, new)
    return new if stream_t.valid is None else select(stream_t.valid, new, carry)


def with_zeros(valid: jax.Array | None, tree: Any) -> Any:
    """Inputs or outputs with zeros on invalid steps."""
    if valid is None:
        return tree
    return jax.tree.map(lambda x: jnp.where(expand(valid, x), x, jnp.zeros_like(x)), tree)


def scan_segment(loop: Loop) -> Segment:
    """The definition: ``jax.lax.scan`` over the cell's step."""
    settings, cell, params = loop.settings, loop.settings.cell, loop.params
    z = cell.project(params, loop.xs)

    def body(carry: Carry, inputs: tuple[Any, Stream]) -> tuple[Carry, Any]:
        z_t, stream_t = inputs
        carry = loop.advance(lambda c: cell.step(params, c, z_t), carry, stream_t)
        y = with_zeros(stream_t.valid, cell.emit(params, carry, z_t))
        return carry, (y, carry if settings.keep_carries else None)

    if settings.remat_steps:
        policy = jax.checkpoint_policies.save_only_these_names(_RESIDUALS)
        body = jax.checkpoint(body, prevent_cse=False, policy=policy)
    carry, (ys, carries) = jax.lax.scan(
        body, loop.carry, (z, loop.stream), reverse=settings.reverse, unroll=settings.unroll
    )
    return Segment(carry, ys, carries)


def unroll(
    cell: Cell,
    params: Params,
    xs: Any,
    carry: Carry | None = None,
    *,
    reset_carry: Carry | None = None,
    lengths: jax.Array | None = None,
    valid: jax.Array | None = None,
    resets: jax.Array | None = None,
    reverse: bool = False,
    carry_fns: Sequence[CarryFn] = (),
    key: jax.Array | None = None,
    noise: Sequence[Noise] | None = None,
    deterministic: bool = False,
    return_carries: str = "last",
    unroll: int | None = None,
    remat: int | None = None,
    backend: str | Backend = Backend.AUTO,
) -> tuple[Carry, Any]:
    """Runs a cell over a sequence.

    Args:
      cell: a cell; one that is bound, inside a Flax module, is copied without its variables.
      params: its parameters, ``cell.init_params(key, D)``.
      xs: inputs ``[T, *batch, D]``, or a tree of them. Without a carry, the batch is what the
        shapes of all leaves have in common after T, their last axes left out.
      carry: the carry before the first step, whose batch dims are those of the sequence; default
        ``cell.initial(batch)``. With a carry, leaves of xs are ``[T, *batch, ...]``.
      reset_carry: the carry that a reset takes; default ``cell.initial(batch)``.
      lengths: int ``[*batch]`` from 0 to T, short for ``valid[t] = t < lengths``. Under ``jit``
        there are no values to check: then less than 0 counts as 0, and more than T as T.
      valid: bool ``[T, *batch]``, any pattern. An invalid step holds the carry, which a reset
        changes all the same, and emits zeros; its input, NaN included, reaches neither values
        nor gradients.
      resets: bool ``[T, *batch]``: the step starts from ``reset_carry``, before x_t is read.
      reverse: run t from T - 1 to 0; every y stays at its own t.
      carry_fns: what happens to the carry around each step, left to right. Their leaves and their
        noise get no gradient.
      key: PRNG key that the carry functions draw from.
      noise: their draws instead of a key, one entry per function with leading axis T.
        Windows of a sequence equal the whole when given slices of one noise.
      deterministic: draw nothing: detaching is off, zoneout takes its mean. Not with ``noise``.
      return_carries: ``"last"``: return the carry after the last step; ``"all"``: return
        the carries of all steps, leaves ``[T, *batch, ...]``.
      unroll: steps per iteration of the loop; default: 8 on a GPU, 1 elsewhere.
      remat: length in steps of the chunks whose activations are computed again in the
        backward pass instead of kept; default: none, or the square root of T where the carries
        of all steps take more than 32 MiB, and four times what the steps read and hand out. Of a
        memory cell's steps without chunks a CPU keeps the carries, up to 64 MiB by default, and
        forms the rest again.
      backend: ``"scan"``, ``"native"`` (kernels for CPUs), ``"fused"``, ``"parallel"`` (all steps
        at once, for linear recurrences), ``"newton"`` (the same for diagonal ones), ``"pallas"``
        (kernels for TPUs and NVIDIA GPUs, which a CPU interprets, slowly), ``"cudnn"`` (the plain
        LSTM on NVIDIA GPUs) or ``"auto"``, which logs its choice once. Forward-mode derivatives
        (``jax.jvp``, ``jax.jacfwd``) are ``"scan"``'s alone.

    Returns:
      (carry, ys) with ys ``[T, *batch, F]`` (or what ``cell.emit`` makes) at the same t as their
      inputs.

    Raises:
      TypeError: if ``cell`` is not a ``Cell``.
      ValueError: if an argument is not what is said here, if both lengths and valid are given,
        if a carry function draws and there is neither key nor noise, or if the backend does not
        serve the request.
    """
    cell = checks.unbound("unroll", cell, Cell)
    checks.sequence(xs)
    params, xs = _of_jax(params), _of_jax(xs)
    shape = sequence_shape(cell, params, xs, reset_carry if carry is None else carry)
    initial = cell.initial(shape[1:])
    carry = initial if carry is None else checks.carry("carry", carry, initial)
    restart = initial if reset_carry is None else checks.carry("reset_carry", reset_carry, initial)
    checks.params(cell, params, xs.shape[-1] if checks.is_array(xs) else None)
    check_width(cell, params, xs, carry)
    reverse = checks.flag("reverse", reverse)
    deterministic = checks.flag("deterministic", deterministic)
    if return_carries not in ("last", "all"):
        raise ValueError(f"return_carries must be 'last' or 'all', got {return_carries!r}.")
    if unroll is None:
        unroll = _GPU_UNROLL if target.platform() == "gpu" else 1
    unroll = checks.whole_number("unroll is a number of steps", unroll)
    if remat is not None:
        remat = checks.chunk_length(remat, shape[0])
    by_lengths = lengths is not None
    valid = _resolve_valid(lengths, valid, shape)
    resets = checks.mask("resets", resets, shape[0], shape[1:])
    carry_fns = checks.carry_fns(carry_fns, CarryFn)
    if key is not None:
        checks.key("key", key)
    if deterministic:
        noise = checks.no_noise(noise, len(carry_fns))
    elif noise is None:
        noise = draw_noise(carry_fns, key, shape[0], shape[1:])
    noise = checks.noise(noise, len(carry_fns), shape[0])
    carry_fns, noise = without_gradient((carry_fns, noise))
    cell, carry_fns, noise = cell._around(carry_fns, noise)

    xs = with_zeros(valid, xs)  # NaN in padding must not reach project
    keep = return_carries == "all"
    settings = Settings(cell, len(shape) - 1, reverse, unroll, keep, by_lengths=by_lengths)
    stream = Stream(valid, resets, noise)
    loop = all_varying(Loop(settings, params, xs, carry, restart, carry_fns, stream))
    out = _run(loop, _backend(backend), remat, empty=0 in shape)
    return (out.carries if keep else out.carry), out.ys


def _run(loop: Loop, backend: Backend, remat: int | None, *, empty: bool) -> Segment:
    """The loop by its backend, in the chunks that were asked for or that the backend wants."""
    choice = _resolve(backend, loop)
    remat_steps = loop.settings.cell._remats_steps and target.platform() == "cpu"
    if choice is Backend.SCAN or empty:  # nothing to speed up
        segment, chunk = scan_segment, _large(loop, remat_steps)
    else:
        segment, chunk = _form(choice).segment, _form(choice).chunk(loop)
    keep = chunk is not None and remat is None
    loop = loop.replace(settings=loop.settings._replace(keep=keep))
    length = remat or chunk
    if length is None or not loop.steps:
        return segment(loop.replace(settings=loop.settings._replace(remat_steps=remat_steps)))
    return _chunked(segment, loop, length)


def _large(loop: Loop, remat_steps: bool) -> int | None:
    """The steps per chunk that large carries ask for; None for no chunks.

    A carry is large, a memory for one, where it takes several times what a step reads and hands
    out: then the carries of all steps are most of what would be kept.
    """
    carry_bytes = byte_count(loop.carry)
    limit = _LARGE_OF_STEPS if remat_steps else _LARGE
    if loop.symbolic or loop.steps * carry_bytes <= limit:
        return None
    cell = loop.settings.cell

    def step_values(xs: Any) -> Any:
        z = cell.project(loop.params, jax.tree.map(lambda x: x[0], xs))
        return z, cell.emit(loop.params, loop.carry, z)

    if carry_bytes <= _LARGER * byte_count(jax.eval_shape(step_values, loop.xs)):
        return None
    return math.isqrt(loop.steps - 1) + 1


def _backend(name: str | Backend) -> Backend:
    try:
        return Backend(name)
    except ValueError:
        names = ", ".join(repr(backend.value) for backend in Backend)
        text = checks.described(name)
        raise ValueError(f"backend must be one of {names}, got {text}.") from None


def _resolve(backend: Backend, loop: Loop) -> Backend:
    """The backend that serves a loop; ValueError if the one that is asked for does not."""
    reasons = []
    if backend is Backend.AUTO:
        platform = target.platform()
        backend = Backend.SCAN
        for candidate in _FASTEST_FIRST:
            reason = _form(candidate).unsupported(loop)
            if reason is None:
                backend = candidate
                break
            reasons.append(f"not {candidate.value}: {reason}")
        name = type(loop.settings.cell).__name__
        _log_choice(name, backend.value, platform, " ".join(reasons))
    elif backend is not Backend.SCAN:
        reason = _form(backend).unsupported(loop)
        if reason is not None:
            raise ValueError(
                f"The {backend.value} backend does not serve this: {reason} Use backend='auto'."
            )
    return backend


def _form(backend: Backend) -> Form:
    """A backend's module; imported late: it is written in terms of this one."""
    module: Any = importlib.import_module(f"recurrent_gates.backends.{backend.value}")
    return module


@functools.cache
def _log_choice(cell: str, choice: str, platform: str, because: str) -> None:
    because = f" ({because})" if because else ""
    _LOGGER.info("%s on %s: backend auto chose %s%s", cell, platform, choice, because)


# Chunks of time. Of a chunk only its first carry is kept for the backward pass, and what its
# backend has marked with ``mark_residuals``, if ``settings.keep``; all else is formed again, a
# chunk at a time. [T, ...] is [count, length, ...] and a rest that is shorter: in time the rest
# comes last, which makes it the first to run where time runs backwards.


def _chunked(segment: Callable[[Loop], Segment], loop: Loop, length: int) -> Segment:
    """A loop in chunks of ``length`` steps, each rematerialised."""
    full_steps = loop.steps // length * length

    def full_chunks(carry: Carry) -> Segment:
        return _whole_chunks(segment, _stretch(loop, carry, slice(full_steps)), length)

    def remainder(carry: Carry) -> Segment:
        stretch = _stretch(loop, carry, slice(full_steps, None))
        return _rematerialised(segment, stretch, in_scan=False)

    if full_steps == loop.steps:
        return full_chunks(loop.carry)
    if not full_steps:
        return remainder(loop.carry)
    if loop.settings.reverse:
        tail = remainder(loop.carry)
        head = full_chunks(tail.carry)
    else:
        head = full_chunks(loop.carry)
        tail = remainder(head.carry)
    ys, carries = jax.tree.map(
        lambda a, b: jnp.concatenate([a, b]), (head.ys, head.carries), (tail.ys, tail.carries)
    )
    return Segment((head if loop.settings.reverse else tail).carry, ys, carries)


def _stretch(loop: Loop, carry: Carry, times: slice) -> Loop:
    """A part of a loop's time, from a carry on."""
    xs, stream = jax.tree.map(lambda x: x[times], (loop.xs, loop.stream))
    return loop.replace(xs=xs, carry=carry, stream=stream)


def _whole_chunks(segment: Callable[[Loop], Segment], loop: Loop, length: int) -> Segment:
    """A loop whose steps are a multiple of ``length``, as a scan over its chunks."""
    count = loop.steps // length
    chunks = jax.tree.map(lambda x: x.reshape(count, length, *x.shape[1:]), (loop.xs, loop.stream))

    def body(carry: Carry, chunk: tuple[Any, Stream]) -> tuple[Carry, Any]:
        xs, stream = chunk
        piece = loop.replace(xs=xs, carry=carry, stream=stream)
        out = _rematerialised(segment, piece, in_scan=True)
        return out.carry, (out.ys, out.carries)

    carry, stacked = jax.lax.scan(body, loop.carry, chunks, reverse=loop.settings.reverse)
    ys, carries = jax.tree.map(lambda x: x.reshape(loop.steps, *x.shape[2:]), stacked)
    return Segment(carry, ys, carries)


def _rematerialised(segment: Callable[[Loop], Segment], loop: Loop, *, in_scan: bool) -> Segment:
    """A chunk that is computed again in the backward pass, but for what is marked as kept."""
    policy = (
        jax.checkpoint_policies.save_only_these_names(_RESIDUALS) if loop.settings.keep else None
    )
    return jax.checkpoint(segment, prevent_cse=not in_scan, policy=policy)(loop)


def batch_shape(cell: Cell, carry: Carry) -> tuple[int, ...] | None:
    """The batch dims of a carry; None where it does not have the form of the cell's."""
    leaves = jax.tree.leaves(carry)
    unbatched = jax.tree.leaves(jax.eval_shape(lambda: cell.initial(())))
    if not leaves or len(leaves) != len(unbatched) or jnp.ndim(leaves[0]) < unbatched[0].ndim:
        return None
    return jnp.shape(leaves[0])[: jnp.ndim(leaves[0]) - unbatched[0].ndim]


def sequence_shape(cell: Cell, params: Params, xs: Any, carry: Carry | None) -> tuple[int, ...]:
    """(T, *batch): the carry's batch where there is one, and else what all leaves share."""
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(xs)]
    if not shapes or any(len(shape) < 1 for shape in shapes):
        raise ValueError(f"xs must be [T, *batch, D] with time first, got shapes {shapes}.")
    batch = None if carry is None else batch_shape(cell, carry)
    common = leading_axes(xs)
    if batch is None:
        if not common:
            raise ValueError(f"xs must be [T, *batch, D] with time first, got shapes {shapes}.")
        return common
    lead = (shapes[0][0], *batch)
    if any(shape[: len(lead)] != lead for shape in shapes):
        if len(common) == len(lead):  # the carry is another batch's, and will be told so
            return common
        raise ValueError(
            f"xs has shapes {shapes}; beside this carry, of batch shape {batch}, they must be "
            f"[T, {', '.join(map(str, (*batch, '...')))}]."
        )
    if common != lead and not _takes(cell, params, xs, carry):
        raise ValueError(
            f"The carry has batch shape {batch}, and xs of shapes {shapes} are not for it: they "
            f"have {common[1:]}."
        )
    return lead


def _takes(cell: Cell, params: Params, xs: Any, carry: Carry) -> bool:
    """Whether a step on inputs with several axes after the batch keeps the shapes of the carry."""

    def step(carry: Carry, xs: Any) -> Carry:
        return cell.step(params, carry, cell.project(params, jax.tree.map(lambda x: x[0], xs)))

    initial = jax.eval_shape(lambda: cell.initial(batch_shape(cell, carry) or ()))
    try:
        new = jax.eval_shape(step, initial, xs)
    except (TypeError, ValueError):
        return False
    before, after = (jax.tree.map(lambda leaf: leaf.shape, tree) for tree in (initial, new))
    return before == after


def _of_jax(tree: Any) -> Any:
    """A tree with arrays of NumPy's numbers as arrays of JAX's, in the dtypes that JAX has."""

    def is_numpys(leaf: Any) -> bool:
        return isinstance(leaf, np.ndarray) and jnp.issubdtype(leaf.dtype, np.number)

    if not any(map(is_numpys, jax.tree.leaves(tree))):
        return tree
    return jax.tree.map(lambda leaf: jnp.asarray(leaf) if is_numpys(leaf) else leaf, tree)


def check_width(cell: Cell, params: Params, xs: Any, carry: Carry) -> None:
    """Raises ``ValueError`` where float64 beside a narrower carry would widen it at each step."""
    dtypes = [leaf.dtype for leaf in jax.tree.leaves((params, xs)) if hasattr(leaf, "dtype")]
    if (cell_dtype := getattr(cell, "dtype", None)) is not None:
        dtypes.append(jnp.dtype(cell_dtype))
    narrow = any(leaf.dtype != np.float64 for leaf in jax.tree.leaves(carry))
    if not narrow or all(dtype != np.float64 for dtype in dtypes):
        return

    def step(carry: Carry, x: Any) -> Carry:
        return cell.step(params, carry, cell.project(params, x))

    x = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), xs)
    new = jax.eval_shape(step, carry, x)
    for before, after in zip(jax.tree.leaves(carry), jax.tree.leaves(new), strict=False):
        if before.dtype != after.dtype:
            raise ValueError(
                f"float64 makes the carry of {type(cell).__name__} {after.dtype}, and it starts as "
                f"{before.dtype}: give param_dtype=jnp.float64 and parameters of that dtype, or "
                f"inputs and dtype of {before.dtype}."
            )


def _resolve_valid(
    lengths: jax.Array | None, valid: jax.Array | None, shape: tuple[int, ...]
) -> jax.Array | None:
    """The mask of valid steps ``[T, *batch]``, or None if all are."""
    steps, *batch = shape
    if lengths is None:
        return checks.mask("valid", valid, steps, shape[1:])
    if valid is not None:
        raise ValueError("Give lengths or valid, not both: lengths is short for a valid mask.")
    lengths = checks.lengths(lengths, steps, shape[1:])
    time = jnp.arange(steps, dtype=jnp.int32)
    return time.reshape(steps, *(1,) * len(batch)) < lengths[None]
