"""The .npy files that shardkit writes: raw images and the columns of the index.

This module makes the headers itself, since numpy's padding has changed over time. Readers compare
whole headers instead of parsing them, so a damaged header is always refused.
"""

from __future__ import annotations

import io
import math
import os
import re
import struct
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from shardkit.system.files import open_regular
from shardkit.system.safe_paths import naming

_MAGIC = b"\x93NUMPY\x01\x00"
_ALIGN = 64
_ROOM = 21
"""Spaces that numpy adds after the text, minus the digits of the first axis."""

_MOST_HEADER = 1 << 14
"""Bytes to search for the header of an .npy file; numpy itself refuses headers over 10,000."""

_SHAPE = re.compile(rb"\x93NUMPY\x01\x00(?s:..)\{[^\n(]*'shape': \(([0-9, ]{0,80})\)")


@lru_cache(maxsize=64)  # the header of every array of a dataset
def npy_header(shape: tuple[int, ...], dtype: npt.DTypeLike = np.uint8) -> bytes:
    """Return the header of an .npy file of version 1.0 with C-ordered values."""
    described = np.lib.format.dtype_to_descr(np.dtype(dtype))
    text = f"{{'descr': {described!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    text += " " * (_ROOM - len(str(shape[0])) if shape else 0)
    text += " " * (-(len(_MAGIC) + 2 + len(text) + 1) % _ALIGN) + "\n"
    return _MAGIC + struct.pack("<H", len(text)) + text.encode("ascii")


def npy_values(content: bytes) -> tuple[int, tuple[int, ...]]:
    """Return the offset of the uint8 values of an .npy file, and their shape.

    ValueError if ``content`` is not a complete .npy file with a header of `npy_header`.
    """
    match = _SHAPE.match(content)
    shape = tuple(map(int, re.findall(rb"[0-9]+", match[1]))) if match else ()
    header = npy_header(shape)
    if not content.startswith(header) or len(header) + math.prod(shape) != len(content):
        raise ValueError("not a complete .npy file of C-ordered uint8 values")
    return len(header), shape


def read_npy(content: bytes | bytearray | memoryview) -> npt.NDArray[Any]:
    """Return the array of a complete .npy file of version 1.0 or 2.0, as a copy.

    ValueError if ``content`` is not such a file, or one with Python objects.
    """
    head = io.BytesIO(content[:_MOST_HEADER])
    try:
        version = np.lib.format.read_magic(head)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, fortran, dtype = read(head)
    except Exception as error:  # from the parser of Python literals, in one of many ways
        raise ValueError(f"not an .npy file: {error}") from error
    start = head.tell()
    if dtype.hasobject or start + math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError(f"not a complete .npy file of plain values: {dtype}, shape {shape}")
    order: Literal["F", "C"] = "F" if fortran else "C"
    # Not np.frombuffer, which refuses empty arrays.
    return np.ndarray(shape, dtype, content, start, order=order).astype(dtype.newbyteorder("="))


def save_npy(path: Path, values: npt.NDArray[Any]) -> None:
    """Write a one-dimensional array."""
    with path.open("wb") as file:
        write_npy(file, values)


def write_npy(file: BinaryIO, values: npt.NDArray[Any]) -> None:
    """Write a one-dimensional array to an open file."""
    file.write(npy_header(values.shape, values.dtype))
    file.write(np.ascontiguousarray(values).data)


class NpyWriter:
    """Writes a one-dimensional array in blocks, all of one type, to a file that it replaces."""

    def __init__(self, path: Path, dtype: npt.DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        self._count = 0
        self._file = path.open("wb")
        self._file.write(npy_header((0,), self._dtype))  # as long as that of any length

    def append(self, values: npt.NDArray[Any]) -> None:
        """Write values after those before."""
        self._count += len(values)
        self._file.write(np.ascontiguousarray(values, self._dtype).data)

    def close(self) -> None:
        """Complete the file."""
        with self._file as file:
            file.seek(0)
            file.write(npy_header((self._count,), self._dtype))


class StoredValues:
    """The values of a file of `save_npy`, read on access.

    If the file is truncated later, access raises an error; a memory map would kill the process.
    OSError if it cannot be read; ValueError if it does not hold ``count`` values of that type.
    """

    def __init__(
        self, path: Path, dtype: npt.DTypeLike, count: int, root: Path | None = None
    ) -> None:
        self._made_of = path, dtype, count, root
        self._dtype = np.dtype(dtype)
        self._count = count
        self._file = open_regular(path, root)
        try:
            with naming(path):
                self._start = _find_values(self._file, self._dtype, count)
        except BaseException:
            self._file.close()
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._made_of

    def __len__(self) -> int:
        return self._count

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()

    def __getitem__(self, rows: slice) -> npt.NDArray[Any]:
        """Return a contiguous range of values; ValueError if the file was truncated meanwhile."""
        start, stop, _ = rows.indices(self._count)
        length = max(0, stop - start) * self._dtype.itemsize
        offset = self._start + start * self._dtype.itemsize
        data = np.empty(length, np.uint8)
        filled = 0
        with naming(self._made_of[0]):
            while filled < length:
                count = os.preadv(self._file.fileno(), [data.data[filled:]], offset + filled)
                if not count:
                    size = os.fstat(self._file.fileno()).st_size
                    raise ValueError(f"it was truncated at byte {size}")
                filled += count
        return data.view(self._dtype)


def map_npy(
    path: Path, dtype: npt.DTypeLike, count: int, root: Path | None = None
) -> npt.NDArray[Any]:
    """Return the ``count`` values of a file of `save_npy`, memory-mapped and read-only.

    OSError if it cannot be read; ValueError if it does not hold ``count`` values of that type.
    """
    with naming(path), open_regular(path, root) as file:
        start = _find_values(file, np.dtype(dtype), count)
        if count == 0:  # an empty range cannot be mapped
            return np.zeros(0, dtype)
        # A plain view: np.memmap slows down each access.
        return np.memmap(file, dtype, "r", start, (count,)).view(np.ndarray)


def _find_values(file: FileIO, dtype: np.dtype[Any], count: int) -> int:
    """Return the offset of the values of a file, after checking their number and type."""
    header = npy_header((count,), dtype)
    actual = file.read(len(header))
    size = os.fstat(file.fileno()).st_size
    if actual != header or size != len(header) + count * dtype.itemsize:
        raise ValueError(f"it is not an array of {count} values written by shardkit")
    return len(header)
