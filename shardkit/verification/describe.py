"""Describe a dataset and how it was made, from its manifest and index (`shardkit info`)."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.conversion.jobs import progress_of
from shardkit.conversion.store_jobs import progress_at
from shardkit.dataset.index import Index
from shardkit.dataset.manifest import (
    AttachedManifest,
    Manifest,
    SplitsManifest,
    dataset_directories,
    load_manifest,
)
from shardkit.dataset.parts import parts_of
from shardkit.dataset.remote import fetch_manifest, open_remote
from shardkit.errors import UsageError
from shardkit.record import ABSENT, STORED_KINDS
from shardkit.stores.urls import as_url
from shardkit.verification.source_match import how_made


def describe(directory: str | Path) -> dict[str, dict[str, Any]]:
    """Describe the dataset in ``directory``, or each of its splits.

    Args:
        directory: The dataset, or its URL, of which only manifests and indexes are fetched.

    Returns:
        By split name ("" without splits), the manifest as JSON values without its lists of files,
        plus ``digest``, ``bytes`` and number of all ``shards``, and ``images``: the smallest,
        median and largest width, height and stored size in bytes of the primary images. Of an
        attached dataset, also the ``folder`` of the archives.

    Raises:
        UsageError: If there is no dataset; of a plan for jobs, the message states the progress.
        CorruptDataset: If its manifest or index is damaged, or the recipe or source is invalid.
        ShardkitError: If an object store cannot be read.
    """
    url = as_url(directory)
    if url is not None:
        with tempfile.TemporaryDirectory(prefix="shardkit-info-") as cache:
            try:
                _, top = fetch_manifest(url)
            except UsageError as error:
                raise _planned(url, progress_at(url)) or error from error
            urls = {"": url}
            if isinstance(top, SplitsManifest):
                urls = {name: f"{url}/{name}" for name in top.splits}
            return {
                name: _describe(open_remote(each, cache, None)[0]) for name, each in urls.items()
            }
    try:
        places = dataset_directories(Path(directory))
    except UsageError as error:
        raise _planned(directory, progress_of(Path(directory))) or error from error
    return {name: _describe(place) for name, place in places.items()}


def _planned(directory: str | Path, progress: tuple[int, int] | None) -> UsageError | None:
    """Return an error that states the progress of a plan for jobs, if there is one."""
    if progress is None:
        return None
    done, tasks = progress
    work = f"build the others with `shardkit work {directory} --claim`, then " * (done < tasks)
    return UsageError(
        f"{directory} is planned but not published; {done:,} of {tasks:,} tasks are done: {work}"
        f"publish it with `shardkit commit {directory}`"
    )


def _describe(place: Path) -> dict[str, Any]:
    manifest = load_manifest(place)
    for part in parts_of(manifest):
        recipe, _, _ = how_made(part.manifest)
    rows = Index(place, manifest.rows).rows()
    rows = rows[rows["field"] != STORED_KINDS.index(ABSENT)]
    classes = None
    if manifest.classes is not None and manifest.class_counts is not None:
        classes = dict(zip(manifest.classes, manifest.class_counts, strict=True))
    elsewhere = {"folder": manifest.folder} if isinstance(manifest, AttachedManifest) else {}
    return {
        **summarize(manifest),
        **elsewhere,
        "images": {
            name: _spread(rows[column])
            for name, column in (("width", "width"), ("height", "height"), ("bytes", "length"))
        },
        "raw_shape": manifest.raw_shape,
        "schema": [asdict(each) for each in manifest.schema],
        "classes": classes,
        "recipe": recipe.describe(),
        "source": manifest.source,
        "software": manifest.software,
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


def _spread(values: Any) -> list[int]:
    """Return the smallest, median and largest value; empty if there are no values."""
    if not len(values):
        return []
    return [int(values.min()), int(np.median(values)), int(values.max())]
