"""The index: the byte range, label, size and kind of each row's image.

It is derived from the shards, and it knows rows, not shards: the manifest's row counts give the
shard of each row.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np
import numpy.typing as npt

from shardkit.errors import CorruptDataset
from shardkit.record import IMAGE_FIELDS, NO_LABEL
from shardkit.system import native
from shardkit.system.npy import StoredValues, map_npy, save_npy

ROW = np.dtype(
    [
        ("offset", "<i8"),
        ("length", "<u4"),
        ("checksum", "<u4"),
        ("label", "<i4"),
        ("width", "<u4"),
        ("height", "<u4"),
        ("field", "u1"),
        ("check", "u1", (3,)),
    ]
)
"""One row: 32 bytes, so a lookup touches one cache line and 10 million rows take 320 MB.

``offset`` is the image's first byte in its shard's file, or -1 if the format does not store it as
plain bytes; ``field`` is a position in `IMAGE_FIELDS`; ``label`` is -1 if there is none; ``width``
and ``height`` are pixels of the stored image; ``check`` is from `row_check`.
"""

HEAD = slice(16, 29)
"""The bytes of a row that its checksum covers in addition to the image: label, size, field."""

_START, _HEAD = struct.Struct("<qII"), struct.Struct("<iIIB")
"""The fields of a row before `HEAD`, and those in it."""

INDEX_DIRECTORY = "index"
ROWS_NAME = f"{INDEX_DIRECTORY}/rows.npy"
_STRINGS = ("keys", "paths")

_RUN = 4096
"""Strings read at a time when all are requested."""

Rows = npt.NDArray[np.void]
"""An array of `ROW`."""

_Values = StoredValues | npt.NDArray[Any]
_Loaded = TypeVar("_Loaded")


class IndexPart(NamedTuple):
    """The index of one shard, in memory."""

    rows: Rows
    keys: list[str]
    paths: list[str]


def row_check(row: bytes | bytearray | memoryview) -> bytes:
    """Return the lower 24 bits, little-endian, of the CRC-32 of a row's bytes before its ``check``.

    It detects damage to the row itself, where the image's checksum is not compared.
    """
    return zlib.crc32(row[: HEAD.stop]).to_bytes(4, "little")[:3]


def damaged_rows(rows: Rows) -> npt.NDArray[np.bool_]:
    """Return whether each row has a wrong ``check`` or an unknown field: bool of shape (N,).

    Every read of a batch calls this once, so it avoids a Python call per row.
    """
    compiled = native.module()
    if compiled is not None:
        damaged = np.empty(len(rows), np.bool_)
        compiled.check_entries(rows.tobytes(), len(IMAGE_FIELDS), damaged)
        return damaged
    packed, crc32 = memoryview(rows.tobytes()), zlib.crc32
    starts = range(0, len(packed), ROW.itemsize)
    found = [crc32(packed[start : start + HEAD.stop]) & 0xFFFFFF for start in starts]
    stated = rows["check"].astype(np.int64) @ (1, 1 << 8, 1 << 16)
    wrong: npt.NDArray[np.bool_] = (stated != found) | (rows["field"] >= len(IMAGE_FIELDS))
    return wrong


def checksum(head: bytes | bytearray | memoryview, image: bytes | memoryview) -> int:
    """Return the CRC-32 of a row's `HEAD` bytes followed by its image's bytes.

    It covers the label, so a flipped bit in the index cannot return a wrong one.
    """
    return zlib.crc32(image, zlib.crc32(head))


def pack_row(*, offset: int, image: bytes, label: int, size: tuple[int, int], field: str) -> bytes:
    """Return the row of one image as the bytes of a `ROW`.

    Args:
        offset: Position of the image's first byte in its shard, or -1.
        image: The stored bytes of the image.
        label: The label, or -1.
        size: Width and height in pixels.
        field: Name of the image's field.

    Raises:
        OverflowError: If a number is out of range.
    """
    row = bytearray(ROW.itemsize)
    try:
        _HEAD.pack_into(row, HEAD.start, label, *size, IMAGE_FIELDS.index(field))
        _START.pack_into(row, 0, offset, len(image), checksum(row[HEAD], image))
    except struct.error as error:
        raise OverflowError(f"a number of the row is out of range: {error}") from error
    row[HEAD.stop :] = row_check(row)
    return bytes(row)


def as_rows(packed: Iterable[bytes]) -> Rows:
    """Return the array of rows packed by `pack_row`."""
    return np.frombuffer(b"".join(packed), ROW)


def require_counts(labels: npt.NDArray[np.integer[Any]], counts: Sequence[int] | None) -> None:
    """Compare the labels of an index with the number of records in each class.

    Raises:
        CorruptDataset: If they differ. With ``counts`` None, any label is an error.
    """
    known = labels[labels != NO_LABEL]
    size = len(counts or ())
    outside = bool(len(known)) and not 0 <= known.min() <= known.max() < size
    if outside or np.bincount(known, minlength=size).tolist() != list(counts or ()):
        raise CorruptDataset(
            "the labels in the index differ from the manifest's class counts; to rebuild the index "
            "from the shards, run `shardkit index`"
        )


class StringTable(Sequence[str]):
    """One string for each row of a dataset, read from files on access.

    Raises:
        CorruptDataset: On access, if the bounds of a string are damaged or its file is unreadable.
    """

    def __init__(self, text: _Values, ends: _Values) -> None:
        self._text = text
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> list[str]: ...
    def __getitem__(self, row: int | slice) -> str | list[str]:
        if isinstance(row, slice):
            start, stop, step = row.indices(len(self))
            if step != 1:
                return [self[position] for position in range(start, stop, step)]
            return self._run(start, max(start, stop))
        position = range(len(self))[row]
        return self._run(position, position + 1)[0]

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _RUN):
            yield from self._run(start, min(start + _RUN, len(self)))

    def _run(self, start: int, stop: int) -> list[str]:
        """Return the strings of neighboring rows, read in one piece."""
        before = _part_of(self._ends, start - 1, start).tolist() if start else [0]
        bounds = [*before, *_part_of(self._ends, start, stop).tolist()]
        if not 0 <= bounds[0] <= bounds[-1] <= len(self._text) or bounds != sorted(bounds):
            raise CorruptDataset(
                f"the index is damaged: the texts of rows {start} to {stop - 1} overlap; to "
                "rebuild it from the shards, run `shardkit index`"
            )
        first = bounds[0]
        text = _part_of(self._text, first, bounds[-1]).tobytes()
        return [text[begin - first : end - first].decode(*_UTF8) for begin, end in pairwise(bounds)]


def _part_of(values: _Values, start: int, stop: int) -> npt.NDArray[Any]:
    try:
        return values[start:stop]
    except (OSError, ValueError) as error:
        raise CorruptDataset(
            f"the index cannot be read: {error}; to rebuild it from the shards, run "
            "`shardkit index`"
        ) from error


class Index:
    """The index of a dataset on disk, opened lazily.

    Raises:
        CorruptDataset: On first use, if an index file is missing or truncated, or its number of
            rows differs from the manifest.
    """

    def __init__(self, directory: Path, rows: int) -> None:
        self._directory = directory
        self._count = rows

    def rows(self) -> Rows:
        """Return all rows, as a read-only memory-mapped array of `ROW`."""
        return self._load(map_npy, ROWS_NAME, ROW, self._count)

    def keys(self) -> StringTable:
        """Return the key of each row."""
        return self._strings("keys")

    def paths(self) -> StringTable:
        """Return the source path of each row, relative to the source."""
        return self._strings("paths")

    def _strings(self, name: str) -> StringTable:
        text_name, ends_name = string_files(name)
        ends = self._load(StoredValues, ends_name, np.int64, self._count)
        length = int(_part_of(ends, len(ends) - 1, len(ends))[0]) if len(ends) else 0
        return StringTable(self._load(StoredValues, text_name, np.uint8, length), ends)

    def _load(
        self,
        load: Callable[[Path, npt.DTypeLike, int, Path], _Loaded],
        name: str,
        dtype: npt.DTypeLike,
        count: int,
    ) -> _Loaded:
        path = self._directory / name
        try:
            return load(path, dtype, max(count, 0), self._directory)
        except (OSError, ValueError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise CorruptDataset(
                f"{path} does not describe {self._count} rows: {reason}. To rebuild the index from "
                f"the shards, run `shardkit index {self._directory}`."
            ) from error


def save_index(parts: Iterable[IndexPart], directory: Path) -> list[str]:
    """Write the index of a dataset from the parts of its shards.

    Args:
        parts: One part for each shard, in order.
        directory: The dataset's directory.

    Returns:
        The names of the files written, relative to ``directory``.
    """
    (directory / INDEX_DIRECTORY).mkdir(exist_ok=True)
    parts = list(parts)
    rows = np.concatenate([part.rows for part in parts]) if parts else np.zeros(0, ROW)
    columns = {ROWS_NAME: rows}
    for name in _STRINGS:
        texts = [text.encode(*_UTF8) for part in parts for text in getattr(part, name)]
        text_name, ends_name = string_files(name)
        columns[text_name] = np.frombuffer(b"".join(texts), np.uint8)
        columns[ends_name] = np.cumsum([len(text) for text in texts], dtype=np.int64)
    for name, column in columns.items():
        save_npy(directory / name, column)
    return list(columns)


_UTF8 = ("utf-8", "surrogateescape")
"""Encoding of strings: file names that are not UTF-8 keep their bytes."""


def string_files(name: str) -> tuple[str, str]:
    """Return the two files of ``keys`` or ``paths``: the text, and the end of each string in it."""
    return f"{INDEX_DIRECTORY}/{name}.npy", f"{INDEX_DIRECTORY}/{name}-ends.npy"
