"""Rows of other programs' LMDB environments; runs in the child of `library_process`."""

from __future__ import annotations

import functools
import importlib
import json
import os
import struct
import sys
from collections.abc import Callable
from typing import Any

import lmdb
import numpy as np

from shardkit.errors import BadImage

_COUNT = b"num-samples"
_TEXT = struct.Struct("<q")
"""Length of the text before an image; -1 for none."""


_OPEN: dict[str, tuple[int, Any]] = {}
"""The open environment: its path, and the stamp of its file when it was opened."""


def _open(path: str, stamp: int) -> Any:
    """Open an environment; no lock file is made, and no lock is taken."""
    if _OPEN.get(path, (None,))[0] != stamp:
        for _, env in _OPEN.values():  # a process must not open an environment twice
            env.close()
        _OPEN.clear()
        folder = os.path.isdir(path)
        env = lmdb.open(path, readonly=True, lock=False, subdir=folder, readahead=False)
        _OPEN[path] = stamp, env
    return _OPEN[path][1]


def facts(path: str, stamp: int) -> bytes:
    """Return as JSON the number of keys, and that of samples stated for the layout ``ocr``."""
    with _open(path, stamp).begin() as txn:
        count = txn.get(_COUNT)
        samples = int(count) if count and count.isdigit() and len(count) < 12 else None
        return json.dumps([txn.stat()["entries"], samples]).encode()


def keys(path: str, stamp: int, layout: str, after: bytes, count: int) -> bytes:
    """Return as JSON the next keys: each with the size of its image, its label, and a problem."""
    rows: list[list[Any]] = []
    convert = None if layout == "images" else _function(layout)
    with _open(path, stamp).begin(buffers=True) as txn, txn.cursor() as cursor:
        found = cursor.set_range(after) if after else cursor.first()
        if found and after and bytes(cursor.key()) == after:
            found = cursor.next()
        while found and len(rows) < count:
            key, value = bytes(cursor.key()), cursor.value()
            rows.append([key.decode("utf-8", "surrogateescape"), *_row(convert, key, value)])
            found = cursor.next()
    return json.dumps(rows).encode()


def sizes(path: str, stamp: int, wanted: list[bytes]) -> bytes:
    """Return as JSON the size of the value of each key, or null."""
    with _open(path, stamp).begin(buffers=True) as txn:
        found = (txn.get(key) for key in wanted)
        return json.dumps([None if each is None else len(each) for each in found]).encode()


def offsets(path: str, stamp: int, wanted: list[bytes]) -> bytes:
    """Return as JSON where the file has the value of each key, or null.

    LMDB stores each value in one piece, and returns its address in the map of the file.
    """
    with _open(path, stamp).begin(buffers=True) as txn:
        values = [txn.get(key) for key in wanted]
        maps = _maps()
        return json.dumps([each and _offset(maps, each) for each in values]).encode()


def _maps() -> list[tuple[int, int, int]]:
    """Return start, end and offset in the file of each map of this process."""
    found = []
    with open("/proc/self/maps", "rb") as lines:
        for line in lines:
            span, _, offset, *_ = line.split()
            start, _, end = span.partition(b"-")
            found.append((int(start, 16), int(end, 16), int(offset, 16)))
    return found


def _offset(maps: list[tuple[int, int, int]], value: memoryview) -> int | None:
    address = np.frombuffer(value, np.uint8).__array_interface__["data"][0]
    places = (address - start + offset for start, end, offset in maps if start <= address < end)
    return next(places, None)


def read(path: str, stamp: int, layout: str, key: bytes, text_key: bytes) -> bytes:
    """Return an image, after a text and its length."""
    with _open(path, stamp).begin() as txn:
        value = txn.get(key)
        text = txn.get(text_key) if text_key else None
    if value is None:
        raise BadImage("its key is missing")
    if ":" in layout:
        value = _result(_function(layout), key, value)[0]
        if value is None:
            raise BadImage(f"{layout} gives no image for it")
    head = _TEXT.pack(-1) if text is None else _TEXT.pack(len(text)) + text
    return head + bytes(value)


def _row(convert: Callable[..., Any] | None, key: bytes, value: memoryview) -> list[Any]:
    if convert is None:
        return [len(value), None, ""]
    try:
        image, label = _result(convert, key, bytes(value))
    except BadImage as error:
        return [0, None, str(error)]
    return [-1 if image is None else len(image), label, ""]


def _result(convert: Callable[..., Any], key: bytes, value: bytes) -> tuple[bytes | None, Any]:
    """Return image and label that a user's function gives."""
    try:
        found = convert(key, value)
    except Exception as error:
        raise BadImage(f"the layout's function raised {type(error).__name__}: {error}") from error
    image, label = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if image is not None and not isinstance(image, bytes):
        raise BadImage(f"the layout's function returned {type(image).__name__}, not bytes")
    if label is not None and (isinstance(label, bool) or not isinstance(label, int | str)):
        raise BadImage(f"the layout's function returned the label {label!r}")
    return image, label


@functools.cache
def _function(layout: str) -> Callable[..., Any]:
    here = os.getcwd()
    if here not in sys.path:  # last: nothing there replaces an installed module
        sys.path.append(here)
    module, _, name = layout.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise BadImage(f"--layout {layout} cannot be imported: {error}") from error
    return found
