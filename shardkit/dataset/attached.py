"""Where the archives of an attached dataset are, and whether readers may look there.

A manifest may come from anywhere, so it alone must not make a program open files elsewhere. Readers
follow it only if this user named the archives on the command line, as `shardkit attach` remembers
in the user's own folder, or names their folder when opening the dataset.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from shardkit.dataset.manifest import AttachedManifest, AttachedShard, FileEntry, Manifest
from shardkit.errors import UsageError
from shardkit.system.files import as_name, write_atomically


def shards_folder(directory: Path, manifest: Manifest, root: Path | None = None) -> Path:
    """Return the folder of a dataset's shards.

    Args:
        directory: The dataset.
        manifest: Its manifest.
        root: The folder of the archives, if the user named it.

    Raises:
        UsageError: If the manifest leads elsewhere, and the user has not named the archives; or if
            a dataset that is not attached has a ``root``.
    """
    if not isinstance(manifest, AttachedManifest):
        if root is not None:
            raise UsageError(
                f"{directory} is not an attached dataset: its shards are its own. Leave root out"
            )
        return directory
    if root is not None:
        return root.expanduser().absolute()
    folder = Path(os.path.realpath(directory / as_name(manifest.folder)))
    if not os.path.exists(_mark(directory, manifest)):
        raise UsageError(
            f"{directory} reads archives in {folder}, but you have not attached them here. If you "
            "trust it, name their folder (root= in Python, --root of `shardkit verify`), or name "
            "the archives: `shardkit attach ARCHIVES "
            f"{directory}`"
        )
    return folder


def is_replaced(entry: FileEntry, status: os.stat_result) -> bool:
    """Return whether a file is an archive identified by a time other than its own."""
    if not isinstance(entry, AttachedShard) or entry.sha256:
        return False
    return entry.modified != status.st_mtime_ns


def remember(directory: Path, manifest: AttachedManifest) -> bool:
    """Remember that the user named the archives; return whether that was possible."""
    mark = _mark(directory, manifest)
    try:
        mark.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(mark, os.fsencode(os.path.realpath(directory)) + b"\n")
    except OSError:
        return False
    return True


def _mark(directory: Path, manifest: AttachedManifest) -> Path:
    """Return the file that says so. Its name covers the dataset's path and content."""
    state = os.environ.get("XDG_STATE_HOME", "")
    above = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    place = os.fsencode(os.path.realpath(directory))
    name = hashlib.sha256(place + b"\0" + manifest.digest.encode()).hexdigest()
    return above / "shardkit" / "attached" / name
