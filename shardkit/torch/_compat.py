"""Everything that shardkit uses of PyTorch and multiprocessing beyond their public interfaces.

A new version of PyTorch may change these: check this module first. tests/unit/torch/test_compat.py
checks that no other module uses private names.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable
from multiprocessing import connection, forkserver
from types import CodeType
from typing import Any

import torch
from torch.utils.data._utils import fetch, signal_handling


def new_shared_storage(size: int) -> torch.UntypedStorage:
    """Return ``size`` uninitialized bytes of shared memory; RuntimeError if that is full.

    The public ``share_memory_`` would first allocate and copy private memory.
    """
    storage: torch.UntypedStorage = torch.UntypedStorage._new_shared(size)  # type: ignore[no-untyped-call]
    return storage


def set_timeout(iterator: Any, seconds: float) -> None:
    """Set how long the iterator of a ``DataLoader`` waits for its next batch.

    With 0 there is no limit, and it checks every 5 s that its workers live.
    """
    iterator._timeout = seconds


_HANDOVER = threading.local()
_connect: Callable[[Any], Any] = connection.SocketClient  # type: ignore[attr-defined]


def next_within(iterator: Any, seconds: float) -> Any:
    """Return the next item of a ``DataLoader``'s iterator.

    A worker passes file descriptors through a socket. If it was stopped meanwhile, reading there
    blocks, whatever the timeout of the ``DataLoader``. Raises BlockingIOError after so many
    seconds; 0 waits forever.
    """
    _HANDOVER.seconds = seconds
    try:
        return next(iterator)
    finally:
        _HANDOVER.seconds = 0


def _connect_limited(address: Any) -> Any:
    connected = _connect(address)
    if seconds := getattr(_HANDOVER, "seconds", 0):
        limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1_000_000))
        with socket.socket(fileno=os.dup(connected.fileno())) as same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    return connected


connection.SocketClient = _connect_limited  # type: ignore[attr-defined]


def is_timeout(error: BaseException) -> bool:
    """Return whether a ``DataLoader`` raised this because no batch arrived in time."""
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader timed out after")


def is_dead_worker(error: BaseException) -> bool:
    """Return whether a ``DataLoader`` raised this because a worker process died."""
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker (pid")


def worker_processes(iterator: Any) -> list[Any]:
    """Return the worker processes of a ``DataLoader`` iterator; empty without workers."""
    return list(getattr(iterator, "_workers", ()))


def shut_down(iterator: Any) -> None:
    """Stop the workers of a ``DataLoader`` iterator."""
    iterator._shutdown_workers()


def stop_pinning(iterator: Any, seconds: float) -> None:
    """Stop the thread that pins batches, while the workers still hand their memory over.

    It would end with a traceback if they were stopped first. One that is blocked is left alone.
    """
    if getattr(iterator, "_pin_memory_thread", None) is not None:
        iterator._pin_memory_thread_done_event.set()
        iterator._worker_result_queue.put((None, None))  # wakes it up
        iterator._pin_memory_thread.join(seconds)


def unwatch(iterator: Any) -> None:
    """Keep PyTorch from raising an exception, wherever the main thread is, when a worker ends."""
    if getattr(iterator, "_worker_pids_set", False):  # else an iterator at its address cannot start
        signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
        iterator._worker_pids_set = False


def disown(iterator: Any) -> None:
    """Keep a forked copy of a ``DataLoader`` iterator from stopping its parent's workers."""
    iterator._shutdown = True
    unwatch(iterator)


def forget_iterator(loader: Any) -> None:
    """Make a ``DataLoader`` start its persistent workers again in the next iteration."""
    loader._iterator = None


def persistent_iterator(loader: Any) -> Any:
    """Return the iterator that a ``DataLoader`` keeps for persistent workers, or None."""
    return getattr(loader, "_iterator", None)


def fetch_codes() -> set[CodeType]:
    """Return the code of the functions in which a ``DataLoader`` reads samples."""
    fetchers = fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher
    return {fetcher.fetch.__code__ for fetcher in fetchers}


def forget_workers(iterator: Any) -> None:
    """Keep a ``DataLoader`` iterator whose workers were stopped from telling them to stop.

    A worker that was killed while it checked PyTorch's event took its lock with it, and PyTorch
    would wait forever to set the event.
    """
    iterator._workers_done_event = threading.Event()


def forkserver_preload() -> list[str] | None:
    """Return the modules that the fork server is to import, or None if unknown."""
    modules: list[str] | None = getattr(forkserver._forkserver, "_preload_modules", None)
    return modules
