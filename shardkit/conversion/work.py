"""Build the tasks of a plan, as `shardkit work` does: between `plan_jobs` and `commit`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from shardkit.conversion.jobs import Jobs, open_jobs
from shardkit.conversion.task import Built
from shardkit.errors import BadImages, UsageError
from shardkit.options import about, option, require_valid, takes


@dataclass(frozen=True, kw_only=True)
class WorkOptions:
    """The options of `work`."""

    task: int | None = option(None, help="Build the shard of this task.", metavar="N", minimum=0)
    claim: bool = option(False, help="Build unclaimed tasks until none is left.")
    take_over: bool = option(
        False,
        help="With --claim, also build tasks that other jobs claimed but have not finished. At "
        "worst a task runs twice, which does no harm.",
    )
    source: str | Path | None = option(
        None,
        help="Path of the source on this machine, if it differs from the plan. If a function gives "
        "the images, MODULE:FUNCTION@PATH.",
        metavar="SRC",
    )
    kind: str | None = option(
        None,
        help="Kind of source, if another package than shardkit provides it. The plan alone may not "
        "choose that.",
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
            raise UsageError("take_over= requires claim=")
        if self.task is not None and self.claim:
            raise UsageError("task= and claim= exclude each other: choose one")


@dataclass(frozen=True)
class WorkArguments(WorkOptions):
    """The arguments of `work`."""

    target: str | Path = field(
        metadata=about("The directory or URL for which `plan_jobs` wrote a plan.")
    )


@takes(WorkArguments)
def work(options: WorkArguments) -> dict[int, Built]:
    """Build shards of the conversion that `plan_jobs` planned, in this process.

    If the target is a URL, each shard is uploaded, then removed here. Repeat an interrupted call to
    resume it.

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
    with open_jobs(options.target, source, staging, options.kind) as jobs:
        if options.task is None and not options.claim:
            raise UsageError("choose task= or claim=; outside Slurm, no task number is given")
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
        count = f"{len(problems):,} bad file{'s' * (len(problems) > 1)}"
        error = BadImages(f"{count}. Fix bad files, or plan again with --on-error skip --force.")
        error.problems = tuple(problems)
        raise error
    return outcomes
