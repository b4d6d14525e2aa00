"""A new folder of files with untrusted names: nothing outside of it, and nothing twice."""

from __future__ import annotations

import errno
import os
import unicodedata
from pathlib import Path
from typing import BinaryIO

from shardkit.errors import UsageError
from shardkit.system.files import as_name, sha256_of, split_text_path
from shardkit.system.safe_paths import UNFIT, exists, make_folder, opened, walk
from shardkit.system.text import quoted


class OutputFolder:
    """Creates files below a folder; no other process writes there.

    ``root`` exists and is empty; ``same`` is a folder that should have the same files.
    """

    def __init__(self, root: Path, same: Path | None = None) -> None:
        self.root = root
        self._same = same
        self.files = 0
        """Number of complete files."""
        self.bytes = 0
        """Their bytes."""
        self._folders: set[str] = {""}
        self._written: dict[str, str] = {}
        """Each name by its form without regard to case and composition."""

    @property
    def is_compared(self) -> bool:
        """Whether there is a folder that should have the same files."""
        return self._same is not None

    def require_same(self) -> None:
        """Compare all files with those of the other folder; UsageError if they differ."""
        if self._same is not None and not _are_same(self.root, self._same):
            raise _not_empty(self._same)

    def write(self, name: str, content: bytes) -> None:
        """Create a file.

        UsageError if the name leads elsewhere, or is that of another file or folder.
        """
        with self.create(name) as file:
            file.write(content)
        self.files += 1
        self.bytes += len(content)

    def create(self, name: str) -> BinaryIO:
        """Create a file, and return it opened for writing; see `write`."""
        try:
            split_text_path(name)
        except ValueError as error:
            raise UsageError(
                f"a record has the source path {quoted(name)}, which is not a plain relative path: "
                "it cannot be exported as a file"
            ) from error
        if self._same is not None and not exists(self._same / as_name(name)):
            raise _not_empty(self._same)  # at the first file
        above, _, last = as_name(name).rpartition("/")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            if above not in self._folders:
                make_folder(self.root, above)
                self._folders.add(above)
            with opened(self.root, above) as folder:
                descriptor = os.open(last, flags, 0o666, dir_fd=folder)
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
                raise UsageError(self._collision(name)) from error
            if error.errno in (errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL):
                raise UsageError(
                    f"this file system cannot store the name {quoted(name)}: {error.strerror}"
                ) from error
            raise
        self._written.setdefault(_folded(name), name)
        # Buffered: a raw file writes only a part if the disk is full, and libraries ignore that.
        return open(descriptor, "wb")

    def count(self, name: str) -> None:
        """Count a complete file that was not written by `write`."""
        self.files += 1
        self.bytes += (self.root / name).stat().st_size

    def _collision(self, name: str) -> str:
        twin = self._written.get(_folded(name))
        if twin is None:
            return f"{quoted(name)} is the name of both a file and a folder"
        if twin == name:
            return f"two records have the file name {quoted(name)}"
        return (
            f"the names {quoted(twin)} and {quoted(name)} are equal for this file system, which "
            "ignores case or Unicode composition; export to another one"
        )


def _are_same(first: Path, second: Path) -> bool:
    """Return whether two folders have the same files with the same content, and nothing else."""
    try:
        names = list(walk(first))
        return names == list(walk(second)) and all(
            is_folder or sha256_of(first / name, first) == sha256_of(second / name, second)
            for name, is_folder in names
        )
    except UNFIT:
        return False


def _not_empty(target: Path) -> UsageError:
    names = sorted(os.listdir(target))
    listing = ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")
    return UsageError(f"{target} is not empty ({listing});", remedy="choose a new folder")


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()
