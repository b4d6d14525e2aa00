"""A `SourceFolder` in an object store: its objects are listed and read, and never copied."""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from shardkit.contracts import Entry
from shardkit.errors import CHANGED, BadImage, UsageError
from shardkit.remote import whole
from shardkit.remote.process import call
from shardkit.sources.folders import (
    MAX_BYTES,
    TOO_LARGE,
    Finder,
    SourceFolder,
    below,
    claims_image,
    walk_order,
    why_left_out,
)
from shardkit.system.temporary import TemporaryFolder, full_disk_named

_TOGETHER = 1 << 20
"""Bytes of objects that the helper process sends at a time, which costs less than one by one."""


class BucketFolder(SourceFolder):
    """The objects below a URL, with ``/`` in their names as in paths.

    The URL is without credentials: those are in the environment. ``below`` is a folder below it;
    its objects are addressed from the URL.
    """

    chunk_bytes = 16 << 20

    def __init__(self, url: str, below: str = "") -> None:
        self.url = url
        self._below = below
        self.name = (below or url).rpartition("/")[2]

    def __str__(self) -> str:
        return f"{self.url}/{self._below}" if self._below else self.url

    def local(self) -> Sequence[Path]:
        """Return nothing."""
        return ()

    def inner(self, folder: str) -> BucketFolder:
        """Return a folder directly in this one."""
        return BucketFolder(self.url, self._path(folder)) if folder else self

    def folders(self) -> list[str]:
        """Return the names of the folders that contain objects."""
        folders = call(whole.folders, self.url, self._below)
        return [name for name in folders if not why_left_out(name)]

    def names(self) -> list[str]:
        """Return the names of all objects and folders in it."""
        return [*{*call(whole.folders, self.url, self._below), *self._objects()}]

    def has(self, name: str) -> bool:
        """Return whether it has an object of that name."""
        return name in self._objects()

    def finder(self) -> Finder:
        """Return what lists the objects."""
        return _Listing(self)

    def locate(self, path: str) -> str:
        """Return the URL of an object."""
        return f"{self.url}/{self._path(path)}"

    def read(self, entry: Entry, path: str) -> bytes:
        """Return the content of an object.

        BadImage if it is gone, or another version than the listed one. ShardkitError if the store
        cannot be read: no image may be left out for that.
        """
        answer = _arriving.take(self.url, (self._path(path), entry.bytes, entry.stamp))
        if isinstance(answer, bytes):
            return answer
        if answer == whole.GONE:
            raise BadImage("it cannot be read: it is no longer in the store")
        raise BadImage(CHANGED)

    def ahead(self, entries: Sequence[Entry], folder: str) -> None:
        """Start to read objects, in this order, a few at a time."""
        objects = [
            (self._path(below(folder, entry.path)), entry.bytes, entry.stamp) for entry in entries
        ]
        _arriving.plan(self.url, objects)

    def _objects(self) -> list[str]:
        return call(whole.objects, self.url, self._below)

    def _path(self, path: str) -> str:
        return f"{self._below}/{path}" if self._below else path

    def listed(self, top: str, *, deep: bool) -> list[tuple[str, int, int]]:
        """Return path, size and stamp of the objects in a folder, in the order of a local walk.

        UsageError if the folder has two objects whose names differ in a slash at the end.
        """
        skip = len(self._below) + 1 if self._below else 0
        with full_disk_named(), TemporaryFolder() as folder:
            listing = folder / "objects"
            call(whole.listing, self.url, self._path(top) if top else self._below, deep, listing)
            with listing.open(encoding="utf-8") as lines:
                rows = map(json.loads, lines)
                objects = [(name[skip:], size, stamp) for name, size, stamp in rows]
        objects.sort(key=lambda item: walk_order(item[0]))
        for (name, *_), (following, *_) in itertools.pairwise(objects):
            if name == following:
                raise UsageError(
                    f"{self}/{name} is listed twice, once with a trailing slash",
                    remedy="remove one",
                )
        return objects


class _Arriving:
    """Objects that the helper process reads ahead, and sends together if they are small."""

    def __init__(self) -> None:
        self._url = ""
        self._planned = deque[whole.Object]()
        self._arrived: dict[whole.Object, bytes] = {}

    def plan(self, url: str, objects: Sequence[whole.Object]) -> None:
        """Start to read objects, and forget others."""
        self._url = url
        self._planned = deque(objects)
        self._arrived.clear()
        call(whole.ahead, url, objects)

    def take(self, url: str, wanted: whole.Object) -> bytes | str:
        """Return the content of an object, or why there is none, as `whole.take`."""
        if url == self._url and wanted in self._arrived:
            return self._arrived.pop(wanted)
        objects = self._following(wanted) if url == self._url else [wanted]
        answer = call(whole.take, url, objects)
        if isinstance(answer, str) or len(answer) == wanted[1]:
            return answer
        content = answer[: wanted[1]]
        start = wanted[1]
        for following in objects[1:]:
            if (end := start + following[1]) > len(answer):
                break
            self._arrived[following] = answer[start:end]
            start = end
        return content

    def _following(self, wanted: whole.Object) -> list[whole.Object]:
        """Return an object, and those planned after it, of `_TOGETHER` bytes at most."""
        objects = [wanted]
        size = wanted[1]
        if wanted in self._planned:
            while self._planned.popleft() != wanted:
                pass
            for following in self._planned:
                size += following[1]
                if not following[1] or size > _TOGETHER:
                    break
                objects.append(following)
        return objects


_arriving = _Arriving()


class _Listing(Finder):
    """Lists the objects of a folder. The suffix decides which are images: no content is read."""

    def __init__(self, folder: BucketFolder) -> None:
        super().__init__()
        self._folder = folder

    def files(self, top: str, *, recurse: bool) -> Iterator[tuple[str, int, int]]:
        """Yield path, size and stamp of each image in a folder, and report everything else."""
        skip = len(top) + 1 if top else 0
        for path, size, stamp in self._folder.listed(top, deep=recurse):
            if path == top:
                self.ignore(path or ".", "an empty object" if not size else "named like a folder")
            elif reasons := [*filter(None, map(why_left_out, path[skip:].split("/")))]:
                self.ignore(path, reasons[0])
            elif not claims_image(path):
                self.ignore(path, "not an image" if size else "an empty object")
            elif size > MAX_BYTES:
                self.blame(path, TOO_LARGE)
            else:
                yield path, size, stamp
