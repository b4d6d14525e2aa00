"""The tasks of a saved plan: jobs that share only the target build them, then one commits.

`shardkit.cluster.ledger` shares the files of the plan, in a folder or an object store. A task that
runs twice, even at the same time, does no harm: each run writes the same bytes and renames them
into place.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from secrets import token_hex

from shardkit.cluster.ledger import (
    Ledger,
    local_folder,
    open_ledger,
    shard_name,
)
from shardkit.cluster.plan_files import (
    PLAN,
    count_tasks,
    later_files,
    load_plan,
    load_task,
    open_source,
    task_name,
    tasks_of,
)
from shardkit.conversion.build import ShardTask
from shardkit.conversion.plan import Plan
from shardkit.conversion.staging import STATE
from shardkit.conversion.task import Built, carry_out
from shardkit.errors import ConversionFailed, ShardkitError, UsageError, setting
from shardkit.registry import is_own_source
from shardkit.remote.bucket import BucketPlan, claim_at
from shardkit.remote.upload import manifest_at, occupied, taken, writable
from shardkit.system.safe_paths import walk
from shardkit.system.text import as_command, quoted
from shardkit.system.urls import as_url

_HEAD = (PLAN, f"{STATE}/plan.json")
"""The files of a plan that every job needs."""


_LARGE = f"{STATE}/files.jsonl"
"""The names of all images, which only a rerun of the scan needs."""


def progress_of(target: str | Path) -> tuple[int, int] | None:
    """Return how many tasks of a plan are done, and how many there are; None without a plan."""
    ledger: Ledger | BucketPlan = Ledger(Path(target))
    if (url := as_url(target)) is not None:
        if not (claim := claim_at(url)):
            return None
        ledger = BucketPlan(url, claim, Path())
    names = ledger.names()
    if PLAN not in names:
        return None
    tasks = next(number for number in itertools.count() if task_name(number) not in names)
    return ledger.count_done(), tasks


class Jobs:
    """The tasks of a saved plan, to build in this process.

    ``source`` is the path of the source on this machine, if it is another one. ``kind`` is the kind
    of source, which a user must name if it is that of another package.
    """

    def __init__(self, ledger: Ledger, source: Path | None = None, kind: str | None = None) -> None:
        self._ledger = ledger
        ledger.get(_HEAD)
        self._saved = load_plan(ledger.folder)
        self._source = source
        self._opened: Plan | None = None
        self.kind: str = self._saved.scan.source.kind
        """The kind of source."""
        path = source or str(self._saved.scan.source)
        self.source = as_url(path) or str(path)
        """The path or URL of the source. Nothing is read there before `open`."""
        if is_own_source(self.kind) and kind not in (None, self.kind):
            raise UsageError(
                f"the plan in {ledger.location} reads {self.kind}, not {quoted(kind)};",
                remedy=f"leave out {setting('kind', kind)}",
            )
        if not is_own_source(self.kind) and self.kind != kind:
            raise UsageError(
                f"the plan in {ledger.location} reads its images with code from another package: "
                f"the source {self.kind!r}",
                remedy=f"If you trust the plan, add {setting('kind', self.kind)}.",
            )

    def __len__(self) -> int:
        return count_tasks(self._saved)

    def open(self) -> None:
        """Open the source, unless it is open; building a task does so, too."""
        if self._opened is not None:
            return
        try:
            self._opened = open_source(self._saved, self._source)
        except UsageError as error:
            if self._source is not None:
                raise
            raise UsageError(
                f"{error.stated} ({as_command('work', self._ledger.location, '--source', 'SRC')})",
                where=error.where,
            ) from error

    def build(self, number: int) -> Built:
        """Build the shard of a task and publish it for the commit, or find it finished.

        UsageError if there is no such task, this machine would write other bytes, or the plan was
        committed or discarded; ConversionFailed if the shard cannot be written.
        """
        task = self.task(number)
        try:
            if result := self._ledger.get_result(number, task):
                return Built(result, kept=True)
            task.require_same_machine()
            built = carry_out(task)
            if entry := built.result.entry:
                self._ledger.put_result(number, task, entry)
            return built
        finally:
            self._ledger.clean([task_name(number)], task)

    def claimed(self, *, take_over: bool = False) -> Generator[int, None, None]:
        """Claim tasks that are not done, one after another, until none is left.

        The claim of a task that failed is void. ``take_over`` also takes tasks that others claimed
        but have not finished.
        """
        self.open()  # before the first claim
        for number in self._ledger.create_claims(len(self), take_over=take_over):
            task = None
            try:
                task = self.task(number)
                if not self._ledger.is_done(number, task):
                    yield number
            finally:
                with contextlib.suppress(OSError, ShardkitError):  # the task's own error counts
                    if task is None or not self._ledger.is_done(number, task):
                        self._ledger.delete_claim(number)

    def task(self, number: int) -> ShardTask:
        """Return a task; UsageError if there is no such task."""
        if not 0 <= number < len(self):
            raise UsageError(
                f"there is no task {number}; {self._ledger.location} has tasks 0 to {len(self) - 1}"
            )
        self._ledger.get([task_name(number)])
        self.open()
        return load_task(self._opened or self._saved, self._ledger.folder, number)


@contextlib.contextmanager
def open_jobs(
    target: str | Path,
    source: Path | None = None,
    staging: Path | None = None,
    kind: str | None = None,
) -> Iterator[Jobs]:
    """Open the tasks of a plan; see `Jobs` and `shardkit.cluster.ledger.open_ledger`."""
    with open_ledger(target, staging) as ledger:
        yield Jobs(ledger, source, kind)


def receive_results(ledger: Ledger) -> Plan:
    """Return a plan to commit in the ledger's folder, where it and all results then are.

    ConversionFailed if tasks are not done, or shards differ from what their jobs have uploaded. The
    message names the tasks.
    """
    ledger.get(_HEAD)
    plan = load_plan(ledger.folder)
    tasks = tasks_of(plan, ledger.folder)
    require_done(ledger.get_results(tasks, later_files(plan)), len(tasks), ledger.location)
    return plan


def require_done(missing: Sequence[int], tasks: int, target: Path | str) -> None:
    """Refuse to commit while tasks are not done; the message names them."""
    if missing:
        more = f" and {len(missing) - _NAMED:,} more" if len(missing) > _NAMED else ""
        raise ConversionFailed(
            f"the plan has unfinished tasks: {', '.join(map(str, missing[:_NAMED]))}{more} "
            f"({len(missing):,} of {tasks:,})",
            remedy=f"Build them with {as_command('work', target, '--claim')}, then commit again.",
        )


_NAMED = 20
"""Tasks that a message names; it counts the others."""


def require_free(url: str) -> None:
    """Refuse a URL that cannot hold a plan, before a long scan."""
    if claim_at(writable(url)) == {}:
        raise occupied(url)
    if manifest_at(url) is not None:
        raise taken(url)


def send_plan(folder: Path, url: str, *, force: bool) -> None:
    """Upload the plan that `save_plan` wrote into ``folder``. Repeat it to resume.

    ``force`` discards another plan at the URL, with the shards of its jobs. UsageError if the URL
    holds a dataset, another plan or an unfinished upload, or access is denied.
    """
    content = sha256((folder / PLAN).read_bytes()).hexdigest()
    claim = claim_at(url)
    if claim is not None and claim.get("content") != content:
        if not claim:
            raise occupied(url)
        if not force:
            raise UsageError(
                f"{url} contains another plan",
                remedy="Finish it with `shardkit work` and `shardkit commit`, or cancel its "
                "jobs and discard it with --force",
            )
        with local_folder(None) as copy:
            _discard(BucketPlan(url, claim, copy))
        claim = None
    stored = BucketPlan(url, claim or {"plan": token_hex(8), "content": content}, folder)
    if not stored.reserve():
        raise occupied(url)
    # Only now: a conversion that finished before our claim has written its manifest.
    splits = {"", *(split.name for split in load_plan(folder).splits)}
    for target in sorted(f"{url}/{name}".rstrip("/") for name in splits) if not claim else ():
        if manifest_at(target) is not None:
            stored.release()
            raise taken(target)
    files = {name for name, is_folder in walk(folder, STATE) if not is_folder}
    stored.put(sorted(files - {*stored.names(), PLAN, _LARGE}))
    stored.put([PLAN])  # last: now the plan is complete


def _discard(stored: BucketPlan) -> None:
    """Remove a plan and the shards of its jobs."""
    if not stored.end(b"discard"):
        url = stored.url
        raise UsageError(
            f"the plan in {url} is being committed;", remedy=f"repeat {as_command('commit', url)}"
        )
    shards = set[str]()
    if PLAN in stored.names():  # else no job has started
        stored.get(_HEAD)
        shards = set(map(shard_name, tasks_of(load_plan(stored.folder), stored.folder)))
    stored.remove(shards)
