"""Decode TIFF files to their own channels and dtype: with Pillow what it knows, else with tifffile.

tifffile runs in a child process: its codecs are C libraries that a damaged file may crash.
"""

from __future__ import annotations

import io
import math
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.codecs.decoder_process import call
from shardkit.codecs.image import loaded, opened
from shardkit.codecs.limits import in_turn_if_large
from shardkit.codecs.tiff_structure import TiffPage, check_tiff_size, tiff_pages
from shardkit.errors import BadImage
from shardkit.system.helper import Library
from shardkit.system.npy import npy_header, read_npy

_KNOWN = {
    "L": ("uint8", 1),
    "LA": ("uint8", 2),
    "RGB": ("uint8", 3),
    "RGBA": ("uint8", 4),
    "I;16": ("uint16", 1),
    "I": ("int32", 1),
    "F": ("float32", 1),
}
"""Dtype and channels of Pillow's modes."""

_CONVERTED = (3, 5)
"""Values of `TiffPage.photometric` that are converted to RGB: palettes and CMYK."""


def decode_tiff(data: bytes | memoryview) -> npt.NDArray[Any] | None:
    """Return the pixels of a TIFF file. Several pages of one size and type become channels.

    Reduced versions of a page and masks, as in pyramids, are not read. The result has the file's
    dtype and shape (height, width, channels). None for one page of a palette, CMYK or 1 bit: Pillow
    makes other channels of these. Raises BadImage if it cannot be decoded, or its pages differ.
    """
    pages = [page for page in tiff_pages(data) if not page.is_secondary]
    if not pages:
        raise BadImage("it contains only reduced versions and masks")
    if len({(page.width, page.height, page.dtype) for page in pages}) > 1:
        raise BadImage(
            f"its {len(pages)} pages differ in size or type", remedy="convert each separately"
        )
    check_tiff_size(pages, len(data))
    if len(pages) == 1 and (pages[0].photometric in _CONVERTED or pages[0].bits == 1):
        return None
    with in_turn_if_large(*pages[0][:2], sum(page.pixel_bytes for page in pages)):
        return _decode_pages(data, pages)


def _decode_pages(data: bytes | memoryview, pages: list[TiffPage]) -> npt.NDArray[Any]:
    """Return the pixels of pages of one size and type."""
    if len(pages) == 1 and _is_known(data, pages[0]):
        with loaded(data, "tiff") as image:
            values = np.asarray(image)
        return values.reshape(image.height, image.width, -1)
    if find_spec("tifffile") is None or find_spec("imagecodecs") is None:
        raise BadImage(
            "Pillow cannot read this kind of TIFF file", remedy="pip install 'shardkit[tiff]'"
        )
    shape = pages[0].height, pages[0].width, sum(page.samples for page in pages)
    size = shape[0] * shape[1] * sum(page.pixel_bytes for page in pages)
    values = read_npy(call(_decode, bytes(data), size, shape))
    if values.shape != shape:
        raise BadImage(f"its pixels have the shape {values.shape}, which it does not declare")
    return values


def _is_known(data: bytes | memoryview, page: TiffPage) -> bool:
    """Return whether Pillow decodes a page to what the file states."""
    if (page.dtype, page.samples) not in _KNOWN.values():
        return False  # it would print that it does not know some of these
    try:
        with opened(data, "tiff") as image:
            return _KNOWN.get(image.mode) == (page.dtype, page.samples)
    except BadImage:
        return False


_tifffile = Library("tifffile")


def _decode(data: bytes, _: int, shape: tuple[int, int, int]) -> bytearray:
    """Return the pixels of a file as an .npy file; called in the child."""
    content = bytearray()
    at = 0
    with _tifffile.TiffFile(io.BytesIO(data)) as file:
        # Bit 0 is a reduced version, bit 2 a mask.
        for page in (page for page in file.pages if not page.subfiletype & 5):
            plane = _with_channels(page.asarray(maxworkers=1), page.axes)
            if not content:
                header = npy_header(shape, plane.dtype.newbyteorder("<"))
                content = bytearray(len(header) + math.prod(shape) * plane.itemsize)
                content[: len(header)] = header
            values = np.ndarray(shape, plane.dtype.newbyteorder("<"), content, len(header))
            values[:, :, at : at + plane.shape[2]] = plane
            at += plane.shape[2]
            del plane  # there is memory for one
    if at != shape[2]:
        raise BadImage(f"it has {at} channels, but declares {shape[2]}")
    return content


def _with_channels(values: npt.NDArray[Any], axes: str) -> npt.NDArray[Any]:
    """Return the pixels of a page in the shape (height, width, channels)."""
    if axes == "YX":
        return values[:, :, None]
    if axes not in ("YXS", "SYX"):
        raise BadImage(f"its pixels have the axes {axes}, but only YX, YXS and SYX are images")
    return values if axes == "YXS" else np.moveaxis(values, 0, 2)
