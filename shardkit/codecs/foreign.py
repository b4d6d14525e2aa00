"""Image types that shardkit stores only re-encoded: AVIF, JPEG 2000, TGA, DDS, PSD and others.

Extras read HEIF and JPEG XL. Of Pillow's plugins, only the listed ones read a file. Excluded are
EPS (runs Ghostscript), WMF, BUFR, GRIB, HDF5 and MPEG (identified, never decoded), IPTC (opens any
type within it), FPX and MIC (require another package).
"""

from __future__ import annotations

import functools
from typing import BinaryIO

from PIL import Image, UnidentifiedImageError

from shardkit.codecs.decode_errors import raise_interruption
from shardkit.codecs.quiet import quiet
from shardkit.codecs.unread import HEAD, extra_of
from shardkit.errors import BadImage
from shardkit.system.late import load

FORMATS = (
    *("AVIF", "BLP", "CUR", "DCX", "DDS", "DIB", "FITS", "FLI", "FTEX", "GBR", "ICNS", "ICO"),
    *("IM", "IMT", "JPEG2000", "MCIDAS", "MSP", "PCD", "PCX", "PIXAR", "PSD", "QOI", "SGI"),
    *("SPIDER", "SUN", "TGA", "XBM", "XPM", "XVTHUMB"),
)
"""Pillow's names of the formats."""

_SLOW = frozenset(("BLP", "DDS", "FTEX", "ICNS", "MSP", "QOI", "SGI", "XPM"))
"""Formats that Pillow decodes in Python, where a small file could take minutes."""
_SLOW_PIXELS = 1 << 24

_OPEN_EXTRA = "shardkit.codecs.extras:open_extra"


@functools.cache
def _known() -> tuple[str, ...]:
    """Return the `FORMATS` that this version of Pillow supports."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def identify(file: BinaryIO) -> str | None:
    """Return the name of an image file's format, or None if it is not in `FORMATS` or an extra's.

    Reads only headers, from the start of the file, and leaves the file position undefined.
    """
    file.seek(0)
    if extra_of(file.read(HEAD)):
        return "of an extra"  # an image; opening it raises the errors
    file.seek(0)
    try:
        with quiet():
            return Image.open(file, formats=_known()).format
    except UnidentifiedImageError:
        return None
    except Image.DecompressionBombError:
        return "too large"  # an image; opening it raises the error
    except OSError as error:
        if error.errno is not None:
            raise
        raise_interruption(error)
        return None
    except MemoryError:
        raise
    except Exception as error:  # plugins raise all kinds for unexpected content
        raise_interruption(error)
        return None


def open_foreign(file: BinaryIO) -> Image.Image:
    """Open an image of one of `FORMATS`, or of an extra.

    Raises BadImage if decoding could take too much time or memory.
    """
    extra = extra_of(file.read(HEAD))
    file.seek(0)
    if extra:
        decoded: Image.Image = load(_OPEN_EXTRA)(file.read(), extra.opener)
        return decoded
    image = Image.open(file, formats=_known())
    pixels = image.width * image.height
    if image.format in _SLOW and pixels > _SLOW_PIXELS:
        raise BadImage(
            f"it states {image.width} x {image.height} pixels, over the limit of {_SLOW_PIXELS} "
            f"for {image.format} images"
        )
    if any(tile[0] == "fits_gzip" for tile in getattr(image, "tile", ())):
        raise BadImage("it is a compressed FITS image, which can unpack to any size")
    return image
