"""The kind ``image``: RGB pixels, in the encoding of their file or as raw pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from shardkit.codecs.image import SNIFF_BYTES, sniff
from shardkit.kinds.field import Field
from shardkit.kinds.picture import Picture, as_png


class _Image(Picture):
    name = "image"

    def infer(self, value: Any) -> Field | None:
        """Return the field of a PIL image, or of bytes or a path of an image file."""
        if isinstance(value, Path):
            value = value.read_bytes() if value.is_file() else b""
        if isinstance(value, (bytes, bytearray, memoryview)):
            return Field("image") if sniff(bytes(value[:SNIFF_BYTES])) else None
        return Field("image") if isinstance(value, Image.Image) else None

    def encode(self, value: Any) -> bytes:
        """Return a PIL image, or uint8 of shape (height, width[, channels]), as a PNG file."""
        if isinstance(value, Image.Image):
            return as_png(value)
        if value.dtype != np.uint8:
            raise ValueError(f"an image of {value.dtype}; use uint8, or a field of the kind array")
        return as_png(Image.fromarray(value[..., 0] if value.shape[2:] == (1,) else value))


KIND = _Image()
