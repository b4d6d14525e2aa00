"""A task of a conversion, and what it leaves: a segment of the index, and the result that ends it.

A task builds one shard, or indexes one archive. It may run anywhere, and more than once: each run
saves the same result, and an intact one is not made again.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from shardkit.contracts import Images
from shardkit.conversion.disk import as_failure
from shardkit.conversion.observers import Observed
from shardkit.dataset.index import INDEX_DIRECTORY, Index, IndexSegment, save_index
from shardkit.dataset.manifest import ShardEntry, build_typed
from shardkit.errors import ConversionFailed, Problem
from shardkit.kinds.field import Schema
from shardkit.recipe import Recipe
from shardkit.record import dump_json, load_json
from shardkit.system.files import has_sha256, read_small, sha256_of, sync, write_atomically
from shardkit.system.npy import save_npy
from shardkit.system.pool import Meter
from shardkit.system.safe_paths import UNFIT

_RESULT = "result.json"


@dataclass(frozen=True, kw_only=True)
class ShardResult:
    """A finished shard or archive, for the manifest."""

    entry: ShardEntry | None
    """None if bad images prevented the shard."""
    bad: list[Problem]
    notes: dict[str, int]


class Built(NamedTuple):
    """The outcome of a task."""

    result: ShardResult
    kept: bool
    """Whether an earlier run made it, and it is intact."""


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """One shard to build or archive to index, with everything that a worker process needs."""

    folder: Path
    """Folder of the finished shard, or of the dataset."""
    result_folder: Path
    """Folder for its segment of the index, and for its result."""
    recipe: Recipe
    schema: Schema
    """The fields of all records."""
    source: Images
    workers: int = 1
    """Processes that may work on it: more than one if fewer tasks than workers are left."""

    entry_type: ClassVar[type[ShardEntry]] = ShardEntry

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the shard in the manifest."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """SHA-256 of everything that determines the result."""

    @abstractmethod
    def is_current(self, entry: ShardEntry) -> bool:
        """Return whether the shard is there, by its size."""

    @abstractmethod
    def is_intact(self, entry: ShardEntry) -> bool:
        """Return whether the shard has the bytes of its entry."""

    def require_same_machine(self) -> None:  # noqa: B027 - most tasks run anywhere
        """Refuse to run on a machine where the result would differ."""

    @abstractmethod
    def make(self) -> ShardResult:
        """Make the shard or index; save segment and result, if there is a shard."""


def carry_out(task: Task) -> Built:
    """Carry out a task, or find its result intact.

    ConversionFailed if a file cannot be written, or differs from the input when read back.
    """
    try:
        result = load_result(task)
        if result is None or not _is_intact(task, result):
            return Built(task.make(), kept=False)
    except OSError as error:
        raise as_failure(error, task.folder) from error
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        raise ConversionFailed(f"{error}: memory ran out", remedy=FEWER) from error
    meter = Meter()
    meter.add(images=len(task.source))
    meter.flush()
    return Built(result, kept=True)


FEWER = "Rerun the same command with fewer workers: finished shards are kept."
"""Remedy for a lack of memory."""


def load_result(task: Task) -> ShardResult | None:
    """Return the result of an earlier run from the same input, if the shard has the right size."""
    result = saved_result(task)
    return result if result and result.entry and task.is_current(result.entry) else None


@dataclass(frozen=True, kw_only=True)
class _SavedResult:
    """A stored result, except for its shard. The file is untrusted."""

    bad: tuple[Problem, ...]
    notes: dict[str, int]


def saved_result(task: Task) -> ShardResult | None:
    """Return the result of an earlier run from the same input, or None; ignore the shard."""
    try:
        value = load_json(read_small(task.result_folder / _RESULT))
        if value["made_of"] != task.digest:
            return None
        entry = build_typed(task.entry_type, value["entry"])
        saved = build_typed(_SavedResult, {name: value[name] for name in ("bad", "notes")})
    except (*UNFIT, ValueError, TypeError, KeyError, AttributeError):
        return None
    if entry.name != task.name or entry.rows + len(saved.bad) != len(task.source):
        return None
    return ShardResult(entry=entry, bad=list(saved.bad), notes=saved.notes)


def _is_intact(task: Task, result: ShardResult) -> bool:
    """Return whether a shard and its segment of the index still have the bytes written."""
    try:
        folder = task.result_folder
        files = load_json(read_small(folder / _RESULT))["part"]
        return (
            result.entry is not None
            and task.is_intact(result.entry)
            and all(has_sha256(folder / name, digest, folder) for name, digest in files.items())
        )
    except (*UNFIT, ValueError, TypeError, KeyError, AttributeError):
        return False


def load_segment(task: Task, rows: int) -> IndexSegment:
    """Return a finished task's segment of the index."""
    return Index(task.result_folder, rows, task.schema).segment()


def save_result(
    task: Task, result: ShardResult, index: IndexSegment, observed: Mapping[str, Observed]
) -> None:
    """Save index, results of observers by file, and result of a finished task."""
    with new_result(task) as folder:
        names = save_index([index], folder, task.schema)
        for name, values in observed.items():
            save_npy(folder / name, values)
            names.append(name)
        finish_result(folder, task, result, names)


@contextlib.contextmanager
def new_result(task: Task) -> Iterator[Path]:
    """Yield a folder for a task's segment and result, and put it in place at the end."""
    task.result_folder.parent.mkdir(parents=True, exist_ok=True)
    new = task.result_folder.with_name(f".{task.result_folder.name}.{secrets.token_hex(8)}")
    try:
        new.mkdir()
        yield new
        while True:  # another job may build the same shard, and save the same result
            try:
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(task.result_folder)
                new.rename(task.result_folder)
                break
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    sync(task.result_folder.parent)


def finish_result(folder: Path, task: Task, result: ShardResult, names: Iterable[str]) -> None:
    """Sync the files of a segment, and save the result, which marks the task as done."""
    digests = {}
    for name in names:
        sync(folder / name)
        digests[name] = sha256_of(folder / name)
    for inner in {(folder / name).parent for name in digests} | {folder / INDEX_DIRECTORY}:
        sync(inner)
    value = {"made_of": task.digest, "part": digests, **asdict(result)}
    write_atomically(folder / _RESULT, dump_json(value))
