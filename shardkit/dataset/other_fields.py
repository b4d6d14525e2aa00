"""Fields other than the primary image and the label, of many records at once."""

from __future__ import annotations

import operator
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

Known = npt.NDArray[np.bool_]
"""Whether each of some records is known, shape (records,)."""


def index_others(
    records: ShardRecords, table: Table, window: FileWindow, known: Known, found: IndexedRecords
) -> None:
    """Fill in entries and values of all fields, which have names of their own.

    ``window`` of the shard is in memory. ``known`` are records whose image and label are known;
    those with odd values are removed from it.
    """
    for name, rows in found.entries.items():
        field = records.schema[name]
        alone = _only(table, name, field)
        kinds = {stored: STORED_KINDS.index(image_kind(stored)) for stored in alone.names}
        _, indexed = records.index_table(alone, kinds, window, rows) or ([], False)
        known &= indexed
        if field.is_uniform:
            known &= (alone.offsets[:, 0] < 0) | (alone.lengths[:, 0] == field.bytes)
    for name, values in found.values.items():
        field = records.schema[name]
        alone = _only(table, name, field)
        there = np.flatnonzero(known & (alone.offsets[:, 0] >= 0))
        ranges = np.stack([alone.offsets[there, 0], alone.lengths[there, 0]], 1).tolist()
        contents = cast(RangeReader, records.reader).read_ranges(ranges)
        for row, content in zip(there.tolist(), contents, strict=True):
            try:
                values[row] = pack_value(field, field.type.parse(field, content))
            except ValueError:  # the record's reader explains it
                known[row] = False


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


def equal_others(found: IndexedRecords, index: IndexSegment, rows: range) -> Known:
    """Return whether the other fields of each record are as the index of its shard says."""
    equal = np.ones(len(rows), np.bool_)
    inside = slice(rows.start, rows.stop)
    for name, entries in found.entries.items():
        equal &= _as_numbers(entries) == _as_numbers(index.apart[name][inside])
    for name, values in found.values.items():
        wanted = map(index.columns[name].packed, rows)
        equal &= np.fromiter(map(operator.eq, values, wanted), np.bool_, len(rows))
    return equal


def _as_numbers(entries: Rows) -> npt.NDArray[np.void]:
    """Return entries as single values of bytes, without fields."""
    return np.ascontiguousarray(entries).view(np.dtype((np.void, entries.dtype.itemsize)))


def read_intact(records: ShardRecords, rows: range, segment: IndexSegment) -> list[Record]:
    """Return neighboring records of a shard, or none if one differs from its index."""
    indexed = records.index(rows)
    read = records.reader.read(rows)
    # The bytes that were indexed may not be those that were read.
    same = checksums(read) == indexed.checksums
    return read if same and _are_equal(join_indexed([indexed], records.schema), segment) else []


def _are_equal(one: IndexSegment, other: IndexSegment) -> bool:
    return (
        (one.keys, one.paths) == (other.keys, other.paths)
        and np.array_equal(one.rows, other.rows)
        and all(np.array_equal(rows, other.apart[name]) for name, rows in one.apart.items())
        and all(_are_same(column, other.columns[name]) for name, column in one.columns.items())
    )


def _are_same(one: Column, other: Column) -> bool:
    """Return whether two columns have the same bytes in all rows."""
    pairs: Sequence[tuple[Any, Any]] = (
        (one.ends, other.ends),
        (one.labels, other.labels),
        (presence(one), presence(other)),
    )
    same = one.values.tobytes() == other.values.tobytes()
    return same and all(mine is its or np.array_equal(mine, its) for mine, its in pairs)
