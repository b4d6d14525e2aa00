"""A local mirror of a dataset in an object store, to verify it; shards are fetched one by one."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardkit.dataset.manifest import (
    MANIFEST_NAME,
    AttachedManifest,
    Manifest,
    SplitsManifest,
    load_any_manifest,
)
from shardkit.errors import CorruptDataset, ShardkitError, UsageError
from shardkit.stores.process import call
from shardkit.system.files import SMALL_BYTES, as_name, has_sha256
from shardkit.system.safe_paths import make_folder, open_plain, opened, parts_of
from shardkit.verification.shard_check import CheckedShard, Finding, ShardCheck, check_shard

_ATTEMPTS = 3

_MOST = 1_000_000
"""Maximum objects below a URL: a dataset has thousands."""


@dataclass(frozen=True)
class RemoteChecks:
    """Checks of the shards of a mirror."""

    url: str

    def check(self, task: ShardCheck) -> CheckedShard:
        """Fetch a shard, check it, and remove its content again."""
        path = task.directory / as_name(task.entry.name)
        for _ in range(_ATTEMPTS):  # a fault on the way is no damage
            call("fetch:download", self.url, task.prefix + task.entry.name, path)
            checked = check_shard(task)
            if checked.sha256 == task.entry.sha256:
                break
        size = path.stat().st_size
        os.truncate(path, 0)  # frees the space
        os.truncate(path, size)
        return checked

    def stored_digests(self, tasks: Sequence[ShardCheck]) -> list[Finding]:
        """Return the shards whose upload stored another SHA-256 than the manifest's."""
        names = [task.prefix + task.entry.name for task in tasks]
        stored = [call("write:digest", self.url, name) for name in names]
        return [
            Finding(file=name, reason="the SHA-256 stored with it differs from the manifest")
            for name, task, digest in zip(names, tasks, stored, strict=True)
            if digest and digest != task.entry.sha256
        ]


@contextlib.contextmanager
def mirrored(url: str) -> Iterator[Path]:
    """Yield a temporary folder with the files below a URL: shards have their size, but no content.

    Raises:
        UsageError: If there is no dataset.
        ShardkitError: If the store cannot be read.
    """
    if url.startswith("http"):
        raise UsageError(f"{url} cannot be verified: a web server does not list its files")
    sizes = call("write:sizes", url)
    if MANIFEST_NAME not in sizes:
        raise UsageError(f"{url} is not a shardkit dataset: it contains no {MANIFEST_NAME}")
    if len(sizes) > _MOST:
        raise ShardkitError(f"{url} holds {len(sizes):,} files, more than a dataset can have")
    with tempfile.TemporaryDirectory(prefix="shardkit-verify-") as folder:
        place = Path(folder)
        for name, size in sizes.items():
            with contextlib.suppress(OSError, ValueError):  # a name that no dataset has
                _make(place, name, size)
        for prefix, manifest in _manifests(place, url, sizes):
            if isinstance(manifest, AttachedManifest):  # it names files of this machine
                raise UsageError(f"{url} is an attached dataset; verify it where it was made")
            for entry in manifest.files:
                path = place / as_name(prefix + entry.name)
                for _ in range(_ATTEMPTS if sizes.get(prefix + entry.name) == entry.bytes else 0):
                    call("fetch:download", url, prefix + entry.name, path)
                    if has_sha256(path, entry.sha256, place):
                        break
        yield place


def _make(place: Path, name: str, size: int) -> None:
    """Create an empty file of a size; the disk stores nothing of it."""
    *above, _ = parts_of(as_name(name))
    if above:
        make_folder(place, "/".join(above))
    path = place / as_name(name)
    with opened(place, "/".join(above)) as parent:
        descriptor = open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd=parent)
    with open(descriptor, "wb") as file:
        file.truncate(size)


def _manifests(place: Path, url: str, sizes: dict[str, int]) -> Iterator[tuple[str, Manifest]]:
    """Fetch all manifests; yield the prefix and manifest of each intact dataset."""
    top = _fetched(place, url, "", sizes)
    if isinstance(top, Manifest):
        yield "", top
    for split in top.splits if isinstance(top, SplitsManifest) else ():
        manifest = _fetched(place, url, f"{split}/", sizes)
        if isinstance(manifest, Manifest):
            yield f"{split}/", manifest


def _fetched(
    place: Path, url: str, prefix: str, sizes: dict[str, int]
) -> Manifest | SplitsManifest | None:
    """Fetch a manifest; None if it is damaged, which the verification will find."""
    name = prefix + MANIFEST_NAME
    for _ in range(_ATTEMPTS if sizes.get(name, _MOST << 10) <= SMALL_BYTES else 0):
        call("fetch:download", url, name, place / as_name(name))
        with contextlib.suppress(CorruptDataset, UsageError):
            return load_any_manifest(place / as_name(prefix))
    return None
