"""Several processes that train together: the first one writes and speaks, all of them agree.

A process that ends before the others takes them with it: each says one sentence and leaves, and
the same commands go on from the last checkpoint.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Iterator
from typing import NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from experiments.settings.errors import ProcessError, UserError

T = TypeVar("T")

_JOIN_SECONDS = 300  # the processes may be started that long after each other
_HEARTBEAT_SECONDS = 20  # without a sign of life for so long a process counts as dead
_LINGER_SECONDS = 2.0

_own_id: int | None = None  # of several processes
_last_words = threading.Lock()  # a process says one sentence at its end
_c_callbacks: list[object] = []
_abort_reasons: list[str] = []  # the last one holds

_GONE = (
    "another process of this run has ended, or cannot be reached; the same commands together go "
    "on from the last checkpoint, and TF_CPP_MIN_LOG_LEVEL=0 shows what XLA knows."
)


def join(
    name: str,
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Joins the others, before JAX looks for devices; see ``jax.distributed.initialize``.

    From here on the process ends as soon as XLA notices that another one is dead, with the exit
    code 1. A process that turns out to be the only one goes on alone.

    Args:
      name: of the binary, which says why it ends.
      coordinator_address: ``HOST:PORT`` of the first process; None: JAX asks the cluster for this
        and the other two.
      num_processes: how many there are.
      process_id: which one this is.

    Raises:
      UserError: if there is no such address, or the others do not come.
    """
    global _own_id
    if coordinator_address is None:
        sentence = (
            f"the processes that the cluster started have not met within {_JOIN_SECONDS} s; "
            "--distributed=off trains in each alone."
        )
    else:
        assert process_id is not None
        _check_address(coordinator_address, process_id)
        sentence = (
            f"the {num_processes} processes have not met at --coordinator_address="
            f"{coordinator_address} within {_JOIN_SECONDS} s."
        )
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    _own_id = process_id
    _die_with_the_others(name)
    _abort_reasons.append(sentence)
    try:
        jax.distributed.initialize(
            coordinator_address,
            num_processes,
            process_id,
            initialization_timeout=_JOIN_SECONDS,
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
        )
    except RuntimeError:  # XLA's, too
        raise UserError(sentence) from None
    except ValueError:
        if coordinator_address is not None:
            raise
        return  # there is no cluster
    _abort_reasons.append(_GONE)
    _keep_stdout()
    if coordinator_address is None and jax.process_count() > 1:
        _own_id = jax.process_index()


def is_first() -> bool:
    """Whether this process is the one that writes and speaks."""
    return jax.process_index() == 0


def first_says(tree: T) -> T:
    """What the first process has, a tree of arrays or numbers; all of them have its shapes."""
    if jax.process_count() == 1:
        return tree

    def bits(leaf: np.ndarray) -> np.ndarray:
        return leaf.view(f"u{leaf.dtype.itemsize}")  # zeros are added to them: -0.0 would change

    leaves = jax.tree.map(np.asarray, tree)
    broadcast = multihost_utils.broadcast_one_to_all(jax.tree.map(bits, leaves))
    return jax.tree.map(
        lambda leaf, original: np.asarray(leaf).view(original.dtype), broadcast, leaves
    )


def check_alike(settings: str) -> None:
    """Ends all processes where one was started with other settings; all of them call this.

    Collectives of other sizes would end them without a reason, and of the same sizes not at all.

    Args:
      settings: as text.

    Raises:
      UserError: if they differ.
    """
    if jax.process_count() == 1:
        return
    digest = np.frombuffer(hashlib.sha256(settings.encode()).digest(), np.uint32)
    digests = multihost_utils.process_allgather(digest)
    outliers = np.flatnonzero((digests != digests[0]).any(axis=1))
    if outliers.size:
        raise UserError(
            f"process {outliers[0]} has other settings than process 0: all processes of a run are "
            "started with the same command."
        )


@contextlib.contextmanager
def together() -> Iterator[None]:
    """What several processes do together.

    Raises:
      ProcessError: in the place of what XLA raises where another one is gone.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() > 1 and "Gloo" in str(error):
            raise ProcessError(_GONE) from None
        raise


def leave(code: int, sentence: str = "") -> NoReturn:
    """Ends this process with a sentence on standard error; of several without waiting for the
    others, which may wait for it."""
    if sentence and _last_words.acquire(blocking=False):
        print(sentence, file=sys.stderr, flush=True)
    elif sentence:
        time.sleep(2 * _LINGER_SECONDS)  # XLA's thread is saying one, and then ends the process
    if _own_id is None:
        sys.exit(code)
    sys.stdout.flush()
    if _own_id == 0:
        time.sleep(_LINGER_SECONDS)  # the others cannot outlive it, and may have words, too
    os._exit(code)


def _check_address(address: str, process_id: int) -> None:
    """XLA dies of addresses that cannot be."""
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 2**16:
        raise UserError(f"--coordinator_address must be HOST:PORT, got {address}.")
    try:
        socket.getaddrinfo(host.strip("[]"), int(port))
        if process_id == 0:
            socket.create_server(("", int(port))).close()
    except OSError as error:
        reason = str(error.strerror or error).partition(" (")[0]
        raise UserError(f"--coordinator_address={address} cannot be: {reason}.") from None


def _keep_stdout() -> None:
    """Keeps standard output for Python: gloo would tell it of each connection."""
    encoding = sys.stdout.encoding
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1, encoding=encoding)
    null_file = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_file, 1)
    os.close(null_file)


def _die_with_the_others(name: str) -> None:
    """Makes XLA's own end one sentence, and lets an error of ours wait for nobody.

    XLA watches the other processes in a thread of its own, which aborts where one is dead.
    """

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def abort_handler(number: int) -> None:
        del number
        if not _last_words.acquire(blocking=False):
            time.sleep(2 * _LINGER_SECONDS)  # the main thread is leaving, with a code of its own
        else:
            os.write(2, f"experiments.{name}: {_abort_reasons[-1]}\n".encode())
        os._exit(1)

    ctypes.CDLL(None).signal(signal.SIGABRT, abort_handler)
    _c_callbacks.append(abort_handler)

    def exception_hook(
        kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
    ) -> None:
        sys.__excepthook__(kind, error, trace)
        leave(1)

    sys.excepthook = exception_hook
