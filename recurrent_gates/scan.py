"""The driver over time: project, loop, emit; masks, resets, rematerialisation, backends.

Everything here is time-major: T time, then any batch dims. One step is

    c = where(reset, fresh, c);  n = after(c, step(before(c)));
    c = where(valid, n, c);      y = where(valid, emit(c), 0).

The ``scan`` backend is that definition. Every other backend matches it in value and gradient,
or raises with the reason; none falls back quietly.
"""

from __future__ import annotations

import enum
import functools
import importlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from recurrent_gates import checks
from recurrent_gates.base import Carry, Cell, Params
from recurrent_gates.carry import CarryFn, Noise, apply_after, apply_before, draw_noise
from recurrent_gates.shapes import expand

_LOGGER = logging.getLogger("recurrent_gates")


class Backend(enum.Enum):
    """How a recurrence is computed; each backend is held to ``SCAN`` by tests.

    Where one is asked for, its value does as well: the name in small letters, a string.

    Attributes:
      AUTO: ``FUSED`` where it serves the request, else ``SCAN``; logs its choice once.
      SCAN: ``jax.lax.scan`` over the cell's step: the definition.
      FUSED: a hand-written backward pass, for cells that name their recurrent products.
      NEWTON: all steps at once, for diagonal recurrences.
      PALLAS: one kernel over time in each direction, on TPUs and NVIDIA GPUs.
      CUDNN: NVIDIA's own kernels, for the plain LSTM.
    """

    AUTO = "auto"
    SCAN = "scan"
    FUSED = "fused"
    NEWTON = "newton"
    PALLAS = "pallas"
    CUDNN = "cudnn"


# What auto tries, in this order, before it takes the scan.
_FASTEST_FIRST = (Backend.FUSED,)

# A step on a GPU is a few programs, each of which takes microseconds to start. An iteration of
# several steps stores what they hand out by one program, and may join steps without products.
_GPU_UNROLL = 8


class Stream(NamedTuple):
    """What happens at each step besides the input; leaves have leading axis T, or are None."""

    valid: jax.Array | None
    resets: jax.Array | None
    noise: tuple[Noise, ...]


class Settings(NamedTuple):
    """The static side of a recurrence: hashable, an argument of backends, never a closure.

    Attributes:
      cell: the cell.
      reverse: whether time runs backwards.
      unroll: steps per iteration of the loop.
      keep: whether chunks keep for the backward pass what a backend has marked with ``kept``;
        the rest of a chunk is always computed again.
    """

    cell: Cell
    reverse: bool
    unroll: int
    keep: bool


_KEPT = "recurrent_gates.kept"


def kept(tree: Any) -> Any:
    """Marks arrays that a chunk had better keep than compute again."""
    return checkpoint_name(tree, _KEPT)


def select(mask: jax.Array | None, on_true: Carry, on_false: Carry) -> Carry:
    """Per example where(mask, on_true, on_false) over a carry; no mask is on_false."""
    if mask is None:
        return on_false
    return jax.tree.map(lambda a, b: jnp.where(expand(mask, b), a, b), on_true, on_false)


def advance(
    step: Callable[[Carry], Carry],
    carry: Carry,
    fresh: Carry,
    carry_fns: Sequence[CarryFn],
    stream_t: Stream,
) -> Carry:
    """One step of the driver around a cell's step; ``stream_t`` is a stream at one time."""
    carry = select(stream_t.resets, fresh, carry)
    new = step(apply_before(carry_fns, stream_t.noise, carry))
    new = apply_after(carry_fns, stream_t.noise, carry, new)
    return new if stream_t.valid is None else select(stream_t.valid, new, carry)


def masked_output(valid: jax.Array | None, y: jax.Array) -> jax.Array:
    """y with zeros on invalid steps."""
    return y if valid is None else jnp.where(expand(valid, y), y, jnp.zeros_like(y))


class Request(NamedTuple):
    """What is asked of a backend, for it to say whether it serves it; xs is ``[T, *batch, D]``."""

    settings: Settings
    params: Params
    xs: Any
    carry: Carry
    carry_fns: tuple[CarryFn, ...]
    stream: Stream
    keep_carries: bool = False


class Segment(NamedTuple):
    """What a backend returns for a stretch of time."""

    carry: Carry
    ys: jax.Array
    carries: Carry | None


def scan_segment(
    settings: Settings,
    params: Params,
    xs: Any,
    carry: Carry,
    fresh: Carry,
    carry_fns: tuple[CarryFn, ...],
    stream: Stream,
    keep_carries: bool,
) -> Segment:
    """The definition: ``jax.lax.scan`` over the cell's step."""
    cell = settings.cell
    z = cell.project(params, xs)

    def body(carry: Carry, inputs: tuple[Any, Stream]) -> tuple[Carry, Any]:
        z_t, stream_t = inputs
        carry = advance(lambda c: cell.step(params, c, z_t), carry, fresh, carry_fns, stream_t)
        y = masked_output(stream_t.valid, cell.emit(params, carry, z_t))
        return carry, (y, carry if keep_carries else None)

    carry, (ys, carries) = jax.lax.scan(
        body, carry, (z, stream), reverse=settings.reverse, unroll=settings.unroll
    )
    return Segment(carry, ys, carries)


def unroll(
    cell: Cell,
    params: Params,
    xs: Any,
    carry: Carry | None = None,
    *,
    fresh: Carry | None = None,
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
) -> tuple[Carry, jax.Array]:
    """Runs a cell over a sequence.

    Args:
      cell: an unbound cell; inside a Flax module pass ``cell.copy(parent=None)``.
      params: its parameters, ``cell.init_params(key, D)``.
      xs: inputs ``[T, *batch, D]``.
      carry: the carry before the first step; default ``cell.initial(batch)``.
      fresh: the carry that a reset takes; default ``cell.initial(batch)``.
      lengths: int ``[*batch]`` from 0 to T, short for ``valid[t] = t < lengths``. Under ``jit``
        there are no values to check: then less than 0 counts as 0, and more than T as T.
      valid: bool ``[T, *batch]``, any pattern. An invalid step holds the carry and emits
        zeros; its input, NaN included, reaches neither values nor gradients.
      resets: bool ``[T, *batch]``: the step starts from ``fresh``, before x_t is read.
      reverse: run t from T - 1 to 0; every y stays at its own t.
      carry_fns: what happens to the carry around each step, left to right.
      key: PRNG key that the carry functions draw from.
      noise: their draws instead of a key, one entry per function with leading axis T.
        Windows of a sequence equal the whole when given slices of one noise.
      deterministic: draw nothing: detaching is off, zoneout takes its mean.
      return_carries: ``"last"``: return the carry after the last step; ``"all"``: return
        the carries of all steps, leaves ``[T, *batch, ...]``.
      unroll: steps per iteration of the loop; default: 8 on a GPU, 1 elsewhere.
      remat: length in steps of the chunks whose activations are computed again in the
        backward pass instead of kept.
      backend: ``"scan"``, ``"fused"``, ``"newton"`` (all steps at once, for diagonal
        recurrences), ``"pallas"`` (kernels for TPUs and NVIDIA GPUs, which a CPU interprets,
        slowly), ``"cudnn"`` (the plain LSTM on NVIDIA GPUs) or ``"auto"``, which logs its
        choice once.

    Returns:
      (carry, ys) with ys ``[T, *batch, F]`` at the same t as their inputs.

    Raises:
      TypeError: if ``cell`` is not a ``Cell``.
      ValueError: if an argument is not what is said here, if both lengths and valid are given,
        if a carry function draws and there is neither key nor noise, or if the backend does not
        serve the request.
    """
    checks.cell("unroll", cell, Cell)
    checks.sequence(xs)
    steps, *batch = jax.tree.leaves(xs)[0].shape[:-1]
    batch_shape = tuple(batch)
    initial = cell.initial(batch_shape)
    carry = initial if carry is None else checks.carry("carry", carry, initial)
    fresh = initial if fresh is None else checks.carry("fresh", fresh, initial)
    checks.params(cell, params, xs.shape[-1] if checks.is_array(xs) else None)
    reverse = checks.flag("reverse", reverse)
    deterministic = checks.flag("deterministic", deterministic)
    if return_carries not in ("last", "all"):
        raise ValueError(f"return_carries must be 'last' or 'all', got {return_carries!r}.")
    if unroll is None:
        unroll = _GPU_UNROLL if jax.default_backend() == "gpu" else 1
    unroll = checks.whole_number("unroll is a number of steps", unroll)
    if remat is not None:
        remat = checks.whole_number("remat is a chunk length in steps", remat)
    valid = _resolve_valid(lengths, valid, steps, batch_shape)
    resets = checks.mask("resets", resets, steps, batch_shape)
    carry_fns = checks.carry_fns(carry_fns, CarryFn)
    if key is not None:
        checks.key("key", key)
    if deterministic:
        noise = (None,) * len(carry_fns)
    elif noise is None:
        noise = draw_noise(carry_fns, key, steps, batch_shape)
    noise = checks.noise(noise, len(carry_fns), steps)
    cell, carry_fns, noise = cell._around(carry_fns, noise)

    if valid is not None:  # NaN in padding must not reach project
        xs = jax.tree.map(lambda x: jnp.where(expand(valid, x), x, jnp.zeros_like(x)), xs)
    settings = Settings(cell, reverse, unroll, keep=False)
    stream = Stream(valid, resets, noise)
    keep = return_carries == "all"
    request = Request(settings, params, xs, carry, carry_fns, stream, keep)
    chosen = _resolve(_backend(backend), request)
    if not steps:
        remat = None
    if chosen is Backend.SCAN or not steps or 0 in batch_shape:  # nothing to speed up
        segment, chunk = scan_segment, None
    else:
        segment, chunk = _module(chosen).segment, _module(chosen).chunk(request)
    settings = settings._replace(keep=chunk is not None and remat is None)
    run = functools.partial(segment, settings, keep_carries=keep)
    out = _chunked(run, settings, params, xs, carry, fresh, carry_fns, stream, remat or chunk)
    return (out.carries if keep else out.carry), out.ys


def _backend(name: str | Backend) -> Backend:
    try:
        return Backend(name)
    except ValueError:
        known = ", ".join(repr(backend.value) for backend in Backend)
        got = checks.described(name)
        raise ValueError(f"backend must be one of {known}, got {got}.") from None


def _resolve(backend: Backend, request: Request) -> Backend:
    """The backend that serves a request; ValueError if the one that is asked for does not."""
    reasons = []
    if backend is Backend.AUTO:
        platform = jax.default_backend()
        backend = Backend.SCAN
        for candidate in _FASTEST_FIRST:
            reason = _module(candidate).unsupported(request)
            if reason is None:
                backend = candidate
                break
            reasons.append(f"not {candidate.value}: {reason}")
        name = type(request.settings.cell).__name__
        _log_choice(name, backend.value, platform, " ".join(reasons))
    elif backend is not Backend.SCAN:
        reason = _module(backend).unsupported(request)
        if reason is not None:
            raise ValueError(
                f"The {backend.value} backend does not serve this: {reason} Use backend='scan'."
            )
    return backend


def _module(backend: Backend) -> Any:
    """A backend's module; imported late: it is written in terms of this one."""
    return importlib.import_module(f"recurrent_gates.backends.{backend.value}")


@functools.cache
def _log_choice(cell: str, choice: str, platform: str, because: str) -> None:
    because = f" ({because})" if because else ""
    _LOGGER.info("%s on %s: backend auto chose %s%s", cell, platform, choice, because)


def _chunked(
    run: Callable[..., Segment],
    settings: Settings,
    params: Params,
    xs: Any,
    carry: Carry,
    fresh: Carry,
    carry_fns: tuple[CarryFn, ...],
    stream: Stream,
    chunk: int | None,
) -> Segment:
    """Runs segments of ``chunk`` steps in a scan, each rematerialised; a shorter one last."""
    steps = jax.tree.leaves(xs)[0].shape[0]
    if chunk is None:
        return run(params, xs, carry, fresh, carry_fns, stream)
    count, rest = divmod(steps, chunk)
    whole = count * chunk
    sequence = (xs, stream)

    def checkpointed(carry: Carry, piece: Any, *, in_scan: bool) -> Segment:
        def body(params, carry, fresh, carry_fns, piece):
            xs, stream = piece
            return run(params, xs, carry, fresh, carry_fns, stream)

        keep = jax.checkpoint_policies.save_only_these_names(_KEPT) if settings.keep else None
        remat = jax.checkpoint(body, prevent_cse=not in_scan, policy=keep)
        return remat(params, carry, fresh, carry_fns, piece)

    def run_whole(carry: Carry) -> Segment:
        pieces = jax.tree.map(lambda x: x[:whole].reshape(count, chunk, *x.shape[1:]), sequence)

        def body(carry: Carry, piece: Any) -> tuple[Carry, Any]:
            out = checkpointed(carry, piece, in_scan=True)
            return out.carry, (out.ys, out.carries)

        carry, kept = jax.lax.scan(body, carry, pieces, reverse=settings.reverse)
        ys, carries = jax.tree.map(lambda x: x.reshape(whole, *x.shape[2:]), kept)
        return Segment(carry, ys, carries)

    def run_rest(carry: Carry) -> Segment:
        piece = jax.tree.map(lambda x: x[whole:], sequence)
        return checkpointed(carry, piece, in_scan=False)

    if not rest:
        return run_whole(carry)
    if not count:
        return run_rest(carry)
    if settings.reverse:
        tail = run_rest(carry)
        head = run_whole(tail.carry)
        last = head.carry
    else:
        head = run_whole(carry)
        tail = run_rest(head.carry)
        last = tail.carry
    ys, carries = jax.tree.map(
        lambda a, b: jnp.concatenate([a, b]), (head.ys, head.carries), (tail.ys, tail.carries)
    )
    return Segment(last, ys, carries)


def _resolve_valid(
    lengths: jax.Array | None,
    valid: jax.Array | None,
    steps: int,
    batch_shape: tuple[int, ...],
) -> jax.Array | None:
    if lengths is None:
        return checks.mask("valid", valid, steps, batch_shape)
    if valid is not None:
        raise ValueError("Give lengths or valid, not both: lengths is short for a valid mask.")
    lengths = checks.lengths(lengths, steps, batch_shape)
    time = jnp.arange(steps, dtype=lengths.dtype)
    return time.reshape(steps, *(1,) * len(batch_shape)) < lengths[None]
