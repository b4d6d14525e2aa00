"""A dataset on disk as one row of images: which shard a row is in, and its bytes, proven whole.

It knows no format by name and does not decode.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from shardkit.columns import Columns, IndexRows
from shardkit.contracts import Format
from shardkit.errors import CorruptDataset, CorruptRecord, CorruptShard
from shardkit.handles import ShardFile, forget, shard_file, shard_reader
from shardkit.index import HEAD, ROW, Rows, StringTable, checksum, require_counts, unsound
from shardkit.manifest import MANIFEST_NAME, Manifest, load_manifest
from shardkit.record import IMAGE_FIELDS
from shardkit.registry import get_format

_Opened = TypeVar("_Opened")

_GAP = 16384
"""Bytes between two images that are announced together."""


class StoredImage(NamedTuple):
    """One image as it is stored."""

    data: bytes | memoryview
    """Its bytes; a view shows something else once the next image was read."""
    field: str
    """Its kind, a name of `IMAGE_FIELDS`."""
    label: int
    width: int
    height: int


class ShardSet:
    """A dataset directory, opened lazily; cheap to pickle, since it carries its path alone.

    Args:
        directory: The dataset.
        verify: Whether each read compares the record's checksum. None does so for encoded images
            and not for raw pixels, where it would cost more than reading them.

    Raises:
        UsageError: If there is no dataset in ``directory``.
        CorruptDataset: If its manifest is damaged.
    """

    def __init__(self, directory: Path, *, verify: bool | None = None) -> None:
        self.directory = directory.expanduser().absolute()
        self._stamp = _stamp(self.directory)
        self.manifest: Manifest = load_manifest(self.directory)
        self._paths: dict[int, Path] = {}
        self._verify_option = verify
        self._verify = (self.manifest.raw_shape is None) if verify is None else verify

    def __len__(self) -> int:
        return self.manifest.rows

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.directory, self._verify_option, self.manifest.digest)

    @cached_property
    def keys(self) -> StringTable:
        """The key of each row."""
        return self._unchanged(self._columns.keys())

    @cached_property
    def paths(self) -> StringTable:
        """The source path of each row."""
        return self._unchanged(self._columns.paths())

    @cached_property
    def rows(self) -> Rows:
        """The index: one `shardkit.index.ROW` for each row, memory-mapped and read-only."""
        return self._unchanged(self._columns.rows())

    @cached_property
    def entries(self) -> IndexRows:
        """The index as it is read: a map of a file that is then cut would end the process."""
        return self._columns.entries(self.rows)

    @property
    def _columns(self) -> Columns:
        return Columns(self.directory, self.manifest, verify=self._verify_option)

    def normalise(self, rows: Sequence[int] | npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return ``rows`` as int64 of shape (N,), negative ones counted from the end.

        Raises:
            IndexError: If a row is outside of the dataset, or is not an integer.
        """
        try:
            array = np.asarray(rows)
        except ValueError:
            raise IndexError(f"rows are integers, not {rows!r}") from None
        if array.size and array.dtype.kind not in "iu":
            raise IndexError(f"rows are integers, not {array.dtype}")
        if array.ndim > 1:
            raise IndexError(f"rows are a list, not an array of shape {array.shape}")
        wrong = (array >= len(self)) | ((array < 0) & (array < -len(self)))
        if wrong.any():
            raise IndexError(
                f"row {int(array[wrong][0])} is not in {self.directory}, which has {len(self)} rows"
            )
        array = array.astype(np.int64).reshape(-1)
        return np.where(array < 0, array + len(self), array)

    @cached_property
    def labels(self) -> npt.NDArray[np.int64]:
        """The label of each row, -1 where there is none: int64 of shape (N,), read-only.

        Raises:
            CorruptDataset: If they are not those that the manifest counts.
        """
        labels = self.entries.labels()
        require_counts(labels, self.manifest.class_counts)
        labels.setflags(write=False)
        return labels

    def find(self, rows: npt.NDArray[np.int64]) -> Found:
        """Return the images of ``rows``, found in the index and ready to be read.

        Args:
            rows: As `normalise` gives them.

        Raises:
            CorruptRecord: If a row of the index is damaged.
            CorruptShard: If a shard is missing or cut.
            CorruptDataset: If another dataset took the place of this one.
        """
        shards = np.searchsorted(self._starts, rows, side="right") - 1
        index = self.entries.read(rows)
        files = self._open_all(set(shards.tolist()))
        room = self._sizes[shards] - index["length"].astype(np.int64)
        beyond = (index["offset"] >= 0) & (index["offset"] > room)
        found = Found(self, rows, index, [files[shard] for shard in shards.tolist()])
        if beyond.any():  # before memory is taken for what cannot be there
            raise found.corrupt(int(beyond.argmax()), "it ends beyond its shard")
        return found

    def announce(self, rows: npt.NDArray[np.int64]) -> None:
        """Have the kernel read the images of ``rows``, from 0 on, into its cache; do not wait.

        Neighbours are announced in one piece. What is wrong with a shard shows when it is read.
        """
        rows = np.unique(rows)
        entries = self.entries.read(rows)
        shards = np.searchsorted(self._starts, rows, side="right") - 1
        order = np.lexsort((entries["offset"], shards))  # LMDB may store rows downwards
        shards, starts = shards[order], entries["offset"][order].astype(np.int64)
        ends = starts + entries["length"][order]
        # A gap of a few pages between two images costs less than another call.
        apart = (np.diff(shards) != 0) | (starts[1:] - ends[:-1] > _GAP) | (starts[:-1] < 0)
        firsts = np.flatnonzero(np.concatenate([[True], apart])) if len(shards) else shards
        files: dict[int, ShardFile] = {}
        with contextlib.suppress(CorruptDataset, OSError):  # opening one may fail
            files = self._open_all(set(shards.tolist()))
        for first, last in zip(firsts, [*(firsts[1:] - 1), len(shards) - 1], strict=False):
            if file := files.get(int(shards[first])):
                file.announce(int(starts[first]), max(0, int(ends[last] - starts[first])))

    def shard_path(self, shard: int) -> Path:
        """Return the file of the shard of the given number."""
        path = self._paths.get(shard)
        if path is None:  # kept: to make one costs as much as to read an image
            path = self._paths[shard] = self.directory / self.manifest.shards[shard].name
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
        """Return the files of some shards, unless they may be those of another dataset."""
        entries = self.manifest.shards
        files = {
            shard: shard_file(self.shard_path(shard), entries[shard].bytes, entries[shard].sha256)
            for shard in shards
        }
        try:
            return self._unchanged(files)
        except CorruptDataset:  # or they would be read if the older dataset came back
            self.entries.forget()
            for shard in shards:
                forget(self.shard_path(shard), entries[shard].sha256)
            raise

    def _unchanged(self, opened: _Opened) -> _Opened:
        """Return what was just opened, if the dataset is still the one whose manifest was read.

        A new dataset takes the place of an old one manifest first and last: whatever was opened
        before this look belongs to the old one.

        Raises:
            CorruptDataset: If another dataset took its place meanwhile.
        """
        stamp = _stamp(self.directory)
        if stamp != self._stamp:
            if stamp is None:
                raise CorruptDataset(
                    f"{self.directory} has no manifest any more: it was removed, or is being "
                    "written anew, since it was opened; open it again"
                )
            _require_digest(load_manifest(self.directory), self.manifest.digest, self.directory)
            self._stamp = stamp
        return opened

    @property
    def verifies(self) -> bool:
        """Whether each read compares the record's checksum."""
        return self._verify

    def through_library(self, row: int) -> bytes:
        """Return an image that does not lie in its shard's file as plain bytes.

        Raises:
            CorruptShard: If its shard is damaged.
        """
        shard = int(np.searchsorted(self._starts, row, side="right")) - 1
        entry = self.manifest.shards[shard]
        self._open_all([shard])  # a file, of its size, and of this dataset
        reader = self._unchanged(
            shard_reader(self.shard_path(shard), entry.sha256, self._format.read)
        )
        (record,) = reader.read([row - int(self._starts[shard])])
        return record.fields[record.image_field or ""]

    def corrupt(self, row: int, offset: int, reason: str) -> CorruptRecord:
        """Return the error that says that a record is damaged, and where."""
        shard = int(np.searchsorted(self._starts, row, side="right")) - 1
        path, identity = self.shard_path(shard), self.manifest.shards[shard].sha256
        forget(path, identity)  # a copy that is put in its place is to be opened
        try:
            key, source = self.keys[row], self.paths[row]
        except (CorruptDataset, ValueError):
            key = source = "unknown: the index is damaged too"
        return CorruptRecord(
            f"record {key!r} (row {row}, from {source!r}) in {path} at byte "
            f"{offset} is damaged: {reason}. "
            f"`shardkit verify {self.directory}` lists all damage."
        )


class Found:
    """The images of some rows: found in the index, and read one by one, in their order.

    The first that is not in the kernel's memory has all after it announced. So one is decoded while
    the kernel still fetches the others, and while it is in the cache of the processor. Columns of
    the index are lists, which Python walks faster than arrays.
    """

    def __init__(
        self, shards: ShardSet, rows: npt.NDArray[np.int64], index: Rows, files: list[ShardFile]
    ) -> None:
        """Look at the rows.

        Raises:
            CorruptRecord: If a row of the index is damaged.
        """
        self._shards = shards
        self._files = files
        self._verifies = shards.verifies
        self._packed = memoryview(index.tobytes())
        self.rows: list[int] = rows.tolist()
        self._offsets: list[int] = index["offset"].tolist()
        self.lengths: list[int] = index["length"].tolist()
        """Bytes of each image."""
        self._checksums: list[int] = index["checksum"].tolist()
        if (wrong := unsound(index)).any():
            raise self.corrupt(int(wrong.argmax()), "its entry in the index is damaged")
        self.labels: list[int] = index["label"].tolist()
        self.widths: list[int] = index["width"].tolist()
        self.heights: list[int] = index["height"].tolist()
        self.fields = [IMAGE_FIELDS[code] for code in index["field"].tolist()]
        self._announced = len(rows) == 1

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, number: int, buffer: memoryview) -> StoredImage:
        """Return one image; its bytes stand in ``buffer``, so they last as long as those.

        Args:
            number: Its position among the rows.
            buffer: As many bytes as `lengths` says, or more.

        Raises:
            CorruptRecord: If it is not what was written.
        """
        data = buffer[: self.lengths[number]]
        try:
            self._fill(number, data)
        except (CorruptShard, OSError, OverflowError, KeyError, ValueError) as error:
            raise self.corrupt(number, str(error)) from error
        if self._verifies:
            head = self._packed[number * ROW.itemsize :][HEAD]
            if checksum(head, data) != self._checksums[number]:
                raise self.corrupt(number, "its checksum does not match")
        size = self.widths[number], self.heights[number]
        return StoredImage(data, self.fields[number], self.labels[number], *size)

    def _fill(self, number: int, data: memoryview) -> None:
        offset, file = self._offsets[number], self._files[number]
        if offset < 0:
            data[:] = self._shards.through_library(self.rows[number])
        elif self._announced or not file.read_cached(offset, data):
            self._announce(number)
            file.read_into(offset, data)

    def _announce(self, number: int) -> None:
        """Tell the kernel of all images from the given one on, once."""
        if not self._announced:
            self._announced = True
            for place in range(number, len(self.rows)):
                self._files[place].announce(self._offsets[place], self.lengths[place])

    def corrupt(self, number: int, reason: str) -> CorruptRecord:
        """Return the error that says that the record at a position is damaged."""
        return self._shards.corrupt(self.rows[number], self._offsets[number], reason)


def _reopen(directory: Path, verify: bool | None, digest: str) -> ShardSet:
    """Open a pickled dataset again, refusing another one that took its place meanwhile."""
    opened = ShardSet(directory, verify=verify)
    _require_digest(opened.manifest, digest, directory)
    return opened


def _require_digest(manifest: Manifest, digest: str, directory: Path) -> None:
    if manifest.digest != digest:
        raise CorruptDataset(f"{directory} was written anew since it was opened; open it again")


def _stamp(directory: Path) -> tuple[int, int, int, int] | None:
    """Return what changes when the manifest in ``directory`` is another file."""
    try:
        status = os.stat(directory / MANIFEST_NAME)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
