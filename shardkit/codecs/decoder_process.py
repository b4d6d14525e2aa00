"""Calls of decoders in a child process with limited memory, which a damaged file may crash."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable
from typing import TypeVar

from shardkit.errors import BadImage
from shardkit.system.helper import Helper

_R = TypeVar("_R")

_SECONDS = 120
"""Limit of a call's CPU time."""
_LEAST_MEMORY = 256 << 20
_COPIES = 3
"""A call may use so much memory, two copies of the file, and so many copies of its pixels."""


def _run(function: Callable[..., _R], data: bytes, size: int, *arguments: object) -> _R:
    """Call a function within a memory limit; what a library raises is the fault of the file."""
    needed = _LEAST_MEMORY + 2 * len(data) + _COPIES * size
    with contextlib.suppress(OSError, ValueError), open("/proc/self/statm", "rb") as pages:
        used = int(pages.read().split()[5]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (used + needed, hard))
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        return function(data, size, *arguments)
    except BadImage:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise BadImage(f"the library that reads it failed: {reason}") from error


def _damaged(ending: str) -> BadImage:
    return BadImage(f"the library that reads it {ending}: the file is damaged")


call = Helper(_run, _damaged, cpu_seconds=_SECONDS).call
"""Call a function with a file's content, and the bytes of its pixels; return its bytes or JSON.

It raises `BadImage` if the function raises anything, needs too much memory or time, or crashes.
"""
