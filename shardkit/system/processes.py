"""Worker processes that end with the work, with an error, or with their parent."""

from __future__ import annotations

import ctypes
import errno
import itertools
import multiprocessing
import os
import signal
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
from typing import Any, TypeVar

from shardkit.errors import ShardkitError, UsageError, setting
from shardkit.system.bootstrap import guard_helpers, main_problem
from shardkit.system.pool import Progress, Report, Team, keep_memory, report_to, start_method
from shardkit.system.turns import Turn, join_turn, shared_turn

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")

_POLL_SECONDS = 0.1
"""Interval of progress reports while no task finishes."""

_AHEAD = 5
"""Maximum results in memory for each worker, while an earlier one is awaited."""

_WATCH_SECONDS = 1.0
"""Interval at which a process checks that its parent lives, on systems without death signals."""


def run_in_processes(
    function: Callable[[_Task], _Result],
    tasks: Sequence[_Task],
    workers: int,
    on_progress: Report | None,
) -> Iterator[tuple[_Task, _Result]]:
    """Do what `shardkit.system.pool.run_tasks` does, in several processes."""
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


class _HelpedTeam(Team):
    """This process and its helpers."""

    def __init__(self, workers: int, executor: ProcessPoolExecutor) -> None:
        self._workers = workers
        self._executor = executor
        self._started = [executor.submit(os.getpid) for _ in range(workers - 1)]

    @property
    def ready(self) -> int:  # type: ignore[override]
        """Number of processes that can work now."""
        return 1 + sum(future.done() for future in self._started)

    def map_in_order(
        self, function: Callable[[_Task], _Result], tasks: Iterable[_Task]
    ) -> Iterator[_Result]:
        """Apply ``function`` to each task; see `Team`."""
        tasks = iter(tasks)
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
        """Apply ``function`` to each task; see `Team`."""
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
        if _dead(self._executor):
            raise BrokenProcessPool  # the executor does not always notice by itself
        return True


@contextmanager
def helped_team(workers: int) -> Iterator[Team]:
    """Start the helpers of a team, and stop them at the end of the block."""
    with _processes_for_work(workers - 1) as (executor, _):
        yield _HelpedTeam(workers, executor)


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
    context = multiprocessing.get_context(start_method())
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
    report_to(channel.put)
    join_turn(turn)
    keep_memory()
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
