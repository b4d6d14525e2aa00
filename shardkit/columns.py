"""The index of an opened dataset: held against its manifest, and read without a map of its rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from shardkit.errors import CorruptDataset, CorruptShard
from shardkit.files import sha256_of
from shardkit.handles import ShardFile, forget, shard_file
from shardkit.index import ROW, ROWS_NAME, Index, Rows, StringTable, string_files
from shardkit.manifest import Manifest
from shardkit.npy import npy_header

_HELD = 16 << 20
"""Bytes of rows up to which they are held in memory: those of half a million. To read one from its
file takes 1.5 us, a tenth of what a small image of raw pixels takes."""

_HASHED = 64 << 20
"""Bytes of a file of the index up to which it is hashed when it is opened, at some 2 GB/s: all rows
of a dataset of 2 million. Opening one of 10 million is to take no longer than one of 10."""

_SPAN = 32
"""Rows of the index that are read for each that is wanted, 1 KiB, rather than one by one."""

_AT_ONCE = 1 << 15
"""Rows of the index that are read at a time where all are wanted: 1 MiB."""

_Column = TypeVar("_Column")


class Columns:
    """The columns of an index, each opened only if its files are those that the manifest names.

    Each row checks itself, but not whether it stands in its place, nor in its dataset.
    """

    def __init__(self, directory: Path, manifest: Manifest, *, verify: bool | None) -> None:
        """Find the index.

        Args:
            directory: The dataset.
            manifest: What it is.
            verify: Whether digests are compared: of all files, of none, or (None) of small ones.
        """
        self._directory = directory
        self._manifest = manifest
        self._verify = verify

    def rows(self) -> Rows:
        """Return the rows, memory-mapped and read-only.

        Raises:
            CorruptDataset: If a file is missing, cut, or another. So do the others.
        """
        return self._whole(Index.rows, ROWS_NAME)

    def keys(self) -> StringTable:
        """Return the key of each row."""
        return self._whole(Index.keys, *string_files("keys"))

    def paths(self) -> StringTable:
        """Return the source path of each row."""
        return self._whole(Index.paths, *string_files("paths"))

    def entries(self, rows: Rows) -> IndexRows:
        """Return the rows as they are to be read, once they were opened."""
        held = np.array(rows) if rows.nbytes <= _HELD else None
        path = self._directory / ROWS_NAME
        return IndexRows(path, len(rows), self._manifest.digest, held)

    def _whole(self, load: Callable[[Index], _Column], *names: str) -> _Column:
        column = load(Index(self._directory, self._manifest.rows))
        for entry in self._manifest.files if self._verify is not False else ():
            if entry.name in names and (entry.bytes <= _HASHED or self._verify):
                _require_content(self._directory, entry.name, entry.sha256)
        return column


class IndexRows:
    """The rows of an index, held in memory or read as images are."""

    def __init__(self, path: Path, count: int, identity: str, held: Rows | None) -> None:
        """Find the rows.

        Args:
            path: The file of the rows, known to be whole.
            count: How many there are.
            identity: The digest of the dataset's manifest.
            held: The rows, if they are few.
        """
        self._held = held
        self._path = path
        self._count = count
        self._identity = identity
        self._start = len(npy_header((count,), ROW))
        self._size = self._start + count * ROW.itemsize

    def read(self, rows: npt.NDArray[np.int64]) -> Rows:
        """Return the entries of ``rows``, in that order.

        Raises:
            CorruptShard: If the file was cut since it was found whole, or cannot be read.
        """
        if self._held is not None:
            found: Rows = self._held[rows]
            return found
        if not len(rows):
            return np.zeros(0, ROW)
        try:
            return self._read(shard_file(self._path, self._size, self._identity), rows)
        except CorruptShard:
            self.forget()  # a copy that is put in its place is to be opened
            raise

    def _read(self, file: ShardFile, rows: npt.NDArray[np.int64]) -> Rows:
        first, last = int(rows.min()), int(rows.max())
        if last - first >= _SPAN * len(rows):
            offsets = (rows * ROW.itemsize + self._start).tolist()
            return np.frombuffer(file.pieces(ROW.itemsize, offsets), ROW)
        length = (last - first + 1) * ROW.itemsize
        near = file.pieces(length, [self._start + first * ROW.itemsize])
        found: Rows = np.frombuffer(near, ROW)[rows - first]
        return found

    def labels(self) -> npt.NDArray[np.int64]:
        """Return the label of each row, int64 of shape (N,).

        Raises:
            CorruptShard: As `read` does.
        """
        labels = np.empty(self._count, np.int64)
        for start in range(0, self._count, _AT_ONCE):
            part = np.arange(start, min(start + _AT_ONCE, self._count))
            labels[part] = self.read(part)["label"]
        return labels

    def forget(self) -> None:
        """Open the file anew at its next use."""
        forget(self._path, self._identity)


def _require_content(directory: Path, name: str, sha256: str) -> None:
    """Refuse a file of the index that is another than the manifest names."""
    path = directory / name
    try:
        found = sha256_of(path)
    except OSError as error:
        raise CorruptDataset(f"{path} cannot be read: {error.strerror}") from error
    if found != sha256:
        raise CorruptDataset(
            f"{path} is not the one that the manifest names: its SHA-256 differs. "
            f"`shardkit index {directory}` rebuilds the index from the shards."
        )
