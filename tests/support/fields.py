"""Samples with all kinds of fields, and what a dataset must return of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from helpers import picture, png

from shardkit import Field, convert

ROWS = 10
CLASSES = ("ant", "bee", "cat")

SCHEMA = {
    "image": Field("image"),
    "mask": Field("mask"),
    "label": Field("label", classes=CLASSES),
    "tags": Field("labels", classes=("red", "wet", "old", "big")),
    "price": Field("number", dtype="float32"),
    "caption": Field("text"),
    "extra": Field("json"),
    "boxes": Field("boxes", classes=("head", "tail")),
    "spots": Field("boxes"),
    "joints": Field("keypoints", classes=("head", "left foot", "right foot")),
    "latent": Field("array", dtype="float16", shape=(4, 3, 5)),
    "half": Field("array", dtype="bfloat16", shape=(6,)),
    "wave": Field("array", dtype="float32"),
    "blob": Field("bytes"),
}

LACKING = 7
"""The row that lacks everything but an image and a label."""


def mask_of(number: int) -> npt.NDArray[np.uint8]:
    """Return a mask of the size of the image, with a value for each of 12 tiles."""
    width, height = size_of(number)
    y, x = np.mgrid[0:height, 0:width]
    mask: npt.NDArray[np.uint8]
    mask = (10 * (number % 3) + 4 * (3 * y // height) + 4 * x // width).astype(np.uint8)
    return mask


def size_of(number: int) -> tuple[int, int]:
    """Return the width and height of an image."""
    return 24 + number % 3, 20 - number % 2


def boxes_of(number: int) -> list[list[float]]:
    """Return boxes with labels; some images have none."""
    return [[1.5 + n, 2.25, 9 + 2 * n, 11 + n, n % 2] for n in range(number % 4)]


def joints_of(number: int) -> list[list[list[float]]]:
    """Return the three keypoints of each animal; some images have none."""
    return [[[2.5 + n, 3, 2], [4, 5.25 + n, 1], [0, 0, 0]] for n in range(number % 3)]


def sample_of(number: int, *, whole: bool = False) -> dict[str, Any]:
    """Return a sample; ``whole`` gives `LACKING` all fields too."""
    width, height = size_of(number)
    label = CLASSES[number % 3]
    sample: dict[str, Any] = {"image": png(width, height, number), "label": label}
    if number == LACKING and not whole:
        return sample
    rng = np.random.default_rng(number)
    return {
        **sample,
        "mask": mask_of(number),
        "tags": [("red", "wet", "old", "big")[n] for n in range(number % 4)],
        "price": number / 4,
        "caption": f"number {number} äß★{'!' * (number % 3)}",
        "extra": {"list": [1, None, "x"], "number": number},
        "boxes": boxes_of(number),
        "spots": [box[:4] for box in boxes_of(number + 1)],
        "joints": joints_of(number),
        "latent": rng.normal(size=(4, 3, 5)).astype(np.float16),
        "half": torch.arange(6, dtype=torch.bfloat16) * number,
        "wave": rng.normal(size=(2, number)).astype(np.float32),
        "blob": bytes(range(number)),
    }


class Samples:
    """The samples in order, picklable."""

    def __init__(self, rows: int = ROWS, *, whole: bool = False) -> None:
        self.rows, self.whole = rows, whole

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, number: int) -> dict[str, Any]:
        return sample_of(number, whole=self.whole)


def make_fields(path: Path, to: Any = "lmdb", *, rows: int = ROWS, whole: bool = False) -> Path:
    """Convert the samples in order; row and number are the same."""
    options: dict[str, Any] = {"shuffle": False, "shard_samples": 4, "workers": 1}
    convert(Samples(rows, whole=whole), path, to=to, schema=SCHEMA, **options)
    return path


def pixels_of(number: int) -> npt.NDArray[np.uint8]:
    """Return the RGB pixels of an image."""
    return np.asarray(picture(*size_of(number), number), np.uint8)
