"""Replace a dataset in one step: an atomic exchange of two folders, on Linux.

Readers find either the old or the new dataset at any moment. The process may be killed after any of
these steps:

1. ``state/sibling`` names a hidden folder next to the target.
2. The finished dataset gets a work folder: links to the lock and the state.
3. It moves to the hidden folder and gets ``state/exchanged``, which lists the files of the old
   dataset.
4. The two folders are exchanged. Now the target holds the new dataset and ``state/exchanged``.
5. The old dataset moves into the work folder and is removed there.

The next run undoes steps 1 to 3 (`FolderExchange.take_back`) or repeats step 5. It touches a hidden
folder only if ``state/sibling`` is one file in both folders, by device and inode: anybody may have
written the name.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import secrets
import stat
import sys
from collections.abc import Collection, Iterable
from pathlib import Path, PurePath

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

        Args:
            target: The folder to replace.
            work: Name of the work folder in it, with the folders ``state`` and ``dataset``.
        """
        real = Path(os.path.realpath(target))
        self._target, self._work = target, work
        self._above, self._name = real.parent, real.name
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

        Args:
            old: The files of the old dataset. A target with other files is not exchanged.

        Raises:
            OSError: If the disk is full or fails.
        """
        if not self._is_replaceable(old):
            return False
        name = f".shardkit-{secrets.token_hex(8)}"
        write_atomically(self._target / self._sibling, name.encode())
        try:
            self._prepare(name, old)
            exchange(self._above, self._name, name)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
            self.take_back()
            return False
        sync(self._above)
        return True

    def _is_replaceable(self, old: Iterable[str]) -> bool:
        """Return whether the target holds only the old dataset, and is not the current folder."""
        if sys.platform != "linux":  # pragma: no cover - only Linux can exchange
            return False
        here, place = Path.cwd(), self._above / self._name
        if here == place or place in here.parents:
            return False  # this process would then be in the old dataset
        known = {str(path) for name in old for path in (name, *PurePath(name).parents)}
        try:
            names = [name for name, _ in walk(self._target)]
        except (*UNFIT, PermissionError):  # a link, or a folder of another user
            return False
        return all(
            name in known or name.split("/")[0] == self._work or is_temporary(name)
            for name in names
        )

    def _prepare(self, name: str, old: Collection[str]) -> None:
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
        new = self._above / name
        write_atomically(new / self.listed, dump_json(sorted(old)))
        with opened(self._target) as target, opened(new) as made:
            _copy_attributes(target, made)
        # Without these, a power cut could keep the exchange but lose some of the above.
        for path in (self._target / self._work, new / self._state, new / self._work, new):
            sync(path)
        sync(self._above)

    def take_back(self) -> None:
        """Undo the steps of an interrupted run before the exchange."""
        if self.is_done or not is_file(self._target, self._sibling):
            return
        if name := self._sibling_name():
            try:
                with opened(self._above) as above, opened(self._target, self._work) as work:
                    made = PurePath(self._made).name
                    os.rename(name, made, src_dir_fd=above, dst_dir_fd=work)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                remove_tree(self._above, name)  # after a power cut the folder has both names
        remove_tree(self._target, f"{self._made}/{self._work}")
        for path in (self._target / self._work, self._above):
            sync(path)
        remove(self._target, self._sibling)

    def remove_old(self, old: Collection[str]) -> None:
        """Remove the old dataset after the exchange.

        Files that were added to its folder at the last moment move to the target, unless they are
        temporary files that a killed process left.

        Args:
            old: The files of the old dataset.
        """
        if name := self._sibling_name():
            with opened(self._above) as above, opened(self._target, self._work) as work:
                moved = PurePath(self._old).name
                os.rename(name, moved, src_dir_fd=above, dst_dir_fd=work)
            # Without these, a power cut could leave it next to the target, unnoticed.
            for path in (self._target / self._work, self._above):
                sync(path)
        for name in old:
            remove(self._target, f"{self._old}/{name}")
        folders = {folder for name in old for folder in PurePath(name).parents} - {PurePath()}
        for folder in sorted(folders, key=lambda folder: -len(folder.parts)):
            remove_empty(self._target, f"{self._old}/{folder}")
        remove_tree(self._target, f"{self._old}/{self._work}")
        self._keep_others()
        remove_tree(self._target, self._old)

    def _keep_others(self) -> None:
        try:
            names = [name for name, is_folder in walk(self._target, self._old) if not is_folder]
        except FileNotFoundError:
            return
        for name in itertools.filterfalse(is_temporary, names):
            goal = PurePath(name).relative_to(self._old)
            if not exists(self._target / goal):
                if goal.parent != PurePath():
                    make_folder(self._target, str(goal.parent))
                move(self._target, name, str(goal))

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


def _link_files(source: int, goal: int) -> None:
    """Link the files of one open folder into another."""
    with os.scandir(source) as entries:
        files = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
    for name in files:
        os.link(name, name, src_dir_fd=source, dst_dir_fd=goal, follow_symlinks=False)


def _copy_attributes(folder: int, other: int) -> None:
    """Copy owner, group and mode of one open folder to another.

    Raises:
        PermissionError: If this user may not, or other attributes differ.
    """
    status = os.fstat(folder)
    os.fchown(other, status.st_uid, status.st_gid)
    os.fchmod(other, stat.S_IMODE(status.st_mode))
    if _attributes(folder) != _attributes(other):
        raise PermissionError(errno.EPERM, "the folder's attributes cannot be copied")


def _attributes(folder: int) -> tuple[object, ...]:
    status = os.fstat(folder)
    attributes = {name: os.getxattr(folder, name) for name in os.listxattr(folder)}
    return status.st_mode, status.st_uid, status.st_gid, attributes
