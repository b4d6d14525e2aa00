"""Pieces of JPEG images, decoded without the rest: by TurboJPEG 3, where a machine has it.

No Python package offers that call, but the library comes with many systems (Homebrew, conda-forge,
Fedora, newer Debians), and its interface is plain C that is promised to stay. It is optional: what
it gives is, to the bit, what decoding the whole image and cutting gives, only sooner. Of an image
that is damaged below the piece it may give the piece, where the whole is refused: it stops there.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.errors import UsageError

VARIABLE = "SHARDKIT_TURBOJPEG"
"""The environment variable that names the library's file, or is ``off`` to use none."""

_FILE = "libturbojpeg.0.dylib" if sys.platform == "darwin" else "libturbojpeg.so.0"

# Names and values of turbojpeg.h, version 3.0.
_DECOMPRESS = 1  # TJINIT_DECOMPRESS
_STOP_ON_WARNING, _SUBSAMPLING, _WIDTH, _HEIGHT, _COLOUR = 0, 4, 5, 6, 8  # TJPARAM_...
_FAST_UPSAMPLE, _FAST_DCT, _PROGRESSIVE = 9, 10, 12
_RGB = 0  # TJPF_RGB
_BLOCK_WIDTHS = (8, 16, 16, 8, 8, 32, 8)
"""Pixels in the width of a block of each kind of subsampling, TJSAMP_444 to TJSAMP_441."""
_CMYK = (3, 4)
"""TJCS_CMYK and TJCS_YCCK."""

_CONTEXT = 2
"""Columns beside a piece that are decoded with it: smooth upsampling looks at its neighbours."""


class Region(NamedTuple):
    """A rectangle of an image, in pixels."""

    left: int
    top: int
    width: int
    height: int


class _Scale(ctypes.Structure):
    _fields_ = (("numerator", ctypes.c_int), ("denominator", ctypes.c_int))


class _Region(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int) for name in Region._fields)


_SCALES = {n: _Scale(n // math.gcd(n, 8), 8 // math.gcd(n, 8)) for n in range(1, 9)}
"""By eighths; the library knows fractions in their lowest terms."""


def decode_region(
    data: bytes | memoryview,
    size: tuple[int, int],
    eighths: int,
    region: Region,
    *,
    fast: bool = False,
) -> npt.NDArray[np.uint8] | None:
    """Decode a piece of a JPEG image.

    Args:
        data: The encoded image.
        size: Width and height that it should have.
        eighths: In how many eighths of its size it is decoded, 1 to 8.
        region: The piece, in pixels of the scaled image; inside of it.
        fast: Whether the fast, less exact inverse DCT and upsampling are used.

    Returns:
        uint8 of shape (height, width, 3), maybe not contiguous. None leaves the image to others:
        there is no library, or the image is damaged (as far as it was looked at), CMYK,
        progressive, or of another size.

    Raises:
        UsageError: If the environment names a library that is none.
    """
    library = _library()
    if library is None:
        return None
    # One for each image, which takes a microsecond: it keeps tables and errors of the last.
    handle = library.tj3Init(_DECOMPRESS)
    try:
        source = np.frombuffer(data, np.uint8).ctypes.data, len(data)
        for parameter, value in (_STOP_ON_WARNING, 1), (_FAST_DCT, fast), (_FAST_UPSAMPLE, fast):
            library.tj3Set(handle, parameter, value)
        if library.tj3DecompressHeader(handle, *source):
            return None
        known = (library.tj3Get(handle, _WIDTH), library.tj3Get(handle, _HEIGHT)) == size
        subsampling = library.tj3Get(handle, _SUBSAMPLING)
        if not known or library.tj3Get(handle, _COLOUR) in _CMYK:
            return None
        if library.tj3Get(handle, _PROGRESSIVE):  # if scans are missing, smoothed otherwise
            return None
        if not 0 <= subsampling < len(_BLOCK_WIDTHS):
            return None
        block = -(-_BLOCK_WIDTHS[subsampling] * eighths // 8)
        begin = max(0, region.left - _CONTEXT) // block * block  # it must begin with a block
        end = min(-(-size[0] * eighths // 8), region.left + region.width + _CONTEXT)
        pixels = np.empty((region.height, end - begin, 3), np.uint8)
        wanted = _Region(begin, region.top, end - begin, region.height)
        failed = (
            library.tj3SetScalingFactor(handle, _SCALES[eighths])
            or library.tj3SetCroppingRegion(handle, wanted)
            or library.tj3Decompress8(handle, *source, pixels.ctypes.data, pixels.strides[0], _RGB)
        )
        left = region.left - begin
        return None if failed else pixels[:, left : left + region.width]
    finally:
        library.tj3Destroy(handle)


def available() -> bool:
    """Tell whether this machine has the library.

    Raises:
        UsageError: If the environment names a library that is none.
    """
    return _library() is not None


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the first TurboJPEG 3 library that this machine has."""
    named = os.environ.get(VARIABLE, "")
    if named == "off":
        return None
    for path in [named] if named else _candidates():
        try:
            return _declared(ctypes.CDLL(path))
        except (OSError, AttributeError) as error:  # not there, or an older one
            if named:
                raise UsageError(
                    f"{VARIABLE} names no TurboJPEG library of version 3 ({error}); correct it, "
                    f"or set it to 'off'"
                ) from error
    return None


def _candidates() -> Iterator[str]:
    """Give where the library may be: beside this Python, on the system, or in a wheel."""
    for prefix in dict.fromkeys((sys.prefix, sys.base_prefix)):  # conda's, also below a venv
        yield str(Path(prefix, "lib", _FILE))
    yield _FILE
    yield f"/opt/homebrew/lib/{_FILE}"  # where the system's search does not look
    bundled = find_spec("turbojpeg")
    if bundled is not None and bundled.origin is not None:
        found = Path(bundled.origin).parent.glob("turbojpeg.libs/libturbojpeg*")
        yield from map(str, found)


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """State what the functions used here take.

    Raises:
        AttributeError: If one is missing.
    """
    number, pointer, size = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
    arguments: dict[str, tuple[type, ...]] = {
        "tj3Init": (number,),
        "tj3Destroy": (pointer,),
        "tj3Set": (pointer, number, number),
        "tj3Get": (pointer, number),
        "tj3DecompressHeader": (pointer, pointer, size),
        "tj3SetScalingFactor": (pointer, _Scale),
        "tj3SetCroppingRegion": (pointer, _Region),
        "tj3Decompress8": (pointer, pointer, size, pointer, number, number),
    }
    for name, types in arguments.items():
        getattr(library, name).argtypes = types
    library.tj3Init.restype = pointer
    return library
