"""Files, claims and results that the jobs of a plan share, in a folder or an object store.

In a folder, these are below the work folder of the target; in an object store, see
`shardkit.remote.bucket`.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from shardkit.conversion.build import ShardTask
from shardkit.conversion.disk import FULL, as_failure
from shardkit.conversion.lock import claim
from shardkit.conversion.staging import DATASET, STATE, StagingDirectory
from shardkit.conversion.task import ShardResult, load_result, saved_result
from shardkit.dataset.manifest import (
    ShardEntry,
)
from shardkit.errors import UsageError, located, setting
from shardkit.remote.bucket import BucketPlan
from shardkit.system.safe_paths import UNFIT, remove, walk
from shardkit.system.temporary import TemporaryFolder
from shardkit.system.urls import as_url

FOLDER_CLAIMS = f"{STATE}/claims"
"""The claims in a folder, relative to the target."""


class Ledger:
    """Files, claims and results of a plan, in a folder that all of its jobs see.

    Its files are used where they are, so most methods have nothing to do. ``location`` is the
    name of the target in messages, if it is not that of the folder.
    """

    def __init__(self, folder: Path, location: str = "") -> None:
        self.folder = folder
        self.location = location or folder

    def get(self, names: Sequence[str]) -> None:
        """Copy files of the plan to the folder, if they are elsewhere."""

    def names(self) -> Collection[str]:
        """Return the names of all files of the plan, claims and results."""
        with contextlib.suppress(*UNFIT):  # no plan, or anything that shardkit never writes there
            return {name for name, is_folder in walk(self.folder, STATE) if not is_folder}
        return ()

    def count_done(self) -> int:
        """Return the number of tasks with a result."""
        return StagingDirectory(self.folder).count_finished()

    def create_claims(self, tasks: int, *, take_over: bool) -> Iterator[int]:
        """Claim tasks, one after another, until none is left.

        A claim is a file that names host and process. That of a dead process on this host is void.
        ``take_over`` also returns those that others have claimed.
        """
        for number in range(tasks):
            if claim(self.folder, f"{FOLDER_CLAIMS}/{number:06d}") or take_over:
                yield number

    def delete_claim(self, number: int) -> None:
        """Void a claim of this job."""
        remove(self.folder, f"{FOLDER_CLAIMS}/{number:06d}")

    def is_done(self, number: int, task: ShardTask) -> bool:
        """Return whether a task that this job has claimed is done."""
        return load_result(task) is not None

    def get_result(self, number: int, task: ShardTask) -> ShardResult | None:
        """Prepare to build a task. If its shard is finished elsewhere, return the result instead.

        In the folder, `shardkit.conversion.task.carry_out` looks for it, and checks its bytes.
        """
        return None

    def put_result(self, number: int, task: ShardTask, entry: ShardEntry) -> None:
        """Publish a built shard for the commit, then its result, which marks the task as done."""

    def clean(self, names: Sequence[str], task: ShardTask) -> None:
        """Remove what the folder holds of a task, if that is only a copy."""

    def get_results(self, tasks: Sequence[ShardTask], names: Sequence[str]) -> list[int]:
        """Copy the files ``names`` and all results to the folder, if they are elsewhere.

        Return the tasks that are not done there. The commit checks all that is in the folder.
        """
        return []

    def publish(self) -> None:
        """Publish the dataset that was committed in the folder, if that is elsewhere."""


class BucketLedger(BucketPlan, Ledger):
    """Files, claims and results of a plan in an object store."""

    def __init__(self, url: str, claim: dict[str, Any], folder: Path) -> None:
        Ledger.__init__(self, folder, url)
        BucketPlan.__init__(self, url, claim, folder)
        self._done: set[int] = set()

    def is_done(self, number: int, task: ShardTask) -> bool:
        """Return whether this job has finished the task, or found it finished."""
        return number in self._done

    def get_result(self, number: int, task: ShardTask) -> ShardResult | None:
        """Return the result of a job that finished the task, if its shard is in the store."""
        task.folder.mkdir(parents=True, exist_ok=True)
        if self.receive_results({number: task.result_folder}):
            return None
        result = saved_result(task)
        shard = shard_name(task)
        stored = self.digests([shard]).get(shard)
        if not (result and result.entry and result.entry.sha256 == stored):
            return None
        self._done.add(number)
        return result

    def put_result(self, number: int, task: ShardTask, entry: ShardEntry) -> None:
        """Upload a shard, then its result."""
        self.send_shard(self.folder / DATASET, entry, shard_name(task))
        self.send_result(number, task.result_folder)
        self._done.add(number)

    def clean(self, names: Sequence[str], task: ShardTask) -> None:
        """Remove the copies of files, and the shard with its segment of the index."""
        shutil.rmtree(task.result_folder, ignore_errors=True)
        for path in (task.path, *(self.folder / name for name in names)):
            path.unlink(missing_ok=True)

    def get_results(self, tasks: Sequence[ShardTask], names: Sequence[str]) -> list[int]:
        """Copy all results, and empty files in place of the shards, which stay in the store.

        Return the tasks without a result or, if all have one, whose shard differs from it. Then
        they no longer have one, so that `work --claim` finds them. UsageError if the plan is not
        complete, or was committed meanwhile.
        """
        missing = self.undone(len(tasks))
        if not missing:
            self.get(names)
            self.receive_results({number: task.result_folder for number, task in enumerate(tasks)})
            missing = self._place_shards(tasks)
            self.void(missing)
        if missing:
            self.require_plan()
        return missing

    def _place_shards(self, tasks: Sequence[ShardTask]) -> list[int]:
        """Create an empty file for each shard; return the tasks whose shard is not in the store."""
        sizes = self.sizes()
        digests = self.digests([shard_name(task) for task in tasks])
        missing = []
        for number, task in enumerate(tasks):
            result = saved_result(task)
            name = shard_name(task)
            entry = result.entry if result else None
            if entry is None or (entry.bytes, entry.sha256) != (sizes.get(name), digests.get(name)):
                missing.append(number)
                continue
            task.folder.mkdir(parents=True, exist_ok=True)
            with open(task.path, "xb") as file:
                file.truncate(entry.bytes)
        return missing


@contextlib.contextmanager
def open_ledger(target: str | Path, staging: str | Path | None = None) -> Iterator[Ledger]:
    """Open the ledger of a plan in a directory or an object store.

    For a URL, ``staging`` is the folder for copies and shards; None is the temporary one.
    UsageError if there is no plan at the URL.
    """
    if as_url(target) is not None:
        with local_folder(staging) as folder, located(target):
            yield BucketLedger.open(str(target), folder)
    elif staging is not None:
        raise UsageError(
            f"{target} is local;", remedy=f"{setting('staging')} is for jobs that write to a URL"
        )
    else:
        with located(target):
            yield Ledger(Path(target))


@contextlib.contextmanager
def local_folder(staging: str | Path | None) -> Iterator[Path]:
    """Provide a new folder in ``staging``, or in the temporary folder; remove it at the end.

    Folders that killed processes of this machine left there are removed first. DiskFull if the disk
    is full within the block.
    """
    above = Path(staging or tempfile.gettempdir())
    with contextlib.ExitStack() as folders:
        try:
            above.mkdir(parents=True, exist_ok=True)
            folder = folders.enter_context(TemporaryFolder(above))
        except OSError as error:
            raise UsageError(
                f"no folder can be created in {above}: {error.strerror}",
                remedy=f"Choose another one with {setting('staging')}.",
            ) from error
        try:
            yield folder
        except OSError as error:
            if error.errno in FULL:
                raise as_failure(error, above) from error
            raise


def shard_name(task: ShardTask) -> str:
    """Return the name of a shard in the dataset."""
    return f"{task.split}/{task.path.name}".lstrip("/")
