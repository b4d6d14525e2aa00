"""Tell which pictures are the same: facts name candidates, and reading the images decides."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.dataset.decode import decode_stored, decode_stored_type
from shardkit.dataset.located import EncodedImage
from shardkit.errors import BadImage
from shardkit.reporting.collection import Collection

Rows = npt.NDArray[np.int64]


class Identical(NamedTuple):
    """For each row, the first row with the same picture; the row itself without an image."""

    bytes: Rows
    """First row with an equal encoded image."""
    pixels: Rows
    """First row with equal pixels."""


def find_identical(images: Collection) -> Identical:
    """Return which images are the same; reads those whose facts agree.

    Raises:
        CorruptRecord: If a record that is read is damaged.
    """
    same = Identical(np.arange(len(images)), np.arange(len(images)))
    present = np.flatnonzero(images.present)
    facts = images.facts[present]
    candidates = facts["hash"] ^ facts["pixels"].astype(np.uint64) << np.uint64(32)
    for group in groups_of_equal(candidates):
        _confirm(images, present[group], same)
    return same


def groups_of_equal(values: npt.NDArray[np.generic]) -> Iterator[Rows]:
    """Yield the positions of each value that occurs several times, in order of the first one."""
    order = np.argsort(values, kind="stable")
    ranked = values[order]
    borders = np.flatnonzero(ranked[1:] != ranked[:-1]) + 1
    starts, stops = np.append(0, borders), np.append(borders, len(order))
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


def _digest(image: EncodedImage) -> bytes:
    try:
        typed = image.pixels
        pixels = decode_stored(image) if typed is None else decode_stored_type(image, typed)
    except BadImage:
        return hashlib.sha256(image.data).digest()
    return hashlib.sha256(repr(pixels.shape).encode() + pixels.tobytes()).digest()
