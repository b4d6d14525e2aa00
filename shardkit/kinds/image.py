"""The kind ``image``: pixels in the encoding of their file or raw, RGB of 8 bits or typed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from shardkit.codecs.image import SNIFF_BYTES, encode, sniff
from shardkit.codecs.image_type import ImageType
from shardkit.kinds.field import Field, Need
from shardkit.kinds.picture import Picture, as_png
from shardkit.record import ARRAY_IMAGE

_MOST_PNG_CHANNELS = 4

_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")

_WITH_ALPHA = {"La": "LA", "PA": "RGBA", "RGBa": "RGBA"}
"""Target of each other mode of Pillow with transparency; modes without it become RGB."""


class _Image(Picture):
    name = "image"
    dtype = Need.OPTIONAL
    shape = Need.OPTIONAL

    def check(self, field: Field) -> None:
        """Refuse a dtype without channels, and types that no image has."""
        if field.dtype is None:
            return
        if field.shape is None or len(field.shape) != 1:
            raise ValueError("an image's shape is its number of channels, as in shape=(1,)")
        ImageType(*field.shape, field.dtype)

    def feature(self, field: Field) -> dict[str, Any]:
        """Return the field as a feature of Hugging Face's ``datasets``, which cannot read .npy."""
        if field.pixels is None or field.pixels.is_held_by("png"):
            return super().feature(field)
        return {"_type": "Value", "dtype": "binary"}

    def infer(self, value: Any) -> Field | None:
        """Return the field of a PIL image, or of bytes or a path of an image file."""
        if isinstance(value, Path):
            value = value.read_bytes() if value.is_file() else b""
        if isinstance(value, (bytes, bytearray, memoryview)):
            return Field("image") if sniff(bytes(value[:SNIFF_BYTES])) else None
        return Field("image") if isinstance(value, Image.Image) else None

    def encode(self, value: Any) -> tuple[str, bytes]:
        """Return the kind and the content of the file of an image.

        A PIL image of 8 or 16 bits, or uint8 of shape (height, width[, channels]) with 1 to 4
        channels, is a PNG file. Others are .npy files, which only conversions to typed images
        accept.
        """
        if isinstance(value, Image.Image):
            if value.mode not in ("I", "F"):
                return "png", as_png(_in_png_mode(value))
            value = np.asarray(value)
        typed = value[..., None] if value.ndim == 2 else value
        if typed.ndim != 3 or 0 in typed.shape:
            raise ValueError(f"an image cannot be an array of shape {value.shape}")
        is_usual = typed.dtype == np.uint8 and typed.shape[2] <= _MOST_PNG_CHANNELS
        kind = "png" if is_usual else ARRAY_IMAGE
        return kind, encode(typed, kind)


def _in_png_mode(image: Image.Image) -> Image.Image:
    """Return an image in a mode that PNG has, with the same pixels."""
    if image.mode in _PNG_MODES:
        return image
    if image.mode.startswith("I;16"):
        return Image.fromarray(np.asarray(image).astype(np.uint16))
    converted = image.convert(_WITH_ALPHA.get(image.mode, "RGB"))
    converted.info.pop("icc_profile", None)  # of the old mode; for LAB, Pillow's has the time
    return converted


KIND = _Image()
