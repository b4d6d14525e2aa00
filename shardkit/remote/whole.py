"""Work of the helper process for sources: list folders, and read objects ahead."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from shardkit.errors import ShardkitError
from shardkit.remote.store import Missing, open_store
from shardkit.system.text import quoted

_CONNECTIONS = 32
"""Requests at a time, of each process that reads: objects of 80 KB that take 20 ms to arrive use
1 Gbit/s."""

_AHEAD_BYTES = 16 << 20
_AHEAD_OBJECTS = 1024
"""Limits of what is read ahead; one object may have more bytes."""

_MOST_LISTED = 1 << 28
"""Objects of one folder: a listing that is longer has no end, as far as we can tell."""

GONE = "gone"
CHANGED = "changed"
"""Answers of `take` for objects that are not those that were listed."""

Object = tuple[str, int, int]
"""Name, size and stamp of an object."""

_requests = ThreadPoolExecutor(_CONNECTIONS)


def folders(url: str, folder: str) -> list[str]:
    """Return the sorted names of the folders directly in a folder."""
    names, _ = open_store(url).folders(folder)
    return sorted(names)


def objects(url: str, folder: str) -> list[str]:
    """Return the names of the objects directly in a folder."""
    _, names = open_store(url).folders(folder)
    return names


def listing(url: str, folder: str, deep: bool, path: Path) -> None:
    """Write the objects in a folder to a file: name, size and stamp, a line of JSON each.

    ShardkitError if the listing repeats itself, does not end or has objects of other folders.
    """
    starts = set[int]()
    count = 0
    inside = f"{folder}/" if folder else ""
    try:
        with path.open("w", encoding="utf-8") as lines:
            for page in filter(None, open_store(url).listing(folder, deep=deep)):
                count += len(page)
                start = hash(page[0].name)
                if start in starts or count > _MOST_LISTED:
                    raise ShardkitError(
                        f"{url}/{folder}: the store repeats its list of objects, or does not "
                        "end it;",
                        remedy="retry, or ask its operator",
                    )
                starts.add(start)
                for entry in page:
                    if not f"{entry.name}/".startswith(inside):
                        raise ShardkitError(
                            f"{url}/{folder}: the store lists {quoted(entry.name)}, which is "
                            "not in this folder;",
                            remedy="ask its operator",
                        )
                lines.writelines(f"{json.dumps(entry)}\n" for entry in page)
    except OSError as error:
        raise ShardkitError(
            f"{path.parent} cannot be written: {error.strerror}",
            remedy="Free some space, or set TMPDIR",
        ) from error


class _Ahead:
    """Objects that are read before `take` asks for them, in the same order.

    Calls come from one thread.
    """

    def __init__(self) -> None:
        self.url = ""
        self._planned = deque[Object]()
        self._started: dict[Object, Future[bytes | None]] = {}
        self._bytes = 0

    def plan(self, url: str, objects: Sequence[Object]) -> None:
        """Start to read objects, and forget others."""
        self.url = url
        self._forget()
        self._planned = deque(objects)
        self._start()

    def take(self, wanted: Object) -> bytes | None:
        """Return the content of an object, as `Store.whole`; forget those planned before it."""
        if wanted not in self._started:
            if wanted not in self._planned:
                return open_store(self.url).whole(*wanted)
            while self._planned[0] != wanted:
                self._planned.popleft()
            self._forget()
            self._start()
        while (first := next(iter(self._started))) != wanted:
            self._drop(first).cancel()
        content = self._drop(first).result()
        self._start()
        return content

    def _forget(self) -> None:
        for started in [*self._started]:
            self._drop(started).cancel()

    def _drop(self, started: Object) -> Future[bytes | None]:
        self._bytes -= started[1]
        return self._started.pop(started)

    def _start(self) -> None:
        while self._planned and len(self._started) < _AHEAD_OBJECTS:
            if self._started and self._bytes + self._planned[0][1] > _AHEAD_BYTES:
                return
            following = self._planned.popleft()
            if following not in self._started:
                whole = open_store(self.url).whole
                self._started[following] = _requests.submit(whole, *following)
                self._bytes += following[1]


_ahead = _Ahead()


def ahead(url: str, objects: Sequence[Object]) -> None:
    """Start to read objects, in order; forget others."""
    _ahead.plan(url, objects)


def take(url: str, objects: Sequence[Object]) -> bytes | str:
    """Return the joined contents of objects, as many as are those that were listed.

    If the first one is not, `GONE` or `CHANGED` is the answer.
    """
    if url != _ahead.url:
        _ahead.plan(url, ())
    contents = list[bytes]()
    for wanted in objects:
        try:
            content = _ahead.take(wanted)
            problem = CHANGED
        except Missing:
            content = None
            problem = GONE
        except ShardkitError:
            if not contents:
                raise
            break
        if content is None:
            return b"".join(contents) if contents else problem
        contents.append(content)
    return contents[0] if len(contents) == 1 else b"".join(contents)
