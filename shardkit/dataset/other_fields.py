"""Fields other than the primary image and the label, of many records at once."""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from shardkit.dataset.index import IndexSegment, Rows
from shardkit.dataset.index_builder import FileWindow, IndexedRecords, ShardRecords, join_indexed
from shardkit.formats.ranges import RangeReader
from shardkit.formats.table import Table
from shardkit.kinds.column import Column, pack_value, presence
from shardkit.kinds.field import Field
from shardkit.record import STORED_KINDS, Record, checksums, image_kind

_LEAST_WINDOW = 1 << 16
_MOST_TIMES = 4
"""Records are read at once from a part of a shard of up to these bytes, plus so many times theirs:
tar files have a header of 512 bytes before each field."""

Known = npt.NDArray[np.bool_]
"""Whether each of some records is known, shape (records,)."""


def index_others(
    records: ShardRecords, table: Table, window: FileWindow, handled: Known, derived: IndexedRecords
) -> None:
    """Fill in entries and values of all fields, which have names of their own.

    ``window`` of the shard is in memory. ``handled`` are records whose image and label are known;
    those with odd values are removed from it.
    """
    for name, rows in derived.entries.items():
        field = records.schema[name]
        alone = _only(table, name, field)
        kinds = {stored: STORED_KINDS.index(image_kind(stored)) for stored in alone.names}
        _, indexed = records.index_table(alone, kinds, window, rows) or ([], False)
        handled &= indexed
        if field.is_uniform:
            handled &= (alone.offsets[:, 0] < 0) | (alone.lengths[:, 0] == field.bytes)
    for name, values in derived.values.items():
        field = records.schema[name]
        alone = _only(table, name, field)
        present = np.flatnonzero(handled & (alone.offsets[:, 0] >= 0))
        ranges = np.stack([alone.offsets[present, 0], alone.lengths[present, 0]], 1).tolist()
        contents = cast(RangeReader, records.reader).read_ranges(ranges)
        for row, content in zip(present.tolist(), contents, strict=True):
            try:
                values[row] = pack_value(field, field.type.parse(field, content))
            except ValueError:  # the record's reader explains it
                handled[row] = False


def _only(table: Table, name: str, field: Field) -> Table:
    """Return the table of one field; of one without ranges, every row lacks it."""
    stored = str(field.stored_name(name))
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


def read_intact(records: ShardRecords, rows: range, segment: IndexSegment) -> list[Record]:
    """Return neighboring records of a shard, or none if one differs from its index."""
    if (window := _window(records, rows)) is not None:
        known, indexed = records.index_known(rows, window, summed=False)
        if known.all():
            same = _are_equal(join_indexed([indexed], records.schema), segment)
            return _cut(records, rows, indexed.keys, window) if same else []
    indexed = records.index(rows)
    read = records.reader.read(rows)
    # The bytes that were indexed may not be those that were read.
    same = checksums(read) == indexed.checksums
    return read if same and _are_equal(join_indexed([indexed], records.schema), segment) else []


def _window(records: ShardRecords, rows: range) -> FileWindow | None:
    """Return the part of the shard with neighboring records, if it has little else."""
    reader = records.reader
    table = reader.table(rows) if isinstance(reader, RangeReader) else None
    if table is None or table.labels is not None:
        return None
    stored = table.offsets >= 0
    start = int(table.offsets[stored].min(initial=sys.maxsize))
    size = int((table.offsets + table.lengths).max(initial=0)) - start
    if not 0 < size <= _LEAST_WINDOW + _MOST_TIMES * int(table.lengths[stored].sum()):
        return None
    content = records.at(start, size)
    return FileWindow(content, start) if len(content) == size else None


def _cut(
    records: ShardRecords, rows: range, keys: Sequence[str], window: FileWindow
) -> list[Record]:
    """Return the records that a window contains."""
    table = cast(RangeReader, records.reader).table(rows)
    assert table is not None
    starts = table.offsets - window.start
    spans = np.stack([starts, starts + table.lengths], -1).tolist()
    return [
        Record(
            key,
            {
                name: bytes(window.content[start:end])
                for name, (start, end) in zip(table.names, row, strict=True)
                if start >= 0
            },
        )
        for key, row in zip(keys, spans, strict=True)
    ]


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
