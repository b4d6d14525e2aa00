"""Let one thread at a time, of all processes that share work, do what needs much memory.

A WebP of 6 KB takes up to 2.7 GB to decode, so images over 64 megapixels are decoded one at a time.
Processes lock a file without a name, which ends with them. A semaphore would stay in `/dev/shm`
after a kill.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardkit.system.late import load

_thread = threading.RLock()
_depth = 0
_process = os.getpid()
_file: Turn | None = None


class Turn:
    """An open file that processes lock; a process that starts another one passes it on."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (load("multiprocessing.reduction:DupFd")(self.descriptor),)


def shared_turn() -> Turn:
    """Return the file that this process locks, for `join_turn` in a process that it starts."""
    global _file  # noqa: PLW0603 - a turn is taken by processes
    if _file is None:
        _file = Turn(_unnamed_file())
    return _file


def _unnamed_file() -> int:
    if hasattr(os, "memfd_create"):  # the disk for temporary files may have no locks
        return os.memfd_create("shardkit")
    with load("tempfile:TemporaryFile")() as file:  # pragma: no cover - macOS
        return int(os.dup(file.fileno()))


def join_turn(turn: Turn) -> None:
    """Take turns with the process that passed ``turn`` on, and with all others that it started."""
    global _file  # noqa: PLW0603
    _file = turn


@contextmanager
def in_turn() -> Iterator[None]:
    """Wait until no other thread or process is in such a block. A thread may nest them.

    The kernel ends the turn of a process that dies.
    """
    global _thread, _depth, _process  # noqa: PLW0603
    if _process != os.getpid():  # a fork, to which a thread of its parent means nothing
        _thread = threading.RLock()
        _depth = 0
        _process = os.getpid()
    with _thread:
        _depth += 1
        try:
            if _depth == 1 and _file is not None:
                fcntl.lockf(_file.descriptor, fcntl.LOCK_EX)
            yield
        finally:
            _depth -= 1
            if _depth == 0 and _file is not None:
                fcntl.lockf(_file.descriptor, fcntl.LOCK_UN)


def _received(duplicate: Any) -> Turn:
    return Turn(duplicate.detach())
