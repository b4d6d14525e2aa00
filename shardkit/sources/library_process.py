"""Calls of libraries in a child process, which a damaged file may crash or hang."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable
from typing import TypeVar

from shardkit.errors import BadImage, ConversionFailed
from shardkit.sources.images import require_machine
from shardkit.system.helper import Helper
from shardkit.system.text import size

_R = TypeVar("_R")

MAX_DATA = 16 << 30
"""Maximum bytes of memory of the child."""

_LEAST_DATA = 2 << 30
_DATA_PER_BYTE = 16
"""A call may use so many bytes, and so many times the size of its file: a few KB of HDF5 or Parquet
can state any size."""


def _run(function: Callable[..., _R], *arguments: object) -> _R:
    """Call a function within a memory limit; what a library raises is the fault of its file."""
    # It refuses plugins, so that no code runs because a file's list of filters names it. HDF5 reads
    # it when a `Library` is first used.
    os.environ["HDF5_PLUGIN_PRELOAD"] = "::"
    most = _limit_memory(arguments)
    try:
        return function(*arguments)
    except BadImage:
        raise
    except ConversionFailed as error:
        raise ConversionFailed(f"{arguments[0]}: {error.problem}", remedy=error.remedy) from error
    except MemoryError as error:
        reason = f" ({error})" if str(error) else ""
        raise ConversionFailed(
            f"{arguments[0]}: reading it needs over {size(most)} of memory, the limit for a file "
            f"of its size{reason}"
        ) from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno:
            require_machine(error, str(arguments[0]))
            raise BadImage(f"it cannot be read: {os.strerror(error.errno)}") from error
        cause = f"{type(error).__name__}: {error}"
        raise BadImage(f"the library that reads it failed: {cause}") from error


def _limit_memory(arguments: tuple[object, ...]) -> int:
    """Limit what the call may add to the memory of this process; return that many bytes."""
    used = 0
    with contextlib.suppress(OSError), open("/proc/self/statm", "rb") as pages:
        used = int(pages.read().split()[5]) * resource.getpagesize()
    most = _LEAST_DATA
    if arguments and isinstance(arguments[0], str) and os.path.isfile(arguments[0]):
        most += _DATA_PER_BYTE * os.path.getsize(arguments[0])
    with contextlib.suppress(ValueError, OSError):
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = min(used + most, MAX_DATA)
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    return most


def _damaged(ending: str) -> BadImage:
    return BadImage(f"the library that reads it {ending}: the file is damaged")


HELPER = Helper(_run, _damaged, cpu_seconds=120)  # the slowest unpacks a chunk of rows

call = HELPER.call
"""Call a function whose first argument is the path of the file to read; return its bytes or JSON.

It raises `BadImage` if the function does, or the library crashes or does not answer, and
`ConversionFailed` with the file's name if the function does, or needs too much memory.
"""
