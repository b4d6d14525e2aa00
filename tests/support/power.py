"""A model of a power cut: the disk keeps synced data, and anything may happen to the rest.

A traced run (faults.c) tells what was written, synced, entered into folders and removed from them.
Of a file, what was not synced since may be lost: all of it, what was added, or it reads as zeros.
Of a folder, the entries that changed since it was synced may be as before, or as after some of the
changes, in their order; folders know nothing of each other, as POSIX leaves it open, but that what
was moved from one to another is not lost on the way: no filesystem in use does that. An exchange
of two entries of one folder happens as a whole, or not. Writes in place are not undone: the later
bytes are there, or nothing.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

LOST_BYTES = ("gone", "cut", "zeros")
"""What becomes of bytes that were not synced."""

LOST_NAMES = ("all", "some", "none")
"""Which changes of a folder that was not synced are lost."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The extent of a power cut."""

    data: str = "gone"
    names: str = "all"
    seed: int = 0
    deaf: str = ""
    """``files`` or ``folders``: their syncs are taken for nothing, to show that they matter."""


_ANEW = 1 << 64
"""Added to an inode that is used again, after a folder of this number was removed."""


class _Numbers(dict[int, int]):
    def __missing__(self, number: int) -> int:
        return number


class Change(NamedTuple):
    """A change of a folder's entry."""

    name: str
    inode: int | None
    """What the name stands for from then on; None for nothing."""
    call: int
    goal: int | None = None
    """The folder that it went to, if it was moved to another."""
    exchanged: bool = False
    """Whether it is half of an exchange; the other half has the same call."""


@dataclass
class Disk:
    """The synced content of the disk, by inode."""

    root: int
    names: dict[int, dict[str, int]] = field(default_factory=dict)
    """Folder to its entries, as they are safe."""
    changes: dict[int, list[Change]] = field(default_factory=lambda: defaultdict(list))
    """Folder to what happened in it since."""
    unsafe: set[int] = field(default_factory=set)
    """Files that were written to since they were synced."""
    sizes: dict[int, int] = field(default_factory=dict)
    """File to its size when it was last synced."""

    _now: dict[int, int] = field(default_factory=_Numbers)
    """The number that the system gives an inode to what stands here for it now."""

    _left: dict[int, Path] = field(default_factory=dict)
    """File to a path of what is left of it."""

    _homes: dict[int, tuple[int, int]] = field(default_factory=dict)
    """The parent folder and the call of each new entry."""

    @classmethod
    def of(cls, root: Path) -> Disk:
        """Return a disk with everything below ``root`` synced."""
        disk = cls(root.stat().st_ino)
        for path in (root, *root.rglob("*")):
            status = path.stat()
            if path.is_dir():
                entries = {entry.name: entry.inode() for entry in os.scandir(path)}
                disk.names[status.st_ino] = entries
            else:
                disk.sizes[status.st_ino] = status.st_size
        return disk

    def replay(self, trace: Path, deaf: str = "") -> None:
        """Apply the operations of a run; ``deaf`` is from `Cut`."""
        source, origin = Change("", None, 0), 0
        for line in trace.read_text("utf-8").splitlines():
            first, kind, second, *rest = line.split("\t")
            number, size = int(first), int(second)
            inode = self._now[int(rest[-1])]
            folder = self._now[int(rest[0])]
            if kind == "leave":
                source = Change(rest[1], None, number)
                self.changes[folder].append(source)
                origin = folder
            elif kind == "enter":
                if source.call == number:  # it is not new, but renamed
                    if folder != origin:
                        self.changes[origin][-1] = source._replace(goal=folder)
                else:
                    inode = self._create(int(rest[-1]), folder=size == 1)
                    self._homes[inode] = folder, number
                self.changes[folder].append(Change(rest[1], inode, number))
            elif kind == "exchange":
                self.changes[folder].append(Change(rest[1], inode, number, exchanged=True))
            elif kind in ("write", "size"):
                self.unsafe.add(inode)
            elif inode in self.names and deaf != "folders":
                self._sync_folder(inode, len(self.changes[inode]))
            elif inode not in self.names and deaf != "files":
                self.unsafe.discard(inode)
                self.sizes[inode] = size

    def _create(self, number: int, *, folder: bool) -> int:
        """Return the inode of a new file; a folder's number may have been used before."""
        inode = self._now[number]
        if inode in self.names:
            inode = self._now[number] = inode + _ANEW
        if folder:
            self.names[inode] = {}
        elif inode not in self.sizes:
            self.unsafe.add(inode)
        return inode

    def _sync_folder(self, folder: int, count: int) -> None:
        """Make the first ``count`` changes of a folder safe, and that what it gave is elsewhere."""
        done = self.changes[folder][:count]
        self.names[folder] = self._entries(folder, count)
        del self.changes[folder][:count]
        for change in done:
            for other, least in self._needs(change):
                self._sync_folder(other, least)

    def _needs(self, move: Change) -> Iterator[tuple[int, int]]:
        """Give folders, and how many of their changes there must be to find what was moved."""
        folder, call = move.goal, move.call
        while folder is not None:
            calls = [change.call for change in self.changes[folder]]
            if call in calls:
                yield folder, calls.index(call) + 1
            folder, call = self._homes.get(folder, (None, 0))

    def _entries(self, folder: int, count: int) -> dict[str, int]:
        """Return a folder's entries after the first ``count`` of the changes that are not safe."""
        entries = dict(self.names[folder])
        for change in self.changes[folder][:count]:
            entries.pop(change.name, None)
            if change.inode is not None:
                entries[change.name] = change.inode
        return entries

    def _choose(self, cut: Cut) -> dict[int, int]:
        """Return the number of surviving changes of each folder."""
        chosen = random.Random(cut.seed)
        counts = defaultdict(int, {f: len(changes) for f, changes in self.changes.items()})
        if cut.names != "none":
            some = cut.names == "some"
            for folder, count in counts.items():
                part = chosen.choice((0, count, chosen.randint(0, count)))
                counts[folder] = part if some else 0
        again = True
        while again:  # what would be lost on its way to another folder did not leave yet
            again = False
            for folder, changes in list(self.changes.items()):
                last = counts[folder] - 1
                if 0 <= last < len(changes) - 1 and changes[last].exchanged:
                    counts[folder] -= changes[last].call == changes[last + 1].call
                for number, change in enumerate(changes[: counts[folder]]):
                    if any(counts[other] < least for other, least in self._needs(change)):
                        counts[folder], again = number, True
                        break
        return counts

    def leave(self, cut: Cut, contents: dict[int, Path], place: Path) -> None:
        """Make in ``place`` what is left of the root after a power cut.

        Args:
            cut: How much is lost.
            contents: The bytes of each file as of the cut.
            place: A folder that does not exist.
        """
        counts = self._choose(cut)
        self._leave_folder(self.root, cut, contents, place, counts)

    def _leave_folder(
        self, folder: int, cut: Cut, contents: dict[int, Path], place: Path, counts: dict[int, int]
    ) -> None:
        place.mkdir()
        for name, inode in sorted(self._entries(folder, counts.get(folder, 0)).items()):
            if inode in self.names:
                self._leave_folder(inode, cut, contents, place / name, counts)
                continue
            if inode not in self._left:
                self._left[inode] = contents[inode % _ANEW]
                if inode in self.unsafe:
                    self._left[inode] = place / name
                    (place / name).write_bytes(
                        self._left_bytes(inode, cut, contents[inode % _ANEW])
                    )
                    continue
            os.link(self._left[inode], place / name)  # a name of the same inode

    def _left_bytes(self, inode: int, cut: Cut, path: Path) -> bytes:
        content = path.read_bytes()
        if cut.data == "zeros":
            return bytes(len(content))
        return content[: self.sizes.get(inode, 0)] if cut.data == "cut" else b""


def files_by_inode(*folders: Path) -> dict[int, Path]:
    """Return all files below ``folders`` by their inodes."""
    return {
        path.stat().st_ino: path
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file()
    }
