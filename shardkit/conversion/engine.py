"""The engine of all conversions: carry out tasks, assemble their results, publish the dataset.

`convert`, `append`, `merge` and `attach` plan: they decide on the tasks, or on the shards to link.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from shardkit.conversion.assemble import Assembly, ShardGroup
from shardkit.conversion.build import ShardTask
from shardkit.conversion.build_all import Builder
from shardkit.conversion.disk import DiskReservation
from shardkit.conversion.observers import save_observed
from shardkit.conversion.plan import Plan, SplitPlan
from shardkit.conversion.staging import StagingDirectory
from shardkit.conversion.task import Built, ShardResult, Task, load_result
from shardkit.dataset.index import Index, IndexSegment
from shardkit.dataset.manifest import Manifest, PartEntry, ShardEntry
from shardkit.dataset.parts import CHANGED, source_of
from shardkit.errors import BadImages, DiskFull, Problem, setting
from shardkit.recipe import TOO_SMALL

_Task = TypeVar("_Task", bound=Task)


@dataclass
class Work(Generic[_Task]):
    """One dataset in progress: its tasks and their results."""

    split: str
    folder: Path
    """Folder of the dataset."""
    tasks: Sequence[_Task]
    problems: Collection[Problem] = ()
    """Files that the scan could not list."""
    ignored: Iterable[Problem] = ()
    """Files of the source that are not images."""
    results: dict[Path, ShardResult] = field(default_factory=dict)
    """The result of each finished task, by the folder of its part."""
    indexes: dict[Path, tuple[Index, range]] = field(default_factory=dict)
    """Where the index of a task is, by its folder, if it is not there: an index and rows of it."""

    @property
    def shards(self) -> list[ShardEntry]:
        """The finished shards, in order."""
        entries = (self.results[task.result_folder].entry for task in self.tasks)
        return [entry for entry in entries if entry is not None]

    @property
    def skipped(self) -> list[Problem]:
        """The bad files, by path."""
        bad = [problem for result in self.results.values() for problem in result.bad]
        return sorted([*self.problems, *bad], key=lambda problem: problem.path)

    def of(self, tasks: Sequence[_Task]) -> Work[_Task]:
        """Return the work of some of its finished tasks."""
        results = {task.result_folder: self.results[task.result_folder] for task in tasks}
        return replace(self, tasks=tasks, results=results, problems=(), ignored=())

    def group(self) -> ShardGroup:
        """Return what an assembly needs of the finished shards."""
        notes = Counter[str]()
        for result in self.results.values():
            notes.update(result.notes)
        return ShardGroup(
            shards=self.shards,
            index=self._index(),
            notes=notes,
            skipped=self.skipped,
            ignored=self.ignored,
        )

    def _index(self) -> Iterator[IndexSegment]:
        for task, shard in zip(self.tasks, self.shards, strict=True):
            here = Index(task.result_folder, shard.rows, task.schema), range(shard.rows)
            index, rows = self.indexes.get(task.result_folder, here)
            yield from index.segments(rows)


ShardWork = Work[ShardTask]
"""One dataset whose shards are built."""


def shard_task(
    plan: Plan, split: SplitPlan, shard: int, staging: StagingDirectory, *, first: int = 0
) -> ShardTask:
    """Return the task that builds a shard in a staging directory.

    ``shard`` is its position in the plan of the split, ``first`` the number of that plan's first
    shard.
    """
    number = first + shard
    return ShardTask(
        split=split.name,
        number=number,
        folder=staging.folder_of(split.name),
        result_folder=staging.result_folder(split.name, number),
        format=plan.options.to,
        recipe=plan.options.recipe,
        schema=plan.scan.schema,
        source=split.shard_source(shard),
        meta=split.meta_of(shard),
        software=plan.software,
        keep=plan.options.on_error == "skip",
    )


def prepare(
    split: SplitPlan,
    plan: Plan,
    staging: StagingDirectory,
    *,
    first: int = 0,
    observer: str = "",
) -> ShardWork:
    """Return the work to build the shards of a split.

    ``first`` is the number of its first shard, ``observer`` the file of an observer of the images.
    """
    folder = staging.folder_of(split.name)
    folder.mkdir(parents=True, exist_ok=True)
    tasks = [shard_task(plan, split, shard, staging, first=first) for shard in range(split.shards)]
    return Work(
        split.name,
        folder,
        [replace(task, observer=observer) for task in tasks],
        problems=plan.scan.problems.get(split.name, ()),
        ignored=plan.scan.ignored.get(split.name, ()),
    )


def run(works: Sequence[Work[_Task]], builder: Builder) -> Iterator[tuple[_Task, Built]]:
    """Carry out all tasks without a result; add and yield the results."""
    done, tasks = divide(works)
    work_of = {task.result_folder: work for work in works for task in work.tasks}
    for task, built in builder.run(done, tasks):
        work_of[task.result_folder].results[task.result_folder] = built.result
        yield task, built


def divide(works: Sequence[Work[_Task]]) -> tuple[list[_Task], list[_Task]]:
    """Return the tasks without a result: those that an earlier run seems to have finished first."""
    done: list[_Task] = []
    others: list[_Task] = []
    for work in works:
        for task in work.tasks:
            if task.result_folder not in work.results:
                # Not yet compared with its digests: the task does that when it is carried out.
                (done if load_result(task) else others).append(task)
    return done, others


Build = Callable[[Sequence[ShardWork], Plan, StagingDirectory, Builder], int]
"""Makes all shards, as `build` does."""


def build(
    works: Sequence[ShardWork], plan: Plan, staging: StagingDirectory, builder: Builder
) -> int:
    """Build all shards; return the number of shards kept from an earlier run.

    BadImages if images are bad, and may not or cannot be left out; DiskFull if the disk lacks
    space.
    """
    sizes = {
        task.result_folder: size
        for work, split in zip(works, plan.splits, strict=True)
        for task, size in zip(work.tasks, split.shard_bytes, strict=True)
    }
    done, tasks = divide(works)
    staging.prune({task.path for task in done})
    needs = [0] * len(done) + [sizes[task.result_folder] for task in tasks]
    recipe = plan.options.recipe
    copies = plan.storage.copies
    space = DiskReservation(staging.folder, needs, ahead=builder.workers, copies=copies)
    kept = 0
    kept_as_it_is = recipe.keeps_bytes and plan.scan.exact_sizes
    with space.reserved(exact=kept_as_it_is or recipe.raw_shape is not None):
        try:
            for _, built in run(works, builder):
                kept += built.kept
                entry = built.result.entry
                space.release(entry.bytes if entry and not built.kept else 0)
        except DiskFull as error:
            raise DiskFull(error.problem, remedy=f"{error.remedy} {space.need()}") from error
    require_good(works, plan, staging)
    return kept


def require_good(works: Sequence[ShardWork], plan: Plan, staging: StagingDirectory) -> None:
    """Raise if images are bad, unless they may be left out and others remain."""
    problems = [
        Problem(path="/".join(filter(None, (work.split, problem.path))), reason=problem.message)
        for work in works
        for problem in work.skipped
    ]
    shards = sum(shard.rows > 0 for work in works for shard in work.shards)
    skip = plan.options.on_error == "skip"
    if not problems or (skip and shards):
        return
    count = f"{len(problems)} bad file{'s' if len(problems) > 1 else ''}"
    small = sum("enlarge" in problem.settings for problem in problems)
    if small:
        count += f", {small} of them too small ({TOO_SMALL} accepts these)"
    first = f"The first is {problems[0].path}: {problems[0].message}"
    if skip or not shards:  # nothing that a rerun could reuse
        staging.discard()
    if skip:
        error = BadImages(f"{count}; nothing was written. No good image is left. {first}")
    elif not shards:
        error = BadImages(f"{count}; nothing was written", remedy=f"{_FIX}. {first}")
    else:
        staging.save_bad_files([problem.path for problem in problems])
        kept = "the shard" if shards == 1 else f"the {shards} shards"
        error = BadImages(
            f"{count}; no dataset was written",
            remedy=f"{_FIX}. A rerun reuses {kept} without bad files. If you remove files, it "
            f"rebuilds all shards. (To give up, remove {staging.folder}.) {first}",
        )
    error.problems = tuple(problems)
    error.where = str(plan.scan.source)
    raise error


_FIX = f"Fix bad files, or leave them out with {setting('on_error', 'skip')}"


def assembly(work: ShardWork, plan: Plan) -> Assembly:
    """Return the assembly of a split's dataset, without its shards."""
    split = plan.split(work.split)
    return Assembly(
        folder=work.folder,
        format=plan.options.to,
        schema=plan.scan.schema,
        raw_shape=plan.options.recipe.raw_shape,
        recipe=split.recipe,
        source=split.meta["source"],
        software=plan.software,
    )


class Parts(NamedTuple):
    """Finished shards by the source that they were made from."""

    groups: list[ShardGroup]
    entries: list[PartEntry]


def dataset_parts(work: ShardWork, plan: Plan, *, first: int = 0) -> Parts:
    """Return the finished shards by their sources: those of a dataset, if it was copied."""
    split = plan.split(work.split)
    classes = None if plan.scan.classes is None else len(plan.scan.classes)
    if split.original is None:
        parts = [(work.group(), split.meta["source"], plan.software, first)]
    else:
        parts = []
        storage_software = {name: plan.software[name] for name in plan.storage.libraries}
        ignored = split.original.ignored
        for part, rows in zip(split.original.parts, itertools.pairwise(split.starts), strict=True):
            start, stop = (bisect.bisect_left(split.cuts, row) for row in rows)
            group = work.of(work.tasks[start:stop]).group()
            skipped = [*part.skipped, *group.skipped]
            group = replace(group, skipped=skipped, ignored=() if parts else ignored)
            parts.append((group, part.source, {**part.software, **storage_software}, first + start))
    entries = [
        PartEntry(
            shards=len(group.shards),
            first=start,
            classes=classes,
            skipped=len(group.skipped),
            source=source,
            software=software,
        )
        for group, source, software, start in parts
    ]
    return Parts([group for group, *_ in parts], entries)


def finish(work: ShardWork, plan: Plan) -> Manifest:
    """Write the other files of a split's dataset, and return its manifest.

    A copy of a dataset states how that was made.
    """
    built = zip(work.tasks, work.shards, strict=True)
    save_observed(work.folder, [(task.result_folder, shard.rows) for task, shard in built])
    groups, entries = dataset_parts(work, plan)
    source = source_of(entries) if len(entries) > 1 else entries[0].source
    split = plan.split(work.split)
    if split.original is not None and CHANGED in split.original.source:
        source = {**source, CHANGED: split.original.source[CHANGED]}
    described = replace(assembly(work, plan), source=source, software=entries[-1].software)
    return described.finish(groups)
