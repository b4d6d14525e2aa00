"""Replace a dataset in one step: an atomic exchange of two folders, on Linux.

Readers find either the old or the new dataset at any moment. The process may be killed after any of
these steps:

1. ``state/sibling`` names a hidden folder next to the target.
2. The finished dataset gets a work folder: links to the lock and the state.
3. It moves to the hidden folder and gets ``state/exchanged``, which lists the files of the old
   dataset, and links to all other files in the target: they are the user's.
4. The two folders are exchanged. Now the target holds the new dataset and ``state/exchanged``.
5. The old dataset loses its links to the user's files, moves into the work folder and is removed.

The next run undoes steps 1 to 3 (`FolderExchange.take_back`) or repeats step 5. It touches a hidden
folder only if ``state/sibling`` is one file in both folders, by device and inode: anybody may have
written the name.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path, PurePath

from shardkit.dataset.manifest import FACTS_NAME, MANIFEST_NAME
from shardkit.dataset.opened import OpenedDirectory
from shardkit.record import dump_json
from shardkit.system.files import exchange, is_temporary, read_small, sync, write_atomically
from shardkit.system.safe_paths import (
    UNFIT,
    exists,
    is_file,
    make_folder,
    move,
    opened,
    remove,
    remove_empty,
    remove_tree,
    require_removable,
    status_of,
    walk,
)

_HIDDEN = re.compile(r"\.shardkit-[0-9a-f]{16}")

_CANNOT = (
    *(errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EXDEV, errno.EMLINK),
    *(errno.EBUSY, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTEMPTY, errno.EEXIST),
)
"""Errors that mean that this file system or user cannot exchange folders."""


class FolderExchange:
    """Exchanges a target with the dataset in its work folder."""

    def __init__(self, target: Path, *, work: str) -> None:
        """Create an exchange; `carry_out` makes it.

        ``work`` is a folder in the target, with the folders ``state`` and ``dataset``.
        """
        real = Path(os.path.realpath(target))
        self._target = target
        self._work = work
        self._above = real.parent
        self._name = real.name
        self._state, self._made, self._old = (
            f"{work}/{name}" for name in ("state", "dataset", "old")
        )
        self.listed = f"{self._state}/exchanged"
        """List of the old dataset's files; it is in the target once the folders were exchanged."""
        self._sibling = f"{self._state}/sibling"

    @property
    def is_done(self) -> bool:
        """Whether the folders were exchanged, so that only `remove_old` remains."""
        return is_file(self._target, self.listed)

    def carry_out(self, old: Collection[str]) -> bool:
        """Exchange the folders if possible; return whether that was done.

        The new dataset gets links to all files in the target but the ``old`` ones. OSError if the
        disk is full or fails.
        """
        others = self._movable_others(old)
        if others is None:
            return False
        name = f".shardkit-{secrets.token_hex(8)}"
        write_atomically(self._target / self._sibling, name.encode())
        try:
            self._prepare(name, old, others)
            exchange(self._above, self._name, name)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
            self.take_back()
            return False
        sync(self._above)
        return True

    def _movable_others(self, old: Collection[str]) -> Others | None:
        """Return what else is in the target; None if the target cannot be exchanged."""
        if sys.platform != "linux":  # pragma: no cover - only Linux can exchange
            return None
        here = Path.cwd()
        target = self._above / self._name
        if here == target or target in here.parents:
            return None  # this process would then be in the old dataset
        try:
            others = self._others(self._name, old)
            for name, is_folder in others:
                inside = f"{name}/{self._work}" if is_folder else name
                if not (self._target / name).is_symlink():
                    require_removable(self._target, [inside])
        except (*UNFIT, PermissionError):  # a folder of another user, or nested too deeply
            return None
        return others

    def _others(self, folder: str, files: Iterable[str]) -> Others:
        """Return all in a folder next to the target but a dataset and what shardkit may remove."""
        dataset_paths = {str(path) for name in files for path in (name, *PurePath(name).parents)}
        walked = walk(self._above, folder, any_kind=True)
        entries = ((name.partition("/")[2], is_folder) for name, is_folder in walked)
        return [
            (name, is_folder)
            for name, is_folder in entries
            if name not in dataset_paths
            and name.split("/")[0] != self._work
            and not (is_temporary(name) and str(PurePath(name).parent) in dataset_paths)
        ]

    def _prepare(self, name: str, old: Collection[str], others: Others) -> None:
        """Move the new dataset to the hidden folder, complete that folder and sync it."""
        for folder in (self._work, self._state):
            make_folder(self._target, f"{self._made}/{folder}")
            with (
                opened(self._target, folder) as source,
                opened(self._target, f"{self._made}/{folder}") as goal,
            ):
                _link_files(source, goal)
        for folder in (f"{self._made}/{self._state}", f"{self._made}/{self._work}", self._made):
            sync(self._target / folder)  # the next run knows the hidden folder by the links
        with opened(self._above) as above, opened(self._target, self._work) as work:
            os.rename(PurePath(self._made).name, name, src_dir_fd=work, dst_dir_fd=above)
        # Without these, a power cut could leave it in the work folder with the user's files.
        for path in (self._target / self._work, self._above):
            sync(path)
        new = self._above / name
        write_atomically(new / self.listed, dump_json(sorted(old)))
        _link_others(others, self._target, new)
        with opened(self._target) as target, opened(new) as hidden:
            _copy_attributes(target, hidden)
        # Without these, a power cut could keep the exchange but lose some of the above.
        for path in (self._target / self._work, new / self._state, new / self._work, new):
            sync(path)
        sync(self._above)

    def take_back(self) -> None:
        """Undo the steps of an interrupted run before the exchange."""
        if self.is_done or not is_file(self._target, self._sibling):
            return
        if name := self._sibling_name():
            for other, is_folder in reversed(self._others(name, files_of(self._above / name))):
                (remove_empty if is_folder else remove)(self._above, f"{name}/{other}")
            try:
                with opened(self._above) as above, opened(self._target, self._work) as work:
                    folder_name = PurePath(self._made).name
                    os.rename(name, folder_name, src_dir_fd=above, dst_dir_fd=work)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                remove_tree(self._above, name)  # after a power cut the folder has both names
        remove_tree(self._target, f"{self._made}/{self._work}")
        for path in (self._target / self._work, self._above):
            sync(path)
        remove(self._target, self._sibling)

    def remove_old(self, old: Collection[str], scratch: str) -> None:
        """Remove the old dataset after the exchange.

        Files that were added to its folder at the last moment move to the target, unless they are
        temporary files that a killed process left. This process uses the folder ``scratch`` in the
        work folder, which is kept.
        """
        if name := self._sibling_name():
            self._return_others(name, old)
            if exists(self._target / self._old):  # after a power cut the folder has both names
                remove_tree(self._above, name)
            else:
                with opened(self._above) as above, opened(self._target, self._work) as work:
                    moved = PurePath(self._old).name
                    os.rename(name, moved, src_dir_fd=above, dst_dir_fd=work)
            # Without these, a power cut could leave it next to the target, unnoticed.
            for path in (self._target / self._work, self._above):
                sync(path)
        if not exists(self._target / scratch):  # else it is of the run that was interrupted
            with suppress(FileNotFoundError):
                move(self._target, f"{self._old}/{scratch}", scratch)
        remove_tree(self._target, self._old)

    def _return_others(self, name: str, old: Collection[str]) -> None:
        """Remove the user's files from the old dataset, or move those that the target lacks."""
        for other, is_folder in reversed(self._others(name, old)):
            here = f"{name}/{other}"
            there = f"{self._name}/{other}"
            if is_folder:
                remove_empty(self._above, here)
            elif exists(self._target / other):
                remove(self._above, here)
            else:
                make_folder(self._above, str(PurePath(there).parent))
                move(self._above, here, there)

    def _sibling_name(self) -> str | None:
        """Return the name of the hidden folder of this run or an earlier one, if it is there."""
        try:
            content = read_small(self._target / self._sibling, root=self._target)
            name = content.decode("ascii", "replace")
            if not _HIDDEN.fullmatch(name):
                return None
            here = status_of(self._target, self._sibling)
            there = status_of(self._above, f"{name}/{self._sibling}")
        except UNFIT:
            return None
        return name if os.path.samestat(here, there) else None

    @property
    def is_begun(self) -> bool:
        """Whether the new, or after the exchange the old dataset is in the hidden folder."""
        return self._sibling_name() is not None


Others = Sequence[tuple[str, bool]]
"""Names of files and folders, folders before what is in them, and whether each is a folder."""


def files_of(target: Path) -> list[str]:
    """Return the files of the dataset in ``target``, if there is one, manifests first."""
    if not exists(target / MANIFEST_NAME):
        return []
    manifests = [MANIFEST_NAME]
    others = []
    for split in OpenedDirectory(target).splits.values():
        if not exists(split.path / MANIFEST_NAME):
            continue
        manifests.append(split.prefix + MANIFEST_NAME)
        others += [split.prefix + entry.name for entry in split.manifest.entries]
        if is_file(split.path, FACTS_NAME):  # derived from the old dataset
            others.append(split.prefix + FACTS_NAME)
    return [*dict.fromkeys(manifests), *others]


def _link_others(others: Others, source: Path, goal: Path) -> None:
    """Link the user's files into another folder, whose folders become like those of the user."""
    for name, is_folder in others:
        above = str(PurePath(name).parent)
        if (folder := name if is_folder else above) != ".":
            make_folder(goal, folder)
        if not is_folder:
            with opened(source, above) as old, opened(goal, above) as new:
                last = PurePath(name).name
                os.link(last, last, src_dir_fd=old, dst_dir_fd=new, follow_symlinks=False)
    for name, is_folder in reversed(others):
        if is_folder:
            with opened(source, name) as old, opened(goal, name) as new:
                _copy_attributes(old, new)
    for folder in {str(PurePath(name).parent) for name, _ in others}:
        sync(goal / folder)


def _link_files(source: int, goal: int) -> None:
    """Link the files of one open folder into another."""
    with os.scandir(source) as entries:
        files = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
    for name in files:
        os.link(name, name, src_dir_fd=source, dst_dir_fd=goal, follow_symlinks=False)


def _copy_attributes(folder: int, other: int) -> None:
    """Copy owner, group and mode of one open folder to another."""
    status = os.fstat(folder)
    if status.st_dev != os.fstat(other).st_dev:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
    os.fchown(other, status.st_uid, status.st_gid)
    os.fchmod(other, stat.S_IMODE(status.st_mode))
    if _attributes(folder) != _attributes(other):
        raise PermissionError(errno.EPERM, "the folder's attributes cannot be copied")


def _attributes(folder: int) -> tuple[object, ...]:
    status = os.fstat(folder)
    attributes = {name: os.getxattr(folder, name) for name in os.listxattr(folder)}
    return status.st_mode, status.st_uid, status.st_gid, attributes
