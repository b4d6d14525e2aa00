"""What people train with today: torchvision's ImageFolder in a DataLoader, and WebDataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpu_parts.job import cores
from isolation import NotAvailable
from torch.utils.data import DataLoader, RandomSampler

_ENDLESS = 10_000_000
"""Samples to draw: an epoch of so few photographs would end all the time."""


def imagefolder(folder: Path, side: int, batch_size: int, *, pin_memory: bool) -> Any:
    """Return an endless loader over an image folder, with a worker for each core."""
    try:
        from torchvision.datasets import ImageFolder  # type: ignore[import-not-found]
    except (ImportError, RuntimeError) as error:
        raise NotAvailable(f"torchvision: {error}") from None
    dataset = ImageFolder(str(folder), _transform(side))
    return DataLoader(
        dataset,
        batch_size,
        sampler=RandomSampler(dataset, num_samples=_ENDLESS),
        num_workers=cores(),
        pin_memory=pin_memory,
    )


def webdataset(folder: Path, side: int, batch_size: int, *, pin_memory: bool) -> Any:
    """Return an endless loader over tar files, with a worker for each core."""
    try:
        from webdataset import WebDataset, WebLoader
    except ImportError as error:
        raise NotAvailable(f"webdataset: {error}") from None
    paths = [str(path) for path in sorted(folder.rglob("*.tar"))]
    dataset = WebDataset(paths, resampled=True, shardshuffle=False).shuffle(1000).decode("pil")
    samples = dataset.to_tuple("jpg", "cls").map_tuple(_transform(side), int).batched(batch_size)
    return WebLoader(samples, batch_size=None, num_workers=cores(), pin_memory=pin_memory)


def _transform(side: int) -> Any:
    """Return the transforms of most training scripts; the device normalizes the uint8 images."""
    try:
        from torchvision import transforms  # type: ignore[import-not-found]
    except (ImportError, RuntimeError) as error:
        raise NotAvailable(f"torchvision: {error}") from None
    return transforms.Compose(
        [
            transforms.RandomResizedCrop(side),
            transforms.RandomHorizontalFlip(),
            transforms.PILToTensor(),
        ]
    )
