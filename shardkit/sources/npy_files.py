"""Headers of .npy files and members of .npz files made by NumPy, without unpickling anything."""

from __future__ import annotations

import itertools
import math
import os
import re
import struct
import sys
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.contracts import LOOSE, PackedEntries, ReadTogether
from shardkit.errors import BadImage
from shardkit.record_columns import described_columns
from shardkit.sources.driver import Listing
from shardkit.sources.folders import LocalFolder, is_split_name
from shardkit.sources.images import require_machine
from shardkit.sources.inputs import OpenedFile, reading
from shardkit.sources.labels import Value, label_of
from shardkit.sources.zip_file import Member, enter_member, member_in, read_head, read_member
from shardkit.system import compiled
from shardkit.system.files import as_name, as_text
from shardkit.system.npy import npy_header
from shardkit.system.text import quoted

_MAGIC = b"\x93NUMPY"
_USUAL = 128
"""Bytes of a usual header with what precedes it."""
_LONGEST = 1 << 14
"""Maximum bytes of a header; those of plain arrays have 118."""
_MOST_UNPACKED = 1 << 28
"""Maximum bytes to unpack in memory."""
_CHUNK = 1 << 20
"""Bytes to compare at a time."""
_MOST_LABELS = 1 << 30
_LABELS = 1 << 14
"""Labels to read at a time."""
_DESCR = re.compile(r"'descr': *'([<>|=]?[biufSU][0-9]{1,9})'")
_ORDER = re.compile(r"'fortran_order': *(True|False)")
_SHAPE = re.compile(r"'shape': *\(([0-9L, ]{0,400})\)")


class Array(NamedTuple):
    """An array in a file."""

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    start: int
    """Offset of its values."""
    fortran: bool

    @property
    def rows(self) -> int:
        """The length of the first axis."""
        return self.shape[0]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {'x'.join(map(str, self.shape)) or 'scalar'}"


@contextmanager
def opened(path: str, member: str, stamp: int | None = None) -> Iterator[OpenedFile]:
    """Open an .npy file, or a member of an .npz file; ``member`` is "" for the former."""
    with reading(path, stamp) as view:
        if member:
            enter_member(view, _find_member(path, member))
        yield view


@contextmanager
def opened_once(
    path: str, member: str, stamp: int | None = None, *, header: bool = False
) -> Iterator[OpenedFile | _Bytes]:
    """As `opened`, but unpack a member in memory: `opened` keeps it on disk for more reads.

    If ``header``, only the header is read.
    """
    with reading(path, stamp) as view:
        if not member:
            yield view
            return
        found = _find_member(path, member)
        size = max(found.size, int(found.packed or 0))
        if found.packed and size > _MOST_UNPACKED:
            raise BadImage(f"{member} has {size:,} bytes, over the limit of {_MOST_UNPACKED:,}")
        if header:
            data = read_head(view, found, _LONGEST + 12)
        else:
            data, _ = read_member(view, found, image=False)
        yield _Bytes(data, found.size, view.stamp)


def members(path: str) -> list[str]:
    """Return the names of the arrays in an .npz file, in its order, without ``.npy``."""
    with _bad_archive(path), zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        if len(set(names)) < len(names):
            name, _ = Counter(names).most_common(1)[0]
            raise ValueError(f"it has several members called {quoted(name)}")
        return [name.removesuffix(".npy") for name in names if name.endswith(".npy")]


def require_intact(path: str, member: str) -> None:
    """Compare a member of an .npz file with its CRC-32, before its rows are read one by one.

    It raises BadImage if they differ; an .npy file has no checksum.
    """
    if member:
        actual = 0
        with opened(path, member) as view:
            for offset in range(0, view.size, _CHUNK):
                actual = zlib.crc32(view.read(offset, _CHUNK), actual)
        if actual != _find_member(path, member).checksum:
            raise BadImage(f"the CRC-32 of {member} does not match the archive's")


@contextmanager
def _bad_archive(path: str) -> Iterator[None]:
    try:
        yield
    except (zipfile.BadZipFile, KeyError, OSError, ValueError, NotImplementedError) as error:
        if isinstance(error, OSError):
            require_machine(error, path)
        raise BadImage(f"it is not an .npz file: {error}") from error


def _find_member(path: str, member: str) -> Member:
    """Find a member of an archive."""
    with _bad_archive(path), zipfile.ZipFile(path) as archive:
        found = member_in(archive.getinfo(f"{member}.npy"))
    if found.why:
        raise BadImage(f"{member}: {found.why}")
    return found


class _Bytes:
    """Bytes in memory, read like a file."""

    def __init__(self, data: bytes, size: int | None = None, stamp: int = 0) -> None:
        self._data = data
        self.size = len(data) if size is None else size
        self.stamp = stamp

    def read(self, offset: int, length: int) -> bytes:
        return self._data[offset : offset + length]


def parse_header(view: OpenedFile | _Bytes) -> Array:
    """Return the array that the header of an .npy file describes.

    It raises BadImage if it is not a complete .npy file of plain values.
    """
    head = view.read(0, _USUAL)
    if head[:6] != _MAGIC or len(head) < 12:
        raise BadImage("it is not an .npy file")
    if head[6] == 1:
        (length,), start = struct.unpack_from("<H", head, 8), 10
    elif head[6] in (2, 3):
        (length,), start = struct.unpack_from("<I", head, 8), 12
    else:
        raise BadImage(f"it is an .npy file with an unknown version, {head[6]}")
    if length > _LONGEST:
        raise BadImage(f"its header has {length} bytes, over the limit of {_LONGEST}")
    header = head[start : start + length]
    if len(header) < length:
        header = view.read(start, length)
    if len(header) < length:
        raise BadImage("it is truncated in its header")
    return _array(header, start + length, view.size)


def usual_arrays(paths: Sequence[str]) -> Iterator[tuple[Array, int] | None]:
    """Yield array and modification time of each .npy file with a usual header, None for others."""
    heads = compiled.read_heads([*map(os.fsencode, paths)], _USUAL)
    for path, (size, stamp, head) in zip(paths, heads, strict=True):
        array = _usual_array(head, size) if size >= 0 and path.endswith(".npy") else None
        yield array and (array, stamp)


@lru_cache(maxsize=64)
def _usual_array(head: bytes, size: int) -> Array | None:
    with suppress(BadImage):  # `parse_header` of the file says why
        return parse_header(_Bytes(head, size))
    return None


@lru_cache(maxsize=64)
def _array(header: bytes, start: int, size: int) -> Array:
    """Return the array of a header, whose values start there, in a file of ``size`` bytes."""
    text = header.decode("latin-1")
    descr, order, shape = (p.search(text) for p in (_DESCR, _ORDER, _SHAPE))
    if descr is None or order is None or shape is None:
        kind = "values that are not plain numbers or text"
        if "'|O'" in text:
            kind = "pickled objects, which could run any code"
        elif "V2'" in text:
            kind = "2-byte values without a type; for bfloat16, save x.view('uint16')"
        raise BadImage(f"it holds {kind}: {quoted(text.strip())}")
    try:
        dtype: np.dtype[np.generic] = np.dtype(descr[1])
    except TypeError as error:
        raise BadImage(f"its values have the unknown type {quoted(descr[1])}") from error
    if not dtype.itemsize:
        raise BadImage("its values have a size of 0 bytes")
    sides = tuple(int(number) for number in re.findall("[0-9]+", shape[1]))
    if math.prod(side or 1 for side in sides) * dtype.itemsize > sys.maxsize:
        raise BadImage(f"its shape is not valid: {quoted(sides)}")  # not even an empty one
    array = Array(dtype, sides, start, order[1] == "True" and len(sides) > 1)
    if array.start + math.prod(sides) * dtype.itemsize != size:
        raise BadImage(f"its size, {size} bytes, is wrong for {array}")
    return array


def read_array(data: bytes) -> npt.NDArray[np.generic]:
    """Return the array of an .npy file in memory; BadImage as for `parse_header`."""
    view = _Bytes(data)
    return whole(view, parse_header(view))


def whole(view: OpenedFile | _Bytes, array: Array) -> npt.NDArray[np.generic]:
    """Return all values of an array; BadImage if the file is truncated."""
    size = math.prod(array.shape) * array.dtype.itemsize
    content: npt.NDArray[np.generic] = np.frombuffer(_read(view, array.start, size), array.dtype)
    return content.reshape(array.shape, order="F" if array.fortran else "C")


def values(
    view: OpenedFile | _Bytes, array: Array, row: int, count: int
) -> npt.NDArray[np.generic]:
    """Return rows of an array that is not in Fortran order; BadImage if the file is truncated."""
    data = _read(view, array.start + row * array.row_bytes, count * array.row_bytes)
    return np.frombuffer(data, array.dtype).reshape(count, *array.shape[1:])


def _read(view: OpenedFile | _Bytes, offset: int, size: int) -> bytes:
    data = view.read(offset, size)
    if len(data) != size:
        raise BadImage("the file is truncated")
    return data


def read_records(
    folder: str,
    entries: PackedEntries,
    stored: str,
    kind: tuple[tuple[int, ...], np.dtype[np.generic]],
) -> ReadTogether:
    """Return the records of .npy files as NumPy writes them, which were not changed since a scan.

    The values become the field ``stored``. ``kind`` is the shape and type of their arrays. It
    returns None for any other file.
    """
    header = npy_header(*kind)
    shape, dtype = kind
    size = len(header) + math.prod(shape) * dtype.itemsize
    stats = np.full(len(entries), size), np.array(entries.numbers("stamp"))
    paths = entries.paths()
    contents = compiled.read_files([os.fsencode(folder + as_name(p)) for p in paths], stats, header)
    labels = entries.numbers("label")
    records = described_columns(entries.keys(), paths, labels, {stored: contents})
    if None not in contents:
        return records
    return [
        None if content is None else record
        for content, record in zip(contents, records, strict=True)
    ]


def labels_of(path: str, member: str, name: str, rows: int) -> Iterator[Value]:
    """Return the labels of all rows, which are read when they are used.

    It raises BadImage if the array ``name`` does not hold a label for each row.
    """
    with opened(path, member) as view:
        array = parse_header(view)
    if array.shape[1:] not in ((), (1,)) or not array.shape or array.dtype.kind not in "biufSU":
        raise BadImage(f"{name} is {array}, not one integer or text for each image")
    if array.rows != rows:
        raise BadImage(f"there are {rows} images but {array.rows} labels")
    if array.rows * array.row_bytes > _MOST_LABELS:
        raise BadImage(f"{name} has over {_MOST_LABELS} bytes of labels")
    require_intact(path, member)
    return itertools.chain.from_iterable(
        _some_labels((path, member), name, array, range(row, min(row + _LABELS, rows)))
        for row in range(0, rows, _LABELS)
    )


def _some_labels(file: tuple[str, str], name: str, array: Array, rows: range) -> list[Value]:
    with opened(*file) as view:
        column: npt.NDArray[Any] = values(view, array, rows.start, len(rows)).reshape(-1)
    if array.dtype.kind == "S":
        return [value.decode("utf-8", "surrogateescape") for value in column.tolist()]
    if array.dtype.kind == "U":  # NumPy does not check the code points
        codec = "utf-32-be" if array.dtype.str[0] == ">" else "utf-32-le"
        size = array.dtype.itemsize
        data = column.tobytes()
        try:
            texts = [data[n : n + size].decode(codec) for n in range(0, len(data), size)]
        except UnicodeDecodeError as error:
            raise BadImage(f"{name} contains text that is not Unicode: {error}") from error
        return [text.rstrip("\0") for text in texts]
    return [label_of(value, name) for value in column.tolist()]


def split_folders(root: Path) -> dict[str, str]:
    """Return the folders named like splits, if all are and one has folders; else the root."""
    folder = LocalFolder(root)
    names = folder.folders()
    has_classes = any(folder.inner(name).folders() for name in names)
    are_splits = has_classes and all(map(is_split_name, names))
    return {name: name for name in names} if are_splits else {"": ""}


def walk(root: Path, listing: Listing, suffixes: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield path and class of each array file in the folders of ``root``, or in ``root`` itself."""
    tops = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    for top in [name for name in tops if not name.startswith(".")] or [""]:
        label = as_text(top) or None
        for folder, inner, names in os.walk(root / top):
            inner.sort(key=as_text)
            if not top:
                inner.clear()
            above = os.path.join(os.path.relpath(folder, root), "") if top else ""
            for name in sorted(names, key=as_text):
                path = as_text(above + name)
                if name.startswith(".") or not name.endswith(tuple(suffixes)):
                    listing.ignore(path, f"not an {suffixes[0]} file")
                else:
                    yield path, label
    if tops:
        for entry in sorted(os.scandir(root), key=lambda item: item.name):
            if not entry.is_dir():
                listing.ignore(as_text(entry.name), LOOSE)
