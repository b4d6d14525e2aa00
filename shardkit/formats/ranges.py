"""Read a shard as a file of byte ranges: the common part of the formats' readers.

Readers parse the files themselves; only writers use `lmdb` and `h5py`. They use only ``pread``: it
needs no lock, survives a fork, and reports a truncated file as an error instead of killing the
process with a signal. With readahead, a cold batch of ranges of 20 KB takes 40 us each; through a
map, whose pages fault one by one, 500 us.

The parsers trust nothing: they bound depths and counts, so that damage causes no endless loop, and
reject everything that shardkit's writers do not produce.
"""

from __future__ import annotations

import abc
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from shardkit.contracts import Range, ShardReader, ShardSpec, stated_arrays
from shardkit.errors import CorruptShard
from shardkit.formats.table import Table, TableRows, as_walked
from shardkit.kinds.field import Field
from shardkit.record import MAX_KEY_BYTES, Record, is_field_name, is_raw, load_json
from shardkit.system import compiled
from shardkit.system.compiled import WalkResult
from shardkit.system.files import open_regular
from shardkit.system.npy import npy_header, npy_values
from shardkit.system.safe_paths import UNFIT, naming
from shardkit.system.text import quoted

_RAW = "raw"

NPY = ".npy"
"""Raw pixels and arrays of one shape are stored as an .npy file, which numpy opens; a record holds
only their values. Raw pixels get this suffix in addition to their name."""

KEY = "__key__"
"""Name under which formats other than tar store a record's key."""

META = "__shardkit__"
"""Name under which every format stores the shard's metadata, a JSON object."""

_RAW_HEADER_BYTES = 128
"""Length of the .npy header for the shape of an image: a multiple of 64 that always fits."""

_RUN_BYTES = 1 << 20
_GAP_BYTES = 1 << 12
"""Ranges are read in one call up to this size if no larger gap separates them: a call takes as long
as copying some 10 KB."""


def stored_fields(record: Record, spec: ShardSpec) -> list[tuple[str, bytes]]:
    """Return the stored names and contents of a record's fields, sorted by name.

    Raises ValueError if raw pixels or an array do not have the shape of the shard.
    """
    return sorted(
        (name if name.endswith(NPY[1:]) else name + NPY, header + value)
        if (header := header_of(record, name, spec))
        else (name, value)
        for name, value in record.fields.items()
    )


def header_of(record: Record, name: str, spec: ShardSpec) -> bytes:
    """Return the .npy header of a field that a record holds without one; else nothing.

    The shard's metadata state dtype and shape. So the index locates the values, and a batch of
    arrays is read into one block, as raw pixels are. Raises ValueError if the field does not have
    the shape that the shard states for it.
    """
    shape: tuple[int, ...] | None
    if name in spec.arrays:
        dtype = spec.arrays[name].values
        shape = spec.arrays[name].shape
    elif is_raw(name):
        dtype = np.dtype(np.uint8)
        shape = spec.raw_shape
    else:
        return b""
    if shape is None or len(record.fields[name]) != math.prod(shape) * dtype.itemsize:
        raise ValueError(
            f"record {quoted(record.key)} has {len(record.fields[name])} bytes of {name}, which do "
            f"not fit the shape {shape} of its shard"
        )
    return npy_header(shape, dtype)


def reads_its_ranges(reader: ShardReader) -> bool:
    """Return whether ``reader.read`` returns exactly the bytes at ``reader.ranges()``."""
    kind = type(reader)
    return kind.read is RangeReader.read and kind.ranges is RangeReader.ranges


class RangeReader(abc.ABC):
    """A `ShardReader` over ranges; a subclass finds them when it opens the file.

    Raises:
        CorruptShard: If the file cannot be opened.
    """

    meta: Mapping[str, Any]

    def __init__(self, path: Path) -> None:
        self.path = path
        self.meta = {}
        self._keys: Sequence[str] = []
        self._fields: Sequence[Mapping[str, Range]] = []
        self._raw_checked: tuple[bytes, int] | None = None
        self._table: Table | None = None
        self._arrays: Mapping[str, Field] = {}
        """Arrays of one shape, once the metadata are known."""
        try:
            self._file = open_regular(path)
        except UNFIT as error:
            raise CorruptShard(f"{path} cannot be opened: {error.strerror}", where=path) from error
        try:
            with naming(path):
                self._size = os.fstat(self._file.fileno()).st_size
                self._find()
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._keys)

    def read(self, rows: Sequence[int]) -> list[Record]:
        """Return the records of ``rows``: same order, duplicates and all."""
        for row in rows:
            if not 0 <= row < len(self._keys):
                raise IndexError(f"row {row} is not in {self.path}, which has {len(self)} rows")
        fields = [self._fields[row] for row in rows]
        contents = iter(self.read_ranges([span for named in fields for span in named.values()]))
        return [
            self._record(row, {name: next(contents) for name in named})
            for row, named in zip(rows, fields, strict=True)
        ]

    def ranges(self) -> Sequence[Mapping[str, Range]]:
        """Return, for each row, the position of each field in the file."""
        return self._fields

    def table(self, rows: range) -> Table | None:
        """Return keys and ranges of neighboring rows (step 1) as arrays; None if unknown."""
        return self._table and self._table.take(rows)

    def close(self) -> None:
        """Release the file; closing twice does nothing."""
        self._file.close()

    def _record(self, row: int, fields: dict[str, bytes]) -> Record:
        return Record(self._keys[row], fields | self._numbers(row))

    def _numbers(self, row: int) -> dict[str, bytes]:
        """Return the fields of a row that the file stores as numbers."""
        return {}

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the content of each range, reading neighbors in the file together."""
        order = sorted(range(len(ranges)), key=ranges.__getitem__)
        contents = [b""] * len(ranges)
        first = 0
        while first < len(order):
            start, size = ranges[order[first]]
            last = first + 1
            end = start + size
            while last < len(order):
                offset, length = ranges[order[last]]
                if offset - end > _GAP_BYTES or offset + length - start > _RUN_BYTES:
                    break
                last = last + 1
                end = max(end, offset + length)
            data = self._pread(Range(start, end - start))
            for number in order[first:last]:
                offset, length = ranges[number]
                contents[number] = data[offset - start : offset - start + length]
            first = last
        return contents

    def _pread(self, range_: Range) -> bytes:
        if range_.offset < 0 or range_.offset + range_.length > self._size:
            self._fail(f"the file ends before byte {range_.offset + range_.length}")
        data = os.pread(self._file.fileno(), range_.length, range_.offset)
        if len(data) != range_.length:
            self._fail(f"only {len(data)} of {range_.length} bytes at {range_.offset} can be read")
        return data

    def _field(self, stored: str, range_: Range) -> tuple[str, Range]:
        """Return the name and range of the field stored under the name ``stored``."""
        name = stored.removesuffix(NPY)
        if is_raw(name) and name != stored:
            typed = name in self._arrays
            return name, self._values(name, range_) if typed else self._raw_values(range_)
        if stored in self._arrays:
            return stored, self._values(stored, range_)
        if not is_field_name(stored) or is_raw(stored):
            self._fail(f"it has a field {quoted(stored)}")
        return stored, range_

    def _values(self, stored: str, range_: Range) -> Range:
        """Return the range of the values of an array of one shape."""
        field = self._arrays[stored]
        header = npy_header(field.shape or (), field.values)
        values = Range(range_.offset + len(header), field.bytes)
        if range_.length != len(header) + field.bytes:
            self._fail(f"the array at byte {range_.offset} does not have the shape {field.shape}")
        if self._pread(Range(range_.offset, len(header))) != header:
            self._fail(f"the header of the array at {range_.offset} differs from the schema")
        return values

    def _raw_values(self, range_: Range) -> Range:
        """Return the range of the pixels of an .npy file."""
        header = self._pread(Range(range_.offset, min(_RAW_HEADER_BYTES, range_.length)))
        if (header, range_.length) != self._raw_checked:
            self._check_raw(range_)
            self._raw_checked = header, range_.length
        return Range(range_.offset + len(header), range_.length - len(header))

    def _check_key_size(self, size: int) -> None:
        """Refuse a key of a length that no path can have, before reading it."""
        if not 0 < size <= MAX_KEY_BYTES:
            self._fail(f"it has a key of {size} bytes; 1 to {MAX_KEY_BYTES} are allowed")

    def _parse_meta(self, range_: Range) -> dict[str, Any]:
        try:
            meta = load_json(self._pread(range_))
        except ValueError as error:
            self._fail(f"its metadata is not a JSON object: {error}")
        try:
            self._arrays = stated_arrays(meta)
        except ValueError as error:
            self._fail(str(error))
        return meta

    def _check_raw(self, range_: Range) -> None:
        try:
            start, _ = npy_values(self._pread(range_))
        except ValueError as error:
            self._fail(f"the array at byte {range_.offset} was not written by shardkit: {error}")
        if start != _RAW_HEADER_BYTES:
            self._fail(f"the header of the array at {range_.offset} has {start} bytes")

    def _take(self, walked: WalkResult | None) -> bool:
        """Take the records that the compiled module found; return whether they are usual ones."""
        if walked is None:
            return False
        meta, raw_header, table = as_walked(walked)
        names = tuple(_RAW if name == _RAW + NPY else name for name in table.names)
        try:
            keys = table.keys()
        except UnicodeDecodeError:
            return False
        if _RAW in table.names or not all(map(is_field_name, names)) or len({*keys}) < len(keys):
            return False
        if meta.length:
            self.meta = self._parse_meta(meta)
        if raw_header and _RAW not in self._arrays:
            column = names.index(_RAW)
            stored = table.offsets[:, column] >= 0
            starts = table.offsets[stored, column]
            sizes = table.lengths[stored, column]
            if (sizes != sizes[0]).any():
                return False
            self._check_raw(Range(int(starts[0]), int(sizes[0])))
            table.offsets[stored, column] += _RAW_HEADER_BYTES
            table.lengths[stored, column] -= _RAW_HEADER_BYTES
        for number, name in enumerate(names):
            if name in self._arrays:
                self._move_to_values(table, number, name)
        self._table = table._replace(names=names)
        self._keys = keys
        self._fields = TableRows(self._table)
        return True

    def _move_to_values(self, table: Table, number: int, name: str) -> None:
        """Let the ranges of an array of one shape exclude its headers."""
        rows = np.flatnonzero(table.offsets[:, number] >= 0)
        field = self._arrays[name]
        header = npy_header(field.shape or (), field.values)
        size = len(header) + field.bytes
        starts = table.offsets[rows, number]
        is_inside = (table.lengths[rows, number] == size) & (starts + size <= self._size)
        if is_inside.all() and compiled.ranges_start(self._file.fileno(), starts, header):
            table.offsets[rows, number] += len(header)
            table.lengths[rows, number] = field.bytes
            return
        for row in rows.tolist():
            stored = Range(int(table.offsets[row, number]), int(table.lengths[row, number]))
            table.offsets[row, number], table.lengths[row, number] = self._values(name, stored)

    @abc.abstractmethod
    def _find(self) -> None:
        """Find the records: set `meta`, the keys, and the ranges of the fields.

        Ranges must not overlap, so that all fields together fit into the size of the file.
        """

    def _fail(self, reason: str) -> NoReturn:
        raise CorruptShard(f"{self.path} is damaged: {reason}", where=self.path)
