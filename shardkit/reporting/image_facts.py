"""Facts of single images: what their headers state and what their pixels measure.

A conversion measures the images that it stores by `OBSERVER`; `reporting.facts` those of a dataset.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from shardkit.codecs import libjpeg
from shardkit.codecs.decode_errors import require_memory
from shardkit.codecs.image import Decoding, ImageInfo, inspect
from shardkit.codecs.libjpeg import JpegError
from shardkit.codecs.measures import (
    MEASURES,
    PERCEIVED,
    SHARP_SIDE,
    SIDE,
    WAVES,
    may_be_blurred,
    measure,
    measure_png,
    sharpness,
)
from shardkit.codecs.properties import MOST_FRAMES, Properties, estimated_quality, properties
from shardkit.codecs.structure import plain_png
from shardkit.conversion.observers import Observer
from shardkit.dataset.decode import decode_shown
from shardkit.dataset.located import EncodedImage
from shardkit.errors import BadImage
from shardkit.record import ARRAY_IMAGE
from shardkit.system import compiled

VERSION = 3
"""Increased when measuring changes: facts of other versions are measured again."""

ABSENT_IMAGE = 0
MEASURED = 1
BROKEN = 2

FACT = np.dtype(
    [
        ("checksum", "<u4"),
        ("version", "u1"),
        ("state", "u1"),
        ("orientation", "u1"),
        ("quality", "u1"),
        ("frames", "<u2"),
        ("icc", "u1"),
        ("highlight", "u1"),
        ("mode", "S4"),
        ("content", "<u4"),
        ("pixels", "<u4"),
        *PERCEIVED,
    ]
)
"""Facts of a row. ``checksum`` is that of its record in the index, so facts of other records are
not used. ``state`` is `MEASURED`, `BROKEN` (it cannot be decoded) or `ABSENT_IMAGE`. ``content``
is the CRC-32 of the encoded image; of one that is broken, so is ``pixels``. The others are those of
`shardkit.codecs.properties.Properties` and `shardkit.codecs.measures.MEASURES`."""

Facts = npt.NDArray[Any]

_SHARED = [name for name in FACT.names or () if name in (MEASURES.names or ())]


def measure_images(read: Callable[[int], EncodedImage | None], measures: npt.NDArray[Any]) -> Facts:
    """Return the facts of images, without checksums; all zero where there is no image.

    ``read`` returns the image of a number, from 0, or None. ``measures`` are `MEASURES` for each:
    images that the compiled module has measured keep theirs, and are not read if their headers
    state nothing else.
    """
    headers: dict[int, Properties | ImageInfo] = {}
    absent = []
    for number in np.flatnonzero((measures["plain"] & measures["done"]) == 0).tolist():
        image = read(number)
        if image is None:
            absent.append(number)
        elif header := _measure_image(image, measures[number : number + 1]):
            headers[number] = header
    facts = np.zeros(len(measures), FACT)
    for name in _SHARED:
        facts[name] = measures[name]
    facts["version"], facts["state"] = VERSION, MEASURED
    facts["orientation"] = facts["frames"] = 1
    facts["mode"] = np.where(measures["components"] == 1, b"L", b"RGB")
    facts["quality"] = estimated_quality(measures["quantizers"])
    for number, header in headers.items():
        fact = facts[number]
        fact["orientation"], fact["frames"] = header.orientation, min(header.frames, MOST_FRAMES)
        if isinstance(header, Properties):
            fact["mode"], fact["icc"], fact["quality"] = header.mode, header.icc, header.quality
    broken = np.flatnonzero(measures["done"] == 0)
    facts[broken] = 0
    facts["version"][broken], facts["state"][broken] = VERSION, BROKEN
    facts["content"][broken] = facts["pixels"][broken] = measures["content"][broken]
    facts[absent] = 0
    return facts


def _measure_image(
    image: EncodedImage, measures: npt.NDArray[Any]
) -> Properties | ImageInfo | None:
    """Measure an image; return what the compiled module has not read of its header."""
    _measure_ordinary(image, measures)
    record = measures[0]
    if record["done"] and record["plain"]:
        return None
    try:
        if record["done"]:
            return inspect(bytes(image.data), "jpg")
        # Pillow does not open all typed TIFF files.
        field = ARRAY_IMAGE if not image.pixels.is_rgb and image.field == "tiff" else image.field
        header = properties(image.data, field)
        measures[0] = _decoded(image, header)
        record["done"] = 1
    except BadImage:
        measures[0] = np.zeros((), MEASURES)
        header = None
    record["content"] = compiled.crc32(image.data)
    return header


def _measure_ordinary(image: EncodedImage, measures: npt.NDArray[Any]) -> None:
    """Measure an image with the compiled module, if it can, unless that was done already."""
    if measures["done"][0]:
        return
    size = image.width, image.height
    if image.field == "jpg":
        compiled.measure_jpeg(image.data, size, WAVES, measures)
    elif image.field == "png":
        plain = plain_png(image.data)
        rows = plain.rows() if plain and (plain.width, plain.height) == size else None
        if plain and rows:
            measure_png(plain, rows, measures)
            measures["content"] = compiled.crc32(image.data)


def _decoded(image: EncodedImage, header: Properties) -> Any:
    """Return the measures of an image that Python decodes."""
    pixels = decode_shown(image, Decoding(at_least=(SIDE, SIDE)))
    size = image.width, image.height
    measures = measure(pixels, size)
    reduced = pixels.size < 3 * math.prod(size)
    if reduced and may_be_blurred(len(image.data), size, header.quantizers):
        least = SHARP_SIDE, SHARP_SIDE
        gray = _decode_luma(image.data, least)
        if gray is None:
            pixels = decode_shown(image, Decoding(at_least=least))
            gray = np.asarray(Image.fromarray(pixels).convert("L"))
        measures["sharpness"] = sharpness(gray)
    return measures


def _decode_luma(
    data: bytes | memoryview, at_least: tuple[int, int]
) -> npt.NDArray[np.uint8] | None:
    """Return the luma of a JPEG that libjpeg decodes without a warning; None for others."""
    if not libjpeg.is_available():
        return None
    try:
        return libjpeg.decode_jpeg(data, "GRAY", at_least=at_least)[:, :, 0]
    except JpegError as error:
        require_memory(str(error))
        return None


def _bind(facts: Facts, checksums: npt.NDArray[np.uint32]) -> None:
    facts["checksum"] = np.where(facts["version"], checksums, 0)


OBSERVER = Observer(MEASURES, WAVES, FACT, measure_images, _bind)
