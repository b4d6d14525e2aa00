"""Encoded images as records: what every source does with the bytes of an image file.

Arrays of pixels become PNG files before the recipe sees them. It is lossless, and all options,
checks and comparisons work on encoded images. The cost: one PNG more for ``--encode raw``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from io import BytesIO

import numpy as np
import numpy.typing as npt

from shardkit.codecs.image import encode, image_field_of, sniff
from shardkit.codecs.limits import MAX_PIXELS
from shardkit.contracts import Entry
from shardkit.errors import BadImage
from shardkit.record import LABEL_FIELD, META_FIELD, NO_LABEL, Record, dump_json

_READ = "jpg jpeg jpe jfif png webp bmp gif tif tiff ppm pgm pbm pnm avif jp2 j2k tga dds psd qoi"
_UNREAD = (
    "heic heif hif jxl jxr exr svg dcm dicom "
    "dng cr2 cr3 crw nef nrw arw sr2 srf orf rw2 raf pef srw 3fr x3f"
)
IMAGE_SUFFIXES = frozenset(f".{name}" for name in f"{_READ} {_UNREAD}".split())
"""Suffixes of image files, also of types that are not read. Such a file is an error if its content
is not an image that is read. A file with another suffix is an image if its content is one;
otherwise it is left out and reported."""


AS_ARRAYS = (
    "store them unchanged: `shardkit convert npy --arrays`, or in Python "
    "convert(samples, schema={'x': 'array'}, ...)"
)
"""Remedy for arrays that are not images."""


def has_image_suffix(name: str) -> bool:
    """Return whether a name ends with the suffix of an image, or is one: ``a.JPG``, ``jpg``."""
    return f".{name.rpartition('.')[2].lower()}" in IMAGE_SUFFIXES


def image_record(entry: Entry, data: bytes) -> Record:
    """Return the record of an encoded image, with its label and path.

    Raises:
        BadImage: If ``data`` is not an image.
    """
    meta = b'{"path":%b}' % dump_json(entry.path)  # the encoder is slow to start for an object
    fields = {image_field_of(BytesIO(data)): data, META_FIELD: meta}
    if entry.label != NO_LABEL:
        fields[LABEL_FIELD] = b"%d" % entry.label
    return Record(entry.key, fields)


def is_image(head: bytes) -> bool:
    """Return whether a file that starts with ``head`` may be an image, without looking further."""
    return sniff(head) is not None


def image_axes(dtype: npt.DTypeLike, shape: Sequence[int]) -> str:
    """Return the order of the axes of an array that is an image: ``HW``, ``HWC`` or ``CHW``.

    It raises BadImage if it is not uint8, or does not have 1, 3 or 4 channels.
    """
    if np.dtype(dtype) != np.uint8:
        raise BadImage(
            f"its values are {np.dtype(dtype)}, not uint8",
            remedy=f"convert them, such as with (255 * x).round().astype('uint8'), or {AS_ARRAYS}",
        )
    sides = "x".join(map(str, shape))
    if 0 in shape:
        raise BadImage(f"it has no pixels: {sides}")
    if len(shape) == 2:
        return "HW"
    if len(shape) == 3 and shape[2] in (1, 3, 4):
        return "HWC"
    if len(shape) == 3 and shape[0] in (1, 3):
        return "CHW"
    raise BadImage(f"its shape is not that of an image with 1, 3 or 4 channels: {sides or 'none'}")


def require_pixels(shape: Sequence[int]) -> None:
    """Raise BadImage for arrays of images over `MAX_PIXELS` by their shape, before one is read."""
    axes = image_axes(np.uint8, shape)
    count = math.prod(side for axis, side in zip(axes, shape, strict=True) if axis != "C")
    if count > MAX_PIXELS:
        sides = "x".join(map(str, shape))
        raise BadImage(f"its shape is {sides}, over the limit of {MAX_PIXELS:,} pixels")


def pixel_record(entry: Entry, pixels: npt.NDArray[np.uint8]) -> Record:
    """Return the record of decoded pixels, losslessly encoded as a PNG file.

    Their shape is (height, width), or (height, width, channels) with 1, 3 or 4 channels; BadImage
    if PNG does not support an image of this size.
    """
    return image_record(entry, encode(pixels if pixels.ndim == 3 else pixels[..., None], "png"))


def raw_record(entry: Entry, data: bytes, height: int, width: int) -> Record:
    """Return the record of an attached file's pixels, uint8 in the order height, width, channel."""
    meta = {"path": entry.path, "width": width, "height": height}
    fields = {"raw": data, META_FIELD: dump_json(meta)}
    if entry.label != NO_LABEL:
        fields[LABEL_FIELD] = b"%d" % entry.label
    return Record(entry.key, fields)
