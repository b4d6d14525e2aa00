"""Rebuild the index from the shards (`shardkit index`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePath

from shardkit.conversion.staging import scratch_folder
from shardkit.dataset.index import INDEX_DIRECTORY, Index, IndexSegment, save_index
from shardkit.dataset.index_builder import index_shard
from shardkit.dataset.opened import OpenedDataset
from shardkit.errors import CorruptDataset, CorruptShard
from shardkit.registry import get_format
from shardkit.system.files import has_sha256, sha256_of, sync
from shardkit.system.pool import Progress, Report
from shardkit.system.safe_paths import make_folder, opened, remove_tree
from shardkit.system.text import as_command


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
    with scratch_folder(directory, lambda: OpenedDataset(directory).manifest) as scratch:
        dataset = OpenedDataset(directory)
        if on_progress:
            on_progress(Progress(total=dataset.manifest.rows))
        for store in dataset.stores:
            rebuild_index(store, scratch, on_progress=None if store.layer else on_progress)
        return dataset.manifest.rows


def rebuild_index(
    store: OpenedDataset, scratch: Path, *, on_progress: Report | None = None
) -> None:
    """Do what `reindex` does, in the folder of `shardkit.conversion.staging.scratch_folder`."""
    directory = store.path
    manifest = store.manifest
    manifest.require_own_shards(
        f"{directory} is attached: rerun its `shardkit attach` command with --force, which "
        "indexes its files again"
    )
    storage = get_format(manifest.format)

    def segments() -> Iterator[IndexSegment]:
        for shard in manifest.shards:
            path = directory / shard.name
            if not has_sha256(path, shard.sha256):
                raise CorruptShard(
                    f"{path} is missing or damaged; an index built from it would hide that",
                    remedy=f"For details, run {as_command('verify', directory)}.",
                    where=path,
                )
            yield index_shard(storage, path)
            if on_progress:
                on_progress(Progress(images=shard.rows, bytes=shard.bytes))

    names = save_index(segments(), scratch, manifest.fields_by_name)
    expected = {file.name: file.sha256 for file in manifest.files}
    index = Index(scratch, manifest.rows, manifest.fields_by_name, manifest.lacking)
    if (
        any(sha256_of(scratch / name) != expected.get(name) for name in names)
        or index.content_digest() != manifest.content_digest
    ):
        raise CorruptDataset(
            f"the index built from the shards of {directory} differs from its manifest;",
            remedy="convert again",
        )
    for name in names:
        _replace(directory, name, scratch / name)


def _replace(directory: Path, name: str, path: Path) -> None:
    """Move a file of the new index into the dataset; other files in its folder stay."""
    above = str(PurePath(name).parent)
    for folder in (INDEX_DIRECTORY, above):
        if not (directory / folder).is_dir() or (directory / folder).is_symlink():
            remove_tree(directory, folder)  # of a link, only the link
            make_folder(directory, folder)
            sync((directory / folder).parent)
    if (directory / name).is_dir():
        remove_tree(directory, name)
    sync(path)
    with opened(directory, above) as descriptor:
        os.replace(path, PurePath(name).name, dst_dir_fd=descriptor)
        os.fsync(descriptor)
