"""Worker processes: how they are begun and ended, and what is said of those that died."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from multiprocessing import connection, forkserver, util
from typing import Any

import torch
import torch.multiprocessing

from shardkit.errors import UsageError
from shardkit.torch.fetch import Fetch

_STOP_SECONDS = 1.0
"""How long a worker may take to end before it is killed."""

_WATCH_SECONDS = 1.0
"""How often a worker looks whether the main process lives."""

_LONGEST_FOLDER = 107 - len("/pymp-12345678/listener-12345678")
"""Bytes of a temporary folder's name: a socket's has 107 at the most on Linux (unix(7))."""

_PRELOAD = ("torch", "shardkit.torch.loader")
"""What a fork server loads once: workers then begin in 0.1 s and not in 2 s."""


def end(processes: list[Any], done: Any, owner: int) -> None:
    """End worker processes, if this is the process that has them and not a fork of it.

    By SIGTERM first: PyTorch's workers end by it without a word. Of one that has only begun, or
    has to be killed, PyTorch makes an exception here, wherever the main thread is.

    Args:
        processes: The workers.
        done: The event by which PyTorch tells them to end.
        owner: The process that has them.
    """
    if os.getpid() != owner:
        return
    for process in processes:
        with contextlib.suppress(RuntimeError):
            process.terminate()
    for process in processes:
        with contextlib.suppress(RuntimeError):
            process.join(_STOP_SECONDS)
        with contextlib.suppress(RuntimeError):
            if process.is_alive():
                process.kill()
                process.join(_STOP_SECONDS)
    if not any(process.is_alive() for process in processes):
        _free(done)


def _free(event: Any) -> None:
    """Free the lock of an event that no other process can hold any more.

    A worker that ended while it looked at the event took the lock along, and PyTorch, setting the
    event, would wait for ever.
    """
    lock = getattr(getattr(event, "_cond", None), "_lock", None)
    if lock is not None:
        lock.acquire(block=False)
        lock.release()


def begin_worker(sharing: str | None, _: int) -> None:
    """Prepare a worker process: it leaves Ctrl-C to the main process, and OpenCV to one thread."""
    if sharing is not None:
        torch.multiprocessing.set_sharing_strategy(sharing)  # type: ignore[no-untyped-call]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    opencv = sys.modules.get("cv2")
    if opencv is not None:
        opencv.setNumThreads(0)


def end_with_parent(_: int = 0) -> None:
    """Have this worker process end when the main one is gone, even if it hangs by then.

    It can be the ``worker_init_fn`` of a DataLoader.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when the main one is gone.

    PyTorch's workers look themselves, but not while they wait to write into a pipe that is full;
    and as each of them could read from it too, it never breaks.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    if os.getppid() == parent.pid:  # forked by it: the pipe below is also open in later workers
        while os.getppid() == parent.pid:
            time.sleep(_WATCH_SECONDS)
    else:
        connection.wait([parent.sentinel])
    os._exit(1)


def choose_start_method() -> str:
    """Return how workers are started: by fork if nothing can break by it.

    A fork copies locks that other threads hold, and a CUDA context that cannot be used. Without
    either it is the fastest, and the only way that takes functions defined in a notebook.
    """
    known = multiprocessing.get_all_start_methods()
    alone = threading.active_count() == 1 and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if "fork" in known and alone and sys.platform == "linux":
        return "fork"
    return "forkserver" if "forkserver" in known else "spawn"


def require_start(method: str, fetch: Fetch) -> None:
    """See that workers can be started by ``method``.

    Raises:
        UsageError: If the system does not know it, or what they need cannot be sent to them.
    """
    known = multiprocessing.get_all_start_methods()
    if method not in known:
        raise UsageError(f"start_method={method!r} is unknown here; known: {', '.join(known)}")
    if method != "fork":
        _require_picklable(fetch, method)


def share_temporary_folder() -> None:
    """Have workers put their sockets into this process's folder, which it removes at its end.

    Each would make one of its own, and leave it behind when it is ended by a signal. Where the
    temporary folder's name is too long for a socket, workers would hang: then it lies in ``/tmp``.
    """
    usual = tempfile.gettempdir()
    fits = len(os.fsencode(usual)) <= _LONGEST_FOLDER
    tempfile.tempdir = usual if fits else "/tmp"  # noqa: S108 - as short as there is
    try:
        util.get_temp_dir()
    finally:
        tempfile.tempdir = usual


def preload() -> None:
    """Have the fork server load what all workers need, unless its user chose already."""
    server = forkserver._forkserver
    if getattr(server, "_preload_modules", None) == ["__main__"]:
        multiprocessing.set_forkserver_preload(["__main__", *_PRELOAD])


def _require_picklable(fetch: Fetch, method: str) -> None:
    try:
        pickle.dumps(fetch)
    except Exception as error:
        raise UsageError(
            f"the dataset, its transform or the collate function cannot be sent to worker "
            f"processes ({error}). Define functions at the top of a module, not as lambdas or "
            f"inside others; or start workers by fork: LoaderOptions(start_method='fork'). "
            f"They would be started by {method}."
        ) from error


def how_it_ended(code: int | None) -> str:
    """Return what is said of a worker with this exit code."""
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def hint(codes: list[int | None]) -> str:
    """Return what may help where workers ended with these exit codes, or ""."""
    if -signal.SIGKILL in codes:
        return " Most often that is the system's answer to a lack of memory; use fewer workers."
    if -signal.SIGBUS in codes:
        return f" Shared memory may be full: see `df /dev/shm` (process {os.getpid()})."
    if 1 in codes:
        return (
            " Its own message stands above. (Where workers are not started by fork, a script must "
            "do its work below `if __name__ == '__main__':`.)"
        )
    return ""
