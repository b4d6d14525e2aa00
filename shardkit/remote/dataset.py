"""A dataset in an object store: manifest and index in a local cache, and shards on demand.

The cache makes it a local one: engines, orders and decoding read the same file descriptors.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardkit.dataset.handles import ShardFile, drop_removed, forget, is_open, shard_file
from shardkit.dataset.index import Rows
from shardkit.dataset.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    SplitsManifest,
    parse_manifest,
)
from shardkit.dataset.opened import Fetching, OpenedDataset
from shardkit.dataset.shard_files import Access, ShardFiles
from shardkit.errors import CorruptDataset, CorruptShard, UsageError, setting
from shardkit.record import LABEL
from shardkit.remote import fetch
from shardkit.remote.cache import Cache, RemoteFile, open_cache
from shardkit.remote.fetch import fetch_file
from shardkit.remote.process import call, send
from shardkit.system.files import SMALL_BYTES, as_name, has_sha256, write_atomically
from shardkit.system.text import parse_bytes

_USED_SECONDS = 5.0
"""Interval at which the use of a shard is noted in the cache: the time of its file."""

_ATTEMPTS = 3


@dataclass(frozen=True)
class InStore(Access):
    """The access to the shards of a dataset in an object store, through a cache."""

    url: str
    cache: Cache

    def files(self, dataset: OpenedDataset) -> ShardFiles:
        """Return the copies of the shards."""
        return CachedShards(dataset, f"{self.url}/{dataset.folder}".rstrip("/"), self.cache)

    def location(self, directory: Path) -> str:
        """Return the URL."""
        return self.url

    def fetch(self, directory: Path, entries: Iterable[FileEntry]) -> None:
        """Fetch files other than shards."""
        try:
            for entry in entries:
                path = directory / as_name(entry.name)
                self.cache.make_folder(path.parent)
                call(fetch_file, self.cache, _remote(self.url, entry), path)
        except OSError as error:
            raise self.cache.unusable(error) from error


class CachedShards(ShardFiles):
    """The copies of shards in a cache, fetched when needed.

    ``dataset`` has the local copy of manifest and index.
    """

    def __init__(self, dataset: OpenedDataset, url: str, cache: Cache) -> None:
        super().__init__(dataset)
        self._url = url
        self._cache = cache
        self._used: dict[str, float] = {}
        self.lookahead = 2 * max(shard.rows for shard in self._entries)  # while another is read
        self.remedy = f"It was removed from the cache; read it again to fetch it from {url}."

    def open(self, shards: Collection[int]) -> dict[int, ShardFile]:
        """Return some shards, open, after fetching those that are not in the cache.

        CorruptShard if the store holds other content; ShardkitError if one cannot be fetched.
        """
        if len(shards) > 1:
            self._fetch_ahead(sorted(shards))
        return {number: self._open(number) for number in sorted(shards)}

    def announce(self, rows: npt.NDArray[np.int64], index: Rows) -> None:
        """Fetch the shards of some rows into the cache, without waiting."""
        self._fetch_ahead(np.unique(self.numbers(rows)).tolist())

    def forget(self, shard: int) -> None:
        """Remove a damaged shard from the cache, so that it is fetched again."""
        self.path(shard).unlink(missing_ok=True)
        super().forget(shard)

    def _find(self, shard: int) -> Path:
        return self._cache.shard(self._entries[shard].sha256)

    def _open(self, shard: int) -> ShardFile:
        path = self.path(shard)
        entry = self._entries[shard]
        size = entry.bytes
        sha256 = entry.sha256
        if not is_open(path, sha256):
            drop_removed()  # an open file keeps its space on the disk
        with contextlib.suppress(CorruptShard):  # it is not there, most likely
            file = shard_file(path, size, sha256)
            if self._cache.holds(file.descriptor, sha256):
                self._note_use(file, sha256)
                return file
            forget(path, sha256)
        call(fetch.shard, self._cache, _remote(self._url, entry))
        try:
            file = shard_file(path, size, sha256)
            self._cache.accept(file.descriptor, sha256)
        finally:
            call(fetch.release, sha256)
        return file

    def _note_use(self, file: ShardFile, sha256: str) -> None:
        now = time.monotonic()
        if now - self._used.get(sha256, 0.0) > _USED_SECONDS:
            self._used[sha256] = now
            file.touch()

    def _fetch_ahead(self, shards: Iterable[int]) -> None:
        """Fetch shards into the cache, without waiting."""
        for shard in shards:
            path = self.path(shard)
            entry = self._entries[shard]
            if not is_open(path, entry.sha256) and not path.exists():
                send(fetch.ahead, self._cache, _remote(self._url, entry))


def open_remote(
    url: str, split: str | None, root: str | os.PathLike[str] | None, fetching: Fetching
) -> OpenedDataset:
    """Open one dataset in an object store, after fetching its manifest and its index."""
    refuse_root(url, root)
    url = f"{url}/{split}" if split else url
    most = None if fetching.limit is None else parse_bytes(fetching.limit, "cache_limit")
    if fetching.cache is None:
        raise UsageError(
            f"{url} is read through a local cache: open_dataset({url!r}, cache=DIR, "
            "cache_limit='50GB')"
        )
    access = InStore(url, open_cache(fetching.cache, most))
    return OpenedDataset(_fetch_dataset(access), access=access)


def refuse_root(url: str, root: str | os.PathLike[str] | None) -> None:
    """Refuse a folder of archives, which a dataset in an object store does not have."""
    if root is not None:
        raise UsageError(
            f"{url} is not an attached dataset;", remedy=f"leave out {setting('root')}"
        )


def _fetch_dataset(access: InStore) -> Path:
    """Fetch the manifest and the index of a dataset; return the local folder with both."""
    url = access.url
    cache = access.cache
    content, manifest = fetch_manifest(url)
    manifest.require_own_shards(  # they are files of the machine that it is read on
        f"{url} is an attached dataset, which can only be read where it was created"
    )
    name = hashlib.sha256(content).hexdigest()
    folder = cache.dataset(name)
    label = manifest.layer_of(LABEL)  # the index of the images needs it
    access.fetch(folder, (*manifest.files, *(label.index_files if label else ())))
    try:
        cache.make_folder(folder)
        if not has_sha256(folder / MANIFEST_NAME, name, cache.folder):  # written last
            write_atomically(folder / MANIFEST_NAME, content)
    except OSError as error:
        raise cache.unusable(error) from error
    return folder


def _remote(url: str, entry: FileEntry) -> RemoteFile:
    return RemoteFile(url, entry.name, entry.bytes, entry.sha256)


def fetch_manifest(url: str) -> tuple[bytes, Manifest]:
    """Return the bytes and the content of the manifest of one dataset.

    UsageError if there is none, or it is of splits. CorruptDataset if it is damaged, also when
    fetched again.
    """
    content, manifest = _fetch_any_manifest(url)
    if isinstance(manifest, SplitsManifest):
        raise manifest.refusal(url, f"with {setting('split', manifest.first)}")
    return content, manifest


def fetch_splits(url: str) -> dict[str, str]:
    """Return the URL of each split of a dataset; "" without splits."""
    _, manifest = _fetch_any_manifest(url)
    splits = manifest.splits if isinstance(manifest, SplitsManifest) else ("",)
    return {name: f"{url}/{name}".rstrip("/") for name in splits}


def _fetch_any_manifest(url: str) -> tuple[bytes, Manifest | SplitsManifest]:
    for _ in range(_ATTEMPTS - 1):
        with contextlib.suppress(CorruptDataset):
            return _try_manifest(url)
    return _try_manifest(url)


def _try_manifest(url: str) -> tuple[bytes, Manifest | SplitsManifest]:
    content = call(fetch.get, url, MANIFEST_NAME, SMALL_BYTES)
    if content is None:
        raise UsageError(
            f"{url} is not a shardkit dataset: it contains no {MANIFEST_NAME};",
            remedy="convert its files, for example with `shardkit convert webdataset`",
        )
    return content, parse_manifest(content, f"{url}/{MANIFEST_NAME}")
