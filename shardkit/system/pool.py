"""Run tasks in worker processes that end with the work, with an error, or with their parent."""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    as_completed,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing.queues import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from shardkit.errors import ShardkitError, UsageError, setting
from shardkit.system.bootstrap import guard_helpers, main_problem, threads_may_fork
from shardkit.system.turns import Turn, join_turn, shared_turn

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")

_START_METHOD = "spawn"
"""A child starts without its parent's locks, threads and open files. Tests use a fork server."""

_THREADED = {"obstore", "pyarrow", "torch"}
"""Libraries whose threads a fork would lack."""

_WORTHWHILE = 32 << 20
"""Bytes of images from which another process takes less time than a new Python needs to start."""

_forks = False

_POLL_SECONDS = 0.1
"""Interval of progress reports while no task finishes."""


class Progress(NamedTuple):
    """Work done since the last report."""

    images: int = 0
    bytes: int = 0
    """Bytes of encoded images read."""
    bad: int = 0
    total: int = 0
    """Total images to read: only in the first report, and 0 if unknown."""


Report = Callable[[Progress], None]

_REPORT_SECONDS = 0.2

_AHEAD = 5
"""Maximum results in memory for each worker, while an earlier one is awaited."""

_WATCH_SECONDS = 1.0
"""Interval at which a process checks that its parent lives, on systems without death signals."""

_KEPT_BYTES = 31 << 20
"""Half of the free memory that the allocator keeps for the next images; glibc allows 32 MiB."""

_report: Report | None = None


class Meter:
    """Reports progress from inside a task, whichever process it runs in, a few times a second."""

    def __init__(self) -> None:
        self._unreported = Progress()
        self._reported_at = time.monotonic()

    def add(self, *, images: int = 0, size: int = 0, bad: int = 0) -> None:
        """Count images, their bytes, and how many of them are bad."""
        before = self._unreported
        self._unreported = Progress(before.images + images, before.bytes + size, before.bad + bad)
        if time.monotonic() - self._reported_at >= _REPORT_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Report what is counted; a task ends with this."""
        if _report is not None:
            _report(self._unreported)
        self._unreported = Progress()
        self._reported_at = time.monotonic()


def fork_workers() -> None:
    """Let workers of this process fork: it runs a command, so all of its threads are known.

    A fork takes 0.02 s, a new Python 0.6. It shares its parent's locks, and ends with it.
    """
    global _forks  # noqa: PLW0603 - as the process is
    _forks = sys.platform == "linux"


def worthwhile(workers: int, sizes: Iterable[int]) -> int:
    """Return how many of some processes are of use for tasks of so many bytes each."""
    total = 0
    least = _WORTHWHILE // 8 if _method() == "fork" else _WORTHWHILE
    for size in sizes:
        total += size
        if total >= workers * least:
            return workers
    return max(1, total // max(1, least))


def _method() -> str:
    """Return how worker processes start."""
    may_fork = _forks and threads_may_fork() and not _THREADED & sys.modules.keys()
    return "fork" if may_fork else _START_METHOD


def run_tasks(
    function: Callable[[_Task], _Result],
    tasks: Sequence[_Task],
    *,
    workers: int,
    on_progress: Report | None = None,
) -> Iterator[tuple[_Task, _Result]]:
    """Apply ``function`` to each task, and yield task and result in order of completion.

    Args:
        function: A function of a module, so that a worker process can find it.
        tasks: The tasks, each picklable.
        workers: Number of processes; 1 runs everything in this one.
        on_progress: Called in this process with the progress that tasks count in a `Meter`.

    Raises:
        ShardkitError: If a worker process dies. Errors of tasks are raised unchanged.
    """
    if workers <= 1 or len(tasks) <= 1:
        yield from _run_here(function, tasks, on_progress)
    else:
        yield from _run_in_processes(function, tasks, min(workers, len(tasks)), on_progress)


def _run_here(
    function: Callable[[_Task], _Result], tasks: Sequence[_Task], on_progress: Report | None
) -> Iterator[tuple[_Task, _Result]]:
    global _report  # noqa: PLW0603 - what a task reports to is a property of the process
    previous = _report
    _report = on_progress
    _keep_memory()
    try:
        for task in tasks:
            yield task, function(task)
    finally:
        _report = previous


def _run_in_processes(
    function: Callable[[_Task], _Result],
    tasks: Sequence[_Task],
    workers: int,
    on_progress: Report | None,
) -> Iterator[tuple[_Task, _Result]]:
    waiting: dict[Future[_Result], _Task] = {}
    with _processes_for_work(workers) as (executor, channel):
        for task in tasks:
            waiting[executor.submit(function, task)] = task
        while waiting:
            with _unlocking(waiting):
                done, _ = wait(waiting, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
            _pass_on(channel, on_progress)
            if not done and _dead(executor):
                raise BrokenProcessPool  # the executor does not always notice by itself
            for future in done:
                yield waiting.pop(future), future.result()
        _pass_on(channel, on_progress)
        executor.shutdown()


@contextmanager
def _unlocking(futures: Iterable[Future[Any]]) -> Iterator[None]:
    """Leave no future locked if an exception comes, such as Ctrl-C while `wait` locks all of them.

    The executor's own thread would wait for the lock forever, and Python, at exit, for that thread.
    """
    try:
        yield
    except BaseException:
        for future in futures:
            with suppress(RuntimeError):  # this thread has not locked it
                while True:
                    future._condition.release()
        raise


def run_on(
    executor: Executor, function: Callable[[_Task], _Result], tasks: Iterable[_Task]
) -> Iterator[tuple[_Task, _Result]]:
    """Apply ``function`` to each task by an executor, and yield them in order of completion.

    Waiting tasks are canceled at the end: after an error or Ctrl-C, nobody needs them.

    Raises:
        ShardkitError: If the executor loses the process of a task and does not repeat it.
    """
    waiting = {executor.submit(function, task): task for task in tasks}
    try:
        with _unlocking(waiting):
            for future in as_completed(waiting):
                yield waiting[future], future.result()
    except BrokenExecutor as error:
        raise ShardkitError(
            f"a worker of the executor died, and it did not start another: {error}",
            remedy="Run the same conversion again with a new one: finished work is kept.",
        ) from error
    finally:
        for future in waiting:
            future.cancel()


class Team:
    """This process and its helpers, which share work; from `team`."""

    def __init__(self, workers: int, executor: ProcessPoolExecutor | None = None) -> None:
        self._workers = workers
        self._executor = executor
        self._started = [executor.submit(os.getpid) for _ in range(workers - 1)] if executor else []

    @property
    def ready(self) -> int:
        """Number of processes that can work now: this one, and the helpers that have started."""
        return 1 + sum(future.done() for future in self._started)

    def map_in_order(
        self, function: Callable[[_Task], _Result], tasks: Iterable[_Task]
    ) -> Iterator[_Result]:
        """Apply ``function`` to each task, and yield the results in the order of the tasks.

        This process works alone while the helpers start. Later it takes a task whenever the next
        result is missing. At most a few results per worker are in memory.

        Args:
            function: A function of a module, so that a helper can find it.
            tasks: The tasks, each picklable.
        """
        tasks = iter(tasks)
        if self._executor is None:
            yield from map(function, tasks)
            return
        helpers = self._workers - 1
        for task in tasks if self.ready == 1 else ():
            yield function(task)
            if self.ready > 1:
                break
        waiting: deque[Future[_Result]] = deque()
        while True:
            running = sum(not future.done() for future in waiting)
            for task in itertools.islice(tasks, max(0, 2 * helpers - running)):
                waiting.append(self._executor.submit(function, task))
            if not waiting:
                return
            if not waiting[0].done() and len(waiting) < _AHEAD * self._workers:
                for task in itertools.islice(tasks, 1):
                    waiting.append(Future())
                    waiting[-1].set_result(function(task))
            if waiting[0].done() or not self._wait(waiting[0]):
                yield waiting.popleft().result()

    def map_at_once(
        self, function: Callable[[_Task], _Result], tasks: Sequence[_Task]
    ) -> list[_Result]:
        """Apply ``function`` to the first task here, and to each other one in a helper.

        Args:
            function: A function of a module, so that a helper can find it.
            tasks: The tasks, at most as many as processes are `ready`, each picklable.
        """
        if self._executor is None:
            return [*map(function, tasks)]
        others = [self._executor.submit(function, task) for task in tasks[1:]]
        first = [function(task) for task in tasks[:1]]
        for future in others:
            while self._wait(future):
                pass
        return first + [future.result() for future in others]

    def _wait(self, future: Future[Any]) -> bool:
        """Wait a moment for a result; return whether it is still missing."""
        with _unlocking([future]):
            is_done = bool(wait([future], _POLL_SECONDS).done)
        if is_done:
            return False
        if self._executor and _dead(self._executor):
            raise BrokenProcessPool  # the executor does not always notice by itself
        return True


@contextmanager
def team(workers: int) -> Iterator[Team]:
    """Start helpers of this process, and stop them at the end of the block.

    Args:
        workers: Number of processes, with this one. One worker needs no helper.

    Raises:
        ShardkitError: If a helper dies. Errors of tasks are raised unchanged.
    """
    if workers <= 1:
        yield Team(1)
    else:
        with _processes_for_work(workers - 1) as (executor, _):
            yield Team(workers, executor)


@contextmanager
def _processes_for_work(
    workers: int,
) -> Iterator[tuple[ProcessPoolExecutor, SimpleQueue[Progress]]]:
    """Start processes and a channel for their progress; stop them at the end of the block."""
    if problem := main_problem():
        raise UsageError(
            f"more than one worker cannot be used: {problem}; or use {setting('workers', 1)}"
        )
    guard_helpers()
    executor, channel = _new_executor(workers, shared_turn())
    try:
        yield executor, channel
    except BrokenProcessPool:
        raise ShardkitError(
            f"a worker process died without a message{_cause(executor)}: it was killed, usually "
            "because memory ran out, or a library crashed",
            remedy="Rerun with fewer workers: finished work is kept.",
        ) from None
    finally:
        _end(executor)


def _new_executor(workers: int, turn: Turn) -> tuple[ProcessPoolExecutor, SimpleQueue[Progress]]:
    """Return an executor whose processes start on demand, and a channel for their progress."""
    context = multiprocessing.get_context(_method())
    try:
        channel: SimpleQueue[Progress] = context.SimpleQueue()
        arguments = (channel, os.getpid(), turn)
        return ProcessPoolExecutor(workers, context, _begin, arguments), channel
    except OSError as error:  # of semaphores, which name no file
        if error.errno != errno.ENOSPC:
            raise
        raise ShardkitError(
            "worker processes cannot start: shared memory is full (see `df /dev/shm`; in "
            "Docker: --shm-size)",
            remedy=f"Free some of it, or use {setting('workers', 1)}",
        ) from error


def _begin(channel: SimpleQueue[Progress], parent: int, turn: Turn) -> None:
    """Prepare a worker: it dies with its parent, which alone handles Ctrl-C and a hangup."""
    global _report  # noqa: PLW0603
    _report = channel.put
    join_turn(turn)
    _keep_memory()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork has its parent's handler
    end_with_parent(parent)


def end_with_parent(parent: int) -> None:
    """Kill this process when its parent ends for any reason.

    Args:
        parent: Process ID of the parent.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None:  # pragma: no cover - not Linux
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()
        return
    set_death_signal = 1  # PR_SET_PDEATHSIG, <linux/prctl.h>
    prctl(set_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # pragma: no cover - it died before we asked
        os._exit(1)


def _watch_parent(parent: int) -> None:  # pragma: no cover - not Linux
    """Wait for the end of the parent, then exit: unfinished work is redone anyway."""
    while os.getppid() == parent:
        time.sleep(_WATCH_SECONDS)
    os._exit(1)


@functools.cache  # the second time, glibc would write zeros to what it kept
def _keep_memory() -> None:
    """Let each image reuse the memory of the one before.

    By default glibc returns free memory above 128 KiB and requests it again page by page, which
    took as long as all reading and writing. Its threshold follows the largest block ever freed
    (mallopt(3), M_MMAP_THRESHOLD). Other allocators ignore this. It lasts for the process: up to
    62 MiB of free memory stay allocated.
    """
    bytes(_KEPT_BYTES)  # never touched, so it takes no time


def _pass_on(channel: SimpleQueue[Progress], on_progress: Report | None) -> None:
    while not channel.empty():
        progress = channel.get()
        if on_progress is not None:
            on_progress(progress)


def _end(executor: ProcessPoolExecutor) -> None:
    """Kill all processes: after an error or Ctrl-C, nobody waits for running tasks.

    The executor's thread ends then, too. Python wakes it up at exit, which fails if it just ends.
    """
    processes = _processes(executor)
    thread: Any = executor._executor_manager_thread  # None if no task was submitted
    executor.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
    if thread is not None:
        thread.join()


def _processes(executor: ProcessPoolExecutor) -> list[Any]:
    """Return the executor's processes; it has no public name for them before Python 3.14."""
    return list((executor._processes or {}).values())


def _dead(executor: ProcessPoolExecutor) -> list[int]:
    """Return the exit codes of processes that ended too early."""
    return [code for process in _processes(executor) if (code := process.exitcode) is not None]


def _cause(executor: ProcessPoolExecutor) -> str:
    """Return the name of the signal that killed a process, if known."""
    # The others are ended by the executor, with SIGTERM.
    codes = {-code for code in _dead(executor) if code < 0} - {signal.SIGTERM}
    return f" ({signal.Signals(min(codes)).name})" if codes else ""
