"""Converted samples: some images of the dataset, stored in other ways in a temporary folder."""

from __future__ import annotations

import os
from pathlib import Path

from shardkit.conversion.command import Made, made_of
from shardkit.conversion.convert import convert_scan
from shardkit.conversion.plan import ConvertOptions
from shardkit.conversion.recipe import Recipe
from shardkit.measure.doctor.stored import innermost, stored_images
from shardkit.measure.runner.session import Session
from shardkit.sources.imagefolder import scan_imagefolder
from shardkit.system.machine import usable_cpus
from shardkit.torch.data.datasets import ShardDataset

FORMAT = "lmdb"
"""Format of the samples, and of what a folder is converted to."""


def write_images(session: Session, *, rows: list[int], folder: Path) -> None:
    """Write the stored images of some rows as files; runs in the measurement process."""
    stored = stored_images(session.dataset)
    assert stored is not None
    for row in rows:
        (data,), (header,) = stored.read([row]), stored.headers([row])
        place = folder / f"{max(0, header.label):06d}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{row:09d}.{header.kind}").write_bytes(data)


def convert_sample(source: Path, target: Path, recipe: Recipe) -> None:
    """Convert the files of `write_images`.

    Raises:
        ShardkitError: If an image cannot be converted in this way.
    """
    scan = scan_imagefolder(source, splits=False)
    options = ConvertOptions(to=FORMAT, recipe=recipe)
    convert_scan(scan, target, options, workers=usable_cpus())


def made_as(session: Session) -> Made:
    """Return how the dataset was made; runs in the measurement process."""
    dataset, _ = innermost(session.dataset)
    path = session.subject.path
    if isinstance(dataset, ShardDataset):
        return made_of(path or str(dataset.path), dataset.path)
    if not path:  # a dataset with files of its own, such as torchvision's ImageFolder
        path = os.path.commonpath([os.path.dirname(file) for file, _ in dataset.samples])
    return Made(path=path, format=FORMAT, source={"kind": "imagefolder"}, folder=True)
