"""A shard that is read as a file of byte ranges: what the formats' readers have in common.

Reading goes by ``pread`` alone: it needs no lock, survives a fork, and turns a file that was cut
into an error instead of a signal that kills the process.
"""

from __future__ import annotations

import abc
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from shardkit.contracts import Range, ShardReader
from shardkit.errors import CorruptShard
from shardkit.files import open_regular
from shardkit.npy import npy_header, npy_values
from shardkit.record import Record, is_field_name, load_json

RAW = "raw"
STORED_RAW = "raw.npy"
"""Raw pixels are stored as an .npy file, which numpy opens; a record has the pixels alone."""

KEY = "__key__"
"""Under this name a format that is no tar stores a record's key."""

META = "__shardkit__"
"""Under this name every format stores the shard's description of itself, a JSON object."""

_NPY_HEADER_BYTES = 128
"""The length of the .npy header of any image's shape: a multiple of 64, and one is too short."""


def stored_fields(record: Record, raw_shape: tuple[int, ...] | None) -> list[tuple[str, bytes]]:
    """Return the names and contents under which a record's fields are stored, sorted by name.

    Raises:
        ValueError: If raw pixels are not of the shape ``raw_shape``.
    """
    fields = dict(record.fields)
    if RAW in fields:
        check_raw(record, raw_shape)
        fields[STORED_RAW] = npy_header(raw_shape or ()) + fields.pop(RAW)
    return sorted(fields.items())


def check_raw(record: Record, raw_shape: tuple[int, ...] | None) -> None:
    """Refuse a record whose raw pixels are not of the shape that its shard has.

    Raises:
        ValueError: If that is so.
    """
    if raw_shape is None or len(record.fields[RAW]) != math.prod(raw_shape):
        raise ValueError(
            f"record {record.key!r} has {len(record.fields[RAW])} bytes of raw pixels, which is "
            f"not the shape {raw_shape} of its shard"
        )


def reads_its_ranges(reader: ShardReader) -> bool:
    """Tell whether ``reader.read`` gives just what lies at ``reader.ranges()``."""
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
        self._keys: list[str] = []
        self._fields: list[dict[str, Range]] = []
        self._raw_checked: tuple[bytes, int] | None = None
        try:
            self._file = open_regular(path)
            self._size = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise CorruptShard(f"{path} cannot be opened: {error.strerror}") from error
        try:
            self._find()
            if sum(range_.length for row in self._fields for range_ in row.values()) > self._size:
                self._fail("its values overlap")  # read together, they would fill the memory
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._keys)

    def read(self, rows: Sequence[int]) -> list[Record]:
        """Return the records of ``rows``: same order, duplicates and all."""
        return [self._record(row) for row in rows]

    def ranges(self) -> Sequence[Mapping[str, Range]]:
        """Return, for each row, where each of its fields lies in the file."""
        return self._fields

    def close(self) -> None:
        """Release the file; closing twice does nothing."""
        self._file.close()

    def _record(self, row: int) -> Record:
        if not 0 <= row < len(self._keys):
            raise IndexError(f"row {row} is not in {self.path}, which has {len(self._keys)} rows")
        fields = {name: self._pread(range_) for name, range_ in self._fields[row].items()}
        try:
            return Record(self._keys[row], fields | self._numbers(row))
        except ValueError as error:
            self._fail(str(error))

    def _numbers(self, row: int) -> dict[str, bytes]:
        """Return the fields of a row that the file keeps as numbers."""
        return {}

    def _pread(self, range_: Range) -> bytes:
        if range_.offset < 0 or range_.offset + range_.length > self._size:
            self._fail(f"the file ends before byte {range_.offset + range_.length}")
        data = os.pread(self._file.fileno(), range_.length, range_.offset)
        if len(data) != range_.length:
            self._fail(f"only {len(data)} of {range_.length} bytes at {range_.offset} can be read")
        return data

    def _field(self, stored: str, range_: Range) -> tuple[str, Range]:
        """Return name and range of the field that stands in the file under the name ``stored``."""
        if stored != STORED_RAW:
            if not is_field_name(stored) or stored == RAW:
                self._fail(f"it has a field {stored!r}")
            return stored, range_
        header = self._pread(Range(range_.offset, min(_NPY_HEADER_BYTES, range_.length)))
        if (header, range_.length) != self._raw_checked:
            self._check_raw(range_)
            self._raw_checked = header, range_.length
        return RAW, Range(range_.offset + len(header), range_.length - len(header))

    def _parse_meta(self, range_: Range) -> dict[str, Any]:
        try:
            return load_json(self._pread(range_))
        except ValueError as error:
            self._fail(f"its description of itself is not a JSON object: {error}")

    def _check_raw(self, range_: Range) -> None:
        try:
            start, _ = npy_values(self._pread(range_))
        except ValueError as error:
            self._fail(f"the array at {range_.offset} is not as shardkit writes it: {error}")
        if start != _NPY_HEADER_BYTES:
            self._fail(f"the header of the array at {range_.offset} has {start} bytes")

    @abc.abstractmethod
    def _find(self) -> None:
        """Find the records: fill `meta`, the keys, and the ranges of the fields."""

    def _fail(self, reason: str) -> NoReturn:
        raise CorruptShard(f"{self.path} is damaged: {reason}")
