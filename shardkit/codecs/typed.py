"""Images of any `ImageType`: decode to their own channels and dtype, scale, and display.

`shardkit.codecs.image` makes all images RGB of 8 bits; here nothing changes a type silently.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from shardkit.codecs.decode_errors import as_bad_image
from shardkit.codecs.image import (
    EXACT,
    FILTERS,
    Box,
    Decoding,
    ImageInfo,
    PixelCodec,
    Pixels,
    decode,
    inspect,
    loaded,
    opened,
)
from shardkit.codecs.image_type import DTYPES, GRAY, MOST_BYTES, RGB, ImageType, TypedPixels
from shardkit.codecs.limits import LEAST_PACKED, check_size, in_turn_if_large
from shardkit.codecs.png16 import decode_png16, png_header
from shardkit.codecs.tiff import decode_tiff
from shardkit.errors import BadImage, setting
from shardkit.record import ARRAY_IMAGE, PLANES
from shardkit.system.npy import read_npy

_RGBA = ImageType(4, "uint8")
_MODES = {
    "1": GRAY,
    "L": GRAY,
    "LA": ImageType(2, "uint8"),
    "RGBA": _RGBA,
    "I": ImageType(1, "int32"),
    "I;16": ImageType(1, "uint16"),
    "F": ImageType(1, "float32"),
}
"""The types of Pillow's modes; all others are converted to RGB."""

_MOST_COLORS = 4
"""Maximum channels of an image of 8 bits, with transparency."""

_WIDE = ("PNG", "PPM")
"""Pillow's formats whose mode ``I`` is 16 bits without a sign."""

_WIDE_COLOR = re.compile(rb"P[36]\s+(?:#[^\n]*\n\s*)*[0-9]+\s+(?:#[^\n]*\n\s*)*[0-9]+\s+([0-9]+)")
"""The header of a PPM file in color, with its largest value."""


def inspect_typed(data: bytes, field: str) -> ImageInfo:
    """Return what an image's header states, with the type that `decode_typed` returns.

    ``field`` is one of `shardkit.record.IMAGE_FIELDS` except ``raw``, `ARRAY_IMAGE`, or a foreign
    one. Raises BadImage if the header is damaged, or states too many pixels or bytes.
    """
    if field in (ARRAY_IMAGE, "tiff"):  # one has no header of images, Pillow does not know some
        pixels = decode_typed(data, field)
        return ImageInfo(pixels.shape[1], pixels.shape[0], pixels=ImageType.of(pixels))
    info = replace(inspect(data, field), pixels=_stated_type(data, field))
    check_size(info.width, info.height, pixel_bytes=info.pixels.bytes)
    return info


def decode_typed(
    data: bytes | memoryview,
    field: str,
    how: Decoding = EXACT,
    warnings: list[str] | None = None,
) -> TypedPixels:
    """Decode an image to its own channels and dtype, without applying its EXIF orientation.

    Palettes become RGB, images of 1 bit 0 and 255, and transparent colors a further channel. CMYK
    becomes RGB. Of an animation, decodes the first frame. ``how`` is for RGB: all pixels are
    decoded, with their alpha. ``warnings`` receives libjpeg's first warning about a JPEG. The shape
    is (height, width, channels). Raises BadImage if the image cannot be decoded completely, or has
    no `ImageType`.
    """
    if field == ARRAY_IMAGE:
        return _load_array(data)
    if field == "tiff" and (decoded := decode_tiff(data)) is not None:
        return _as_image(decoded)
    kind = _stated_type(data, field)
    if field == "png" and kind.dtype == "uint16":
        return _decode_png16(data)
    if field in ("jpg", PLANES):
        pixels = decode(data, field, warnings=warnings)
        return np.ascontiguousarray(pixels[:, :, :1]) if kind == GRAY else pixels
    # Pillow's types have up to four bytes, so its pixels are under the limit of bytes.
    with (
        loaded(data, field) as image,
        as_bad_image("it cannot be decoded", image.width * image.height),
    ):
        values = np.asarray(_converted(image, kind))
    return values.reshape(*values.shape[:2], kind.channels).astype(kind.dtype)


def decode_gray(
    data: bytes | memoryview,
    field: str,
    how: Decoding = EXACT,
    warnings: list[str] | None = None,
) -> TypedPixels:
    """Decode an image to one channel of 8 bits: luma of its RGB pixels, as Pillow's mode L.

    The result is uint8 of shape (height, width, 1). Images of 16 bits keep their upper eight bits,
    as in `shardkit.codecs.image.decode`. An array keeps its values. Raises BadImage if it cannot be
    decoded, or its values have no defined range.
    """
    if field == ARRAY_IMAGE:
        return _load_array(data)
    if field == "tiff" and (decoded := decode_tiff(data)) is not None:
        pixels = _as_image(decoded)
        kind = ImageType.of(pixels)
        if kind.dtype not in ("uint8", "uint16") or kind.channels not in (1, 3):
            raise BadImage(
                f"it is {kind}, which cannot become 8-bit gray",
                remedy=f"use {setting('pixels', 'keep')}",
            )
        narrow = (pixels >> 8 if kind.dtype == "uint16" else pixels).astype(np.uint8)
        rgb = np.broadcast_to(narrow, (*pixels.shape[:2], 3))
    else:
        rgb = decode(data, field, how, warnings)
    return np.asarray(Image.fromarray(np.ascontiguousarray(rgb)).convert("L"))[:, :, None]


def scale_typed(pixels: TypedPixels, box: Box, size: tuple[int, int], filter_: str) -> TypedPixels:
    """Return a box of an image, scaled as Pillow scales float32, each channel by itself.

    Integers are rounded to the nearest and clipped to their dtype. float32 holds integers up to
    16,777,216 exactly, so larger ones lose their lowest bits. ``size`` is height and width. Returns
    ``pixels`` itself if nothing changes.
    """
    height, width = pixels.shape[:2]
    if box == (0.0, 0.0, float(width), float(height)) and size == (height, width):
        return pixels
    out = np.empty((*size, pixels.shape[2]), pixels.dtype)
    for channel in range(pixels.shape[2]):
        values = np.ascontiguousarray(pixels[:, :, channel], np.float32)
        scaled = np.asarray(Image.fromarray(values).resize(size[::-1], FILTERS[filter_], box))
        if pixels.dtype.kind != "f":
            limits = np.iinfo(pixels.dtype)
            # As float64, which has the limits of all integers of 32 bits.
            scaled = np.rint(scaled.astype(np.float64)).clip(limits.min, limits.max)
        with np.errstate(over="ignore"):  # float16: filters overshoot
            out[:, :, channel] = scaled
    return out


def display(pixels: TypedPixels) -> Pixels:
    """Return an image as it is shown: RGB of 8 bits.

    uint8 is shown as it is. Values of other dtypes are stretched linearly, from the smallest to the
    largest finite value of the image, to 0 to 255. Of 3 channels or more, the first three are red,
    green and blue; of others, the first one is gray.
    """
    shown: npt.NDArray[Any] = pixels[:, :, :3] if pixels.shape[2] >= 3 else pixels[:, :, :1]
    if shown.dtype != np.uint8:
        values = shown.astype(np.float64)
        finite = values[np.isfinite(values)]
        low, high = (finite.min(), finite.max()) if finite.size else (0.0, 0.0)
        half = high / 2 - low / 2  # halves, since the difference may overflow
        values = np.nan_to_num(values, nan=low, posinf=high, neginf=low)
        scaled = (values / 2 - low / 2) / half * 255 if half > 0 else np.zeros_like(values)
        shown = np.rint(scaled).astype(np.uint8)
    return np.array(np.broadcast_to(shown, (*pixels.shape[:2], 3)), order="C")


def _stated_type(data: bytes | memoryview, field: str) -> ImageType:
    """Return the type of an image, from its header."""
    if field == PLANES:
        return RGB
    if field == "png":
        header = png_header(data)
        if header.depth == 16:
            return ImageType(header.channels, "uint16")
    if field == "ppm":
        head = bytes(data[:4096])
        match = _WIDE_COLOR.match(head)
        if match and int(match[1]) > 255:
            raise BadImage("it is a 16-bit color PPM;", remedy="convert it to PNG or TIFF")
    with opened(data, field) as image:
        return _type_of(image)


def _type_of(image: Image.Image) -> ImageType:
    """Return the type that `_converted` gives an image of Pillow."""
    if image.info.get("bits", 8) > 8:  # of HEIF and JPEG XL, which Pillow does not hold
        raise BadImage(
            f"it has {image.info['bits']} bits, but only 8 would be kept",
            remedy=f"use {setting('pixels', 'rgb')}, or a 16-bit PNG or TIFF file",
        )
    mode = "I;16" if image.mode.startswith("I;16") else image.mode
    if mode == "I" and image.format in _WIDE:
        mode = "I;16"
    kind = _MODES.get(mode, RGB)
    if image.has_transparency_data and kind.dtype == "uint8":
        return ImageType(2, "uint8") if mode in ("1", "L", "LA") else _RGBA
    return kind


def _converted(image: Image.Image, kind: ImageType) -> Image.Image:
    """Return an image in the mode of its type."""
    mode = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}.get(kind.channels, "")
    if kind.dtype != "uint8" or image.mode == mode:
        return image
    return image.convert(mode)


def _decode_png16(data: bytes | memoryview) -> TypedPixels:
    header = png_header(data)
    size = header.width, header.height
    kind = ImageType(header.channels, "uint16")
    least = LEAST_PACKED["png"]
    check_size(*size, pixel_bytes=kind.bytes, packed=len(data), least_packed=least)
    with in_turn_if_large(*size, kind.bytes):
        return decode_png16(data, header)


def _load_array(data: bytes | memoryview) -> TypedPixels:
    """Return the image in an .npy file, of shape (height, width[, channels])."""
    try:
        return _as_image(read_npy(data))
    except ValueError as error:
        raise BadImage(f"it is damaged: {str(error)[:200]}") from error


def _as_image(array: npt.NDArray[Any]) -> TypedPixels:
    """Return an array as an image of shape (height, width, channels), if it can be one."""
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or 0 in array.shape or array.dtype.name not in DTYPES:
        raise BadImage(f"an image cannot be an array of {array.dtype}, shape {array.shape}")
    try:
        kind = ImageType.of(array)
    except ValueError as error:
        raise BadImage(str(error)) from error
    check_size(array.shape[1], array.shape[0])
    if array.nbytes >= MOST_BYTES:  # they are in the file, so they need no other limit
        raise BadImage(f"it has {array.nbytes} bytes of {kind}, over the limit of {MOST_BYTES}")
    return np.ascontiguousarray(array)


def _require_kept(info: ImageInfo, field: str, wanted: ImageType | None) -> None:
    """Refuse an image of another type, and any array that should become RGB of 8 bits."""
    if wanted is None:
        raise _not_rgb(info)
    if info.pixels != wanted:
        raise BadImage(f"it is {info.pixels}; the first image is {wanted}")


def _require_gray(info: ImageInfo, field: str, wanted: ImageType | None) -> None:
    """Refuse an array that is not of the type: no conversion to gray suits all."""
    if field == ARRAY_IMAGE and info.pixels != wanted:
        raise _not_rgb(info)


def _not_rgb(info: ImageInfo) -> BadImage:
    """Return the error of an array that is no image of 8 bits."""
    channels = info.pixels.channels
    if moved := describe_moved(info):
        return BadImage(f"it has {moved}")
    remedy = f"store it with {setting('pixels', 'keep')}, or as an array field"
    if channels > _MOST_COLORS:
        return BadImage(f"it has {channels} channels, not 1 to 4: {remedy}")
    example = ", as in (255 * x).round().astype('uint8')" if info.pixels.values.kind == "f" else ""
    return BadImage(
        f"its values are {info.pixels.dtype}, not uint8",
        remedy=f"convert them{example}, or {remedy}",
    )


def describe_moved(info: ImageInfo) -> str:
    """Return what is odd about an image whose channels are probably another axis, or ""."""
    height, width, channels = info.height, info.width, info.pixels.channels
    if channels <= _MOST_COLORS or min(height, width) > _MOST_COLORS:
        return ""
    expected = "arrays have channels last: numpy.moveaxis(array, 0, -1)"
    if width < height:
        expected = "tensors have channels first: tensor.permute(2, 0, 1)"
    return f"{height} x {width} pixels and {channels} channels, but {expected}"


TYPED_CODEC = PixelCodec(
    inspect=inspect_typed,
    require=_require_kept,
    decode=decode_typed,
    scale=scale_typed,
    display=display,
)

GRAY_CODEC = TYPED_CODEC._replace(require=_require_gray, decode=decode_gray)
