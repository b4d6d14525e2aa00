"""HDF5: one group for each field, its values end to end in one contiguous dataset.

Contiguous, because then a value is a plain piece of the file: ``pread`` at the dataset's offset
takes 3 us where h5py takes 15, and no version of HDF5 has trouble with it.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import h5py
import numpy as np
import numpy.typing as npt

from shardkit.contracts import Format, Range, ShardSpec
from shardkit.files import Appender, write_all
from shardkit.formats.hdf5_layout import MalformedHdf5Error, StoredArray, find_arrays
from shardkit.formats.ranges import KEY, META, RAW, RangeReader, check_raw
from shardkit.record import (
    LABEL_FIELD,
    NO_LABEL,
    Record,
    dump_json,
    is_field_name,
    parse_label,
)

_COPY_BYTES = 1 << 20

_STRUCTURE_BYTES = 1 << 16
"""More than HDF5 needs for groups and headers of some twenty datasets."""

# Files must open with h5py of years ago: "latest" would use structures that HDF5 1.14 cannot read.
_WRITE_VERSIONS = ("earliest", "v110")

_BYTE, _LABEL = "|u1", "<i8"


class _Column:
    """The values of one field, spooled to a nameless file until the sizes are known.

    A contiguous dataset cannot grow, and a shard may not fit into memory.
    """

    def __init__(self, folder: Path) -> None:
        self.spool: IO[bytes] = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self._appender = Appender(self.spool.fileno())
        self.lengths: list[int] = []
        self.missing: list[int] = []

    def append(self, value: bytes) -> None:
        self._appender.append(value)
        self.lengths.append(len(value))

    def values(self) -> IO[bytes]:
        """Return the file of all values, none of them waiting to be written."""
        self._appender.flush()
        return self.spool

    def fill(self, rows: int) -> None:
        """Note that the rows up to ``rows`` lack this field."""
        for row in range(len(self.lengths), rows):
            self.missing.append(row)
            self.lengths.append(0)


class Hdf5Writer:
    """Spools each field, and lays the file out when all sizes are known.

    HDF5 makes the structure; the values are written past it, to where it says they belong. For on a
    full disk the library does not report the failure but crashes, and this is faster, too.
    """

    def __init__(self, path: Path, spec: ShardSpec) -> None:
        self._path = path
        self._spec = spec
        self._rows = 0
        self._labels: list[int] = []
        self._columns: dict[str, _Column] = {KEY: _Column(path.parent)}

    def write(self, record: Record) -> None:
        """Append ``record`` as the next row.

        Raises:
            ValueError: If its label is not a number, or its raw pixels are not of the given shape.
            OSError: If the disk is full or fails.
        """
        fields = dict(record.fields)
        label = fields.pop(LABEL_FIELD, None)
        self._labels.append(NO_LABEL if label is None else parse_label(label))
        if RAW in fields:
            check_raw(record, self._spec.raw_shape)
        for name, value in {KEY: record.key.encode(), **fields}.items():
            if name not in self._columns:
                self._columns[name] = _Column(self._path.parent)
            self._columns[name].fill(self._rows)
            self._columns[name].append(value)
        self._rows += 1

    def close(self) -> None:
        """Lay out the file from what was spooled, and complete it.

        Raises:
            OSError: If the disk is full or fails.
        """
        contents = self._contents()
        _probe(self._path, sum(content.bytes for content in contents.values()))
        with (
            _disk_errors(self._path),
            h5py.File(self._path, "x", libver=_WRITE_VERSIONS) as file,
        ):
            offsets = {name: content.place_in(file, name) for name, content in contents.items()}
        with self._path.open("r+b", buffering=0) as plain:
            for name, content in contents.items():
                _move(content.values, plain, offsets[name])
        self.abort()

    def abort(self) -> None:
        """Release the spooled values."""
        for column in self._columns.values():
            with contextlib.suppress(OSError):
                column.spool.close()
        self._columns.clear()

    def _contents(self) -> dict[str, _Content]:
        """Return all datasets of the file, in the order in which they stand there."""
        meta = np.frombuffer(dump_json(self._spec.meta), np.uint8)
        contents = {META: _Content.of(meta)}
        if any(label != NO_LABEL for label in self._labels):
            contents[f"{LABEL_FIELD}/data"] = _Content.of(np.array(self._labels, np.int64))
        for name, column in sorted(self._columns.items()):
            column.fill(self._rows)
            values = column.values()
            if name == RAW and not column.missing:
                shape = (self._rows, *(self._spec.raw_shape or ()))
                contents[f"{name}/data"] = _Content(shape, np.dtype(np.uint8), values)
                continue
            total = (sum(column.lengths),)
            contents[f"{name}/data"] = _Content(total, np.dtype(np.uint8), values)
            ends = np.cumsum([0, *column.lengths], dtype=np.int64)
            contents[f"{name}/offsets"] = _Content.of(ends)
            if column.missing:
                present = np.ones(self._rows, np.uint8)
                present[column.missing] = 0
                contents[f"{name}/present"] = _Content.of(present)
        return contents


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Turn what h5py raises while it writes into `OSError`; it says the number in many words."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        match = re.search(r"errno = ([0-9]+)", str(error))
        if match is None:
            raise
        code = int(match[1])
        raise OSError(code, os.strerror(code), str(path)) from error


class _Content(NamedTuple):
    """One dataset to be: its shape and type, and a file to read its values from."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    values: IO[bytes]

    @classmethod
    def of(cls, array: npt.NDArray[Any]) -> _Content:
        return cls(array.shape, array.dtype, io.BytesIO(array.tobytes()))

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def place_in(self, file: h5py.File, name: str) -> int:
        """Make the dataset without writing its values; return where in the file they belong."""
        settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        settings.set_layout(h5py.h5d.CONTIGUOUS)
        settings.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        settings.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        settings.set_obj_track_times(False)  # the same input gives the same bytes
        group, _, last = name.rpartition("/")
        place = file.require_group(group) if group else file
        dataset = h5py.h5d.create(
            place.id,
            last.encode(),
            h5py.h5t.py_create(self.dtype),
            h5py.h5s.create_simple(self.shape),
            settings,
        )
        return dataset.get_offset() or 0


def _move(values: IO[bytes], target: IO[bytes], offset: int) -> None:
    """Move what ``values`` holds to ``offset`` of ``target``, the end first.

    So what was moved can be cut off at once, and its memory, if not its disk, is used again: to
    fill memory that was not in use lately takes several times as long.
    """
    left = values.seek(0, os.SEEK_END)
    while left:
        start = max(0, left - _COPY_BYTES)
        values.seek(start)
        block = values.read(left - start)
        if len(block) != left - start:
            raise OSError(f"{target.name}: {len(block)} of {left - start} bytes came back")
        target.seek(offset + start)
        write_all(target.fileno(), block)
        values.truncate(start)
        left = start


def _probe(path: Path, size: int) -> None:
    """Try whether the disk takes ``size`` bytes and HDF5's structures, before HDF5 does.

    Raises:
        OSError: If it does not.
    """
    if not hasattr(os, "posix_fallocate"):
        return
    with path.open("xb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size + _STRUCTURE_BYTES)
        finally:
            path.unlink()


class Hdf5Reader(RangeReader):
    """Reads a finished file by what its structure says of its datasets; without HDF5's library.

    Raises:
        CorruptShard: If the file is cut, or is not an HDF5 file as shardkit writes it.
    """

    def _find(self) -> None:
        try:
            arrays = find_arrays(self._file.fileno(), self._size)
        except MalformedHdf5Error as error:
            self._fail(str(error))
        meta = arrays.pop(META, None)
        if meta is None or (meta.dtype, len(meta.shape)) != (_BYTE, 1):
            self._fail("it has no description of itself")
        self.meta = self._parse_meta(Range(meta.offset, meta.length))
        columns: dict[str, dict[str, StoredArray]] = {}
        for name, array in arrays.items():
            field, _, part = name.partition("/")
            columns.setdefault(field, {})[part] = array
        self._labels = self._list(columns.pop(LABEL_FIELD, {}).get("data"), _LABEL)
        self._keys = self._read_keys(columns.pop(KEY, {}))
        rows = len(self._keys)
        if self._labels is not None and len(self._labels) != rows:
            self._fail(f"it has {len(self._labels)} labels for {rows} rows")
        self._fields = [{} for _ in range(rows)]
        for name, parts in columns.items():
            if not is_field_name(name):
                self._fail(f"it has a field {name!r}")
            ranges = self._ranges(name, parts)
            if len(ranges) != rows:
                self._fail(f"field {name!r} has {len(ranges)} rows, not {rows}")
            for fields, range_ in zip(self._fields, ranges, strict=True):
                if range_ is not None:
                    fields[name] = range_

    def _record(self, row: int) -> Record:
        record = super()._record(row)
        if not _is_utf8(record.key):
            self._fail(f"the key {record.key!r} of row {row} is not UTF-8")
        return record

    def _numbers(self, row: int) -> dict[str, bytes]:
        if self._labels is None or self._labels[row] == NO_LABEL:
            return {}
        return {LABEL_FIELD: b"%d" % self._labels[row]}

    def _read_keys(self, parts: dict[str, StoredArray]) -> list[str]:
        ranges = self._ranges(KEY, parts)
        first = parts["data"].offset
        text = self._pread(Range(first, parts["data"].length))
        # One that is damaged spoils its own record alone.
        return [
            text[start - first : start - first + length].decode("utf-8", "surrogateescape")
            for start, length in filter(None, ranges)
        ]

    def _ranges(self, name: str, parts: dict[str, StoredArray]) -> list[Range | None]:
        """Return where the value of each row lies; None where there is none."""
        data = parts.get("data")
        if data is None or data.dtype != _BYTE:
            self._fail(f"field {name!r} has no values, or not bytes")
        ends = self._list(parts.get("offsets"), _LABEL)
        present = self._list(parts.get("present"), _BYTE)
        if ends is None and name == RAW and len(data.shape) > 1:
            stride = math.prod(data.shape[1:])
            rows = data.length // stride if stride else 0
            if rows != data.shape[0]:
                self._fail(f"field {name!r} has images of no pixels")
            return [Range(data.offset + row * stride, stride) for row in range(rows)]
        if ends is None or len(data.shape) != 1 or not len(ends):
            self._fail(f"field {name!r} is not a list of values")
        if ends[0] != 0 or ends[-1] != data.length or np.any(np.diff(ends) < 0):
            self._fail(f"the offsets of field {name!r} do not fit its values")
        if present is not None and len(present) != len(ends) - 1:
            self._fail(f"field {name!r} is present in another number of rows")
        starts = (data.offset + ends[:-1]).tolist()
        return [
            Range(start, length) if present is None or present[row] else None
            for row, (start, length) in enumerate(zip(starts, np.diff(ends).tolist(), strict=True))
        ]

    def _list(self, array: StoredArray | None, dtype: str) -> npt.NDArray[Any] | None:
        """Return the values of a dataset of one dimension, if it is there."""
        if array is None:
            return None
        if array.dtype != dtype or len(array.shape) != 1:
            self._fail(f"a list of numbers has the shape {array.shape}")
        return np.frombuffer(self._pread(Range(array.offset, array.length)), dtype)


def _is_utf8(text: str) -> bool:
    """Tell whether text was decoded without leaving bytes as they are."""
    return not any("\udc80" <= letter <= "\udcff" for letter in text)


FORMAT = Format(
    name="hdf5",
    suffix=".h5",
    title="HDF5 files",
    overhead=160,
    copies=2,
    libraries=("h5py",),
    write=Hdf5Writer,
    read=Hdf5Reader,
)
