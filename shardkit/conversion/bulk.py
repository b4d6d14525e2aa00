"""Read many ordinary image files in one call of the compiled module.

It reads and checks files that are stored unchanged: PNGs and JPEGs, whose EXIF data Python reads.
All others, and everything that is wrong with a file, are left to source and recipe.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from shardkit.codecs.structure import PlainPng
from shardkit.contracts import Images, as_packed
from shardkit.errors import BadImage
from shardkit.pipeline import convert_record
from shardkit.recipe import Recipe
from shardkit.record import IMAGE_FIELDS, LABEL_FIELD, META_FIELD, NO_LABEL, Record, dump_json
from shardkit.system import compiled
from shardkit.system.compiled import FileHeader, Measures, Waves

Prepared = tuple[Record, Mapping[str, int]]
"""A record to store, and the notes on its image."""


def read_ordinary(
    source: Images, recipe: Recipe, measuring: tuple[Measures, Waves] | None = None
) -> list[Prepared | None]:
    """Return the records of the images to store, or None for each that is left.

    A record equals the result of `convert_record` for the record that the source reads.
    ``measuring`` receives the measures of decoded images, by its waves.
    """
    is_plain = recipe.keeps_bytes and recipe.pixels == "rgb"
    paths = source.files() if is_plain else None
    if paths is None:
        return [None] * len(source)
    entries = as_packed(source.entries)
    sizes, mtimes = (np.array(entries.numbers(name)) for name in ("bytes", "stamp"))
    decode = recipe.check == "decode"
    files = compiled.read_images(paths, (sizes, mtimes), decode=decode, measuring=measuring)
    if files is None:
        return [None] * len(source)
    names = entries.keys(), map(dump_json, entries.paths()), entries.numbers("label")
    return [
        _prepared(_Inspected(key, path, label, content, header, code), recipe) if content else None
        for key, path, label, content, header, code in zip(*names, *files, strict=True)
    ]


class _Inspected(NamedTuple):
    """A file that the module has read."""

    key: str
    path: bytes
    """As JSON."""
    label: int
    content: bytes
    header: FileHeader
    code: int
    """0 if all is known about it."""


def _decodes(inspected: _Inspected) -> bool:
    """Return whether an image certainly decodes: a PNG, if the module lacks libdeflate."""
    image = inspected.header
    if not image.packed_size:
        return False
    packed = inspected.content[image.packed : image.packed + image.packed_size]
    return PlainPng(image.width, image.height, image.channels, packed).is_whole()


def _prepared(inspected: _Inspected, recipe: Recipe) -> Prepared | None:
    """Return the record of an image that is stored unchanged, or None if it is left."""
    image = inspected.header
    path = inspected.path
    if inspected.code and image.decodes:  # Python reads its EXIF data
        record = _record(inspected, b'{"path":%b}' % path)
        with contextlib.suppress(BadImage):
            return convert_record(recipe, record, proven=True)
    if inspected.code or (recipe.check == "decode" and not (image.decodes or _decodes(inspected))):
        return None
    meta = b'{"height":%d,"path":%b,"width":%d}' % (image.height, path, image.width)
    return _record(inspected, meta), _NO_NOTES


def _record(inspected: _Inspected, meta: bytes) -> Record:
    fields = {META_FIELD: meta}
    if inspected.label != NO_LABEL:
        fields[LABEL_FIELD] = b"%d" % inspected.label
    fields[IMAGE_FIELDS[inspected.header.kind]] = inspected.content
    return Record(inspected.key, fields)


_NO_NOTES: Mapping[str, int] = {}
