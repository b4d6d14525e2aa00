"""Info: what a dataset is and how it was made, read from its manifest and its index."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.index import Index
from shardkit.manifest import Manifest, dataset_directories, load_manifest


def describe(directory: str | Path) -> dict[str, dict[str, Any]]:
    """Return what there is to say of the dataset in ``directory``, or of each of its splits.

    Returns:
        The split's name, or "" where there are no splits, to the manifest as JSON values without
        the lists of files, with ``digest``, ``bytes`` of all shards, ``shards`` as a number, and
        ``images``: smallest, median and largest width, height and stored bytes.

    Raises:
        UsageError: If there is no dataset.
        CorruptDataset: If its manifest or its index is damaged.
    """
    places = dataset_directories(Path(directory))
    return {name: _describe(place) for name, place in places.items()}


def _describe(place: Path) -> dict[str, Any]:
    manifest = load_manifest(place)
    rows = Index(place, manifest.rows).rows()
    classes = None
    if manifest.classes is not None and manifest.class_counts is not None:
        classes = dict(zip(manifest.classes, manifest.class_counts, strict=True))
    return {
        **summarise(manifest),
        "images": {
            name: _spread(rows[column])
            for name, column in (("width", "width"), ("height", "height"), ("bytes", "length"))
        },
        "raw_shape": manifest.raw_shape,
        "classes": classes,
        "recipe": manifest.recipe,
        "source": manifest.source,
        "software": manifest.software,
    }


def summarise(manifest: Manifest) -> dict[str, Any]:
    """Return, as JSON values, what a conversion made: format, numbers, and what was left out."""
    return {
        "format": manifest.format,
        "digest": manifest.digest,
        "rows": manifest.rows,
        "shards": len(manifest.shards),
        "bytes": manifest.bytes,
        "fields": manifest.fields,
        "notes": manifest.notes,
        "skipped": [asdict(problem) for problem in manifest.skipped],
        "ignored": manifest.ignored,
    }


def _spread(values: Any) -> list[int]:
    """Return smallest, median and largest value; nothing if there is none."""
    if not len(values):
        return []
    return [int(values.min()), int(np.median(values)), int(values.max())]
