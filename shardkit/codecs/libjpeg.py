"""JPEGs decoded by libjpeg-turbo, which reports damage that Pillow hides.

simplejpeg offers it, and where that is missing the compiled module: no wheels of simplejpeg exist
for free-threaded Python. Without both, Pillow alone decodes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardkit.codecs.decode_errors import raise_interruption
from shardkit.codecs.reduced import LEAST_SIDE, reduced_side, sufficient_eighths
from shardkit.system import compiled

try:
    import simplejpeg
except ImportError:  # pragma: no cover - tests run this branch in another process
    simplejpeg = None

Pixels = npt.NDArray[np.uint8]

_CHANNELS = {"GRAY": 1, "RGB": 3, "CMYK": 4}
_CMYK = ("CMYK", "YCCK")


class JpegError(ValueError):
    """The first warning or error of libjpeg about an image, or why it does not decode the image."""


def is_available() -> bool:
    """Return whether this module can decode."""
    return simplejpeg is not None or compiled.is_available()


def read_header(data: bytes | memoryview) -> tuple[int, int, bool]:
    """Return width and height of a JPEG, and whether its colors are CMYK.

    Raises JpegError if libjpeg reports damage, or cannot decode it.
    """
    if simplejpeg is not None:
        try:
            height, width, space, _ = simplejpeg.decode_jpeg_header(data)
        except (ValueError, KeyError) as error:  # KeyError: a subsampling unknown to simplejpeg
            raise_interruption(error)
            raise JpegError(str(error)) from error
        return width, height, space in _CMYK
    header = compiled.jpeg_header(data)
    if not isinstance(header, tuple):
        raise JpegError(header or "libjpeg is missing")
    width, height, components = header
    return width, height, components == _CHANNELS["CMYK"]


def decode_jpeg(
    data: bytes | memoryview,
    colors: str = "RGB",
    *,
    at_least: tuple[int, int] = (0, 0),
    out: Pixels | None = None,
) -> Pixels:
    """Decode a JPEG to uint8 of shape (height, width, channels).

    ``colors`` is ``RGB``, ``GRAY`` or ``CMYK``. ``at_least`` is the minimum width and height, as in
    `sufficient_eighths`. ``out`` is C-contiguous and has exactly the image's shape. Raises
    JpegError if libjpeg reports damage, or cannot decode it.
    """
    if simplejpeg is None:
        return _decode_compiled(data, colors, at_least, out)
    width, height = at_least
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(
            data,
            colorspace=colors,
            fastupsample=False,  # it is off by 40 levels on average at saturated edges
            min_height=height,
            min_width=width,
            min_factor=2 if height else 1,
            buffer=out,
        )
    except (ValueError, KeyError) as error:
        raise_interruption(error)
        raise JpegError(str(error)) from error
    return pixels


def _decode_compiled(
    data: bytes | memoryview,
    colors: str,
    at_least: tuple[int, int],
    out: Pixels | None,
) -> Pixels:
    width, height, _ = read_header(data)
    eighths = 8
    if min(width, height) >= LEAST_SIDE:
        eighths = sufficient_eighths((width, height), at_least)
    shape = reduced_side(height, eighths), reduced_side(width, eighths), _CHANNELS[colors]
    if out is None:
        out = np.empty(shape, np.uint8)
    elif out.shape != shape:
        raise JpegError(f"it has the shape {shape}, not {out.shape}")
    reason = compiled.decode_jpeg(data, out, eighths)
    if reason is not None:
        raise JpegError(reason)
    return out
