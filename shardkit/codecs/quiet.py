"""Suppress Pillow's warnings in one thread.

They concern unused metadata, or sizes that shardkit limits itself; under ``python -W error`` they
would make good images bad. `warnings.catch_warnings` would change the filters of all threads, and
two threads that leave it in the wrong order would not restore them.
"""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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
        _here.depth -= 1


def _install() -> None:
    """Insert the filter first, since other code may have added filters or removed all."""
    filters: Any = warnings.filters
    if filters and filters[0] is _FILTER:
        return
    with _lock:
        filters[:] = [_FILTER, *(each for each in filters if each is not _FILTER)]
