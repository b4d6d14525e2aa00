"""Which code is the user's: neither Python's, nor an installed package's, nor shardkit's."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from functools import cache
from pathlib import Path

_LIBRARIES = tuple(
    os.path.join(os.path.realpath(path), "")
    for path in (
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        str(Path(__file__).parents[2]),
    )
)
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")


@cache
def is_library(file: str) -> bool:
    """Return whether a file is of Python, of an installed package or of shardkit."""
    if file.startswith("<") or _INSTALLED.search(file):
        return True
    return os.path.realpath(file).startswith(_LIBRARIES)


def raised_at(error: BaseException) -> str:
    """Return the user's line in which an error arose, such as ``own.py:24 Own.load``, or ""."""
    lines = [
        f"{os.path.basename(frame.f_code.co_filename)}:{line} {frame.f_code.co_qualname}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not is_library(frame.f_code.co_filename)
    ]
    return lines[-1] if lines else ""
