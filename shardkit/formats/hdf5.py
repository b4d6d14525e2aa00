"""HDF5: one group for each field, with its values end to end in one contiguous dataset.

In a contiguous dataset, a value is a plain range of the file: ``pread`` takes 3 us, h5py 15 us, and
every version of HDF5 supports it.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, overload

import h5py
import numpy as np
import numpy.typing as npt

from shardkit.contracts import Format, Range, ShardSpec
from shardkit.formats.hdf5_layout import STORED_TYPES, MalformedHdf5Error, StoredArray, find_arrays
from shardkit.formats.ranges import KEY, META, RangeReader, header_of
from shardkit.formats.table import Table, TableRows
from shardkit.kinds.field import Field
from shardkit.record import (
    LABEL_FIELD,
    NO_LABEL,
    Record,
    dump_json,
    is_field_name,
    is_raw,
    parse_label,
)
from shardkit.system.files import Appender, write_all
from shardkit.system.strings import split_strings
from shardkit.system.text import quoted

if TYPE_CHECKING:
    from shardkit.record_columns import RecordColumns

_COPY_BYTES = 1 << 20

_STRUCTURE_BYTES = 1 << 16
"""Generous size of HDF5's groups and headers for about twenty datasets."""

# h5py 3.12 and older cannot open the files that h5py 3.16 writes with "latest".
_WRITE_VERSIONS = ("earliest", "v110")

_BYTE = "|u1"
_LABEL = "<i8"


class _Column:
    """The values of one field, spooled to an unnamed file until the sizes are known.

    A contiguous dataset cannot grow, and a shard may not fit into memory.
    """

    def __init__(self, folder: Path) -> None:
        self.spool: IO[bytes] = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self.appender = Appender(self.spool.fileno())
        self.lengths: list[int] = []
        self.missing: list[int] = []

    def append(self, values: list[bytes | None]) -> None:
        """Append values; None for each row that lacks the field."""
        first = len(self.lengths)
        self.missing += [row for row, value in enumerate(values, first) if value is None]
        self.appender.append(*[value for value in values if value is not None])
        self.lengths += [len(value or b"") for value in values]


class Hdf5Writer:
    """Spools each field, then lays out the file when all sizes are known.

    HDF5 writes only the structure. The writer stores the values directly, at the offsets that HDF5
    reports: on a full disk the library crashes instead of raising an error, and this is faster.
    """

    def __init__(self, path: Path, spec: ShardSpec) -> None:
        self._path = path
        self._spec = spec
        self._rows = 0
        self._labels: list[int] = []
        self._columns: dict[str, _Column] = {KEY: _Column(path.parent)}

    def write(self, record: Record) -> None:
        """Append ``record`` as the next row.

        Raises ValueError if its label is not a number, or raw pixels or an array have another
        shape.
        """
        self.write_all([record])

    def write_all(self, records: list[Record] | RecordColumns) -> None:
        """Append ``records`` as the next rows, a column at a time."""
        if isinstance(records, list):
            keys = [record.key for record in records]
            names = {name for record in records for name in record.fields}
            columns = {name: [record.fields.get(name) for record in records] for name in names}
        else:
            keys = records.keys
            columns = dict(records.columns)
        if not all(self._fits(*column) for column in columns.items()):
            for record in records:
                for name in record.fields:
                    header_of(record, name, self._spec)  # for its check
        missing: list[bytes | None] = [None] * len(keys)
        labels = columns.pop(LABEL_FIELD, missing)
        self._labels += [NO_LABEL if label is None else parse_label(label) for label in labels]
        for name in columns.keys() - self._columns.keys():
            self._columns[name] = _Column(self._path.parent)
            self._columns[name].append([None] * self._rows)
        columns[KEY] = [key.encode() for key in keys]
        for name, column in self._columns.items():
            column.append(columns.get(name, missing))
        self._rows += len(keys)

    def _fits(self, name: str, values: list[bytes | None]) -> bool:
        """Return whether values certainly have the shape of the shard."""
        _, size = self._spec.headers.get(name, (b"", -1))
        sizes = {len(value) for value in values if value is not None}
        return not is_raw(name) and (size < 0 or sizes <= {size})

    def close(self) -> None:
        """Lay out the file from the spooled values, and complete it."""
        contents = self._contents()
        _probe(self._path, sum(content.bytes for content in contents.values()))
        with (
            _disk_errors(self._path),
            # No other process knows the file yet, and some file systems have no locks.
            h5py.File(self._path, "x", libver=_WRITE_VERSIONS, locking=False) as file,
        ):
            offsets = {name: content.allocate(file, name) for name, content in contents.items()}
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
        """Return all datasets in file order."""
        contents = {META: _Content.of(np.frombuffer(dump_json(self._spec.meta), np.uint8))}
        if any(label != NO_LABEL for label in self._labels):
            contents[f"{LABEL_FIELD}/data"] = _Content.of(np.array(self._labels, np.int64))
        for name, column in sorted(self._columns.items()):
            if column.missing and len(column.missing) == self._rows:
                continue  # no record has it
            column.appender.flush()
            values = column.spool
            if not column.missing and (form := self._form(name)):
                dtype, shape = form
                contents[f"{name}/data"] = _Content((self._rows, *shape), dtype, values)
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

    def _form(self, name: str) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
        """Return dtype and shape of each value of a field whose values all have one shape."""
        if name in self._spec.arrays:
            return array_form(self._spec.arrays[name])
        return (np.dtype(np.uint8), self._spec.raw_shape or ()) if is_raw(name) else None


def array_form(field: Field) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return dtype and shape of each array of a field in an HDF5 file.

    Types that HDF5 lacks are stored as bytes, along one more axis.
    """
    dtype = field.values
    shape = field.shape or ()
    if dtype.str in STORED_TYPES:
        return dtype, shape
    return np.dtype(np.uint8), shape if dtype.itemsize == 1 else (*shape, dtype.itemsize)


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Turn h5py's write errors into `OSError`, using the error number in their messages."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        match = re.search(r"errno = ([0-9]+)", str(error))
        if match is None:
            raise
        code = int(match[1])
        raise OSError(code, os.strerror(code), str(path)) from error


class _Content(NamedTuple):
    """A dataset to write: its shape and type, and the file with its values."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    values: IO[bytes]

    @classmethod
    def of(cls, array: npt.NDArray[Any]) -> _Content:
        return cls(array.shape, array.dtype, io.BytesIO(array.tobytes()))

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def allocate(self, file: h5py.File, name: str) -> int:
        """Create the dataset without writing its values; return their offset in the file."""
        settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        settings.set_layout(h5py.h5d.CONTIGUOUS)
        settings.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)  # else there is no offset yet
        settings.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        settings.set_obj_track_times(False)  # the same input gives the same bytes
        group, _, last = name.rpartition("/")
        parent = file.require_group(group) if group else file
        dataset = h5py.h5d.create(
            parent.id,
            last.encode(),
            h5py.h5t.py_create(self.dtype),
            h5py.h5s.create_simple(self.shape),
            settings,
        )
        return dataset.get_offset() or 0


def _move(values: IO[bytes], target: IO[bytes], offset: int) -> None:
    """Move the content of ``values`` to ``offset`` of ``target``, last block first.

    Truncating each moved block reuses its page cache, since filling fresh pages takes several times
    as long.
    """
    end = values.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - _COPY_BYTES)
        values.seek(start)
        block = values.read(end - start)
        if len(block) != end - start:
            raise OSError(f"{target.name}: only {len(block)} of {end - start} bytes read back")
        target.seek(offset + start)
        write_all(target.fileno(), block)
        values.truncate(start)
        end = start


def _probe(path: Path, size: int) -> None:
    """Check that ``size`` bytes and HDF5's structures fit on the disk, before HDF5 crashes."""
    if not hasattr(os, "posix_fallocate"):  # pragma: no cover - macOS
        return
    with path.open("xb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size + _STRUCTURE_BYTES)
        finally:
            path.unlink()


class Hdf5Reader(RangeReader):
    """Reads a finished file by parsing its structure, without HDF5's library."""

    _keys: _Keys

    def _find(self) -> None:
        try:
            arrays = find_arrays(self._file.fileno(), self._size)
        except MalformedHdf5Error as error:
            self._fail(str(error))
        meta = arrays.pop(META, None)
        if meta is None or (meta.dtype, len(meta.shape)) != (_BYTE, 1):
            self._fail("it has no shard metadata")
        self.meta = self._parse_meta(Range(meta.offset, meta.length))
        columns: dict[str, dict[str, StoredArray]] = {}
        for name, array in arrays.items():
            field, _, member = name.partition("/")
            columns.setdefault(field, {})[member] = array
        self._labels = self._list(columns.pop(LABEL_FIELD, {}).get("data"), _LABEL)
        self._keys = self._read_keys(columns.pop(KEY, {}))
        rows = len(self._keys)
        if self._labels is not None and len(self._labels) != rows:
            self._fail(f"it has {len(self._labels)} labels for {rows} rows")
        fields = {name: self._field_of(name, arrays) for name, arrays in columns.items()}
        for name, column in fields.items():
            if not is_field_name(name):
                self._fail(f"it has a field {quoted(name)}")
            if column.rows != rows:
                self._fail(f"field {quoted(name)} has {column.rows} rows, not {rows}")
        self._table = self._table_of(fields)
        self._fields = TableRows(self._table)

    def _table_of(self, fields: Mapping[str, _Field]) -> Table:
        """Return the keys and the ranges of all rows."""
        names = sorted({*fields, LABEL_FIELD} if self._labels is not None else fields)
        shape = len(self._keys), len(names)
        offsets = np.full(shape, -1, np.int64)
        lengths = np.zeros(shape, np.int64)
        for name, field in fields.items():
            number = names.index(name)
            present = ... if field.present is None else field.present != 0
            offsets[present, number] = (field.ends[:-1] + field.offset)[present]
            lengths[present, number] = np.diff(field.ends)[present]
        return Table(
            text=self._keys.text,
            ends=self._keys.ends[1:],
            names=tuple(names),
            offsets=offsets,
            lengths=lengths,
            labels=self._labels,
        )

    def _record(self, row: int, fields: dict[str, bytes]) -> Record:
        record = super()._record(row, fields)
        if not _is_utf8(record.key):
            self._fail(f"the key {quoted(record.key)} of row {row} is not UTF-8")
        return record

    def _numbers(self, row: int) -> dict[str, bytes]:
        if self._labels is None or self._labels[row] == NO_LABEL:
            return {}
        return {LABEL_FIELD: b"%d" % self._labels[row]}

    def _read_keys(self, arrays: dict[str, StoredArray]) -> _Keys:
        keys = self._field_of(KEY, arrays)
        if keys.present is not None:
            self._fail("it has rows without a key")
        sizes = np.diff(keys.ends)
        for size in (sizes.min(), sizes.max()) if len(sizes) else ():
            self._check_key_size(int(size))
        return _Keys(self._pread(Range(keys.offset, int(keys.ends[-1]))), keys.ends)

    def _field_of(self, name: str, arrays: dict[str, StoredArray]) -> _Field:
        """Return where the values of a field are stored."""
        data = arrays.get("data")
        field = f"field {quoted(name)}"
        if data is None or (data.dtype != _BYTE and name not in self._arrays):
            self._fail(f"{field} has no values, or values other than bytes")
        ends = self._list(arrays.get("offsets"), _LABEL)
        present = self._list(arrays.get("present"), _BYTE)
        if ends is None and (stride := self._stride(name, data)):
            ends = np.arange(data.shape[0] + 1, dtype=np.int64) * stride
        elif ends is None or (data.dtype, len(data.shape)) != (_BYTE, 1) or not len(ends):
            self._fail(f"{field} is not a list of values")
        if ends[0] != 0 or ends[-1] != data.length or np.any(ends[1:] < ends[:-1]):
            self._fail(f"the offsets of {field} do not fit its values")
        if present is not None and len(present) != len(ends) - 1:
            self._fail(f"{field} is present in a different number of rows")
        return _Field(data.offset, ends, present)

    def _stride(self, name: str, data: StoredArray) -> int:
        """Return the bytes of each value of a dataset with one value of one shape for each row."""
        if is_raw(name) and name not in self._arrays and len(data.shape) > 1:
            if not all(data.shape[1:]):
                self._fail(f"field {quoted(name)} has images without pixels")
            return math.prod(data.shape[1:])
        if name not in self._arrays:
            return 0
        field = self._arrays[name]
        dtype, shape = array_form(field)
        if (data.dtype, data.shape[1:]) != (dtype.str, shape):
            self._fail(f"field {quoted(name)} does not have the dtype and shape of the schema")
        return field.bytes

    def _list(self, array: StoredArray | None, dtype: str) -> npt.NDArray[Any] | None:
        """Return the values of a dataset of one dimension, if it is there."""
        if array is None:
            return None
        if array.dtype != dtype or len(array.shape) != 1:
            self._fail(f"a list of numbers has the shape {array.shape}")
        return np.frombuffer(self._pread(Range(array.offset, array.length)), dtype)


class _Field(NamedTuple):
    """Locations of the values of a field, as arrays instead of an object per row."""

    offset: int
    """Offset of the first value in the file."""
    ends: npt.NDArray[np.int64]
    """0, then the end of each value relative to ``offset``; never decreasing."""
    present: npt.NDArray[np.uint8] | None
    """0 for each row that lacks the field; None if no row does."""

    @property
    def rows(self) -> int:
        return len(self.ends) - 1


class _Keys(Sequence[str]):
    """The key of each row, decoded on access: millions of them would fill the memory."""

    def __init__(self, text: bytes, ends: npt.NDArray[np.int64]) -> None:
        self.text = text
        self.ends = ends
        self._rows = range(len(ends) - 1)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[str]: ...
    def __getitem__(self, row: int | slice) -> str | Sequence[str]:
        if isinstance(row, slice):
            starts, ends = self.ends[:-1][row], self.ends[1:][row]
            first, last = (int(starts[0]), int(ends[-1])) if len(starts) else (0, 0)
            return split_strings(self.text[first:last], starts - first, ends - first)
        row = self._rows[row]
        start, end = self.ends[row : row + 2].tolist()
        # A damaged key affects only its own record.
        return self.text[start:end].decode("utf-8", "surrogateescape")


def _is_utf8(text: str) -> bool:
    """Return whether text was decoded without surrogate escapes."""
    return not any("\udc80" <= letter <= "\udcff" for letter in text)


FORMAT = Format(
    name="hdf5",
    suffix=".h5",
    title="HDF5 files",
    overhead=160,
    copies=2,
    libraries=("h5py",),
    write=Hdf5Writer,
    write_all=Hdf5Writer.write_all,
    read=Hdf5Reader,
)
