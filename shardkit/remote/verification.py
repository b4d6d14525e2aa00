"""A local mirror of a dataset in an object store, to verify it as a local one.

Shards are empty files of the listed sizes, filled one at a time.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from shardkit.dataset.manifest import MANIFEST_NAME, Manifest
from shardkit.dataset.opened import OpenedDirectory
from shardkit.errors import CorruptDataset, ShardkitError, UsageError
from shardkit.remote import fetch, objects
from shardkit.remote.dataset import refuse_root
from shardkit.remote.process import call
from shardkit.system.files import SMALL_BYTES, as_name, has_sha256, split_text_path
from shardkit.system.safe_paths import NO_PATH, UNFIT, make_folder, open_plain, opened
from shardkit.system.temporary import TemporaryFolder
from shardkit.verification.findings import CheckedShard, Finding, ShardCheck
from shardkit.verification.shard_check import Checks

_ATTEMPTS = 3

_MOST = 1_000_000
"""Maximum objects below a URL: a dataset has thousands."""


class RemoteChecks(Checks):
    """Checks of a dataset in an object store, in a local mirror of it."""

    def __init__(self, url: str, root: Path | None = None) -> None:
        refuse_root(url, root)
        self.location = url
        self.root = None

    @contextlib.contextmanager
    def directory(self) -> Iterator[Path]:
        """Provide a temporary folder with all files: shards have their size, but no content."""
        url = self.location
        if url.startswith("http"):
            raise UsageError(f"{url} cannot be verified: a web server does not list its files")
        sizes = call(objects.sizes, url)
        if MANIFEST_NAME not in sizes:
            raise UsageError(f"{url} is not a shardkit dataset: it contains no {MANIFEST_NAME}")
        if len(sizes) > _MOST:
            raise ShardkitError(
                f"{url} contains {len(sizes):,} files, more than a dataset can have"
            )
        with TemporaryFolder() as mirror:
            for name, size in sizes.items():
                _put(mirror, name, size)
            for prefix, manifest in _manifests(mirror, url, sizes):
                manifest.require_own_shards(  # they are files of this machine
                    f"{url} is an attached dataset; verify it where it was created"
                )
                for entry in manifest.index_files:
                    path = mirror / as_name(prefix + entry.name)
                    right = sizes.get(prefix + entry.name) == entry.bytes
                    for _ in range(_ATTEMPTS if right else 0):
                        call(fetch.download, url, prefix + entry.name, path)
                        if has_sha256(path, entry.sha256, mirror):
                            break
            yield mirror

    def check(self, task: ShardCheck) -> CheckedShard:
        """Fetch a shard, check it, and remove its content again."""
        path = task.path
        for _ in range(_ATTEMPTS):  # a fault on the way is no damage
            call(fetch.download, self.location, task.file, path)
            checked = super().check(task)
            if checked.sha256 == task.entry.sha256:
                break
        size = path.stat().st_size
        os.truncate(path, 0)  # frees the space
        os.truncate(path, size)
        return checked

    def stored_digests(self, tasks: Sequence[ShardCheck]) -> list[Finding]:
        """Return the shards whose upload stored another SHA-256 than the manifest's."""
        names = [task.file for task in tasks]
        stored = call(objects.digests, self.location, names)
        return [
            Finding(file=name, reason="the SHA-256 stored with it differs from the manifest")
            for name, task in zip(names, tasks, strict=True)
            if stored.get(name, "") not in ("", task.entry.sha256)
        ]


def _put(mirror: Path, name: str, size: int) -> None:
    """Create an empty file of a size, unless no dataset has a file of that name."""
    try:
        _make(mirror, name, size)
    except (ValueError, OverflowError, FileExistsError, *UNFIT):
        pass
    except OSError as error:
        if error.errno not in (*NO_PATH, errno.EINVAL, errno.EFBIG):
            raise ShardkitError(
                f"{mirror} cannot be written: {error.strerror}",
                remedy="Set TMPDIR to a folder with more space.",
            ) from error


def _make(mirror: Path, name: str, size: int) -> None:
    """Create an empty file of a size; the disk stores nothing of it."""
    *above, _ = split_text_path(name)
    if above:
        make_folder(mirror, "/".join(above))
    path = mirror / as_name(name)
    with opened(mirror, "/".join(above)) as parent:
        descriptor = open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd=parent)
    with open(descriptor, "wb") as file:
        file.truncate(size)


def _manifests(mirror: Path, url: str, sizes: dict[str, int]) -> Iterator[tuple[str, Manifest]]:
    """Fetch all manifests; yield the prefix and manifest of each intact dataset."""
    top = _fetched(mirror, url, "", sizes)
    for dataset in top.splits.values() if top else ():
        if not dataset.split or _fetched(mirror, url, dataset.prefix, sizes):
            with contextlib.suppress(UsageError):  # of splits again
                yield dataset.prefix, dataset.manifest


def _fetched(mirror: Path, url: str, prefix: str, sizes: dict[str, int]) -> OpenedDirectory | None:
    """Fetch a manifest; None if it is damaged, which the verification will find."""
    name = prefix + MANIFEST_NAME
    for _ in range(_ATTEMPTS if sizes.get(name, _MOST << 10) <= SMALL_BYTES else 0):
        call(fetch.download, url, name, mirror / as_name(name))
        with contextlib.suppress(CorruptDataset, UsageError):
            return OpenedDirectory(mirror / as_name(prefix))
    return None
