"""A dataset on disk as one sequence of stored records across shards, with verified reads.

Nothing here knows a format by name or decodes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from shardkit.codecs.image import MAX_PIXELS
from shardkit.contracts import Format
from shardkit.dataset.attached import shards_folder
from shardkit.dataset.columns import COLUMN_KINDS, Column, columns_of
from shardkit.dataset.handles import ShardFile, forget, shard_file, shard_reader
from shardkit.dataset.index import (
    HEAD,
    ROW,
    IndexPart,
    Rows,
    StoredColumn,
    StringTable,
    apart_of,
    checksum,
    damaged_rows,
    require_counts,
)
from shardkit.dataset.index_builder import difference, shard_records
from shardkit.dataset.index_reader import IndexReader, IndexRows
from shardkit.dataset.manifest import (
    MANIFEST_NAME,
    AttachedManifest,
    AttachedShard,
    Manifest,
    load_manifest,
)
from shardkit.dataset.remote import CachedShards, Need
from shardkit.errors import CorruptDataset, CorruptRecord, CorruptShard, UsageError
from shardkit.record import (
    ABSENT,
    IMAGE,
    IMAGE_FIELDS,
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
from shardkit.system import native
from shardkit.system.files import as_name, require_local
from shardkit.system.text import quoted

_Opened = TypeVar("_Opened")

_RAW_CODE = IMAGE_FIELDS.index("raw")
_ABSENT_CODE = STORED_KINDS.index(ABSENT)
_ARRAY_CODE = STORED_KINDS.index("npy")

_MAP = attrgetter("map")

_MAPPED = 64 << 30
"""Maximum bytes of a dataset to map: each process then needs up to 128 MiB of page tables."""

_GAP = 16384
"""Maximum bytes between two images that share one readahead call."""


class EncodedImage(NamedTuple):
    """One image as stored, or the values of an array, or bytes."""

    data: bytes | memoryview
    """Image bytes; the next read overwrites a memoryview."""
    field: str
    """Kind of the image: a name in `STORED_KINDS`."""
    label: int
    width: int
    height: int


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
        require_local(directory)
        self._cached = cached
        self.directory = directory.expanduser().absolute()
        self._stamp = _stamp(self.directory)
        self.manifest: Manifest = load_manifest(self.directory)
        self._paths: dict[int, Path] = {}
        self._root = root
        self._folder = shards_folder(self.directory, self.manifest, root)
        self._verify_option = verify
        self._entries: dict[str, IndexRows] = {}
        self._columns: dict[str, StoredColumn] = {}

    def __len__(self) -> int:
        return self.manifest.rows

    def __reduce__(self) -> tuple[Any, ...]:
        options = (self._verify_option, self._cached, self._root)
        return _reopen, (self.directory, *options, self.manifest.digest)

    @cached_property
    def keys(self) -> StringTable:
        """The key of each row."""
        return self._unchanged(self._index.keys)

    @cached_property
    def paths(self) -> StringTable:
        """The source path of each row."""
        return self._unchanged(self._index.paths)

    @cached_property
    def rows(self) -> Rows:
        """The index: one `shardkit.dataset.index.ROW` for each row, memory-mapped and read-only."""
        return self._unchanged(self._index.rows)

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
            rows = self._unchanged(lambda: self._index.rows(field))
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
            found = self._columns[name] = self._unchanged(
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
                f"{self.directory} has no field {quoted(name)}; it has {', '.join(self.schema)}"
            )
        if field.kind not in kinds:
            raise UsageError(f"the field {quoted(name)} of {self.directory} {otherwise}")
        return field

    @property
    def _index(self) -> IndexReader:
        return IndexReader(self.directory, self.manifest, verify=self._verify_option)

    @property
    def lookahead(self) -> int:
        """Rows to `announce` before they are read: 0 if the shards are local.

        So their shards are fetched while others are read.
        """
        return 0 if self._cached is None else self._cached.lookahead(self.manifest.shards)

    def resolve_rows(self, rows: Sequence[int] | npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return ``rows`` as int64 of shape (N,); negative rows count from the end.

        Raises:
            IndexError: If a row is outside the dataset, or is not an integer.
        """
        return resolve_rows(rows, len(self), str(self.directory))

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
        index = self._unchanged(lambda: self.entries.read(rows))
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
        shards = self._starts.searchsorted(rows, side="right") - 1
        index = self.entries_of(field).read(rows)
        if self._cached is None:
            files = self._open_all(set(shards.tolist()))
        else:
            files = self._fetch_all(self._cached, shards, index)
        found = LocatedRows(self, rows, index, BatchShards(shards, files), field)
        found.survey = self._survey(found, shards)
        if found.survey is None:  # find out what is unusual
            found.require_intact()
            self._require_plausible(found, index, shards)
        return found

    def _survey(self, found: LocatedRows, shards: npt.NDArray[np.int64]) -> Survey | None:
        """Sum up images with the compiled module; None if any is unusual."""
        compiled, kinds = native.module(), len(IMAGE_FIELDS)
        if compiled is None:
            return None
        field = self.schema.get(found.name)
        size = field.bytes if field is not None and field.is_uniform else 0
        if size:
            kinds = _ARRAY_CODE + 1
        elif found.name != IMAGE and (field is None or field.kind not in ("image", "mask")):
            return None
        height, width, _ = self.manifest.raw_shape or (0, 0, 3)
        usual = compiled.survey(
            found.entries, self._sizes[shards], kinds, width, height, MAX_PIXELS
        )
        # Shorter arrays than stated are found when they are read.
        return None if usual is None or (size and usual[0] != size) else Survey(*usual)

    def _require_plausible(
        self, found: LocatedRows, index: Rows, shards: npt.NDArray[np.int64]
    ) -> None:
        """Refuse impossible lengths and sizes before allocating memory for them."""
        lengths = index["length"].astype(np.int64)
        beyond = np.maximum(index["offset"], 0) > self._sizes[shards] - lengths
        for number in np.flatnonzero(beyond).tolist():
            # A format that compresses may hold an image larger than its shard.
            row, length = found.rows[number], found.lengths[number]
            content = b"" if index["offset"][number] >= 0 else self.read_via_format(row, found.name)
            if len(content) != length:
                raise found.corrupt(number, "it ends beyond its shard")
        raw = index["field"] == _RAW_CODE
        height, width, _ = self.manifest.raw_shape or (0, 0, 3)
        pixels = index["width"].astype(np.uint64) * index["height"]  # each has 32 bits
        wrong = np.where(
            raw,
            (index["width"] != width)
            | (index["height"] != height)
            | (lengths != 3 * width * height),
            # 0 x 0 is an unchecked image whose header cannot be read.
            ((pixels == 0) & (index["width"] + index["height"] > 0)) | (pixels > MAX_PIXELS),
        )
        field = self.schema.get(found.name)
        if field is not None and field.is_uniform:
            odd = (lengths != field.bytes) & (index["field"] != _ABSENT_CODE)
            if odd.any():
                number = int(odd.argmax())
                raise found.corrupt(number, f"it has not the shape {field.shape}")
        if wrong.any():
            number = int(wrong.argmax())
            size = f"{found.widths[number]} x {found.heights[number]}"
            raise found.corrupt(number, f"the index states an impossible size, {size} pixels")

    def announce(self, rows: npt.NDArray[np.int64], field: str = IMAGE) -> None:
        """Issue readahead for the images of ``rows``, counted from 0, without waiting.

        Neighboring images share one call. From an object store, their shards are fetched into the
        cache instead. A problem with a shard is reported when it is read.
        """
        rows = np.unique(rows)
        entries = self.entries_of(field).read(rows)
        shards = np.searchsorted(self._starts, rows, side="right") - 1
        if self._cached is not None:
            self._cached.fetch_ahead(self._needs(shards, entries).values())
            return
        order = np.lexsort((entries["offset"], shards))  # LMDB may store rows downwards
        shards, starts = shards[order], entries["offset"][order].astype(np.int64)
        ends = starts + entries["length"][order]
        # Reading a gap of a few pages costs less than another call.
        apart = (np.diff(shards) != 0) | (starts[1:] - ends[:-1] > _GAP) | (starts[:-1] < 0)
        firsts = np.flatnonzero(np.concatenate([[True], apart])) if len(shards) else shards
        files: dict[int, ShardFile] = {}
        with contextlib.suppress(CorruptDataset, OSError):  # a later read reports the error
            files = self._open_all(set(shards.tolist()))
        for first, last in zip(firsts, [*(firsts[1:] - 1), len(shards) - 1], strict=False):
            if file := files.get(int(shards[first])):
                file.announce(int(starts[first]), max(0, int(ends[last] - starts[first])))

    def shard_path(self, shard: int) -> Path:
        """Return the path of a shard, by its number."""
        path = self._paths.get(shard)
        if path is None:  # cached: building a path takes as long as reading an image
            entry, cached = self.manifest.shards[shard], self._cached
            path = self._folder / as_name(entry.name) if cached is None else cached.path(entry)
            self._paths[shard] = path
        return path

    @cached_property
    def _starts(self) -> npt.NDArray[np.int64]:
        """The first row of each shard."""
        counts = [shard.rows for shard in self.manifest.shards]
        return np.cumsum([0, *counts[:-1]], dtype=np.int64)

    @cached_property
    def _sizes(self) -> npt.NDArray[np.int64]:
        """Bytes of each shard."""
        return np.array([shard.bytes for shard in self.manifest.shards], np.int64)

    @cached_property
    def _format(self) -> Format:
        return get_format(self.manifest.format)

    def _open_all(self, shards: Collection[int]) -> dict[int, ShardFile]:
        """Return the files of some shards, after checking that the dataset was not replaced."""
        entries = self.manifest.shards
        if self._cached is not None:
            whole = np.array([-1], np.int64)
            return {n: self._cached.open(Need(entries[n], whole, whole)) for n in shards}
        try:
            return self._unchanged(lambda: {shard: self._open(shard) for shard in shards})
        except CorruptDataset:  # drop them: otherwise they would be read if this dataset came back
            for entries_of_field in self._entries.values():
                entries_of_field.forget()
            for shard in shards:
                forget(self.shard_path(shard), entries[shard].identity)
            raise

    def require_shards(self) -> None:
        """Check that every shard is there, and was not replaced.

        Raises:
            CorruptShard: If one is missing, or another file.
        """
        for shard in range(len(self.manifest.shards)):
            self._open_all([shard])

    def _open(self, shard: int) -> ShardFile:
        entry = self.manifest.shards[shard]
        path = self.shard_path(shard)
        if not isinstance(entry, AttachedShard):
            return shard_file(path, entry.bytes, entry.identity, self._folder)
        remedy = (
            f"It was replaced after `shardkit attach`, and the index in {self.directory} does not "
            "describe it. Restore it, or run the same `shardkit attach` command again."
        )
        file = shard_file(path, entry.bytes, entry.identity, self._folder, remedy=remedy)
        if not entry.sha256 and file.modified != entry.modified:
            forget(path, entry.identity)
            raise CorruptShard(f"the archive {path} has another modification time. {remedy}")
        return file

    def _fetch_all(
        self, cached: CachedShards, shards: npt.NDArray[np.int64], index: Rows
    ) -> dict[int, ShardFile]:
        """Return the files of shards in an object store, which hold some rows."""
        needs = self._needs(shards, index)
        if len(needs) > 1:
            cached.fetch_ahead(needs.values())
        return {number: cached.open(need) for number, need in needs.items()}

    def _needs(self, shards: npt.NDArray[np.int64], index: Rows) -> dict[int, Need]:
        """Return what is read of each shard for some rows of the index."""
        starts = index["offset"].astype(np.int64)
        ends = starts + index["length"]
        found = {}
        for number in np.unique(shards).tolist():
            here = shards == number
            found[number] = Need(self.manifest.shards[number], starts[here], ends[here])
        return found

    def _unchanged(self, load: Callable[[], _Opened]) -> _Opened:
        """Return what ``load`` opens if the directory still holds the dataset opened here.

        Publishing exchanges the directory, or removes the old manifest first and adds the new one
        last. So files opened before this check belong to the old dataset.

        Raises:
            CorruptDataset: If another dataset has replaced this one.
        """
        try:
            opened = load()
        except CorruptDataset:  # files of another dataset are not damaged
            self._require_unchanged()
            raise
        self._require_unchanged()
        return opened

    def _require_unchanged(self) -> None:
        stamp = _stamp(self.directory)
        if stamp != self._stamp:
            if stamp is None:
                raise CorruptDataset(
                    f"{self.directory} has lost its manifest: it was removed or is being "
                    "rewritten. Open the dataset again."
                )
            _require_digest(load_manifest(self.directory), self.manifest.digest, self.directory)
            self._stamp = stamp

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
        return int(self._sizes.sum()) <= _MAPPED

    def read_via_format(self, row: int, name: str = IMAGE) -> bytes:
        """Return an image or array that its shard does not store as plain bytes.

        Raises:
            CorruptShard: If its shard is damaged.
        """
        shard = int(np.searchsorted(self._starts, row, side="right")) - 1
        entry = self.manifest.shards[shard]
        self._open_all([shard])  # checks its type and size, and that it is of this dataset
        cached = self._cached
        path = self.shard_path(shard) if cached is None else cached.cache.shard(entry.sha256)
        reader = self._unchanged(lambda: shard_reader(path, entry.identity, self._format.read))
        (record,) = reader.read([row - int(self._starts[shard])])
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
        shard = int(np.searchsorted(self._starts, row, side="right")) - 1
        identity, storage = self.manifest.shards[shard].identity, self._format
        self._open_all([shard])  # checks its type and size, and that it is of this dataset
        try:
            reader = shard_reader(
                self.shard_path(shard), identity, partial(shard_records, storage), "records"
            )
            (found,) = reader.read([row - int(self._starts[shard])])
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
        shard = int(np.searchsorted(self._starts, row, side="right")) - 1
        path, identity = self.shard_path(shard), self.manifest.shards[shard].identity
        forget(path, identity)  # so that a restored copy is opened next time
        try:
            key, source = self.keys[row], self.paths[row]
        except (CorruptDataset, ValueError):
            key = source = "unknown: the index is damaged too"
        remedy = f"To list all damage, run `shardkit verify {self.directory}`."
        if self._cached is not None:
            self._cached.discard(self.manifest.shards[shard])
            remedy = f"It was removed from the cache; read it again, from {self._cached.url}."
        return CorruptRecord(
            f"record {quoted(key)} (row {row}, from {quoted(source)}) in {path} at byte "
            f"{offset} is damaged: {reason}. {remedy}"
        )


class Survey(NamedTuple):
    """The largest images of a batch, and the size of all."""

    longest: int
    """Bytes of the longest image."""
    most_pixels: int
    """Pixels of the largest image."""
    width: int
    height: int
    """Width and height of all images, or 0 and 0 if they differ."""


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
        raise IndexError(f"rows must be integers, not {array.dtype}")
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


class BatchShards(NamedTuple):
    """The shards of the rows of a batch."""

    places: npt.NDArray[np.int64]
    """The number of each row's shard."""
    files: Mapping[int, ShardFile]
    """The open shards, by number."""


class LocatedRows:
    """The images of some rows, located in the index and read one by one.

    The first image that is not in the page cache triggers readahead for all later ones. So the
    caller can decode an image, still in the CPU cache, while the kernel fetches the others. The
    columns of the index are lists, which Python iterates faster than arrays; each is made on first
    use, as the compiled module needs none of them.
    """

    def __init__(
        self,
        shards: ShardSet,
        rows: npt.NDArray[np.int64],
        index: Rows,
        files: BatchShards,
        name: str = IMAGE,
    ) -> None:
        self._shards = shards
        self._index = index
        self._opened = files
        self.name = name
        """Name of the field."""
        self.verifies = shards.verifies(name)
        """Whether each read compares the record's checksum."""
        self.entries = memoryview(index.tobytes())
        """The entries of the rows in the index: one `ROW` each."""
        self.array = rows
        self.survey: Survey | None = None
        """From the compiled module; None if it found nothing out."""
        self._announced = len(rows) == 1

    def sizes(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
        """Return the width and the height of each image in pixels."""
        return self._index["width"], self._index["height"]

    def targets(self) -> npt.NDArray[np.int64]:
        """Return `labels` as a new array."""
        return self._index["label"].astype(np.int64)

    def require_intact(self) -> None:
        """Compare the check of each row of the index.

        Raises:
            CorruptRecord: If a row is damaged.
        """
        if (wrong := damaged_rows(self._index)).any():
            raise self.corrupt(int(wrong.argmax()), "its entry in the index is damaged")

    @cached_property
    def rows(self) -> list[int]:
        """The rows in the dataset."""
        values: list[int] = self.array.tolist()
        return values

    @cached_property
    def lengths(self) -> list[int]:
        """Size of each image in bytes."""
        values: list[int] = self._index["length"].tolist()
        return values

    @cached_property
    def labels(self) -> list[int]:
        """The label of each image."""
        values: list[int] = self._index["label"].tolist()
        return values

    @cached_property
    def widths(self) -> list[int]:
        """The width of each image in pixels."""
        values: list[int] = self._index["width"].tolist()
        return values

    @cached_property
    def heights(self) -> list[int]:
        """The height of each image in pixels."""
        values: list[int] = self._index["height"].tolist()
        return values

    @cached_property
    def fields(self) -> list[str]:
        """Kind of each image, in `STORED_KINDS`: `ABSENT` where the row has none."""
        return [STORED_KINDS[code] for code in self._index["field"].tolist()]

    @cached_property
    def _offsets(self) -> list[int]:
        values: list[int] = self._index["offset"].tolist()
        return values

    @cached_property
    def _checksums(self) -> list[int]:
        values: list[int] = self._index["checksum"].tolist()
        return values

    @property
    def longest(self) -> int:
        """Bytes of the longest image."""
        return max(self.lengths, default=0) if self.survey is None else self.survey.longest

    def __len__(self) -> int:
        return len(self.array)

    def read(self, number: int, buffer: memoryview) -> EncodedImage:
        """Read one image into ``buffer``; the result is valid until ``buffer`` is overwritten.

        Args:
            number: Position among the rows.
            buffer: At least as many bytes as `lengths` states.

        Raises:
            CorruptRecord: If the record is damaged.
        """
        data = buffer[: self.lengths[number]]
        try:
            self._fill(number, data)
        except (CorruptShard, OSError, OverflowError, KeyError, ValueError) as error:
            raise self.corrupt(number, str(error)) from error
        if self.verifies:
            head = self.entries[number * ROW.itemsize :][HEAD]
            if checksum(head, data) != self._checksums[number]:
                raise self.corrupt(number, "its checksum does not match")
        size = self.widths[number], self.heights[number]
        return EncodedImage(data, self.fields[number], self.labels[number], *size)

    @cached_property
    def _files(self) -> list[ShardFile]:
        """The shard of each row."""
        shards, files = self._opened
        return [files[shard] for shard in shards.tolist()]

    def descriptors(self) -> npt.NDArray[np.int32]:
        """Return the file descriptor of each row's shard; they stay open as long as this object."""
        shards, files = self._opened
        found = np.empty(max(files, default=0) + 1, np.int32)
        for shard, file in files.items():
            found[shard] = file.descriptor
        return found[shards]

    def maps(self) -> list[Any] | None:
        """Return the map of each row's shard for raw pixels that can be copied from there."""
        return list(map(_MAP, self._files)) if self._shards.maps(self.name) else None

    def _fill(self, number: int, data: memoryview) -> None:
        offset, file = self._offsets[number], self._files[number]
        if offset < 0:
            data[:] = self._shards.read_via_format(self.rows[number], self.name)
        elif self._announced or not file.read_cached(offset, data):
            self._announce(number)
            file.read_into(offset, data)

    def _announce(self, number: int) -> None:
        """Issue readahead for all images from the given one on, once."""
        if not self._announced:
            self._announced = True
            for place in range(number, len(self.rows)):
                self._files[place].announce(self._offsets[place], self.lengths[place])

    def corrupt(self, number: int, reason: str) -> CorruptRecord:
        """Return the error for the damaged record at a position."""
        return self._shards.corrupt(self.rows[number], self._offsets[number], reason)


def _reopen(
    directory: Path,
    verify: bool | None,
    cached: CachedShards | None,
    root: Path | None,
    digest: str,
) -> ShardSet:
    """Reopen an unpickled dataset, unless another one has replaced it."""
    opened = ShardSet(directory, verify=verify, cached=cached, root=root)
    _require_digest(opened.manifest, digest, directory)
    return opened


def _require_digest(manifest: Manifest, digest: str, directory: Path) -> None:
    if manifest.digest != digest:
        raise CorruptDataset(f"{directory} was rewritten since it was opened; open it again")


def _stamp(directory: Path) -> tuple[int, int, int, int] | None:
    """Return a value that changes when the manifest in ``directory`` is replaced; None without."""
    try:  # each batch asks: joining texts takes a tenth of the time of joining paths
        status = os.stat(f"{directory}/{MANIFEST_NAME}")
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
