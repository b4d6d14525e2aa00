"""Read the images of a dataset whose rows are files of their own, below a folder of the user.

Names and sizes come from the index, which may be anybody's: nothing outside the folder is read, and
no memory is reserved before a file has the stated size.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import overload

import numpy as np
import numpy.typing as npt

from shardkit.dataset.handles import ShardFile
from shardkit.dataset.index import Rows, StringTable
from shardkit.dataset.index_reader import IndexReader
from shardkit.dataset.located import BatchShards
from shardkit.dataset.opened import OpenedDataset
from shardkit.dataset.shard_files import ShardFiles
from shardkit.errors import CorruptDataset, CorruptRecord, ShardkitError
from shardkit.system.files import as_name
from shardkit.system.npy import StoredValues
from shardkit.system.safe_paths import UNFIT, LinkRefused, naming, open_plain, opened, split_path
from shardkit.system.text import as_command, quoted

_AT_ONCE = 32
"""Files that a thread has open at once: 16 threads use half of the usual 1,024 of a process. Their
images take 10 ms to decode, so that a call for each run does not matter."""

_LARGE = 1 << 20
"""Size in bytes above which a file is opened to see that it has as many, before memory is reserved
for any file of the batch."""

_READ = os.O_RDONLY | os.O_NONBLOCK
"""O_NONBLOCK: opening a pipe in the file's place must not block."""


class Unlike(ValueError):
    """A file is missing, or not the one that was indexed; the text says why."""


class LooseFile(ShardFile):
    """A file of ``size`` bytes, opened below a folder; ``path`` is for messages.

    It owns ``descriptor``, and closes it.
    """

    def __init__(self, descriptor: int, path: Path, size: int) -> None:
        self.descriptor = descriptor
        self._path = path
        self._size = size


class Folder:
    """A folder of the user, and those below it that were opened; all are closed at the end."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._opened: dict[str, int] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def open(self, path: str, size: int, modified: int) -> LooseFile:
        """Open a file that was indexed with ``size`` in bytes and ``modified`` in nanoseconds.

        It raises `Unlike` if the file is missing, another one, a link or in one; OSError if it
        cannot be read for another reason.
        """
        try:
            name = as_name(path)
            split_path(name)
        except ValueError:
            raise Unlike("has a name that points outside the folder") from None
        above = name.rpartition("/")[0]
        at = self._root / name
        try:
            if above not in self._opened:
                self._opened[above] = self._stack.enter_context(opened(self._root, above))
            file = LooseFile(open_plain(at, _READ, dir_fd=self._opened[above]), at, size)
        except LinkRefused:
            raise Unlike("is a symbolic link or is inside one; `convert` follows links") from None
        except UNFIT as error:
            reason = "is missing" if isinstance(error, FileNotFoundError) else error.strerror
            raise Unlike(f"{reason}") from error
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise ShardkitError(
                    f"{at} cannot be opened: too many files are open",
                    remedy="Use fewer threads, or raise the limit (`ulimit -n`).",
                ) from error
            raise
        with naming(at):
            status = os.fstat(file.descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Unlike("is not a file")
        if fault := difference(status.st_size, status.st_mtime_ns, size, modified):
            raise Unlike(fault)
        return file


def difference(size: int, modified: int, old_size: int, old_modified: int) -> str:
    """Return how a file differs from the one that was indexed, or ""."""
    if size != old_size:
        return f"has changed: it has {size:,} bytes instead of {old_size:,}"
    return "has changed: its modification time differs" * (modified != old_modified)


class LooseFiles(ShardFiles):
    """Files of a dataset's rows, opened for each batch; the user must have named their folder."""

    def __init__(self, dataset: OpenedDataset) -> None:
        super().__init__(dataset)
        self._index = IndexReader(dataset, verify=None)

    @cached_property
    def _names(self) -> StringTable:
        return self._dataset.unchanged(self._index.paths)

    @cached_property
    def _times(self) -> StoredValues:
        return self._dataset.unchanged(self._index.times)

    def open_for(self, rows: npt.NDArray[np.int64], index: Rows) -> LooseRows:
        """Return the files of some rows, which are opened when they are read."""
        self._dataset.unchanged(lambda: None)
        for number in np.flatnonzero(index["offset"]).tolist():
            raise CorruptDataset(f"the index of {self._dataset.path} is damaged in row {number}")
        lengths = index["length"].astype(np.int64)
        large = np.flatnonzero(lengths > _LARGE)
        for start in range(0, len(large), _AT_ONCE):
            chunk = large[start : start + _AT_ONCE]
            self.open_rows(rows[chunk], lengths[chunk])
        return LooseRows(self, rows, lengths)

    def open_rows(
        self, rows: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
    ) -> list[ShardFile]:
        """Return the files of some rows, open, given their sizes in bytes.

        It raises `CorruptRecord` if one is missing, or another file than was indexed.
        """
        files = list[ShardFile]()
        with Folder(self._folder) as folder:
            for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
                name = self._names[row]
                (modified,) = self._times[row : row + 1].tolist()
                try:
                    files.append(folder.open(name, length, modified))
                except Unlike as error:
                    again = as_command("attach", "imagefolder", self._folder, self._dataset.path)
                    raise CorruptRecord(
                        f"{self._folder}: {quoted(name)} (row {row}) {error}",
                        remedy=f"To read the folder as it is now, rerun {again}, or reopen the "
                        "folder if you opened it directly.",
                    ) from error
        return files

    def announce(self, rows: npt.NDArray[np.int64], index: Rows) -> None:
        """Issue readahead for the files of some rows, without waiting."""
        for start in range(0, len(rows), _AT_ONCE):
            chunk = slice(start, start + _AT_ONCE)
            lengths = index["length"][chunk].astype(np.int64)
            with contextlib.suppress(CorruptDataset, ShardkitError, OSError):
                for file, length in zip(self.open_rows(rows[chunk], lengths), lengths, strict=True):
                    file.announce(0, int(length))

    def path_of(self, row: int) -> Path:
        """Return the path of the file of a row."""
        return self._folder / as_name(self._names[row])

    def paths(self) -> Iterator[Path]:
        """Yield the file of each row."""
        for name in self._names:
            yield self._folder / as_name(name)

    def forget(self, shard: int) -> None:
        """Do nothing: no file stays open."""


class LooseRows(BatchShards, Sequence[ShardFile]):
    """The files of a batch's rows, each opened when it is asked for; ``lengths`` are in bytes."""

    def __init__(
        self,
        files: LooseFiles,
        rows: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
    ) -> None:
        super().__init__(rows, {}, lengths)
        self._all = files

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, number: int) -> ShardFile: ...
    @overload
    def __getitem__(self, number: slice) -> list[ShardFile]: ...
    def __getitem__(self, number: int | slice) -> ShardFile | list[ShardFile]:
        if isinstance(number, slice):
            return self._all.open_rows(self.numbers[number], self.sizes[number])
        return self[number : number + 1][0]

    def of_rows(self) -> Sequence[ShardFile]:
        """Return this."""
        return self

    def runs(self) -> Iterator[tuple[slice, npt.NDArray[np.int32]]]:
        """Yield rows, and the descriptor of each one's file, open until the next rows."""
        for start in range(0, len(self), _AT_ONCE):
            run = slice(start, min(start + _AT_ONCE, len(self)))
            files = self[run]
            yield run, np.array([file.descriptor for file in files], np.int32)
            del files  # before the next are opened
