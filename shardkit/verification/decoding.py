"""Whether stored images, masks and arrays can be decoded completely."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardkit.codecs.image import coding_of, decode_mask
from shardkit.codecs.libjpeg import jpeg_loss
from shardkit.dataset.decode import decode_stored
from shardkit.dataset.located import EncodedImage
from shardkit.errors import BadImage
from shardkit.kinds.field import Field, Schema
from shardkit.record import ABSENT, IMAGE, NO_LABEL, STORED_KINDS, Record, image_kind

RawShape = tuple[int, int, int] | None
"""The manifest's ``raw_shape``: height, width and channels of raw pixels."""


def decoding_fault(record: Record, schema: Schema, raw_shape: RawShape) -> str:
    """Return why an image or array of a record cannot be decoded completely, or ""."""
    for name, field in schema.items():
        stored = field.type.stored_in(record.fields, name)
        if stored is None:
            continue
        meta = record.meta if name == IMAGE else record.meta.get(name, {})
        fault = _value_fault(record.fields[stored], stored, field, meta, raw_shape)
        if fault:
            return fault if name == IMAGE else f"{name}: {fault}"
    return ""


def range_fault(data: bytes, entry: Any, field: Field, raw_shape: RawShape) -> str:
    """Return why the bytes at an entry of the index cannot be decoded completely, or ""."""
    kind = STORED_KINDS[entry["field"]]
    if kind == ABSENT:
        return ""
    size = {"width": entry["width"], "height": entry["height"]}
    return _value_fault(data, kind, field, size, raw_shape)


def _value_fault(
    data: bytes, stored: str, field: Field, meta: Mapping[str, Any], raw_shape: RawShape
) -> str:
    if field.type.is_picture:
        return _image_fault(data, stored, field, meta, raw_shape)
    return field.type.fault(field, data) if field.type.stored_apart else ""


def _image_fault(
    data: bytes, stored: str, field: Field, meta: Mapping[str, Any], raw_shape: RawShape
) -> str:
    kind = image_kind(stored)
    width = int(meta["width"])
    height = int(meta["height"])
    if kind == "raw" and (height, width) != (raw_shape or ())[:2]:
        return "its shape differs from the manifest's raw_shape"
    warnings = list[str]()
    try:
        if field.type.follows:
            shape = decode_mask(data, kind).shape
            return "" if shape[:2] == (height, width) else f"its mask has the shape {shape}"
        image = EncodedImage(data, kind, NO_LABEL, width, height, field.image_type)
        decode_stored(image, warnings=warnings)
        if coding := coding_of(kind):
            coding.check(data)
    except BadImage as error:
        return str(error)
    if warnings and "damaged" not in meta:
        loss = jpeg_loss(data, warnings[0])
        return loss and f"it is damaged: {loss}"
    return ""
