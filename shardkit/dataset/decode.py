"""Decode a stored image to pixels, completely or in part."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from shardkit.codecs.geometry import Region
from shardkit.codecs.image import (
    EXACT,
    Decoding,
    PixelCodec,
    Pixels,
    WrongSizeError,
    coding_of,
    decode,
    pixel_codec,
    stated_size,
)
from shardkit.codecs.image_type import ImageType, TypedPixels
from shardkit.codecs.libjpeg import reduction
from shardkit.dataset.located import EncodedImage


class DecodedRegion(NamedTuple):
    """A region of a decoded image."""

    pixels: TypedPixels
    """Shape (height, width, channels)."""
    left: int
    top: int
    """Position of the top-left corner in the decoded image, in pixels."""
    scale: float
    """Side lengths of the decoded image divided by those of the stored image."""


def decode_stored(
    image: EncodedImage,
    how: Decoding = EXACT,
    warnings: list[str] | None = None,
    *,
    out: TypedPixels | None = None,
) -> TypedPixels:
    """Return the writable pixels of a stored image, in its own channels and dtype.

    The shape is (height, width, channels), as ``out`` must have; ``how`` is for RGB of 8 bits.
    ``warnings`` receives libjpeg's first warning about a JPEG. Raises WrongSizeError if size or
    type differ from index and schema, BadImage if the image cannot be decoded.
    """
    if image.field == "raw":
        return _placed(_raw(image), out)
    if not image.pixels.is_rgb:
        return _placed(_decode_typed(image, how, warnings), out)
    shape = image.height, image.width, 3
    pixels = decode(image.data, image.field, how, warnings, out=out)
    if pixels.shape != shape:
        if not (any(how.at_least) and reduction(pixels.shape, shape)):
            raise WrongSizeError(f"it decodes to {pixels.shape}, but the index has {shape}")
        require_stated_size(image)  # do not mistake a smaller image for a reduced one
    return pixels


def decode_shown(image: EncodedImage, how: Decoding = EXACT) -> Pixels:
    """Return the pixels of a stored image for display: RGB of 8 bits; errors as `decode_stored`."""
    return _codec(image.pixels).display(decode_stored(image, how))


def _codec(kind: ImageType) -> PixelCodec:
    return pixel_codec("rgb" if kind.is_rgb else "keep")


def _decode_typed(image: EncodedImage, how: Decoding, warnings: list[str] | None) -> TypedPixels:
    """Return the pixels of an encoded image of another type than RGB of 8 bits."""
    kind = image.pixels
    shape = image.height, image.width, kind.channels
    pixels = _codec(kind).decode(image.data, image.field, how, warnings)
    if pixels.shape != shape or pixels.dtype != kind.dtype:
        raise WrongSizeError(
            f"it decodes to {pixels.dtype} of shape {pixels.shape}; index and schema say "
            f"{kind.dtype} of shape {shape}"
        )
    return pixels


def _placed(pixels: TypedPixels, out: TypedPixels | None) -> TypedPixels:
    """Return pixels in ``out`` if there is one, or else as an array that can be written to."""
    if out is None:
        is_own = pixels.flags.owndata and pixels.flags.writeable  # else of the record's bytes
        return pixels if is_own else pixels.copy()
    out[:] = pixels
    return out


def require_stated_size(image: EncodedImage) -> None:
    """Refuse an image whose header states a different size than the index.

    Raises WrongSizeError, or BadImage if the header is damaged.
    """
    if image.pixels.is_rgb:
        width, height = stated_size(image.data, image.field)
    else:
        info = _codec(image.pixels).inspect(bytes(image.data), image.field)
        width, height = info.width, info.height
        if info.pixels != image.pixels:
            raise WrongSizeError(f"it is {info.pixels}; the schema has {image.pixels}")
    # Decoding rotates some TIFF files by 90 degrees.
    if sorted((width, height)) != sorted((image.width, image.height)):
        raise WrongSizeError(
            f"it is {width} x {height} pixels; the index has {image.width} x {image.height}"
        )


def decode_region(image: EncodedImage, region: Region, how: Decoding) -> DecodedRegion:
    """Return a region of an image, or all of it where that costs no more.

    ``region`` is in pixels of the whole image, as ``how.at_least`` is. Raises WrongSizeError if the
    size differs from the index, BadImage if the image cannot be decoded.
    """
    if image.field == "raw":
        # torch.from_numpy warns about read-only memory.
        raw = _raw(image)
        return DecodedRegion(raw if raw.flags.writeable else raw.copy(), 0, 0, 1.0)
    if not image.pixels.is_rgb:
        return DecodedRegion(decode_stored(image), 0, 0, 1.0)
    if coding := coding_of(image.field):
        require_stated_size(image)
        pixels = coding.decode(image.data, region, None)
        return DecodedRegion(pixels, region.left, region.top, 1.0)
    pixels = decode_stored(image, how)
    return DecodedRegion(pixels, 0, 0, reduction(pixels.shape, (image.height, image.width)) or 1.0)


def enclosing(region: Region, size: tuple[int, int], scale: float) -> Region:
    """Return the region of a reduced image that covers a region of the full image.

    ``size`` is the width and height of the reduced image, ``scale`` its sides divided by those of
    the full image.
    """
    left = int(region.left * scale)
    top = int(region.top * scale)
    right = min(size[0], math.ceil((region.left + region.width) * scale))
    bottom = min(size[1], math.ceil((region.top + region.height) * scale))
    return Region(left, top, right - left, bottom - top)


def _raw(image: EncodedImage) -> TypedPixels:
    """Return raw pixels: a view if the machine has the byte order of the file, else a copy."""
    kind = image.pixels
    shape = (image.height, image.width, kind.channels)
    if len(image.data) != math.prod(shape) * kind.values.itemsize:
        raise WrongSizeError(f"its {len(image.data)} bytes of raw pixels do not fit shape {shape}")
    return np.frombuffer(image.data, kind.values).reshape(shape).astype(kind.dtype, copy=False)
