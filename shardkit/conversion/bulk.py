"""Read many ordinary image files in one call of the compiled module.

It reads and checks files that are stored unchanged: plain PNGs, and JPEGs, whose EXIF data Python
reads. All others, and everything that is wrong with a file, are left to source and recipe.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.codecs.measures import WAVES, measure_png
from shardkit.codecs.structure import PlainPng
from shardkit.contracts import Entry, Images
from shardkit.conversion.recipe import Recipe
from shardkit.dataset.facts import crc32
from shardkit.errors import BadImage
from shardkit.record import IMAGE_FIELDS, LABEL_FIELD, META_FIELD, NO_LABEL, Record, dump_json
from shardkit.system import native

Prepared = tuple[Record, Mapping[str, int]]
"""A record to store, and the notes on its image."""


def read_ordinary(
    source: Images, recipe: Recipe, measures: npt.NDArray[Any] | None = None
) -> list[Prepared | None]:
    """Return the records of the images to store, or None for each that is left.

    A record equals the result of `Recipe.apply_with_notes` for the record that the source reads.

    Args:
        source: The images.
        recipe: The recipe.
        measures: Receives the `MEASURES` of images that are decoded.
    """
    try:
        return _read_ordinary(source, recipe, measures)
    except MemoryError:  # one by one, they need less
        return [None] * len(source)


def _read_ordinary(
    source: Images, recipe: Recipe, measures: npt.NDArray[Any] | None
) -> list[Prepared | None]:
    compiled = native.module()
    files = source.files() if compiled is not None and recipe.keeps_bytes else None
    if compiled is None or files is None:
        return [None] * len(source)
    entries = source.entries
    count, decode = len(source), recipe.check == "decode"
    images, codes = np.zeros(count, _IMAGE), np.zeros(count, np.uint8)
    contents = compiled.read_images(
        files,
        np.fromiter((entry.bytes for entry in entries), np.int64, count),
        np.fromiter((entry.stamp for entry in entries), np.int64, count),
        decode,
        images.view(np.uint8),
        codes,
        None if measures is None else WAVES,
        bytearray() if measures is None else measures.view(np.uint8),
    )
    return [
        None if content is None else _prepared(_Inspected(entry, content, image, code, own), recipe)
        for entry, content, image, code, own in zip(
            entries,
            contents,
            map(_Image._make, images.tolist()),
            codes.tolist(),
            [None if measures is None else measures[row : row + 1] for row in range(count)],
            strict=True,
        )
    ]


class _Image(NamedTuple):
    """What the module states about an image: ``sk_image`` in ``native/convert.h``."""

    width: int
    height: int
    kind: int
    """Position in `IMAGE_FIELDS`."""
    whole: int
    """Whether it certainly decodes."""
    channels: int
    """Of a PNG, whose packed pixels are one range: offset and size, or 0."""
    packed: int
    packed_size: int


class _Inspected(NamedTuple):
    """A file that the module has read."""

    entry: Entry
    content: bytes
    image: _Image
    code: int
    """0 if all is known about it."""
    measures: npt.NDArray[Any] | None
    """Receives its measures."""


def _decodes(found: _Inspected) -> bool:
    """Return whether an image certainly decodes; measure it if it does."""
    content, image, measures = found.content, found.image, found.measures
    if IMAGE_FIELDS[image.kind] == "png" and image.packed_size:
        packed = content[image.packed : image.packed + image.packed_size]
        plain = PlainPng(image.width, image.height, image.channels, packed)
        rows = plain.rows()
        if rows is not None and measures is not None:
            measure_png(plain, rows, measures)
            measures["content"] = crc32(content)
        return rows is not None
    return bool(image.whole)


def _prepared(found: _Inspected, recipe: Recipe) -> Prepared | None:
    """Return the record of an image that is stored unchanged, or None if it is left."""
    image, path = found.image, dump_json(found.entry.path)
    if found.code and image.whole:  # Python reads its EXIF data
        record = _record(found, b'{"path":%b}' % path)
        with contextlib.suppress(BadImage):
            return recipe.apply_with_notes(record, proven=True)
    if found.code or (recipe.check == "decode" and not _decodes(found)):
        return None
    meta = b'{"height":%d,"path":%b,"width":%d}' % (image.height, path, image.width)
    return _record(found, meta), _NO_NOTES


def _record(found: _Inspected, meta: bytes) -> Record:
    fields = {META_FIELD: meta}
    if found.entry.label != NO_LABEL:
        fields[LABEL_FIELD] = b"%d" % found.entry.label
    fields[IMAGE_FIELDS[found.image.kind]] = found.content
    return Record(found.entry.key, fields)


_NO_NOTES: Mapping[str, int] = {}

_IMAGE = np.dtype(
    list(zip(_Image._fields, ("<u4", "<u4", "u1", "u1", "<u2", "<u4", "<u4"), strict=True))
)
