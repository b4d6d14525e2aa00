"""Properties of an encoded image that its header states, apart from its size."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.codecs.image import inspect, opened
from shardkit.record import ARRAY_IMAGE, PLANES

# The luminance table of the JPEG standard, Annex K, which most encoders scale by their quality.
_LUMINANCE = np.array(
    [
        [16, 11, 10, 16, 24, 40, 51, 61],
        [12, 12, 14, 19, 26, 58, 60, 55],
        [14, 13, 16, 24, 40, 57, 69, 56],
        [14, 17, 22, 29, 51, 87, 80, 62],
        [18, 22, 37, 56, 68, 109, 103, 77],
        [24, 35, 55, 64, 81, 104, 113, 92],
        [49, 64, 78, 87, 103, 121, 120, 101],
        [72, 92, 95, 98, 112, 100, 103, 99],
    ]
)
MOST_FRAMES = 65535


class Properties(NamedTuple):
    """Properties of an image, from its header."""

    mode: bytes
    """Pillow's name for the kind of pixels, such as ``b"RGB"`` or ``b"P"``."""
    orientation: int
    """EXIF orientation, 1 to 8; 1 is upright."""
    frames: int
    """Frames of an animation or pages, at most 65,535."""
    icc: bool
    """Whether it has an ICC color profile."""
    quantizers: int
    """Sum of the 64 luma quantizers of a JPEG; 0 for other kinds."""

    @property
    def quality(self) -> int:
        """Estimated JPEG quality, 1 to 100; 0 for other kinds."""
        return int(estimated_quality(np.array(self.quantizers)))


def properties(data: bytes | memoryview, field: str) -> Properties:
    """Read the properties of an encoded image; BadImage if the header is damaged."""
    if field in ("raw", PLANES, ARRAY_IMAGE):
        return Properties(b"RGB", 1, 1, icc=False, quantizers=0)
    info = inspect(bytes(data), field)
    with opened(data, field) as image:
        tables = getattr(image, "quantization", None) if field == "jpg" else None
        return Properties(
            mode=image.mode.encode("ascii"),
            orientation=info.orientation,
            frames=min(info.frames, MOST_FRAMES),
            icc="icc_profile" in image.info,
            quantizers=sum(tables[0]) if tables and 0 in tables else 0,
        )


def estimated_quality(quantizers: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the qualities whose scaled tables have the sums closest to those of images.

    It is 0 for a sum of 0.
    """
    closest = np.abs(_SUMS - quantizers[..., None].astype(np.int64)).argmin(-1) + 1
    return np.where(quantizers, closest, 0)


def _table_sum(quality: int) -> int:
    """Return the sum of the standard's table at a quality, as libjpeg scales it."""
    scale = 5000 // quality if quality < 50 else 200 - 2 * quality
    return int(np.clip((_LUMINANCE * scale + 50) // 100, 1, 255).sum())


_SUMS = np.array([_table_sum(quality) for quality in range(1, 101)])
