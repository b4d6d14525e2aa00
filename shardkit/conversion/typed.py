"""Decide the channels and dtype of the images of a conversion, before it starts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from shardkit.codecs.image_type import GRAY, RGB, ImageType
from shardkit.codecs.typed import inspect_typed
from shardkit.contracts import Images, Scan
from shardkit.errors import BadImage, UsageError
from shardkit.kinds.field import Field, Schema
from shardkit.recipe import Recipe
from shardkit.record import FOREIGN_FIELD, IMAGE, Record, image_field, image_kind

_TRIES = 1000
"""Records to read at most, until one has each image."""


def typed_scan(scan: Scan, recipe: Recipe, sources: Iterable[Images]) -> Scan:
    """Return a scan whose schema states channels and dtype of each image, if the recipe types them.

    Args:
        scan: The scan.
        recipe: The recipe.
        sources: The images of each split in the order of rows; the first one decides.

    Raises:
        UsageError: If no image can be read to take them from, or a dataset of typed images would
            become RGB.
    """
    images = {
        name: field
        for name, field in scan.schema.items()
        if field.type.is_picture and not field.type.follows
    }
    typed = [name for name, field in images.items() if field.pixels is not None]
    if recipe.pixels == "rgb":
        if typed and not recipe.copy:
            raise UsageError(
                f"{scan.source} has images of {images[typed[0]].pixels}: give pixels='keep', or "
                "pixels='gray', to change them"
            )
        return scan
    if recipe.pixels == "gray":
        kinds = dict.fromkeys(images, GRAY)
    else:
        kinds = _kinds(images, itertools.islice(_records(sources), _TRIES))
    if missing := [name for name in images if name not in kinds]:
        raise UsageError(
            f"pixels='keep' takes channels and dtype from the first {missing[0]}, and none of the "
            f"first {_TRIES} records has one that can be read: repair {scan.source}"
        )
    fields = {name: Field("image", kind.dtype, (kind.channels,)) for name, kind in kinds.items()}
    words = {name: str(field) for name, field in fields.items()}
    return replace(scan, fields={**scan.schema, **fields}, understood={**scan.understood, **words})


def typed_recipe(recipe: Recipe, schema: Schema) -> Recipe:
    """Return a recipe that knows the channels of the primary image.

    Raises:
        UsageError: If its encoding does not hold the images.
    """
    for name, field in schema.items():
        kind = field.pixels
        if kind is not None and recipe.encode == "png" and not kind.is_held_by("png"):
            raise UsageError(
                f"encode='png' holds uint8 and uint16 of 1 to 4 channels, and {name} is of {kind}: "
                "use encode='keep' or 'raw'"
            )
    primary = schema[IMAGE].pixels if IMAGE in schema else None
    return replace(recipe, channels=(primary or RGB).channels)


def with_types(scan: Scan, schema: Schema) -> Scan:
    """Return a scan whose images have the types of a dataset, to which they are appended."""
    stated = {
        name: schema[name]
        for name, field in scan.schema.items()
        if name in schema and field == Field("image") and schema[name].pixels is not None
    }
    return replace(scan, fields={**scan.schema, **stated}) if stated else scan


def _kinds(images: Schema, records: Iterable[Record]) -> dict[str, ImageType]:
    """Return the type of each image: that of the schema, or of the first record that has it."""
    kinds = {name: field.pixels for name, field in images.items() if field.pixels is not None}
    if len(kinds) == len(images):
        return kinds
    for record in records:
        for name in images.keys() - kinds.keys():
            other = FOREIGN_FIELD if name == IMAGE else ""
            stored = image_field(record.fields, name) or other
            if stored in record.fields:
                with suppress(BadImage):  # reported when its shard is built
                    kinds[name] = inspect_typed(record.fields[stored], image_kind(stored))[1]
        if len(kinds) == len(images):
            break
    return kinds


def _records(sources: Iterable[Images]) -> Iterator[Record]:
    """Yield the records of all splits in order, without those that cannot be read."""
    for images in sources:
        for row in range(len(images)):
            with suppress(BadImage):
                yield from images.read([row])
