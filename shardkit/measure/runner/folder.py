"""An image folder read as torchvision's ``ImageFolder`` reads it: the baseline.

Pillow, one file at a time, in a plain DataLoader, with the same crops: what people use, not what is
easy to beat.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from shardkit.errors import BadImage
from shardkit.sources.imagefolder import scan_imagefolder
from shardkit.system.files import as_name
from shardkit.torch.data.ops import Crop, ImageOp
from shardkit.torch.data.read_context import BatchContext, EpochCell

_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


class PlainFolder(Dataset[Any]):
    """Image files, read one at a time; Pillow decodes and crops them."""

    def __init__(self, path: Path, decode: str | ImageOp, transform: Any = None) -> None:
        """Scan a folder; with splits, the one with most images."""
        scan = scan_imagefolder(path)
        split = max(scan.splits, key=lambda name: len(scan.splits[name]))
        self.root = Path(path) / as_name(split)
        entries = scan.splits[split].entries
        self.samples = [(f"{self.root}/{as_name(entry.path)}", entry.label) for entry in entries]
        """Path and label of each image, as in torchvision."""
        self.bytes = sum(entry.bytes for entry in entries)
        self.decode = decode
        self.transform = transform
        self._epoch = EpochCell()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, row: int) -> tuple[Any, int]:
        path, label = self.samples[row]
        if self.decode == "bytes":
            return Path(path).read_bytes(), label
        try:
            with open(path, "rb") as file:
                image = Image.open(file).convert("RGB")
        except (OSError, ValueError, SyntaxError) as error:
            raise BadImage(f"{path} cannot be decoded: {error}") from error
        value = self.sample(image, row)
        return (value if self.transform is None else self.transform(value)), label

    def sample(self, image: Image.Image, row: int) -> Any:
        """Return a decoded image as the type that ``decode`` selects."""
        if self.decode == "pil":
            return image
        if isinstance(self.decode, ImageOp):
            crop = self.decode.crop(*image.size, BatchContext(self._epoch).draws(row))
            image = _cut(image, crop, _FILTERS[self.decode.filter])
        pixels = np.array(image)
        return pixels if self.decode == "numpy" else torch.from_numpy(pixels).permute(2, 0, 1)


def _cut(image: Image.Image, crop: Crop, resample: Image.Resampling) -> Image.Image:
    """Return a crop of an image, made with Pillow."""
    if crop.scaled is not None:
        image = image.resize(crop.scaled[::-1], resample)
    box = (crop.left, crop.top, crop.left + crop.width, crop.top + crop.height)
    image = image.crop(box)
    if image.size != crop.size[::-1]:
        image = image.resize(crop.size[::-1], resample)
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if crop.flip else image
