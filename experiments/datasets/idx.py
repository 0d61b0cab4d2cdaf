"""The idx format of MNIST and Fashion-MNIST, plain or gzipped."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import IO

import numpy as np

from experiments.datasets.damage import damaged, unreadable

_UINT8 = 0x08  # the code of the only type that these sets have
_CHUNK = 1 << 20


def read_idx(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """The bytes of an idx file, which must have the published shape.

    The header is compared with ``shape`` before anything is read, so that a damaged one costs
    no memory; the file must end where its array does.

    Args:
      path: a file; it is gzipped if its name ends in ``.gz``.
      shape: what the header must say.

    Returns:
      uint8 of that shape.

    Raises:
      UserError: if the file cannot be read or is damaged, with the place.
    """
    try:
        with path.open("rb") as file:
            if path.suffix != ".gz":
                return _parse(path, file, shape)
            with gzip.GzipFile(fileobj=file) as stream:
                return _parse(path, stream, shape)
    except OSError as error:
        raise unreadable(path, error) from None


def _parse(path: Path, stream: IO[bytes] | gzip.GzipFile, shape: tuple[int, ...]) -> np.ndarray:
    header = _read(path, stream, 0, 4 + 4 * len(shape))
    magic, expected = header[:4], bytes([0, 0, _UINT8, len(shape)])
    if magic != expected:
        raise damaged(path, 0, f"the magic number is {magic.hex()}, not {expected.hex()}")
    for index, published in enumerate(shape):
        offset = 4 + 4 * index
        size = int.from_bytes(header[offset : offset + 4], "big")
        if size != published:
            reason = f"dimension {index} is {size}, that of the published file {published}"
            raise damaged(path, offset, reason)
    start, count = len(header), math.prod(shape)
    body = _read(path, stream, start, count)
    if _read(path, stream, start + count, 1, optional=True):
        raise damaged(path, start + count, "there is more than the header tells of")
    return np.frombuffer(body, np.uint8).reshape(shape)


def _read(
    path: Path, stream: IO[bytes] | gzip.GzipFile, offset: int, count: int, optional: bool = False
) -> bytearray:
    """The next ``count`` bytes, from ``offset`` of the (unzipped) content; nothing at its end."""
    content = bytearray()
    while len(content) < count:
        try:
            chunk = stream.read(min(_CHUNK, count - len(content)))
        except EOFError:
            raise damaged(
                path, offset + len(content), "the compressed data are cut short"
            ) from None
        except (gzip.BadGzipFile, zlib.error) as error:
            reason = f"the compressed data are wrong ({error})"
            raise damaged(path, offset + len(content), reason) from None
        if not chunk:
            if optional and not content:
                break
            shortfall = count - len(content)
            raise damaged(
                path, offset + len(content), f"the content ends {shortfall} bytes too early"
            )
        content += chunk
    return content
