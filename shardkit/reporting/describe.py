"""Describe a dataset and how it was made, from its manifest and index (`shardkit info`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.cluster.jobs import progress_of
from shardkit.dataset.index import Index
from shardkit.dataset.manifest import Manifest
from shardkit.dataset.opened import Fetching, OpenedDataset, OpenedDirectory, open_one
from shardkit.dataset.parts import how_made
from shardkit.errors import NotPublished, UsageError
from shardkit.orders.bucket_order import BucketSizes, parse_buckets
from shardkit.record import ABSENT, STORED_KINDS
from shardkit.remote.dataset import fetch_splits
from shardkit.system.temporary import TemporaryFolder
from shardkit.system.text import as_command
from shardkit.system.urls import as_url

Numbers = npt.NDArray[np.integer[Any]]


def describe(directory: str | Path, buckets: str | None = None) -> dict[str, dict[str, Any]]:
    """Describe the dataset in ``directory``, or each of its splits.

    Args:
        directory: The dataset or its URL. Only manifests and indexes are fetched.
        buckets: Sizes of `shardkit.Buckets`: ``512x512,448x576`` (height and width), or ``512`` for
            ``Buckets.by_area(512 * 512)``.

    Returns:
        By split name ("" without splits), the manifest as JSON values without its lists of files,
        plus ``digest``, ``bytes`` and number of all ``shards``, and ``images``: the smallest,
        median and largest width, height and stored size in bytes of the primary images. For an
        attached dataset, also the ``folder`` of the archives. With ``buckets``, also the ``size``
        of each bucket, its number of ``images``, and the fraction of their pixels that is
        ``cropped``.

    Raises:
        NotPublished: If there is only a plan for jobs.
        UsageError: If there is neither a dataset nor a plan.
        CorruptDataset: If its manifest or index is damaged, or the recipe or source is invalid.
        ShardkitError: If an object store cannot be read.
    """
    sizes = None if buckets is None else parse_buckets(buckets)
    url = as_url(directory)
    if url is not None:
        with TemporaryFolder() as cache:
            try:
                urls = fetch_splits(url)
            except UsageError as error:
                raise _not_published(url) or error from error
            fetching = Fetching(cache)
            return {
                name: _describe(open_one(split_url, fetching=fetching), sizes)
                for name, split_url in urls.items()
            }
    try:
        splits = OpenedDirectory(directory).splits
    except UsageError as error:
        raise _not_published(directory) or error from error
    return {name: _describe(dataset, sizes) for name, dataset in splits.items()}


def _not_published(directory: str | Path) -> NotPublished | None:
    """Return an error that states the progress of a plan for jobs, if there is one."""
    progress = progress_of(directory)
    if progress is None:
        return None
    done, tasks = progress
    work = f"build the others with {as_command('work', directory, '--claim')}, then "
    error = NotPublished(
        f"{directory} is planned but not published; {done:,} of {tasks:,} tasks are done: "
        f"{work * (done < tasks)}publish it with {as_command('commit', directory)}"
    )
    error.done, error.tasks = progress
    return error


def _describe(dataset: OpenedDataset, buckets: BucketSizes | None) -> dict[str, Any]:
    manifest = dataset.manifest
    for part in dataset.parts:
        recipe, _, _ = how_made(part.manifest)
    classes = None
    if manifest.classes is not None and manifest.class_counts is not None:
        classes = dict(zip(manifest.classes, manifest.class_counts, strict=True))
    elsewhere: dict[str, Any] = {}
    if manifest.archives is not None:
        elsewhere["folder"] = manifest.archives
    if buckets is not None:
        images = (
            (rows["width"].astype(np.int64), rows["height"].astype(np.int64))
            for rows in (rows[rows["width"] > 0] for rows in dataset.index.entries())
        )
        elsewhere["buckets"] = [count._asdict() for count in buckets.count(images)]
    return {
        **summarize(manifest),
        **elsewhere,
        "images": {
            name: _spread(partial(_values, dataset.index, column))
            for name, column in (("width", "width"), ("height", "height"), ("bytes", "length"))
        },
        "raw_shape": manifest.raw_shape,
        "schema": [asdict(field) for field in manifest.schema],
        **_layers(manifest),
        "classes": classes,
        "recipe": recipe.describe(),
        "source": manifest.source,
        "software": manifest.software,
    }


def _layers(manifest: Manifest) -> dict[str, Any]:
    """Return the changes of fields as JSON values, if there are any."""
    if manifest.layering is None:
        return {}
    used = {layer.name for layer in manifest.layering.providers.values() if layer is not None}
    return {
        "layers": [
            {
                "name": layer.name,
                "operation": layer.operation,
                "fields": list(layer.fields),
                "bytes": layer.bytes,
                "used": layer.name in used,
            }
            for layer in manifest.layers
        ],
        "undoable": manifest.can_undo,
    }


def summarize(manifest: Manifest) -> dict[str, Any]:
    """Return the result of a conversion as JSON values: format, counts, and files left out."""
    return {
        "format": manifest.format,
        "digest": manifest.digest,
        "content_digest": manifest.content_digest,
        "rows": manifest.rows,
        "shards": len(manifest.shards),
        "bytes": manifest.bytes,
        "fields": manifest.fields,
        "notes": manifest.notes,
        "skipped": [asdict(problem) for problem in manifest.skipped],
        "ignored": manifest.ignored,
    }


def _values(index: Index, column: str) -> Iterator[Numbers]:
    """Yield the values of a column for rows with an image, in blocks."""
    for rows in index.entries():
        yield rows[column][rows["field"] != STORED_KINDS.index(ABSENT)]


def _spread(values: Callable[[], Iterable[Numbers]]) -> list[int]:
    """Return the smallest, median and largest of numbers of 32 bits; empty if there are none."""
    counts = _counts(block >> 16 for block in values())
    total = int(counts.sum())
    if not total:
        return []
    ends = counts.cumsum()
    ranks = [0, (total - 1) // 2, total // 2, total - 1]
    upper_halves = np.searchsorted(ends, ranks, side="right").tolist()
    lower_ends = {
        upper: _counts(block[block >> 16 == upper] & 0xFFFF for block in values()).cumsum()
        for upper in set(upper_halves)
    }
    smallest, *middle, largest = (
        upper << 16 | int(np.searchsorted(lower_ends[upper] + before, rank, side="right"))
        for rank, upper, before in zip(
            ranks, upper_halves, (ends - counts)[upper_halves], strict=True
        )
    )
    return [smallest, sum(middle) // 2, largest]


def _counts(blocks: Iterable[Numbers]) -> Numbers:
    """Return how often each number of 16 bits occurs: int64 of shape (65536,)."""
    counts = np.zeros(1 << 16, np.int64)
    for block in blocks:
        counts += np.bincount(block, minlength=len(counts))
    return counts
