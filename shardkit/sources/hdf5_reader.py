"""Rows from other programs' HDF5 files; runs in the child of `library_process`."""

from __future__ import annotations

import io
import math
import os
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from shardkit.contracts import Range
from shardkit.errors import BadImage, ConversionFailed
from shardkit.sources.columns import one_hot
from shardkit.sources.labels import Value, label_of
from shardkit.system.helper import Library
from shardkit.system.text import size

h5py = Library("h5py")

MAX_READ = 1 << 30
"""Maximum bytes of one row, and of one chunk, which HDF5 reads as one."""

OTHERS = ("lists", "compounds", "references", "others")
"""Types of values that cannot be stored."""

_REFERENCE = struct.Struct("<IQI")
"""A value of variable length in a dataset: its length, its heap, and its number in that."""
_HEAP = struct.Struct("<4s4xQ")
_OBJECT = struct.Struct("<H6xQ")

_CONVERT = "convert it with `shardkit convert`"

_OPEN: dict[str, tuple[int, Any]] = {}
"""Open files by path, each with its stamp when it was opened."""
_MOST_OPEN = 64


def _open(path: str, stamp: int) -> Any:
    if _OPEN.get(path, (None,))[0] != stamp:
        if path in _OPEN:
            _OPEN.pop(path)[1].close()  # it has changed
        elif len(_OPEN) == _MOST_OPEN:
            _OPEN.pop(next(iter(_OPEN)))[1].close()
        try:
            _OPEN[path] = stamp, h5py.File(path, "r", locking=False)
        except OSError as error:
            if error.errno:  # not the content's fault
                raise
            if "open for write" in str(error):
                raise BadImage(
                    "it is open for writing",
                    remedy="close it in the program that writes it; if that program has ended, "
                    "run `h5clear -s` on the file",
                ) from error
            fault = "a damaged, truncated or unfinished" if h5py.is_hdf5(path) else "not an"
            raise BadImage(f"it is {fault} HDF5 file") from error
    return _OPEN[path][1]


def datasets(path: str, stamp: int) -> dict[str, tuple[list[int], str]]:
    """Return shape and type of each dataset of the file; of MATLAB's, as MATLAB states it.

    Except for its first axis, that of rows: it is MATLAB's last one.
    """
    return {name: (_shape(data), _type(data)) for name, data in _walk(_open(path, stamp))}


def _is_matlab(data: Any) -> bool:
    """Return whether MATLAB wrote a dataset: in memory, its first axis changes fastest."""
    return "MATLAB_class" in data.attrs


def _shape(data: Any) -> list[int]:
    shape = list(data.shape or ())
    return [*shape[:1], *reversed(shape[1:])] if _is_matlab(data) else shape


def sizes(path: str, stamp: int, name: str, start: int, count: int) -> list[int]:
    """Return the size of each encoded image of some rows."""
    data = _dataset(path, stamp, name)
    rows = data[start : start + count]
    return [len(_encoded(row)) for row in rows]


def labels(path: str, stamp: int, name: str, count: int, selected: Range) -> list[Value]:
    """Return the labels of some of ``count`` rows: integers or texts."""
    data = _dataset(path, stamp, name)
    is_row = len(data.shape) == 2 and data.shape == (1, count) and count != 1
    if data.shape[0] != count and not is_row:
        raise BadImage(f"it has {count} images but {data.shape[0]} labels")
    inside = slice(selected.offset, selected.offset + selected.length)
    if data.ndim == 2 and data.shape[1] > 1 and not is_row and data.dtype.kind in "iubf":
        return one_hot(data[inside], name)
    if math.prod(data.shape[1:]) != 1 and not is_row:
        raise BadImage(f"{name} has the shape {data.shape}, not one value for each image")
    rows = (0, inside) if is_row else inside
    if data.dtype.kind in "iubf":
        return [label_of(value, name) for value in data[rows].reshape(-1).tolist()]
    if h5py.check_string_dtype(data.dtype) is None:
        raise BadImage(
            f"the labels in {name} are {_type(data)}", remedy="store one integer or text per image"
        )
    texts = data[rows].reshape(-1)
    return [label_of(value.decode("utf-8", "surrogateescape"), name) for value in texts]


def read(path: str, stamp: int, name: str, row: int) -> bytes:
    """Return one row: an encoded image, or the values of an array in C order."""
    data = _dataset(path, stamp, name)
    if not 0 <= row < data.shape[0]:
        raise BadImage(f"{name} has only {data.shape[0]} rows")
    value = data[row].T if _is_matlab(data) and data.ndim > 1 else data[row]
    return np.ascontiguousarray(value).tobytes() if data.ndim > 1 else _encoded(value)


def offsets(path: str, stamp: int, name: str, rows: list[int]) -> list[int | None]:
    """Return where the file has the bytes of each row, or None.

    Rows have bytes of their own in contiguous datasets and in chunks of whole rows, unless a filter
    such as compression changes them. Bytes of variable length are in a heap.

    It raises BadImage if chunks do not have the bytes of rows.
    """
    data = _dataset(path, stamp, name)
    if _is_matlab(data) and data.ndim > 2:
        raise BadImage("MATLAB stores its pixels column by column", remedy=_CONVERT)
    width = data.id.get_type().get_size() * math.prod(data.shape[1:])
    starts = _chunks(data) if data.chunks else None
    in_heap = h5py.check_vlen_dtype(data.dtype) is not None or (
        (text := h5py.check_string_dtype(data.dtype)) is not None and text.length is None
    )
    result: list[int | None] = []
    with open(path, "rb") as file:
        base = data.file.id.get_create_plist().get_userblock()
        heaps = _Heaps(file, base)
        for row in rows:
            start = data.id.get_offset()
            inside = row
            if starts is not None:
                start = starts.get(row // data.chunks[0])
                inside = row % data.chunks[0]
            offset = None if start is None else start + inside * width
            result.append(heaps.find(offset) if in_heap and offset is not None else offset)
    return result


def _chunks(data: Any) -> dict[int, int]:
    """Return the offset of each chunk, by its number."""
    if data.id.get_create_plist().get_nfilters():
        raise BadImage("its chunks are compressed or filtered", remedy=_CONVERT)
    if data.chunks[1:] != data.shape[1:]:
        raise BadImage("its chunks contain parts of rows", remedy=_CONVERT)
    if not hasattr(data.id, "chunk_iter"):  # HDF5 before 1.12.3
        raise BadImage("this version of HDF5 cannot list chunks", remedy="update h5py")
    offsets: dict[int, int] = {}

    def add(chunk: Any) -> None:
        offsets[chunk.chunk_offset[0] // data.chunks[0]] = chunk.byte_offset

    data.id.chunk_iter(add)
    return offsets


class _Heaps:
    """The heaps of a file, in which HDF5 stores values of variable length.

    The layout is that of the "HDF5 File Format Specification", "Global Heap". What is found is
    compared with what the library reads.
    """

    def __init__(self, file: BinaryIO, base: int) -> None:
        self._file = file
        self._base = base
        self._known: dict[int, dict[int, int]] = {}
        self._left = os.fstat(file.fileno()).st_size
        """Bytes that heaps may have: they do not overlap."""

    def find(self, offset: int) -> int | None:
        """Return where the value is to which the element at an offset refers."""
        self._file.seek(offset)
        element = self._file.read(_REFERENCE.size)
        if len(element) < _REFERENCE.size:
            return None
        _, heap, number = _REFERENCE.unpack(element)
        if heap not in self._known:
            self._known[heap] = self._objects(heap + self._base)
        return self._known[heap].get(number)

    def _objects(self, start: int) -> dict[int, int]:
        offsets: dict[int, int] = {}
        if start >= 1 << 62:
            return offsets
        self._file.seek(start)
        head = self._file.read(_HEAP.size)
        if len(head) < _HEAP.size or head[:4] != b"GCOL":
            return offsets
        size = int(_HEAP.unpack(head)[1])
        self._left -= size
        if self._left < 0:
            raise BadImage("its heaps overlap")
        at = start + _HEAP.size
        end = start + size
        while at + _OBJECT.size <= end:
            self._file.seek(at)
            entry = self._file.read(_OBJECT.size)
            if len(entry) < _OBJECT.size or not entry[0] | entry[1]:
                break  # free space is last
            number, length = _OBJECT.unpack(entry)
            offsets[number] = at + _OBJECT.size
            at += _OBJECT.size + length + -length % 8
        return offsets


def value(path: str, stamp: int, name: str, row: int, optional: bool = False) -> bytes:
    """Return the value in a row: ``B`` and bytes, or ``N`` and an .npy file.

    If ``optional``, a missing dataset gives no bytes.
    """
    if optional and _find(path, stamp, name) is None:
        return b""
    data = _dataset(path, stamp, name)
    if not 0 <= row < data.shape[0]:
        raise BadImage(f"{name} has only {data.shape[0]} rows")
    return _value(data, row, data.ndim == 1)


def value_of(path: str, stamp: int, name: str, image: bool = True) -> bytes:
    """Return the value of a dataset: ``B`` and bytes, or ``N`` and an .npy file.

    If ``image``, uint8 values in one axis are the bytes of an encoded image.
    """
    data = _dataset(path, stamp, name, is_whole=True)
    if image and data.ndim == 1 and data.dtype == np.uint8:
        return b"B" + bytes(data[:].tobytes())
    return _value(data, (), data.ndim == 0)


def _value(data: Any, row: Any, is_one: bool) -> bytes:
    if is_one and _type(data) == "bytes":
        return b"B" + _encoded(data[row])
    file = io.BytesIO()
    array = np.asarray(data[row])
    np.save(file, array.T if _is_matlab(data) else array, allow_pickle=False)
    return b"N" + file.getvalue()


def _encoded(value: Any) -> bytes:
    """Return the encoded image in one value of a dataset with one axis."""
    if isinstance(value, np.ndarray):
        return bytes(value.tobytes())
    if isinstance(value, np.void):
        return bytes(value.tobytes()).rstrip(b"\0")
    return bytes(value)  # fixed or variable length; zeros at the end of a fixed one are gone


def _type(data: Any) -> str:
    """Return ``bytes``, also for texts, the name of a type of numbers, or one of `OTHERS`."""
    of_items = h5py.check_vlen_dtype(data.dtype)
    if of_items is not None and np.dtype(of_items).itemsize == 1:
        return "bytes"
    if h5py.check_string_dtype(data.dtype) is not None:
        return "bytes"
    if of_items is not None:
        return "lists"
    if data.dtype.names or h5py.check_ref_dtype(data.dtype) is not None:
        return "compounds" if data.dtype.names else "references"
    if data.dtype.kind == "V":
        return "bytes"
    return str(data.dtype) if data.dtype.kind in "iufb" else "others"


def _walk(
    group: Any, prefix: str = "", depth: int = 8, seen: dict[int, int] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield the datasets of a group; links to other files are not followed.

    A group with several names is walked once, or again if it is less deep there.
    """
    seen = {} if seen is None else seen
    address = h5py.h5o.get_info(group.id).addr
    if seen.get(address, -1) >= depth:
        return
    seen[address] = depth
    for name in group:
        link = group.get(name, getlink=True)
        if not isinstance(link, h5py.HardLink):
            continue
        item = group.get(name)
        if isinstance(item, h5py.Dataset):
            yield prefix + name, item
        elif isinstance(item, h5py.Group) and depth:
            yield from _walk(item, f"{prefix}{name}/", depth - 1, seen)


def _find(path: str, stamp: int, name: str) -> Any:
    """Return a dataset, or None if the file has none of this name."""
    item = _open(path, stamp)
    for component in name.strip("/").split("/"):
        link = item.get(component, getlink=True) if isinstance(item, h5py.Group) else None
        if not isinstance(link, h5py.HardLink):
            return None
        item = item[component]
    return item if isinstance(item, h5py.Dataset) else None


def _dataset(path: str, stamp: int, name: str, *, is_whole: bool = False) -> Any:
    """Return a dataset whose values are all in this file, to read by row or as a whole."""
    dataset = _find(path, stamp, name)
    if dataset is None:
        raise BadImage(f"it has no dataset {name}")
    if not dataset.shape and not is_whole:
        raise BadImage(f"{name} is not a dataset with rows")
    if dataset.external or dataset.is_virtual:
        raise BadImage(f"the values of {name} are in other files")
    outer = ("value", dataset.shape or ()) if is_whole else ("row", dataset.shape[1:])
    for unit, sides in (outer, ("chunk", dataset.chunks or ())):
        count = dataset.dtype.itemsize * math.prod(sides)
        if count > MAX_READ:
            raise ConversionFailed(
                f"a {unit} of {name} has {size(count)}, over the limit of {size(MAX_READ)}"
            )
    return dataset
