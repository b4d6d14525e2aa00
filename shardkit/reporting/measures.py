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

_SIDE, _WAVES = 64, 8
"""Sides of a reduced image, and of its low frequencies, which make a hash of 64 bits."""

_RANGES = ((0, 1), (0, 0.95), (0.05, 1), (0.025, 0.975), (0.05, 0.95))
"""Ranges of width or height that views of an image have."""

_VIEWS = ((0, 0), (1, 1), (2, 1), (1, 2), (2, 2), (3, 3), (4, 4))
"""Positions in `_RANGES` of width and height: the image, its corners, and its center twice."""

CROPS = len(_VIEWS) - 1
"""Number of views that are cropped."""

_WINDOW = 9
"""Pixels of the blur that sharpness is compared with (Crete et al. 2007 use the same)."""


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
    """Return the hash of an image, and of its `CROPS` cropped views.

    A bit says whether one of the lowest frequencies of the cosine transform exceeds their median,
    as in the hash that Zauner (2010) and `imagehash.phash` use. The mean level does not count.
    """
    kind = Image.Resampling.BOX if min(gray.size) > _SIDE else Image.Resampling.BILINEAR
    levels = np.asarray(gray.resize((_SIDE, _SIDE), kind), np.float64)
    waves = _COSINES @ (levels - levels.mean()) @ _COSINES.T
    blocks = waves.reshape(len(_RANGES), _WAVES, len(_RANGES), _WAVES).swapaxes(1, 2)
    views = blocks[[y for _, y in _VIEWS], [x for x, _ in _VIEWS]].reshape(len(_VIEWS), -1)
    views[:, 0] = 0
    ranked = np.sort(views, axis=1)  # np.median takes 8 times as long
    middle = ranked.shape[1] // 2
    medians = ranked[:, middle - 1 : middle + 1].mean(1, keepdims=True)
    bits = np.packbits(views > medians, axis=1)
    return bits.view(">u8")[:, 0].astype(np.uint64)


def _cosines(start: float, stop: float) -> npt.NDArray[np.float64]:
    """Return the lowest waves over a range of the side, at each pixel: shape (_WAVES, _SIDE)."""
    edges = np.arange(_SIDE + 1) / _SIDE
    inside = np.diff(np.clip(edges, start, stop))  # pixels at the ends count in part
    phase = ((edges[1:] + edges[:-1]) / 2 - start) / (stop - start)
    return np.asarray(inside * np.cos(np.pi * np.arange(_WAVES)[:, None] * phase))


_COSINES = np.concatenate([_cosines(start, stop) for start, stop in _RANGES])


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
