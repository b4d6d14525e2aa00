"""Upload a dataset to an object store. The manifest comes last, and only if there is none."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

from shardkit.contracts import Target
from shardkit.dataset.manifest import MANIFEST_NAME, FileEntry, ShardEntry
from shardkit.dataset.opened import OpenedDirectory
from shardkit.errors import CorruptDataset, UsageError, setting
from shardkit.record import dump_json
from shardkit.remote import fetch, objects
from shardkit.remote.process import call
from shardkit.system.files import SMALL_BYTES, as_name, read_small, sha256_of
from shardkit.system.pool import Progress, Report
from shardkit.system.text import as_command
from shardkit.system.urls import WRITABLE, as_url

CLAIM = ".shardkit-upload.json"
"""Names the dataset or plan that is being uploaded, so that no other one writes there.

Otherwise two uploads could overwrite each other's shards before one of them creates the manifest.
It is created before looking for a manifest and deleted after writing it. So whoever creates it
later sees the manifest.
"""

_WRITABLE = f"{', '.join(WRITABLE[:-1])} or {WRITABLE[-1]}"


class UploadTarget(Target):
    """A URL to which the dataset is uploaded from the folder ``staging``."""

    def __init__(self, url: str, staging: str | os.PathLike[str] | None) -> None:
        if staging is None:
            raise UsageError(
                f"{url} is uploaded from a local copy of the dataset;",
                remedy=f"choose a folder for it with {setting('staging')}",
                where=url,
            )
        self.url = url
        self.folder = Path(staging)

    def prepare(self) -> None:
        """Refuse a URL with another dataset than the one that may be finished in `folder`."""
        existing = manifest_at(writable(self.url))
        if existing is None:
            return
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if existing == read_small(self.folder / MANIFEST_NAME):
                return
        raise taken(self.url)

    def publish(self) -> bool:
        """Upload the dataset."""
        return upload(self.folder, self.url)


def upload(
    directory: str | os.PathLike[str], url: str, *, on_progress: Report | None = None
) -> bool:
    """Upload a dataset, or a folder of splits, to an object store.

    Repeat an interrupted call to resume it. If several datasets are uploaded to one URL at once,
    exactly one upload succeeds. Readers see a dataset only once it is complete.

    Args:
        directory: The dataset. Each file is compared with its SHA-256 before it is sent.
        url: ``s3://BUCKET/PATH``, ``gs://`` or ``az://``, without a dataset yet.
        on_progress: Called with the records and bytes uploaded since the last call.

    Returns:
        Whether anything was uploaded; False if the URL already contained this dataset.

    Raises:
        UsageError: If there is no dataset, the URL contains another one or one whose upload is
            unfinished, or access is denied.
        CorruptDataset: If a file differs from the manifest.
        ShardkitError: If the store cannot be used.
    """
    target = writable(url)
    root = Path(directory)
    dataset = OpenedDirectory(root).with_own_shards(
        f"{root} is an attached dataset; convert it, then upload the result"
    )
    content = read_small(root / MANIFEST_NAME)
    claim = dump_json({"manifest": hashlib.sha256(content).hexdigest()})
    if not call(objects.create, target, CLAIM, claim):
        raise occupied(target)
    # Only now: an upload that finished before our claim has written its manifest.
    existing = manifest_at(target)
    if existing is None:
        if on_progress:
            on_progress(Progress(total=dataset.rows))
        present = call(objects.sizes, target)
        for entry in dataset.files:
            send_file(root, target, entry, present.get(entry.name))
            if on_progress:
                rows = entry.rows if isinstance(entry, ShardEntry) else 0
                on_progress(Progress(images=rows, bytes=entry.bytes))
        if not call(objects.create, target, MANIFEST_NAME, content):
            existing = b""
    call(objects.delete, target, [CLAIM])
    if existing not in (None, content):
        raise taken(target, "another")
    return existing is None


def writable(url: str | os.PathLike[str]) -> str:
    """Return a URL to write to; UsageError if it is not one."""
    target = as_url(url)
    if target is None:
        raise UsageError(f"{url} is not a URL", remedy=f"use {_WRITABLE}", where=url)
    if not target.startswith(WRITABLE):
        raise UsageError(
            f"{target} can only be read;", remedy=f"write to {_WRITABLE}", where=target
        )
    return target


def occupied(target: str) -> UsageError:
    """Return the error that another conversion is writing to a URL."""
    return UsageError(
        f"another upload to {target} is running or was interrupted, or jobs are building a "
        "dataset there",
        remedy=f"Wait for it or rerun it; to abandon it, delete {target}/{CLAIM}",
    )


def taken(target: str, which: str = "a") -> UsageError:
    """Return the error that a URL holds a dataset, or another one."""
    return UsageError(
        f"{target} already contains {which} dataset;", remedy="choose another URL", where=target
    )


def manifest_at(url: str) -> bytes | None:
    """Return the manifest of the dataset at a URL; None if there is no dataset."""
    content: bytes | None = call(fetch.get, url, MANIFEST_NAME, SMALL_BYTES)
    return content


def send_file(root: Path, url: str, entry: FileEntry, size: int | None) -> None:
    """Upload a file, unless an earlier attempt did."""
    name = entry.name
    if size == entry.bytes and call(objects.digests, url, [name]).get(name) == entry.sha256:
        return
    path = root / as_name(name)
    if sha256_of(path, root) != entry.sha256:
        raise CorruptDataset(
            f"{path} differs from the manifest: its SHA-256 does not match",
            remedy=f"To list all damage, run {as_command('verify', root)}.",
        )
    call(objects.put, url, name, path, entry.sha256)
