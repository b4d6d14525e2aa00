"""A dataset in an object store: manifest and index in a local cache, and shards on demand.

The cache makes it a local one: engines, orders and decoding read the same file descriptors.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardkit.dataset.handles import ShardFile, drop_removed, forget, is_open, shard_file
from shardkit.dataset.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Layer,
    Manifest,
    ShardEntry,
    SplitsManifest,
    parse_manifest,
)
from shardkit.errors import CorruptDataset, CorruptShard, UsageError
from shardkit.record import LABEL
from shardkit.stores import fetch
from shardkit.stores.cache import Cache, RemoteFile
from shardkit.stores.fetch import fetch_file
from shardkit.stores.process import call, send
from shardkit.system.files import SMALL_BYTES, as_name, has_sha256, write_atomically

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

    def lookahead(self, shards: Sequence[ShardEntry]) -> int:
        """Return the rows to fetch ahead: two shards, while another one is read."""
        return 2 * max(shard.rows for shard in shards)

    def discard(self, entry: FileEntry) -> None:
        """Remove a damaged file from the cache."""
        self.path(entry).unlink(missing_ok=True)
        forget(self.path(entry), entry.sha256)

    def open(self, entry: ShardEntry) -> ShardFile:
        """Return an open shard; fetch it first unless it is in the cache.

        Raises:
            CorruptShard: If the store holds other content.
            ShardkitError: If it cannot be fetched.
        """
        path, size, sha256 = self.path(entry), entry.bytes, entry.sha256
        if not is_open(path, sha256):
            drop_removed()  # an open file keeps its space on the disk
        with contextlib.suppress(CorruptShard):  # it is not there, most likely
            file = shard_file(path, size, sha256)
            if self.cache.holds(file.descriptor, sha256):
                self._note_use(file, sha256)
                return file
            forget(path, sha256)
        call(fetch.shard, self.cache, _remote(self.url, entry))
        try:
            file = shard_file(path, size, sha256)
            self.cache.accept(file.descriptor, sha256)
        finally:
            call(fetch.release, sha256)
        return file

    def _note_use(self, file: ShardFile, sha256: str) -> None:
        now = time.monotonic()
        if now - self._used.get(sha256, 0.0) > _USED_SECONDS:
            self._used[sha256] = now
            file.touch()

    def fetch_ahead(self, entries: Iterable[ShardEntry]) -> None:
        """Fetch shards into the cache, without waiting."""
        for entry in entries:
            path = self.path(entry)
            if not is_open(path, entry.sha256) and not path.exists():
                send(fetch.ahead, self.cache, _remote(self.url, entry))


def fetch_dataset(url: str, cache: Cache) -> Path:
    """Fetch the manifest and the index of a dataset; return the local folder with both.

    Raises:
        UsageError: If there is no dataset, the cache cannot be used, or access is denied.
        CorruptDataset: If the manifest or the index is damaged.
        ShardkitError: If the store cannot be read.
    """
    content, manifest = fetch_manifest(url)
    manifest.require_own_shards(  # they are files of the machine that it is read on
        f"{url} is an attached dataset, which can only be read where it was made"
    )
    name = hashlib.sha256(content).hexdigest()
    folder = cache.dataset(name)
    label = manifest.layer_of(LABEL)
    try:
        _fetch_files(url, cache, folder, manifest.files)
        if label is not None:  # the index of the images needs it
            _fetch_files(url, cache, folder, label.index_files)
        cache.make_folder(folder)
        if not has_sha256(folder / MANIFEST_NAME, name, cache.folder):  # written last
            write_atomically(folder / MANIFEST_NAME, content)
    except OSError as error:
        raise cache.unusable(error) from error
    return folder


def fetch_layer(cached: CachedShards, folder: Path, layer: Layer) -> None:
    """Fetch the manifest and the index of a layer into the folder of its dataset.

    Raises:
        CorruptDataset: If they are damaged.
        ShardkitError: If the store cannot be read.
    """
    try:
        _fetch_files(cached.url, cached.cache, folder, layer.index_files)
    except OSError as error:
        raise cached.cache.unusable(error) from error


def _fetch_files(url: str, cache: Cache, folder: Path, entries: Iterable[FileEntry]) -> None:
    for entry in entries:
        path = folder / as_name(entry.name)
        cache.make_folder(path.parent)
        call(fetch_file, cache, _remote(url, entry), path)


def _remote(url: str, entry: FileEntry) -> RemoteFile:
    return RemoteFile(url, entry.name, entry.bytes, entry.sha256)


def fetch_manifest(url: str) -> tuple[bytes, Manifest]:
    """Return the bytes and the content of the manifest of one dataset.

    Raises:
        UsageError: If there is none, or it is of splits.
        CorruptDataset: If it is damaged, also when fetched again.
    """
    content, manifest = _fetch_any_manifest(url)
    if isinstance(manifest, SplitsManifest):
        raise manifest.refusal(url, f"with split={manifest.first!r}")
    return content, manifest


def fetch_splits(url: str) -> dict[str, str]:
    """Return the URL of each split of a dataset; "" without splits.

    Raises:
        UsageError: If there is no dataset.
        CorruptDataset: If its manifest is damaged, also when fetched again.
    """
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
        raise UsageError(f"{url} is not a shardkit dataset: it contains no {MANIFEST_NAME}")
    return content, parse_manifest(content, f"{url}/{MANIFEST_NAME}")
