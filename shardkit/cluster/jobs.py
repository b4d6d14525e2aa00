"""The tasks of a plan, also as files: jobs that share only the target build them, then one commits.

The plan is stored as JSON in the staging directory: one file for the conversion and one for each
task. `shardkit.cluster.ledger` shares these files, in a folder or an object store. A task that
runs twice, even at the same time, does no harm: each run writes the same bytes and renames them
into place.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from hashlib import sha256
from operator import sub
from pathlib import Path
from secrets import token_hex
from typing import Any

from shardkit.cluster.ledger import (
    FOLDER_CLAIMS,
    Ledger,
    local_folder,
    open_ledger,
    shard_name,
)
from shardkit.contracts import Entry, Images, Scan, Source, SourceOptions, StoredEntries
from shardkit.conversion.build import ShardTask
from shardkit.conversion.engine import shard_task
from shardkit.conversion.entry_files import dump_entries, load_entries
from shardkit.conversion.fingerprint import saved_digest
from shardkit.conversion.plan import ConvertOptions, Plan, SplitPlan, shard_meta
from shardkit.conversion.staging import STATE, StagingDirectory
from shardkit.conversion.task import Built, carry_out
from shardkit.dataset.manifest import MANIFEST_NAME
from shardkit.dataset.reports import StoredReport, report_lines
from shardkit.errors import ConversionFailed, Problem, ShardkitError, UsageError, setting
from shardkit.kinds.field import describe_schema, load_schema
from shardkit.recipe import Recipe
from shardkit.record import Record, dump_json, load_json
from shardkit.registry import get_format, get_source, is_own_source
from shardkit.remote.bucket import BucketPlan, claim_at
from shardkit.remote.upload import manifest_at, occupied, taken, writable
from shardkit.sources.driver import ListedSource, Listing
from shardkit.sources.opening import SAMPLES, wrapped_as
from shardkit.system.files import published, read_small, write_atomically
from shardkit.system.safe_paths import UNFIT, is_file, make_folder, parts_of, remove, walk
from shardkit.system.text import as_command, quoted, shell
from shardkit.system.urls import as_url

_JOBS = f"{STATE}/jobs"
PLAN = f"{_JOBS}/plan.json"
"""The plan but for the images of its tasks, relative to the target."""

_HEAD = (PLAN, f"{STATE}/plan.json")
"""The files of a plan that every job needs."""

_LARGE = f"{STATE}/files.jsonl"
"""The names of all images, which only a rerun of the scan needs."""

_MOST_BYTES = 1 << 30
"""Limit of a file of the plan: a shard of ten million records."""

_LEAST_BYTES = 16
"""Bytes of an image in such a file, at least."""


def save_plan(plan: Plan, source: Path, staging: StagingDirectory, *, force: bool) -> int:
    """Write a plan into a staging directory; return the number of tasks.

    Jobs open the source from the path ``source``. ``force`` discards an unfinished conversion.
    UsageError if there is one, or the images are Python samples.
    """
    kind = plan.scan.source.kind
    if kind == SAMPLES:
        raise UsageError("jobs cannot open Python samples;", remedy="convert them with executor=")
    target = staging.target
    staging.start(plan.fingerprint(), force=force)
    for name in (_JOBS, FOLDER_CLAIMS):
        make_folder(target, name)
    for name in os.listdir(target / _JOBS):
        if name.startswith("."):  # of a plan that was killed
            remove(target, f"{_JOBS}/{name}")
    number = 0
    for split in plan.splits:
        make_folder(target, str(staging.folder_of(split.name).relative_to(target)))
        for shard in range(split.shards):
            entries = dump_entries(split.shard_source(shard).entries)
            write_atomically(target / task_name(number), entries)
            number += 1
    for name, split in zip(_reports(plan), plan.splits, strict=True):
        with published(target / name) as temporary, temporary.open("xb") as file:
            file.writelines(report_lines(plan.scan.ignored.get(split.name, ())))
    saved = {
        "fingerprint": saved_digest(staging.state),
        "source": [kind, as_url(source) or str(source.absolute())],
        "options": _describe_options(plan.options),
        "software": plan.software,
        "classes": plan.scan.classes,
        "schema": describe_schema(plan.scan.schema),
        "known": plan.scan.known,
        "exact_sizes": plan.scan.exact_sizes,
        "problems": _listed(plan.scan.problems),
        "ignored": [len(plan.scan.ignored.get(split.name, ())) for split in plan.splits],
        "splits": [
            {
                "name": split.name,
                "images": split.images,
                "cuts": split.cuts,
                "shard_bytes": split.shard_bytes,
                "source": split.meta["source"],
            }
            for split in plan.splits
        ],
    }
    write_atomically(target / PLAN, dump_json(saved))
    return number


def is_planned(target: Path) -> bool:
    """Return whether there is a plan for jobs in the target."""
    return is_file(target, PLAN)


def load_plan(target: Path) -> Plan:
    """Return the plan that `save_plan` wrote. Its list of images is read while it is used.

    The plan may be anybody's, so nothing that it names is opened: `open_source` does that.
    UsageError if there is no plan, or it is damaged.
    """
    try:
        value = load_json(read_small(target / PLAN, _MOST_BYTES, root=target))
        if saved_digest(StagingDirectory(target).state) != value["fingerprint"]:
            raise UsageError(
                f"after the plan, another conversion was started in {target}",
                remedy="Plan again with --force.",
            )
        return _plan(value, target)
    except FileNotFoundError:
        if os.path.lexists(target / MANIFEST_NAME):
            raise UsageError(
                f"{target} holds no plan: its dataset is complete, so no task is left"
            ) from None
        raise UsageError(
            f"{target} holds no plan",
            remedy=f"Write one with `shardkit convert ... {shell(target)} --plan-only`",
        ) from None
    except (*UNFIT, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            f"the plan in {target} is damaged ({error})", remedy="Plan again with --force."
        ) from error


class PlannedSource(ListedSource):
    """The source that a plan names, not opened."""

    def __init__(self, kind: str, path: str) -> None:
        if not (os.path.isabs(path) or as_url(path)) or type(kind) is not str:
            # Sources also take MODULE:FUNCTION@PATH, which only a user may give.
            raise ValueError("its source is not an absolute path")
        super().__init__(path, SourceOptions())
        self.kind = kind

    def paths(self) -> Sequence[Path]:
        """Return nothing: which files belong to it is not known before it is opened."""
        return ()

    def list_images(self, listings: Mapping[str, Listing]) -> Mapping[str, str]:
        """Raise an error, since it is not open."""
        raise NotImplementedError

    def read(self, split: str, entry: Entry) -> Record:
        """Raise an error, since it is not open."""
        raise NotImplementedError

    def locate(self, split: str, entry: Entry) -> str:
        """Return the path of the source and that of an image in it."""
        return f"{self} at {entry.path}"


def open_source(plan: Plan, source: Path | None = None) -> Plan:
    """Return a plan with its source opened, to build shards.

    ``source`` is the path that a user gave for the source; None means that of the plan. UsageError
    if it is not there, or what the plan states about it is damaged.
    """
    named = plan.scan.source
    described = {split.name: split.meta["source"] for split in plan.splits}
    opened = _reopen(named.kind, source or Path(str(named)), described)
    for path in opened.paths():
        if not path.exists():
            raise UsageError(
                f"the source {path} is not on {socket.gethostname()};",
                remedy="if it has another path there, give that",
            )
    images = {name: replace(entries, source=opened) for name, entries in plan.scan.splits.items()}
    return replace(
        plan,
        scan=replace(plan.scan, source=opened, splits=images),
        splits=tuple(replace(split, source=images[split.name]) for split in plan.splits),
    )


def _reopen(kind: str, path: Path, described: Mapping[str, Mapping[str, Any]]) -> Source:
    """Open the source of a plan, perhaps divided, from its description in the manifests."""
    try:
        return wrapped_as(described, partial(get_source(kind).find, path))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            f"what the plan states about its source {path} is damaged ({error})",
            remedy="Plan again with --force.",
        ) from error


def load_task(plan: Plan, target: Path, number: int) -> ShardTask:
    """Return a task of a plan. Its images are read while they are used."""
    for split in plan.splits:
        if number < split.shards:
            break
        number -= split.shards
    return shard_task(plan, split, number, StagingDirectory(target))


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
                remedy=f"leave {setting('kind', kind)} out",
            )
        if not is_own_source(self.kind) and self.kind != kind:
            raise UsageError(
                f"the plan in {ledger.location} reads its images by code of another package: the "
                f"source {self.kind!r}",
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
    tasks = _tasks(plan, ledger.folder)
    require_done(ledger.get_results(tasks, _rest(plan)), len(tasks), ledger.location)
    return plan


def require_done(missing: Sequence[int], tasks: int, target: Path | str) -> None:
    """Refuse to commit while tasks are not done; the message names them."""
    if missing:
        more = f" and {len(missing) - _NAMED:,} more" if len(missing) > _NAMED else ""
        raise ConversionFailed(
            f"{len(missing):,} of {tasks:,} tasks are not done: "
            f"{', '.join(map(str, missing[:_NAMED]))}{more}",
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
                f"{url} holds another plan",
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
        shards = set(map(shard_name, _tasks(load_plan(stored.folder), stored.folder)))
    stored.remove(shards)


def _tasks(plan: Plan, folder: Path) -> list[ShardTask]:
    """Return the tasks of a plan in a folder, which reads no image."""
    return [load_task(plan, folder, number) for number in range(count_tasks(plan))]


def count_tasks(plan: Plan) -> int:
    """Return the number of tasks of a plan."""
    return sum(split.shards for split in plan.splits)


def task_name(number: int) -> str:
    """Return the path of a task's file, relative to the target."""
    return f"{_JOBS}/{number:06d}.json"


def _report_name(split: int) -> str:
    return f"{_JOBS}/ignored-{split:03d}.jsonl"


def _reports(plan: Plan) -> list[str]:
    """Return the lists of ignored files of all splits, relative to the target."""
    return [_report_name(number) for number in range(len(plan.splits))]


def _rest(plan: Plan) -> list[str]:
    """Return the files with what `load_plan` reads later, relative to the target."""
    return [*map(task_name, range(count_tasks(plan))), *_reports(plan)]


def _listed(problems: dict[str, list[Problem]]) -> dict[str, list[list[str]]]:
    return {
        name: [[problem.path, problem.message] for problem in listed]
        for name, listed in problems.items()
    }


def _problems(listed: dict[str, list[list[str]]]) -> dict[str, list[Problem]]:
    return {
        name: [Problem(path=path, reason=reason) for path, reason in pairs]
        for name, pairs in listed.items()
    }


def _plan(value: Any, target: Path) -> Plan:
    """Return the plan that `save_plan` saved as ``value``."""
    source = PlannedSource(*value["source"])
    classes = value["classes"]
    images = dict[str, Images]()
    first = 0
    for split in value["splits"]:
        texts = (split["name"], split["source"]["name"], *value["software"].values())
        if not all(type(text) is str for text in texts):
            raise TypeError("a name is not text")
        if split["name"] and len(parts_of(split["name"])) > 1:
            raise ValueError("a split is not a folder name")
        images[split["name"]] = Images(
            source, split["name"], _entries(target, first, split["cuts"])
        )
        first += len(split["cuts"]) - 1
    options = _restored_options(value["options"])
    scan = Scan(
        source=source,
        splits=images,
        classes=None if classes is None else tuple(classes),
        fields=load_schema(value["schema"], classes),
        known=value["known"],
        exact_sizes=value["exact_sizes"],
        problems=_problems(value["problems"]),
        ignored={
            split["name"]: StoredReport(target / _report_name(number), int(count), target)
            for number, (split, count) in enumerate(
                zip(value["splits"], value["ignored"], strict=True)
            )
        },
    )
    return Plan(
        storage=get_format(options.to),
        options=options,
        scan=scan,
        splits=tuple(
            SplitPlan(
                name=split["name"],
                source=images[split["name"]],
                images=split["images"],
                cuts=tuple(split["cuts"]),
                shard_bytes=tuple(split["shard_bytes"]),
                meta=shard_meta(
                    to=options.to,
                    schema=scan.schema,
                    recipe=options.recipe,
                    source=split["source"],
                ),
            )
            for split in value["splits"]
        ),
        software=value["software"],
    )


def _describe_options(options: ConvertOptions) -> dict[str, Any]:
    """Return the options as JSON values, with the names that they have had in all plans."""
    values = {**asdict(options), "recipe": options.recipe.describe()}
    del values["shard_size"]
    return {**values, "shard_bytes": options.shard_bytes}


def _restored_options(described: dict[str, Any]) -> ConvertOptions:
    """Return the options that `_describe_options` described."""
    values = {**described, "recipe": Recipe.restored(described["recipe"])}
    return ConvertOptions(shard_size=f"{values.pop('shard_bytes')}B", **values)


def _entries(target: Path, first: int, cuts: Sequence[int]) -> StoredEntries:
    """Return the images of a split, from the files of its tasks."""
    if type(cuts) is not list or not all(type(cut) is int for cut in cuts):
        raise TypeError("the first rows of its shards are not numbers")
    if cuts[:1] != [0] or cuts != sorted(cuts):
        raise ValueError("the first rows of its shards are not in order")
    if max(map(sub, cuts[1:], cuts), default=0) > _MOST_BYTES // _LEAST_BYTES:
        raise ValueError("a shard has more images than the file of a task can list")

    def load(shard: int) -> list[Entry]:
        path = target / task_name(first + shard)
        try:
            entries = load_entries(read_small(path, _MOST_BYTES, root=target))
            if len(entries) != cuts[shard + 1] - cuts[shard]:
                raise ValueError(f"it lists {len(entries)} images")
        except (*UNFIT, ValueError) as error:
            raise UsageError(
                f"{path} is damaged ({error})", remedy="Plan again with --force."
            ) from error
        return entries

    return StoredEntries(load, cuts)
