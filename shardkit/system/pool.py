"""Run tasks in this process, or in workers: `shardkit.system.processes`, loaded when needed."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, TypeVar

from shardkit.system.bootstrap import threads_may_fork
from shardkit.system.late import load

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")

_START_METHOD = "spawn"
"""A child starts without its parent's locks, threads and open files. Tests use a fork server."""

_THREADED = {"obstore", "pyarrow", "torch"}
"""Libraries whose threads a fork would lack."""

_WORTHWHILE = 32 << 20
"""Bytes of images from which another process takes less time than a new Python needs to start."""

_forks = False


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

_KEPT_BYTES = 31 << 20
"""Half of the free memory that the allocator keeps for the next images; glibc allows 32 MiB."""

_report: Report | None = None

_PROCESSES = "shardkit.system.processes"


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
    least = _WORTHWHILE // 8 if start_method() == "fork" else _WORTHWHILE
    for size in sizes:
        total += size
        if total >= workers * least:
            return workers
    return max(1, total // max(1, least))


def start_method() -> str:
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
        workers = min(workers, len(tasks))
        yield from load(f"{_PROCESSES}:run_in_processes")(function, tasks, workers, on_progress)


def _run_here(
    function: Callable[[_Task], _Result], tasks: Sequence[_Task], on_progress: Report | None
) -> Iterator[tuple[_Task, _Result]]:
    global _report  # noqa: PLW0603 - what a task reports to is a property of the process
    previous = _report
    _report = on_progress
    keep_memory()
    try:
        for task in tasks:
            yield task, function(task)
    finally:
        _report = previous


def report_to(report: Report) -> None:
    """Report progress in this process, a worker, by a function."""
    global _report  # noqa: PLW0603
    _report = report


@functools.cache  # the second time, glibc would write zeros to what it kept
def keep_memory() -> None:
    """Let each image reuse the memory of the one before.

    By default glibc returns free memory above 128 KiB and requests it again page by page, which
    took as long as all reading and writing. Its threshold follows the largest block ever freed
    (mallopt(3), M_MMAP_THRESHOLD). Other allocators ignore this. It lasts for the process: up to
    62 MiB of free memory stay allocated.
    """
    bytes(_KEPT_BYTES)  # never touched, so it takes no time


class Team:
    """Processes that share work: this one, from `team`, or its helpers, too."""

    ready = 1
    """Number of processes that can work now: this one, and the helpers that have started."""

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
        yield from map(function, tasks)

    def map_at_once(
        self, function: Callable[[_Task], _Result], tasks: Sequence[_Task]
    ) -> list[_Result]:
        """Apply ``function`` to the first task here, and to each other one in a helper.

        There are at most as many tasks as processes are `ready`; else, as in `map_in_order`.
        """
        return [*map(function, tasks)]


def team(workers: int) -> AbstractContextManager[Team]:
    """Start helpers of this process, and stop them at the end of the block.

    Args:
        workers: Number of processes, with this one. One worker needs no helper.

    Raises:
        ShardkitError: If a helper dies. Errors of tasks are raised unchanged.
    """
    if workers <= 1:
        return nullcontext(Team())
    helped: AbstractContextManager[Team] = load(f"{_PROCESSES}:helped_team")(workers)
    return helped
