"""Rebuild the index from the shards (`shardkit index`)."""

from __future__ import annotations

import os
from pathlib import Path

from shardkit.conversion.staging import scratch_folder
from shardkit.dataset.index import INDEX_DIRECTORY, Index, save_index
from shardkit.dataset.index_builder import index_shard
from shardkit.dataset.manifest import AttachedManifest, load_manifest
from shardkit.errors import CorruptDataset, CorruptShard, UsageError
from shardkit.registry import get_format
from shardkit.system.files import has_sha256, sha256_of, sync
from shardkit.system.pool import Progress, Report
from shardkit.system.safe_paths import remove_tree


def reindex(directory: str | Path, *, on_progress: Report | None = None) -> int:
    """Rebuild the index of the dataset in ``directory`` from its shards.

    Args:
        directory: The dataset.
        on_progress: Called with the progress since the last call.

    Returns:
        The number of rows.

    Raises:
        UsageError: If there is no dataset, or another process writes to it.
        CorruptDataset: If the manifest or a shard is damaged; its index would hide the damage.
            Nothing is changed then.
        ConversionFailed: If writing fails.
    """
    directory = Path(directory)
    with scratch_folder(directory, lambda: load_manifest(directory)) as scratch:
        return rebuild_index(directory, scratch, on_progress=on_progress)


def rebuild_index(directory: Path, scratch: Path, *, on_progress: Report | None = None) -> int:
    """Do what `reindex` does, in the folder of `shardkit.conversion.staging.scratch_folder`."""
    manifest = load_manifest(directory)
    if isinstance(manifest, AttachedManifest):
        raise UsageError(
            f"{directory} is attached: rerun its `shardkit attach` command with --force, which "
            "indexes the archives again"
        )
    storage = get_format(manifest.format)
    parts = []
    for shard in manifest.shards:
        path = directory / shard.name
        if not has_sha256(path, shard.sha256):
            raise CorruptShard(
                f"{path} is missing or damaged; an index built from it would hide that. For "
                f"details, run `shardkit verify {directory}`."
            )
        parts.append(index_shard(storage, path))
        if on_progress:
            on_progress(Progress(images=shard.rows, bytes=shard.bytes))
    expected = {file.name: file.sha256 for file in manifest.files}
    schema = manifest.fields_by_name
    names = save_index(parts, scratch, schema)
    index = Index(scratch, manifest.rows)
    if (
        any(sha256_of(scratch / name) != expected.get(name) for name in names)
        or index.content_digest(schema, manifest.lacking) != manifest.content_digest
    ):
        raise CorruptDataset(
            f"the index built from the shards of {directory} differs from its manifest; "
            "convert again"
        )
    _replace(directory / INDEX_DIRECTORY, scratch)
    return manifest.rows


def _replace(old: Path, scratch: Path) -> None:
    """Swap the new index in ``scratch`` with the old one."""
    new = scratch / INDEX_DIRECTORY
    for path in (*new.rglob("*"), new):
        sync(path)
    if os.path.lexists(old):
        old.rename(scratch / "old")
    new.rename(old)
    sync(old.parent)
    remove_tree(scratch, "old")
