"""Fields other than the primary image and the label, of many records at once."""

from __future__ import annotations

import json
import operator
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from shardkit.dataset.index import IndexSegment, Rows
from shardkit.dataset.index_builder import (
    FileWindow,
    IndexedRecords,
    ShardRecords,
    join_indexed,
    path_in,
)
from shardkit.formats.ranges import RangeReader
from shardkit.formats.table import Table
from shardkit.kinds.column import Column, presence
from shardkit.kinds.field import Schema
from shardkit.record import META_FIELD, STORED_KINDS, Record, checksums, image_kind
from shardkit.record_columns import RecordColumns
from shardkit.system import compiled

_LEAST_WINDOW = 1 << 16
_MOST_TIMES = 4
"""Records are read at once from a part of a shard of up to these bytes, plus so many times theirs:
tar files have a header of 512 bytes before each field."""

_MOST_METADATA = 1 << 22
"""Bytes of metadata that are parsed at once: parsed, they take ten times the memory."""

_PARSE = json.JSONDecoder().raw_decode

_ODD = (
    *(KeyError, OverflowError, RecursionError, TypeError, ValueError),
    struct.error,
)
"""Exceptions for values that only the reader of records accepts or explains."""

Known = npt.NDArray[np.bool_]
"""Whether each of some records is known, shape (records,)."""


def index_others(
    records: ShardRecords,
    table: Table,
    kinds: Mapping[str, int],
    window: FileWindow,
    derived: IndexedRecords,
) -> tuple[Known, FileWindow]:
    """Fill in entries and values of all fields, and return which records have only usual ones.

    ``window`` of the shard is in memory; return it, or a new one. If metadata have values, fill in
    paths and sizes, too. The reader of records indexes all of them again if one is odd, or explains
    what is wrong with it.
    """
    known: Known = np.ones(len(derived.keys), np.bool_)
    metas: Sequence[Mapping[str, Any]] = ()
    schema = records.schema
    if not window.content:
        window = _window(records, _small(table, derived, schema)) or window
    if not compiled.is_available() or any(schema[name].type.is_picture for name in derived.entries):
        return ~known, window
    try:
        if records.parses_meta:
            metas = _parse_metadata(records, table, kinds, window, derived)
        for name, column in derived.values.items():
            field = schema[name]
            if stored := field.stored_name(name):
                values: dict[int, Any] = _contents(records, _only(table, stored), window)
                if any(name in meta for meta in metas):
                    raise ValueError(f"the metadata have a {name}")
            else:
                values = {row: meta[name] for row, meta in enumerate(metas) if name in meta}
            packed = field.type.pack_stored(field, [*values.values()])
            for row, value in zip(values, packed, strict=True):
                column[row] = value
    except _ODD:
        return ~known, window
    for name, rows in derived.entries.items():
        field = schema[name]
        alone = _only(table, str(field.stored_name(name)))
        codes = {stored: STORED_KINDS.index(image_kind(stored)) for stored in alone.names}
        _, indexed = records.index_table(alone, codes, window, rows) or ([], False)
        known &= indexed
        if field.is_uniform:
            known &= (alone.offsets[:, 0] < 0) | (alone.lengths[:, 0] == field.bytes)
    return known, window


def _small(table: Table, derived: IndexedRecords, schema: Schema) -> Table:
    """Return the table of small fields alone: those with metadata and values of columns."""
    stored = {META_FIELD, *(schema[name].stored_name(name) for name in derived.values)}
    columns = [number for number, name in enumerate(table.names) if name in stored]
    return table._replace(offsets=table.offsets[:, columns], lengths=table.lengths[:, columns])


def _parse_metadata(
    records: ShardRecords,
    table: Table,
    kinds: Mapping[str, int],
    window: FileWindow,
    derived: IndexedRecords,
) -> Sequence[Mapping[str, Any]]:
    """Return the metadata of all records, and fill in paths and sizes of images."""
    alone = _only(table, META_FIELD)
    if alone.lengths.sum() > _MOST_METADATA:
        raise ValueError("the metadata are too large")
    contents = _contents(records, alone, window)
    metas = [*map(_parse_object, contents.values())]
    derived.paths[:] = map(path_in, metas)
    if len(metas) < len(table.ends):
        raise KeyError(META_FIELD)
    pictures = table.offsets[:, [kind >= 0 for kind in kinds.values()]]
    if pictures.size:
        pictured = (pictures.max(axis=1) >= 0).tolist()
        for side in ("width", "height"):
            sides = zip(metas, pictured, strict=True)
            derived.rows[side] = array("I", [meta[side] if has else 0 for meta, has in sides])
    return metas


def _parse_object(content: bytes) -> Mapping[str, Any]:
    """Return what `load_json` does, in half the time, if no space is around the object."""
    text = content.decode()
    value, end = _PARSE(text)
    if end < len(text) or not isinstance(value, dict):
        raise ValueError("it is not one JSON object")
    return value


def _contents(records: ShardRecords, alone: Table, window: FileWindow) -> dict[int, bytes]:
    """Return the bytes of a field in the records that have it, by row."""
    rows = np.flatnonzero(alone.offsets[:, 0] >= 0)
    ranges = np.concatenate([alone.offsets[rows], alone.lengths[rows]], axis=1)
    spans = ranges.cumsum(axis=1) - window.start
    if spans.min(initial=0) >= 0 and spans.max(initial=0) <= len(window.content):
        contents = [bytes(window.content[start:end]) for start, end in spans.tolist()]
    else:
        contents = cast(RangeReader, records.reader).read_ranges(ranges.tolist())
    return dict(zip(rows.tolist(), contents, strict=True))


def _only(table: Table, stored: str) -> Table:
    """Return the table of one field; of one without ranges, every row lacks it."""
    offsets = np.full((len(table.ends), 1), -1)
    lengths = np.zeros_like(offsets)
    if stored in table.names:
        number = table.names.index(stored)
        offsets[:, 0] = table.offsets[:, number]
        lengths[:, 0] = table.lengths[:, number]
    return table._replace(names=(stored,), offsets=offsets, lengths=lengths, labels=None)


def equal_others(derived: IndexedRecords, index: IndexSegment, rows: range) -> Known:
    """Return whether the other fields of each record are as the index of its shard says."""
    equal = np.ones(len(rows), np.bool_)
    inside = slice(rows.start, rows.stop)
    for name, entries in derived.entries.items():
        equal &= _as_numbers(entries) == _as_numbers(index.apart[name][inside])
    for name, values in derived.values.items():
        expected = map(index.columns[name].packed, rows)
        equal &= np.fromiter(map(operator.eq, values, expected), np.bool_, len(rows))
    return equal


def _as_numbers(entries: Rows) -> npt.NDArray[np.void]:
    """Return entries as single values of bytes, without fields."""
    return np.ascontiguousarray(entries).view(np.dtype((np.void, entries.dtype.itemsize)))


def read_intact(records: ShardRecords, rows: range, segment: IndexSegment) -> Sequence[Record]:
    """Return neighboring records of a shard, or none if one differs from its index."""
    reader = records.reader
    table = reader.table(rows) if isinstance(reader, RangeReader) else None
    if table and (window := _window(records, table)):
        known, indexed = records.index_known(rows, window, summed=False)
        if known.all():
            same = _are_equal(join_indexed([indexed], records.schema), segment)
            return _cut(table, indexed.keys, window) if same else []
    indexed = records.index(rows)
    read = records.reader.read(rows)
    # The bytes that were indexed may not be those that were read.
    same = checksums(read) == indexed.checksums
    return read if same and _are_equal(join_indexed([indexed], records.schema), segment) else []


def _window(records: ShardRecords, table: Table) -> FileWindow | None:
    """Return the part of the shard with neighboring records, if it has little else."""
    if table.labels is not None:
        return None
    stored = table.offsets >= 0
    start = int(table.offsets[stored].min(initial=sys.maxsize))
    size = int((table.offsets + table.lengths).max(initial=0)) - start
    if not 0 < size <= _LEAST_WINDOW + _MOST_TIMES * int(table.lengths[stored].sum()):
        return None
    content = records.at(start, size)
    return FileWindow(content, start) if len(content) == size else None


def _cut(table: Table, keys: list[str], window: FileWindow) -> RecordColumns:
    """Return the records that a window contains."""
    content = bytes(window.content)
    starts = table.offsets - window.start
    ends = (starts + table.lengths).T.tolist()
    columns: dict[str, list[bytes | None]] = {
        name: [content[start:end] if start >= 0 else None for start, end in zip(*span, strict=True)]
        for name, *span in zip(table.names, starts.T.tolist(), ends, strict=True)
    }
    return RecordColumns(keys, columns)


def _are_equal(first: IndexSegment, second: IndexSegment) -> bool:
    return (
        (first.keys, first.paths) == (second.keys, second.paths)
        and np.array_equal(first.rows, second.rows)
        and all(np.array_equal(rows, second.apart[name]) for name, rows in first.apart.items())
        and all(_are_same(column, second.columns[name]) for name, column in first.columns.items())
    )


def _are_same(first: Column, second: Column) -> bool:
    """Return whether two columns have the same bytes in all rows."""
    pairs: Sequence[tuple[Any, Any]] = (
        (first.ends, second.ends),
        (first.labels, second.labels),
        (presence(first), presence(second)),
    )
    equal = first.values.tobytes() == second.values.tobytes()
    return equal and all(a is b or np.array_equal(a, b) for a, b in pairs)
