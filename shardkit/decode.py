"""From stored images to pixels: which are alike enough for one block, and how each is decoded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardkit.codecs.image import WHITE, Colour, Pixels, decode
from shardkit.errors import BadImage
from shardkit.shardset import StoredImage


def common_size(images: Sequence[StoredImage]) -> tuple[int, int] | None:
    """Return height and width if all images share them, so that one block can hold them."""
    sizes = {(image.height, image.width) for image in images}
    return sizes.pop() if len(sizes) == 1 else None


def decode_stored(
    image: StoredImage,
    *,
    background: Colour = WHITE,
    at_least: tuple[int, int] = (0, 0),
    out: Pixels | None = None,
) -> Pixels:
    """Return the pixels of a stored image.

    Args:
        image: The image.
        background: RGB colour under transparent pixels.
        at_least: Width and height that suffice: a JPEG of twice that size or more comes reduced.
        out: Where to put them; of exactly the image's shape.

    Returns:
        uint8 of shape (height, width, 3); ``out`` if it was given.

    Raises:
        BadImage: If it cannot be decoded, or has not the size that the index gives.
    """
    shape = (image.height, image.width, 3)
    if image.field != "raw":
        pixels = decode(image.data, image.field, background=background, at_least=at_least, out=out)
        if pixels.shape != shape and not (any(at_least) and reduction(pixels.shape, shape)):
            raise BadImage(f"it decodes to {pixels.shape}, the index says {shape}")
        return pixels
    if len(image.data) != image.height * image.width * 3:
        raise BadImage(f"it has {len(image.data)} raw bytes, not those of {shape}")
    pixels = np.frombuffer(image.data, np.uint8).reshape(shape)
    if out is None:
        return pixels.copy()  # a user may write to it
    out[:] = pixels
    return out


def reduction(found: tuple[int, ...], whole: tuple[int, ...]) -> float | None:
    """Return by how much a JPEG of one shape came out smaller, or None if it is another image.

    libjpeg scales by eighths, and rounds a side up: 0.375 of 900 pixels is 338 of them, not 337.5.

    Args:
        found: Height and width that were decoded.
        whole: Height and width of all of it.
    """
    for eighths in range(8, 0, -1):
        if found[:2] == tuple(-(-side * eighths // 8) for side in whole[:2]):
            return eighths / 8
    return None
