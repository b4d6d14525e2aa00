"""Image types that are read if an extra is installed: HEIF and JPEG XL.

Their libraries run in a child process: one changed byte makes libheif 1.23 crash.
"""

from __future__ import annotations

import io
from typing import Any

from PIL import Image

from shardkit.codecs.decoder_process import call
from shardkit.codecs.limits import check_size, in_turn_if_large
from shardkit.errors import BadImage
from shardkit.system.late import load

_WORKING_BYTES = 16
"""Bytes of a pixel while it is decoded: libjxl computes with four floats."""


def open_extra(data: bytes, opener: str) -> Image.Image:
    """Return the primary image of a file, decoded and upright: both types state an orientation.

    ``opener`` names a class of images of Pillow. Values of more than 8 bits lose the lower ones;
    ``info["bits"]`` has their number. Raises BadImage if it cannot be decoded, or states more than
    `MAX_PIXELS`.
    """
    kind, mode, size, frames, bits = call(_described, data, 0, opener)
    check_size(*size)
    with in_turn_if_large(*size):
        pixels = call(_pixels, data, _WORKING_BYTES * size[0] * size[1], opener, mode, size)
        image = Image.frombytes(mode, tuple(size), pixels)
    image.format = kind
    image.n_frames = frames  # type: ignore[attr-defined]
    image.info["bits"] = bits
    return image


def _described(data: bytes, _: int, opener: str) -> list[Any]:
    """Return format, mode, size, number of images and bits of a value; called in the child."""
    image = load(opener)(io.BytesIO(data))
    info = image.info
    # The reader of JPEG XL does not count the images of an animation.
    frames = getattr(image, "n_frames", 1 + getattr(image, "is_animated", False))
    bits = info.get("bit_depth", info.get("bits_per_sample", 8))
    return [image.format, image.mode, image.size, frames, bits]


def _pixels(data: bytes, _: int, opener: str, mode: str, size: list[int]) -> bytes:
    """Return the pixels of an image that states a mode and size; called in the child."""
    image = load(opener)(io.BytesIO(data))
    image.load()
    if (image.mode, *image.size) != (mode, *size):
        raise BadImage(f"it is {image.width} x {image.height} {image.mode}, not what it declares")
    content: bytes = image.tobytes()
    return content
