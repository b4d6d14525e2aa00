"""Image types that shardkit stores only re-encoded, reads with an extra, or does not read.

AVIF, JPEG 2000, TGA, DDS, PSD and others are re-encoded. Of Pillow's plugins, only the listed ones
read a file. Excluded are EPS (runs Ghostscript), WMF, BUFR, GRIB, HDF5 and MPEG (identified, never
decoded), IPTC (opens any type within it), FPX and MIC (require another package).

Extras read HEIF and JPEG XL. Types that are not read are told by content, so that no such file is
left out. Cameras' raw files are mostly TIFF files, whose first image is a thumbnail.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import BinaryIO, NamedTuple

from PIL import Image

from shardkit.codecs.decode_errors import raise_interruption
from shardkit.codecs.quiet import quiet
from shardkit.errors import BadImage
from shardkit.system.late import load

_PLUGINS = (
    *("Avif", "Blp", "Bmp", "Cur", "Dcx", "Dds", "Fits", "Fli", "Ftex", "Gbr", "Icns", "Ico", "Im"),
    *("Imt", "Jpeg2K", "McIdas", "Msp", "Pcd", "Pcx", "Pixar", "Psd", "Qoi", "Sgi", "Spider"),
    *("Sun", "Tga", "Xbm", "Xpm", "XVThumb"),
)
FORMATS = tuple({"Bmp": "DIB", "Jpeg2K": "JPEG2000"}.get(name, name.upper()) for name in _PLUGINS)
"""Pillow's names of the formats that its plugins read."""

_SLOW = frozenset(("BLP", "DDS", "FTEX", "ICNS", "MSP", "QOI", "SGI", "XPM"))
"""Formats that Pillow decodes in Python, where a small file could take minutes."""
_SLOW_PIXELS = 1 << 24

_OPEN_EXTRA = "shardkit.codecs.extras:open_extra"

_MAGIC = re.compile(
    rb"....ftyp(?:(?P<HEIC>hei[cxms]|hev[cxms])|(?P<AVIF>avi[fs])"
    rb"|(?P<HEIF>(?:mif[12]|msf1)(?!.{4}(?:.{4}){0,15}?avi[fs]))"  # unless AVIF is a further brand
    rb"|(?P<raw_CR3>crx ))"
    rb"|(?P<JPEG_XL>\xff\x0a|\0\0\0\x0cJXL \r\n\x87\n)"
    rb"|(?P<JPEG_XR>II\xbc\x01)"
    rb"|(?P<OpenEXR>v/1\x01)"
    rb"|(?P<Radiance_HDR>\#\?RA(?:DIANC|YTRAC)E\n|\#\?RGBE\n)"
    rb"|(?P<DjVu>AT&TFORM)"
    rb"|(?P<EPS>%!PS-Adobe-[0-9.]+ EPSF)"
    rb"|(?P<SVG>\s*(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)?(?:<!DOCTYPE svg[^>]*>\s*)?<svg[\s>])"
    rb"|(?P<DICOM>.{128}DICM)"
    rb"|(?P<raw_CR2>II\*\0....CR)"
    rb"|(?P<raw_ORF>II(?:RO|RS)|MMOR)"
    rb"|(?P<raw_RW2>IIU\0)"
    rb"|(?P<raw_RAF>FUJIFILMCCD-RAW)"
    rb"|(?P<raw_CRW>II\x1a\0\0\0HEAP)"
    rb"|(?P<raw_X3F>FOVb)"
    rb"|(?P<raw_MRW>\0MRM)",
    re.DOTALL,
)


class Extra(NamedTuple):
    """An optional library that reads a type of image."""

    name: str
    """The extra of shardkit."""
    opener: str
    """A class of images of Pillow; nothing is registered with Pillow."""


_HEIF = Extra("heif", "pi_heif:HeifImageFile")
_EXTRAS = {
    "HEIC": _HEIF,
    "HEIF": _HEIF,
    "JPEG_XL": Extra("jxl", "pylibjxl.pillow_plugin:JxlImageFile"),
}

_HEAD = 1024
"""Leading bytes that tell the type."""
_TEXT = re.compile(rb"(?!\s*#define|/\* XPM|SIMPLE|P7 332)[\t\n\r -~\x80-\xf4]+")
"""The head of a text. Images have control characters in it, except XBM, XPM, FITS and XV's."""
_DNG_VERSION = 50706
_PHOTOMETRIC = 262
_SUB_IFDS = 330
_OF_SENSOR = (32803, 34892)
"""Photometric interpretations of a sensor's values: a color filter array, and linear raw."""


@functools.cache
def _supported() -> tuple[str, ...]:
    """Return the `FORMATS` that this version of Pillow supports."""
    for plugin in _PLUGINS:  # others would double the time
        if find_spec(f"PIL.{plugin}ImagePlugin"):  # versions of Pillow may lack one
            import_module(f"PIL.{plugin}ImagePlugin")
    return tuple(name for name in FORMATS if name in Image.OPEN)


def identify(file: BinaryIO) -> str | None:
    """Return the name of an image file's format, or None if it is not in `FORMATS` or an extra's.

    Reads only headers, from the start of the file, and leaves the file position undefined.
    """
    file.seek(0)
    head = file.read(_HEAD)
    if extra_of(head):
        return "of an extra"  # an image; opening it raises the errors
    if _TEXT.fullmatch(head):
        return None  # loading all plugins takes 15 ms
    file.seek(0)
    try:
        with quiet():
            return Image.open(file, formats=_supported()).format
    except Image.DecompressionBombError:
        return "too large"  # an image; opening it raises the error
    except OSError as error:  # also of Pillow, without a number
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
    extra = extra_of(file.read(_HEAD))
    file.seek(0)
    if extra:
        decoded: Image.Image = load(_OPEN_EXTRA)(file.read(), extra.opener)
        return decoded
    image = Image.open(file, formats=_supported())
    pixels = image.width * image.height
    if image.format in _SLOW and pixels > _SLOW_PIXELS:
        raise BadImage(
            f"it declares {image.width} x {image.height} pixels, over the limit of {_SLOW_PIXELS} "
            f"for {image.format} images"
        )
    if any(tile[0] == "fits_gzip" for tile in getattr(image, "tile", ())):
        raise BadImage("it is a compressed FITS image, which can unpack to any size")
    return image


def extra_of(head: bytes) -> Extra | None:
    """Return the installed extra that reads a file that starts with ``head``, or None."""
    match = _MAGIC.match(head)
    extra = _EXTRAS.get(match.lastgroup or "") if match else None
    return extra if extra and find_spec(re.split("[.:]", extra.opener)[0]) else None


def refuse_unread(file: BinaryIO) -> None:
    """Refuse a file whose content is an image of a type that shardkit does not read.

    No reader of shardkit knows the file, or it is a TIFF file. The message of BadImage names the
    type and the way out.
    """
    file.seek(0)
    head = file.read(_HEAD)
    match = _MAGIC.match(head)
    name = (match.lastgroup or "") if match else _raw_tiff(file, head)
    if head.startswith(b"version https://git-lfs"):
        raise BadImage("it is a Git LFS pointer", remedy="get the image with `git lfs pull`")
    if not name:
        return
    type_name = ("camera " * name.startswith("raw") + name).replace("_", " ")
    if extra := _EXTRAS.get(name):
        raise UnreadImage(
            f"its format is {type_name}, which needs an extra",
            remedy=f"pip install 'shardkit[{extra.name}]'",
        )
    raise UnreadImage(
        f"its format is {type_name}, which shardkit does not read",
        remedy="convert it to JPEG, PNG or TIFF first",
    )


class UnreadImage(BadImage):
    """The file is an image of a type that shardkit does not read."""


def _raw_tiff(file: BinaryIO, head: bytes) -> str:
    """Return ``raw`` and perhaps a type for a TIFF file with a sensor's values, or ""."""
    if head[:4] not in (b"II*\0", b"MM\0*"):
        return ""
    order = "<" if head[:2] == b"II" else ">"
    try:
        first = dict(_tags(file, order, *struct.unpack(order + "I", head[4:8])))
        if _DNG_VERSION in first:
            return "raw DNG"
        inner = _pointers(file, order, *first.get(_SUB_IFDS, (0, b"")))
        images = [first, *(dict(_tags(file, order, at)) for at in inner)]
    except struct.error:  # truncated: the decoder says so
        return ""
    photometrics = [image[_PHOTOMETRIC][1] for image in images if _PHOTOMETRIC in image]
    sensor = any(struct.unpack(order + "H", value[:2])[0] in _OF_SENSOR for value in photometrics)
    return "raw" if sensor else ""


def _tags(file: BinaryIO, order: str, at: int) -> Iterator[tuple[int, tuple[int, bytes]]]:
    """Yield number, count and the four bytes of value of each tag in a directory."""
    file.seek(at)
    (count,) = struct.unpack(order + "H", file.read(2))
    for number, _, values, value in struct.iter_unpack(order + "HHI4s", file.read(12 * count)):
        yield number, (values, value)


def _pointers(file: BinaryIO, order: str, count: int, value: bytes) -> list[int]:
    """Return the offsets of the first directories that a tag points to."""
    if count > 1:
        file.seek(*struct.unpack(order + "I", value))
        value = file.read(4 * min(count, 8))
    return [at for (at,) in struct.iter_unpack(order + "I", value)]
