"""Memory that encoded images are read into, used again by every batch of this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np

_FREE: list[memoryview] = []
"""Memory for encoded images that no batch uses at the moment."""

_KEEP = 32 << 20
"""Bytes above which one is not kept; there are as many as threads ever read at once."""


@contextlib.contextmanager
def scratch(size: int) -> Iterator[memoryview]:
    """Lend memory of ``size`` bytes or more, which a later batch will have again.

    New memory costs more than reading into it: the kernel has to find and clear its pages.
    """
    try:
        buffer = _FREE.pop()
    except IndexError:
        buffer = memoryview(b"")
    if len(buffer) < size:
        buffer = memoryview(np.empty(-(-size // 65536) * 65536, np.uint8).data)
    yield buffer  # after an error it is not given back: a traceback may still show it
    if len(buffer) <= _KEEP:
        _FREE.append(buffer)
