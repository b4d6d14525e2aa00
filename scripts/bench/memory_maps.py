"""Cold files: let go of what a process has mapped, drop pages, and look whether it helped."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterable
from pathlib import Path

_PAGE = mmap.PAGESIZE


def forget(below: Path) -> int:
    """Unmap the resident pages of read-only mappings of files below a folder; return their bytes.

    The kernel keeps what somebody has mapped, whatever ``posix_fadvise`` says; the mapping itself
    stays, and its pages come back when they are touched.
    """
    if sys.platform != "linux":
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    total = 0
    with open("/proc/self/maps", encoding="utf-8") as file:
        lines = file.read().splitlines()
    for line in lines:
        span, permissions, *_, path = line.split(maxsplit=5)
        if not path.startswith(f"{below}/") or "w" in permissions:
            continue
        begin, end = (int(part, 16) for part in span.split("-"))
        size = end - begin
        if libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), f"madvise of {path}")
        total += size
    return total


def drop(files: Iterable[Path]) -> None:
    """Write the files out and drop their pages from the kernel's cache."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def resident(files: Iterable[Path]) -> float:
    """Return which part of the files' pages is in the kernel's cache, 0 to 1, by ``mincore``."""
    libc = ctypes.CDLL(None, use_errno=True)
    held = total = 0
    for path in files:
        size = path.stat().st_size
        if not size:
            continue
        pages = (size + _PAGE - 1) // _PAGE
        found = (ctypes.c_ubyte * pages)()
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE) as view:
            start = ctypes.addressof(ctypes.c_char.from_buffer(view))
            if libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), found):
                raise OSError(ctypes.get_errno(), f"mincore of {path}")
        held += sum(state & 1 for state in found)
        total += pages
    return held / total if total else 0.0
