"""HDF5: one group for each field, its values end to end in one contiguous dataset.

Contiguous, because then a value is a plain piece of the file: ``pread`` at the dataset's offset
takes 3 us where h5py takes 15, and no version of HDF5 has trouble with it.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

import h5py
import numpy as np
import numpy.typing as npt

from shardkit.contracts import Format, Range, ShardSpec
from shardkit.errors import CorruptShard
from shardkit.files import Appender, write_all
from shardkit.formats.ranges import KEY, META, RAW, check_raw
from shardkit.record import (
    LABEL_FIELD,
    NO_LABEL,
    Record,
    dump_json,
    is_field_name,
    load_json,
    parse_label,
)

_COPY_BYTES = 1 << 20

_SMALL_BYTES = 1 << 18
"""A field of no more bytes is read at once: h5py takes 10 us to find a value, however short."""

_STRUCTURE_BYTES = 1 << 16
"""More than HDF5 needs for groups and headers of some twenty datasets."""

# Files must open with h5py of years ago: "latest" would use structures that HDF5 1.14 cannot read.
_WRITE_VERSIONS = ("earliest", "v110")

_H5PY_ERRORS = (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError)
"""What h5py, and a layout other than ours, raise on damage; none of it means wrong usage."""


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
        with h5py.File(self._path, "x", libver=_WRITE_VERSIONS) as file:
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


class Hdf5Reader:
    """Reads a finished file with h5py.

    Raises:
        CorruptShard: If the file is cut, or is not an HDF5 file as shardkit writes it.
    """

    meta: Mapping[str, Any]

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = _open(path)
        except _H5PY_ERRORS as error:
            raise CorruptShard(f"{path} is damaged: h5py cannot open it: {error}") from error
        try:
            self._find()
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return self._rows

    def read(self, rows: Sequence[int]) -> list[Record]:
        """Return the records of ``rows``: same order, duplicates and all."""
        return [self._record(row) for row in rows]

    def ranges(self) -> Sequence[Mapping[str, Range]]:
        """Return, for each row, where each of its fields lies in the file."""
        found: list[dict[str, Range]] = [{} for _ in range(self._rows)]
        for name, column in self._columns.items():
            if name not in (KEY, LABEL_FIELD):
                for row, range_ in column.ranges():
                    found[row][name] = range_
        return found

    def close(self) -> None:
        """Release the file; closing twice does nothing."""
        self._file.close()

    def _find(self) -> None:
        try:
            self.meta = load_json(self._file[META][()].tobytes())
            self._columns = {
                name: _StoredColumn(name, group)
                for name, group in self._file.items()
                if name != META
            }
        except _H5PY_ERRORS as error:
            self._fail(f"it is not laid out as shardkit does it: {error!r}")
        self._rows = len(self._columns[KEY]) if KEY in self._columns else 0
        for name, column in self._columns.items():
            if len(column) != self._rows:
                self._fail(f"field {name!r} has {len(column)} rows, not {self._rows}")

    def _record(self, row: int) -> Record:
        if not 0 <= row < self._rows:
            raise IndexError(f"row {row} is not in {self.path}, which has {self._rows} rows")
        try:
            fields = {
                name: column.value(row) for name, column in self._columns.items() if column.has(row)
            }
            return Record(fields.pop(KEY).decode(), fields)
        except _H5PY_ERRORS as error:
            self._fail(f"row {row} cannot be read: {error!r}")

    def _fail(self, reason: str) -> NoReturn:
        raise CorruptShard(f"{self.path} is damaged: {reason}")


def _open(path: Path) -> h5py.File:
    try:
        # Locking fails on read-only and network mounts; finished files have no writer.
        return h5py.File(path, "r", locking=False)
    except OSError as error:
        if "lock" not in str(error):
            raise
        return h5py.File(path, "r")  # this process has it open already, in h5py's usual way


class _StoredColumn:
    """One field of a finished file: labels, values of different lengths, or images of one shape."""

    def __init__(self, name: str, group: h5py.Group) -> None:
        self._data: h5py.Dataset = group["data"]
        self._labels: npt.NDArray[np.int64] | None = None
        self._offsets: list[int] = []
        self._small: bytes | None = None
        self._present: npt.NDArray[np.uint8] | None = None
        if name == LABEL_FIELD:
            self._labels = _array(self._data, np.int64)
            return
        if self._data.dtype != np.uint8 or (name != KEY and not is_field_name(name)):
            raise ValueError(f"field {name!r} does not hold bytes")
        if "offsets" in group:
            self._read_offsets(group)
        elif name == RAW and self._data.ndim > 1:
            stride = int(np.prod(self._data.shape[1:]))
            self._offsets = [row * stride for row in range(self._data.shape[0] + 1)]
        else:
            raise ValueError(f"field {name!r} has no offsets")

    def _read_offsets(self, group: h5py.Group) -> None:
        offsets = _array(group["offsets"], np.int64)
        if self._data.ndim != 1 or len(offsets) == 0:
            raise ValueError(f"field {group.name!r} is not a list of values")
        if offsets[0] != 0 or offsets[-1] != len(self._data) or np.any(np.diff(offsets) < 0):
            raise ValueError(f"the offsets of field {group.name!r} do not fit its data")
        self._offsets = offsets.tolist()
        if "present" in group:
            self._present = _array(group["present"], np.uint8)
            if len(self._present) != len(self):
                raise ValueError(f"field {group.name!r} is present in another number of rows")

    def __len__(self) -> int:
        return len(self._offsets) - 1 if self._labels is None else len(self._labels)

    def has(self, row: int) -> bool:
        if self._labels is not None:
            return bool(self._labels[row] != NO_LABEL)
        return self._present is None or bool(self._present[row])

    def value(self, row: int) -> bytes:
        if self._labels is not None:
            return b"%d" % self._labels[row]
        span = slice(self._offsets[row], self._offsets[row + 1])
        if self._small is None and self._data.ndim == 1 and self._data.size <= _SMALL_BYTES:
            self._small = self._data[()].tobytes()
        if self._small is not None:
            return self._small[span]
        values: npt.NDArray[np.uint8] = self._data[row if self._data.ndim > 1 else span]
        return values.tobytes()

    def ranges(self) -> list[tuple[int, Range]]:
        """Return row and range of each value, or nothing where HDF5 does not store plain bytes."""
        base = self._data.id.get_offset()
        if base is None:  # nothing is allocated for a dataset of no bytes
            base = 0 if self._data.size == 0 else None
        if base is None or self._data.external:
            return []
        return [
            (row, Range(base + start, stop - start))
            for row, (start, stop) in enumerate(
                zip(self._offsets[:-1], self._offsets[1:], strict=True)
            )
            if self.has(row)
        ]


def _array(dataset: h5py.Dataset, dtype: type[Any]) -> npt.NDArray[Any]:
    """Return a whole dataset of one dimension.

    Raises:
        ValueError: If it has another type or shape.
    """
    if dataset.dtype != dtype or dataset.ndim != 1:
        raise ValueError(f"{dataset.name!r} is not a list of {dtype.__name__}")
    values: npt.NDArray[Any] = dataset[()]
    return values


FORMAT = Format(
    name="hdf5",
    suffix=".h5",
    title="HDF5 files",
    overhead=160,
    libraries=("h5py",),
    write=Hdf5Writer,
    read=Hdf5Reader,
)
