"""Pillow's warnings, kept from the user while shardkit opens an image.

They speak of metadata that nobody asked for, or of sizes that shardkit limits itself; under
``python -W error`` they would make good images bad. `warnings.catch_warnings` would change the
filters of all threads, and leave them changed if two of them leave it in the wrong order.
"""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Here(threading.local):
    """Matches any message in a thread that is within `quiet`, and none in others.

    It stands where a filter has the pattern of its message, of which only ``match`` is ever used.
    """

    depth = 0

    def match(self, _: str) -> bool:
        return self.depth > 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Become a pattern that matches nothing: others send the filters to their processes."""
        return re.compile, ("(?!)",)


_here = _Here()
_FILTER: Any = ("ignore", _here, Warning, None, 0)
_lock = threading.Lock()


@contextmanager
def quiet() -> Iterator[None]:
    """Let this thread give no warnings within the block; other threads are not affected."""
    _install()
    _here.depth += 1
    try:
        yield
    finally:
        _here.depth -= 1


def _install() -> None:
    """Put the filter in front, where others may have been put since, or all been taken away."""
    filters: Any = warnings.filters
    if filters and filters[0] is _FILTER:
        return
    with _lock:
        filters[:] = [_FILTER, *(each for each in filters if each is not _FILTER)]
