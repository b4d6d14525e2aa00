"""Cold files: drop the kernel's copies of their pages, and look whether it helped."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

_PAGE = mmap.PAGESIZE

_LOOKED_AT = 1000
"""Files that stand for all."""


def drop(files: Iterable[Path]) -> None:
    """Write files out and drop their pages from the kernel's cache; needs no privilege.

    Pages that some process has mapped stay. On a system without ``posix_fadvise`` all stay.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # some file systems have nothing to write out
                os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def resident(files: Iterable[Path]) -> float | None:
    """Return which part of the files' pages is in the kernel's cache, by ``mincore``.

    Returns:
        A number from 0 to 1; 0 of no pages. None if it is not known: the kernel tells it only to
        those who own a file or may write it (to others it says that all is there), and some file
        systems cannot map files.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    held = total = 0
    for path in files:
        size = path.stat().st_size
        if not size:
            continue
        if not _is_told(path):
            return None
        pages = (size + _PAGE - 1) // _PAGE
        found = (ctypes.c_ubyte * pages)()
        try:
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE) as view:
                start = ctypes.addressof(ctypes.c_char.from_buffer(view))
                if libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), found):
                    return None
        except OSError:
            return None
        held += int((np.frombuffer(bytes(found), np.uint8) & 1).sum())
        total += pages
    return held / total if total else 0.0


def resident_of_many(files: Sequence[Path]) -> float | None:
    """Return what `resident` does, of at most a thousand of some files, chosen at random."""
    chosen = np.random.default_rng(0).permutation(len(files))[:_LOOKED_AT]
    return resident(files[number] for number in chosen.tolist())


def _is_told(path: Path) -> bool:
    """Tell whether the kernel says to this process which pages of a file are in memory."""
    return path.stat().st_uid == os.geteuid() or os.access(path, os.W_OK)
