"""A dataset on disk as one sequence of stored records across shards, with verified reads.

Nothing here knows a format by name or decodes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.dataset.index import (
    IndexSegment,
    Rows,
    StoredColumn,
    StringTable,
    damaged_rows,
    require_counts,
)
from shardkit.dataset.index_reader import IndexReader, IndexRows
from shardkit.dataset.located import LocatedRows
from shardkit.dataset.opened import LOCAL, Fetching, OpenedDataset, open_one
from shardkit.dataset.shard_files import Access
from shardkit.errors import CorruptDataset, CorruptRecord, UsageError
from shardkit.kinds.column import Column
from shardkit.kinds.field import Field, Schema, apart_of, columns_of, uniform_arrays
from shardkit.record import (
    ABSENT,
    IMAGE,
    LABEL,
    NO_LABEL,
    STORED_KINDS,
    Record,
    image_field,
    is_raw,
)
from shardkit.registry import get_format
from shardkit.system.late import load
from shardkit.system.text import name_list, quoted

_ABSENT_CODE = STORED_KINDS.index(ABSENT)

_RELABELED = "shardkit.changes.layered:RelabeledRows"
"""Entries of images whose labels are in another layer, or were removed."""

_MAPPED = 64 << 30
"""Maximum bytes of a dataset to map: each process then needs up to 128 MiB of page tables."""


class ShardSet:
    """A dataset, read lazily. Pickling it stores only its path and options.

    ``verify`` compares the checksum of each record read. None means only for encoded images and
    attached files: for other raw pixels it costs more than reading them. Raises UsageError if
    ``dataset`` is no dataset or its archives are not confirmed, CorruptDataset if its manifest is
    damaged. All reads raise CorruptDataset if the index is damaged, or another dataset has replaced
    this one.
    """

    def __init__(self, dataset: OpenedDataset, *, verify: bool | None = None) -> None:
        self.dataset = dataset
        self.directory = dataset.path.absolute()
        self.manifest = dataset.manifest
        self.location = dataset.location
        """The URL or path of the dataset, for messages."""
        self.files = dataset.access.files(dataset)
        """The shards."""
        self._verify = verify
        self._entries: dict[str, IndexRows] = {}
        self._columns: dict[str, StoredColumn] = {}
        self._homes: dict[str, ShardSet] = {}

    def __len__(self) -> int:
        return self.manifest.rows

    def __reduce__(self) -> tuple[Any, ...]:
        options = (self._verify, self.dataset.access, self.dataset.root)
        return _reopen, (self.directory, *options, self.manifest.digest)  # refuses a successor

    # `unchanged`: files of a dataset that has replaced this one must not be read as its own.
    @cached_property
    def keys(self) -> StringTable:
        """The key of each row."""
        return self.dataset.unchanged(self.index.keys)

    @cached_property
    def paths(self) -> StringTable:
        """The source path of each row."""
        return self.dataset.unchanged(self.index.paths)

    @cached_property
    def rows(self) -> Rows:
        """The index: one `shardkit.dataset.index.ROW` for each row, memory-mapped and read-only."""
        return self.dataset.unchanged(self.index.rows)

    @cached_property
    def schema(self) -> Schema:
        """The fields of all records, by name."""
        return self.manifest.fields_by_name

    @property
    def entries(self) -> IndexRows:
        """The rows of the index, read without a map: truncating a mapped file kills the process."""
        return self.entries_of(IMAGE)

    def entries_of(self, field: str) -> IndexRows:
        """Return the entries in the index of a field with bytes of its own."""
        entries = self._entries.get(field)
        if entries is None:
            if field != IMAGE:
                self._require(field, apart=True)
            home = self.home(field)
            if home is not self:
                entries = home.entries_of(field)
                if field == IMAGE and self.manifest.relabels:
                    labels = self.home(LABEL).entries if LABEL in self.schema else None
                    entries = load(_RELABELED)(entries, labels)
            else:
                rows = self.dataset.unchanged(lambda: self.index.rows(field))
                entries = self.index.entries(rows, field)
            self._entries[field] = entries
        return entries

    def home(self, field: str) -> ShardSet:
        """Return the dataset whose shards and index have a field: a layer, opened on first use."""
        store = self.dataset.store_of(field)
        if store is self.dataset:
            return self
        home = self._homes.get(store.split)
        if home is None:
            home = self.dataset.unchanged(lambda: ShardSet(store, verify=self._verify))
            self._homes[store.split] = home
        return home

    def values(self, name: str, rows: Sequence[int] | npt.NDArray[np.int64]) -> Column:
        """Return the values of a small field in some rows, without reading a record.

        ``name`` is that of a number, labels, text, JSON, boxes or keypoints; ``rows`` are from
        `resolve_rows`.
        """
        return self._stored_column(name).take(rows)

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return the read-only values of a small field in all rows, without reading a record.

        One element for each row: a masked array if rows lack the number or label; for other kinds,
        Python objects, None where a row lacks the field.
        """
        if name == LABEL and name in self.schema:
            labels = self.labels
            lacking = labels == NO_LABEL
            return np.ma.MaskedArray(labels, lacking) if lacking.any() else labels
        return self._stored_column(name).whole().as_numpy()

    def present(self, name: str) -> npt.NDArray[np.bool_]:
        """Return whether each row has a field, without reading a record: bool of shape (N,)."""
        field = self.schema.get(name)
        if field is not None and field.type.stored_apart:
            kinds = self.entries_of(name).read(np.arange(len(self)))["field"]
            return np.asarray(kinds != _ABSENT_CODE)
        if name == LABEL and field is not None:
            return np.asarray(self.labels != NO_LABEL)
        return self._stored_column(name).present()

    def _stored_column(self, name: str) -> StoredColumn:
        column = self._columns.get(name)
        if column is None:
            self._require(name, apart=False)
            home = self.home(name)
            if home is not self:
                column = home._stored_column(name)
            else:
                column = self.dataset.unchanged(lambda: self.index.column(name))
            self._columns[name] = column
        return column

    def _require(self, name: str, *, apart: bool) -> Field:
        """Return a field; UsageError unless it exists and is stored apart, or is in a column."""
        field = require_field(self.schema, name, self.location)
        if field.type.stored_apart != apart:
            reason = "no bytes of its own" if apart else "no column: its values are in the records"
            raise UsageError(
                f"the field {quoted(name)} ({field.kind}) of {self.location} has {reason}",
                remedy=None if apart else f"Read them with fields=({name!r},)",
            )
        return field

    @property
    def index(self) -> IndexReader:
        """The files of the index."""
        return IndexReader(self.dataset, verify=self._verify)

    def resolve_rows(self, rows: Sequence[int] | npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return ``rows`` as int64 of shape (N,); negative rows count from the end."""
        return resolve_rows(rows, len(self), self.location)

    @cached_property
    def labels(self) -> npt.NDArray[np.int64]:
        """The label of each row, -1 if there is none: int64 of shape (N,), read-only.

        Raises CorruptDataset if they differ from the manifest's class counts.
        """
        labels = self.entries.labels()
        require_counts([labels], self.manifest.class_counts)
        labels.setflags(write=False)  # all callers share the array
        return labels

    def labels_of(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the label of some rows, -1 if there is none, without opening a shard.

        ``rows`` are from `resolve_rows`. Raises CorruptRecord if a row of the index is damaged.
        """
        index = self.dataset.unchanged(lambda: self.entries.read(rows))
        for number in damaged_rows(index).nonzero()[0].tolist():
            reason = "its entry in the index is damaged"
            raise self.corrupt(int(rows[number]), int(index["offset"][number]), reason)
        return index["label"].astype(np.int64)

    def find(self, rows: npt.NDArray[np.int64], field: str = IMAGE) -> LocatedRows:
        """Look up ``rows`` in the index and return their images or arrays, ready to read.

        ``rows`` are from `resolve_rows`. Raises CorruptRecord if a row of the index is damaged or
        states an impossible size, CorruptShard if a shard is missing or truncated.
        """
        home = self.home(field)
        # Not `home is not self`: the store of the conversion has the same shards as this dataset.
        if home.dataset.layer is not self.dataset.layer:
            return home.find(rows, field)
        index = self.entries_of(field).read(rows)
        try:
            opened = self.files.open_for(rows, index)
        except CorruptDataset:  # else the index would be read if this dataset came back
            for entries in self._entries.values():
                entries.forget()
            raise
        located = LocatedRows(self, rows, index, opened, field)
        located.examine(self.schema.get(field), self.manifest.raw_shape)
        return located

    def announce(self, rows: npt.NDArray[np.int64], field: str = IMAGE) -> None:
        """Issue readahead for the images of ``rows``, counted from 0, without waiting.

        From an object store, their shards are fetched into the cache instead. A problem with a
        shard is reported when it is read.
        """
        home = self.home(field)
        if home.dataset.layer is not self.dataset.layer:
            home.announce(rows, field)
            return
        rows = np.unique(rows)
        self.files.announce(rows, self.entries_of(field).read(rows))

    def verifies(self, name: str = IMAGE) -> bool:
        """Return whether each read of a field compares its checksum."""
        if self._verify is not None:
            return self._verify
        # Other programs may write to attached files.
        return name not in self._plain or self.manifest.archives is not None

    @cached_property
    def _plain(self) -> frozenset[str]:
        """The fields that hold raw pixels, or arrays of one shape."""
        raw = self.manifest.raw_shape is not None
        return frozenset(
            name
            for name, field in self.schema.items()
            if field.is_uniform or (raw and field.type.is_picture and not field.type.follows)
        )

    def maps(self, name: str) -> bool:
        """Return whether the compiled module may copy a field from mapped shards.

        It does so for raw pixels and arrays of one shape only, which take half the time, and whose
        checksums are not compared.
        """
        return name in self._plain and not self.verifies(name) and self._is_mappable

    @cached_property
    def _is_mappable(self) -> bool:
        return int(self.files.sizes.sum()) <= _MAPPED

    def read_via_format(self, row: int, name: str = IMAGE) -> bytes:
        """Return an image or array that its shard does not store as plain bytes.

        Raises CorruptShard if its shard is damaged.
        """
        shard, position = self.files.locate(row)
        record: Record
        (record,) = self.files.reader(shard, get_format(self.manifest.format).read).read([position])
        field = self.schema.get(name)
        stored = field.stored_name(name) if field is not None else None
        return record.fields[stored or image_field(record.fields, name) or ""]

    def shape_fault(self, record: Record) -> str:
        """Return which array or raw pixels have not the shape that the manifest states, or ""."""
        for name, data in record.fields.items():
            size = self._sizes.get(name, self._raw_bytes if is_raw(name) else len(data))
            if len(data) != size:
                return f"{name} has {len(data)} bytes, but its shape in the manifest takes {size}"
        return ""

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """Bytes of each array of a stated shape, by stored name."""
        arrays = uniform_arrays(self.schema, self.manifest.raw_shape)
        return {name: field.bytes for name, field in arrays.items()}

    @cached_property
    def _raw_bytes(self) -> int:
        return math.prod(self.manifest.raw_shape or (0,))

    def segment(self, rows: range) -> IndexSegment:
        """Return the index of neighboring rows, counted from 0."""
        start, stop = rows.start, rows.stop
        numbers = np.arange(start, stop)
        return IndexSegment(
            self.entries.read(numbers),
            self.keys[start:stop],
            self.paths[start:stop],
            {name: self.entries_of(name).read(numbers) for name in apart_of(self.schema)},
            {
                name: self._stored_column(name).slice(start, stop)
                for name in columns_of(self.schema)
            },
        )

    def corrupt(self, row: int, offset: int, reason: str) -> CorruptRecord:
        """Return the error for a damaged record, with its location."""
        path = self.files.path_of(row)
        try:
            key = self.keys[row]
            source = self.paths[row]
        except (CorruptDataset, ValueError):
            key = source = "unknown: the index is damaged too"
        self.files.forget(self.files.locate(row)[0])  # to find a restored copy
        return CorruptRecord(
            f"record {quoted(key)} (row {row}, from {quoted(source)}) in {path} at byte "
            f"{offset} is damaged: {reason}",
            remedy=self.files.remedy,
            where=path,
        )


def open_shards(
    path: str | os.PathLike[str],
    split: str | None = None,
    *,
    verify: bool | None = None,
    root: str | os.PathLike[str] | None = None,
    fetching: Fetching = LOCAL,
) -> ShardSet:
    """Open one dataset by its path or URL: see `open_one` and `ShardSet`."""
    return ShardSet(open_one(path, split, root=root, fetching=fetching), verify=verify)


def require_field(schema: Schema, name: str, location: str) -> Field:
    """Return a field of the dataset at ``location``."""
    if name not in schema:
        fields = name_list(f"{other} ({field.kind})" for other, field in schema.items())
        raise UsageError(f"{location} has no field {quoted(name)}; it has {fields}")
    return schema[name]


def as_array(rows: object) -> npt.NDArray[Any]:
    """Return rows, or a mask, as an array; IndexError if ragged."""
    try:
        return np.asarray(rows)
    except ValueError:
        raise IndexError(f"rows must be integers, not {quoted(rows)}") from None


def resolve_rows(
    rows: Sequence[int] | npt.ArrayLike, count: int, location: str
) -> npt.NDArray[np.int64]:
    """Return ``rows`` as int64 of shape (N,); negative rows count from the end.

    Raises IndexError if a row is not an integer, or not one of the ``count`` rows of ``location``.
    """
    array = as_array(rows)
    if array.size and array.dtype.kind not in "iu":
        kind = {"U": "text", "b": "bool; select() takes a mask"}.get(array.dtype.kind, array.dtype)
        raise IndexError(f"rows must be integers, not {kind}")
    if array.ndim > 1:
        raise IndexError(f"rows must be one-dimensional, not of shape {array.shape}")
    if array.dtype == np.int64 and array.ndim and array.size:
        unsigned = array.view(np.uint64)  # negative rows are large; `max` takes longer for a few
        if unsigned[unsigned.argmax()] < count:
            return array
    wrong = (array >= count) | ((array < 0) & (array < -count))
    if wrong.any():
        row = int(array[wrong][0])
        raise IndexError(f"row {row} is not in {location}, which has {count} rows")
    array = array.astype(np.int64).reshape(-1)
    return np.where(array < 0, array + count, array)


def selected_rows(rows: Sequence[int] | npt.NDArray[Any], count: int) -> npt.NDArray[Any]:
    """Return rows as an array, given rows or a mask of a dataset of ``count`` rows.

    Raises IndexError if a mask does not have one value for each row.
    """
    array = np.ma.filled(rows, False) if np.ma.isMaskedArray(rows) else as_array(rows)
    if array.dtype.kind == "U":
        raise UsageError(
            f"select({quoted(rows)}): rows must be numbers or a mask",
            remedy='Compare a column with a value, as in select(dataset.column("label") == '
            'dataset.class_to_idx["cat"])',
        )
    if array.dtype != np.bool_:
        return array
    if array.shape != (count,):
        raise IndexError(f"the mask has the shape {array.shape}; this dataset has {count} rows")
    return np.flatnonzero(array)


class SelectedTexts(Sequence[str]):
    """The texts of some rows, such as their keys, which are read when needed."""

    def __init__(self, texts: Sequence[str], rows: npt.NDArray[np.int64]) -> None:
        self._texts = texts
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [self._texts[stored] for stored in self._rows[row].tolist()]
        return self._texts[int(self._rows[row])]


def _reopen(
    directory: Path,
    verify: bool | None,
    access: Access,
    root: Path | None,
    digest: str,
) -> ShardSet:
    """Reopen an unpickled dataset, unless another one has replaced it."""
    shards = ShardSet(OpenedDataset(directory, access=access, root=root), verify=verify)
    shards.dataset.require_digest(digest)
    return shards
