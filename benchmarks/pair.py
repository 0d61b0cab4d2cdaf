"""One comparison: values first, then times of ours and the other side in turn.

Each side has a process of its own, and all are there at once. A turn of one side is followed by a
turn of the next, and the ratio is taken between neighbours, so that a slow moment of the machine
falls on both. Which side begins changes from round to round.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

import jax
import numpy as np

from benchmarks import floor, ours, process
from benchmarks.ours import Side
from benchmarks.peers import PEERS
from benchmarks.work import Contender, Size, check_equal

# Largest ||a - b|| / ||b|| of an array: float32 rounding over the longest sums (a weight's gradient
# has T * B terms) and through an RMC's hundred steps of three layer norms, which leaves 2e-4 to
# 4e-4 beside float64; a product in TF32 or bfloat16 has 10 or 8 bits.
TOLERANCE = {"float32": 5e-4, "tf32": 2e-2, "bfloat16": 1e-1}

PACKAGES = (
    *("recurrent_gates", "jax", "jaxlib", "flax", "torch", "dm-haiku", "equinox", "memax"),
    *("flashrnn", "numpy"),
)


KINDS = ("forward", "train")
_TURN = 0.05  # seconds of a turn: a short call is repeated, as in a user's loop
_CALLS = 20  # at most, in a turn
_PAUSE = 0.02  # seconds before a turn, in which the other side's threads fall asleep
# Seconds between two calls after which a call is not as in a loop: a virtual machine's host may
# have taken back the memory that the one before let go of, and a train step then took 465 ms, not
# 220.
_IDLE = 0.1


class Sides:
    """The sides of comparisons at one size, in the process where they run (``process.Held``).

    Args:
      size: B, T, D, F.
      dtype: of inputs and products.
      tf32: on a GPU, whether float32 products may use TF32.
    """

    def __init__(self, size: Sequence[int], dtype: str, tf32: bool) -> None:
        jax.config.update("jax_default_matmul_precision", None if tf32 else "highest")
        self._size, self._dtype = Size(*size), dtype
        self._tolerance = TOLERANCE["tf32" if tf32 and dtype == "float32" else dtype]
        self._name, self._facts = "", dict[str, Any]()
        self._side: Side | None = None
        self._last_call = -math.inf

    def build(self, name: str) -> dict[str, Any]:
        """Makes a side, unless it is there, and lets go of the one before it.

        Args:
          name: a contender of ours, or ``peer.cell`` with a name in ``PEERS``.

        Returns:
          What is known of it beside times.

        Raises:
          MismatchError: if its values or gradients are not those of the plain scan.
        """
        if name == self._name:
            return self._facts
        self._side = None
        contender, make = named(name), PEERS[peer_of(name)].build if peer_of(name) else ours.side
        side = make(contender, self._size, self._dtype)
        error = check(name, side, contender, self._size, self._dtype, self._tolerance)
        ours.forget()
        self._name, self._side = name, side
        self._facts = {**side.facts, "error": error, "tolerance": self._tolerance}
        self._facts["device"] = device_name()
        return self._facts

    def seconds(self, kind: str) -> float:
        """Of one call in a turn of the side that was built, as in a user's loop.

        Args:
          kind: of ``KINDS``.
        """
        run = getattr(self._side, kind)
        time.sleep(_PAUSE)
        if time.perf_counter() - self._last_call > _IDLE:
            run()
        duration = turn(run)
        self._last_call = time.perf_counter()
        return duration


def named(name: str) -> Contender:
    """What a side is a form of: ``peer.cell`` with the peer's equations, or a contender of ours."""
    peer = peer_of(name)
    return PEERS[peer].contender(name[len(peer) + 1 :]) if peer else Contender.parse(name)


def peer_of(name: str) -> str:
    """The peer whose side it names; empty for ours."""
    peer = name.partition(".")[0]
    return peer if peer in PEERS else ""


def hold(size: Size, devices: int, **settings: Any) -> process.Held:
    """A process with ``Sides``; ``settings`` are its dtype and tf32."""
    return process.Held("benchmarks.pair.Sides", {"size": size, **settings}, devices)


def build(sides: Mapping[str, process.Held]) -> dict[str, dict[str, Any]]:
    """Builds a side in each process, all at once; returns what is known of each."""
    for name, side in sides.items():
        side.send("build", name=name)
    return {name: side.answer() for name, side in sides.items()}


def measure(
    contender: str,
    other: str,
    size: Size,
    *,
    devices: int,
    repeats: int = 10,
    dtype: str = "float32",
    tf32: bool = False,
) -> dict[str, Any]:
    """A row.

    Args:
      contender: ours, as ``Contender.parse`` reads it.
      other: another contender of ours, or ``peer.cell`` with a name in ``PEERS``.
      size: B, T, D, F.
      devices: XLA CPU devices of ours; a peer has one.
      repeats: pairs of turns.
      dtype: of inputs and products.
      tf32: on a GPU, whether float32 products may use TF32, on both sides.

    Raises:
      ProcessError: if a side fails, or if its values or gradients are not those of the plain scan.
    """
    settings = {"dtype": dtype, "tf32": tf32}
    our_form, their_form = named(contender), named(other)
    with (
        hold(size, devices, **settings) as our_side,
        hold(size, 1 if peer_of(other) else devices, **settings) as other_side,
    ):
        facts = build({contender: our_side, other: other_side})
        times = {
            kind: interleave(
                functools.partial(our_side.ask, "seconds", kind=kind),
                functools.partial(other_side.ask, "seconds", kind=kind),
                repeats,
                timer=lambda run: run(),
            )
            for kind in KINDS
        }
    return {
        "contender": contender,
        "other": other,
        "same_equations": (our_form.cell, our_form.detach, our_form.form)
        == (their_form.cell, their_form.detach, their_form.form),
        "size": size._asdict(),
        "dtype": dtype,
        "tf32": tf32,
        "ours": facts[contender],
        "theirs": facts[other],
        "work": floor.count(our_form, size, jax.numpy.dtype(dtype).itemsize),
        **times,
    }


def check(
    name: str, side: Side, contender: Contender, size: Size, dtype: str, tolerance: float
) -> float:
    """The largest relative error of a side's outputs and gradients against the plain scan."""
    ys, expected = ours.expected(contender, size, dtype)
    forward_error = check_equal(f"{name} forward", side.outputs(side.forward()), ys, tolerance)
    outputs, results = side.train()
    train_error = check_equal(f"{name} train", side.outputs(outputs), ys, tolerance)
    gradient_error = check_equal(f"{name} gradient", side.gradients(results), expected, tolerance)
    return max(forward_error, train_error, gradient_error)


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def turn(run: Callable[[], Any], timer: Callable[[Callable[[], Any]], float] = seconds) -> float:
    """Seconds of a call: a first one where it is long, else the median of those that follow it."""
    first = timer(run)
    if first >= _TURN:
        return first
    return statistics.median(timer(run) for _ in range(min(_CALLS, 1 + int(_TURN / first))))


def interleave(
    first: Callable[[], Any],
    second: Callable[[], Any],
    repeats: int,
    timer: Callable[[Callable[[], Any]], float] = seconds,
) -> dict[str, Any]:
    """Times of two functions in turn, after one run of each that is not counted.

    Returns:
      ``{"ours", "theirs"}``: seconds, and ``"ratio"``: the second's time over the first's,
      pair by pair, each with median and quartiles; ``"ratio_ours_first"`` and
      ``"ratio_theirs_first"``: the medians over the pairs that began with either.
    """
    timer(first), timer(second)
    pairs = []
    for index in range(repeats):
        if index % 2 == 0:
            a = timer(first)
            b = timer(second)
        else:
            b = timer(second)
            a = timer(first)
        pairs.append((a, b))
    a, b = np.array(pairs).T
    ratios = b / a
    return {
        "ours": summary(a),
        "theirs": summary(b),
        "ratio": summary(ratios),
        "ratio_ours_first": float(np.median(ratios[::2])),
        "ratio_theirs_first": float(np.median(ratios[1::2])) if repeats > 1 else None,
    }


def summary(values: Any) -> dict[str, float]:
    """Median and quartiles."""
    low, median, high = np.quantile(np.asarray(values, float), [0.25, 0.5, 0.75])
    return {"median": float(median), "low": float(low), "high": float(high)}


def device_name() -> str:
    devices = jax.devices()
    return f"{devices[0].device_kind} x {len(devices)}"


def machine(dtype: str = "float32", tf32: bool = False) -> dict[str, Any]:
    """The platform, versions, and which peers cannot be run, with the reason."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    platform = jax.default_backend()
    missing = {name: peer.missing(platform, dtype) for name, peer in PEERS.items()}
    return {
        "platform": platform,
        "device": device_name(),
        "versions": versions,
        "missing": {name: reason for name, reason in missing.items() if reason},
    }
