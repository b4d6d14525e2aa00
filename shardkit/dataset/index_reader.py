"""Read the index of an open dataset, after comparing it with the manifest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from shardkit.dataset.handles import ShardFile, forget, shard_file
from shardkit.dataset.index import (
    ROW,
    TIMES,
    Index,
    Rows,
    StoredColumn,
    StringTable,
    column_files,
    entries_file,
    string_files,
)
from shardkit.dataset.opened import OpenedDataset
from shardkit.errors import CorruptDataset, CorruptShard
from shardkit.record import IMAGE
from shardkit.system.files import sha256_of
from shardkit.system.npy import StoredValues, npy_header
from shardkit.system.safe_paths import UNFIT
from shardkit.system.text import as_command

_HELD = 16 << 20
"""Maximum bytes of rows to hold in memory: half a million rows. Reading one from its file takes
1.5 us, a tenth of the time for a small image of raw pixels. Larger files are not mapped for that:
if one is truncated, its map kills the process."""

_HASHED = 64 << 20
"""Maximum bytes of an index file to hash on opening, at about 2 GB/s: 2 million rows. So opening a
dataset of any size takes little time: 22 ms for 1.28 million rows."""

_SPAN = 32
"""Maximum rows read per requested row (1 KiB) before rows are read one by one."""

_AT_ONCE = 1 << 15
"""Rows read at a time (1 MiB) when all are requested."""

OPAQUE = np.dtype((np.void, ROW.itemsize))
"""A row without its fields, which NumPy gathers in a fifth of the time."""

_Column = TypeVar("_Column")


class IndexReader:
    """Opens the columns of an index after comparing their digests with the manifest.

    A row's own check cannot show that the row is in the right place or dataset.
    """

    def __init__(self, dataset: OpenedDataset, *, verify: bool | None) -> None:
        """Prepare to read the index.

        ``verify`` compares the digests of all files, none, or (None) the small ones.
        """
        self._dataset = dataset
        self._verify = verify

    def rows(self, field: str = IMAGE) -> Rows:
        """Return the entries of a field with bytes of its own, memory-mapped and read-only.

        Raises CorruptDataset if a file is missing, truncated or changed.
        """
        return self._whole(lambda index: index.rows(field), entries_file(field))

    def column(self, name: str) -> StoredColumn:
        """Return the column of a small field."""
        return self._whole(lambda index: index.column(name), *column_files(name))

    def complete(self) -> Index:
        """Return the index after comparing all its files, also those of layers."""
        for store in self._dataset.stores:
            inside = [entry.name for entry in store.manifest.files if entry.is_of_index]
            IndexReader(store, verify=self._verify)._whole(lambda index: index, *inside)
        return self._dataset.index

    def keys(self) -> StringTable:
        """Return the key of each row."""
        return self._whole(Index.keys, *string_files("keys"))

    def paths(self) -> StringTable:
        """Return the source path of each row."""
        return self._whole(Index.paths, *string_files("paths"))

    def times(self) -> StoredValues:
        """Return the modification time of each row's file."""
        return self._whole(Index.times, TIMES)

    def entries(self, rows: Rows, field: str = IMAGE) -> IndexRows:
        """Return a reader of single rows, given all rows of that field."""
        held = np.array(rows) if rows.nbytes <= _HELD else None
        path = self._dataset.path / entries_file(field)
        manifest = self._dataset.manifest
        return IndexRows(path, len(rows), manifest.digest, held, self._dataset.path)

    def _whole(self, load: Callable[[Index], _Column], *names: str) -> _Column:
        column = load(self._dataset.index)
        for entry in self._dataset.manifest.files if self._verify is not False else ():
            if entry.name in names and (entry.bytes <= _HASHED or self._verify):
                _require_content(self._dataset.path, entry.name, entry.sha256)
        return column


class IndexRows:
    """The rows of an index, held in memory or read from their file."""

    def __init__(
        self, path: Path, count: int, identity: str, held: Rows | None, root: Path
    ) -> None:
        """Prepare to read ``count`` rows of a file that is known to be intact.

        ``identity`` is the digest of the dataset's manifest. ``held`` are all rows, if they fit in
        memory.
        """
        self._root = root
        self._held = None if held is None else held.view(OPAQUE)
        self._path = path
        self._count = count
        self._identity = identity
        self._start = len(npy_header((count,), ROW))
        self._size = self._start + count * ROW.itemsize

    @property
    def count(self) -> int:
        """Number of rows."""
        return self._count

    @property
    def is_held(self) -> bool:
        """Whether all rows are in memory."""
        return self._held is not None

    def read(self, rows: npt.NDArray[np.int64]) -> Rows:
        """Return the entries of ``rows``, in that order.

        Raises CorruptShard if the file was truncated since it was checked, or cannot be read.
        """
        if not len(rows):
            return np.zeros(0, ROW)
        if self._held is not None:  # for a few rows, `view` takes longer
            return np.frombuffer(self._held[rows].tobytes(), ROW)
        try:
            return self._read(shard_file(self._path, self._size, self._identity, self._root), rows)
        except CorruptShard:
            self.forget()  # so that a restored copy is opened next time
            raise

    def _read(self, file: ShardFile, rows: npt.NDArray[np.int64]) -> Rows:
        first = int(rows.min())
        last = int(rows.max())
        if last - first >= _SPAN * len(rows):
            offsets = (rows * ROW.itemsize + self._start).tolist()
            return np.frombuffer(file.read_ranges(ROW.itemsize, offsets), ROW)
        length = (last - first + 1) * ROW.itemsize
        near = file.read_ranges(length, [self._start + first * ROW.itemsize])
        entries: Rows = np.frombuffer(near, ROW)[rows - first]
        return entries

    def labels(self) -> npt.NDArray[np.int64]:
        """Return the label of each row, int64 of shape (N,)."""
        labels = np.empty(self._count, np.int64)
        for start in range(0, self._count, _AT_ONCE):
            numbers = np.arange(start, min(start + _AT_ONCE, self._count))
            labels[numbers] = self.read(numbers)["label"]
        return labels

    def forget(self) -> None:
        """Reopen the file at its next use."""
        forget(self._path, self._identity)


def _require_content(directory: Path, name: str, sha256: str) -> None:
    """Refuse an index file whose digest differs from the manifest."""
    path = directory / name
    try:
        digest = sha256_of(path, directory)
    except UNFIT as error:
        raise CorruptDataset(f"{path} cannot be read: {error.strerror}", where=path) from error
    if digest != sha256:
        raise CorruptDataset(
            f"{path} differs from the manifest: its SHA-256 does not match",
            remedy=f"To rebuild the index from the shards, run {as_command('index', directory)}.",
            where=path,
        )
