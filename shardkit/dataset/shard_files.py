"""The files of a dataset's shards: in its directory, or attached."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardkit.dataset.handles import (
    REMEDY,
    LockedReader,
    ShardFile,
    forget,
    shard_file,
    shard_reader,
)
from shardkit.dataset.index import Rows
from shardkit.dataset.located import BatchShards
from shardkit.dataset.manifest import FileEntry
from shardkit.errors import CorruptDataset, CorruptShard
from shardkit.system.files import as_name
from shardkit.system.late import load
from shardkit.system.text import as_command

if TYPE_CHECKING:  # it opens them
    from shardkit.dataset.opened import OpenedDataset

_LOOSE = "shardkit.attaching.loose_files:LooseFiles"
"""The files of a dataset with one file for each row."""

_GAP = 16384
"""Maximum bytes between two images that share one readahead call."""


class ShardFiles:
    """The files of all shards, by number; UsageError if attached archives are not confirmed."""

    lookahead = 0
    """Rows to `announce` before they are read: 0 if the shards are local."""

    def __init__(self, dataset: OpenedDataset) -> None:
        self._dataset = dataset
        self._entries = dataset.manifest.shards
        self._folder = dataset.shards_folder
        self._paths: dict[int, Path] = {}
        self.remedy = f"To list all damage, run {as_command('verify', dataset.path)}."
        """Remedy for a damaged record, for messages."""
        self._replaced = REMEDY
        if dataset.manifest.archives is not None:
            self._replaced = (
                f"It was replaced after `shardkit attach`, and the index in {dataset.path} "
                "does not describe it. Restore it, or run the same `shardkit attach` command again."
            )

    @cached_property
    def ends(self) -> npt.NDArray[np.int64]:
        """The row after the last one of each shard."""
        return np.cumsum([entry.rows for entry in self._entries], dtype=np.int64)

    @cached_property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Bytes of each shard."""
        return np.array([entry.bytes for entry in self._entries], np.int64)

    def numbers(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the number of the shard of each row."""
        return self.ends.searchsorted(rows, "right")

    def locate(self, row: int) -> tuple[int, int]:
        """Return the number of a row's shard, and its row in there."""
        shard = int(self.numbers(np.array([row]))[0])
        return shard, row - int(self.ends[shard]) + self._entries[shard].rows

    def path_of(self, row: int) -> Path:
        """Return the path of the file that has a row."""
        return self.path(self.locate(row)[0])

    def paths(self) -> Iterable[Path]:
        """Return all files."""
        return map(self.path, range(len(self._entries)))

    def path(self, shard: int) -> Path:
        """Return the path of a shard."""
        path = self._paths.get(shard)
        if path is None:  # building a path takes as long as reading an image
            path = self._paths[shard] = self._find(shard)
        return path

    def open(self, shards: Collection[int]) -> dict[int, ShardFile]:
        """Return some shards, open, after checking that the dataset was not replaced.

        Raises CorruptShard if one is missing or another file, CorruptDataset if the dataset was
        replaced.
        """
        try:
            return self._dataset.unchanged(lambda: {shard: self._open(shard) for shard in shards})
        except CorruptDataset:  # otherwise they would be read if this dataset came back
            for shard in shards:
                forget(self.path(shard), self._entries[shard].identity)
            raise

    def open_for(self, rows: npt.NDArray[np.int64], index: Rows) -> BatchShards:
        """Return the shards of some rows, open."""
        shards = self.ends.searchsorted(rows, "right")
        return BatchShards(shards, self.open(set(shards.tolist())), self.sizes[shards])

    def announce(self, rows: npt.NDArray[np.int64], index: Rows) -> None:
        """Prepare to read rows, without waiting; a problem is reported when they are read.

        Neighboring records share one readahead call.
        """
        shards = self.numbers(rows)
        order = np.lexsort((index["offset"], shards))  # LMDB may store rows downwards
        shards = shards[order]
        starts = index["offset"][order].astype(np.int64)
        ends = starts + index["length"][order]
        # Reading a gap of a few pages costs less than another call.
        apart = (np.diff(shards) != 0) | (starts[1:] - ends[:-1] > _GAP) | (starts[:-1] < 0)
        firsts = np.flatnonzero(np.concatenate([[True], apart])) if len(shards) else shards
        files: dict[int, ShardFile] = {}
        with contextlib.suppress(CorruptDataset, OSError):
            files = self.open(set(shards.tolist()))
        for first, last in zip(firsts, [*(firsts[1:] - 1), len(shards) - 1], strict=False):
            if file := files.get(int(shards[first])):
                file.announce(int(starts[first]), max(0, int(ends[last] - starts[first])))

    def complete_path(self, shard: int) -> Path:
        """Return the path of a shard, after checking that all of it is there."""
        self.open([shard])
        return self.path(shard)

    def reader(
        self, shard: int, read: Callable[[Path], Any], kind: str = "library"
    ) -> LockedReader[Any]:
        """Return a shard, open through a reader, like `shardkit.dataset.handles.shard_reader`."""
        path = self.complete_path(shard)
        identity = self._entries[shard].identity
        return self._dataset.unchanged(lambda: shard_reader(path, identity, read, kind))

    def forget(self, shard: int) -> None:
        """Open a damaged shard again when it is next read, so that a restored copy is found."""
        forget(self.path(shard), self._entries[shard].identity)

    def _find(self, shard: int) -> Path:
        return self._folder / as_name(self._entries[shard].name)

    def _open(self, shard: int) -> ShardFile:
        entry = self._entries[shard]
        path = self.path(shard)
        file = shard_file(path, entry.bytes, entry.identity, self._folder, remedy=self._replaced)
        if entry.is_replaced(file.modified):
            forget(path, entry.identity)
            raise CorruptShard(
                f"the archive {path} has a different modification time. {self._replaced}"
            )
        return file


class Access:
    """How the shards of a dataset are opened: as local files. Others inherit from this class.

    It is pickled to worker processes.
    """

    def files(self, dataset: OpenedDataset) -> ShardFiles:
        """Return the files of the shards."""
        return load(_LOOSE)(dataset) if dataset.manifest.is_loose else ShardFiles(dataset)

    def location(self, directory: Path) -> str:
        """Return the path or URL of the dataset, for messages."""
        return str(directory)

    def fetch(self, directory: Path, entries: Iterable[FileEntry]) -> None:
        """Bring files other than shards to ``directory``.

        Raises CorruptDataset if one is damaged, ShardkitError if one cannot be fetched.
        """


LOCAL_FILES = Access()
"""The access to a dataset on this machine."""
