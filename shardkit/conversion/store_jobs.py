"""Job arrays into an object store: jobs share only a URL and the source.

A claim reserves the URL for one plan. The plan's own objects are below ``.shardkit-jobs`` and its
ID: the files of `shardkit.conversion.jobs` under their names in the target, a result for each
finished task, claims of tasks, and ``end``, whose creation decides whether the plan is committed or
discarded. Shards are uploaded to their final names.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import random
import re
import secrets
import shutil
import socket
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from shardkit.conversion.build import Built, ShardTask, saved_result
from shardkit.conversion.disk import FULL, as_failure
from shardkit.conversion.jobs import (
    PLAN,
    Jobs,
    count_tasks,
    load_plan,
    load_task,
    plan_files,
    require_done,
    task_name,
)
from shardkit.conversion.staging import DATASET, STATE
from shardkit.conversion.upload import (
    CLAIM,
    files_of,
    manifest_at,
    occupied,
    send_file,
    taken,
    writable,
)
from shardkit.dataset.manifest import MANIFEST_NAME, ShardEntry, load_any_manifest
from shardkit.errors import UsageError
from shardkit.record import dump_json, load_json
from shardkit.stores.process import call
from shardkit.stores.urls import as_url
from shardkit.system.files import SMALL_BYTES, read_small
from shardkit.system.safe_paths import opened, parts_of, remove_tree, walk

_JOBS = ".shardkit-jobs"
_RESULTS, _CLAIMS, _END = "results", "claims", "end"

_HEAD = (PLAN, f"{STATE}/plan.json")
"""What every job needs of a plan."""

_YOUNG = 60
"""Seconds within which a new folder is locked."""

_ATTEMPTS = 3
"""Reads of a claim before it counts as damaged."""

_LARGE = f"{STATE}/files.jsonl"
"""The names of all images, which only a rerun of the scan needs."""


@contextlib.contextmanager
def local_folder(staging: str | Path | None) -> Iterator[Path]:
    """Provide a new folder in ``staging``, or in the temporary folder; remove it at the end.

    Folders that killed processes of this machine left there are removed first.

    Raises:
        UsageError: If it cannot be created.
        DiskFull: If the disk is full within the block.
    """
    above, prefix = Path(staging or tempfile.gettempdir()), f"shardkit-jobs-{socket.gethostname()}-"
    try:
        above.mkdir(parents=True, exist_ok=True)
        for left in above.glob(f"{prefix}*"):
            _remove_abandoned(left)
        folder = tempfile.TemporaryDirectory(prefix=prefix, dir=above, ignore_cleanup_errors=True)
    except OSError as error:
        raise UsageError(
            f"no folder can be created in {above}: {error.strerror}. Name another one with "
            "--staging."
        ) from error
    with folder as place, opened(Path(place)) as descriptor:
        with contextlib.suppress(OSError):  # a file system without locks: nobody removes it
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            yield Path(place)
        except OSError as error:
            if error.errno in FULL:
                raise as_failure(error, above) from error
            raise


def _remove_abandoned(folder: Path) -> None:
    """Remove a folder of this user, unless a process holds its lock or has just created it."""
    with contextlib.suppress(OSError), opened(folder.parent, folder.name) as descriptor:
        status = os.fstat(descriptor)
        if status.st_uid == os.geteuid() and time.time() - status.st_mtime > _YOUNG:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_tree(folder.parent, folder.name)


class StoredPlan:
    """A plan in an object store.

    Args:
        url: The URL of the dataset.
        claim: The content of the claim there, which names the plan.
    """

    def __init__(self, url: str, claim: dict[str, Any]) -> None:
        self.url = url
        self.claim = claim
        self.below = f"{url}/{_JOBS}/{claim['plan']}"

    @classmethod
    def found(cls, url: str) -> StoredPlan:
        """Return the plan at a URL.

        Raises:
            UsageError: If there is none.
        """
        url = writable(url)
        claim = _claim(url)
        if not claim:
            raise _absent(url)
        return cls(url, claim)

    @property
    def is_current(self) -> bool:
        """Whether the plan was neither committed nor discarded."""
        return _claim(self.url) == self.claim

    def receive(self, folder: Path, names: Sequence[str]) -> None:
        """Copy objects of the plan to a folder.

        Raises:
            UsageError: If one is missing.
            CorruptDataset: If one is damaged.
        """
        if missing := call("mirror:receive", self.below, folder, names):
            if not self.is_current:
                raise _absent(self.url)
            raise UsageError(
                f"the plan in {self.url} is not complete: it lacks {missing[0]}. If `convert "
                "--plan-only` was interrupted, repeat it."
            )

    def end(self, how: bytes) -> bool:
        """Commit or discard the plan; return whether that is possible. Only the first counts."""
        return bool(call("write:create", self.below, _END, how))

    def discard(self) -> None:
        """Remove the plan and the shards of its jobs.

        Raises:
            UsageError: If it is being committed.
        """
        if not self.end(b"discard"):
            raise UsageError(
                f"the plan in {self.url} is being committed; repeat `shardkit commit {self.url}`"
            )
        own = call("write:sizes", self.below).keys()
        if PLAN in own:  # else no job has started
            with local_folder(None) as folder:
                self.receive(folder, _HEAD)
                shards = set(map(_shard_name, _tasks(folder)))
            call("mirror:delete", self.url, [*shards & call("write:sizes", self.url).keys()])
        call("mirror:delete", self.below, [*own - {_END}])  # _END stops a late commit
        call("write:delete", self.url, CLAIM)


def require_free(url: str) -> None:
    """Refuse a URL that cannot hold a plan, before a long scan.

    Raises:
        UsageError: If it holds a dataset or an unfinished upload, or access is denied.
        ShardkitError: If the store cannot be used.
    """
    if _claim(writable(url)) == {}:
        raise occupied(url)
    if manifest_at(url) is not None:
        raise taken(url)


def send_plan(folder: Path, url: str, *, force: bool) -> None:
    """Upload the plan that `shardkit.conversion.jobs.save_plan` wrote. Repeat it to resume.

    Args:
        folder: The target of `save_plan`.
        url: Where the dataset shall be.
        force: Whether to discard another plan there, with the shards of its jobs.

    Raises:
        UsageError: If the URL holds a dataset, another plan or an unfinished upload, or access is
            denied.
        ShardkitError: If the store cannot be used.
    """
    content = sha256((folder / PLAN).read_bytes()).hexdigest()
    claim = _claim(url)
    if claim is not None and claim.get("content") != content:
        if not claim:
            raise occupied(url)
        if not force:
            raise UsageError(
                f"{url} holds another plan. Finish it with `shardkit work` and `shardkit commit`, "
                "or cancel its jobs and discard it with --force"
            )
        StoredPlan(url, claim).discard()
        claim = None
    plan = StoredPlan(url, claim or {"plan": secrets.token_hex(8), "content": content})
    if not call("write:create", url, CLAIM, _as_object(plan.claim)):
        raise occupied(url)
    # Only now: a conversion that finished before our claim has written its manifest.
    splits = {"", *(split.name for split in load_plan(folder).splits)}
    for place in sorted(f"{url}/{name}".rstrip("/") for name in splits) if not claim else ():
        if manifest_at(place) is not None:
            call("write:delete", url, CLAIM)
            raise taken(place)
    files = {name for name, is_folder in walk(folder, STATE) if not is_folder}
    done = call("write:sizes", plan.below).keys()
    call("mirror:send", plan.below, folder, sorted(files - done - {PLAN, _LARGE}))
    call("mirror:send", plan.below, folder, [PLAN])  # last: now the plan is complete


@contextlib.contextmanager
def open_jobs(
    target: str | Path, source: Path | None = None, staging: Path | None = None
) -> Iterator[Jobs]:
    """Open the tasks of a plan in a directory or an object store.

    Args:
        target: The directory or URL that the plan was written for.
        source: The path of the source on this machine, if it is another one.
        staging: For a URL, the folder for the shard that is being built; None is the temporary one.

    Raises:
        UsageError: If there is no plan, it is damaged, or the source is not there.
        ShardkitError: If the store cannot be used.
    """
    if as_url(target) is not None:
        with local_folder(staging) as folder:
            yield StoreJobs(StoredPlan.found(str(target)), source, folder)
    elif staging is not None:
        raise UsageError(f"{target} is local; --staging is for jobs that write to a URL")
    else:
        yield Jobs(Path(target), source)


class StoreJobs(Jobs):
    """The tasks of a plan in an object store, to build in this process.

    Args:
        plan: The plan.
        source: The path of the source on this machine, if it is another one.
        folder: An empty folder for the shard that is being built.

    Raises:
        UsageError: If the plan is not complete, or the source is not there.
        ShardkitError: If the store cannot be used.
    """

    def __init__(self, plan: StoredPlan, source: Path | None, folder: Path) -> None:
        self._stored, self._folder = plan, folder
        self._done: set[int] = set()
        plan.receive(folder, _HEAD)
        super().__init__(folder, source, plan.url)

    def task(self, number: int) -> ShardTask:
        """Return a task.

        Raises:
            UsageError: If there is no such task.
        """
        if 0 <= number < len(self) and not (self._folder / task_name(number)).exists():
            self._stored.receive(self._folder, [task_name(number)])
        return super().task(number)

    def build(self, number: int) -> Built:
        """Build and upload the shard of a task, or find it finished.

        Raises:
            UsageError: If there is no such task, this machine would write other bytes, or the plan
                was committed or discarded.
            ConversionFailed: If the shard cannot be written.
            ShardkitError: If the store cannot be used.
        """
        task = self.task(number)
        task.folder.mkdir(parents=True, exist_ok=True)
        try:
            built = self._finished(task, number) or super().build(number)
            if built.result.entry and not built.kept:
                self._upload(task, number, built.result.entry)
        finally:
            shutil.rmtree(task.part, ignore_errors=True)
            for name in (task_name(number), _result_name(number)):
                (self._folder / name).unlink(missing_ok=True)
            task.path.unlink(missing_ok=True)
        if built.result.entry:
            self._done.add(number)
        return built

    def _finished(self, task: ShardTask, number: int) -> Built | None:
        """Return the result of a job that finished the task, if its shard is in the store."""
        name, shard = _result_name(number), _shard_name(task)
        if call("mirror:receive", self._stored.below, self._folder, [name]):
            return None
        _unpack(self._folder / name, task.part)
        result = saved_result(task)
        found = call("mirror:digests", self._stored.url, [shard]).get(shard)
        sound = result and result.entry and result.entry.sha256 == found
        return Built(result, kept=True) if result and sound else None

    def _upload(self, task: ShardTask, number: int, entry: ShardEntry) -> None:
        """Upload a shard, then its result, which marks the task as done."""
        url, name, result = self._stored.url, _shard_name(task), _result_name(number)
        self._require_plan()
        if call("mirror:digests", url, [name]).get(name) != entry.sha256:
            send_file(self._folder / DATASET, url, name, entry, None)
        self._require_plan()
        _pack(task.part, self._folder / result)
        call("mirror:send", self._stored.below, self._folder, [result])

    def _require_plan(self) -> None:
        if not self._stored.is_current:
            raise UsageError(
                f"the plan in {self._stored.url} was committed or discarded while this job was "
                "running; its shard is not needed"
            )

    def claimed(self, *, take_over: bool = False) -> Iterator[int]:
        """Claim tasks that are not done, in random order, until none is left.

        A claim is an object that is created only if absent. A job that is killed leaves its claim.

        Args:
            take_over: Whether to take tasks that others claimed but have not finished, too.
        """
        tried: set[int] = set()
        while free := self._free(tried, take_over=take_over):
            for number in random.sample(free, len(free)):
                name = _claim_name(number)
                if not (call("write:create", self._stored.below, name, _this_job()) or take_over):
                    break  # others are at work: see what they have left
                tried.add(number)
                try:
                    yield number
                finally:
                    if number not in self._done:
                        call("write:delete", self._stored.below, name)

    def _free(self, tried: set[int], *, take_over: bool) -> list[int]:
        taken = set() if take_over else self._listed(_CLAIMS)
        return sorted(set(range(len(self))) - tried - taken - self._listed(_RESULTS))

    def _listed(self, folder: str) -> set[int]:
        """Return the tasks that have an object in a folder of the plan."""
        names = call("write:sizes", f"{self._stored.below}/{folder}")
        return {int(name) for name in names if name.isdecimal()}


def progress_at(url: str) -> tuple[int, int] | None:
    """Return how many tasks of the plan at a URL are done, and how many there are; None without.

    Raises:
        ShardkitError: If the store cannot be used.
    """
    claim = _claim(url)
    if not claim:
        return None
    names = call("write:sizes", StoredPlan(url, claim).below)
    tasks = next(number for number in itertools.count() if task_name(number) not in names)
    return sum(name.startswith(f"{_RESULTS}/") for name in names), tasks


def receive_results(plan: StoredPlan, folder: Path) -> None:
    """Fill a new folder for a local commit: with the plan, all results, and empty files.

    These have the names and sizes of the shards, which stay in the store.

    Raises:
        UsageError: If the plan is not complete, or was committed meanwhile.
        ConversionFailed: If tasks are not done, or shards differ from what their jobs have
            uploaded. The message names the tasks.
        ShardkitError: If the store cannot be used.
    """
    plan.receive(folder, _HEAD)
    tasks = _tasks(folder)
    present = call("write:sizes", plan.below).keys()
    missing = [number for number in range(len(tasks)) if _result_name(number) not in present]
    if not missing:
        plan.receive(folder, plan_files(load_plan(folder)))
        plan.receive(folder, list(map(_result_name, range(len(tasks)))))
        missing = _place_shards(plan, tasks, folder)
        void = [name(number) for number in missing for name in (_result_name, _claim_name)]
        call("mirror:delete", plan.below, void)  # so that `work --claim` finds these tasks
    if missing and not plan.is_current:
        raise _absent(plan.url)
    require_done(missing, len(tasks), plan.url)


def _place_shards(plan: StoredPlan, tasks: list[ShardTask], folder: Path) -> list[int]:
    """Unpack results and create empty files; return the tasks whose shard is not in the store."""
    sizes = call("write:sizes", plan.url)
    digests = call("mirror:digests", plan.url, list(map(_shard_name, tasks)))
    missing = []
    for number, task in enumerate(tasks):
        _unpack(folder / _result_name(number), task.part)
        result, name = saved_result(task), _shard_name(task)
        entry = result.entry if result else None
        if entry is None or (entry.bytes, entry.sha256) != (sizes.get(name), digests.get(name)):
            missing.append(number)
            continue
        task.folder.mkdir(parents=True, exist_ok=True)
        with open(task.path, "xb") as file:
            file.truncate(entry.bytes)
    return missing


def publish(plan: StoredPlan, folder: Path) -> None:
    """Upload a committed dataset, whose shards are in the store already, and remove the plan.

    Raises:
        UsageError: If the plan was committed or discarded, or the URL holds another dataset.
        ShardkitError: If the store cannot be used.
    """
    if not (plan.end(b"commit") and plan.is_current):
        raise _absent(plan.url)
    for name, entry, _ in files_of(folder, load_any_manifest(folder)):
        if not isinstance(entry, ShardEntry):
            send_file(folder, plan.url, name, entry, None)
    if not call("write:create", plan.url, MANIFEST_NAME, read_small(folder / MANIFEST_NAME)):
        raise taken(plan.url, "another")
    call("write:delete", plan.url, CLAIM)  # first: without it, the rest is only waste
    _remove_waste(plan.url)


def _absent(url: str) -> UsageError:
    """Return the error that a URL holds no plan, or no longer the one that it held."""
    if _claim(url) is None and manifest_at(url) is not None:
        _remove_waste(url)  # of a commit that was killed
    return UsageError(
        f"{url} holds no plan. Write one with `shardkit convert ... {url} --plan-only`; if it was "
        "committed, its dataset is complete."
    )


def _remove_waste(url: str) -> None:
    """Remove the objects of all plans for a URL that holds a dataset."""
    below = f"{url}/{_JOBS}"
    call("mirror:delete", below, [*call("write:sizes", below)])


def _claim(url: str) -> dict[str, Any] | None:
    """Return the claim at a URL, or {} if it is not that of a plan."""
    for _ in range(_ATTEMPTS):
        content = call("fetch:get", url, CLAIM, SMALL_BYTES)
        if content is None:
            return None
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            claim: dict[str, Any] = load_json(content)["claim"]
            if _as_object(claim) == content and re.fullmatch("[0-9a-f]{16}", claim["plan"]):
                return claim
    return {}


def _as_object(claim: dict[str, Any]) -> bytes:
    """Return the content of a claim, which states its own SHA-256."""
    return dump_json({"claim": claim, "sha256": sha256(dump_json(claim)).hexdigest()})


def _this_job() -> bytes:
    """Return the content of a claim, which no other job has."""
    this = {"machine": socket.gethostname(), "process": os.getpid(), "token": secrets.token_hex(8)}
    return dump_json(this)


def _tasks(folder: Path) -> list[ShardTask]:
    """Return the tasks of the plan in a local folder, which reads no image."""
    plan = load_plan(folder)
    return [load_task(plan, folder, number) for number in range(count_tasks(plan))]


def _result_name(number: int) -> str:
    return f"{_RESULTS}/{number:06d}"


def _claim_name(number: int) -> str:
    return f"{_CLAIMS}/{number:06d}"


def _shard_name(task: ShardTask) -> str:
    return f"{task.split}/{task.path.name}".lstrip("/")


def _pack(part: Path, path: Path) -> None:
    """Write the files of a folder to an uncompressed zip file."""
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, is_folder in walk(part):
            if not is_folder:
                archive.writestr(zipfile.ZipInfo(name), (part / name).read_bytes())


def _unpack(path: Path, part: Path) -> None:
    """Turn a zip file of `_pack` into a folder, without a result if the file is damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            for each in archive.infolist():
                parts_of(each.filename)
                if each.compress_type != zipfile.ZIP_STORED:
                    raise ValueError("it is compressed")
                (part / each.filename).parent.mkdir(parents=True, exist_ok=True)
                (part / each.filename).write_bytes(archive.read(each))
    except (ValueError, RuntimeError, EOFError, zipfile.BadZipFile):
        shutil.rmtree(part, ignore_errors=True)
    path.unlink()
