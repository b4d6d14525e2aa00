"""Rows from other programs' LMDB environments; runs in the child of `library_process`."""

from __future__ import annotations

import functools
import importlib
import os
import struct
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from shardkit.errors import BadImage
from shardkit.system.helper import Library
from shardkit.system.text import size

lmdb = Library("lmdb")

_COUNT = b"num-samples"
_TEXT = struct.Struct("<q")
"""Length of the text before an image; -1 for none."""

MAX_VALUE = 1 << 30
"""Maximum bytes of a value: many keys of a damaged file may have the same pages."""

_OPEN: dict[str, tuple[int, Any]] = {}
"""The open environment: its path, and the stamp of its file when it was opened."""


def _open(path: str, stamp: int) -> Any:
    """Open an environment; no lock file is made, and no lock is taken."""
    if _OPEN.get(path, (None,))[0] != stamp:
        for _, env in _OPEN.values():  # a process must not open an environment twice
            env.close()
        _OPEN.clear()
        try:
            env = lmdb.open(path, readonly=True, lock=False, subdir=False, readahead=False)
        except lmdb.InvalidError as error:
            raise BadImage("it does not start like an LMDB file") from error
        _OPEN[path] = stamp, env
    return _OPEN[path][1]


def facts(path: str, stamp: int) -> tuple[int, int | None]:
    """Return the number of keys, and that of samples stated for the layout ``ocr``."""
    with _open(path, stamp).begin() as txn:
        count = txn.get(_COUNT)
        samples = int(count) if count and count.isdigit() and len(count) < 12 else None
        return txn.stat()["entries"], samples


def keys(path: str, stamp: int, layout: str, after: bytes, count: int) -> list[list[Any]]:
    """Return the next keys: each with the size of its image, its label, and a problem."""
    rows: list[list[Any]] = []
    convert = None if layout == "images" else _function(layout)
    with _open(path, stamp).begin(buffers=True) as txn, txn.cursor() as cursor:
        is_at_key = cursor.set_range(after) if after else cursor.first()
        if is_at_key and after and bytes(cursor.key()) == after:
            is_at_key = cursor.next()
        while is_at_key and len(rows) < count:
            key = bytes(cursor.key())
            value = cursor.value()
            rows.append([key.decode("utf-8", "surrogateescape"), *_row(convert, key, value)])
            is_at_key = cursor.next()
    return rows


def sizes(path: str, stamp: int, wanted: list[bytes]) -> list[int | None]:
    """Return the size of the value of each key, or None."""
    with _open(path, stamp).begin(buffers=True) as txn:
        values = (txn.get(key) for key in wanted)
        return [None if value is None else len(value) for value in values]


def offsets(path: str, stamp: int, wanted: list[bytes]) -> list[int | None]:
    """Return where the file has the value of each key, or None.

    LMDB stores each value in one piece, and returns its address in the map of the file.
    """
    with _open(path, stamp).begin(buffers=True) as txn:
        values = [txn.get(key) for key in wanted]
        maps = _maps()
        return [None if value is None else _offset(maps, value) for value in values]


def _maps() -> list[tuple[int, int, int]]:
    """Return start, end and offset in the file of each map of this process."""
    maps = []
    with open("/proc/self/maps", "rb") as lines:
        for line in lines:
            span, _, offset, *_ = line.split()
            start, _, end = span.partition(b"-")
            maps.append((int(start, 16), int(end, 16), int(offset, 16)))
    return maps


def _offset(maps: list[tuple[int, int, int]], value: memoryview) -> int | None:
    address = np.frombuffer(value, np.uint8).__array_interface__["data"][0]
    offsets = (address - start + offset for start, end, offset in maps if start <= address < end)
    return next(offsets, None)


def read(path: str, stamp: int, layout: str, key: bytes, text_key: bytes) -> bytes:
    """Return an image, after a text and its length."""
    with _open(path, stamp).begin(buffers=True) as txn:
        value = txn.get(key)
        text = txn.get(text_key) if text_key else None
        if value is None:
            raise BadImage("its key is missing")
        _require_short(value)
        if ":" in layout:
            value = _result(_function(layout), key, bytes(value))[0]
            if value is None:
                raise BadImage(f"{layout} returned no image for it")
        if text is None:
            return b"".join((_TEXT.pack(-1), value))
        _require_short(text)
        return b"".join((_TEXT.pack(len(text)), text, value))


def _require_short(value: memoryview) -> None:
    if len(value) > MAX_VALUE:
        raise BadImage(f"its value has {size(len(value))}, over the limit of {size(MAX_VALUE)}")


def _row(convert: Callable[..., Any] | None, key: bytes, value: memoryview) -> list[Any]:
    if convert is None:
        return [len(value), None, ""]
    try:
        _require_short(value)
        image, label = _result(convert, key, bytes(value))
    except BadImage as error:
        return [0, None, str(error)]
    return [-1 if image is None else len(image), label, ""]


def _result(convert: Callable[..., Any], key: bytes, value: bytes) -> tuple[bytes | None, Any]:
    """Return image and label that a user's function gives."""
    try:
        result = convert(key, value)
    except Exception as error:
        raise BadImage(f"the layout's function raised {type(error).__name__}: {error}") from error
    image, label = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
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
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise BadImage(f"the layout function {layout} cannot be imported: {error}") from error
    return function
