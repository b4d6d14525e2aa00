"""Worker processes: how they start and stop, and messages about those that died."""

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
from multiprocessing import connection, util
from typing import Any, NamedTuple

import torch
import torch.multiprocessing

from shardkit.errors import UsageError
from shardkit.system.bootstrap import main_file, main_problem, threads_may_fork
from shardkit.system.priority import lower_priority
from shardkit.system.turns import Turn, join_turn
from shardkit.torch import _compat
from shardkit.torch.data.memory import SHARED_MEMORY, finish_shared, remove_left
from shardkit.torch.data.read_context import seed_globals
from shardkit.torch.engine.fetch import Fetch

STOP_SECONDS = 1.0
"""Seconds that a worker may take to stop before it is killed."""

_REPEAT_SECONDS = 0.05
"""Interval at which SIGTERM is repeated: the first may come just before a call that blocks."""

_WATCH_SECONDS = 0.5
"""Interval at which a worker checks that the main process lives."""

_LONGEST_FOLDER = 107 - len("/pymp-12345678/listener-12345678")
"""Maximum bytes of a temporary folder's path: a socket path has at most 107 on Linux (unix(7))."""

_PRELOAD = ("torch", "shardkit.torch.loader", "shardkit.torch.engine.processes")
"""Modules that a fork server imports once: workers then start in 0.1 s, not 2 s."""


def end(processes: list[Any]) -> None:
    """Stop worker processes.

    SIGTERM comes first: it ends a worker silently after its current call.
    """
    for process in processes:
        with contextlib.suppress(RuntimeError):
            if process.is_alive():  # else another process may have its number by now
                process.terminate()
    for process in processes:
        with contextlib.suppress(RuntimeError):
            _wait_for(process)
        with contextlib.suppress(RuntimeError):
            if process.is_alive():
                _kill(process)


def _wait_for(process: Any) -> None:
    """Wait for a worker to stop, and repeat SIGTERM meanwhile.

    A signal only interrupts a call that blocks already. If it arrives between Python's last check
    for signals and that call, its handler would wait until the call returns: 5 s for the next
    request of an idle worker.
    """
    end = time.monotonic() + STOP_SECONDS
    process.join(_REPEAT_SECONDS)
    while process.is_alive() and time.monotonic() < end:
        process.terminate()
        process.join(_REPEAT_SECONDS)


def _kill(process: Any) -> None:
    """Kill a worker that does not stop, and remove the shared file that it was about to unlink."""
    files: list[str] = []
    try:
        with contextlib.suppress(OSError):
            os.kill(process.pid, signal.SIGSTOP)
        files = _shared_files(process.pid)
    finally:
        process.kill()
    process.join(STOP_SECONDS)
    for file in files:
        with contextlib.suppress(OSError):
            os.unlink(file)


def _shared_files(pid: int) -> list[str]:
    """Return the files of shared tensors that a process has open and has not unlinked."""
    files = []
    with contextlib.suppress(OSError):  # not Linux, or the process has ended
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                files.append(os.readlink(entry.path))
    prefix = f"{SHARED_MEMORY}/torch_{pid}_"
    return [file for file in files if file.startswith(prefix) and not file.endswith(" (deleted)")]


def wait_for_one(processes: list[Any]) -> None:
    """Wait a moment until one of some workers has ended."""
    if not processes:
        return
    ended = connection.wait([process.sentinel for process in processes], STOP_SECONDS)
    for process in processes:
        if process.sentinel in ended:
            process.join(STOP_SECONDS)


class Setup(NamedTuple):
    """What a worker process prepares before it reads."""

    sharing: str | None
    """PyTorch's sharing strategy, if not the default."""
    turn: Turn
    is_low: bool
    """Whether it lowers its priority."""
    seed: int
    """Seed of the global generators of worker 0; the next worker has the next one."""
    dataset: Any
    """The dataset that ``torch.utils.data.get_worker_info`` returns."""

    def begin(self, worker: int, count: int) -> None:
        """Prepare this process: ignore Ctrl-C, use one thread for tensors, set the priority."""
        join_turn(self.turn)
        if self.sharing is not None:
            torch.multiprocessing.set_sharing_strategy(self.sharing)  # type: ignore[no-untyped-call]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _end_between_steps)
        end_with_parent()
        if self.is_low:  # from here on: the thread that watches the parent stays as it is
            lower_priority()
        torch.set_num_threads(1)
        opencv = sys.modules.get("cv2")
        if opencv is not None:
            opencv.setNumThreads(0)
        seed_globals(self.seed + worker)
        _compat.set_worker_info(worker, count, self.seed + worker, self.dataset)


def _end_between_steps(*_: object) -> None:
    """Exit at the SIGTERM that `end` sends.

    Python calls this between two bytecode steps. PyTorch's handler would exit at once; between
    creating and unlinking the file of a shared tensor, that would leave the file behind.
    """
    remove_left(sys.exc_info()[1])
    finish_shared()
    os._exit(0)


def end_with_parent(_: int = 0) -> None:
    """Make this worker process exit with the main process, even if it hangs.

    This can be the ``worker_init_fn`` of a ``DataLoader``.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Exit when the main process is gone.

    PyTorch's workers check that too, but not while they write to a full pipe. The pipe never
    breaks, since each worker could also read from it.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    if os.getppid() == parent.pid:  # forked by it: the pipe below is also open in later workers
        while os.getppid() == parent.pid:
            time.sleep(_WATCH_SECONDS)
    else:
        connection.wait([parent.sentinel])
    finish_shared()
    os._exit(1)


def choose_start_method() -> str:
    """Return ``fork`` if it is safe, else ``forkserver`` or ``spawn``.

    A fork copies locks that other threads hold, and a CUDA context that it cannot use. Without
    these it is fastest, and the only method that takes functions defined in a notebook.
    """
    methods = multiprocessing.get_all_start_methods()
    alone = threads_may_fork() and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if "fork" in methods and alone and sys.platform == "linux":
        return "fork"
    return "forkserver" if "forkserver" in methods else "spawn"


def start_problem(requested: str, fetch: Fetch) -> str | None:
    """Return why workers cannot start with the method that ``auto`` would choose, or None."""
    if requested != "auto" or choose_start_method() == "fork":
        return None
    return _send_problem(fetch) or main_problem()


def require_start(method: str, fetch: Fetch) -> None:
    """Check that workers can be started by ``method``."""
    methods = multiprocessing.get_all_start_methods()
    if method not in methods:
        raise UsageError(f"start_method={method!r} is unknown; choose from {', '.join(methods)}")
    if method == "fork":
        return
    problem = main_problem()
    if problem is not None:
        raise UsageError(f"workers would be started with {method}, but {problem}")
    problem = _send_problem(fetch)
    if problem is not None:
        raise UsageError(
            f"{problem}, but workers would be started with {method}",
            remedy="Define functions at the top level of a module, not as lambdas or inside "
            "others; or use threads: engine='thread'; or fork workers: start_method='fork'",
        )


def _send_problem(fetch: Fetch) -> str | None:
    """Return why a worker that is not forked cannot load the dataset, or None."""
    try:
        sent = pickle.dumps(fetch)
    except Exception as error:
        return (
            "the dataset, its transform or the collate function cannot be sent to worker "
            f"processes ({error})"
        )
    if b"__main__" in sent and main_file() is None:
        return (
            "the dataset, its transform or the collate function is defined in a notebook, at a "
            "prompt or on standard input, where worker processes cannot import it"
        )
    return None


def share_temporary_folder() -> None:
    """Make workers put their sockets into this process's folder, which it removes on exit.

    Otherwise, each would create its own, and leave it behind if a signal ends it. If the temporary
    folder's path is too long for a socket, workers would hang: then the folder is in ``/tmp``.
    """
    usual = tempfile.gettempdir()
    fits = len(os.fsencode(usual)) <= _LONGEST_FOLDER
    tempfile.tempdir = usual if fits else "/tmp"  # noqa: S108 - as short as there is
    try:
        util.get_temp_dir()
    finally:
        tempfile.tempdir = usual


def preload() -> None:
    """Make the fork server import what all workers need, unless the user has configured it."""
    if _compat.forkserver_preload() == ["__main__"]:
        multiprocessing.set_forkserver_preload(["__main__", *_PRELOAD])


def how_it_ended(code: int | None) -> str:
    """Return a description of an exit code."""
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def hint(codes: list[int | None]) -> str:
    """Return advice for workers that ended with these exit codes, or ""."""
    if -signal.SIGKILL in codes:
        return " The usual cause is a lack of memory; use fewer workers."
    if -signal.SIGBUS in codes:
        return f" Shared memory may be full: see `df /dev/shm` (process {os.getpid()})."
    if 1 in codes:
        problem = main_problem()
        return " Its own message is above." + (f" (If not forked, {problem}.)" if problem else "")
    return ""
