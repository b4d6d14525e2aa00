"""What people train with today: torchvision's ImageFolder in a DataLoader, and WebDataset."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from isolation import NotAvailable
from torch.utils.data import DataLoader, RandomSampler

from shardkit.system.machine import usable_cpus

_ENDLESS = 10_000_000
"""Samples to draw: an epoch of so few photographs would end all the time."""


def imagefolder(folder: Path, side: int, batch_size: int, *, pin_memory: bool) -> Any:
    """Return an endless loader over an image folder, with a worker for each core."""
    dataset = _import("torchvision.datasets").ImageFolder(str(folder), _transform(side))
    return DataLoader(
        dataset,
        batch_size,
        sampler=RandomSampler(dataset, num_samples=_ENDLESS),
        num_workers=usable_cpus(),
        pin_memory=pin_memory,
    )


def webdataset(folder: Path, side: int, batch_size: int, *, pin_memory: bool) -> Any:
    """Return an endless loader over tar files, with a worker for each core."""
    library = _import("webdataset")
    paths = [str(path) for path in sorted(folder.rglob("*.tar"))]
    dataset = library.WebDataset(paths, resampled=True, shardshuffle=False).shuffle(1000)
    dataset = dataset.decode("pil")
    samples = dataset.to_tuple("jpg", "cls").map_tuple(_transform(side), int).batched(batch_size)
    return library.WebLoader(
        samples, batch_size=None, num_workers=usable_cpus(), pin_memory=pin_memory
    )


def _transform(side: int) -> Any:
    """Return the transforms of most training scripts; the device normalizes the uint8 images."""
    transforms = _import("torchvision.transforms")
    return transforms.Compose(
        [
            transforms.RandomResizedCrop(side),
            transforms.RandomHorizontalFlip(),
            transforms.PILToTensor(),
        ]
    )


def _import(module: str) -> Any:
    try:
        return import_module(module)
    except (ImportError, RuntimeError) as error:
        raise NotAvailable(f"{module}: {error}") from None
