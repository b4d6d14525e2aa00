"""Scale images as Pillow does, with the compiled module."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import PIL

from shardkit.system import native

TALL_FIRST = int(PIL.__version__.partition(".")[0]) >= 13
"""Whether Pillow scales the height before the width if it shrinks by more than twice as many pixels
(from version 13 on, python-pillow/Pillow#9549). The order changes rounding, by up to 26 levels."""


def resize(
    pixels: npt.NDArray[np.uint8],
    box: tuple[float, float, float, float],
    size: tuple[int, int],
    filter_: str,
) -> npt.NDArray[np.uint8] | None:
    """Scale a box of an image as Pillow does, bit for bit, in a third of the time.

    Args:
        pixels: uint8 of shape (height, width, 3).
        box: Left, top, right and bottom, inside the image.
        size: Height and width.
        filter_: Name of the filter; the module has ``bilinear`` and ``bicubic``.

    Returns:
        uint8 of shape (height, width, 3). None without the module, or if it does not apply.
    """
    compiled = native.module()
    if compiled is None or filter_ not in ("bilinear", "bicubic"):
        return None
    height, width = pixels.shape[:2]
    out = np.empty((*size, 3), np.uint8)
    options = filter_ == "bicubic", TALL_FIRST
    pixels = np.ascontiguousarray(pixels)
    scaled = compiled.resize(pixels, width, height, box, out, size[1], size[0], *options)
    return out if scaled else None
