"""Measure the pixels of one image: color, sharpness, and hashes that survive small changes.

The compiled module measures the same, bit for bit (``native/measure.c``): all sums are of integers.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from shardkit.codecs.image import Pixels
from shardkit.codecs.structure import PlainPng
from shardkit.system import compiled

SIDE = 32
"""Minimum shorter side at which a JPEG is measured: 1/8 of the size costs hardly more than checking
it. Other images are measured at full size."""

SHARP_SIDE = 256
"""The same for the sharpness of a JPEG that `may_be_blurred`."""

VIEWS = 7
_VIEWS = ((0, 0), (1, 1), (2, 1), (1, 2), (2, 2), (3, 3), (4, 4))
"""Positions in `_RANGES` of width and height: the image, its corners, and its center twice."""

CROPS = VIEWS - 1
"""Number of views that are cropped."""

PERCEIVED: list[Any] = [
    ("hash", "<u8"),
    ("crops", "<u8", (CROPS,)),
    ("mean", "<f4", (3,)),
    ("std", "<f4", (3,)),
    ("brightness", "<f4"),
    ("contrast", "<f4"),
    ("sharpness", "<f4"),
]
"""Fields of `MEASURES` that compare pictures, which `shardkit.dataset.facts.FACT` has, too."""

MEASURES = np.dtype(
    [
        *PERCEIVED,
        ("pixels", "<u4"),
        ("content", "<u4"),
        ("quantizers", "<u4"),
        ("components", "u1"),
        ("icc", "u1"),
        ("plain", "u1"),
        ("highlight", "u1"),
        ("done", "<u4"),
    ]
)
"""Measures of an image, in 8-bit levels where not stated otherwise: ``sk_measures`` in
``native/convert.h``. ``hash`` is a perceptual hash, 64 bits of which similar images share most;
``crops`` are those of the image with 5 to 10% cropped. ``mean`` and ``std`` are of red, green and
blue; ``brightness`` and ``contrast`` the same of the luminance, and ``highlight`` the level that 1%
of the pixels exceed. ``sharpness`` is the fraction of the variation between neighboring pixels that
a blur removes, 0 to 1. ``pixels`` is the CRC-32 of the pixels. The compiled module also fills the
others, of ordinary JPEGs and PNGs: see there."""

_GRID, _WAVES = 32, 8
"""Sides of a reduced image, and of its low frequencies, which make a hash of 64 bits."""

_FINE = 16
"""Levels of a reduced image for each level of the image."""

_RANGES = ((0, 1), (0, 0.95), (0.05, 1), (0.025, 0.975), (0.05, 0.95))
"""Ranges of width or height that views of an image have."""

_WINDOW = 9
"""Pixels of the blur that sharpness is compared with (Crete et al. 2007 use the same)."""

_FEW_BITS = 4.0
"""Bits per pixel of a blurred JPEG with quantizers of 1; see `may_be_blurred`."""

_USUAL_SIDE = 512
"""Shorter side up to which they do not depend on the size."""


def measure(pixels: Pixels) -> Any:
    """Return the `MEASURES` of an image, which may be reduced.

    Args:
        pixels: uint8 of shape (height, width, 3).
    """
    measures = np.zeros(1, MEASURES)
    pixels = np.ascontiguousarray(pixels)
    if compiled.measure(pixels, WAVES, measures):
        return measures[0]
    gray = np.asarray(Image.fromarray(pixels).convert("L"))
    result = measures[0]
    counts = [np.bincount(pixels[..., n].reshape(-1), minlength=256) for n in range(3)]
    result["mean"], result["std"] = _moments(np.stack(counts))
    levels = np.bincount(gray.reshape(-1), minlength=256)
    result["brightness"], result["contrast"] = (moment[0] for moment in _moments(levels[None]))
    result["highlight"] = np.searchsorted(100 * np.cumsum(levels), 99 * gray.size)
    hashes = _hashes(gray)
    result["hash"], result["crops"] = hashes[0], hashes[1:]
    result["sharpness"] = sharpness(gray)
    result["pixels"] = zlib.crc32(pixels.data)
    return result


def measure_png(image: PlainPng, rows: bytes, measures: npt.NDArray[Any]) -> None:
    """Measure an ordinary PNG, if the compiled module can.

    Args:
        image: The image.
        rows: Its unpacked rows.
        measures: `MEASURES` of one image. ``done`` is 0 if it was not measured.
    """
    compiled.measure_png(rows, (image.width, image.height, image.channels), WAVES, measures)


def may_be_blurred(length: int, size: tuple[int, int], quantizers: int) -> bool:
    """Return whether a JPEG has so few bits that it may be blurred at full size.

    97% of the photographs of 500 x 375 pixels whose blur is found at full size have less than 2.0
    bits per pixel at quality 95, 1.5 at 90, 1.0 at 75 and 0.8 at 50. So have 5% of the sharp ones.

    Args:
        length: Bytes of the image.
        size: Its width and height.
        quantizers: Sum of its 64 luma quantizers.
    """
    bits = 8 * length / (float(size[0]) * size[1]) / _FEW_BITS
    mean = quantizers / 64
    if min(size) > _USUAL_SIDE:  # larger ones have fewer bits for the same blur
        bits *= math.sqrt(min(size) / _USUAL_SIDE)
    return bits * bits * bits * bits * bits * mean * mean < 1


def _moments(counts: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.float64], ...]:
    """Return mean and standard deviation of histograms, exact sums of integers."""
    levels = np.arange(256)
    total = counts.sum(1)
    mean = counts @ levels / total
    variance = counts @ levels**2 / total - mean**2
    return mean, np.sqrt(np.maximum(variance, 0))


def _hashes(gray: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """Return the hash of an image, and of its `CROPS` cropped views.

    A bit says whether one of the lowest frequencies of the cosine transform exceeds their median,
    as in the hash that Zauner (2010) and `imagehash.phash` use. The mean level does not count.
    """
    totals = _reduced(_reduced(gray.astype(np.int64)).T).T
    levels = (totals * _FINE + gray.size // 2) // gray.size
    levels -= (levels.sum() + levels.size // 2) // levels.size
    table = WAVES.astype(np.int64)
    waves = (table @ levels @ table.T) >> 17
    blocks = waves.reshape(len(_RANGES), _WAVES, len(_RANGES), _WAVES).swapaxes(1, 2)
    views = blocks[[y for _, y in _VIEWS], [x for x, _ in _VIEWS]].reshape(VIEWS, -1)
    views[:, 0] = 0
    medians = np.sort(views, axis=1)[:, views.shape[1] // 2 - 1]
    bits = np.packbits(views > medians[:, None], axis=1)
    return bits.view(">u8")[:, 0].astype(np.uint64)


def _reduced(levels: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return rows as `_GRID` sums of equal width, in units of 1 / `_GRID` pixel."""
    width = levels.shape[1]
    pixel, part = np.divmod(np.arange(1, _GRID) * width, _GRID)
    sums = np.cumsum(levels, axis=1)
    before = np.where(pixel > 0, sums[:, np.maximum(pixel - 1, 0)], 0)
    at_edges = np.zeros((len(levels), _GRID + 1), np.int64)
    at_edges[:, 1:-1] = before * _GRID + part * levels[:, pixel]
    at_edges[:, -1] = sums[:, -1] * _GRID
    return np.diff(at_edges, axis=1)


def _waves(start: float, stop: float) -> npt.NDArray[np.float64]:
    """Return the lowest waves over a range of the side, at each pixel: shape (_WAVES, _GRID)."""
    edges = np.arange(_GRID + 1) / _GRID
    inside = np.diff(np.clip(edges, start, stop)) * _GRID  # pixels at the ends count in part
    phase = ((edges[1:] + edges[:-1]) / 2 - start) / (stop - start)
    return np.asarray(inside * np.cos(np.pi * np.arange(_WAVES)[:, None] * phase))


WAVES = np.round(8192 * np.concatenate([_waves(start, stop) for start, stop in _RANGES])).astype(
    np.int16
)
"""The waves of all ranges, in units of 1/8192: shape (40, _GRID)."""


def sharpness(gray: npt.NDArray[np.uint8]) -> float:
    """Return how much a blur would change a gray image: 0 if it is blurred, 1 if it is noise.

    Unlike the variance of a Laplacian, this hardly depends on contrast and content.
    """
    fractions = []
    levels = gray.astype(np.int16)
    for values in (levels, levels.T):
        if len(values) <= 2 * _WINDOW:
            return 1.0  # too small to judge
        middle = values[_WINDOW // 2 : _WINDOW // 2 + len(values) - _WINDOW + 1]
        steps = np.abs(middle[1:] - middle[:-1]) * np.int16(_WINDOW)
        blurred = np.abs(values[_WINDOW:] - values[:-_WINDOW])  # neighboring means, times 9
        lost = np.maximum(steps - blurred, 0)
        total = int(steps.sum(dtype=np.int64))
        fractions.append(int(lost.sum(dtype=np.int64)) / total if total else 0.0)
    return min(fractions)
