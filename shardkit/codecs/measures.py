"""Measure the pixels of one image: color, sharpness, and hashes that survive small changes.

The compiled module measures the same, bit for bit (``native/measure.c``): all sums are of integers.
"""

from __future__ import annotations

import math
import zlib
from typing import Any, NamedTuple

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


class Turn(NamedTuple):
    """How a picture is turned: transposed first, then mirrored."""

    transposed: bool
    columns: bool
    """Whether left and right change places."""
    rows: bool
    """Whether top and bottom change places."""

    def __str__(self) -> str:
        return "mirrored" if self.transposed ^ self.columns ^ self.rows else "rotated"


TURNS = (
    Turn(transposed=False, columns=True, rows=False),
    Turn(transposed=False, columns=False, rows=True),
    Turn(transposed=False, columns=True, rows=True),
    Turn(transposed=True, columns=False, rows=False),
    Turn(transposed=True, columns=True, rows=True),
    Turn(transposed=True, columns=True, rows=False),
)
"""The ways to turn a picture, but for its rotation to the left, which is that to the right of the
other picture."""

PERCEIVED: list[Any] = [
    ("hash", "<u8"),
    ("crops", "<u8", (CROPS,)),
    ("turned", "<u8", (len(TURNS),)),
    ("mean", "<f4", (3,)),
    ("std", "<f4", (3,)),
    ("brightness", "<f4"),
    ("contrast", "<f4"),
    ("sharpness", "<f4"),
]
"""Fields of `MEASURES` that compare pictures, which `FACT` of `image_facts` has, too."""

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
``crops`` are those of the image with 5 to 10% cropped, ``turned`` those of its `TURNS`. ``mean``
and ``std`` are of red, green and blue; ``brightness`` and ``contrast`` the same of the luminance,
and ``highlight`` the level that 1% of the pixels exceed. ``sharpness`` is the fraction of the
variation between neighboring pixels that a blur removes, 0 to 1. ``pixels`` is the CRC-32 of the
pixels. The compiled module also fills the others, of ordinary JPEGs and PNGs: see there."""

_GRID = 32
_WAVES = 8
"""Sides of a reduced image, and of its low frequencies, which make a hash of 64 bits."""

_EIGHTHS = 8

_FINE = 16
"""Levels of a reduced image for each level of the image."""

_RANGES = ((0, 1), (0, 0.95), (0.05, 1), (0.025, 0.975), (0.05, 0.95))
"""Ranges of width or height that views of an image have."""

_WINDOW = 9
"""Pixels of the blur that sharpness is compared with (Crete et al. 2007 use the same)."""

_FEW_BITS = 4.3
"""Bits per pixel of a blurred JPEG with quantizers of 1; see `may_be_blurred`."""

_USUAL_SIDE = 512
"""Shorter side up to which they do not depend on the size."""


def measure(pixels: Pixels, size: tuple[int, int] | None = None) -> Any:
    """Return the `MEASURES` of an image of shape (height, width, 3), which may be reduced.

    ``size`` is the width and height of the image, if these are the pixels of a JPEG that was
    decoded at some eighths of its size. The last column and row may stand for less than a pixel.
    """
    measures = np.zeros(1, MEASURES)
    pixels = np.ascontiguousarray(pixels)
    height, width = pixels.shape[:2]
    wide, high = size or (width, height)
    eighths = min(_EIGHTHS * width // wide, _EIGHTHS * height // high)
    extent = wide * eighths, high * eighths
    if compiled.measure(pixels, extent, WAVES, measures):
        return measures[0]
    gray = np.asarray(Image.fromarray(pixels).convert("L"))
    result = measures[0]
    counts = [np.bincount(pixels[..., n].reshape(-1), minlength=256) for n in range(3)]
    result["mean"], result["std"] = _moments(np.stack(counts))
    levels = np.bincount(gray.reshape(-1), minlength=256)
    result["brightness"], result["contrast"] = (moment[0] for moment in _moments(levels[None]))
    result["highlight"] = np.searchsorted(100 * np.cumsum(levels), 99 * gray.size)
    hashes = _hashes(gray, extent)
    result["hash"] = hashes[0]
    result["crops"], result["turned"] = hashes[1:VIEWS], hashes[VIEWS:]
    result["sharpness"] = sharpness(gray)
    result["pixels"] = zlib.crc32(pixels.data)
    return result


def measure_png(image: PlainPng, rows: bytes, measures: npt.NDArray[Any]) -> None:
    """Measure an ordinary PNG with its unpacked rows, if the compiled module can.

    ``done`` of ``measures`` is 0 if it was not measured.
    """
    compiled.measure_png(rows, (image.width, image.height, image.channels), WAVES, measures)


def may_be_blurred(length: int, size: tuple[int, int], quantizers: int) -> bool:
    """Return whether a JPEG has so few bits that it may be blurred at full size.

    So few have 99% of the photographs of 500 x 375 pixels blurred with a sigma of 3, and 6% of the
    sharp ones (33% at quality 50). ``length`` is in bytes; ``quantizers`` is the sum of its 64 luma
    quantizers.
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


def _hashes(gray: npt.NDArray[np.uint8], extent: tuple[int, int]) -> npt.NDArray[np.uint64]:
    """Return the hashes of an image, of its `CROPS` cropped views, and of its `TURNS`.

    A bit says whether one of the lowest frequencies of the cosine transform exceeds their median,
    as in the hash that Zauner (2010) and `imagehash.phash` use. The mean level does not count.
    """
    totals = _reduced(_reduced(gray.astype(np.int64), extent[0]).T, extent[1]).T
    area = math.prod(extent)
    levels = (totals * _FINE + area // 2) // area
    levels -= (levels.sum() + levels.size // 2) // levels.size
    table = WAVES.astype(np.int64)
    waves = (table @ levels @ table.T) >> 17
    blocks = waves.reshape(len(_RANGES), _WAVES, len(_RANGES), _WAVES).swapaxes(1, 2)
    views = blocks[[y for _, y in _VIEWS], [x for x, _ in _VIEWS]].reshape(VIEWS, -1)
    views[:, 0] = 0
    uncropped = views[0].reshape(_WAVES, _WAVES)
    views = np.concatenate([views, [_turned(uncropped, turn).reshape(-1) for turn in TURNS]])
    medians = np.sort(views, axis=1)[:, views.shape[1] // 2 - 1]
    bits = np.packbits(views > medians[:, None], axis=1)
    return bits.view(">u8")[:, 0].astype(np.uint64)


def _turned(waves: npt.NDArray[np.int64], turn: Turn) -> npt.NDArray[np.int64]:
    """Return the amplitudes of a turned picture: mirroring changes the sign of odd frequencies."""
    signs = np.where(np.arange(_WAVES) % 2, -1, 1)
    waves = waves.T if turn.transposed else waves
    if turn.columns:
        waves = waves * signs
    return waves * signs[:, None] if turn.rows else waves


def _reduced(levels: npt.NDArray[np.int64], extent: int) -> npt.NDArray[np.int64]:
    """Return rows of so many 1/8 pixels as `_GRID` sums of equal width."""
    unit = _EIGHTHS * _GRID
    pixel, fraction = np.divmod(np.arange(_GRID + 1) * extent, unit)
    sums = np.cumsum(levels, axis=1)
    before = np.where(pixel > 0, sums[:, np.maximum(pixel - 1, 0)], 0)
    last = levels[:, np.minimum(pixel, levels.shape[1] - 1)]  # no part of it at the end
    return np.diff(before * unit + fraction * last, axis=1)


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

    Unlike the variance of a Laplacian, this hardly depends on contrast and content. Large images
    are reduced to `SHARP_SIDE` first: at full size, ordinary photographs look soft. It is the lower
    one of that and of half the size, where strong blur shows: without, neighboring levels of a
    strongly blurred image differ by 0 or 1, which is noise.
    """
    shorter = min(gray.shape)
    scale = 1 if shorter < 2 * SHARP_SIDE else shorter // SHARP_SIDE
    levels = 2 * _summed(gray, scale) // scale**2
    return min(_sharpness_of(levels), _sharpness_of(_summed(levels, 2)))


def _summed(levels: npt.NDArray[Any], side: int) -> npt.NDArray[np.int64]:
    """Return the sums of squares of ``side`` x ``side`` pixels."""
    height, width = (length // side for length in levels.shape)
    squares = levels[: height * side, : width * side].reshape(height, side, width, side)
    return np.asarray(squares.sum((1, 3), dtype=np.int64))


def _sharpness_of(levels: npt.NDArray[np.int64]) -> float:
    if min(levels.shape) <= 2 * _WINDOW:
        return 1.0  # too small to judge
    fractions = []
    for values in (levels, levels.T):
        middle = values[_WINDOW // 2 : _WINDOW // 2 + len(values) - _WINDOW + 1]
        steps = np.abs(np.diff(middle, axis=0)) * _WINDOW
        blurred = np.abs(values[_WINDOW:] - values[:-_WINDOW])  # neighboring means, times 9
        total = int(steps.sum())
        fractions.append(int(np.maximum(steps - blurred, 0).sum()) / total if total else 0.0)
    return min(fractions)
