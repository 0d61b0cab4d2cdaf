"""The kernels as XLA's own functions: compiled by this machine's C++ compiler, once, and loaded.

A library holds one cell, or an operation of one. It is kept in ``$XDG_CACHE_HOME/recurrent_gates``
(``~/.cache`` if that is not set) under a name that depends on the source, the compiler, the
processor and jaxlib.
``RECURRENT_GATES_NATIVE=0`` in the environment turns all of this off.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import pathlib
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
from typing import NamedTuple

import jax

_LOGGER = logging.getLogger("recurrent_gates")
_SOURCES = pathlib.Path(__file__).parent / "kernels"
# A sum that is added up in another order is another number: exponential rests on it.
_FLAGS = ("-std=c++17", "-O3", "-fno-fast-math", "-shared", "-fPIC", "-w")
_SWITCH = "RECURRENT_GATES_NATIVE"
_SECONDS = 120  # beyond which a compiler is taken for dead


class Source(NamedTuple):
    """What a library is compiled from.

    Attributes:
      file: its name in ``kernels/``.
      cell: which of the file's cells; empty where it has one.
      functions: what the library offers to XLA.
    """

    file: str
    cell: str = ""
    functions: tuple[str, ...] = ("forward", "backward", "gradients", "inputs")


KERNELS = {
    "lstm": Source("gated.cc", "Lstm<false>"),
    "lstm_refined": Source("gated.cc", "Lstm<true>"),
    "gru": Source("gated.cc", "Gru<false, true>"),
    "gru_refined": Source("gated.cc", "Gru<true, true>"),
    "janet": Source("gated.cc", "Gru<false, false>"),
    "janet_refined": Source("gated.cc", "Gru<true, false>"),
    "gato": Source("gato.cc"),
    "two_layer": Source("two_layer.cc", functions=("forward", "backward")),
}
"""The libraries by name."""


class UnavailableError(Exception):
    """There is no library; the text says why, in one sentence."""


def target(name: str, function: str) -> str:
    """The name by which XLA knows a function of a library."""
    return f"recurrent_gates_{name}_{function}"


@functools.cache
def missing(name: str) -> str | None:
    """Why a library cannot be had, in one sentence; None if it is registered with XLA."""
    try:
        library = _loaded(name)
    except UnavailableError as error:
        return str(error)
    except (OSError, ValueError) as error:
        return f"kernels cannot be had on this machine: {error}."
    if not library.rg_adds_in_order():
        return "the C++ compiler adds up in another order than is written; see its flags in $CXX."
    for function in KERNELS[name].functions:
        handler = jax.ffi.pycapsule(getattr(library, f"rg_{function}"))
        jax.ffi.register_ffi_target(target(name, function), handler, platform="cpu")
    return None


def _loaded(name: str) -> ctypes.CDLL:
    """A library; one that cannot be loaded is compiled anew, once.

    If the new one cannot be loaded either, a file beside it says so to later processes, until one
    of them can load it.
    """
    path = _built(name)
    unloadable = path.with_name(path.name.rpartition("-")[0] + ".unloadable")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        if unloadable.exists():
            raise UnavailableError(f"kernels cannot be loaded: {error}.") from None
    else:
        with contextlib.suppress(OSError):
            unloadable.unlink(missing_ok=True)
        return library
    path.unlink(missing_ok=True)
    try:
        return ctypes.CDLL(str(_built(name)))
    except OSError as error:
        unloadable.touch()
        raise UnavailableError(f"kernels cannot be loaded: {error}.") from None


def _built(name: str) -> pathlib.Path:
    """A library, compiled if there is none yet; one that is damaged is removed.

    To load half of a library, as a power failure may leave it, can end the process. So the name
    says what the content is: ``NAME-DEPENDENCIES-CONTENT.so``.
    """
    if os.environ.get(_SWITCH) == "0":
        raise UnavailableError(f"{_SWITCH}=0 turns kernels off.")
    compiler = _compiler()
    source = KERNELS[name]
    command = [*compiler, *_FLAGS, _for_this_processor()]
    command += [f"-DRG_CELL={source.cell}"] if source.cell else []
    command += [f"-I{jax.ffi.include_dir()}", str(_SOURCES / source.file)]
    begin = f"{name}-{_digest(compiler, command)}"
    for path in sorted(_directory().glob(f"{begin}-*.so")):
        with contextlib.suppress(OSError):
            if path.name == _named(begin, path):
                return path
            path.unlink(missing_ok=True)
    return _compile(begin, command, _directory())


def _named(name: str, path: pathlib.Path) -> str:
    return f"{name}-{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}.so"


def _compiler() -> list[str]:
    setting = os.environ.get("CXX")
    for command in map(shlex.split, (setting,) if setting else ("c++", "g++", "clang++")):
        if command and shutil.which(command[0]):
            return command
    raise UnavailableError(
        f"kernels are compiled on this machine, and there is no C++ compiler ({setting or 'c++'})."
    )


def _for_this_processor() -> str:
    return "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"


def _directory() -> pathlib.Path:
    setting = os.environ.get("XDG_CACHE_HOME")
    try:
        root = pathlib.Path(setting) if setting else pathlib.Path.home() / ".cache"
    except RuntimeError:
        raise UnavailableError(
            "there is no home directory, and XDG_CACHE_HOME is not set."
        ) from None
    return root / "recurrent_gates"


def _digest(compiler: list[str], command: list[str]) -> str:
    """Of all that the library depends on; a home directory may be that of several machines."""
    version = _output([*compiler, "--version"])
    sources = [pathlib.Path(command[-1]), *sorted(_SOURCES.glob("*.h"))]
    dependencies = (
        *(path.read_text() for path in sources),
        version,
        *command,
        jax.lib.__version__,
        _processor(),
    )
    return hashlib.sha256("\0".join(dependencies).encode()).hexdigest()[:16]


def _processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = ("model name", "flags", "CPU part", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(names)}))


def _compile(name: str, command: list[str], directory: pathlib.Path) -> pathlib.Path:
    """Compiles into a file of its own and moves it into place: others may do the same."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            _LOGGER.warning("compiling C++ kernels, once, some 20 seconds: %s", directory / name)
            file = pathlib.Path(folder) / "kernels.so"
            _output([*command, "-o", str(file)])
            path = directory / _named(name, file)
            _publish(file, path)
    except OSError as error:
        raise UnavailableError(f"kernels cannot be written to {directory}: {error}.") from None
    return path


def _publish(file: pathlib.Path, path: pathlib.Path) -> None:
    """Moves a file to where others look for it; one that they may have loaded is left to them."""
    try:
        os.link(file, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        file.replace(path)


def _output(command: list[str]) -> str:
    """What a program prints.

    Raises:
      UnavailableError: if it fails.
    """
    try:
        process = subprocess.Popen(
            command,
            env={**os.environ, "LC_ALL": "C"},  # a version is the same in every language
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # a compiler is several processes, which end together
        )
        with process:
            try:
                output, errors = process.communicate(timeout=_SECONDS)
            except BaseException:
                with contextlib.suppress(OSError):  # it may have ended
                    os.killpg(process.pid, signal.SIGKILL)
                raise
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"the C++ compiler cannot be run: {error}.") from None
    if process.returncode:
        lines = errors.strip().splitlines() or [f"exit status {process.returncode}"]
        message = next((line for line in lines if "error" in line), lines[-1])
        raise UnavailableError(f"the C++ compiler does not compile the kernels: {message}.")
    return output
