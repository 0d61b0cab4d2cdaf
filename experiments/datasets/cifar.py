"""The python batches of CIFAR-10, read without running what a pickle may contain.

A pickle is a program. These files need two dozen of its instructions, and of all Python objects
only a NumPy array of bytes; ``_Program`` knows these instructions and nothing else, calls
nothing, and takes no more memory than the file has bytes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from experiments.datasets.damage import damaged, unreadable
from experiments.settings.errors import UserError

SHAPE = (32, 32, 3)
_PIXELS = 32 * 32 * 3
_MEMO = 1 << 20  # largest memo number; the published files stay far below
_EXTRA = 1 << 20  # bytes that a batch may have beside its images, and as many again per image
_PER_IMAGE = 2 * _PIXELS


def read_batch(path: Path, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of one batch.

    Args:
      path: a file such as ``data_batch_1``.
      count: how many images it must have.

    Returns:
      uint8 ``[count, 32, 32, 3]`` and uint8 ``[count]``.

    Raises:
      UserError: if the file cannot be read or is damaged, with the place.
    """
    limit = _EXTRA + _PER_IMAGE * count
    try:
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise unreadable(path, error) from None
    if len(content) > limit:
        raise damaged(path, limit, f"it goes on, too long for {count} images")
    batch = _Program(path, content).run()
    end = len(content)
    data, labels = batch.get(b"data"), batch.get(b"labels")
    if not isinstance(data, _Array) or not isinstance(labels, list):
        raise damaged(path, end, "there is no array 'data' or no list 'labels'")
    if data.shape != (count, _PIXELS) or len(data.content) != count * _PIXELS:
        reason = f"{len(data.content)} bytes in the shape {data.shape}, not {(count, _PIXELS)}"
        raise damaged(path, data.offset, reason)
    if len(labels) != count:
        raise damaged(path, end, f"{len(labels)} labels for {count} images")
    for index, label in enumerate(labels):
        if type(label) is not int or not 0 <= label < 10:
            raise damaged(path, end, f"label {index} is no number from 0 to 9")
    planes = np.frombuffer(data.content, np.uint8)
    rows = planes.reshape((count, _PIXELS), order="F" if data.fortran else "C")
    images = rows.reshape(count, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), np.array(labels, np.uint8)


class _Name(enum.Enum):
    """Stands for one of the three objects of NumPy that a batch names, or for a made one."""

    RECONSTRUCT = enum.auto()
    ARRAY = enum.auto()
    DTYPE = enum.auto()
    BYTES = enum.auto()  # what DTYPE makes of "u1"


class _Array:
    """What a pickled NumPy array says of itself, and where it says it."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.shape: tuple[int, ...] = ()
        self.fortran = False
        self.content = b""


_NAMES = {
    b"numpy.core.multiarray\n_reconstruct\n": _Name.RECONSTRUCT,
    b"numpy._core.multiarray\n_reconstruct\n": _Name.RECONSTRUCT,
    b"numpy\nndarray\n": _Name.ARRAY,
    b"numpy\ndtype\n": _Name.DTYPE,
}
_MARK = object()


class _Program:
    """Runs the instructions of a pickle that the published batches consist of."""

    def __init__(self, path: Path, content: bytes) -> None:
        self._path, self._content = path, content
        self._position = 0  # the next byte
        self._start = 0  # of the instruction
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> dict[bytes, Any]:
        """The dictionary that the program leaves."""
        while True:
            self._start = self._position
            code = self._take(1)
            if code == b".":
                result = self._pop(dict)
                if self._stack or self._position != len(self._content):
                    raise self._error("the batch ends before the file does")
                return result
            step = _INSTRUCTIONS.get(code)
            if step is None:
                raise self._error(f"a batch has no instruction {code!r}")
            step(self)

    def _error(self, reason: str) -> UserError:
        return damaged(self._path, self._start, reason)

    def _take(self, count: int) -> bytes:
        end = self._position + count
        if end > len(self._content):
            raise damaged(self._path, len(self._content), "the file is cut short")
        self._position, start = end, self._position
        return self._content[start:end]

    def _number(self, size: int, signed: bool = False) -> int:
        return int.from_bytes(self._take(size), "little", signed=signed)

    def _pop(self, kind: type) -> Any:
        top = self._stack[-1] if self._stack else _MARK
        if top is _MARK or not isinstance(top, kind):
            raise self._error("an instruction finds the wrong things")
        return self._stack.pop()

    def _pop_to_mark(self) -> list[Any]:
        items: list[Any] = []
        while self._stack:
            item = self._stack.pop()
            if item is _MARK:
                return items[::-1]
            items.append(item)
        raise self._error("an instruction finds the wrong things")

    # The instructions.

    def protocol(self) -> None:
        if self._number(1) != 2:
            raise self._error("it is no pickle of protocol 2")

    def name(self) -> None:
        for text, name in _NAMES.items():
            if self._content.startswith(text, self._position):
                self._take(len(text))
                self._stack.append(name)
                return
        raise self._error("it asks for an object that no batch needs")

    def string(self, size: int) -> None:
        count = self._number(size)
        self._stack.append(self._take(count))

    def tuple_of(self, count: int) -> None:
        items = [self._pop(object) for _ in range(count)]
        self._stack.append(tuple(items[::-1]))

    def marked_tuple(self) -> None:
        self._stack.append(tuple(self._pop_to_mark()))

    def appends(self) -> None:
        items = self._pop_to_mark()
        self._top(list).extend(items)

    def append(self) -> None:
        item = self._pop(object)
        self._top(list).append(item)

    def set_items(self) -> None:
        self._fill(self._pop_to_mark())

    def set_item(self) -> None:
        value, key = self._pop(object), self._pop(object)
        self._fill([key, value])

    def _fill(self, items: list[Any]) -> None:
        target = self._top(dict)
        if len(items) % 2 or not all(isinstance(key, bytes) for key in items[::2]):
            raise self._error("a key is no text")
        target.update(zip(items[::2], items[1::2], strict=True))

    def _top(self, kind: type) -> Any:
        top = self._pop(kind)
        self._stack.append(top)
        return top

    def put(self, size: int) -> None:
        number = self._number(size)
        if number > _MEMO:
            raise self._error(f"the memo number {number} is too large")
        self._memo[number] = self._top(object)

    def get(self, size: int) -> None:
        number = self._number(size)
        if number not in self._memo:
            raise self._error(f"there is no memo {number}")
        self._stack.append(self._memo[number])

    def call(self) -> None:
        arguments, function = self._pop(tuple), self._pop(_Name)
        first = arguments[0] if arguments else None
        if function is _Name.RECONSTRUCT and first is _Name.ARRAY:
            self._stack.append(_Array(self._start))
        elif function is _Name.DTYPE and isinstance(first, bytes) and first in (b"u1", b"|u1"):
            self._stack.append(_Name.BYTES)
        else:
            raise self._error("it asks for an array that is not of bytes")

    def build(self) -> None:
        state, target = self._pop(tuple), self._top(object)
        if target is _Name.BYTES:
            return  # byte order and the like, which bytes do not have
        if not isinstance(target, _Array) or len(state) != 5:
            raise self._error("it asks for an object that no batch needs")
        _, shape, dtype, fortran, content = state
        valid_shape = isinstance(shape, tuple) and all(type(size) is int for size in shape)
        if not (valid_shape and dtype is _Name.BYTES and isinstance(content, bytes)):
            raise self._error("it asks for an array that is not of bytes")
        target.offset = self._start
        target.shape, target.fortran, target.content = shape, bool(fortran), content

    def push(self, value: Any) -> None:
        self._stack.append(value)


_INSTRUCTIONS: dict[bytes, Callable[[_Program], None]] = {
    b"\x80": _Program.protocol,
    b"}": lambda program: program.push({}),
    b"]": lambda program: program.push([]),
    b"(": lambda program: program.push(_MARK),
    b")": lambda program: program.push(()),
    b"N": lambda program: program.push(None),
    b"\x88": lambda program: program.push(True),
    b"\x89": lambda program: program.push(False),
    b"K": lambda program: program.push(program._number(1)),
    b"M": lambda program: program.push(program._number(2)),
    b"J": lambda program: program.push(program._number(4, signed=True)),
    b"U": lambda program: program.string(1),
    b"T": lambda program: program.string(4),
    b"c": _Program.name,
    b"t": _Program.marked_tuple,
    b"\x85": lambda program: program.tuple_of(1),
    b"\x86": lambda program: program.tuple_of(2),
    b"\x87": lambda program: program.tuple_of(3),
    b"a": _Program.append,
    b"e": _Program.appends,
    b"s": _Program.set_item,
    b"u": _Program.set_items,
    b"q": lambda program: program.put(1),
    b"r": lambda program: program.put(4),
    b"h": lambda program: program.get(1),
    b"j": lambda program: program.get(4),
    b"R": _Program.call,
    b"b": _Program.build,
}
