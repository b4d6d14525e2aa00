"""Reindex: build the index again from the shards, which are the truth."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from shardkit.errors import CorruptDataset, CorruptShard
from shardkit.files import sha256_of, sync
from shardkit.index import INDEX_DIRECTORY, save_index
from shardkit.indexing import index_shard
from shardkit.manifest import load_manifest
from shardkit.pool import Progress, Report
from shardkit.registry import get_format

_SCRATCH = ".index-"


def reindex(directory: str | Path, *, on_progress: Report | None = None) -> int:
    """Replace the index of the dataset in ``directory`` by one made from its shards.

    Args:
        directory: The dataset.
        on_progress: Called with what was done since the last call.

    Returns:
        The number of rows.

    Raises:
        UsageError: If there is no dataset.
        CorruptDataset: If the manifest or a shard is damaged, so that an index of it would make
            the damage look right. Nothing is changed then.
    """
    directory = Path(directory)
    manifest = load_manifest(directory)
    storage = get_format(manifest.format)
    parts = []
    for shard in manifest.shards:
        path = directory / shard.name
        if not path.is_file() or sha256_of(path) != shard.sha256:
            raise CorruptShard(
                f"{path} is missing or damaged; an index made from it would hide that. "
                f"`shardkit verify {directory}` tells more."
            )
        parts.append(index_shard(storage, path))
        if on_progress:
            on_progress(Progress(images=shard.rows, bytes=shard.bytes))
    for left in directory.glob(f"{_SCRATCH}*"):  # by a run that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=directory) as scratch:
        names = save_index(parts, Path(scratch))
        expected = {file.name: file.sha256 for file in manifest.files}
        for name in names:
            if sha256_of(Path(scratch) / name) != expected.get(name):
                raise CorruptDataset(
                    f"the index made from the shards of {directory} is not the one that its "
                    "manifest describes; convert again"
                )
        _replace(directory / INDEX_DIRECTORY, Path(scratch))
    return manifest.rows


def _replace(old: Path, scratch: Path) -> None:
    """Put the new index from ``scratch`` in the place of the old one, which goes there."""
    new = scratch / INDEX_DIRECTORY
    for path in (*new.iterdir(), new):
        sync(path)
    if os.path.lexists(old):
        old.rename(scratch / "old")
    new.rename(old)
    sync(old.parent)
