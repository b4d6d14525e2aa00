"""Measure the pixels of one image: color, sharpness, and hashes that survive small changes."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from shardkit.codecs.image import Pixels

SIDE = 256
"""Minimum shorter side at which a large JPEG is measured; others are measured at full size."""

_CROP = 0.05
"""Fraction of width and height that the views for `Measures.crops` leave out, at the least."""

CROPS = 6
"""Number of these views: one at each corner, one from the center, and a smaller one from there."""

_BASE, _SAMPLES, _WAVES = 128, 32, 8
"""Sides of a reduced image, of a view, and of its low frequencies, which make a hash of 64 bits."""

_WINDOW = 9
"""Pixels of the blur that sharpness is compared with (Crete et al. 2007 use the same)."""

_COSINES = np.cos(
    np.pi * (2 * np.arange(_SAMPLES) + 1) * np.arange(_WAVES)[:, None] / (2 * _SAMPLES)
).astype(np.float32)


class Measures(NamedTuple):
    """Measures of an image, in 8-bit levels where not stated otherwise."""

    pixels: bytes
    """Digest of the pixels, 16 bytes."""
    hash: int
    """Perceptual hash: 64 bits, of which similar images share most."""
    crops: npt.NDArray[np.uint64]
    """Perceptual hashes of the image with 5 to 10% cropped: shape (CROPS,)."""
    mean: npt.NDArray[np.float64]
    std: npt.NDArray[np.float64]
    """Mean and standard deviation of red, green and blue, each of shape (3,)."""
    brightness: float
    """Mean luminance."""
    highlight: int
    """Luminance that 1% of the pixels exceed."""
    contrast: float
    """Standard deviation of the luminance."""
    sharpness: float
    """Fraction of the variation between neighboring pixels that a blur removes, 0 to 1."""


def measure(pixels: Pixels, size: tuple[int, int]) -> Measures:
    """Measure an image.

    Args:
        pixels: The image, which may be reduced.
        size: Width and height before that.
    """
    image = Image.fromarray(pixels)
    gray = image.convert("L")
    digest = hashlib.sha256(np.array((*size, *pixels.shape), "<i8").tobytes())
    digest.update(pixels.data if pixels.flags.c_contiguous else pixels.tobytes())
    mean, std = _moments(np.reshape(image.histogram(), (3, 256)))
    levels = np.reshape(gray.histogram(), (1, 256))
    brightness, contrast = _moments(levels)
    hashes = _hashes(gray)
    return Measures(
        pixels=digest.digest()[:16],
        hash=int(hashes[0]),
        crops=hashes[1:],
        mean=mean,
        std=std,
        brightness=float(brightness[0]),
        highlight=int(np.searchsorted(np.cumsum(levels), 0.99 * levels.sum())),
        contrast=float(contrast[0]),
        sharpness=_sharpness(np.asarray(gray)),
    )


def _moments(counts: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.float64], ...]:
    """Return mean and standard deviation of histograms, exact sums of integers."""
    levels = np.arange(256)
    total = counts.sum(1)
    mean = counts @ levels / total
    variance = counts @ levels**2 / total - mean**2
    return mean, np.sqrt(np.maximum(variance, 0))


def _hashes(gray: Image.Image) -> npt.NDArray[np.uint64]:
    """Return the hash of an image, and of its `CROPS` views.

    A bit says whether one of the lowest frequencies of the cosine transform exceeds their median,
    as in the hash that Zauner (2010) and `imagehash.phash` use. The mean level does not count.
    """
    if min(gray.size) > _BASE:
        gray = gray.resize((_BASE, _BASE), Image.Resampling.BOX)
    width, height = gray.size
    x, y = width * _CROP, height * _CROP
    places = ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, 1.0))
    boxes = [(x * a, y * b, width - x * (1 - a), height - y * (1 - b)) for a, b in places]
    boxes += [(x * a, y * a, width - x * a, height - y * a) for a in (0.5, 1.0)]
    views = [
        np.asarray(gray.resize((_SAMPLES, _SAMPLES), Image.Resampling.BILINEAR, box), np.float32)
        for box in [(0, 0, width, height), *boxes]
    ]
    waves = (_COSINES @ np.stack(views) @ _COSINES.T).reshape(len(views), -1)
    waves[:, 0] = 0
    bits = np.packbits(waves > np.median(waves, axis=1, keepdims=True), axis=1)
    return bits.view(">u8")[:, 0].astype(np.uint64)


def _sharpness(gray: npt.NDArray[np.uint8]) -> float:
    """Return how much a blur would change: 0 for a blurred image, 1 for noise.

    Unlike the variance of a Laplacian, this hardly depends on contrast and content.
    """
    found = []
    levels = gray.astype(np.int16)
    for values in (levels, levels.T):
        if len(values) <= 2 * _WINDOW:
            return 1.0  # too small to judge
        middle = values[_WINDOW // 2 : _WINDOW // 2 + len(values) - _WINDOW + 1]
        steps = np.abs(middle[1:] - middle[:-1]) * np.int16(_WINDOW)
        blurred = np.abs(values[_WINDOW:] - values[:-_WINDOW])  # neighboring means, times 9
        lost = np.maximum(steps - blurred, 0)
        total = int(steps.sum(dtype=np.int64))
        found.append(int(lost.sum(dtype=np.int64)) / total if total else 0.0)
    return min(found)
