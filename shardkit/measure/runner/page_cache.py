"""The kernel's page cache: drop files from it, and measure what stayed."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

_SAMPLE = 1000
"""Files that represent all."""


def drop(files: Iterable[Path]) -> None:
    """Write files back and drop their pages, if possible; those that a process has mapped stay."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # some file systems cannot write back
                os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def resident(files: Sequence[Path]) -> float | None:
    """Return the fraction of the files' pages in the page cache, by ``mincore``; None if unknown.

    The kernel reports it only to a file's owner or writers; to others, all pages are cached.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    cached = total = 0
    for path in random.Random(0).sample(files, min(len(files), _SAMPLE)):  # noqa: S311
        status = path.stat()
        if not status.st_size:
            continue
        if status.st_uid != os.geteuid() and not os.access(path, os.W_OK):
            return None
        pages = -(-status.st_size // mmap.PAGESIZE)
        pages_cached = (ctypes.c_ubyte * pages)()
        try:
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE) as view:
                start = ctypes.addressof(ctypes.c_char.from_buffer(view))
                length = ctypes.c_size_t(status.st_size)
                if libc.mincore(ctypes.c_void_p(start), length, pages_cached):
                    return None
        except OSError:
            return None
        cached += int((np.frombuffer(bytes(pages_cached), np.uint8) & 1).sum())
        total += pages
    return cached / total if total else 0.0
