"""Everything that shardkit uses of PyTorch and multiprocessing beyond their public interfaces.

A new version of PyTorch may change these: check this module first. tests/unit/torch/test_compat.py
checks that no other module uses private names.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
from collections.abc import Callable
from multiprocessing import connection, forkserver
from types import CodeType
from typing import Any

import torch
from torch.utils.data._utils import fetch
from torch.utils.data._utils import worker as worker_loop


def new_shared_storage(size: int) -> torch.UntypedStorage:
    """Return ``size`` uninitialized bytes of shared memory; RuntimeError if that is full.

    The public ``share_memory_`` would first allocate and copy private memory.
    """
    storage: torch.UntypedStorage = torch.UntypedStorage._new_shared(size)  # type: ignore[no-untyped-call]
    return storage


_HANDOVER = threading.local()
_connect: Callable[[Any], Any] = connection.SocketClient  # type: ignore[attr-defined]


def call_within(seconds: float, function: Callable[..., Any], *values: Any) -> Any:
    """Call a function that unpickles shared tensors.

    A worker passes file descriptors through a socket. If it was stopped meanwhile, reading there
    blocks. Raises BlockingIOError after so many seconds; 0 waits forever. Raises OSError if this
    process may not open more files.
    """
    _HANDOVER.seconds = seconds
    try:
        return function(*values)
    except RuntimeError as error:
        if "ancdata" not in str(error):
            raise
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE)) from error
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


def set_worker_info(worker: int, count: int, seed: int, dataset: Any) -> None:
    """Set what ``torch.utils.data.get_worker_info`` returns in this process."""
    worker_loop._worker_info = worker_loop.WorkerInfo(
        id=worker, num_workers=count, seed=seed, dataset=dataset
    )


def shut_down(iterator: Any) -> None:
    """Stop the workers of a ``DataLoader`` iterator."""
    iterator._shutdown_workers()


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


def forkserver_preload() -> list[str] | None:
    """Return the modules that the fork server is to import, or None if unknown."""
    modules: list[str] | None = getattr(forkserver._forkserver, "_preload_modules", None)
    return modules
