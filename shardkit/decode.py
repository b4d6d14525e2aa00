"""From a stored image to pixels: all of them, or a piece."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from shardkit.codecs.image import MAX_PIXELS, WHITE, Colour, Pixels, decode
from shardkit.codecs.turbo import Region, available, decode_region
from shardkit.errors import BadImage
from shardkit.shardset import StoredImage


class Decoding(NamedTuple):
    """How the images of a dataset are decoded."""

    background: Colour = WHITE
    """RGB colour under transparent pixels."""
    fast: bool = False
    """Whether JPEGs take libjpeg's fast inverse DCT and upsampling, which are less exact."""


class Part(NamedTuple):
    """A piece of a decoded image."""

    pixels: Pixels
    """uint8 of shape (height, width, 3)."""
    left: int
    top: int
    """Where it begins in the image as decoded, in pixels."""
    scale: float
    """Sides of the image as decoded, divided by those of the image as stored."""


EXACT = Decoding()


def decode_stored(
    image: StoredImage,
    how: Decoding = EXACT,
    *,
    at_least: tuple[int, int] = (0, 0),
    out: Pixels | None = None,
) -> Pixels:
    """Return the pixels of a stored image.

    Args:
        image: The image.
        how: How it is decoded.
        at_least: Width and height that suffice: a JPEG of twice that size or more comes reduced.
        out: Where to put them; of exactly the image's shape.

    Returns:
        uint8 of shape (height, width, 3); ``out`` if it was given.

    Raises:
        BadImage: If it cannot be decoded, or has not the size that the index gives.
    """
    shape = (image.height, image.width, 3)
    if image.field != "raw":
        pixels = decode(
            image.data,
            image.field,
            background=how.background,
            at_least=at_least,
            out=out,
            fast=how.fast,
        )
        if pixels.shape != shape and not (any(at_least) and reduction(pixels.shape, shape)):
            raise BadImage(f"it decodes to {pixels.shape}, the index says {shape}")
        return pixels
    pixels = _raw(image)
    if out is None:
        return pixels.copy()  # a user may write to it
    out[:] = pixels
    return out


def decode_part(
    image: StoredImage, region: Region, how: Decoding, at_least: tuple[int, int] = (0, 0)
) -> Part:
    """Return at least a piece of a stored image: all of it where a piece costs as much.

    Args:
        image: The image.
        region: The piece, in pixels of the whole image; inside of it.
        how: How the image is decoded.
        at_least: Width and height of the whole image that suffice.

    Raises:
        BadImage: If it cannot be decoded, or has not the size that the index gives.
    """
    size = image.width, image.height
    if image.field == "raw":
        # torch.from_numpy warns of memory that is read-only; nobody writes to it.
        raw = _raw(image)
        return Part(raw if raw.flags.writeable else raw.copy(), 0, 0, 1.0)
    # Of the smallest images several eighths give one size; simplejpeg would take another of them.
    usual = min(size) >= 8 and image.width * image.height <= MAX_PIXELS
    if image.field == "jpg" and usual and (region.width, region.height) != size and available():
        eighths = sufficient_eighths(size, at_least)
        inside = region if eighths == 8 else _reduced_region(region, size, eighths)
        piece = decode_region(image.data, size, eighths, inside, fast=how.fast)
        if piece is not None:
            return Part(piece, inside.left, inside.top, eighths / 8)
    pixels = decode_stored(image, how, at_least=at_least)
    return Part(pixels, 0, 0, reduction(pixels.shape, (image.height, image.width)) or 1.0)


def sufficient_eighths(size: tuple[int, int], at_least: tuple[int, int]) -> int:
    """Return in how many eighths of its size a JPEG is decoded: 1 to 4, or all 8.

    It is simplejpeg's rule, so that a piece is the same whether or not it is decoded alone. Above
    four eighths nothing is gained.

    Args:
        size: Width and height of the image.
        at_least: Width and height that suffice; (0, 0) asks for all pixels.
    """
    if not any(at_least) or 2 * at_least[0] > size[0] + 1:
        return 8  # the most common answer, found at once
    for eighths in range(1, 5):
        if all(
            _eighths(side, eighths) >= least for side, least in zip(size, at_least, strict=True)
        ):
            return eighths
    return 8


def reduction(found: tuple[int, ...], whole: tuple[int, ...]) -> float | None:
    """Return by how much a JPEG of one shape came out smaller, or None if it is another image.

    Args:
        found: Height and width that were decoded.
        whole: Height and width of all of it.
    """
    if found[:2] == whole[:2]:
        return 1.0
    for eighths in range(7, 0, -1):
        if found[:2] == tuple(_eighths(side, eighths) for side in whole[:2]):
            return eighths / 8
    return None


def enclosing(region: Region, size: tuple[int, int], scale: float) -> Region:
    """Return the whole pixels of a reduced image that show a region of the image.

    Args:
        region: In pixels of the image.
        size: Width and height of the reduced image.
        scale: Its size as a part of the image's.
    """
    left, top = int(region.left * scale), int(region.top * scale)
    right = min(size[0], math.ceil((region.left + region.width) * scale))
    bottom = min(size[1], math.ceil((region.top + region.height) * scale))
    return Region(left, top, right - left, bottom - top)


def _raw(image: StoredImage) -> Pixels:
    """Return a view of pixels that are stored as they are."""
    shape = (image.height, image.width, 3)
    if len(image.data) != math.prod(shape):
        raise BadImage(f"it has {len(image.data)} raw bytes, not those of {shape}")
    return np.frombuffer(image.data, np.uint8).reshape(shape)


def _reduced_region(region: Region, size: tuple[int, int], eighths: int) -> Region:
    reduced = _eighths(size[0], eighths), _eighths(size[1], eighths)
    return enclosing(region, reduced, eighths / 8)


def _eighths(side: int, eighths: int) -> int:
    """Return a side as libjpeg reduces it: 3/8 of 900 pixels are 338 of them, not 337.5."""
    return -(-side * eighths // 8)
