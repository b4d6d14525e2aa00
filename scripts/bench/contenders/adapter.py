"""What each contender offers; it runs in an environment of its own, so nothing of shardkit is here.

An adapter makes its own dataset from the image folder that all share, once, and then hands out
batches: uint8 images of shape (N, 3, 224, 224) with int64 labels.
"""

from __future__ import annotations

import math
import random
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

BATCH, SIDE, WORKERS = 64, 224, 2

Batch = tuple[Any, torch.Tensor]
"""Images, uint8 of shape (N, 3, 224, 224), and int64 labels."""

KINDS = ("crop", "resize", "raw", "random", "latent")
"""What becomes of a stored image: its center; its center after a resize to 256; itself; a random
piece, mirrored or not. Of ``latent``, arrays of the shape `LATENT` are read instead."""

LATENT = (4, 64, 64)
"""Shape of float16 arrays: what an autoencoder makes of an image of 512 x 512 pixels."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is read, and how."""

    kind: str
    """One of `KINDS`."""
    folder: Path
    """The image folder that the contender makes its dataset from."""
    sets: Path
    """Where datasets are kept, to be used again."""
    options: dict[str, Any] = field(default_factory=dict)
    """What the adapter alone understands."""


class Adapter(ABC):
    """One way to read a dataset."""

    distribution: str
    """The distribution that is measured, for its version."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.entries = entries(task.folder)

    @abstractmethod
    def prepare(self) -> None:
        """Make the dataset, unless it is there."""

    @abstractmethod
    def shuffled(self) -> Iterable[Batch]:
        """Return an epoch as training reads it: this is what is timed."""

    @abstractmethod
    def ordered(self) -> Iterable[Batch]:
        """Return all images, in the order of `delivered`, decoded the same way.

        Of random pieces there is no order to compare; then it is `square` of each image.
        """

    def delivered(self) -> list[str]:
        """Return the relative path of each image of `ordered`: by default the sorted paths."""
        return [path for path, _ in self.entries]


def entries(folder: Path) -> list[tuple[str, int]]:
    """Return relative path and label of each file of an image folder, sorted by path."""
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    return [
        (f"{name}/{path.name}", label)
        for label, name in enumerate(names)
        for path in sorted((folder / name).iterdir())
    ]


def make_once(target: Path, make: Callable[[Path], object]) -> Path:
    """Let ``make`` write a dataset beside ``target`` and move it there, unless it is there."""
    if not target.exists():
        beside = target.with_name(f"{target.name}.making")
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        make(beside)
        beside.rename(target)
    return target


def batches(items: Iterable[tuple[Any, int]]) -> Iterator[Batch]:
    """Join images and labels to batches, in this process."""
    images: list[Any] = []
    labels: list[int] = []
    for image, label in items:
        images.append(image)
        labels.append(int(label))
        if len(labels) == BATCH:
            yield torch.stack(images), torch.tensor(labels)
            images, labels = [], []
    if labels:
        yield torch.stack(images), torch.tensor(labels)


def crop(image: Image.Image) -> torch.Tensor:
    """CenterCrop(224) and PILToTensor."""
    left, top = round((image.width - SIDE) / 2), round((image.height - SIDE) / 2)
    return whole(image.crop((left, top, left + SIDE, top + SIDE)))


def whole(image: Image.Image) -> torch.Tensor:
    """PILToTensor."""
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def resize_and_crop(image: Image.Image) -> torch.Tensor:
    """Resize(256, bicubic) and CenterCrop(224), from the original."""
    return crop(resized(image))


def resized(image: Image.Image, side: int = 256) -> Image.Image:
    """Scale the shorter side to ``side`` pixels and the longer one to an even number.

    Even, because where half a pixel would be left, libraries place the center differently.
    """
    short, long = sorted(image.size)
    other = side * long // short // 2 * 2
    size = (side, other) if image.width <= image.height else (other, side)
    return image.resize(size, Image.Resampling.BICUBIC)


def square(image: Image.Image) -> torch.Tensor:
    """Scale the central square to 224 pixels by its area: what is compared of random crops.

    Each pixel is the mean of what it covers, parts of pixels included, as OpenCV's INTER_AREA has
    it (which FFCV takes); Pillow's box filter takes whole pixels only.
    """
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    pixels = np.asarray(image.convert("RGB").crop((left, top, left + side, top + side)))
    weights = _overlaps(side)
    down = np.tensordot(weights, pixels.astype(np.float32), (1, 0))
    scaled = np.tensordot(weights, down, (1, 1)).transpose(2, 1, 0)
    return torch.from_numpy(np.rint(scaled).astype(np.uint8))


def _overlaps(side: int) -> npt.NDArray[np.float32]:
    """Return which part of each of 224 equal spans each of ``side`` pixels is."""
    edges = np.arange(SIDE + 1)[:, None] * side / SIDE
    pixels = np.arange(side)
    covered = np.minimum(edges[1:], pixels + 1) - np.maximum(edges[:-1], pixels)
    weights: npt.NDArray[np.float32] = np.clip(covered, 0, None).astype(np.float32)
    return weights * np.float32(SIDE / side)


def random_piece(image: Image.Image) -> torch.Tensor:
    """RandomResizedCrop(224) and RandomHorizontalFlip, as torchvision does them with Pillow."""
    width, height = image.size
    box = (0, 0, width, height)
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            left, top = random.randint(0, width - across), random.randint(0, height - down)
            box = (left, top, left + across, top + down)
            break
    image = image.crop(box).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return whole(image)


TRANSFORMS: dict[str, Callable[[Image.Image], torch.Tensor]] = {
    "crop": crop,
    "resize": resize_and_crop,
    "raw": whole,
    "random": random_piece,
}
"""What Pillow does for each kind of task."""


def checked_transform(kind: str) -> Callable[[Image.Image], torch.Tensor]:
    """Return what `Adapter.ordered` applies to an image."""
    return square if kind == "random" else TRANSFORMS[kind]
