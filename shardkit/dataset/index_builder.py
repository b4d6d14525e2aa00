"""Build a shard's segment of the index by reading all its records.

Conversions (which thus read back what they wrote), `shardkit index` and `shardkit verify` share
this code.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from shardkit.codecs.decode_errors import raise_interruption
from shardkit.contracts import Format, ShardReader
from shardkit.dataset.index import (
    INDEX_DIRECTORY,
    ROW,
    ROWS_NAME,
    IndexSegment,
    Rows,
    as_rows,
    column_files,
    entries_file,
    pack_row,
)
from shardkit.errors import CorruptShard
from shardkit.formats.ranges import RangeReader, reads_its_ranges
from shardkit.formats.table import Table
from shardkit.kinds.column import build_column, value_in
from shardkit.kinds.field import Field, Packed, Schema, apart_of, columns_of, load_schema
from shardkit.record import (
    ABSENT,
    IMAGE,
    IMAGE_FIELDS,
    LABEL_FIELD,
    META_FIELD,
    NO_LABEL,
    PRIMARY_ARRAY,
    STORED_KINDS,
    Record,
    checksums,
    image_kind,
)
from shardkit.system import compiled
from shardkit.system.late import load
from shardkit.system.text import fault, quoted, shortened

_READ_ROWS = 64
"""Records read at a time and held in memory together."""

_INDEX_ROWS = 4096
"""Records indexed in one call of the compiled module, which holds only one of them in memory."""

_MOST_NAMES = 8
"""Maximum fields of a shard that the compiled module indexes."""

_OTHER = -1
_LABEL = -2
_META = -3
_KINDS = {
    LABEL_FIELD: _LABEL,
    META_FIELD: _META,
    **{name: STORED_KINDS.index(image_kind(name)) for name in (*IMAGE_FIELDS, PRIMARY_ARRAY)},
}
"""Numbers of fields in the compiled module."""

_OTHERS = "shardkit.dataset.other_fields:index_others"

_LONGEST_REASON = 200
"""Maximum characters of an exception's message, which may quote stored data."""


class ShardRange(NamedTuple):
    """Neighboring records of a shard."""

    rows: slice = slice(None)
    """Their rows among the records between the offsets."""
    start: int = 0
    stop: int | None = None
    """Offsets in the file to read between, for a format with `shardkit.contracts.Chunks`."""


def index_shard(
    storage: Format,
    path: Path,
    see: Callable[[Sequence[str], Sequence[int]], None] | None = None,
    range_: ShardRange | None = None,
) -> IndexSegment:
    """Return the index of the shard at ``path``, or of a range of it, built from its content alone.

    ``see`` gets the keys and checksums (`shardkit.record.checksums`) of some records at a time, in
    order. None for ``range_`` reads all. Raises CorruptShard if the shard or a record is damaged.
    """
    batches: list[IndexedRecords] = []
    with open_records(storage, path, range_) as records:
        rows = range(len(records))[range_.rows if range_ else slice(None)]
        for start in range(0, len(rows), _INDEX_ROWS):
            batch = records.index(rows[start : start + _INDEX_ROWS])
            if see:
                see(batch.keys, batch.checksums)
            batches.append(batch)
        schema = records.schema
    return join_indexed(batches, schema)


def join_indexed(batches: Sequence[IndexedRecords], schema: Schema) -> IndexSegment:
    """Return the index of the records of several batches, in order."""
    return IndexSegment(
        np.concatenate([as_rows(()), *(batch.rows for batch in batches)]),
        [key for batch in batches for key in batch.keys],
        [path for batch in batches for path in batch.paths],
        {
            name: np.concatenate([as_rows(()), *(batch.entries[name] for batch in batches)])
            for name in apart_of(schema)
        },
        {
            name: build_column(field, [value for batch in batches for value in batch.values[name]])
            for name, field in columns_of(schema).items()
        },
    )


class Others(NamedTuple):
    """The fields of a record other than its primary image and label."""

    entries: dict[str, bytes]
    """A packed row of the index for each other field with bytes of its own, by name."""
    values: dict[str, Packed | None]
    """The value of each small field, by name."""


class IndexedRecords(NamedTuple):
    """Neighboring records of a shard, without their fields."""

    rows: Rows
    """Their rows of the index."""
    keys: list[str]
    paths: list[str]
    """Their source paths."""
    checksums: list[int]
    """Their `shardkit.record.checksums`."""
    entries: dict[str, Rows]
    """Their rows of the index of each other field with bytes of its own, by name."""
    values: dict[str, list[Packed | None]]
    """Their values of each small field, by name."""

    @classmethod
    def blank(cls, count: int, schema: Schema) -> IndexedRecords:
        """Return the index of records that are still unknown."""
        return cls(
            np.zeros(count, ROW),
            [""] * count,
            [""] * count,
            [0] * count,
            {name: np.zeros(count, ROW) for name in apart_of(schema)},
            {name: [None] * count for name in columns_of(schema)},
        )

    def put(self, position: int, record: IndexedRecord, checksum: int) -> None:
        """Fill in a record."""
        self.rows[position] = record.row[0]
        self.keys[position] = record.record.key
        self.paths[position] = record.path
        self.checksums[position] = checksum
        if record.others:
            for name, packed in record.others.entries.items():
                self.entries[name][position] = as_rows([packed])[0]
            for name, value in record.others.values.items():
                self.values[name][position] = value


class IndexedRecord(NamedTuple):
    """A record and its entry in the index."""

    record: Record
    packed: bytes
    """The record's row of the index, as bytes."""
    path: str
    """The record's source path."""
    others: Others | None = None
    """Its other fields; None if no record has any."""

    @property
    def row(self) -> Rows:
        """The record's row of the index, shape (1,)."""
        return as_rows([self.packed])


class FileWindow(NamedTuple):
    """A range of a file, in memory."""

    content: bytes | memoryview
    start: int
    """Its offset in the file."""


_NO_WINDOW = FileWindow(b"", 0)


class ShardRecords:
    """The records of a shard, read through its format and compared with its byte ranges."""

    def __init__(self, reader: ShardReader, path: Path) -> None:
        self.reader = reader
        """Reads records without comparing them."""
        self._path = path
        self._file = path.open("rb", buffering=0)
        self._descriptor = self._file.fileno()
        self._ranges = reader.ranges()
        # A reader that itself reads by its ranges needs no comparison with them.
        self._compares = not reads_its_ranges(reader)
        try:
            meta = reader.meta
            self.schema: Schema = load_schema(meta.get("schema"), meta.get("classes"))
            """The fields of all records, from the shard's metadata."""
        except (ValueError, TypeError) as error:
            raise CorruptShard(f"{path} is damaged: {error}") from error
        self._apart = apart_of(self.schema)
        self._small = columns_of(self.schema)
        self.parses_meta = not all(field.stored_name(name) for name, field in self._small.items())
        """Whether metadata have values of fields, which the compiled module does not parse."""
        self._numbers = {**_KINDS, META_FIELD: _OTHER} if self.parses_meta else _KINDS

    def __len__(self) -> int:
        return len(self.reader)

    def __enter__(self) -> ShardRecords:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the shard."""
        self._file.close()
        self.reader.close()

    @property
    def meta(self) -> Mapping[str, Any]:
        """The shard's metadata."""
        return self.reader.meta

    def read(self, rows: Sequence[int]) -> list[IndexedRecord]:
        """Return the records of ``rows``.

        Raises CorruptShard if a record has no image or an invalid label or metadata, or its byte
        range differs from what the format's reader returns.
        """
        try:
            records = self.reader.read(rows)
            return [self._index(record, row) for row, record in zip(rows, records, strict=True)]
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise_interruption(error)
            if len(rows) > 1:
                return [self.read([row])[0] for row in rows]  # the message names one row
            reason = shortened(fault(error), _LONGEST_REASON)
            raise CorruptShard(f"{self._path} is damaged at row {rows[0]}: {reason}") from error

    def index(self, rows: range) -> IndexedRecords:
        """Return the index of neighboring records."""
        done, indexed = self.index_known(rows)
        for start in range(0, len(rows), _READ_ROWS):
            unknown = np.flatnonzero(~done[start : start + _READ_ROWS])
            missing = (unknown + rows[start]).tolist()
            if not missing:
                continue
            records = self.read(missing)
            sums = checksums([entry.record for entry in records])
            for row, entry, checksum in zip(missing, records, sums, strict=True):
                indexed.put(row - rows.start, entry, checksum)
        return indexed

    def index_known(
        self, rows: range, window: FileWindow = _NO_WINDOW, *, summed: bool = True
    ) -> tuple[npt.NDArray[np.bool_], IndexedRecords]:
        """Return a mask of the records that the compiled module handles, and the index of all.

        It handles ordinary, intact records; the index is valid only for these. ``window`` of the
        shard is in memory and not read again. ``summed`` computes checksums, too.
        """
        index = IndexedRecords.blank(len(rows), self.schema)
        fields = self._apart | self._small
        table = None
        if not self._compares and isinstance(self.reader, RangeReader):
            table = self.reader.table(rows)
        indexed = keys = None
        usual: Any = True
        sums = np.zeros(len(rows), np.uint32)
        if table is not None and META_FIELD in table.names and len(table.names) <= _MOST_NAMES:
            kinds = {name: self._numbers.get(name, _OTHER) for name in table.names}
            if fields:
                usual, window = load(_OTHERS)(self, table, kinds, window, index)
            indexed = self.index_table(table, kinds, window, index.rows, sums if summed else None)
            with contextlib.suppress(UnicodeDecodeError):  # the record's reader explains it
                keys = table.keys()
        if indexed is None or keys is None:
            return np.zeros(len(rows), np.bool_), index
        paths, known = indexed
        known &= usual
        if self.parses_meta:
            paths = index.paths
        if IMAGE in self.schema and not fields:
            known &= index.rows["field"] != STORED_KINDS.index(ABSENT)
        return known, index._replace(keys=keys, paths=paths, checksums=sums.tolist())

    def index_table(
        self,
        table: Table,
        kinds: Mapping[str, int],
        window: FileWindow,
        rows: Rows,
        sums: npt.NDArray[np.uint32] | None = None,
    ) -> tuple[list[str], npt.NDArray[np.bool_]] | None:
        """Fill in rows of the index; return paths, and which are valid. None without the module."""
        indexed = compiled.index_records(
            self._descriptor,
            kinds,
            (table.offsets, table.lengths, table.labels, table.text, table.ends, table.start),
            window,
            (rows.view(np.uint8), sums),
        )
        return indexed and (indexed[0], indexed[1] == 0)

    def at(self, offset: int, length: int) -> bytes:
        """Return bytes of the shard, or fewer at its end."""
        return os.pread(self._descriptor, length, offset)

    def _index(self, record: Record, row: int) -> IndexedRecord:
        name = record.image_field
        meta = record.meta
        alone = not (self._apart or self._small)
        if name is not None:
            image = self._bytes_of(record, row, name)
            kind = image_kind(name)
            packed = pack_row(**image, label=record.label, size=_size(meta), field=kind)
        elif alone and IMAGE in self.schema:
            raise CorruptShard(f"{self._path} is damaged: record {quoted(record.key)} has no image")
        else:
            packed = _pack_absent(record.label)
        if alone:
            return IndexedRecord(record, packed, path_in(meta))
        others = Others(
            {
                field: self._pack_other(record, row, field, kind, meta)
                for field, kind in self._apart.items()
            },
            {field: value_in(record, meta, field, kind) for field, kind in self._small.items()},
        )
        return IndexedRecord(record, packed, path_in(meta), others)

    def _pack_other(
        self, record: Record, row: int, name: str, field: Field, meta: Mapping[str, Any]
    ) -> bytes:
        """Return the entry of an image, array or bytes other than the primary image."""
        stored = field.type.stored_in(record.fields, name)
        if stored is None:
            return _pack_absent(NO_LABEL)
        located = self._bytes_of(record, row, stored)
        if field.is_uniform and len(located["image"]) != field.bytes:
            raise ValueError(f"the array {quoted(name)} does not have the shape {field.shape}")
        size = _size(meta[name]) if field.type.is_picture else (0, 0)
        kind = stored.rpartition(".")[2]
        return pack_row(**located, label=NO_LABEL, size=size, field=kind)

    def _bytes_of(self, record: Record, row: int, stored: str) -> _Located:
        """Return the bytes of a field and where the file has them."""
        content = record.fields[stored]
        range_ = self._ranges[row].get(stored)
        if self._compares and range_ and self.at(*range_) != content:
            raise CorruptShard(
                f"{self._path} is damaged: record {quoted(record.key)} is not at byte "
                f"{range_.offset}"
            )
        return {"offset": range_.offset if range_ else -1, "image": content}


class _Located(TypedDict):
    """The bytes of a field, and their offset in the shard or -1."""

    offset: int
    image: bytes


def _pack_absent(label: int) -> bytes:
    return pack_row(offset=0, image=b"", label=label, size=(0, 0), field=ABSENT)


def _size(meta: Mapping[str, Any]) -> tuple[int, int]:
    return int(meta["width"]), int(meta["height"])


def path_in(meta: Mapping[str, Any]) -> str:
    """Return the source path in a record's metadata."""
    path = meta["path"]
    if not isinstance(path, str):
        raise ValueError(f"the path {quoted(path)} is not text")
    if not path.isascii():
        path.encode("utf-8", "surrogateescape")  # fails for a lone surrogate that is not an escape
    return path


def open_records(storage: Format, path: Path, range_: ShardRange | None = None) -> ShardRecords:
    """Open the shard at ``path`` to read its records, or those of a range of offsets."""
    if range_ and storage.chunks:
        reader = storage.chunks.read(path, range_.start, range_.stop)
    else:
        reader = storage.read(path)
    try:
        return ShardRecords(reader, path)
    except BaseException:
        reader.close()
        raise


def difference(entry: IndexedRecord, row: int, index: IndexSegment | None) -> tuple[str, str]:
    """Return how a record differs from the index ("" if it does not), and which index file."""
    if index is None or row >= len(index.keys):
        return ("", "") if index is None else ("it is not in the index", ROWS_NAME)
    if entry.path != index.paths[row]:
        return _name(entry), f"{INDEX_DIRECTORY}/paths.npy"
    if entry.record.key != index.keys[row]:
        return _name(entry), f"{INDEX_DIRECTORY}/keys.npy"
    wrong = [
        name
        for name in ("checksum", "label", "length", "width", "height", "field", "offset")
        if entry.row[name][0] != index.rows[name][row]
    ]
    if "checksum" in wrong:
        reason = "its image, label or size has changed: the checksum differs"
        return reason, ROWS_NAME
    if wrong:
        return f"the index has another {', another '.join(wrong)} for it", ROWS_NAME
    return _other_difference(entry.others, row, index) if entry.others else ("", "")


def _other_difference(others: Others, row: int, index: IndexSegment) -> tuple[str, str]:
    """Return how the other fields of a record differ from the index, and which index file."""
    for name, packed in others.entries.items():
        if packed != index.apart[name][row].tobytes():
            return f"its {name} or its index entry has changed", entries_file(name)
    for name, value in others.values.items():
        if value != index.columns[name].packed(row):
            return f"the index has a different {name} for it", column_files(name)[0]
    return "", ""


def _name(entry: IndexedRecord) -> str:
    return f"it is {quoted(entry.record.key)} from {quoted(entry.path)}"
