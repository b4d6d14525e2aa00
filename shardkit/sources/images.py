"""Encoded images as records, and reads of whole files that notice changes since the scan.

Arrays of pixels become PNG files before the recipe sees them. It is lossless, and all options,
checks and comparisons work on encoded images. The cost: one PNG more for ``--encode raw``.
"""

from __future__ import annotations

import errno
import math
import os
import stat
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.codecs.image import encode, image_field_of, sniff
from shardkit.codecs.limits import MAX_PIXELS
from shardkit.contracts import Entry
from shardkit.errors import CHANGED, BadImage, ConversionFailed
from shardkit.record import LABEL_FIELD, META_FIELD, NO_LABEL, Record, dump_json, path_meta
from shardkit.system.files import split_text_path

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

_LARGE = 1 << 20
"""Size in bytes above which a file's header is checked before the rest is read."""

_OF_A_FILE = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ENXIO, errno.EIO),
    *(errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ, errno.EBADMSG),
    getattr(errno, "EUCLEAN", errno.EIO),
}
"""Errors of reads that may concern a single file, such as a bad sector. Others, such as a server
that does not answer or too many open files, concern all, and no image may be left out for them."""


def has_image_suffix(name: str) -> bool:
    """Return whether a name ends with the suffix of an image, or is one: ``a.JPG``, ``jpg``."""
    return f".{name.rpartition('.')[2].lower()}" in IMAGE_SUFFIXES


def image_record(entry: Entry, data: bytes) -> Record:
    """Return the record of an encoded image, with its label and path.

    Raises:
        BadImage: If ``data`` is not an image.
    """
    return Record(entry.key, {image_field_of(BytesIO(data)): data, **described(entry)})


def described(entry: Entry) -> dict[str, bytes]:
    """Return path and label of an image, as its record has them."""
    fields = {META_FIELD: path_meta(entry.path)}
    if entry.label != NO_LABEL:
        fields[LABEL_FIELD] = b"%d" % entry.label
    return fields


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
            remedy="convert them, for example with (255 * x).round().astype('uint8'), or "
            f"{AS_ARRAYS}",
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
    raise BadImage(f"its shape, {sides or 'none'}, is not that of an image with 1, 3 or 4 channels")


def require_pixels(shape: Sequence[int]) -> None:
    """Raise BadImage for arrays of images over `MAX_PIXELS` by their shape, before one is read."""
    axes = image_axes(np.uint8, shape)
    count = math.prod(side for axis, side in zip(axes, shape, strict=True) if axis != "C")
    if count > MAX_PIXELS:
        sides = "x".join(map(str, shape))
        raise BadImage(f"its shape is {sides}, over the limit of {MAX_PIXELS:,} pixels")


def as_pixels(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return pixels in the order height, width, channel; BadImage as for `image_axes`."""
    axes = image_axes(array.dtype, array.shape)
    return np.ascontiguousarray(array.transpose(1, 2, 0) if axes == "CHW" else array)


def pixel_record(entry: Entry, pixels: npt.NDArray[np.uint8]) -> Record:
    """Return the record of decoded pixels, losslessly encoded as a PNG file.

    Their shape is (height, width), or (height, width, channels) with 1, 3 or 4 channels; BadImage
    if PNG does not support an image of this size.
    """
    return image_record(entry, encode(pixels if pixels.ndim == 3 else pixels[..., None], "png"))


def raw_record(entry: Entry, data: bytes, height: int, width: int) -> Record:
    """Return the record of an attached file's pixels, uint8 in the order height, width, channel."""
    meta = {"path": entry.path, "width": width, "height": height}
    return Record(entry.key, {"raw": data, **described(entry), META_FIELD: dump_json(meta)})


def require_inside(*names: str) -> None:
    """Raise BadImage for an entry's name that leads out of its source: a plan may be anybody's."""
    try:
        split_text_path("/".join(names))
    except ValueError as error:
        raise BadImage("its name is not a plain path inside the source") from error


def read_file(path: str, size: int, stamp: int, *, image: bool = True) -> bytes:
    """Return the content of a file whose size and modification time are those of the scan.

    ``stamp`` is in nanoseconds. If ``image``, the content must be an image. It raises `BadImage` if
    the file has changed or cannot be read; `ConversionFailed` if its folder is gone, too: then the
    source is not mounted, or was moved.
    """
    try:
        # Creating a file object would take as long as reading.
        descriptor = open_at_once(path, os.O_RDONLY)
        try:
            status = os.fstat(descriptor)
            # A plan may state any size: never reserve more memory than the file has bytes.
            expected = min(size, status.st_size)
            data = _content(descriptor, expected, image) if stat.S_ISREG(status.st_mode) else b""
        finally:
            os.close(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    except OSError as error:
        require_machine(error, path)
        folder = os.path.dirname(path)
        if error.errno in (errno.ENOENT, errno.ENOTDIR) and _is_gone(folder):
            raise ConversionFailed(
                f"{folder} is missing or empty, but contained images when they were listed. Mount "
                "or restore it, then rerun"
            ) from error
        raise BadImage(f"it cannot be read: {error.strerror or error}") from error
    if status.st_mtime_ns != stamp or len(data) != size:
        raise BadImage(CHANGED)
    return data


def _is_gone(folder: str) -> bool:
    """Return whether a folder does not exist, or is empty, as a mount point without its disk."""
    try:
        with os.scandir(folder or ".") as entries:
            return next(entries, None) is None
    except OSError:
        return True


def _content(descriptor: int, expected: int, image: bool) -> bytes:
    """Return the content of a file, or one byte more than expected if it has grown."""
    if image and expected > _LARGE:
        with open(descriptor, "rb", closefd=False) as file:
            image_field_of(file)  # raises before so much is read
        os.lseek(descriptor, 0, os.SEEK_SET)
    data = os.read(descriptor, expected + 1)
    while len(data) < expected and (more := os.read(descriptor, expected + 1 - len(data))):
        data += more
    return data


def open_at_once(path: str, flags: int) -> int:
    """Open a file; if it is a pipe, do not wait for the other end."""
    return os.open(path, flags | os.O_NONBLOCK)


def require_machine(error: OSError, path: str) -> None:
    """Raise the error of a read unless this file alone is the cause: others would fail too."""
    if error.errno == errno.ENOMEM:
        raise MemoryError(f"{path}: {error.strerror}") from error
    if error.errno is not None and error.errno not in _OF_A_FILE:
        raise OSError(error.errno, error.strerror, path) from error
