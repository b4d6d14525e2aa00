"""Decode TIFF files to their own channels and dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.codecs.image import loaded
from shardkit.errors import BadImage

_MODES = ("L", "LA", "RGB", "RGBA", "I;16", "I", "F")


def decode_tiff(data: bytes | memoryview) -> npt.NDArray[Any]:
    """Return the pixels of a TIFF file.

    Returns:
        The file's dtype, shape (height, width, channels).

    Raises:
        BadImage: If it cannot be decoded.
    """
    with loaded(data, "tiff") as image:
        if image.mode not in _MODES:
            raise BadImage(f"it is a TIFF file of the mode {image.mode}")
        values = np.asarray(image)
    return values.reshape(image.height, image.width, -1)
