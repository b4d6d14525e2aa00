"""Where tasks run: in worker processes of this machine, or on those of an executor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, TypeVar

from shardkit.contracts import PartedSource, Scan, Source, scan_source
from shardkit.conversion.parted_scan import Listed, ListTask, list_part, scan_in_parts
from shardkit.conversion.task import Built, Task, carry_out
from shardkit.errors import located
from shardkit.options import option, require_valid
from shardkit.system.late import load
from shardkit.system.pool import Progress, Report, run_tasks, worthwhile

_Task = TypeVar("_Task", bound=Task)

_RUN_ON = "shardkit.system.processes:run_on"


@dataclass(frozen=True, kw_only=True)
class Processes:
    """Worker processes."""

    HEADING: ClassVar[str] = "Running"

    workers: int = option(
        1,
        help="Number of processes; small jobs use fewer. The result does not depend on it.",
        metavar="N",
        minimum=1,
        shown="number of CPUs",
    )
    on_progress: Report | None = option(
        None, help="Called with the work done since the last call.", is_keyword_only=True
    )

    def __post_init__(self) -> None:
        require_valid(self)

    def expect(self, images: int) -> None:
        """Report the number of images to come."""
        if self.on_progress is not None:
            self.on_progress(Progress(total=images))


@dataclass(frozen=True, kw_only=True)
class Builder(Processes):
    """Where shards are built: in worker processes, or by an executor."""

    executor: Executor | None = option(
        None,
        help="Builds the shards instead of ``workers``, one per call: any executor whose "
        "processes see the paths of source and target, such as the executor of a Dask client.",
        is_keyword_only=True,
    )
    facts: bool = option(
        False,
        help="Also measure the images for `shardkit.report`, as ``facts.npy``, which is not part "
        "of the dataset.",
        is_keyword_only=True,
    )

    def run(self, done: list[_Task], tasks: list[_Task]) -> Iterator[tuple[_Task, Built]]:
        """Carry out tasks; yield them as they are finished.

        ``done`` are tasks that an earlier run seems to have finished.
        """
        if self.executor is None:
            sizes = (sum(task.source.numbers("bytes")) for task in tasks)
            workers = worthwhile(self.workers, sizes)
            tasks = done + _spread(tasks, workers)
            yield from run_tasks(carry_out, tasks, workers=workers, on_progress=self.on_progress)
            return
        for task, built in load(_RUN_ON)(self.executor, _carry_out_elsewhere, done + tasks):
            if self.on_progress is not None:
                size = sum(task.source.numbers("bytes"))
                self.on_progress(Progress(len(task.source), size, len(built.result.bad)))
            yield task, built

    def scan(
        self,
        source: Source,
        folder: Path,
        classes: Sequence[str] | None = None,
        seed_of: Callable[[Scan], int | None] = lambda _: None,
    ) -> Scan:
        """Return the scan of a source: if it has parts, as `scan_in_parts` does.

        ``folder`` is empty, receives files, and must remain while the scan is used.
        ``seed_of`` returns the seed of the stored order of parts; None keeps that of the source.
        """
        if not isinstance(source, PartedSource):
            return scan_source(source, classes)
        with located(source):
            return scan_in_parts(source, folder, seed_of, self._list_parts, classes)

    def _list_parts(self, tasks: Sequence[ListTask]) -> Iterator[tuple[ListTask, Listed]]:
        """List the parts of a source; the first here, since other processes take time to start."""
        finished = images = 0
        for task, listed in run_tasks(list_part, tasks, workers=1, on_progress=self.on_progress):
            yield task, listed
            finished += 1
            images += listed.images
            if images > _FEW:
                break
        remaining = tasks[finished:]
        if self.executor is None:
            yield from run_tasks(
                list_part, remaining, workers=self.workers, on_progress=self.on_progress
            )
            return
        for task, listed in load(_RUN_ON)(self.executor, list_part, remaining):
            if self.on_progress is not None:
                self.on_progress(Progress(listed.images))
            yield task, listed


_FEW = 100_000
"""Images that one process lists before others are started."""


def _carry_out_elsewhere(task: Task) -> Built:
    """Carry out a task on a machine that may have other libraries."""
    task.require_same_machine()
    return carry_out(task)


def _spread(tasks: list[_Task], workers: int) -> list[_Task]:
    """Assign the processes that would be idle at the end to the last shards."""
    last = len(tasks) % workers
    first = len(tasks) - last
    return tasks[:first] + [
        replace(task, workers=workers // last + (position < workers % last))
        for position, task in enumerate(tasks[first:])
    ]
