"""Plan a conversion for jobs, build its tasks with `work`, and commit the dataset."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shardkit.cluster.jobs import (
    Jobs,
    open_jobs,
    receive_results,
    require_done,
    require_free,
    send_plan,
)
from shardkit.cluster.ledger import local_folder, open_ledger
from shardkit.cluster.plan_files import is_planned, load_plan, save_plan
from shardkit.contracts import Source
from shardkit.conversion.build import ShardTask
from shardkit.conversion.build_all import Builder
from shardkit.conversion.convert import (
    Asked,
    Converted,
    Request,
    open_target,
    plan_source,
    publish_plan,
)
from shardkit.conversion.engine import Work, require_good
from shardkit.conversion.fingerprint import saved_digest
from shardkit.conversion.plan import Plan
from shardkit.conversion.staging import (
    StagingDirectory,
    finish_interrupted,
    open_staging,
    refuse_overlap,
)
from shardkit.conversion.task import Built, load_result
from shardkit.dataset.manifest import MANIFEST_NAME, Manifest
from shardkit.dataset.opened import OpenedDirectory
from shardkit.errors import BadImages, UsageError, setting
from shardkit.options import option, require_valid, same_option, takes
from shardkit.recipe import Recipe
from shardkit.remote.bucket import committed_at
from shardkit.system.safe_paths import is_file
from shardkit.system.text import amount
from shardkit.system.urls import as_url


@takes(Asked)
def plan_jobs(
    options: Asked, source: str | Path | Any, target: str | Path, *, recipe: Recipe | None = None
) -> Converted:
    """Write only the plan into ``target``, for ``shardkit work`` and then `commit`.

    All jobs share ``target``, a directory or a URL; ``staging`` is optional.
    ``workers`` or ``executor`` list a folder of images, in memory that does not grow with it.

    Args:
        source: See `shardkit.convert`, as for all arguments.
        target: The directory or URL.
        recipe: The image options, as one object instead of keywords.

    Returns:
        The plan and its number of jobs.

    Raises:
        UsageError: If an option is invalid, or ``target`` cannot be used.
    """
    request = options.open(source, recipe)
    placement = request.placement
    url = as_url(target)
    if url is None:
        return _write_plan(request, open_target(target, placement).folder)
    if request.builder.executor is not None:
        raise UsageError(
            f"for {url}, this machine alone writes the plan", remedy="leave out the cluster"
        )
    require_free(url)
    with local_folder(placement.staging) as folder:
        planned = _write_plan(request, folder)
        send_plan(folder, url, force=placement.force)
    return planned


def _write_plan(request: Request, target: Path) -> Converted:
    source, options, builder, placement = request
    make = partial(plan_source, source, options, builder)
    return write_plan(source, target, make, force=placement.force)


def write_plan(
    source: Source, target: Path, make: Callable[[Path], Plan], *, force: bool
) -> Converted:
    """Write the plan for jobs into ``target``; see `plan_jobs`.

    ``make`` returns the plan, given an empty folder for files that last until it is written.
    ``force`` replaces a dataset in ``target``, or discards another unfinished conversion.
    """
    refuse_overlap(source, target)
    with open_staging(target, force=force) as staging, staging.scratch() as folder:
        plan = make(folder)
        jobs = save_plan(plan, Path(str(plan.scan.source)), staging, force=force)
    return Converted(plan=load_plan(target), jobs=jobs)


@dataclass(frozen=True, kw_only=True)
class WorkOptions:
    """The options of `work`."""

    task: int | None = option(None, help="Build the shard of this task.", metavar="N", minimum=0)
    claim: bool = option(False, help="Build unclaimed tasks until none is left.")
    take_over: bool = option(
        False,
        help=f"With {setting('claim')}, also build tasks that other jobs claimed but have not "
        "finished. At worst a task runs twice, which does no harm.",
    )
    source: str | Path | None = option(
        None,
        help="Path of the source on this machine, if it differs from the plan. If a function "
        "provides the images, use MODULE:FUNCTION@PATH.",
        metavar="SRC",
    )
    kind: str | None = option(
        None,
        help="Kind of source, if a package other than shardkit provides it. A plan alone cannot "
        "select such code.",
        metavar="KIND",
    )
    staging: str | Path | None = option(
        None,
        help="If DST is a URL: folder for the shard that is being built.",
        metavar="DIR",
        shown="temporary folder",
    )
    on_open: Callable[[Jobs], None] | None = option(
        None,
        help="Called with the plan, before anything of its source is read.",
        is_keyword_only=True,
    )
    on_task: Callable[[int, int, Built], None] | None = option(
        None,
        help="Called with a task's number, the number of all tasks, and the outcome.",
        is_keyword_only=True,
    )

    def __post_init__(self) -> None:
        require_valid(self)
        if self.take_over and not self.claim:
            raise UsageError(f"{setting('take_over')} requires {setting('claim')}")
        if self.task is not None and self.claim:
            raise UsageError(
                f"{setting('task')} and {setting('claim')} cannot be combined", remedy="choose one"
            )


@takes(WorkOptions)
def work(options: WorkOptions, target: str | Path) -> dict[int, Built]:
    """Build shards of the conversion that `plan_jobs` planned, in this process.

    If the target is a URL, each shard is uploaded, then removed here. Repeat an interrupted call to
    resume it.

    Args:
        target: The directory or URL for which `plan_jobs` wrote a plan.

    Returns:
        The outcome of each task that was built here, or was done already; by number.

    Raises:
        UsageError: If there is no plan, it is damaged, its source is missing or of another package,
            there is no such task, or this machine would write other bytes.
        BadImages: If images are bad and ``on_error`` of the plan is ``fail``. Tasks without bad
            images are done.
        ConversionFailed: If a shard cannot be written.
        ShardkitError: If a store cannot be used.
    """
    source = None if options.source is None else Path(options.source)
    staging = None if options.staging is None else Path(options.staging)
    outcomes: dict[int, Built] = {}
    with open_jobs(target, source, staging, options.kind) as jobs:
        if options.task is None and not options.claim:
            raise UsageError(
                f"choose {setting('task')} or {setting('claim')}; outside Slurm, no task number "
                "is given"
            )
        if options.on_open is not None:
            options.on_open(jobs)
        jobs.open()
        with contextlib.ExitStack() as claims:
            numbers: Iterable[int] = (options.task or 0,)
            if options.claim:  # after an error, its claim ends here, not in the garbage collector
                claimed = jobs.claimed(take_over=options.take_over)
                numbers = claims.enter_context(contextlib.closing(claimed))
            for number in numbers:
                outcomes[number] = jobs.build(number)
                if options.on_task is not None:
                    options.on_task(number, len(jobs), outcomes[number])
    unbuilt = [built.result for built in outcomes.values() if built.result.entry is None]
    problems = [problem for result in unbuilt for problem in result.bad]
    if problems:
        error = BadImages(
            amount(len(problems), "bad file"),
            remedy="Fix bad files, or plan again with --on-error skip --force.",
        )
        error.problems = tuple(problems)
        raise error
    return outcomes


@dataclass(frozen=True, kw_only=True)
class CommitOptions:
    """The options of `commit`."""

    force: bool = option(False, help="Replace the dataset in DST, if it is local.")
    staging: str | Path | None = same_option(
        WorkOptions, "staging", help="If DST is a URL: folder for index and manifest."
    )

    def __post_init__(self) -> None:
        require_valid(self)


@takes(CommitOptions)
def commit(options: CommitOptions, target: str | Path) -> Converted:
    """Publish the dataset whose shards `shardkit work` built; reads no image and no shard.

    Repeat it if it was interrupted. Repeating a finished call does nothing.

    Args:
        target: The directory or URL for which `plan_jobs` wrote a plan.

    Raises:
        UsageError: If there is no plan, or ``target`` cannot be used.
        ConversionFailed: If shards are missing. The message names their tasks.
        ShardkitError: If the store cannot be used.
    """
    force = options.force
    staging = options.staging
    url = as_url(target)
    if url is None and staging is not None:
        raise UsageError(f"{target} is local;", remedy=f"{setting('staging')} is for a URL")
    if url is not None and force:
        raise UsageError(
            f"{target}",
            remedy=f"{setting('force', True)} replaces only local datasets; plan for another URL",
        )
    if url is not None:
        manifests = committed_at(url)
    else:
        manifests = None if is_planned(Path(target)) else _committed(Path(target))
    if manifests:
        return Converted(plan=None, manifests=manifests, unchanged=True)
    with open_ledger(target, staging) as ledger:
        plan = receive_results(ledger)
        with open_staging(ledger.folder, force=force) as staged:
            converted = publish_plan(plan, staged, Builder(), force=force, make=_collect)
        ledger.publish()
    return converted


def _committed(target: Path) -> dict[str, Manifest] | None:
    """Return the manifests of a dataset, after cleaning up what a killed `commit` left.

    None means that there is no dataset, or that another conversion to the target is unfinished.
    """
    finish_interrupted(target)
    if not is_file(target, MANIFEST_NAME) or saved_digest(StagingDirectory(target).state):
        return None
    return OpenedDirectory(target).manifests()


def _collect(
    works: Sequence[Work[ShardTask]], plan: Plan, staging: StagingDirectory, _: Builder
) -> int:
    """Load the results of all shards, which jobs have built."""
    tasks = [(work, task) for work in works for task in work.tasks]
    missing = []
    for number, (work, task) in enumerate(tasks):
        if (result := load_result(task)) is None:
            missing.append(number)
        else:
            work.results[task.result_folder] = result
    require_done(missing, len(tasks), staging.target)
    staging.prune({task.path for _, task in tasks})
    require_good(works, plan, staging)
    return 0
