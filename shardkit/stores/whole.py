"""What the helper process does for sources: list folders, and read objects ahead."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from shardkit.errors import ShardkitError
from shardkit.stores.store import Missing, open_store

_CONNECTIONS = 8
"""Requests at a time, of each process that reads."""

_MOST_LISTED = 1 << 28
"""Objects of one folder: a listing that is longer has no end, as far as we can tell."""

_requests = ThreadPoolExecutor(_CONNECTIONS)

_Object = tuple[str, str, int, int]
"""URL, name, size and stamp of an object."""

_started: dict[_Object, Future[bytes | None]] = {}
"""Objects that are read ahead, until `take` returns them."""


def folders(url: str, folder: str) -> list[list[str]]:
    """Return the names of the folders and of the objects directly in a folder."""
    return [*map(sorted, open_store(url).folders(folder))]


def listing(url: str, folder: str, deep: bool, path: Path) -> None:
    """Write the objects in a folder to a file: name, size and stamp, a line of JSON each.

    Raises:
        ShardkitError: If the listing repeats itself or does not end, or the file cannot be written.
    """
    starts, count = set[int](), 0
    try:
        with path.open("w", encoding="utf-8") as lines:
            for page in filter(None, open_store(url).listing(folder, deep=deep)):
                count += len(page)
                start = hash(page[0].name)
                if start in starts or count > _MOST_LISTED:
                    raise ShardkitError(
                        f"{url}/{folder}: the store repeats its list of objects, or does not end "
                        "it; retry, or ask its operator"
                    )
                starts.add(start)
                lines.writelines(f"{json.dumps(entry)}\n" for entry in page)
    except OSError as error:
        raise ShardkitError(
            f"{path.parent} cannot be written: {error.strerror}. Free some space, or set TMPDIR"
        ) from error


def ahead(url: str, objects: Sequence[tuple[str, int, int]]) -> None:
    """Start to read objects, in order; forget those started before that were not taken."""
    for request in _started.values():
        request.cancel()
    _started.clear()
    store = open_store(url)
    for name, size, stamp in objects:
        _started[url, name, size, stamp] = _requests.submit(store.whole, name, size, stamp)


def take(url: str, name: str, size: int, stamp: int) -> bytes:
    """Return ``b"="`` and the content of an object; ``b"-"`` if it is gone, ``b"~"`` if changed."""
    request = _started.pop((url, name, size, stamp), None)
    try:
        content = request.result() if request else open_store(url).whole(name, size, stamp)
    except Missing:
        return b"-"
    return b"~" if content is None else b"=" + content
