"""Measures how far scaled and fast-decoded JPEGs differ from Pillow's full decode and resize.

    python scripts/bench/accuracy.py FOLDER

FOLDER holds the photographs (JPEG, at any depth). Each table gives PSNR in dB as minimum, 1st
percentile and median over the images in question, and the largest difference of a value, of 255.
"""

from __future__ import annotations

import functools
import io
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from shardkit import CenterCrop, RandomResizedCrop, Resize
from shardkit.codecs.image import Decoding, Pixels, decode, inspect
from shardkit.dataset.located import EncodedImage
from shardkit.recipe import Recipe
from shardkit.record import Record
from shardkit.sampling.order import Draws
from shardkit.torch.data.ops import Crop, ImageOp

SIZES = (48, 96, 224)
_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}

Pair = tuple[Pixels, Pixels]
"""An image as found, and as expected."""


def main(folder: str) -> None:
    """Print the tables for the photographs in ``folder``."""
    found = [path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()]
    photos = [data for data in found if data.startswith(b"\xff\xd8\xff")]
    print(f"{len(photos)} photographs\n")
    _converted(photos)
    _loaded(photos)
    _fast(photos)


def _converted(photos: list[bytes]) -> None:
    print("shardkit convert --resize N")
    variants: dict[str, dict[str, Any]] = {
        "default": {},
        "--resizer torch": {"resizer": "torch"},
        "--dct-scaling": {"dct_scaling": True},
    }
    for label, options in variants.items():
        for size in SIZES:
            recipe = Recipe(resize=size, encode="png", **options)
            reduced = [data for data in photos if _shorter(data) >= 4 * size]
            _row(f"{label}, {size}", _stored(reduced if recipe.dct_scaling else photos, recipe))


def _stored(photos: Iterable[bytes], recipe: Recipe) -> Iterator[Pair]:
    assert recipe.box is not None
    for data in photos:
        found = recipe.apply(Record("photo", {"jpg": data})).fields["png"]
        upright = ImageOps.exif_transpose(_opened(data))
        size = _resized(upright.size, recipe.box[0])
        if min(upright.size) > recipe.box[0]:
            expected = upright.resize(size, Image.Resampling.BICUBIC)
            yield np.asarray(_opened(found)), np.asarray(expected)


def _loaded(photos: list[bytes]) -> None:
    print("\nWhile loading")
    for oversample in (1.0, 2.0, math.inf):
        for name in _FILTERS:
            for size in SIZES:
                more: dict[str, Any] = {"filter": name, "oversample": oversample}
                ops: tuple[ImageOp, ...] = (
                    Resize(size, **more),
                    CenterCrop(size, resize=size * 8 // 7, **more),
                    RandomResizedCrop(size, **more),
                )
                for op in ops:
                    label = f"{type(op).__name__}({size}), {name}, oversample={oversample}"
                    _row(label, _rendered(photos, op))


def _rendered(photos: Iterable[bytes], op: ImageOp) -> Iterator[Pair]:
    for number, data in enumerate(photos):
        info = inspect(data, "jpg")
        crop = op.crop(info.width, info.height, Draws(0, number))
        image = EncodedImage(data, "jpg", 0, info.width, info.height)
        yield op.render(image, crop, Decoding()), _expected(_opened(data), crop, op.filter)


def _expected(image: Image.Image, crop: Crop, name: str) -> Pixels:
    """Return ``crop`` as Pillow cuts and scales it."""
    if crop.scaled is not None:
        image = image.resize(crop.scaled[::-1], _FILTERS[name])
    right, bottom = crop.left + crop.width, crop.top + crop.height
    image = image.crop((crop.left, crop.top, right, bottom))
    image = image.resize(crop.size[::-1], _FILTERS[name])
    return np.asarray(ImageOps.mirror(image) if crop.flip else image)


def _fast(photos: list[bytes]) -> None:
    print('\njpeg="fast": mean difference per image')
    pairs = [(decode(data, "jpg", Decoding(fast=True)), decode(data, "jpg")) for data in photos]
    means = [float(_difference(pair).mean()) for pair in pairs]
    print(f"median {np.median(means):.2f}, maximum {max(means):.2f} of 255")


def _row(label: str, pairs: Iterable[Pair]) -> None:
    errors = [(float((error**2).mean()), int(error.max())) for error in map(_difference, pairs)]
    if not errors:
        print(f"{label:<52} no image is large enough")
        return
    means, largest = zip(*errors, strict=True)
    with np.errstate(divide="ignore"):
        psnr = 10 * np.log10(255**2 / np.array(means))
    low, first, median = (np.percentile(psnr, part, method="lower") for part in (0, 1, 50))
    print(f"{label:<52} {len(errors):4} {low:6.1f} {first:6.1f} {median:6.1f} dB {max(largest):4}")


def _difference(pair: Pair) -> npt.NDArray[np.float64]:
    return np.abs(pair[0].astype(float) - pair[1])


@functools.cache
def _opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def _shorter(data: bytes) -> int:
    return min(_opened(data).size)


def _resized(size: tuple[int, int], shorter: int) -> tuple[int, int]:
    """Return width and height as torchvision's ``Resize(shorter)`` gives them."""
    width, height = size
    if width <= height:
        return shorter, shorter * height // width
    return shorter * width // height, shorter


if __name__ == "__main__":
    main(*sys.argv[1:])
