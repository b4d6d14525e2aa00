"""The index: for each row, where its image lies and what it is.

It is derived from the shards. It knows rows, not shards: which shard a row is in follows from the
manifest's row counts.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np
import numpy.typing as npt

from shardkit.errors import CorruptDataset
from shardkit.npy import StoredValues, map_npy, save_npy
from shardkit.record import IMAGE_FIELDS, NO_LABEL

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
"""One row: 32 bytes, so that a look-up touches one cache line, and 10 million rows take 320 MB.

``offset`` is the image's first byte in its shard's file, or -1 where the format stores no plain
bytes and its own library must read them; ``field`` is a position in `IMAGE_FIELDS`; ``label`` is -1
where there is none; ``width`` and ``height`` are pixels of the stored image; ``check`` is that of
`row_check`.
"""

HEAD = slice(16, 29)
"""The bytes of a row that its checksum covers beside the image: label, width, height, field."""

INDEX_DIRECTORY = "index"
ROWS_NAME = f"{INDEX_DIRECTORY}/rows.npy"
_STRINGS = ("keys", "paths")

_RUN = 4096
"""Strings that are read together when all are asked for."""

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

    It shows damage to the row itself where the image is not read to compare its checksum.
    """
    return zlib.crc32(row[: HEAD.stop]).to_bytes(4, "little")[:3]


def unsound(rows: Rows) -> npt.NDArray[np.bool_]:
    """Tell of each row whether its ``check`` is not that of `row_check`, or its field unknown.

    It looks at a whole batch, in the path of every read: hence numbers, and no call for each row.
    """
    packed, crc32 = memoryview(rows.tobytes()), zlib.crc32
    starts = range(0, len(packed), ROW.itemsize)
    found = [crc32(packed[start : start + HEAD.stop]) & 0xFFFFFF for start in starts]
    stated = rows["check"].astype(np.int64) @ (1, 1 << 8, 1 << 16)
    wrong: npt.NDArray[np.bool_] = (stated != found) | (rows["field"] >= len(IMAGE_FIELDS))
    return wrong


def checksum(head: bytes | memoryview, image: bytes | memoryview) -> int:
    """Return the CRC-32 of a row's `HEAD` bytes followed by its image's bytes.

    The label is covered so that an index with a flipped bit cannot hand out a wrong one.
    """
    return zlib.crc32(image, zlib.crc32(head))


def make_row(*, offset: int, image: bytes, label: int, size: tuple[int, int], field: str) -> Rows:
    """Return the row of one image as an array of shape (1,).

    Args:
        offset: First byte of the image in its shard, or -1.
        image: The image's stored bytes.
        label: The label, or -1.
        size: Width and height in pixels.
        field: Name of the image's field.
    """
    row = np.zeros(1, ROW)
    width, height = size
    row[0] = (offset, len(image), 0, label, width, height, IMAGE_FIELDS.index(field), (0, 0, 0))
    row["checksum"] = checksum(row.tobytes()[HEAD], image)
    row["check"] = tuple(row_check(row.tobytes()))
    return row


def require_counts(labels: npt.NDArray[np.integer[Any]], counts: Sequence[int] | None) -> None:
    """Hold the labels of an index against the number of records that each class has.

    Raises:
        CorruptDataset: If they differ; ``counts`` of None asks for no label at all.
    """
    known = labels[labels != NO_LABEL]
    size = len(counts or ())
    outside = bool(len(known)) and not 0 <= known.min() <= known.max() < size
    if outside or np.bincount(known, minlength=size).tolist() != list(counts or ()):
        raise CorruptDataset(
            "the labels in the index are not those that the manifest counts; `shardkit index` "
            "rebuilds the index from the shards"
        )


class StringTable(Sequence[str]):
    """Strings of a dataset, one for each row, read from their files when asked for.

    Raises:
        CorruptDataset: On access, if the files do not say where a string begins and ends, or cannot
            be read any more.
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
        """Return the strings of neighbouring rows, read in one piece."""
        before = _part_of(self._ends, start - 1, start).tolist() if start else [0]
        bounds = [*before, *_part_of(self._ends, start, stop).tolist()]
        if not 0 <= bounds[0] <= bounds[-1] <= len(self._text) or bounds != sorted(bounds):
            raise CorruptDataset(
                f"the index is damaged: the texts of the rows {start} to {stop - 1} overlap. "
                "`shardkit index` rebuilds it from the shards"
            )
        first = bounds[0]
        text = _part_of(self._text, first, bounds[-1]).tobytes()
        return [text[begin - first : end - first].decode(*_UTF8) for begin, end in pairwise(bounds)]


def _part_of(values: _Values, start: int, stop: int) -> npt.NDArray[Any]:
    try:
        return values[start:stop]
    except (OSError, ValueError) as error:
        raise CorruptDataset(
            f"the index cannot be read: {error}. `shardkit index` rebuilds it from the shards"
        ) from error


class Index:
    """The index of a dataset on disk, opened lazily.

    Raises:
        CorruptDataset: On first use, if a file of the index is missing, cut, or of another number
            of rows than the manifest says.
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
        load: Callable[[Path, npt.DTypeLike, int], _Loaded],
        name: str,
        dtype: npt.DTypeLike,
        count: int,
    ) -> _Loaded:
        path = self._directory / name
        try:
            return load(path, dtype, max(count, 0))
        except (OSError, ValueError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise CorruptDataset(
                f"{path} does not describe {self._count} rows: {reason}. "
                f"`shardkit index {self._directory}` rebuilds the index from the shards."
            ) from error


def save_index(parts: Iterable[IndexPart], directory: Path) -> list[str]:
    """Write the index of a dataset from the parts of its shards, in their order.

    Args:
        parts: One part for each shard.
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
"""How strings are stored: file names that are no UTF-8 keep their bytes."""


def string_files(name: str) -> tuple[str, str]:
    """Return the files of ``keys`` or ``paths``: their text, and where in it each ends."""
    return f"{INDEX_DIRECTORY}/{name}.npy", f"{INDEX_DIRECTORY}/{name}-ends.npy"
