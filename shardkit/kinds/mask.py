"""The kind ``mask``: a class or measurement for each pixel of an image, stored without loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from shardkit.codecs.geometry import Geometry, move_mask, upright
from shardkit.codecs.image import decode_mask, encode_mask
from shardkit.errors import BadImage
from shardkit.kinds.picture import Picture, as_png

LOSSY = ("jpg", "webp")
"""Kinds of images that may change values, and thus hold no mask."""


class _Mask(Picture):
    name = "mask"
    follows = True

    def encode(self, value: Any) -> tuple[str, bytes]:
        """Return a PIL image, or integers of shape (height, width[, channels]), as a PNG file."""
        if not isinstance(value, Image.Image):
            return "png", encode_mask(_values(value))
        if value.mode not in ("1", "L", "P", "RGB", "RGBA", "LA"):
            return "png", encode_mask(_values(np.asarray(value)))
        return "png", as_png(value)


def _values(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the values of a mask as uint8, or uint16 if they need it."""
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    if array.dtype.kind not in "biu":
        raise ValueError(f"a mask cannot be {array.dtype}; use integers, or an array field")
    low = int(array.min(initial=0))
    high = int(array.max(initial=0))
    if low < 0 or high > 0xFFFF:
        raise ValueError(f"a mask has values from {low} to {high}; only 0 to 65535 are possible")
    fits = array.dtype.itemsize == 1 or (array.dtype != np.uint16 and high < 256)
    return array.astype(np.uint8 if fits else np.uint16)


def moved_mask(data: bytes, field: str, geometry: Geometry) -> bytes:
    """Return a mask as a PNG file, with no value that it did not have; padding is 0.

    ``field`` is one of `shardkit.record.IMAGE_FIELDS`, or a foreign one. Raises BadImage if it
    cannot be decoded, or PNG cannot store its values.
    """
    mask = decode_mask(data, field)
    try:
        return encode_mask(move_mask(upright(mask, geometry.orientation), geometry.frame))
    except (ValueError, TypeError) as error:
        raise BadImage(f"it cannot be stored as PNG: {error}") from error


KIND = _Mask()
