"""Decode a region of a JPEG without the rest, using TurboJPEG 3 if installed.

No Python package offers that call, but the library comes with many systems (Homebrew, conda-forge,
Fedora, newer Debians) and in the wheel ``pylibjxl`` (`pip install 'shardkit[turbo]'`), whose
extension exports it. Its C interface is stable. It is optional: the pixels equal those of decoding
the whole image and cropping, bit for bit, only faster.

Decoding stops below the region, so wrong bytes there go unnoticed, as with the compiled module. The
record's checksum detects damage after the conversion, and ``--check decode`` before. But a file
that a full decode refuses is refused with every crop: neither decodes a region unless the first
scan ends with the image's end marker.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import sys
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.codecs.structure import jpeg_ends_after_scan
from shardkit.errors import UsageError

VARIABLE = "SHARDKIT_TURBOJPEG"
"""The environment variable with the path of the library, or ``off`` to use none."""

_FILE = "libturbojpeg.0.dylib" if sys.platform == "darwin" else "libturbojpeg.so.0"

# Names and values of turbojpeg.h, version 3.0.
_DECOMPRESS = 1  # TJINIT_DECOMPRESS
_STOP_ON_WARNING = 0  # TJPARAM_...
_SUBSAMPLING = 4
_WIDTH = 5
_HEIGHT = 6
_COLOR = 8
_PROGRESSIVE = 12
_RGB = 0  # TJPF_RGB
_SAMPLINGS = {0: 444, 1: 422, 2: 420, 3: 400}
"""Chroma sampling of each TJSAMP_... whose planes are stored."""
_YCBCR = 1  # TJCS_...
_GRAY = 2
_BLOCK_WIDTHS = (8, 16, 16, 8, 8, 32, 8)
"""Block width in pixels for each subsampling, TJSAMP_444 to TJSAMP_441."""
_CMYK = (3, 4)
"""TJCS_CMYK and TJCS_YCCK."""

_CONTEXT = 2
"""Extra columns decoded on each side of a region: smooth upsampling reads neighboring columns."""


_WHEELS = {
    "pylibjxl": f"_pylibjxl{EXTENSION_SUFFIXES[0]}",
    "turbojpeg": "turbojpeg.libs/libturbojpeg*",
}
"""Files of the library in wheels, by package; relative to the folder of the package's module."""


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
"""Scales by eighths; the library accepts only fractions in lowest terms."""


def decode_region(
    data: bytes | memoryview, size: tuple[int, int], eighths: int, region: Region
) -> npt.NDArray[np.uint8] | None:
    """Decode a region of a JPEG image.

    Args:
        data: The encoded image.
        size: Expected width and height.
        eighths: Scale in eighths, 1 to 8.
        region: The region, in pixels of the scaled image.

    Returns:
        uint8 of shape (height, width, 3), possibly not contiguous. None if the library is missing
        or does not apply: the image is CMYK, progressive, of another size, known to be damaged, or
        does not end after its first scan.

    Raises:
        UsageError: If the environment variable does not name a TurboJPEG library.
    """
    library = _library()
    if library is None:
        return None
    # A new handle per image takes a microsecond; a reused one keeps tables and errors.
    handle = library.tj3Init(_DECOMPRESS)
    try:
        source = np.frombuffer(data, np.uint8).ctypes.data, len(data)
        library.tj3Set(handle, _STOP_ON_WARNING, 1)
        if library.tj3DecompressHeader(handle, *source):
            return None
        as_expected = (library.tj3Get(handle, _WIDTH), library.tj3Get(handle, _HEIGHT)) == size
        subsampling = library.tj3Get(handle, _SUBSAMPLING)
        if not as_expected or library.tj3Get(handle, _COLOR) in _CMYK:
            return None
        if library.tj3Get(handle, _PROGRESSIVE):  # missing scans would be smoothed differently
            return None
        if not 0 <= subsampling < len(_BLOCK_WIDTHS) or not jpeg_ends_after_scan(data):
            return None
        block = -(-_BLOCK_WIDTHS[subsampling] * eighths // 8)
        begin = max(0, region.left - _CONTEXT) // block * block  # must be aligned to a block
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
    finally:  # one handle for each thread was no faster, and carried errors to the next image
        library.tj3Destroy(handle)


def decode_planes(data: bytes) -> tuple[int, int, int, bytes] | None:
    """Return width, height, sampling (420, 422, 444, or 400 for gray) and the planes of a JPEG.

    None if it has a warning or no such planes, or without the library.

    Raises:
        UsageError: If the environment variable does not name a TurboJPEG library.
    """
    library = _library()
    if library is None:
        return None
    handle = library.tj3Init(_DECOMPRESS)
    try:
        source = np.frombuffer(data, np.uint8).ctypes.data, len(data)
        library.tj3Set(handle, _STOP_ON_WARNING, 1)
        if library.tj3DecompressHeader(handle, *source):
            return None
        width = library.tj3Get(handle, _WIDTH)
        height = library.tj3Get(handle, _HEIGHT)
        sampling = _SAMPLINGS.get(library.tj3Get(handle, _SUBSAMPLING), 0)
        color = _GRAY if sampling == 400 else _YCBCR
        if not sampling or library.tj3Get(handle, _COLOR) != color:
            return None
        # The library pads odd sides of the image to whole samples of chroma.
        across = 1 + (sampling in (420, 422))
        down = 1 + (sampling == 420)
        chroma = -(-height // down), -(-width // across)
        sides = [(chroma[0] * down, chroma[1] * across), chroma, chroma]
        planes = [np.empty(shape, np.uint8) for shape in sides[: 1 if sampling == 400 else 3]]
        pointers = (ctypes.c_void_p * 3)(*(plane.ctypes.data for plane in planes))
        if library.tj3DecompressToYUVPlanes8(handle, *source, pointers, None):
            return None
        planes[0] = planes[0][:height, :width]
        return width, height, sampling, b"".join(plane.tobytes() for plane in planes)
    finally:
        library.tj3Destroy(handle)


def available() -> bool:
    """Return whether the library is installed.

    Raises:
        UsageError: If the environment variable does not name a TurboJPEG library.
    """
    return _library() is not None


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the first TurboJPEG 3 library found, or None."""
    named = os.environ.get(VARIABLE, "")
    if named == "off":
        return None
    for path in [named] if named else _candidates():
        try:
            return _declared(ctypes.CDLL(path))
        except (OSError, AttributeError) as error:  # missing, or an older version
            if named:
                raise UsageError(
                    f"{VARIABLE} does not name a TurboJPEG library of version 3 ({error});",
                    remedy="correct it, or set it to 'off'",
                ) from error
    return None


def _candidates() -> Iterator[str]:
    """Yield possible paths of the library: with this Python, on the system, or in a wheel."""
    for prefix in dict.fromkeys((sys.prefix, sys.base_prefix)):  # conda's, also below a venv
        yield str(Path(prefix, "lib", _FILE))
    yield _FILE
    yield f"/opt/homebrew/lib/{_FILE}"  # not in the system's search path
    for package, pattern in _WHEELS.items():
        spec = find_spec(package)  # without importing it
        if spec is not None and spec.origin is not None:
            yield from map(str, sorted(Path(spec.origin).parent.glob(pattern)))


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the argument types of the functions."""
    number = ctypes.c_int
    pointer = ctypes.c_void_p
    size = ctypes.c_size_t
    arguments: dict[str, tuple[type, ...]] = {
        "tj3Init": (number,),
        "tj3Destroy": (pointer,),
        "tj3Set": (pointer, number, number),
        "tj3Get": (pointer, number),
        "tj3DecompressHeader": (pointer, pointer, size),
        "tj3SetScalingFactor": (pointer, _Scale),
        "tj3SetCroppingRegion": (pointer, _Region),
        "tj3Decompress8": (pointer, pointer, size, pointer, number, number),
        "tj3DecompressToYUVPlanes8": (pointer, pointer, size, pointer, pointer),
    }
    for name, types in arguments.items():
        getattr(library, name).argtypes = types
    library.tj3Init.restype = pointer
    return library
