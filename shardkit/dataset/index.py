"""The index: the byte range, label, size and kind of each row's image, and all other fields.

It is derived from the shards, and it knows rows, not shards: the manifest's row counts give the
shard of each row.

Each field has files of its own, so reading an image touches no other. Images, arrays and bytes have
rows of one layout, so one reader and the compiled module serve all; small fields are columns, read
without a record.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np
import numpy.typing as npt

from shardkit.errors import CorruptDataset, damaged_index
from shardkit.kinds.column import ENDINGS, Column, join_columns, take_rows, type_of
from shardkit.kinds.field import (
    Field,
    Schema,
    apart_of,
    columns_of,
    default_schema,
    describe_schema,
)
from shardkit.record import ABSENT, IMAGE, LABEL, MAX_KEY_BYTES, NO_LABEL, STORED_KINDS, dump_json
from shardkit.system import compiled
from shardkit.system.npy import NpyWriter, StoredValues, map_npy
from shardkit.system.safe_paths import UNFIT
from shardkit.system.strings import UTF8, join_strings, split_strings
from shardkit.system.text import as_command

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

``offset`` is the first byte of the image, array or bytes in its shard's file, or -1 if the format
does not store it as plain bytes; ``field`` is a position in `STORED_KINDS`; ``label`` is -1 if
there is none, and for other fields than the primary image; ``width`` and ``height`` are pixels of
the stored image, or 0; ``check`` is from `row_check`.
"""

HEAD = slice(16, 29)
"""The bytes of a row that its checksum covers in addition to the image: label, size, field."""

_CONTENT = slice(8, 29)
"""The bytes of a row that follow from the record alone, not from its shard."""

_START = struct.Struct("<qII")
_HEAD = struct.Struct("<iIIB")
"""The fields of a row before `HEAD`, and those in it."""
FIELDS = struct.Struct("<qIIiIIB3x")
"""The fields of a row but ``check``."""

INDEX_DIRECTORY = "index"
ROWS_NAME = f"{INDEX_DIRECTORY}/rows.npy"
TIMES = f"{INDEX_DIRECTORY}/times.npy"
"""Modification times in nanoseconds of attached files, int64. Each holds one image: its path, below
the folder of the dataset, is the source path of the row."""

_STRINGS = ("keys", "paths")
_ENDS, _PRESENT = (f"{ending}.npy" for ending in ENDINGS[1:3])

_ABSENT_CODE = STORED_KINDS.index(ABSENT)

_HELD = 16 << 20
"""Maximum bytes of a column to hold in memory."""

_RUN = 4096
_LARGEST_TEXT = 1 << 24
"""Strings read at a time when all are requested."""

_AT_ONCE = 1 << 16
"""Values hashed at a time."""

_SEGMENT_ROWS = 1 << 14
"""Rows of `Index.segments`: their keys, paths and entries take about 5 MB."""

Rows = npt.NDArray[np.void]
"""An array of `ROW`."""

_Values = StoredValues | npt.NDArray[Any]
_Loaded = TypeVar("_Loaded")


class IndexSegment(NamedTuple):
    """A segment of an index in memory: neighboring rows of one shard, or all of them."""

    rows: Rows
    keys: list[str]
    paths: list[str]
    apart: Mapping[str, Rows] = {}
    """Entries of each other field with bytes of its own, by name."""
    columns: Mapping[str, Column] = {}
    """Values of each small field, by name."""

    def counts(self, schema: Schema) -> dict[str, int]:
        """Return the number of rows that have each field."""
        counts = {}
        for name, field in schema.items():
            if name == LABEL:
                counts[name] = int(np.count_nonzero(self.rows["label"] != NO_LABEL))
            elif field.type.stored_apart:
                entries = self.rows if name == IMAGE else self.apart[name]
                counts[name] = int(np.count_nonzero(entries["field"] != _ABSENT_CODE))
            else:
                counts[name] = self.columns[name].filled
        return counts


def row_check(row: bytes | bytearray | memoryview) -> bytes:
    """Return the lower 24 bits, little-endian, of the CRC-32 of a row's bytes before its ``check``.

    It detects damage to the row itself: the checksums of raw pixels, and of arrays of one shape,
    are not compared on every read, and a flipped bit must not change their label.
    """
    return zlib.crc32(row[: HEAD.stop]).to_bytes(4, "little")[:3]


def damaged_rows(rows: Rows) -> npt.NDArray[np.bool_]:
    """Return whether each row has a wrong ``check`` or an unknown field: bool of shape (N,).

    Every read of a batch calls this once, so it avoids a Python call per row.
    """
    damaged = compiled.check_entries(rows, len(STORED_KINDS))
    if damaged is not None:
        return damaged
    packed = memoryview(rows.tobytes())
    crc32 = zlib.crc32
    starts = range(0, len(packed), ROW.itemsize)
    checks = [crc32(packed[start : start + HEAD.stop]) & 0xFFFFFF for start in starts]
    stored = rows["check"].astype(np.int64) @ (1, 1 << 8, 1 << 16)
    wrong: npt.NDArray[np.bool_] = (stored != checks) | (rows["field"] >= len(STORED_KINDS))
    return wrong


def checksum(head: bytes | bytearray | memoryview, image: bytes | memoryview) -> int:
    """Return the CRC-32 of a row's `HEAD` bytes followed by its image's bytes.

    It covers the label, so a flipped bit in the index cannot return a wrong one.
    """
    return zlib.crc32(image, zlib.crc32(head))


def pack_row(*, offset: int, image: bytes, label: int, size: tuple[int, int], field: str) -> bytes:
    """Return the row of one image, or of another field with bytes, as the bytes of a `ROW`.

    ``offset`` is the position of its first byte in its shard, or -1. ``size`` is width and height
    in pixels; ``field`` is one of `STORED_KINDS`. Raises OverflowError if a number is out of range.
    """
    row = bytearray(ROW.itemsize)
    try:
        _HEAD.pack_into(row, HEAD.start, label, *size, STORED_KINDS.index(field))
        _START.pack_into(row, 0, offset, len(image), checksum(row[HEAD], image))
    except struct.error as error:
        raise OverflowError(f"a row number is out of range: {error}") from error
    row[HEAD.stop :] = row_check(row)
    return bytes(row)


def as_rows(packed: Iterable[bytes]) -> Rows:
    """Return the array of rows packed by `pack_row`."""
    return np.frombuffer(b"".join(packed), ROW)


def require_counts(
    blocks: Iterable[npt.NDArray[np.integer[Any]]], counts: Sequence[int] | None
) -> None:
    """Check the labels of an index, in blocks, against the number of records in each class.

    None for ``counts`` means that there are no labels. Raises CorruptDataset if they differ.
    """
    totals = np.zeros(len(counts or ()), np.int64)
    outside = False
    for labels in blocks:
        labeled = labels[labels != NO_LABEL]
        if len(labeled) and not 0 <= labeled.min() <= labeled.max() < len(totals):
            outside = True
            break  # counting allocates memory up to the largest label
        totals += np.bincount(labeled, minlength=len(totals))
    if outside or totals.tolist() != list(counts or ()):
        raise CorruptDataset(
            "the labels in the index differ from the manifest's class counts;",
            remedy="to rebuild the index from the shards, run `shardkit index`",
        )


class StringTable(Sequence[str]):
    """One string for each row of a dataset, read from files on access.

    ``text`` has all strings end to end, ``ends`` the end of each; ``errors`` is that of
    `bytes.decode`. Access raises CorruptDataset if a bound is damaged or the file unreadable.
    """

    def __init__(self, text: _Values, ends: _Values, errors: str = UTF8[1]) -> None:
        self._text = text
        self._ends = ends
        self._errors = errors

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
        bounds, text = self._span(start, stop)
        try:
            return split_strings(text, bounds[:-1], bounds[1:], self._errors)
        except UnicodeDecodeError as error:
            raise damaged_index(f"a text of rows {start} to {stop - 1} is not UTF-8") from error

    def _span(self, start: int, stop: int) -> tuple[npt.NDArray[np.int64], bytes]:
        """Return the bounds of the strings of neighboring rows, and their text in one piece."""
        bounds = np.zeros(stop - start + 1, np.int64)
        if start:
            bounds[0] = _read(self._ends, start - 1, start)[0]
        bounds[1:] = _read(self._ends, start, stop)
        first = int(bounds[0])
        last = int(bounds[-1])
        # Each end may be any number: the text of a sparse file must not fill the memory.
        most = min(len(self._text), first + (stop - start) * MAX_KEY_BYTES + _LARGEST_TEXT)
        if not 0 <= first <= last <= most or (bounds[1:] < bounds[:-1]).any():
            raise damaged_index(f"the texts of rows {start} to {stop - 1} overlap, or are too long")
        return bounds - first, _read(self._text, first, last).tobytes()


def _read(values: _Values, start: int, stop: int) -> npt.NDArray[Any]:
    try:
        return values[start:stop]
    except ValueError as error:
        raise CorruptDataset(
            f"the index cannot be read: {error};",
            remedy="to rebuild it from the shards, run `shardkit index`",
        ) from error


class Index:
    """The index of a dataset on disk, opened lazily.

    ``schema`` has the fields as far as they are needed. ``lacking`` are small fields that rows
    lack; None means those with a file that says so. First use raises CorruptDataset if a file is
    missing or truncated, or its number of rows differs from the manifest.
    """

    def __init__(
        self,
        directory: Path,
        rows: int,
        schema: Schema = MappingProxyType({}),
        lacking: Collection[str] | None = None,
    ) -> None:
        self._directory = directory
        self._count = rows
        self._schema = schema
        self._lacking = lacking

    def rows(self, field: str = IMAGE) -> Rows:
        """Return the entries of all rows, as a read-only memory-mapped array of `ROW`."""
        return self._load(map_npy, entries_file(field), ROW, self._count)

    def entries(self, field: str = IMAGE) -> Iterator[Rows]:
        """Yield the entries of all rows in blocks, one of which is in memory at a time."""
        entries = self._entries(field)
        for start in range(0, self._count, _SEGMENT_ROWS):
            yield _read(entries, start, start + _SEGMENT_ROWS)

    def segment(self, rows: slice = slice(None)) -> IndexSegment:
        """Return the index of neighboring rows, in memory."""
        start, stop, _ = rows.indices(self._count)
        return IndexSegment(
            _read(self._entries(IMAGE), start, stop),
            self.keys()[start:stop],
            self.paths()[start:stop],
            {name: _read(self._entries(name), start, stop) for name in apart_of(self._schema)},
            {name: self.column(name).slice(start, stop) for name in columns_of(self._schema)},
        )

    def segments(self, rows: range | None = None) -> Iterator[IndexSegment]:
        """Yield the index of neighboring rows, or of all, one segment in memory at a time."""
        rows = range(self._count) if rows is None else rows
        for start in range(rows.start, rows.stop, _SEGMENT_ROWS):
            yield self.segment(slice(start, min(start + _SEGMENT_ROWS, rows.stop)))

    def counts(self) -> dict[str, int]:
        """Return the number of rows that have each field."""
        counts = {}
        for name, field in self._schema.items():
            if name == LABEL:
                labels = (entries["label"] for entries in self.entries())
                counts[name] = sum(int(np.count_nonzero(block != NO_LABEL)) for block in labels)
            elif field.type.stored_apart:
                kinds = (entries["field"] for entries in self.entries(name))
                counts[name] = sum(int(np.count_nonzero(block != _ABSENT_CODE)) for block in kinds)
            else:
                counts[name] = self.column(name).filled()
        return counts

    def content_digest(self) -> str:
        """Return the digest of the records in row order: equal in any format, for any shards.

        It covers the schema, all classes, and of each row the key, the label, the values of small
        fields, and size, kind and CRC-32 of all others. docs/format.md specifies it.
        """
        schema = self._schema
        classes = schema[LABEL].classes if LABEL in schema else None
        digest = hashlib.sha256(dump_json([classes, describe_schema(schema), self._count]))
        files: dict[str, _Values] = dict(self._string_files("keys"))
        for name in (IMAGE, *apart_of(schema)):
            files[entries_file(name)] = self._entries(name)
        for name in columns_of(schema):
            files |= self._column_files(name)
        for name, values in sorted(files.items()):
            digest.update(f"\n{name} {len(values)}\n".encode())
            for start in range(0, len(values), _AT_ONCE):
                block = _read(values, start, start + _AT_ONCE)
                if block.dtype == ROW:
                    block = block.view(np.uint8).reshape(-1, ROW.itemsize)[:, _CONTENT]
                digest.update(block.tobytes())
        return digest.hexdigest()

    def column(self, name: str) -> StoredColumn:
        """Return the column of a small field."""
        endings = dict(zip(column_files(name), ENDINGS, strict=True))
        files = {endings[file]: values for file, values in self._column_files(name).items()}
        return StoredColumn(self._schema[name], files, self._count)

    def _column_files(self, name: str) -> dict[str, StoredValues]:
        """Return the files of a column, by name."""
        values, ends, present, labels = column_files(name)
        count = self._count
        files = dict[str, StoredValues]()
        field = self._schema[name]
        kind = field.type
        if self._lacking is None:
            lacking = (self._directory / present).exists()
        else:
            lacking = name in self._lacking
        if kind.is_variable:
            files[ends] = self._load(StoredValues, ends, np.int64, count)
            count = _last(files[ends])
        files[values] = self._load(StoredValues, values, type_of(field), count)
        if lacking:
            files[present] = self._load(StoredValues, present, np.bool_, self._count)
        if kind.has_labels(field):
            files[labels] = self._load(StoredValues, labels, np.int32, count // kind.width(field))
        return files

    def keys(self) -> StringTable:
        """Return the key of each row."""
        text, ends = self._string_files("keys").values()
        return StringTable(text, ends, "strict")

    def paths(self) -> StringTable:
        """Return the source path of each row, relative to the source."""
        text, ends = self._string_files("paths").values()
        return StringTable(text, ends)

    def times(self) -> StoredValues:
        """Return the modification time of each row's file."""
        return self._load(StoredValues, TIMES, np.int64, self._count)

    def _entries(self, field: str) -> StoredValues:
        return self._load(StoredValues, entries_file(field), ROW, self._count)

    def _string_files(self, name: str) -> dict[str, StoredValues]:
        """Return the files of ``keys`` or ``paths``, by name: the text, then the ends."""
        text_name, ends_name = string_files(name)
        ends = self._load(StoredValues, ends_name, np.int64, self._count)
        return {
            text_name: self._load(StoredValues, text_name, np.uint8, _last(ends)),
            ends_name: ends,
        }

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
        except (*UNFIT, ValueError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise CorruptDataset(
                f"{path} does not describe {self._count} rows: {reason}",
                remedy="To rebuild the index from the shards, run "
                f"{as_command('index', self._directory)}.",
                where=path,
            ) from error


def _last(ends: StoredValues) -> int:
    """Return the last of the ends: the number of values."""
    return int(_read(ends, len(ends) - 1, len(ends))[0]) if len(ends) else 0


def join_segments(segments: Sequence[IndexSegment], schema: Schema) -> IndexSegment:
    """Return the index of the records of several segments, in order."""
    return IndexSegment(
        _entries(segments, IMAGE),
        [key for segment in segments for key in segment.keys],
        [path for segment in segments for path in segment.paths],
        {name: _entries(segments, name) for name in apart_of(schema)},
        {
            name: join_columns(field, [segment.columns[name] for segment in segments])
            for name, field in columns_of(schema).items()
        },
    )


class StoredColumn:
    """A column of a dataset, read from its files on access, or held in memory if it is small.

    Access raises CorruptDataset if they are damaged or unreadable.
    """

    def __init__(self, field: Field, files: Mapping[str, StoredValues], rows: int) -> None:
        self.field = field
        self._files = files
        self._rows = rows
        self._held: Column | None = None
        self._is_small = sum(map(len, files.values())) * 8 <= _HELD

    def __len__(self) -> int:
        return self._rows

    def filled(self) -> int:
        """Return the number of rows with a value."""
        present = self._read("-present", 0, self._rows)
        return self._rows if present is None else int(np.count_nonzero(present))

    def whole(self) -> Column:
        """Return the column of all rows."""
        if self._held is not None:
            return self._held
        files = map(self._files.get, ENDINGS)
        arrays = (None if file is None else _read(file, 0, len(file)) for file in files)
        column = Column(self.field, *arrays)  # type: ignore[arg-type]
        _require_sound(column)
        for array in column.arrays().values():
            array.setflags(write=False)
        if self._is_small:
            self._held = column
        return column

    def take(self, rows: Sequence[int] | npt.NDArray[np.int64]) -> Column:
        """Return the column of some rows, counted from 0, in that order."""
        if self._is_small:
            return take_rows(self.whole(), rows)
        return join_columns(self.field, [self.slice(row, row + 1) for row in rows])

    def present(self) -> npt.NDArray[np.bool_]:
        """Return whether each row has a value: bool of shape (N,)."""
        present = self._read("-present", 0, self._rows)
        return np.ones(self._rows, np.bool_) if present is None else present

    def slice(self, start: int, stop: int) -> Column:
        """Return the column of neighboring rows."""
        first = start
        last = stop
        ends = self._read("-ends", max(0, start - 1), stop)
        if ends is not None:
            first = int(ends[0]) if start else 0
            ends = (ends[1:] if start else ends) - first
            last = first + int(ends[-1]) if len(ends) else first
        present = self._read("-present", start, stop)
        width = self.field.type.width(self.field)
        labels = self._read("-labels", first // width, last // width)
        column = Column(self.field, _read(self._files[""], first, last), ends, present, labels)
        _require_sound(column)
        return column

    def _read(self, ending: str, start: int, stop: int) -> npt.NDArray[Any] | None:
        values = self._files.get(ending)
        return None if values is None else _read(values, start, stop)


def _require_sound(column: Column) -> None:
    """Refuse a column whose rows overlap, or with a label outside the classes."""
    ends = column.ends
    wrong = False
    if ends is not None and len(ends):
        apart = np.diff(ends, prepend=0)
        wrong = bool(apart.min() < 0 or ends[-1] != len(column.values))
        wrong = wrong or bool(np.any(apart % column.field.type.width(column.field)))
    labels = column.classes()
    if labels is not None and len(labels):
        most = len(column.field.classes or ())
        wrong = wrong or bool(labels.min() < 0 or labels.max() >= max(most, 1))
    if wrong:
        raise damaged_index("the values of rows overlap, or a label is not a class")


def save_index(
    segments: Iterable[IndexSegment], directory: Path, schema: Schema | None = None
) -> list[str]:
    """Write the index of a dataset, and return the names of its files, relative to ``directory``.

    There is a segment for each shard, in order; one is in memory at a time. None for ``schema``
    means only images and labels.
    """
    schema = default_schema(None) if schema is None else schema
    rows = 0
    lasts = Counter[str]()
    files: dict[str, NpyWriter] = {}
    with contextlib.ExitStack() as stack:
        for segment in chain([join_segments((), schema)], segments):
            arrays = _arrays(segment)
            for name, array in arrays.items():
                if name not in files:
                    (directory / name).parent.mkdir(parents=True, exist_ok=True)
                    writer = NpyWriter(directory / name, array.dtype)
                    files[name] = stack.enter_context(contextlib.closing(writer))
                    if name.endswith(_PRESENT):
                        writer.append(np.ones(rows, np.bool_))
                files[name].append(array + lasts[name] if name.endswith(_ENDS) else array)
                if name.endswith(_ENDS) and len(array):
                    lasts[name] += int(array[-1])
            for name in files.keys() - arrays.keys():  # all rows of the segment have a value
                files[name].append(np.ones(len(segment.rows), np.bool_))
            rows += len(segment.rows)
    return [name for name in index_files(schema) if name in files]


def _arrays(segment: IndexSegment) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays to store, by file."""
    arrays: dict[str, npt.NDArray[Any]] = {ROWS_NAME: segment.rows}
    arrays |= {entries_file(name): entries for name, entries in segment.apart.items()}
    for name in _STRINGS:
        strings = join_strings(getattr(segment, name))
        arrays |= zip(string_files(name), strings, strict=True)
    for name, column in segment.columns.items():
        files = dict(zip(ENDINGS, column_files(name), strict=True))
        arrays |= {files[ending]: array for ending, array in column.arrays().items()}
    return arrays


def index_files(schema: Schema) -> list[str]:
    """Return the files that an index may have."""
    entries = [entries_file(name) for name in (IMAGE, *apart_of(schema))]
    strings = [file for name in _STRINGS for file in string_files(name)]
    return entries + strings + [file for name in columns_of(schema) for file in column_files(name)]


def _entries(segments: Sequence[IndexSegment], name: str) -> Rows:
    entries = [segment.rows if name == IMAGE else segment.apart[name] for segment in segments]
    if len(entries) == 1:
        return entries[0]
    return np.concatenate(entries) if entries else np.zeros(0, ROW)


def entries_file(field: str) -> str:
    """Return the file with the entries of a field with bytes of its own."""
    return ROWS_NAME if field == IMAGE else f"{INDEX_DIRECTORY}/fields/{field}.npy"


def column_files(name: str) -> tuple[str, ...]:
    """Return the files that the column of a small field may have, in the order of `ENDINGS`."""
    return tuple(f"{INDEX_DIRECTORY}/columns/{name}{ending}.npy" for ending in ENDINGS)


def string_files(name: str) -> tuple[str, str]:
    """Return the two files of ``keys`` or ``paths``: the text, and the end of each string."""
    return f"{INDEX_DIRECTORY}/{name}.npy", f"{INDEX_DIRECTORY}/{name}-ends.npy"
