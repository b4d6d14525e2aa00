"""Tell which pictures are the same: facts name candidates, and reading the images decides."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.codecs.geometry import turn
from shardkit.dataset.decode import decode_stored
from shardkit.dataset.located import EncodedImage
from shardkit.errors import BadImage
from shardkit.reporting.collection import Collection

Rows = npt.NDArray[np.int64]


_REDUCED_NOISE = 2
"""Maximum number of bits in which the hashes of equal pictures differ, one of them reduced."""

_LAST_LEVEL = 4
"""The last EXIF orientation that does not exchange width and height."""


class Identical(NamedTuple):
    """For each row, the first row with the same picture; the row itself without an image."""

    bytes: Rows
    """First row with an equal encoded image."""
    pixels: Rows
    """First row with equal pixels."""


def find_identical(images: Collection) -> Identical:
    """Return which images are the same; reads those whose facts agree."""
    same = Identical(np.arange(len(images)), np.arange(len(images)))
    present = np.flatnonzero(images.present)
    facts = images.facts[present]
    candidates = facts["hash"] ^ facts["pixels"].astype(np.uint64) << np.uint64(32)
    for group in groups_of_equal(candidates):
        _confirm(images, present[group], same)
    return same


def merge_identical(
    images: Collection,
    first: Rows,
    second: Rows,
    distance: npt.NDArray[np.uint8],
    same: Identical,
) -> None:
    """Add to ``same`` what facts do not show: a JPEG and the PNG that was made from it.

    The facts of a JPEG are those of the reduced image. So pairs of similar pictures are compared
    that differ in kind or orientation; their EXIF orientation is applied. ``first`` and ``second``
    are rows of similar pictures, whose hashes differ in ``distance`` bits.
    """
    kinds = images.index["field"]
    orientation = images.facts["orientation"]
    sizes = np.where(orientation[:, None] > _LAST_LEVEL, images.sizes[:, ::-1], images.sizes)
    maybe = (kinds[first] != kinds[second]) | (orientation[first] != orientation[second])
    maybe &= (sizes[first] == sizes[second]).all(1) & (distance <= _REDUCED_NOISE)
    maybe &= same.pixels[first] != same.pixels[second]
    rows = np.unique(same.pixels[np.append(first[maybe], second[maybe])])
    pictures: dict[bytes, int] = {}
    merged = np.arange(len(images))
    for row, image in images.read(rows):
        merged[row] = pictures.setdefault(_digest(image, int(orientation[row])), row)
    same.pixels[:] = merged[same.pixels]


def groups_of_equal(values: npt.NDArray[np.generic]) -> Iterator[Rows]:
    """Yield the positions of each value that occurs several times, in order of the first one."""
    order = np.argsort(values, kind="stable")
    ranked = values[order]
    borders = np.flatnonzero(ranked[1:] != ranked[:-1]) + 1
    starts = np.append(0, borders)
    stops = np.append(borders, len(order))
    several = np.flatnonzero(stops - starts > 1)
    for run in several[np.argsort(order[starts[several]])].tolist():
        yield order[starts[run] : stops[run]]


def _confirm(images: Collection, rows: Rows, same: Identical) -> None:
    """Compare the bytes of some images, and the pixels of those whose bytes differ."""
    contents: dict[bytes, int] = {}
    for row, image in images.read(rows):
        same.bytes[row] = contents.setdefault(hashlib.sha256(image.data).digest(), row)
    pictures: dict[bytes, int] = {}
    if len(contents) > 1:
        for row, image in images.read(np.array([*contents.values()])):
            same.pixels[row] = pictures.setdefault(_digest(image), row)
    same.pixels[rows] = same.pixels[same.bytes[rows]]


def _digest(image: EncodedImage, orientation: int = 1) -> bytes:
    try:
        pixels = turn(decode_stored(image), max(orientation, 1))
    except BadImage:
        return hashlib.sha256(image.data).digest()
    return hashlib.sha256(repr(pixels.shape).encode() + pixels.tobytes()).digest()
