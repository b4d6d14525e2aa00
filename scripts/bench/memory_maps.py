"""Release the files that a process has mapped, so that their cached pages can be dropped."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path


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
