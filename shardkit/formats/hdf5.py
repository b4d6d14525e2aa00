"""HDF5: one group for each field, its values end to end in one contiguous dataset.

Contiguous, because then a value is a plain piece of the file: ``pread`` at the dataset's offset
takes 3 us where h5py takes 15, and no version of HDF5 has trouble with it.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

import h5py
import numpy as np
import numpy.typing as npt

from shardkit.contracts import Format, Range, ShardSpec
from shardkit.errors import CorruptShard
from shardkit.formats.ranges import META, RAW
from shardkit.record import LABEL_FIELD, NO_LABEL, Record, dump_json, parse_label

KEY = "__key__"
"""The group that holds the records' keys."""

_COPY_BYTES = 8 << 20

# Files must open with h5py of years ago: "latest" would use structures that HDF5 1.14 cannot read.
_WRITE_VERSIONS = ("earliest", "v110")


class _Column:
    """The values of one field, spooled to a nameless file until the sizes are known.

    A contiguous dataset cannot grow, and a shard may not fit into memory.
    """

    def __init__(self, folder: Path) -> None:
        self.spool: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self.lengths: list[int] = []
        self.missing: list[int] = []

    def append(self, value: bytes) -> None:
        self.spool.write(value)
        self.lengths.append(len(value))

    def fill(self, rows: int) -> None:
        """Note that the rows up to ``rows`` lack this field."""
        for row in range(len(self.lengths), rows):
            self.missing.append(row)
            self.lengths.append(0)

    def copy_to(self, dataset: h5py.Dataset) -> None:
        """Write the values into ``dataset``, a one-dimensional dataset of bytes."""
        self.spool.seek(0)
        start = 0
        while block := self.spool.read(_COPY_BYTES):
            dataset[start : start + len(block)] = np.frombuffer(block, np.uint8)
            start += len(block)


class Hdf5Writer:
    """Spools each field, and lays the file out when all sizes are known."""

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
        """
        fields = dict(record.fields)
        label = fields.pop(LABEL_FIELD, None)
        self._labels.append(NO_LABEL if label is None else parse_label(label))
        if RAW in fields and len(fields[RAW]) != np.prod(self._spec.raw_shape or (0,)):
            raise ValueError(f"raw pixels of {record.key!r} have not the shape of this shard")
        for name, value in {KEY: record.key.encode(), **fields}.items():
            if name not in self._columns:
                self._columns[name] = _Column(self._path.parent)
            self._columns[name].fill(self._rows)
            self._columns[name].append(value)
        self._rows += 1

    def close(self) -> None:
        """Lay out the file from what was spooled, and complete it."""
        with h5py.File(self._path, "x", libver=_WRITE_VERSIONS) as file:
            file[META] = np.frombuffer(dump_json(self._spec.meta), np.uint8)
            if any(label != NO_LABEL for label in self._labels):
                file[f"{LABEL_FIELD}/data"] = np.array(self._labels, np.int64)
            for name, column in sorted(self._columns.items()):
                column.fill(self._rows)
                self._write_column(file.create_group(name), name, column)
        self.abort()

    def abort(self) -> None:
        """Release the spooled values."""
        for column in self._columns.values():
            with contextlib.suppress(OSError):
                column.spool.close()
        self._columns.clear()

    def _write_column(self, group: h5py.Group, name: str, column: _Column) -> None:
        total = sum(column.lengths)
        if name == RAW and not column.missing:
            shape = (self._rows, *(self._spec.raw_shape or ()))
            data = group.create_dataset("data", shape, np.uint8)
            self._copy_images(column, data)
            return
        column.copy_to(group.create_dataset("data", (total,), np.uint8))
        group["offsets"] = np.cumsum([0, *column.lengths], dtype=np.int64)
        if column.missing:
            present = np.ones(self._rows, np.uint8)
            present[column.missing] = 0
            group["present"] = present

    def _copy_images(self, column: _Column, data: h5py.Dataset) -> None:
        column.spool.seek(0)
        image_bytes = int(np.prod(data.shape[1:]))
        step = max(1, _COPY_BYTES // max(1, image_bytes))
        for start in range(0, self._rows, step):
            stop = min(start + step, self._rows)
            block = column.spool.read((stop - start) * image_bytes)
            data[start:stop] = np.frombuffer(block, np.uint8).reshape(stop - start, *data.shape[1:])


class Hdf5Reader:
    """Reads a finished file with h5py.

    Raises:
        CorruptShard: If the file is cut, or is not an HDF5 file as shardkit writes it.
    """

    meta: Mapping[str, Any]

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Locking fails on read-only and network mounts; finished files have no writer.
            self._file = h5py.File(path, "r", locking=False)
        except (OSError, RuntimeError, ValueError) as error:
            raise CorruptShard(f"{path} is damaged: h5py cannot open it: {error}") from error
        try:
            self.meta = dict(json.loads(self._file[META][()].tobytes()))
            self._columns = {
                name: _StoredColumn(group) for name, group in self._file.items() if name != META
            }
            self._rows = len(self._columns[KEY]) if KEY in self._columns else 0
            for name, column in self._columns.items():
                if len(column) != self._rows:
                    self._fail(f"field {name!r} has {len(column)} rows, not {self._rows}")
        except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            self._fail(f"it is not laid out as shardkit does it: {error}")

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

    def _record(self, row: int) -> Record:
        if not 0 <= row < self._rows:
            raise IndexError(f"row {row} is not in {self.path}, which has {self._rows} rows")
        try:
            fields = {
                name: column.value(row) for name, column in self._columns.items() if column.has(row)
            }
            return Record(fields.pop(KEY).decode(), fields)
        except (OSError, RuntimeError, ValueError) as error:
            self._fail(f"row {row} cannot be read: {error}")

    def _fail(self, reason: str) -> NoReturn:
        self.close()
        raise CorruptShard(f"{self.path} is damaged: {reason}")


class _StoredColumn:
    """One field of a finished file: labels, values of different lengths, or images of one shape."""

    def __init__(self, group: h5py.Group) -> None:
        self._data: h5py.Dataset = group["data"]
        self._labels: npt.NDArray[np.int64] | None = None
        self._offsets: list[int] = []
        self._present: npt.NDArray[np.uint8] | None = None
        if "offsets" in group:
            self._read_offsets(group)
        elif self._data.ndim == 1:
            self._labels = self._data[()]
        else:
            stride = int(np.prod(self._data.shape[1:]))
            self._offsets = [row * stride for row in range(self._data.shape[0] + 1)]

    def _read_offsets(self, group: h5py.Group) -> None:
        offsets = group["offsets"][()]
        if offsets[0] != 0 or offsets[-1] != len(self._data) or np.any(np.diff(offsets) < 0):
            raise ValueError(f"the offsets of field {group.name!r} do not fit its data")
        self._offsets = offsets.tolist()
        if "present" in group:
            self._present = group["present"][()]

    def __len__(self) -> int:
        return len(self._offsets) - 1 if self._labels is None else len(self._labels)

    def has(self, row: int) -> bool:
        if self._labels is not None:
            return bool(self._labels[row] != NO_LABEL)
        return self._present is None or bool(self._present[row])

    def value(self, row: int) -> bytes:
        if self._labels is not None:
            return b"%d" % self._labels[row]
        if self._data.ndim > 1:
            image: bytes = self._data[row].tobytes()
            return image
        value: bytes = self._data[self._offsets[row] : self._offsets[row + 1]].tobytes()
        return value

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


FORMAT = Format(
    name="hdf5",
    suffix=".h5",
    title="HDF5 files",
    libraries=("h5py",),
    write=Hdf5Writer,
    read=Hdf5Reader,
)
