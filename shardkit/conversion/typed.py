"""Decide the channels and dtype of the images of a conversion, before it starts."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from shardkit.codecs.image_type import GRAY, RGB, ImageType
from shardkit.codecs.typed import inspect_typed
from shardkit.contracts import Images, Scan
from shardkit.errors import BadImage, UsageError
from shardkit.kinds.field import Field, Schema
from shardkit.recipe import Recipe, seems_moved
from shardkit.record import ARRAY_IMAGE, FOREIGN_FIELD, IMAGE, Record, image_field, image_kind

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
    kinds = dict.fromkeys(images, GRAY) if recipe.pixels == "gray" else _kinds(images, sources)
    if missing := [name for name in images if name not in kinds]:
        raise UsageError(
            f"pixels='keep' takes channels and dtype from the first {missing[0]}, and none of the "
            f"first {_TRIES} records of {scan.source} has one"
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


def _kinds(images: Schema, sources: Iterable[Images]) -> dict[str, ImageType]:
    """Return the type of each image: that of the schema, or of the first record that has it.

    Bad images are reported when their shards are built.

    Raises:
        UsageError: If an image has no type because records cannot be read.
    """
    kinds = {name: field.pixels for name, field in images.items() if field.pixels is not None}
    rows = ((source, row) for source in sources for row in range(len(source)))
    reasons: list[str] = []
    for source, row in itertools.islice(rows, _TRIES):
        if len(kinds) == len(images):
            return kinds
        with _bad_images(reasons, source, row):
            (record,) = source.read([row])
            for name in images.keys() - kinds.keys():
                with _bad_images(reasons, source, row):
                    _take_kind(kinds, name, record)
    if reasons and len(kinds) < len(images):
        raise UsageError(f"pixels='keep' finds no image that can be read: {reasons[0]}")
    return kinds


@contextmanager
def _bad_images(reasons: list[str], source: Images, row: int) -> Iterator[None]:
    """Return a context that notes why an image is bad."""
    try:
        yield
    except BadImage as error:
        reasons.append(f"{source.source.locate(source.split, source.entries[row])}: {error}")


def _take_kind(kinds: dict[str, ImageType], name: str, record: Record) -> None:
    """Add the type of a record's image, if it has one."""
    stored = image_field(record.fields, name) or (FOREIGN_FIELD if name == IMAGE else "")
    if stored not in record.fields:
        return
    info, kinds[name] = inspect_typed(record.fields[stored], image_kind(stored))
    is_array = image_kind(stored) == ARRAY_IMAGE
    if is_array and (moved := seems_moved(info.height, info.width, kinds[name].channels)):
        warnings.warn(f"{name} has {moved}", stacklevel=9)
