"""The layout of FFCV's files (.beton, version 2): header, fields, samples, allocations.

A file starts with a header of 24 bytes, a descriptor of 1,041 bytes for each field, and a row of
fixed size for each sample, aligned as in C. Values of other sizes are in the pages after it. The
table of allocations, with sample, offset and size of each, ends the file. The writer states its
offset in the header last.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.errors import BadImage
from shardkit.sources.inputs import OpenedFile
from shardkit.system.text import quoted

JPEG = 0
RAW = 1
"""How an image is stored."""

_HEADER = struct.Struct("<HHIQQ")
"""Version, number of fields, bytes of a page, number of samples, offset of the allocations."""
_VERSION = 2
_NAME = 16
_DESCRIPTOR = 1 + _NAME + 1024
"""Type, name and arguments of a field."""
_ARRAY = struct.Struct("<32QQ")
"""Arguments of an array: its sides, those that are 0 at the end left out; bytes of its dtype."""
_DTYPE = re.compile(rb'\[\["", "([<>|][biufc][0-9]{1,2})"\]\]\Z')
_MOST_FIELDS = 1024

_IMAGE = np.dtype([("mode", "u1"), ("width", "<u2"), ("height", "<u2"), ("start", "<u8")])
_BYTES = np.dtype([("start", "<u8"), ("size", "<u8")])
_KINDS: Mapping[int, tuple[str, Any]] = {
    0: ("float", "<f8"),
    1: ("int", "<i8"),
    2: ("image", _IMAGE),
    3: ("bytes", _BYTES),
    4: ("array", "<u8"),
    5: ("json", _BYTES),
    6: ("array", "<u8"),
}
"""Type of field to its kind, and to what a sample's row holds of it."""

_CHUNK = 1 << 16
"""Allocations to read at a time."""
_ALLOCATION = np.dtype([("sample", "<u8"), ("start", "<u8"), ("size", "<u8")])


class BetonField(NamedTuple):
    """A field of a file."""

    holds: str
    """``float``, ``int``, ``image``, ``bytes``, ``array`` or ``json``."""
    in_row: npt.DTypeLike
    """Type of what a sample's row holds: a number, or where the value is."""
    dtype: np.dtype[Any] | None = None
    """Type of an array's values."""
    shape: tuple[int, ...] = ()

    @property
    def is_allocated(self) -> bool:
        """Whether values are outside of the samples' rows."""
        return self.holds not in ("float", "int")

    @property
    def bytes(self) -> int:
        """Bytes of an array."""
        return math.prod(self.shape) * (self.dtype.itemsize if self.dtype else 0)

    def __str__(self) -> str:
        return f"{self.holds} of {self.dtype}, {self.shape}" if self.dtype else self.holds


@dataclass(frozen=True)
class Beton:
    """The header of a file, compared with the file's size."""

    fields: Mapping[str, BetonField]
    rows: int
    table: int
    """Offset of the allocations."""

    @cached_property
    def row(self) -> np.dtype[Any]:
        """The row of a sample: what it holds of each field."""
        return np.dtype([(name, field.in_row) for name, field in self.fields.items()], align=True)

    @property
    def start(self) -> int:
        """Offset of the first sample's row."""
        return _HEADER.size + _DESCRIPTOR * len(self.fields)

    @property
    def data(self) -> int:
        """Minimum offset of values outside of the rows."""
        return self.start + self.rows * self.row.itemsize

    def samples(self, view: OpenedFile, first: int, count: int) -> npt.NDArray[Any]:
        """Return the rows of some samples; BadImage if the file is truncated."""
        size = self.row.itemsize
        data = view.read(self.start + first * size, count * size)
        if len(data) != count * size:
            raise BadImage("the file is truncated")
        return np.frombuffer(data, self.row)


def parse_beton(view: OpenedFile) -> Beton:
    """Return what a file states; BadImage if it is incomplete or not from FFCV.

    Only its first bytes are read.
    """
    head = view.read(0, _HEADER.size)
    if len(head) < _HEADER.size:
        raise BadImage(f"it has only {len(head)} bytes, too few for an FFCV file")
    version, count, _, rows, table = _HEADER.unpack(head)
    if version != _VERSION or not 0 < count <= _MOST_FIELDS:
        raise BadImage(
            f"it is not an FFCV file of version {_VERSION}: it declares version {version}"
        )
    if not table:
        raise BadImage(
            "FFCV did not finish it, so it has no allocation table", remedy="write it again"
        )
    described = view.read(_HEADER.size, _DESCRIPTOR * count)
    if len(described) < _DESCRIPTOR * count:
        raise BadImage("it is truncated")
    fields: dict[str, BetonField] = {}
    for start in range(0, len(described), _DESCRIPTOR):
        name, field = _parse_field(described[start : start + _DESCRIPTOR])
        if name in fields:
            raise BadImage(f"two fields are called {quoted(name)}")
        fields[name] = field
    beton = Beton(fields, rows, table)
    expected = rows * sum(field.is_allocated for field in fields.values())
    size = table + expected * _ALLOCATION.itemsize
    if beton.data > table or size != view.size:
        raise BadImage(
            f"it has {view.size:,} bytes, but {rows:,} samples need {size:,}: it is truncated or "
            "damaged;",
            remedy="copy it again",
        )
    return beton


def _parse_field(data: bytes) -> tuple[str, BetonField]:
    name = data[1 : 1 + _NAME].split(b"\0")[0].decode("ascii", "replace")
    if data[0] not in _KINDS or not name:
        type_name = "a custom type" if data[0] == 255 else f"the unknown type {data[0]}"
        raise BadImage(
            f"its {quoted(name)} field has {type_name}, which only its author's code can read",
            remedy="Write the file without this field",
        )
    kind, in_row = _KINDS[data[0]]
    if kind != "array":
        return name, BetonField(kind, in_row)
    arguments = data[1 + _NAME :]
    *sides, length = _ARRAY.unpack_from(arguments)
    dtype_text = arguments[_ARRAY.size : _ARRAY.size + min(length, len(arguments))]
    match = _DTYPE.match(dtype_text)
    try:
        dtype = np.dtype(match[1].decode()) if match else None
    except TypeError:
        dtype = None
    if dtype is None:
        raise BadImage(
            f"the values of its {quoted(name)} array are not plain numbers: "
            f"{quoted(str(dtype_text))}"
        )
    while sides and not sides[-1]:
        sides.pop()
    return name, BetonField(kind, in_row, dtype, tuple(sides))


class Allocations:
    """The byte ranges of a file that its samples own, none of which share a byte.

    They are in memory: 24 bytes for each, and over twice that while they are sorted. BadImage if
    they are outside of the data, or overlap.
    """

    def __init__(self, view: OpenedFile, beton: Beton) -> None:
        count = (view.size - beton.table) // _ALLOCATION.itemsize
        blocks = [np.empty(0, _ALLOCATION)]
        for first in range(0, count, _CHUNK):  # a hole in the file ends this before it takes memory
            size = min(_CHUNK, count - first) * _ALLOCATION.itemsize
            data = view.read(beton.table + first * _ALLOCATION.itemsize, size)
            if len(data) != size:
                raise BadImage("the file is truncated")
            block = np.frombuffer(data, _ALLOCATION)
            room = np.uint64(beton.table) - np.minimum(block["start"], np.uint64(beton.table))
            if np.any(block["start"] < beton.data) or np.any(block["size"] > room):
                raise BadImage("its allocation table points outside its data: it is damaged")
            blocks.append(block)
        table = np.concatenate(blocks)
        blocks.clear()
        starts = table["start"]
        sizes = table["size"]
        order = np.lexsort((sizes, starts))
        self._starts = starts[order]
        self._sizes = sizes[order]
        self._owners = table["sample"][order]
        if np.any(self._starts[:-1] + self._sizes[:-1] > self._starts[1:]):
            raise BadImage("its allocation table has overlapping ranges: it is damaged")

    def sizes(
        self, starts: npt.NDArray[np.uint64], rows: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.int64]:
        """Return the size of the range at each start that its row owns; -1 if there is none."""
        if not len(self._starts):
            return np.full(len(starts), -1)
        # Of ranges at one start, only the last has bytes.
        at = np.searchsorted(self._starts, starts, side="right") - 1
        at = np.maximum(at, 0)
        owned = (self._starts[at] == starts) & (self._owners[at] == rows)
        return np.where(owned, self._sizes[at].astype(np.int64), -1)


def without_terminator(data: bytes) -> bytes:
    """Return the text of a JSON value, which FFCV ends with a zero byte."""
    return data.split(b"\0", 1)[0]
