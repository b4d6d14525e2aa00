"""Suppress Pillow's warnings in one thread, and what libtiff prints.

Warnings concern unused metadata, or sizes that shardkit limits itself; under ``python -W error``
they would make good images bad. `warnings.catch_warnings` would change the filters of all threads,
and two threads that leave it in the wrong order would not restore them.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from PIL import _imaging


class _Here(threading.local):
    """Matches every message in threads inside `quiet`, and none in others.

    It replaces the compiled message pattern of a warning filter, which needs only ``match``.
    """

    depth = 0

    def match(self, _: str) -> bool:
        return self.depth > 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a pattern without matches: other libraries send filters to their processes."""
        return re.compile, ("(?!)",)


_here = _Here()
_FILTER: Any = ("ignore", _here, Warning, None, 0)
_lock = threading.Lock()


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings of this thread within the block."""
    _install()
    _here.depth += 1
    try:
        yield
    finally:
        # A block that a signal interrupted may end late, when its generator is deleted.
        _here.depth = max(0, _here.depth - 1)


def _install() -> None:
    """Insert the filter first, since other code may have added filters or removed all."""
    filters: Any = warnings.filters
    if filters and filters[0] is _FILTER:
        return
    with _lock:
        filters[:] = [_FILTER, *(entry for entry in filters if entry is not _FILTER)]


@functools.cache
def silence_libtiff() -> None:
    """Make Pillow's libtiff print nothing in this process.

    It prints errors to stderr without the name of a file, as does Pillow, which also raises them.
    """
    logging.getLogger("PIL").addHandler(logging.NullHandler())
    try:
        handle = ctypes.CDLL(_imaging.__file__).TIFFSetErrorHandler
    except (AttributeError, OSError):  # a Pillow without libtiff, or with a hidden one
        return
    handle.argtypes = (ctypes.c_void_p,)
    handle.restype = ctypes.c_void_p
    handle(None)
