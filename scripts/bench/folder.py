"""What the benchmarks read: a plain image folder, copies of photographs, converted data sets."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from shardkit import ConvertOptions, convert, open_dataset, scan_imagefolder

BATCH, SIDE, WORKERS = 64, 224, 2


class PlainImageFolder(Dataset[Any]):
    """What torchvision's ImageFolder does: open, convert to RGB, transform; one item at a time."""

    def __init__(self, root: Path, transform: Callable[[Any], Any]) -> None:
        classes = sorted(path.name for path in root.iterdir() if path.is_dir())
        self.samples = [
            (str(path), label)
            for label, name in enumerate(classes)
            for path in sorted((root / name).iterdir())
        ]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, row: int) -> Any:
        path, label = self.samples[row]
        with open(path, "rb") as file:
            image = Image.open(file).convert("RGB")
        return self.transform(image), label


def crop_pil(image: Image.Image) -> torch.Tensor:
    """CenterCrop(224) and PILToTensor."""
    left, top = round((image.width - SIDE) / 2), round((image.height - SIDE) / 2)
    pixels = np.array(image.crop((left, top, left + SIDE, top + SIDE)))
    return torch.from_numpy(pixels).permute(2, 0, 1)


def resize(image: Image.Image, side: int = 256) -> Image.Image:
    """Resize so that the shorter side has ``side`` pixels."""
    short, long = sorted(image.size)
    other = side * long // short
    size = (side, other) if image.width <= image.height else (other, side)
    return image.resize(size, Image.Resampling.BICUBIC)


def copy_photos(photos: Path, target: Path, copies: int) -> None:
    """Copy the photographs that are large enough ``copies`` times."""
    for path in sorted(photos.glob("*/*")):
        with Image.open(path) as image:
            if min(image.size) < 256:
                continue
        for number in range(copies):
            place = target / path.parent.name / f"{path.stem}_{number}{path.suffix}"
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)


def write_folder(source: Path, target: Path) -> None:
    """Write what shardkit stores as loose files, so that all readers decode the same bytes."""
    dataset = open_dataset(source, decode="bytes")
    for row, path in enumerate(dataset.paths):
        place = target / path
        place.parent.mkdir(parents=True, exist_ok=True)
        data, _ = dataset[row]
        place.write_bytes(data)


def convert_once(source: Path, target: Path, **options: Any) -> int:
    """Convert with one process, into a place that is made free first."""
    shutil.rmtree(target, ignore_errors=True)
    scan = scan_imagefolder(source)
    made = convert(scan, target, ConvertOptions(**options), workers=1)
    return made.manifests[""].rows
