"""A dataset on disk as one sequence of stored records across shards, with verified reads.

Nothing here knows a format by name or decodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.dataset.columns import COLUMN_KINDS, Column, columns_of
from shardkit.dataset.directory import OpenDirectory, rewritten
from shardkit.dataset.index import (
    IndexPart,
    Rows,
    StoredColumn,
    StringTable,
    apart_of,
    damaged_rows,
    require_counts,
)
from shardkit.dataset.index_builder import IndexedRecord, difference, shard_records
from shardkit.dataset.index_reader import IndexReader, IndexRows
from shardkit.dataset.located import LocatedRows
from shardkit.dataset.manifest import AttachedManifest
from shardkit.dataset.remote import CachedShards
from shardkit.dataset.shard_files import RemoteShardFiles, ShardFiles
from shardkit.errors import CorruptDataset, CorruptRecord, CorruptShard, UsageError
from shardkit.record import (
    ABSENT,
    IMAGE,
    LABEL,
    LABEL_FIELD,
    META_FIELD,
    NO_LABEL,
    STORED_APART,
    STORED_KINDS,
    Field,
    Record,
    Schema,
    dump_json,
    image_field,
)
from shardkit.registry import get_format
from shardkit.sources.kept import with_fields
from shardkit.system.text import quoted

_ABSENT_CODE = STORED_KINDS.index(ABSENT)

_MAPPED = 64 << 30
"""Maximum bytes of a dataset to map: each process then needs up to 128 MiB of page tables."""


class ShardSet:
    """A dataset directory, opened lazily. Pickling it stores only its path and options.

    Args:
        directory: The dataset.
        verify: Whether each read compares the record's checksum. None means only for encoded
            images and attached files: for other raw pixels it costs more than reading them.
        cached: The shards, if they are not in the directory.
        root: The folder of an attached dataset's archives; None means where the manifest says,
            which `shardkit attach` must have confirmed.

    Raises:
        UsageError: If ``directory`` is not a dataset, or its archives are not confirmed.
        CorruptDataset: If its manifest is damaged.
    """

    def __init__(
        self,
        directory: Path,
        *,
        verify: bool | None = None,
        cached: CachedShards | None = None,
        root: Path | None = None,
    ) -> None:
        self._opened = OpenDirectory(directory)
        self.directory, self.manifest = self._opened.path, self._opened.manifest
        self.files = ShardFiles(self._opened, root)
        """The shards."""
        if cached is not None:
            self.files = RemoteShardFiles(self._opened, cached)
        self._cached = cached
        self._root = root
        self._verify_option = verify
        self._entries: dict[str, IndexRows] = {}
        self._columns: dict[str, StoredColumn] = {}

    def __len__(self) -> int:
        return self.manifest.rows

    def __reduce__(self) -> tuple[Any, ...]:
        options = (self._verify_option, self._cached, self._root)
        return _reopen, (self.directory, *options, self.manifest.digest)

    @property
    def place(self) -> str:
        """The URL or path of the dataset, for messages."""
        return str(self.directory) if self._cached is None else self._cached.url

    @cached_property
    def keys(self) -> StringTable:
        """The key of each row."""
        return self._opened.unchanged(self._index.keys)

    @cached_property
    def paths(self) -> StringTable:
        """The source path of each row."""
        return self._opened.unchanged(self._index.paths)

    @cached_property
    def rows(self) -> Rows:
        """The index: one `shardkit.dataset.index.ROW` for each row, memory-mapped and read-only."""
        return self._opened.unchanged(self._index.rows)

    @cached_property
    def schema(self) -> Schema:
        """The fields of all records, by name."""
        return self.manifest.fields_by_name

    @property
    def entries(self) -> IndexRows:
        """The rows of the index, read without a map: truncating a mapped file kills the process."""
        return self.entries_of(IMAGE)

    def entries_of(self, field: str) -> IndexRows:
        """Return the entries in the index of a field with bytes of its own.

        Raises:
            UsageError: If there is no such field.
        """
        found = self._entries.get(field)
        if found is None:
            if field != IMAGE:
                self._require(field, STORED_APART, "has no bytes of its own: it has a column")
            rows = self._opened.unchanged(lambda: self._index.rows(field))
            found = self._entries[field] = self._index.entries(rows, field)
        return found

    def values(self, name: str, rows: Sequence[int] | npt.NDArray[np.int64]) -> Column:
        """Return the values of a small field in some rows, without reading a record.

        Args:
            name: Name of a number, labels, text, JSON, boxes or keypoints.
            rows: From `resolve_rows`.

        Raises:
            UsageError: If there is no such field.
            CorruptDataset: If the index is damaged, or another dataset has replaced this one.
        """
        return self._stored_column(name).take(rows)

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return the values of a small field in all rows, without reading a record.

        Returns:
            An array with one element for each row, read-only: a masked array if rows lack the
            number or label; for other kinds, Python objects, None where a row lacks the field.

        Raises:
            UsageError: If there is no such field.
            CorruptDataset: If the index is damaged, or another dataset has replaced this one.
        """
        if name == LABEL and name in self.schema:
            labels = self.labels
            lacking = labels == NO_LABEL
            return np.ma.MaskedArray(labels, lacking) if lacking.any() else labels
        return self._stored_column(name).whole().as_numpy()

    def present(self, name: str) -> npt.NDArray[np.bool_]:
        """Return whether each row has a field, without reading a record: bool of shape (N,).

        Raises:
            UsageError: If there is no such field.
            CorruptDataset: If the index is damaged, or another dataset has replaced this one.
        """
        field = self.schema.get(name)
        if field is not None and field.kind in STORED_APART:
            kinds = self.entries_of(name).read(np.arange(len(self)))["field"]
            return np.asarray(kinds != _ABSENT_CODE)
        if name == LABEL and field is not None:
            return np.asarray(self.labels != NO_LABEL)
        return self._stored_column(name).present()

    def _stored_column(self, name: str) -> StoredColumn:
        found = self._columns.get(name)
        if found is None:
            field = self._require(name, COLUMN_KINDS, "has no column: it is stored in the records")
            (entry,) = (each for each in self.manifest.schema if each.name == name)
            lacking = entry.rows < len(self)
            found = self._columns[name] = self._opened.unchanged(
                lambda: self._index.column(name, field, lacking=lacking)
            )
        return found

    def _require(self, name: str, kinds: Sequence[str], otherwise: str) -> Field:
        """Return a field, which must exist and be of one of some kinds.

        Raises:
            UsageError: If it is not.
        """
        field = self.schema.get(name)
        if field is None:
            raise UsageError(
                f"{self.place} has no field {quoted(name)}; it has {', '.join(self.schema)}"
            )
        if field.kind not in kinds:
            raise UsageError(f"the field {quoted(name)} of {self.place} {otherwise}")
        return field

    @property
    def _index(self) -> IndexReader:
        return IndexReader(self.directory, self.manifest, verify=self._verify_option)

    def resolve_rows(self, rows: Sequence[int] | npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return ``rows`` as int64 of shape (N,); negative rows count from the end.

        Raises:
            IndexError: If a row is outside the dataset, or is not an integer.
        """
        return resolve_rows(rows, len(self), self.place)

    @cached_property
    def labels(self) -> npt.NDArray[np.int64]:
        """The label of each row, -1 if there is none: int64 of shape (N,), read-only.

        Raises:
            CorruptDataset: If they differ from the manifest's class counts.
        """
        labels = self.entries.labels()
        require_counts(labels, self.manifest.class_counts)
        labels.setflags(write=False)
        return labels

    def labels_of(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the label of some rows, -1 if there is none, without opening a shard.

        Args:
            rows: From `resolve_rows`.

        Raises:
            CorruptRecord: If a row of the index is damaged.
            CorruptDataset: If another dataset has replaced this one.
        """
        index = self._opened.unchanged(lambda: self.entries.read(rows))
        if (wrong := damaged_rows(index)).any():
            number = int(wrong.argmax())
            reason = "its entry in the index is damaged"
            raise self.corrupt(int(rows[number]), int(index["offset"][number]), reason)
        return index["label"].astype(np.int64)

    def find(self, rows: npt.NDArray[np.int64], field: str = IMAGE) -> LocatedRows:
        """Look up ``rows`` in the index and return their images or arrays, ready to read.

        Args:
            rows: From `resolve_rows`.
            field: Name of a field with bytes of its own.

        Raises:
            UsageError: If there is no such field.
            CorruptRecord: If a row of the index is damaged or states an impossible size.
            CorruptShard: If a shard is missing or truncated.
            CorruptDataset: If another dataset has replaced this one.
        """
        index = self.entries_of(field).read(rows)
        try:
            opened = self.files.open_for(rows, index)
        except CorruptDataset:  # else the index would be read if this dataset came back
            for entries in self._entries.values():
                entries.forget()
            raise
        found = LocatedRows(self, rows, index, opened, field)
        sizes = self.files.sizes[opened.places]
        found.examine(sizes, self.schema.get(field), self.manifest.raw_shape)
        return found

    def announce(self, rows: npt.NDArray[np.int64], field: str = IMAGE) -> None:
        """Issue readahead for the images of ``rows``, counted from 0, without waiting.

        From an object store, their shards are fetched into the cache instead. A problem with a
        shard is reported when it is read.
        """
        rows = np.unique(rows)
        self.files.announce(self.files.numbers(rows), self.entries_of(field).read(rows))

    def require_shards(self) -> None:
        """Check that every shard is there, and was not replaced.

        Raises:
            CorruptShard: If one is missing, or another file.
        """
        for shard in range(len(self.manifest.shards)):
            self.files.open([shard])

    def verifies(self, name: str = IMAGE) -> bool:
        """Return whether each read of a field compares its checksum."""
        if self._verify_option is not None:
            return self._verify_option
        # Other programs may write to attached files.
        return not self._is_plain(name) or isinstance(self.manifest, AttachedManifest)

    def _is_plain(self, name: str) -> bool:
        """Return whether a field holds raw pixels, or arrays of one shape."""
        field = self.schema.get(name)
        if field is None:
            return False
        is_raw = field.kind == "image" and self.manifest.raw_shape is not None
        return is_raw or field.is_uniform

    def maps(self, name: str) -> bool:
        """Return whether the compiled module may copy a field from mapped shards.

        It does so for raw pixels and arrays of one shape only, which take half the time, and whose
        checksums are not compared.
        """
        return self._is_plain(name) and not self.verifies(name) and self._is_mappable

    @cached_property
    def _is_mappable(self) -> bool:
        return int(self.files.sizes.sum()) <= _MAPPED

    def read_via_format(self, row: int, name: str = IMAGE) -> bytes:
        """Return an image or array that its shard does not store as plain bytes.

        Raises:
            CorruptShard: If its shard is damaged.
        """
        shard, place = self.files.place(row)
        record: Record
        (record,) = self.files.reader(shard, get_format(self.manifest.format).read).read([place])
        field = self.schema.get(name)
        stored = field.stored_name(name) if field is not None else None
        return record.fields[stored or image_field(record.fields, name) or ""]

    def record(self, row: int) -> Record:
        """Return the record of a row with all its fields, after comparing them with the index.

        Raises:
            CorruptRecord: If the record or its index is damaged.
            CorruptDataset: If another dataset has replaced this one.
        """
        if isinstance(self.manifest, AttachedManifest):
            return self._assembled(row)
        shard, place = self.files.place(row)
        storage = get_format(self.manifest.format)
        self.files.whole(shard)  # a missing shard is not a damaged record
        found: IndexedRecord
        try:
            reader = self.files.reader(shard, partial(shard_records, storage), "records")
            (found,) = reader.read([place])
            part = self.part(np.array([row]))
            reason = difference(found, 0, part)[0]
        except (CorruptShard, IndexError) as error:
            reason = str(error)
        if reason:
            raise self.corrupt(row, int(self.entries.read(np.array([row]))["offset"][0]), reason)
        return found.record

    def _assembled(self, row: int) -> Record:
        """Return the record that a conversion of an attached archive would store."""
        place = np.array([row])
        fields: dict[str, bytes] = {}
        meta: dict[str, Any] = {"path": self.paths[row]}
        values: dict[str, Any] = {}
        for name, field in self.schema.items():
            if name == LABEL:
                if (label := int(self.labels_of(place)[0])) != NO_LABEL:
                    fields[LABEL_FIELD] = b"%d" % label
                continue
            if field.kind in COLUMN_KINDS:
                if (value := self.values(name, place).value(0)) is not None:
                    values[name] = value
                continue
            found = self.find(place, name)
            kind = found.fields[0]
            if kind == ABSENT:
                continue
            stored = field.stored_name(name) or (kind if name == IMAGE else f"{name}.{kind}")
            fields[stored] = bytes(found.read(0, memoryview(bytearray(found.lengths[0]))).data)
            if field.kind in ("image", "mask"):
                size = {"width": found.widths[0], "height": found.heights[0]}
                meta |= size if name == IMAGE else {name: size}
        record = Record(self.keys[row], {**fields, META_FIELD: dump_json(meta)})
        return with_fields(record, self.schema, values)

    def part(self, rows: npt.NDArray[np.int64]) -> IndexPart:
        """Return the index of some rows, counted from 0.

        Raises:
            CorruptDataset: If the index is damaged, or another dataset has replaced this one.
        """
        return IndexPart(
            self.entries.read(rows),
            [self.keys[row] for row in rows.tolist()],
            [self.paths[row] for row in rows.tolist()],
            {name: self.entries_of(name).read(rows) for name in apart_of(self.schema)},
            {name: self.values(name, rows) for name in columns_of(self.schema)},
        )

    def corrupt(self, row: int, offset: int, reason: str) -> CorruptRecord:
        """Return the error for a damaged record, with its location."""
        shard, _ = self.files.place(row)
        path = self.files.path(shard)
        try:
            key, source = self.keys[row], self.paths[row]
        except (CorruptDataset, ValueError):
            key = source = "unknown: the index is damaged too"
        self.files.forget(shard)
        return CorruptRecord(
            f"record {quoted(key)} (row {row}, from {quoted(source)}) in {path} at byte "
            f"{offset} is damaged: {reason}. {self.files.remedy}"
        )


def resolve_rows(
    rows: Sequence[int] | npt.ArrayLike, count: int, what: str
) -> npt.NDArray[np.int64]:
    """Return ``rows`` as int64 of shape (N,); negative rows count from the end.

    Args:
        rows: Integers.
        count: Number of rows of the dataset.
        what: Name of the dataset, in errors.

    Raises:
        IndexError: If a row is outside the dataset, or is not an integer.
    """
    try:
        array = np.asarray(rows)
    except ValueError:
        raise IndexError(f"rows must be integers, not {quoted(rows)}") from None
    if array.size and array.dtype.kind not in "iu":
        kind = "text" if array.dtype.kind in "US" else array.dtype
        raise IndexError(f"rows must be integers, not {kind}")
    if array.ndim > 1:
        raise IndexError(f"rows must be one-dimensional, not of shape {array.shape}")
    # Negative rows are large unsigned numbers.
    if array.dtype == np.int64 and array.ndim and array.view(np.uint64).max(initial=0) < count:
        return array
    wrong = (array >= count) | ((array < 0) & (array < -count))
    if wrong.any():
        raise IndexError(f"row {int(array[wrong][0])} is not in {what}, which has {count} rows")
    array = array.astype(np.int64).reshape(-1)
    return np.where(array < 0, array + count, array)


def _reopen(
    directory: Path,
    verify: bool | None,
    cached: CachedShards | None,
    root: Path | None,
    digest: str,
) -> ShardSet:
    """Reopen an unpickled dataset, unless another one has replaced it."""
    shards = ShardSet(directory, verify=verify, cached=cached, root=root)
    if shards.manifest.digest != digest:
        raise rewritten(directory)
    return shards
