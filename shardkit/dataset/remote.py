"""A dataset in an object store: manifest and index in a local cache, and shards on demand."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from shardkit.dataset.handles import ShardFile, drop_removed, is_open, shard_file
from shardkit.dataset.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    SplitsManifest,
    parse_manifest,
)
from shardkit.errors import CorruptDataset, CorruptShard, UsageError
from shardkit.stores.cache import Cache, RemoteFile, open_cache
from shardkit.stores.process import call, send
from shardkit.system.files import SMALL_BYTES, write_atomically
from shardkit.system.safe_paths import make_folder

_USED_SECONDS = 5.0
"""Interval at which the use of a shard is noted in the cache: the time of its file."""

_ATTEMPTS = 3


@dataclass(frozen=True)
class CachedShards:
    """The shards of a dataset in an object store. Pickled, it is its URL and the cache's folder."""

    url: str
    cache: Cache
    _used: dict[str, float] = field(default_factory=dict, repr=False, compare=False)

    def path(self, entry: FileEntry) -> Path:
        """Return the path of a shard in the cache, where it may be missing."""
        return self.cache.shard(entry.sha256)

    def open(self, entry: FileEntry) -> ShardFile:
        """Return an open shard; fetch it first unless it is in the cache.

        Raises:
            CorruptShard: If the store holds other content.
            ShardkitError: If it cannot be fetched.
        """
        path, size, sha256 = self.path(entry), entry.bytes, entry.sha256
        if not is_open(path, sha256):
            drop_removed()  # an open file keeps its space on the disk
        try:
            file = shard_file(path, size, sha256)
        except CorruptShard:  # it is not there, most likely
            call("fetch:shard", self.cache, _remote(self.url, entry))
            try:
                file = shard_file(path, size, sha256)
            finally:
                call("fetch:release", sha256)
        now = time.monotonic()
        if now - self._used.get(sha256, 0.0) > _USED_SECONDS:
            self._used[sha256] = now
            file.touch()
        return file

    def fetch_ahead(self, entries: Iterable[FileEntry]) -> None:
        """Fetch shards into the cache, without waiting."""
        for entry in entries:
            path = self.path(entry)
            if not is_open(path, entry.sha256) and not path.exists():
                send("fetch:ahead", self.cache, _remote(self.url, entry))


def open_remote(
    url: str, cache: str | os.PathLike[str] | None, limit: int | None
) -> tuple[Path, CachedShards]:
    """Fetch the manifest and the index of a dataset.

    Returns:
        The local folder with both, and the shards.

    Raises:
        UsageError: If there is no dataset, the cache cannot be used, or access is denied.
        CorruptDataset: If the manifest or the index is damaged.
        ShardkitError: If the store cannot be read.
    """
    if cache is None:
        raise UsageError(
            f"{url} is read through a local cache: open_dataset({url!r}, cache=DIR, "
            "cache_limit='50GB')"
        )
    opened = open_cache(cache, limit)
    content, manifest = fetch_manifest(url)
    if isinstance(manifest, SplitsManifest):
        names = ", ".join(manifest.splits)
        first = next(iter(manifest.splits))
        raise UsageError(
            f"{url} contains one dataset per split ({names}); open one of them, for example with "
            f"split={first!r}"
        )
    name = hashlib.sha256(content).hexdigest()
    folder = opened.dataset(name)
    if not (folder / MANIFEST_NAME).is_file():  # written last
        for entry in manifest.files:
            path = folder / entry.name
            make_folder(opened.folder, os.path.relpath(path.parent, opened.folder))
            call("fetch:fetch", opened, _remote(url, entry), path)
        write_atomically(folder / MANIFEST_NAME, content)
    return folder, CachedShards(url, opened)


def _remote(url: str, entry: FileEntry) -> RemoteFile:
    return RemoteFile(url, entry.name, entry.bytes, entry.sha256)


def fetch_manifest(url: str) -> tuple[bytes, Manifest | SplitsManifest]:
    """Return the bytes of a manifest and what they state.

    Raises:
        UsageError: If there is none.
        CorruptDataset: If it is damaged, also when fetched again.
    """
    for attempt in range(_ATTEMPTS):
        content = call("fetch:get", url, MANIFEST_NAME, SMALL_BYTES)
        if content is None:
            raise UsageError(f"{url} is not a shardkit dataset: it contains no {MANIFEST_NAME}")
        try:
            return content, parse_manifest(content, f"{url}/{MANIFEST_NAME}")
        except CorruptDataset:
            if attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError
