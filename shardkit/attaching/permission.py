"""Which folders of archives the user has named, so that readers follow a manifest there.

A manifest may come from anywhere, so it alone must not make a program open files elsewhere.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from shardkit.dataset.manifest import Manifest
from shardkit.dataset.opened import OpenedDataset
from shardkit.errors import UsageError, setting
from shardkit.system.files import as_name, write_atomically
from shardkit.system.text import as_command, printable
from shardkit.system.user_files import remove_leftovers, state_folder


def confirmed_folder(dataset: OpenedDataset) -> Path:
    """Return the folder of an attached dataset, which the user must have named; see `remember`."""
    manifest = dataset.manifest
    assert manifest.archives is not None
    folder = Path(os.path.realpath(dataset.path / as_name(manifest.archives)))
    if not os.path.exists(_mark(dataset.path, manifest)):
        raise UsageError(
            f"{dataset.path} reads files in {printable(str(folder))}, which you have not attached "
            "on this machine",
            remedy=f"If you trust it, pass their folder ({setting('root')} in Python, or --root "
            "of `shardkit verify`), or attach the files: "
            f"{as_command('attach', manifest.format, 'ARCHIVES', dataset.path)}",
        )
    return folder


def remember(directory: Path, manifest: Manifest) -> bool:
    """Remember that the user named the archives of a dataset; return whether that was possible."""
    mark = _mark(directory, manifest)
    try:
        mark.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        remove_leftovers(mark)
        write_atomically(mark, os.fsencode(os.path.realpath(directory)) + b"\n")
    except OSError:
        return False
    return True


def _mark(directory: Path, manifest: Manifest) -> Path:
    """Return the file that says so. Its name covers the dataset's path and content.

    Layers are not part of it: their shards are in the dataset's directory.
    """
    path = os.fsencode(os.path.realpath(directory))
    name = hashlib.sha256(path + b"\0" + manifest.base.digest.encode()).hexdigest()
    return state_folder() / "attached" / name
