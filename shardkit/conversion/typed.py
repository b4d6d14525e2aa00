"""Plan images of other channels or dtypes than RGB of 8 bits: decide those of each image."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from shardkit.codecs.image_type import GRAY, RGB, ImageType
from shardkit.codecs.typed import describe_moved, inspect_typed
from shardkit.contracts import Images, Scan
from shardkit.errors import BadImage, UsageError, setting
from shardkit.kinds.field import Field, Schema
from shardkit.recipe import Recipe
from shardkit.record import (
    ARRAY_IMAGE,
    FOREIGN_FIELD,
    IMAGE,
    Record,
    image_field,
    image_kind,
    is_raw,
)

_TRIES = 1000
"""Records to read at most, until one has each image."""


def plan_typed(scan: Scan, recipe: Recipe, sources: Iterable[Images]) -> tuple[Scan, Recipe]:
    """Return a scan whose schema states channels and dtype of each image, and its recipe.

    ``sources`` are the images of each split in the order of rows; the first one decides. UsageError
    if none can be read, or the encoding does not hold them.
    """
    images = {
        name: field
        for name, field in scan.schema.items()
        if field.type.is_picture and not field.type.follows
    }
    kinds = dict.fromkeys(images, GRAY) if recipe.pixels == "gray" else _kinds(images, sources)
    if missing := [name for name in images if name not in kinds]:
        raise UsageError(
            f"{setting('pixels', 'keep')} takes channels and dtype from the first {missing[0]}, "
            f"but none of the first {_TRIES} records of {scan.source} has one"
        )
    fields = {name: Field("image", kind.dtype, (kind.channels,)) for name, kind in kinds.items()}
    words = {name: str(field) for name, field in fields.items()}
    for name, kind in kinds.items():
        if recipe.encode == "png" and not kind.is_held_by("png"):
            raise UsageError(
                f"{setting('encode', 'png')} stores uint8 and uint16 images with 1 to 4 channels, "
                f"but {name} is {kind}",
                remedy=f"use {setting('encode', 'keep')} or 'raw'",
            )
    scan = replace(scan, fields={**scan.schema, **fields}, understood={**scan.understood, **words})
    return scan, replace(recipe, channels=kinds.get(IMAGE, RGB).channels)


def with_types(scan: Scan, schema: Schema) -> Scan:
    """Return a scan whose images have the types of a dataset, to which they are appended."""
    typed_fields = {
        name: schema[name]
        for name, field in scan.schema.items()
        if name in schema and field == Field("image") and schema[name].pixels is not None
    }
    return replace(scan, fields={**scan.schema, **typed_fields}) if typed_fields else scan


def _kinds(images: Schema, sources: Iterable[Images]) -> dict[str, ImageType]:
    """Return the type of each image: that of the schema, or of the first record that has it.

    Bad images are reported when their shards are built.
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
        raise UsageError(f"{setting('pixels', 'keep')} found no readable image: {reasons[0]}")
    return kinds


@contextmanager
def _bad_images(reasons: list[str], source: Images, row: int) -> Iterator[None]:
    """Return a context that notes why an image is bad."""
    try:
        yield
    except BadImage as error:
        reasons.append(f"{source.source.locate(source.split, source.entries[row])}: {error.stated}")


def _take_kind(kinds: dict[str, ImageType], name: str, record: Record) -> None:
    """Add the type of a record's image, if it has one."""
    stored = image_field(record.fields, name) or (FOREIGN_FIELD if name == IMAGE else "")
    if stored not in record.fields:
        return
    if is_raw(stored):  # without a type in the schema, which would have been taken first
        kinds[name] = RGB
        return
    info = inspect_typed(record.fields[stored], image_kind(stored))
    kinds[name] = info.pixels
    if image_kind(stored) == ARRAY_IMAGE and (moved := describe_moved(info)):
        warnings.warn(f"{name} has {moved}", stacklevel=9)
