"""Rows of other programs' HDF5 files; runs in the child of `library_process`."""

from __future__ import annotations

import io
import json
import math
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO

import h5py
import numpy as np

from shardkit.errors import BadImage

MAX_ROW = 1 << 31
"""Maximum bytes of one row."""

_REFERENCE = struct.Struct("<IQI")
"""A value of variable length in a dataset: its length, its heap, and its number in that."""
_HEAP = struct.Struct("<4s4xQ")
_OBJECT = struct.Struct("<H6xQ")
_MOST_HEAPS = 1000

_OPEN: dict[str, tuple[int, Any]] = {}
"""Open files by path, each with its stamp when it was opened."""
_MOST_OPEN = 64


def _open(path: str, stamp: int) -> Any:
    if _OPEN.get(path, (None,))[0] != stamp:
        if path in _OPEN:
            _OPEN.pop(path)[1].close()  # it has changed
        elif len(_OPEN) == _MOST_OPEN:
            _OPEN.pop(next(iter(_OPEN)))[1].close()
        _OPEN[path] = stamp, h5py.File(path, "r", locking=False)
    return _OPEN[path][1]


def datasets(path: str, stamp: int) -> bytes:
    """Return as JSON name, shape and type of each dataset of the file."""
    found = [
        (name, list(each.shape or ()), _type(each)) for name, each in _walk(_open(path, stamp))
    ]
    return json.dumps(found).encode()


def sizes(path: str, stamp: int, name: str, start: int, count: int) -> bytes:
    """Return as JSON the size of each encoded image of some rows."""
    data = _dataset(path, stamp, name)
    rows = data[start : start + count]
    return json.dumps([len(_encoded(data, row)) for row in rows]).encode()


def labels(path: str, stamp: int, name: str) -> bytes:
    """Return as JSON the labels of all rows: integers or texts."""
    data = _dataset(path, stamp, name)
    if data.shape[1:] not in ((), (1,)):
        raise BadImage(f"{name} has the shape {data.shape}, not one label for each image")
    values = data[:].reshape(-1)
    if values.dtype.kind in "iub":
        return json.dumps([int(value) for value in values]).encode()
    if values.dtype.kind not in "OS":
        raise BadImage(f"{name} has values of the type {_type(data)}, neither integers nor texts")
    texts = [value if isinstance(value, bytes) else str(value).encode() for value in values]
    return json.dumps([text.decode("utf-8", "surrogateescape") for text in texts]).encode()


def read(path: str, stamp: int, name: str, row: int) -> bytes:
    """Return one row: an encoded image, or the values of an array in C order."""
    data = _dataset(path, stamp, name)
    if not 0 <= row < data.shape[0]:
        raise BadImage(f"{name} has only {data.shape[0]} rows")
    value = data[row]
    return np.ascontiguousarray(value).tobytes() if data.ndim > 1 else _encoded(data, value)


def offsets(path: str, stamp: int, name: str, rows: list[int]) -> bytes:
    """Return as JSON where the file has the bytes of each row, or null.

    Rows have bytes of their own in contiguous datasets and in chunks of whole rows, unless a filter
    such as compression changes them. Bytes of variable length are in a heap.

    Raises:
        BadImage: If its chunks do not have the bytes of rows.
    """
    data = _dataset(path, stamp, name)
    width = data.id.get_type().get_size() * math.prod(data.shape[1:])
    starts = _chunks(data) if data.chunks else None
    in_heap = h5py.check_vlen_dtype(data.dtype) is not None or (
        (text := h5py.check_string_dtype(data.dtype)) is not None and text.length is None
    )
    found: list[int | None] = []
    with open(path, "rb") as file:
        base = data.file.id.get_create_plist().get_userblock()
        heaps = _Heaps(file, base)
        for row in rows:
            start, place = data.id.get_offset(), row
            if starts is not None:
                start, place = starts.get(row // data.chunks[0]), row % data.chunks[0]
            offset = None if start is None else start + place * width
            found.append(heaps.find(offset) if in_heap and offset is not None else offset)
    return json.dumps(found).encode()


def _chunks(data: Any) -> dict[int, int]:
    """Return the offset of each chunk, by its number.

    Raises:
        BadImage: If chunks do not have the bytes of rows.
    """
    if data.id.get_create_plist().get_nfilters():
        raise BadImage("its chunks are compressed or filtered")
    if data.chunks[1:] != data.shape[1:]:
        raise BadImage("its chunks have parts of rows")
    if not hasattr(data.id, "chunk_iter"):  # HDF5 before 1.12.3
        raise BadImage("this version of HDF5 cannot list chunks: update h5py")
    found: dict[int, int] = {}

    def add(chunk: Any) -> None:
        found[chunk.chunk_offset[0] // data.chunks[0]] = chunk.byte_offset

    data.id.chunk_iter(add)
    return found


class _Heaps:
    """The heaps of a file, in which HDF5 stores values of variable length.

    The layout is that of the "HDF5 File Format Specification", "Global Heap". What is found is
    compared with what the library reads.
    """

    def __init__(self, file: BinaryIO, base: int) -> None:
        self._file = file
        self._base = base
        self._known: dict[int, dict[int, int]] = {}

    def find(self, offset: int) -> int | None:
        """Return where the value is to which the element at an offset refers."""
        self._file.seek(offset)
        element = self._file.read(_REFERENCE.size)
        if len(element) < _REFERENCE.size:
            return None
        _, heap, number = _REFERENCE.unpack(element)
        if heap not in self._known:
            if len(self._known) == _MOST_HEAPS:
                self._known.clear()
            self._known[heap] = self._objects(heap + self._base)
        return self._known[heap].get(number)

    def _objects(self, start: int) -> dict[int, int]:
        found: dict[int, int] = {}
        if start >= 1 << 62:
            return found
        self._file.seek(start)
        head = self._file.read(_HEAP.size)
        if len(head) < _HEAP.size or head[:4] != b"GCOL":
            return found
        at, end = start + _HEAP.size, start + _HEAP.unpack(head)[1]
        while at + _OBJECT.size <= end:
            self._file.seek(at)
            entry = self._file.read(_OBJECT.size)
            if len(entry) < _OBJECT.size or not entry[0] | entry[1]:
                break  # free space is last
            number, size = _OBJECT.unpack(entry)
            found[number] = at + _OBJECT.size
            at += _OBJECT.size + size + -size % 8
        return found


def value(path: str, stamp: int, name: str, row: int, optional: bool = False) -> bytes:
    """Return the value in a row: ``B`` and bytes, or ``N`` and an .npy file.

    Args:
        path: The file.
        stamp: Its modification time.
        name: The dataset.
        row: The row.
        optional: Whether to return nothing if there is no such dataset.
    """
    if optional and name not in dict(_walk(_open(path, stamp))):
        return b""
    data = _dataset(path, stamp, name)
    if not 0 <= row < data.shape[0]:
        raise BadImage(f"{name} has only {data.shape[0]} rows")
    if data.ndim == 1 and _type(data) == "bytes":
        return b"B" + _encoded(data, data[row])
    file = io.BytesIO()
    np.save(file, np.asarray(data[row]), allow_pickle=False)
    return b"N" + file.getvalue()


def _encoded(data: Any, value: Any) -> bytes:
    """Return the encoded image in one value of a dataset with one axis."""
    if isinstance(value, np.ndarray):
        return bytes(value.tobytes())
    if isinstance(value, np.void):
        return bytes(value.tobytes()).rstrip(b"\0")
    return bytes(value)  # fixed or variable length; zeros at the end of a fixed one are gone


def _type(data: Any) -> str:
    """Return ``bytes`` for values of encoded images, or the name of a type of numbers."""
    of_items = h5py.check_vlen_dtype(data.dtype)
    if of_items is not None and np.dtype(of_items).itemsize == 1:
        return "bytes"
    if h5py.check_string_dtype(data.dtype) is not None or data.dtype.kind == "V":
        return "bytes" if not data.dtype.names else "other"
    return str(data.dtype) if data.dtype.kind in "iufb" else "other"


def _walk(group: Any, prefix: str = "", depth: int = 8) -> Iterator[tuple[str, Any]]:
    """Yield the datasets of a group; links to other files are not followed."""
    for name in group:
        link = group.get(name, getlink=True)
        if not isinstance(link, h5py.HardLink):
            continue
        found = group.get(name)
        if isinstance(found, h5py.Dataset):
            yield prefix + name, found
        elif isinstance(found, h5py.Group) and depth:
            yield from _walk(found, f"{prefix}{name}/", depth - 1)


def _dataset(path: str, stamp: int, name: str) -> Any:
    """Return a dataset whose values are all in this file."""
    found = _open(path, stamp)
    for part in name.strip("/").split("/"):
        link = found.get(part, getlink=True) if isinstance(found, h5py.Group) else None
        if not isinstance(link, h5py.HardLink):
            raise BadImage(f"there is no dataset {name}")
        found = found[part]
    if not isinstance(found, h5py.Dataset) or not found.shape:
        raise BadImage(f"{name} is not a dataset with rows")
    if found.external or found.is_virtual:
        raise BadImage(f"the values of {name} are in other files")
    if found.ndim > 1 and found.dtype.itemsize * np.prod(found.shape[1:], dtype=object) > MAX_ROW:
        raise BadImage(f"the rows of {name} have over {MAX_ROW} bytes")
    return found
