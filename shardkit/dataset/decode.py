"""Decode a stored image to pixels, completely or in part."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from shardkit.codecs.image import (
    EXACT,
    Decoding,
    Pixels,
    WrongSizeError,
    coding_of,
    decode,
    stated_size,
)
from shardkit.codecs.image_type import TypedPixels, pixel_kind
from shardkit.codecs.limits import MAX_PIXELS
from shardkit.codecs.reduced import reduced_side, reduction, sufficient_eighths
from shardkit.codecs.turbo import Region, available, decode_region
from shardkit.dataset.located import EncodedImage
from shardkit.system.late import load


class DecodedPart(NamedTuple):
    """A part of a decoded image."""

    pixels: Pixels
    """uint8 of shape (height, width, 3)."""
    left: int
    top: int
    """Position of the top-left corner in the decoded image, in pixels."""
    scale: float
    """Side lengths of the decoded image divided by those of the stored image."""


class Decoder(NamedTuple):
    """What decodes the stored images of one kind of pixels."""

    decode: Callable[[EncodedImage, Decoding, list[str] | None], TypedPixels]
    """Returns all pixels in their own channels and dtype; see `decode_own`."""
    display: Callable[[TypedPixels], Pixels]
    """Returns them as RGB of 8 bits."""
    stated_size: Callable[[EncodedImage], tuple[int, int]]
    """Returns the width and height that the header states; raises `BadImage`."""


_DECODERS = {
    "rgb": "shardkit.dataset.decode:RGB_DECODER",
    "typed": "shardkit.dataset.typed:TYPED_DECODER",
}
"""A `Decoder` for each `pixel_kind`."""


def _decoder_of(image: EncodedImage) -> Decoder:
    decoder: Decoder = load(_DECODERS[pixel_kind(image.pixels)])
    return decoder


def decode_own(image: EncodedImage, warnings: list[str] | None = None) -> TypedPixels:
    """Return the pixels of a stored image in its own channels and dtype.

    Args:
        image: The image.
        warnings: Receives libjpeg's first warning about a JPEG, if any.

    Returns:
        Shape (height, width, channels); writable.

    Raises:
        WrongSizeError: If size or type differ from index and schema.
        BadImage: If the image cannot be decoded.
    """
    return _decoder_of(image).decode(image, EXACT, warnings)


def decode_shown(image: EncodedImage, how: Decoding = EXACT) -> Pixels:
    """Return the pixels of a stored image as they are shown: RGB of 8 bits.

    Raises:
        WrongSizeError, BadImage: As `decode_own`.
    """
    decoder = _decoder_of(image)
    return decoder.display(decoder.decode(image, how, None))


def decode_stored(
    image: EncodedImage,
    how: Decoding = EXACT,
    warnings: list[str] | None = None,
    *,
    out: Pixels | None = None,
) -> Pixels:
    """Return the pixels of a stored image that is RGB of 8 bits.

    Args:
        image: The image.
        how: Decoding options.
        warnings: Receives libjpeg's first warning about a JPEG, if any.
        out: Array for the pixels, of exactly the image's shape.

    Returns:
        uint8 of shape (height, width, 3); ``out`` if given.

    Raises:
        WrongSizeError: If the size differs from the index.
        BadImage: If the image cannot be decoded.
    """
    shape = (image.height, image.width, 3)
    if image.field != "raw":
        pixels = decode(image.data, image.field, how, out=out, warnings=warnings)
        if pixels.shape != shape and not (any(how.at_least) and reduction(pixels.shape, shape)):
            raise WrongSizeError(f"it decodes to {pixels.shape}, the index states {shape}")
        if pixels.shape != shape:
            require_stated_size(image)  # do not mistake a smaller image for a reduced one
        return pixels
    pixels = _raw(image)
    if out is None:
        return pixels.copy()  # the caller may write to it
    out[:] = pixels
    return out


RGB_DECODER = Decoder(
    decode=decode_stored,
    display=lambda pixels: pixels,
    stated_size=lambda image: stated_size(image.data, image.field),
)


def require_stated_size(image: EncodedImage) -> None:
    """Refuse an image whose header states a different size than the index.

    Raises:
        WrongSizeError: If the sizes differ.
        BadImage: If the header is damaged.
    """
    width, height = _decoder_of(image).stated_size(image)
    # Decoding rotates some TIFF files by 90 degrees.
    if sorted((width, height)) != sorted((image.width, image.height)):
        raise WrongSizeError(
            f"it is {width} x {height} pixels; the index states {image.width} x {image.height}"
        )


def decode_part(image: EncodedImage, region: Region, how: Decoding) -> DecodedPart:
    """Return a part of an image of `decode_stored`, or all of it where that costs no more.

    Args:
        image: The image.
        region: The part, in pixels of the whole image.
        how: Decoding options; ``at_least`` is of the whole image.

    Raises:
        WrongSizeError: If the size differs from the index.
        BadImage: If the image cannot be decoded.
    """
    size = image.width, image.height
    if image.field == "raw":
        # torch.from_numpy warns about read-only memory.
        raw = _raw(image)
        return DecodedPart(raw if raw.flags.writeable else raw.copy(), 0, 0, 1.0)
    if coding := coding_of(image.field):
        require_stated_size(image)
        pixels = coding.decode(image.data, region, None)
        return DecodedPart(pixels, region.left, region.top, 1.0)
    # For tiny images several scales give one size, and simplejpeg would choose another of them.
    usual = min(size) >= 8 and image.width * image.height <= MAX_PIXELS
    if image.field == "jpg" and usual and (region.width, region.height) != size and available():
        eighths = sufficient_eighths(size, how.at_least)
        inside = region if eighths == 8 else _reduced_region(region, size, eighths)
        piece = decode_region(image.data, size, eighths, inside)
        if piece is not None:
            return DecodedPart(piece, inside.left, inside.top, eighths / 8)
    pixels = decode_stored(image, how)
    return DecodedPart(pixels, 0, 0, reduction(pixels.shape, (image.height, image.width)) or 1.0)


def enclosing(region: Region, size: tuple[int, int], scale: float) -> Region:
    """Return the region of a reduced image that covers a region of the full image.

    Args:
        region: The region in pixels of the full image.
        size: Width and height of the reduced image.
        scale: Side lengths of the reduced image divided by those of the full image.
    """
    left = int(region.left * scale)
    top = int(region.top * scale)
    right = min(size[0], math.ceil((region.left + region.width) * scale))
    bottom = min(size[1], math.ceil((region.top + region.height) * scale))
    return Region(left, top, right - left, bottom - top)


def _raw(image: EncodedImage) -> Pixels:
    """Return a view of raw pixels."""
    shape = (image.height, image.width, 3)
    if len(image.data) != math.prod(shape):
        raise WrongSizeError(f"it has {len(image.data)} bytes of raw pixels, not shape {shape}")
    return np.frombuffer(image.data, np.uint8).reshape(shape)


def _reduced_region(region: Region, size: tuple[int, int], eighths: int) -> Region:
    reduced = reduced_side(size[0], eighths), reduced_side(size[1], eighths)
    return enclosing(region, reduced, eighths / 8)
