"""A plan in an object store: its files, claims of tasks, and results.

A claim reserves the URL for one plan. Its own objects are below ``.shardkit-jobs`` and its ID: the
files of the plan under their names in the target, a result for each finished task, claims of tasks,
and ``end``, whose creation decides whether the plan is committed or discarded. Shards have their
final names. This module knows tasks by number, and a result as a folder of files.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import secrets
import shutil
import socket
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from shardkit.dataset.manifest import MANIFEST_NAME, Manifest, ShardEntry
from shardkit.dataset.opened import OpenedDirectory
from shardkit.errors import UsageError
from shardkit.record import dump_json, load_json
from shardkit.remote import fetch, objects
from shardkit.remote.dataset import fetch_manifest, fetch_splits
from shardkit.remote.process import call
from shardkit.remote.upload import CLAIM, manifest_at, send_file, taken, writable
from shardkit.system.files import SMALL_BYTES, read_small
from shardkit.system.safe_paths import UNFIT, split_path, walk
from shardkit.system.text import shell

_JOBS = ".shardkit-jobs"
_RESULTS = "results"
_CLAIMS = "claims"
_END = "end"

_ATTEMPTS = 3
"""Reads of a claim before it counts as damaged."""


class BucketPlan:
    """The plan at a URL, and a folder for copies of its files.

    ``claim`` is the content of the claim there, which names the plan. The folder is private; names
    are those in the target.
    """

    def __init__(self, url: str, claim: dict[str, Any], folder: Path) -> None:
        self.folder = folder
        self.url = url
        self.claim = claim
        self._below = f"{url}/{_JOBS}/{claim['plan']}"

    @classmethod
    def open(cls, url: str, folder: Path) -> Self:
        """Open the plan at a URL; UsageError if there is none."""
        url = writable(url)
        claim = claim_at(url)
        if not claim:
            raise _absent(url)
        return cls(url, claim, folder)

    def reserve(self) -> bool:
        """Claim the URL for the plan; return whether no other plan or upload has it."""
        return bool(call(objects.create, self.url, CLAIM, _as_object(self.claim)))

    def release(self) -> None:
        """Remove the claim, so that the URL is free."""
        call(objects.delete, self.url, [CLAIM])

    @property
    def is_current(self) -> bool:
        """Whether the plan was neither committed nor discarded."""
        return claim_at(self.url) == self.claim

    def require_plan(self) -> None:
        """Refuse to use the plan once it was committed or discarded."""
        if not self.is_current:
            raise _absent(self.url)

    def put(self, names: Sequence[str]) -> None:
        """Copy files of the folder to the plan, in any order."""
        call(objects.send, self._below, self.folder, names)

    def get(self, names: Sequence[str]) -> None:
        """Copy files of the plan to the folder, unless they are there.

        UsageError if one is missing; CorruptDataset if one is damaged.
        """
        absent = [name for name in names if not (self.folder / name).exists()]
        if missing := call(objects.receive, self._below, self.folder, absent):
            self.require_plan()
            raise UsageError(
                f"the plan in {self.url} is incomplete: it lacks {missing[0]}",
                remedy="If `convert --plan-only` was interrupted, rerun it.",
            )

    def names(self) -> Collection[str]:
        """Return the objects of the plan, relative to its folder."""
        names: dict[str, int] = call(objects.sizes, self._below)
        return names.keys()

    def count_done(self) -> int:
        """Return the number of results in the store."""
        return sum(name.startswith(f"{_RESULTS}/") for name in self.names())

    def create_claims(self, tasks: int, *, take_over: bool) -> Iterator[int]:
        """Claim tasks in random order, by objects; a job that is killed leaves its claim."""
        tried: set[int] = set()
        while free := self._free(tasks, take_over=take_over) - tried:
            for number in random.sample(sorted(free), len(free)):
                name = _claim_name(number)
                if not (call(objects.create, self._below, name, _this_job()) or take_over):
                    break  # others are at work: see what they have left
                tried.add(number)
                yield number

    def _free(self, tasks: int, *, take_over: bool) -> set[int]:
        """Return the tasks without a result and, unless they are taken over, without a claim."""
        taken_names = {_RESULTS} if take_over else {_RESULTS, _CLAIMS}
        numbers = set(range(tasks))
        for above, _, name in (path.rpartition("/") for path in self.names()):
            if above in taken_names and name.isdecimal():
                numbers.discard(int(name))
        return numbers

    def delete_claim(self, number: int) -> None:
        """Delete the object."""
        call(objects.delete, self._below, [_claim_name(number)])

    def undone(self, tasks: int) -> list[int]:
        """Return the tasks without a result."""
        present = self.names()
        return [number for number in range(tasks) if _result_name(number) not in present]

    def void(self, numbers: Sequence[int]) -> None:
        """Delete results and claims of tasks, so that `work --claim` finds them."""
        names = [name(number) for number in numbers for name in (_result_name, _claim_name)]
        call(objects.delete, self._below, names)

    def receive_results(self, folders: Mapping[int, Path]) -> list[int]:
        """Copy the results of tasks to folders; return the tasks that have none."""
        names = {number: _result_name(number) for number in folders}
        missing = set(call(objects.receive, self._below, self.folder, [*names.values()]))
        for number, folder in folders.items():
            if names[number] not in missing:
                _unpack(self.folder / names[number], folder)
        return [number for number, name in names.items() if name in missing]

    def send_result(self, number: int, folder: Path) -> None:
        """Upload the folder that is the result of a task, which marks the task as done."""
        self._require_current()
        name = _result_name(number)
        _pack(folder, self.folder / name)
        self.put([name])
        (self.folder / name).unlink()

    def send_shard(self, root: Path, entry: ShardEntry, name: str) -> None:
        """Upload the shard ``name`` of the folder ``root``, unless it is there.

        UsageError if the plan was committed or discarded.
        """
        self._require_current()
        if self.digests([name]).get(name) != entry.sha256:
            send_file(root, self.url, replace(entry, name=name), None)

    def digests(self, shards: Sequence[str]) -> dict[str, str]:
        """Return the SHA-256 that was stored with each shard; leave out missing ones."""
        digests: dict[str, str] = call(objects.digests, self.url, shards)
        return digests

    def sizes(self) -> dict[str, int]:
        """Return the size of each object below the URL."""
        sizes: dict[str, int] = call(objects.sizes, self.url)
        return sizes

    def _require_current(self) -> None:
        if not self.is_current:
            raise UsageError(
                f"the plan in {self.url} was committed or discarded while this job was running; "
                "its shard is not needed"
            )

    def publish(self) -> None:
        """Upload the committed dataset, whose shards are in the store, and remove the plan."""
        if not (self.end(b"commit") and self.is_current):
            raise _absent(self.url)
        for entry in OpenedDirectory(self.folder).files:
            if not isinstance(entry, ShardEntry):
                send_file(self.folder, self.url, entry, None)
        content = read_small(self.folder / MANIFEST_NAME)
        if not call(objects.create, self.url, MANIFEST_NAME, content):
            raise taken(self.url, "another")
        self.release()  # first: without it, the rest is only waste
        _remove_waste(self.url)

    def end(self, how: bytes) -> bool:
        """Commit or discard the plan; return whether that is possible. Only the first counts."""
        return bool(call(objects.create, self._below, _END, how))

    def remove(self, shards: Collection[str]) -> None:
        """Remove a plan that was discarded, and shards of its jobs."""
        present = self.sizes() if shards else ()
        call(objects.delete, self.url, [name for name in shards if name in present])
        names = [name for name in self.names() if name != _END]  # which stops a late commit
        call(objects.delete, self._below, names)
        self.release()


def committed_at(url: str) -> dict[str, Manifest] | None:
    """Return the manifests of the dataset at a URL, by split; None if it holds a plan or nothing.

    What a commit left that was killed after publishing is removed.
    """
    url = writable(url)
    if claim_at(url) is not None or manifest_at(url) is None:
        return None
    _remove_waste(url)
    return {name: fetch_manifest(split_url)[1] for name, split_url in fetch_splits(url).items()}


def _absent(url: str) -> UsageError:
    """Return the error that a URL holds no plan, or no longer the one that it held."""
    if claim_at(url) is None and manifest_at(url) is not None:
        _remove_waste(url)  # of a commit that was killed
    return UsageError(
        f"{url} contains no plan",
        remedy=f"Write one with `shardkit convert ... {shell(url)} --plan-only`; if it was "
        "committed, its dataset is complete.",
    )


def _remove_waste(url: str) -> None:
    """Remove the objects of all plans for a URL that holds a dataset."""
    below = f"{url}/{_JOBS}"
    call(objects.delete, below, [*call(objects.sizes, below)])


def claim_at(url: str) -> dict[str, Any] | None:
    """Return the claim at a URL, or {} if it is not that of a plan."""
    for _ in range(_ATTEMPTS):
        content = call(fetch.get, url, CLAIM, SMALL_BYTES)
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


def _result_name(number: int) -> str:
    return f"{_RESULTS}/{number:06d}"


def _claim_name(number: int) -> str:
    return f"{_CLAIMS}/{number:06d}"


def _pack(folder: Path, path: Path) -> None:
    """Write the files of a folder to an uncompressed zip file."""
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, is_folder in walk(folder):
            if not is_folder:
                archive.writestr(zipfile.ZipInfo(name), (folder / name).read_bytes())


def _unpack(path: Path, folder: Path) -> None:
    """Turn a zip file of `_pack` into a folder, without a result if the file is damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > path.stat().st_size:
                raise ValueError("its entries overlap")
            for entry in archive.infolist():
                if len(split_path(entry.filename)) > 2 or entry.compress_type != zipfile.ZIP_STORED:
                    raise ValueError("it is deep or compressed")
                (folder / entry.filename).parent.mkdir(parents=True, exist_ok=True)
                (folder / entry.filename).write_bytes(archive.read(entry))
    except (ValueError, RuntimeError, EOFError, FileExistsError, *UNFIT, zipfile.BadZipFile):
        shutil.rmtree(folder, ignore_errors=True)
    path.unlink()
