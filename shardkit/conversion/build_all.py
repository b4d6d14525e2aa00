"""Build the shards of all splits, here or elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardkit.conversion.build import Built, ShardResult, ShardTask, build_shard, load_result
from shardkit.conversion.disk import DiskReservation
from shardkit.conversion.jobs import require_done, require_same_software, shard_task
from shardkit.conversion.parted_scan import Listed, ListTask, list_part
from shardkit.conversion.plan import Plan, SplitPlan
from shardkit.conversion.recipe import TOO_SMALL
from shardkit.conversion.staging import StagingDirectory
from shardkit.dataset.manifest import ShardEntry
from shardkit.errors import BadImages, DiskFull, Problem
from shardkit.system.files import as_name
from shardkit.system.pool import Progress, Report, run_on, run_tasks


@dataclass
class Work:
    """One split in progress."""

    plan: SplitPlan
    folder: Path
    tasks: list[ShardTask]
    first: int = 0
    """Number of the first shard."""
    entries: dict[int, ShardEntry | None] = field(default_factory=dict)
    """The finished shards by number; None if bad images prevented it."""
    bad: list[Problem] = field(default_factory=list)
    fields: Counter[str] = field(default_factory=Counter)
    labels: Counter[int] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)

    def add(self, task: ShardTask, result: ShardResult) -> None:
        """Add a finished shard. The counts of each shard, of thousands of labels, are not kept."""
        self.entries[task.number] = result.entry
        self.bad += result.bad
        self.fields.update(result.fields)
        self.labels.update(result.labels)
        self.notes.update(result.notes)

    def bytes_of(self, task: ShardTask) -> int:
        """Return the approximate bytes of a shard on disk."""
        return self.plan.shard_bytes[task.number - self.first]


def prepare(
    split: SplitPlan,
    plan: Plan,
    staging: StagingDirectory,
    above: Path | None = None,
    first: int = 0,
) -> Work:
    """Return the work to build the shards of a split.

    Args:
        split: The plan of the split.
        plan: The plan.
        staging: The staging directory.
        above: Folder for the folder of the split; None is that of the dataset.
        first: Number of the first shard.
    """
    folder = (above or staging.dataset) / as_name(split.name)
    folder.mkdir(parents=True, exist_ok=True)
    tasks = [
        replace(
            shard_task(plan, split, first + number, split.shard_source(number), staging),
            folder=folder,
        )
        for number in range(split.shards)
    ]
    return Work(split, folder, tasks, first)


@dataclass(frozen=True)
class Builder:
    """Where shards are built: in worker processes, or by an executor."""

    workers: int
    executor: Executor | None
    report: Report | None
    facts: bool = False
    """Whether images are measured on the way."""

    def run(
        self, done: list[ShardTask], tasks: list[ShardTask]
    ) -> Iterator[tuple[ShardTask, Built]]:
        """Build all shards; yield them as they are finished.

        Args:
            done: Tasks that an earlier run seems to have finished.
            tasks: The others.
        """
        if self.facts:
            tasks = [replace(task, facts=True) for task in tasks]
        if self.executor is None:
            tasks = done + _spread(tasks, self.workers)
            yield from run_tasks(build_shard, tasks, workers=self.workers, on_progress=self.report)
            return
        for task, built in run_on(self.executor, _build_elsewhere, done + tasks):
            if self.report is not None:
                size = sum(task.source.sizes())
                self.report(Progress(len(task.source), size, len(built.result.bad)))
            yield task, built

    def list_parts(self, tasks: Sequence[ListTask]) -> Iterator[tuple[ListTask, Listed]]:
        """List the parts of a source; the first here, since other processes take time to start."""
        done = images = 0
        for task, listed in run_tasks(list_part, tasks, workers=1, on_progress=self.report):
            yield task, listed
            done += 1
            images += listed.images
            if images > _FEW:
                break
        rest = tasks[done:]
        if self.executor is None:
            yield from run_tasks(list_part, rest, workers=self.workers, on_progress=self.report)
            return
        for task, listed in run_on(self.executor, list_part, rest):
            if self.report is not None:
                self.report(Progress(listed.images))
            yield task, listed


_FEW = 100_000
"""Images that one process lists before others are started."""


def _build_elsewhere(task: ShardTask) -> Built:
    """Build a shard on a machine that may have other libraries."""
    require_same_software(task)
    return build_shard(task)


def collect(works: list[Work], staging: StagingDirectory) -> None:
    """Load the results of all shards, which jobs have built.

    Raises:
        ConversionFailed: If shards are missing.
    """
    tasks = [(work, task) for work in works for task in work.tasks]
    missing = []
    for number, (work, task) in enumerate(tasks):
        if (result := load_result(task)) is None:
            missing.append(number)
        else:
            work.add(task, result)
    require_done(missing, len(tasks), staging.target)
    staging.prune({task.path for _, task in tasks})


def build(works: list[Work], plan: Plan, staging: StagingDirectory, builder: Builder) -> int:
    """Build all shards; return the number of shards kept from an earlier run.

    Raises:
        BadImages: If images are bad, and may not or cannot be left out.
        DiskFull: If the disk lacks space.
    """
    of_split = {work.plan.name: work for work in works}
    done, tasks = _divide([task for work in works for task in work.tasks])
    staging.prune({task.path for task in done})
    needs = [0] * len(done) + [of_split[t.split].bytes_of(t) for t in tasks]
    recipe = plan.options.recipe
    ahead, copies = builder.workers, plan.storage.copies
    space = DiskReservation(staging.folder, needs, ahead=ahead, copies=copies)
    kept = 0
    kept_as_it_is = recipe.keeps_bytes and plan.scan.exact_sizes
    with space.reserved(exact=kept_as_it_is or recipe.raw_shape is not None):
        try:
            for task, built in builder.run(done, tasks):
                of_split[task.split].add(task, built.result)
                kept += built.kept
                entry = built.result.entry
                space.release(entry.bytes if entry and not built.kept else 0)
        except DiskFull as error:
            raise DiskFull(f"{error} {space.need()}") from error
    require_good(works, plan, staging)
    return kept


def _divide(tasks: list[ShardTask]) -> tuple[list[ShardTask], list[ShardTask]]:
    """Return the tasks that an earlier run seems to have finished, and the others."""
    done: list[ShardTask] = []
    others: list[ShardTask] = []
    for task in tasks:
        (done if load_result(task) else others).append(task)
    return done, others


def _spread(tasks: list[ShardTask], workers: int) -> list[ShardTask]:
    """Assign the processes that would be idle at the end to the last shards."""
    last = len(tasks) % workers
    whole = len(tasks) - last
    return tasks[:whole] + [
        replace(task, workers=workers // last + (position < workers % last))
        for position, task in enumerate(tasks[whole:])
    ]


def require_good(works: list[Work], plan: Plan, staging: StagingDirectory) -> None:
    """Raise if images are bad, unless they may be left out and others remain."""
    problems = [
        Problem(path="/".join(filter(None, (work.plan.name, problem.path))), reason=problem.reason)
        for work in works
        for problem in problems_of(work, plan)
    ]
    entries = [entry for work in works for entry in work.entries.values()]
    made = [entry for entry in entries if entry is not None and entry.rows]
    skip = plan.options.on_error == "skip"
    if not problems or (skip and made):
        return
    count = f"{len(problems)} bad file{'s' if len(problems) > 1 else ''}"
    small = sum(TOO_SMALL in problem.reason for problem in problems)
    if small:
        count += f", {small} of them too small ({TOO_SMALL} accepts these)"
    if skip or not made:
        staging.discard()
        remedy = "No good image is left." if skip else f"{_FIX}."
        message = f"{count}; nothing was written. {remedy}"
    else:
        staging.save_bad_files([problem.path for problem in problems])
        kept = f"{len(made)} shard{'s' if len(made) > 1 else ''} without bad files"
        message = (
            f"{count}; no dataset was written. {_FIX}: a rerun reuses {kept} unless files are "
            "removed, since each shard records the total number of images. (To give up, remove "
            f"{staging.folder}.)"
        )
    error = BadImages(f"{message} The first is {problems[0].path}: {problems[0].reason}")
    error.problems = tuple(problems)
    raise error


_FIX = "Fix bad files, or leave them out with --on-error skip"


def problems_of(work: Work, plan: Plan) -> list[Problem]:
    """Return the bad files of a split, by path."""
    found = [*plan.scan.problems.get(work.plan.name, ()), *work.bad]
    return sorted(found, key=lambda problem: problem.path)
