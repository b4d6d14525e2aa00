"""The stored images of a dataset, and converted samples of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import Dataset, Subset

from shardkit.codecs.image import SNIFF_BYTES, ImageInfo, inspect, sniff
from shardkit.codecs.planes import sniff_planes
from shardkit.conversion.convert import convert
from shardkit.measure.doctor.command import SOURCE, Convertible, convertible
from shardkit.measure.runner.folder import PlainFolder
from shardkit.measure.runner.material import parse_decode
from shardkit.measure.runner.session import Session
from shardkit.recipe import Recipe
from shardkit.record import IMAGE, PLANES
from shardkit.registry import DEFAULT_SOURCE
from shardkit.system.machine import usable_cpus
from shardkit.torch.data.datasets import ShardDataset, open_dataset
from shardkit.torch.data.reader_options import ReaderOptions

FORMAT = "lmdb"
"""Format of the samples, and of what a folder is converted to."""

_SAMPLES = ("transform", "target_transform", "decode", "fields", "follow", "as_dict", "windows")
"""Options of a dataset that make its samples of the stored bytes."""


class Header(NamedTuple):
    """Properties of a stored image."""

    kind: str
    """Encoding, such as ``jpg``."""
    width: int
    height: int
    bytes: int
    label: int


class Files(Dataset[Any]):
    """Files and their labels, as bytes."""

    def __init__(self, samples: list[tuple[str | Path, int]]) -> None:
        self.samples = samples

    def __getitem__(self, row: int) -> tuple[bytes, int]:
        path, label = self.samples[row]
        return Path(path).read_bytes(), int(label)


def innermost(dataset: Any) -> Any:
    """Return the dataset within any ``Subset``."""
    return innermost(dataset.dataset) if type(dataset) is Subset else dataset


def stored_images(dataset: Any) -> Any:
    """Return the dataset with stored bytes as images; None if they are unknown."""
    if type(dataset) is Subset:
        stored = stored_images(dataset.dataset)
        return None if stored is None else Subset(stored, dataset.indices)
    if isinstance(dataset, ShardDataset):
        if IMAGE in dataset.schema and not dataset.schema[IMAGE].image_type.is_rgb:
            return None  # remedies are for RGB
        plain = ReaderOptions(decode="bytes")
        stored = dataset.reopened(**{name: getattr(plain, name) for name in _SAMPLES})
        return stored if dataset.selected is None else stored.select(dataset.selected)
    samples = getattr(dataset, "samples", None)
    # A list of (path, label) makes it an image folder, as in torchvision.
    if isinstance(samples, list) and samples and isinstance(samples[0], tuple):
        path, *labels = samples[0]
        if len(labels) == 1 and isinstance(path, str | Path) and Path(path).is_file():
            return Files(samples)
    return None


def headers(dataset: Any, rows: Sequence[int]) -> list[Header]:
    """Return the properties of some stored images of a dataset that has such."""
    images = stored_images(dataset)
    inner = innermost(dataset)
    raw = inner.manifest.raw_shape if isinstance(inner, ShardDataset) else None
    properties = []
    for data, label in (images[row] for row in rows):
        kind = "raw" if raw else _kind_of(data)
        info = ImageInfo(raw[1], raw[0]) if raw else inspect(data, kind)
        properties.append(Header(kind, info.width, info.height, len(data), label))
    return properties


def _kind_of(data: bytes) -> str:
    return PLANES if sniff_planes(data) else sniff(data[:SNIFF_BYTES]) or ""


def write_images(session: Session, *, rows: list[int], files: Sequence[str], folder: Path) -> None:
    """Write the stored images of some rows as files; runs in the measurement process.

    ``files`` are those of the rows, if the dataset does not state them.
    """
    images: Any = Files([(file, 0) for file in files]) if files else stored_images(session.dataset)
    for row in range(len(files)) if files else rows:
        data, label = images[row]
        kind = _kind_of(data)
        if kind == PLANES:  # no file of a folder of images
            continue
        class_folder = folder / f"{max(0, label):06d}"
        class_folder.mkdir(parents=True, exist_ok=True)
        (class_folder / f"{row:09d}.{kind}").write_bytes(data)


def convert_images(source: Path, target: Path, recipe: Recipe) -> None:
    """Convert the files of `write_images`."""
    convert(source, target, to=FORMAT, recipe=recipe, splits=False, workers=usable_cpus())


def open_converted(dataset: Any, converted: str, decode: str) -> ShardDataset:
    """Return a converted sample of a dataset, opened with its options.

    ``decode`` is the image type, if the dataset has none.
    """
    if isinstance(dataset, ShardDataset):
        return dataset.reopened(converted, root=None, cache=None, cache_limit=None)
    used = dataset.decode if isinstance(dataset, PlainFolder) else parse_decode(decode)
    return open_dataset(converted, getattr(dataset, "transform", None), decode=used)


def to_convert(session: Session, *, files: Sequence[str]) -> Convertible:
    """Return what a command converts; runs in the measurement process.

    ``files`` are some of the dataset's, if it does not state them.
    """
    dataset = innermost(session.dataset)
    path = session.subject.path
    if isinstance(dataset, ShardDataset):
        return convertible(path or str(dataset.path), dataset.path)
    if not path:  # a dataset with files of its own, such as torchvision's ImageFolder
        paths = files or [file for file, _ in dataset.samples]
        path = os.path.commonpath([os.path.dirname(os.path.abspath(file)) for file in paths])
        if path == os.path.dirname(path):  # the root: the files have no folder in common
            path = SOURCE
    return Convertible(kind=DEFAULT_SOURCE, path=path, format=FORMAT, has_own_files=bool(files))
